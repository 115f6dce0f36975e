# SPDX-License-Identifier: Apache-2.0
"""Landmarks from a JSON file instead of a detector: from another tool, or a saved detection that was edited by hand.

    {"schema": "rigfit.landmarks/1", "points": {"33": [412.5, 300.0], "263": [520.0, 302.5], ...}}

``points`` is either an object from landmark number (0…477, see ``mesh478``) to ``[x, y]``, or a list of 478 entries
that are ``[x, y]`` or null. Positions are pixels of the upright photo as it was loaded; origin at the top left corner,
the centre of the first pixel at (0.5, 0.5). Points that are left out are unknown. ``image_size_px`` [width, height] is
optional; if given, points are scaled when the photo is loaded at another size.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from rigfit.errors import UserError
from rigfit.files import write_atomically
from rigfit.photo import mesh478
from rigfit.photo.face import FaceLandmarks

SCHEMA = "rigfit.landmarks/1"
MIN_POINTS = 6


def _bad(name: str, what: str) -> UserError:
    return UserError(f"The landmark file “{name}” {what}.", kind="bad_landmarks")


def load_landmark_file(path: str | os.PathLike[str], image_size_px: tuple[int, int] | None = None) -> FaceLandmarks:
    """Read a landmark file; unknown points are NaN and not visible.

    image_size_px: (width, height) of the loaded photo. If given, points outside of it are not visible, and a file that
    was made for another size of the same picture is scaled to it.

    Raises UserError, kind ``bad_landmarks`` (``landmarks_missing`` if there is no such file).
    """
    path = Path(path)
    name = path.name
    try:
        text = path.read_text("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"There is no landmark file “{name}”: check the path.", kind="landmarks_missing") from None
    except UnicodeDecodeError:
        raise _bad(name, "is not UTF-8 text: save it as JSON") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "the path is not valid"
        raise _bad(name, f"cannot be read ({reason}): check the path and its permissions") from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise _bad(name, f"is not valid JSON (line {error.lineno}, column {error.colno}): correct it there") from None
    except RecursionError:
        raise _bad(name, "is nested too deep: give an object with “schema” and “points”") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise _bad(name, f"does not say “schema”: “{SCHEMA}”: add that, or convert the file")

    points = np.full((mesh478.COUNT, 2), np.nan)
    for key, value in _entries(name, data.get("points")):
        points[key] = _position(name, key, value)
    known = np.asarray(np.isfinite(points).all(axis=1))
    if np.count_nonzero(known) < MIN_POINTS:
        raise _bad(name, f"has only {np.count_nonzero(known)} points: give {MIN_POINTS} or more, spread over the face")

    size = data.get("image_size_px")
    if size is not None:
        ok = isinstance(size, list) and len(size) == 2 and all(_is_number(v) and v > 0 for v in size)
        if not ok:
            raise _bad(name, "has an “image_size_px” that is not [width, height]: correct or remove it")
        if image_size_px is not None:
            zoom = np.array(image_size_px, np.float64) / np.array(size, np.float64)
            if abs(zoom[0] / zoom[1] - 1) > 0.01:
                raise _bad(
                    name,
                    f"was made for a picture of {size[0]} × {size[1]} pixels, and this one is {image_size_px[0]} × "
                    f"{image_size_px[1]}: use the file that belongs to this photo",
                )
            points = points * zoom
    low, high = points[known].min(axis=0), points[known].max(axis=0)
    if (high - low).max() < 1.0:
        raise _bad(name, "has all its points on one spot: give positions in pixels")
    visible = known.copy()
    if image_size_px is not None:
        visible[known] = ((points[known] >= 0) & (points[known] <= image_size_px)).all(axis=1)
        if not visible.any():
            raise _bad(name, "has no point inside the photo: give positions in pixels of this photo")
    return FaceLandmarks(
        points_px=points,
        depth=np.full(mesh478.COUNT, np.nan),
        box_px=(float(low[0]), float(low[1]), float(high[0]), float(high[1])),
        score=1.0,
        rotation_deg=_rotation(points, known),
        visible=visible,
    )


def save_landmark_file(
    path: str | os.PathLike[str], landmarks: FaceLandmarks, image_size_px: tuple[int, int] | None = None
) -> None:
    """Write the known points by number, one a line for editing by hand; the file is replaced in one step."""
    path = Path(path)
    known = np.isfinite(landmarks.points_px).all(axis=1)
    rows = ",\n".join(
        f'  "{i}": [{landmarks.points_px[i, 0]:.3f}, {landmarks.points_px[i, 1]:.3f}]' for i in np.flatnonzero(known)
    )
    size = "" if image_size_px is None else f' "image_size_px": [{image_size_px[0]}, {image_size_px[1]}],\n'
    text = f'{{"schema": "{SCHEMA}",\n{size} "points": {{\n{rows}\n}}}}\n'
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _entries(name: str, points: Any) -> list[tuple[int, Any]]:
    if isinstance(points, dict):
        entries = []
        for key, value in points.items():
            if not (key.isascii() and key.isdigit() and int(key) < mesh478.COUNT):
                raise _bad(name, f"has a point “{key[:20]}”: numbers go from 0 to {mesh478.COUNT - 1}")
            entries.append((int(key), value))
        return [entry for entry in entries if entry[1] is not None]
    if isinstance(points, list):
        if len(points) != mesh478.COUNT:
            raise _bad(name, f"lists {len(points)} points: give all {mesh478.COUNT} with null for unknown ones")
        return [(key, value) for key, value in enumerate(points) if value is not None]
    raise _bad(name, "has no “points”: give an object from landmark number to [x, y]")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _position(name: str, key: int, value: Any) -> tuple[float, float]:
    ok = isinstance(value, list) and len(value) == 2 and all(_is_number(v) and abs(v) < 1e7 for v in value)
    if not ok:
        raise _bad(name, f"has no [x, y] in pixels for point {key}: correct it or remove it")
    return float(value[0]), float(value[1])


def _rotation(points: np.ndarray, known: np.ndarray) -> int:
    from rigfit.geometry import similarity
    from rigfit.photo.align import standard_face

    rotation = similarity(standard_face()[known, :2], points[known]).rotation
    return round(math.degrees(math.atan2(rotation[1, 0], rotation[0, 0])) / 90.0) * 90 % 360
