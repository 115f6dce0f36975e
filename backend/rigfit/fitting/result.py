# SPDX-License-Identifier: Apache-2.0
"""The fit result: what a fit found, as a JSON file (docs/architecture.md, "Fit result")."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import rigfit
from rigfit.errors import UserError
from rigfit.files import write_json
from rigfit.render.camera import Camera
from rigfit.rig.spec import RigSpec

SCHEMA = "rigfit.fit/1"


@dataclass(frozen=True)
class ParameterResult:
    """value, inside the parameter's limits; standard_deviation in its units; identifiable: the photo determines it."""

    value: float
    standard_deviation: float
    identifiable: bool
    group: str
    locked: bool = False


@dataclass(frozen=True)
class Verification:
    """What a real Blender render through the solved camera says: landmarks detected on it against the photo's.

    landmark_error_percent: mean distance in % of the outer eye distance; None when no face is found on the render.
    """

    face_found: bool
    landmark_error_percent: float | None
    blender_version: str
    seconds: float


@dataclass(frozen=True)
class PhotoResult:
    path: str
    size_px: tuple[int, int]
    camera: Camera
    focal_from: str
    expression: dict[str, float]
    landmark_error_px: float
    landmark_error_percent: float
    coverage: float
    faces_found: int
    angles_deg: tuple[float, float, float]
    warnings: list[str] = field(default_factory=list)
    verification: Verification | None = None


@dataclass(frozen=True)
class FitResult:
    rig_hash: str
    method: str
    parameters: dict[str, ParameterResult]
    photos: list[PhotoResult]
    seconds: float
    warnings: list[str] = field(default_factory=list)
    rigfit_version: str = rigfit.__version__

    def values(self, photo: int = 0) -> dict[str, float]:
        """All parameter values by name, with the expression of the given photo."""
        return {name: p.value for name, p in self.parameters.items()} | self.photos[photo].expression

    def with_verification(self, photo: int, verification: Verification) -> FitResult:
        photos = list(self.photos)
        photos[photo] = replace(photos[photo], verification=verification)
        return replace(self, photos=photos)

    def to_json(self) -> dict[str, Any]:
        photos = [asdict(p) | {"camera": p.camera.to_json()} for p in self.photos]
        return {"schema": SCHEMA} | asdict(self) | {"photos": photos}

    def save(self, path: Path) -> None:
        write_json(path, self.to_json())

    @staticmethod
    def load(path: Path) -> FitResult:
        """Read a result. UserError kind ``bad_result`` for a file that is none, or of another schema."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"There is no fit result {path}: check the name.", kind="file_missing") from None
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} is not a fit result ({error}): make it with `rigfit fit`.", kind="bad_result"
            ) from None
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise UserError(
                f"{path} has the schema {schema!r}, this rigfit reads {SCHEMA!r}: make it again with `rigfit fit`.",
                kind="bad_result",
            )
        try:
            fields = {k: v for k, v in data.items() if k != "schema"}
            fields["parameters"] = {n: ParameterResult(**p) for n, p in data["parameters"].items()}
            fields["photos"] = [_photo_from_json(p) for p in data["photos"]]
            result = FitResult(**fields)
            finite = all(math.isfinite(p.value) for p in result.parameters.values())
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} is damaged ({error}): make it again with `rigfit fit`.", kind="bad_result"
            ) from None
        if not finite:
            raise UserError(f"{path} holds a value that is not a number: make it again.", kind="bad_result")
        return result

    def check_rig(self, spec: RigSpec) -> None:
        """UserError kind ``other_rig`` unless the result was made for this rig; says what differs."""
        if self.rig_hash == spec.rig_hash:
            return
        missing = [n for n in self.parameters if n not in spec.names]
        new = [n for n in spec.names if n not in self.parameters]
        what = (
            f"the rig has no parameter {missing[0]!r}" if missing
            else f"the rig has a parameter {new[0]!r} that the result lacks" if new
            else "geometry or limits changed"
        )  # fmt: skip
        raise UserError(f"This fit result belongs to another rig: {what}. Fit again.", kind="other_rig")


def _photo_from_json(data: dict[str, Any]) -> PhotoResult:
    verification = data.get("verification")
    return PhotoResult(
        **data
        | {
            "camera": Camera.from_json(data["camera"]),
            "size_px": tuple(data["size_px"]),
            "angles_deg": tuple(data["angles_deg"]),
            "verification": None if verification is None else Verification(**verification),
        }
    )
