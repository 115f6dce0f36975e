# SPDX-License-Identifier: Apache-2.0
"""What is known of a rig by its hash alone: landmarks and calibrated detector, shipped with rigfit or kept in the user's
cache, so that a rig is looked at once.

The files hold what was learned and not the rig: it is told apart by `rig_hash`, over which triangles and parameters stand.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zipfile
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np

from rigfit.errors import UserError
from rigfit.files import user_cache, write_atomically
from rigfit.rig.spec import LandmarkEmbedding, RigSpec

log = logging.getLogger("rigfit.rig")

# Landmark embedding and detector model of the default head, made by scripts/make_head_assets.py.
SHIPPED = "default_head_landmarks.npz"

# Every change of a mesh is another rig; calibrated ones took an hour of rendering and are never thrown away.
MOST_UNCALIBRATED = 200

Origin = Literal["spec", "kept", "shipped"]

_LANDMARKS = ("triangle", "barycentric", "confidence")


def known_rig(spec: RigSpec) -> tuple[RigSpec, Origin] | None:
    """The spec with the best landmarks that are known without looking at the rig, and where they are from.

    Calibrated ones first; otherwise the spec's own, then those kept, then those shipped. None if there are none.
    """
    found: list[tuple[RigSpec, Origin]] = []
    if spec.landmarks is not None:
        found.append((spec, "spec"))
    if (kept := kept_landmarks(spec)) is not None:
        found.append((kept, "kept"))
    if (shipped := shipped_landmarks(spec)) is not None:
        found.append((shipped, "shipped"))
    return next((one for one in found if one[0].detector), found[0] if found else None)


def shipped_landmarks(spec: RigSpec) -> RigSpec | None:
    """The spec with the landmarks and detector model that come with rigfit; None if they belong to another rig."""
    source = resources.files("rigfit") / "assets" / SHIPPED
    if not source.is_file():
        return None
    with resources.as_file(source) as path:
        known = _read(path, spec)
    if known is None or not known.detector:
        return known
    return known.with_detector(known.detector, {"origin": "shipped with rigfit"})


def write_shipped(spec: RigSpec, path: Path) -> None:
    """Write the asset that `shipped_landmarks` reads, from a spec with landmarks and detector model."""
    arrays = _arrays(spec)
    # Half precision carries far more than the noise of a regression on a thousand renders, at half the size.
    large = [name for name in ("detector_response", "detector_noise_factor") if name in arrays]
    arrays |= {name: arrays[name].astype(np.float16) for name in large}
    write_atomically(path, lambda temporary: np.savez_compressed(temporary, **arrays))  # pyright: ignore[reportArgumentType]


def kept_landmarks(spec: RigSpec) -> RigSpec | None:
    """The spec with what `keep` kept of this rig; None if there is nothing, or what there is is damaged."""
    path = _kept_file(spec.rig_hash)
    try:
        known = _read(path, spec)
        # The oldest in use is not the oldest made.
        os.utime(path)
    except FileNotFoundError:
        return None
    except Exception as error:  # damaged files break in ways nobody foresaw, and this one can be made again
        log.warning("%s is damaged and not used (%s: %s)", path, type(error).__name__, error)
        return None
    return known


def keep(spec: RigSpec) -> None:
    """Keep the landmarks and detector model of a spec for later; what was kept of this rig before is replaced.

    Without a cache folder that can be written nothing is kept: it only saves time.
    """
    arrays = _arrays(spec)
    path = _kept_file(spec.rig_hash)
    try:
        write_atomically(path, lambda temporary: np.savez_compressed(temporary, **arrays), parents=True)  # pyright: ignore[reportArgumentType]
        _forget_oldest(path.parent)
    except (UserError, OSError) as error:
        log.warning("the landmarks of this rig are not kept: %s", error)


def _kept_file(rig_hash: str) -> Path:
    if not re.fullmatch(r"[0-9a-f]{64}", rig_hash):
        raise ValueError("a rig hash is 64 hexadecimal digits")
    return user_cache() / "rigs" / f"{rig_hash}.npz"


def _arrays(spec: RigSpec) -> dict[str, np.ndarray]:
    assert spec.landmarks is not None
    arrays = {"rig_hash": np.array(spec.rig_hash)}
    arrays |= {f"landmark_{name}": getattr(spec.landmarks, name) for name in _LANDMARKS}
    arrays |= {f"detector_{name}": array for name, array in spec.detector.items()}
    if spec.detector_json is not None:
        text = json.dumps(dict(spec.detector_json), allow_nan=False)
        arrays["about"] = np.frombuffer(text.encode("ascii"), np.uint8)
    return arrays


def _read(path: Path, spec: RigSpec) -> RigSpec | None:
    """The spec with what the file holds; None if that belongs to another rig. Anything may be raised by a damaged file."""
    with zipfile.ZipFile(path) as archive:
        # numpy stops before the end of a member, where zipfile compares the checksum.
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"wrong checksum of {damaged}")
    with np.load(path, allow_pickle=False) as data:
        arrays = {name: data[name] for name in data.files}
    if str(arrays.pop("rig_hash")) != spec.rig_hash:
        return None
    about = arrays.pop("about", None)
    known = spec.with_landmarks(LandmarkEmbedding(*(arrays.pop(f"landmark_{name}") for name in _LANDMARKS)))
    detector = {name.removeprefix("detector_"): array for name, array in arrays.items()}
    if not detector:
        return known
    return known.with_detector(detector, None if about is None else json.loads(about.tobytes()))


def _forget_oldest(folder: Path) -> None:
    files = list(folder.glob("*.npz"))
    if len(files) <= MOST_UNCALIBRATED:
        return
    plain = [path for path in files if not _calibrated(path)]
    plain.sort(key=lambda path: path.stat().st_mtime)
    for path in plain[:-MOST_UNCALIBRATED]:
        path.unlink(missing_ok=True)


def _calibrated(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.startswith("detector_") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False
