# SPDX-License-Identifier: Apache-2.0
"""The default head, ready to fit: .blend, rig spec, landmarks and calibrated detector, made once and kept."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np

import rigfit
from rigfit.blender.locate import addon_folder
from rigfit.blender.worker import BlenderWorker
from rigfit.files import write_atomically
from rigfit.rig import default_head
from rigfit.rig.spec import LandmarkEmbedding, RigSpec

# Landmark embedding and detector model of the default head, made by scripts/make_head_assets.py.
SHIPPED = "default_head_landmarks.npz"

Progress = Callable[[int, int, str], None]


def cache_folder() -> Path:
    """Where the default head is kept between runs: the user's cache folder, by what it is built from."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    made_by = [
        Path(default_head.__file__),
        addon_folder() / "rig" / "default_head.py",
        addon_folder() / "rig" / "export.py",
    ]
    with resources.as_file(resources.files("rigfit") / "assets" / SHIPPED) as shipped:
        key = hashlib.sha256(b"".join(path.read_bytes() for path in (*made_by, shipped) if path.exists()))
    return Path(root) / "rigfit" / f"head-{rigfit.__version__}-{key.hexdigest()[:12]}"


def build_default_blend(worker: BlenderWorker, out: Path, *, asymmetric: bool = False) -> None:
    """Write the default head as a .blend file. Leaves it open in `worker`."""
    with tempfile.TemporaryDirectory(prefix="rigfit-head-") as folder:
        description = Path(folder) / "head.npz"
        default_head.build_head_description(description, asymmetric=asymmetric)
        worker.call("file.new")
        worker.call("head.build", description=str(description))
        worker.call("file.save", path=str(out))


def default_rig(
    worker: BlenderWorker, blend: Path, spec_path: Path, progress: Progress | None = None
) -> tuple[RigSpec, bool]:
    """Build the default head at `blend` and its spec at `spec_path`, with the shipped landmarks and detector model.

    Returns the spec and whether the shipped landmarks belong to it (same rig hash). The head is open in `worker`.
    """
    if progress:
        progress(0, 3, "building the head")
    build_default_blend(worker, blend)
    worker.call("file.open", path=str(blend))
    if progress:
        progress(1, 3, "exporting the rig spec")
    worker.call("rig.export", out=str(spec_path))
    spec = RigSpec.load(spec_path)
    shipped = shipped_landmarks(spec)
    if shipped is not None:
        shipped.save(spec_path)
    if progress:
        progress(3, 3, "default head ready")
    return shipped or spec, shipped is not None


def shipped_landmarks(spec: RigSpec) -> RigSpec | None:
    """The spec with the landmarks and detector model that come with rigfit; None if they belong to another rig."""
    source = resources.files("rigfit") / "assets" / SHIPPED
    if not source.is_file():
        return None
    with resources.as_file(source) as path, np.load(path, allow_pickle=False) as data:
        arrays = {name: data[name] for name in data.files}
    if str(arrays.pop("rig_hash")) != spec.rig_hash:
        return None
    embedding = LandmarkEmbedding(*(arrays.pop(f"landmark_{n}") for n in ("triangle", "barycentric", "confidence")))
    detector = {name.removeprefix("detector_"): array for name, array in arrays.items()}
    return spec.with_landmarks(embedding).with_detector(
        detector, {"origin": "shipped with rigfit"} if detector else None
    )


def write_shipped(spec: RigSpec, path: Path) -> None:
    """Write the asset that `shipped_landmarks` reads, from a spec with landmarks and detector model."""
    assert spec.landmarks is not None
    arrays = {"rig_hash": np.array(spec.rig_hash)}
    arrays |= {f"landmark_{name}": getattr(spec.landmarks, name) for name in ("triangle", "barycentric", "confidence")}
    for name, array in spec.detector.items():
        # Half precision carries far more than the noise of a regression on a thousand renders, at half the size.
        half = name in ("response", "noise_factor")
        arrays[f"detector_{name}"] = array.astype(np.float16) if half else array
    write_atomically(path, lambda temporary: np.savez_compressed(temporary, **arrays))
