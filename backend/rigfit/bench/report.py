# SPDX-License-Identifier: Apache-2.0
"""The one result form of every ``rigfit bench ...``: figures with targets, as JSON and as a table.

The form is documented in docs/benchmarks.md and described by `SCHEMA` (JSON Schema, draft 2020-12).
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

import rigfit
from rigfit.files import write_json

SCHEMA_NAME = "rigfit.benchmark/1"
RATIO = "ratio"
# The packages whose version can change a figure; those that are not installed are left out of the result.
PACKAGES = ("numpy", "scipy", "mediapipe", "pillow", "torch", "bpy", "anny")

Better = Literal["lower", "higher"]

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Result of one rigfit benchmark",
    "type": "object",
    "additionalProperties": False,
    "required": ["schema", "benchmark", "command", "versions", "machine", "date", "settings", "figures"],
    "properties": {
        "schema": {"const": SCHEMA_NAME},
        "benchmark": {"type": "string", "minLength": 1},
        "command": {"type": "string", "minLength": 1},
        "versions": {
            "type": "object",
            "required": ["rigfit", "python"],
            "additionalProperties": {"type": "string", "minLength": 1},
        },
        "machine": {
            "type": "object",
            "additionalProperties": False,
            "required": ["system", "processor", "cores", "memory_gib", "gpu"],
            "properties": {
                "system": {"type": "string"},
                "processor": {"type": "string"},
                "cores": {"type": "integer", "minimum": 1},
                "memory_gib": {"type": ["number", "null"], "exclusiveMinimum": 0},
                "gpu": {"type": ["string", "null"]},
            },
        },
        "date": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$"},
        "settings": {"type": "object"},
        "rows": {"type": "array", "items": {"type": "object"}},
        "details": {"type": "array", "items": {"type": "object"}},
        "figures": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "value", "unit", "spread", "target", "better", "met"],
                "properties": {
                    "name": {"type": "string", "minLength": 1},
                    "value": {"type": ["number", "null"]},
                    "unit": {"type": "string"},
                    "spread": {
                        "type": ["array", "null"],
                        "prefixItems": [{"type": "number"}, {"type": "number"}],
                        "minItems": 2,
                        "maxItems": 2,
                    },
                    "spread_is": {"type": "string", "minLength": 1},
                    "target": {"type": ["number", "null"]},
                    "better": {"enum": ["lower", "higher"]},
                    "met": {"type": ["boolean", "null"]},
                    "peer": {"type": "string", "minLength": 1},
                },
                "allOf": [
                    {"if": {"properties": {"unit": {"const": RATIO}}}, "then": {"required": ["peer"]}},
                    {"if": {"properties": {"spread": {"type": "array"}}}, "then": {"required": ["spread_is"]}},
                    {
                        "if": {"properties": {"target": {"type": "null"}}},
                        "then": {"properties": {"met": {"type": "null"}}},
                        "else": {"properties": {"met": {"type": "boolean"}}},
                    },
                ],
            },
        },
    },
}


@dataclass(frozen=True)
class Figure:
    """One measured number.

    value: in `unit`; not finite when nothing could be measured (null in the file, and its target is missed).
    spread: (low, high) in `unit`, what `spread_is` says; None for a single measurement.
    target: the value to reach, None if there is none. better: the direction that is good; equal to the target is met.
    peer: what a ratio is measured against; a ratio whose name reads "own / peer" need not repeat it.
    ValueError for a ratio without a peer, an empty name, a target or a spread that is not finite.
    """

    name: str
    value: float
    unit: str
    spread: Sequence[float] | None = None
    target: float | None = None
    better: Better = "lower"
    peer: str | None = None
    spread_is: str = "quartiles"

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError("a figure needs a name")
        if self.better not in ("lower", "higher"):
            raise ValueError(f"{self.name}: better is 'lower' or 'higher', not {self.better!r}")
        if self.target is not None and not math.isfinite(self.target):
            raise ValueError(f"{self.name}: the target {self.target} is not a number that can be reached")
        if self.spread is not None:
            low, high = self.spread
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                raise ValueError(f"{self.name}: the spread {self.spread!r} is not (low, high)")
        if self.unit == RATIO and not self.peer:
            peer = self.name.rpartition(" / ")[2] if " / " in self.name else ""
            if not peer.strip():
                raise ValueError(f"{self.name}: a ratio names its peer")
            object.__setattr__(self, "peer", peer.strip())

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without a target."""
        if self.target is None:
            return None
        if not math.isfinite(self.value):
            return False
        return self.value <= self.target if self.better == "lower" else self.value >= self.target

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "name": self.name,
            "value": float(self.value) if math.isfinite(self.value) else None,
            "unit": self.unit,
            "spread": None if self.spread is None else [float(end) for end in self.spread],
            "target": None if self.target is None else float(self.target),
            "better": self.better,
            "met": self.met,
        }
        if self.spread is not None:
            data["spread_is"] = self.spread_is
        if self.peer:
            data["peer"] = self.peer
        return data


@dataclass(frozen=True)
class BenchmarkResult:
    """What one run of a benchmark measured, and everything that is needed to measure it again.

    settings: the arguments that define the measurement (count, seed, ...), JSON values. ``benchmark`` is the word after
    ``rigfit bench``. rows: the benchmark's own table, one dict a row with the same keys. details: one dict for each
    thing that was measured, for plots; stored, not shown. `measured` fills in the rest.
    """

    benchmark: str
    figures: tuple[Figure, ...]
    settings: dict[str, Any]
    command: str
    versions: dict[str, str]
    machine: dict[str, Any]
    date: str
    rows: tuple[dict[str, Any], ...] = ()
    details: tuple[dict[str, Any], ...] = ()

    @classmethod
    def measured(
        cls,
        benchmark: str,
        figures: Iterable[Figure],
        *,
        settings: Mapping[str, Any] | None = None,
        versions: Mapping[str, str] | None = None,
        rows: Iterable[Mapping[str, Any]] = (),
        details: Iterable[Mapping[str, Any]] = (),
    ) -> BenchmarkResult:
        """The result of the process that calls: its command line, versions, machine and the time now (UTC).

        versions: added to the ones that are found here, for example ``{"blender": "5.0.1"}``.
        ValueError when there is no figure, or two of one name.
        """
        figures = tuple(figures)
        names = [figure.name for figure in figures]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a benchmark has figures, each with its own name: {names}")
        return cls(
            benchmark=benchmark,
            figures=figures,
            settings=_plain(dict(settings or {})),
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            versions=installed_versions() | dict(versions or {}),
            machine=describe_machine(),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            rows=tuple(dict(row) for row in rows),
            details=tuple(dict(detail) for detail in details),
        )

    @property
    def missed(self) -> tuple[Figure, ...]:
        """The figures that miss their target."""
        return tuple(figure for figure in self.figures if figure.met is False)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA_NAME,
            "benchmark": self.benchmark,
            "command": self.command,
            "versions": self.versions,
            "machine": self.machine,
            "date": self.date,
            "settings": self.settings,
            "figures": [figure.to_json() for figure in self.figures],
            "rows": _plain(self.rows),
            "details": _plain(self.details),
        }

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file whole or not at all; UserError (kind ``file_unwritable``) when it cannot be written."""
        write_json(Path(path), self.to_json(), parents=True)

    def show(self, console: Console) -> None:
        """The benchmark's own table, then one row a figure, then which targets are missed."""
        if self.rows:
            console.print(_own_table(self.rows))
        console.print(_table(self))
        for figure in self.missed:
            console.print(f"missed: {figure.name}: {_number(figure.value)} {figure.unit}, target {_target(figure)}")

    def finish(self, console: Console, *, out: str | os.PathLike[str] | None = None, check: bool = False) -> int:
        """Show, write to `out` if given, and return the exit code: 1 if `check` and a figure misses its target."""
        self.show(console)
        if out is not None:
            self.write(out)
            console.print(f"written: {out}")
        return int(check and bool(self.missed))


def finish(
    benchmark: str,
    figures: Iterable[Figure],
    *,
    rows: Iterable[Mapping[str, Any]] = (),
    details: Iterable[Mapping[str, Any]] = (),
    settings: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
    out: str | os.PathLike[str] | None = None,
    check: bool = False,
    console: Console | None = None,
) -> int:
    """`BenchmarkResult.measured` and `BenchmarkResult.finish` in one call: how every ``rigfit bench`` command ends."""
    result = BenchmarkResult.measured(
        benchmark, figures, settings=settings, versions=versions, rows=rows, details=details
    )
    return result.finish(console or Console(), out=out, check=check)


def _plain(value: Any) -> Any:
    """JSON values of numbers, numpy's too, and containers; a number that is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def _own_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table()
    for name in rows[0]:
        numbers = all(isinstance(row.get(name), (int, float)) for row in rows)
        table.add_column(str(name), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        values = (row.get(name) for name in rows[0])
        table.add_row(*(_number(value) if isinstance(value, float) else str(value) for value in values))
    return table


def _table(result: BenchmarkResult) -> Table:
    table = Table(title=f"rigfit bench {result.benchmark}", title_justify="left")
    table.add_column("figure", overflow="fold")
    for name in ("value", "spread", "target"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("unit", overflow="fold")
    table.add_column("met", no_wrap=True)
    for figure in result.figures:
        unit = f"× {figure.peer}" if figure.unit == RATIO else figure.unit
        spread = "–" if figure.spread is None else "…".join(_number(end) for end in figure.spread)
        met = {True: "[green]yes[/]", False: "[bold red]NO[/]", None: "–"}[figure.met]
        table.add_row(figure.name, _number(figure.value), spread, _target(figure), unit, met)
    return table


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "none"
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _target(figure: Figure) -> str:
    if figure.target is None:
        return "–"
    return f"{'≤' if figure.better == 'lower' else '≥'}{_number(figure.target)}"


def installed_versions() -> dict[str, str]:
    """rigfit (with the commit, of a checkout), Python and the packages of `PACKAGES` that are installed."""
    versions = {"rigfit": rigfit.__version__, "python": platform.python_version()}
    commit = _commit()
    if commit:
        versions["commit"] = commit
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _commit() -> str | None:
    """The commit of the checkout that this file is in, with "+changes" if files differ; None outside of one."""
    folder = Path(__file__).resolve().parents[3]
    git = shutil.which("git")
    if git is None or not (folder / ".git").exists():
        return None
    described = _output(
        [git, "-C", str(folder), "describe", "--always", "--abbrev=12", "--dirty=+changes", "--exclude=*"]
    )
    return described or None


def describe_machine() -> dict[str, Any]:
    """Processor, usable cores, memory in GiB (None where unknown), name of the first CUDA GPU (None without one)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": cores,
        "memory_gib": _memory_gib(),
        "gpu": gpu_name(),
    }


def gpu_name() -> str | None:
    """The first GPU that the NVIDIA driver names; None without one. No CUDA library is loaded for it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    lines = _output([program, "--query-gpu=name", "--format=csv,noheader"]).splitlines()
    return lines[0].strip() if lines else None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _output(command: list[str]) -> str:
    """What a short command prints; empty when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
