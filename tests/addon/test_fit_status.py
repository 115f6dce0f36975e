# SPDX-License-Identifier: Apache-2.0
"""What the panel shows: results read with care, strength, the report."""

from __future__ import annotations

import copy
import math

import pytest

from blender_addon.fit.report import masked, report, tail
from blender_addon.fit.status import Result, Status, mixed, read_fit, verdict
from blender_addon.messages import RigError

FIT = {
    "parameters": {
        "jawOpen": {"value": 0.4, "standard_deviation": 0.05, "identifiable": True, "group": "expression"},
        "skull": {"value": 0.0, "standard_deviation": 0.3, "identifiable": False, "group": "identity"},
    },
    "photos": [
        {"path": "a.png", "landmark_error_percent": 2.2, "coverage": 0.9, "faces_found": 1, "warnings": ["turned"]}
    ],
    "warnings": [],
}


def a_result(**changes) -> Result:
    rows, photos, _ = read_fit(FIT)
    given = {
        "spec": "x", "fit_id": "1", "objects": ["Head"], "fitted": {"jawOpen": 0.4, "skull": 0.0},
        "before": {"jawOpen": 0.1, "skull": 0.2}, "held": [], "rows": rows, "photos": photos,
    }  # fmt: skip
    return Result(**(given | changes))


def test_a_fit_result_is_read():
    rows, photos, warnings = read_fit(FIT)
    assert [(row.name, row.value, row.identifiable) for row in rows] == [("jawOpen", 0.4, True), ("skull", 0.0, False)]
    assert photos[0].warnings == ("turned",)
    assert warnings == []
    assert a_result().unknown == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda fit: fit.pop("parameters"),
        lambda fit: fit.pop("photos"),
        lambda fit: fit["parameters"]["jawOpen"].update(value=math.nan),
        lambda fit: fit["parameters"]["jawOpen"].update(value="much"),
        lambda fit: fit["parameters"]["jawOpen"].pop("identifiable"),
        lambda fit: fit["photos"][0].update(coverage=None),
        lambda fit: fit.update(parameters=[1, 2]),
    ],
)
def test_a_spoiled_fit_result_is_refused(spoil):
    fit = copy.deepcopy(FIT)
    spoil(fit)
    with pytest.raises(RigError) as caught:
        read_fit(fit)
    assert caught.value.kind == "bad_answer"


def test_strength_is_exact_at_both_ends():
    result = a_result()
    assert result.values(1.0) == result.fitted
    assert result.values(0.0) == result.before
    assert result.values(0.5) == pytest.approx({"jawOpen": 0.25, "skull": 0.1})
    assert mixed(0.1, 0.3, 1.0) == 0.3


def test_verdict_and_bar():
    assert [verdict(2.0), verdict(5.0), verdict(20.0)] == ["good", "fair", "poor"]
    status = Status()
    assert 0 < status.share < 0.2
    status.say(3, 4, "solving")
    assert status.share == 0.75
    status.say(4, 4, "")
    assert status.text == "solving"


def test_report_masks_who_and_where():
    home = "/home/jane doe"
    words = f"cannot read {home}/photos/a.jpg\nC:\\Users\\Jane\\x\n/Users/bob/y jane doe, janet"
    told = masked(words, home=home, user="jane doe")
    assert "jane doe" not in told
    assert "~/photos/a.jpg" in told
    assert "Jane" not in told
    assert "bob" not in told
    assert "janet" in told


def test_report_has_versions_first_and_the_error(tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {i}" for i in range(500)))
    text = report({"rigfit": "0.1", "Blender": "4.3"}, RigError("photo_missing", path="/x/a.png"), tail(str(log)))
    lines = text.splitlines()
    assert lines[:3] == ["rigfit report", "rigfit: 0.1", "Blender: 4.3"]
    assert "photo_missing" in text
    assert "line 499" in text
    assert "line 100" not in text
    assert tail(str(tmp_path / "missing")) == []
