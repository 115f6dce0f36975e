# SPDX-License-Identifier: Apache-2.0
"""The result form of the benchmarks: what is met, what the file holds, what is refused."""

from __future__ import annotations

import io
import json
import math
import os

import jsonschema
import numpy as np
import pytest
from rich.console import Console
from rigfit.bench.report import SCHEMA, BenchmarkResult, Figure, describe_machine, finish, installed_versions
from rigfit.errors import UserError


def _result(*figures: Figure) -> BenchmarkResult:
    return BenchmarkResult.measured(
        "recovery", figures, settings={"count": 3, "seed": 7}, versions={"blender": "5.0.1"}
    )


def _check(data: object) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(data)


@pytest.mark.parametrize(
    ("value", "target", "better", "met"),
    [
        (1.0, 2.0, "lower", True),
        (2.0, 2.0, "lower", True),
        (2.1, 2.0, "lower", False),
        (2.1, 2.0, "higher", True),
        (2.0, 2.0, "higher", True),
        (1.9, 2.0, "higher", False),
        (0.0, 0.0, "lower", True),
        (math.nan, 2.0, "lower", False),
        (math.inf, 2.0, "higher", False),
        (1.0, None, "lower", None),
    ],
)
def test_met(value, target, better, met):
    assert Figure("error", value, "mm", None, target, better).met is met


def test_file_follows_the_schema_and_holds_what_was_measured(tmp_path):
    path = tmp_path / "new" / "recovery.json"
    result = _result(
        Figure("error", 1.25, "mm", (1.0, 1.5), 2.0, "lower"),
        Figure("error, fit / neutral face", 0.7, "ratio", None, 0.65, "lower"),
        Figure("speed", math.nan, "photos/s", None, 3.0, "higher", spread_is="range"),
    )
    result.write(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    _check(data)
    assert [figure["met"] for figure in data["figures"]] == [True, False, False]
    assert data["figures"][0]["spread"] == [1.0, 1.5]
    assert data["figures"][0]["spread_is"] == "quartiles"
    assert data["figures"][1]["peer"] == "neutral face"
    assert data["figures"][2]["value"] is None
    assert data["benchmark"] == "recovery"
    assert data["settings"] == {"count": 3, "seed": 7}
    assert data["versions"]["blender"] == "5.0.1"
    assert data["versions"]["rigfit"]
    assert os.listdir(path.parent) == ["recovery.json"]  # no temporary file is left


@pytest.mark.parametrize(
    "broken",
    [
        {"schema": "rigfit.benchmark/2"},
        {"date": "yesterday"},
        {"figures": []},
        {"machine": {"cores": 2}},
        {"more": 1},
    ],
)
def test_schema_refuses_another_form(broken):
    data = _result(Figure("error", 1.0, "mm")).to_json() | broken
    with pytest.raises(jsonschema.ValidationError):
        _check(data)


@pytest.mark.parametrize(
    "change",
    [{"unit": "ratio"}, {"better": "more"}, {"met": True}, {"target": 1.0}, {"spread": [1.0]}, {"spread": [1.0, 2.0]}],
)
def test_schema_refuses_a_figure_that_does_not_say_enough(change):
    data = _result(Figure("error", 1.0, "mm")).to_json()
    data["figures"][0].update(change)
    with pytest.raises(jsonschema.ValidationError):
        _check(data)


@pytest.mark.parametrize(
    "arguments",
    [
        ("speed", 2.0, "ratio"),
        ("", 2.0, "mm"),
        ("error", 2.0, "mm", None, math.nan),
        ("error", 2.0, "mm", (3.0, 1.0)),
        ("error", 2.0, "mm", None, 1.0, "smaller"),
    ],
)
def test_a_figure_that_cannot_be_read_is_refused(arguments):
    with pytest.raises(ValueError, match=r"peer|name|target|spread|better"):
        Figure(*arguments)


def test_a_benchmark_without_figures_or_with_two_of_one_name_is_refused():
    with pytest.raises(ValueError, match="its own name"):
        _result()
    with pytest.raises(ValueError, match="its own name"):
        _result(Figure("error", 1.0, "mm"), Figure("error", 2.0, "mm"))


def test_finish_shows_writes_and_checks(tmp_path):
    screen = io.StringIO()
    console = Console(file=screen, width=110)
    good = _result(Figure("error", 1.25, "mm", (1.0, 1.5), 2.0, "lower"))
    bad = _result(
        Figure("error", 3.25, "mm", None, 2.0, "lower"), Figure("a / peer", 2.0, "ratio", None, 1.5, "higher")
    )
    assert good.finish(console, out=tmp_path / "good.json", check=True) == 0
    assert bad.finish(console, check=False) == 0
    assert "missed: error: 3.25 mm, target ≤2" in screen.getvalue()
    assert "1…1.5" in screen.getvalue()
    assert "× peer" in screen.getvalue()
    assert bad.finish(console, out=tmp_path / "bad.json", check=True) == 1
    assert json.loads((tmp_path / "bad.json").read_text())["figures"][0]["met"] is False  # written all the same


def test_the_own_table_is_shown_and_the_details_are_stored(tmp_path):
    screen = io.StringIO()
    rows = [{"method": "fit", "mean mm": np.float64(1.25)}, {"method": "neutral face", "mean mm": math.nan}]
    code = finish(
        "recovery",
        [Figure("error", 1.25, "mm", None, 1.0)],
        rows=rows,
        details=[{"face": 0, "errors": np.array([1.0, math.inf])}],
        settings={"seed": np.int64(7)},
        out=tmp_path / "out.json",
        check=True,
        console=Console(file=screen, width=100),
    )
    assert code == 1
    assert "neutral face" in screen.getvalue()
    assert "1.25" in screen.getvalue()
    data = json.loads((tmp_path / "out.json").read_text())
    _check(data)
    assert data["rows"] == [{"method": "fit", "mean mm": 1.25}, {"method": "neutral face", "mean mm": None}]
    assert data["details"] == [{"face": 0, "errors": [1.0, None]}]
    assert data["settings"] == {"seed": 7}


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError) as caught:
        _result(Figure("error", 1.0, "mm")).write(tmp_path / "file" / "out.json")
    assert caught.value.kind == "file_unwritable"


def test_machine_and_versions_are_those_of_this_process():
    machine = describe_machine()
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert machine["memory_gib"] is None or machine["memory_gib"] > 0.1
    versions = installed_versions()
    assert versions["numpy"] == np.__version__
