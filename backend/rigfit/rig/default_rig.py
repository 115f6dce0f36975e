# SPDX-License-Identifier: Apache-2.0
"""The default head, ready to fit: .blend, rig spec, landmarks and calibrated detector, made once and kept."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import rigfit
from rigfit.blender.locate import addon_folder
from rigfit.blender.worker import BlenderWorker
from rigfit.errors import UserError
from rigfit.files import make_folder, user_cache
from rigfit.rig import default_head
from rigfit.rig.known_rigs import SHIPPED, shipped_landmarks
from rigfit.rig.spec import RigSpec

Progress = Callable[[int, int, str], None]


def cache_folder() -> Path:
    """Where the default head is kept between runs: the user's cache folder, by what it is built from."""
    made_by = [
        Path(default_head.__file__),
        addon_folder() / "rig" / "default_head.py",
        addon_folder() / "rig" / "export.py",
    ]
    with resources.as_file(resources.files("rigfit") / "assets" / SHIPPED) as shipped:
        key = hashlib.sha256(b"".join(path.read_bytes() for path in (*made_by, shipped) if path.exists()))
    return user_cache() / f"head-{rigfit.__version__}-{key.hexdigest()[:12]}"


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


def default_description(*, asymmetric: bool = False) -> Path:
    """The head description of the default head in the user's cache, built on first use. UserError as `build_head`."""
    path = cache_folder() / f"{'asymmetric-head' if asymmetric else 'head'}-{_assets_key()}.npz"
    try:
        default_head.HeadDescription.load(path)
    except (UserError, OSError, ValueError):
        # Missing or damaged: make it.
        make_folder(path.parent)
        default_head.build_head_description(path, asymmetric=asymmetric)
    return path


def _assets_key() -> str:
    """Changes with the folder of MakeHuman's assets and with its base mesh."""
    folder = default_head.locate_assets()
    mesh = (folder / "mpfb2" / "3dobjs" / "base.obj").stat()
    return hashlib.sha256(
        f"{folder}\n{mesh.st_size}\n{mesh.st_mtime_ns}".encode("utf-8", "surrogateescape")
    ).hexdigest()[:12]
