# SPDX-License-Identifier: GPL-3.0-or-later
"""What the panel shows: the work in progress, the result that waits for Keep or Revert, the last error. No bpy in here."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..messages import RigError

# Landmark error in percent of the eye distance: measured on real portraits, 2 to 3.5 is what a good fit shows.
GOOD_PERCENT, FAIR_PERCENT = 3.5, 6.0


@dataclass(frozen=True)
class Row:
    """One face parameter of a result, in slider units."""

    name: str
    group: str
    value: float
    standard_deviation: float
    identifiable: bool


@dataclass(frozen=True)
class PhotoLine:
    """What the fit says about one photo."""

    path: str
    error_percent: float
    coverage: float
    faces_found: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """The verification: Blender's render of the result, seen by the same detector."""

    face_found: bool
    error_percent: float | None
    seconds: float


@dataclass
class Result:
    """A fit that is applied to the rig and waits for Keep or Revert.

    fitted, before: by parameter name, what the fit wants and what the rig had. held: what puts the rig back exactly
    (`rig.parameters.hold`). left_out: keys that are no parameters, each with its reason. strength: how much of the fit is applied, 0…1. undone: the artist undid it with Ctrl-Z.
    """

    spec: str
    fit_id: str
    objects: list[str]
    fitted: dict[str, float]
    before: dict[str, float]
    held: list[Any]
    rows: list[Row]
    photos: list[PhotoLine]
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    check: Check | None = None
    check_trouble: str = ""
    strength: float = 1.0
    undone: bool = False
    seconds: float = 0.0

    def values(self, strength: float) -> dict[str, float]:
        """What to write for a strength: `before` at 0, the fit at 1, a straight line between."""
        return {name: mixed(self.before.get(name, value), value, strength) for name, value in self.fitted.items()}

    @property
    def unknown(self) -> int:
        """How many parameters the photo could not tell."""
        return sum(not row.identifiable for row in self.rows)


def mixed(before: float, fitted: float, strength: float) -> float:
    """The value for a strength; exact at both ends."""
    if strength >= 1.0:
        return fitted
    if strength <= 0.0:
        return before
    return before + strength * (fitted - before)


@dataclass
class Status:
    """All that the panel shows. work: the flow that runs (a fit, a default head, an installation) or None; background:
    the check render, which lets the artist work on."""

    work: Any = None
    title: str = ""
    done: int = 0
    total: int = 0
    text: str = ""
    background: Any = None
    background_text: str = ""
    error: RigError | None = None
    remedy: str = ""
    result: Result | None = None

    def say(self, done: int, total: int, text: str) -> None:
        self.done, self.total = done, total
        self.text = text or self.text

    @property
    def share(self) -> float:
        """Progress for a bar, 0…1; what has no measure shows a bar that has begun."""
        if self.total <= 0:
            return 0.05
        return min(max(self.done / self.total, 0.05), 1.0)

    def begin(self, title: str, text: str, total: int = 0) -> None:
        """Work begins: what it is called and what it does first; the message of the last one goes."""
        self.clear_error()
        self.title, self.done, self.total, self.text = title, 0, total, text

    def fail_by_defect(self, error: BaseException | None) -> None:
        """Something of ours went wrong: a sentence for the panel, the traceback for the console."""
        traceback.print_exception(error)
        self.fail(RigError("defect", reason=f"{type(error).__name__}: {error}"))

    def fail(self, error: RigError, remedy: str = "") -> None:
        self.error, self.remedy = error, remedy

    def clear_error(self) -> None:
        self.error, self.remedy = None, ""


def read_fit(fit: Mapping[str, Any]) -> tuple[list[Row], list[PhotoLine], list[str]]:
    """Rows, photo lines and warnings of a fit result (docs/architecture.md).

    RigError bad_answer when it is none: nothing of it may reach the rig.
    """
    try:
        rows = [
            Row(
                str(name),
                str(p["group"]),
                _finite(p["value"]),
                max(_finite(p["standard_deviation"]), 0.0),
                bool(p["identifiable"]),
            )
            for name, p in fit["parameters"].items()
        ]
        photos = [
            PhotoLine(
                str(p["path"]),
                _finite(p["landmark_error_percent"]),
                _finite(p["coverage"]),
                int(p["faces_found"]),
                tuple(str(w) for w in p["warnings"]),
            )
            for p in fit["photos"]
        ]
        return rows, photos, [str(w) for w in fit.get("warnings", [])]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RigError("bad_answer", reason="the fit result is incomplete") from None


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def verdict(percent: float) -> str:
    """A landmark error in one word."""
    return "good" if percent <= GOOD_PERCENT else "fair" if percent <= FAIR_PERCENT else "poor"
