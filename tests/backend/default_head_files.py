# SPDX-License-Identifier: Apache-2.0
"""The default head as Blender builds it, once for all tests of a run."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from rigfit.blender.locate import locate
from rigfit.blender.worker import BlenderWorker
from rigfit.rig.default_rig import default_rig


@functools.cache
def default_head_files() -> tuple[Path, Path, bool]:
    """(.blend, rig spec, whether the shipped landmarks belong to it). Do not write to them."""
    folder = Path(tempfile.mkdtemp(prefix="rigfit-test-head-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    blend, spec_path = folder / "head.blend", folder / "head.npz"
    with BlenderWorker(locate()) as worker:
        _, complete = default_rig(worker, blend, spec_path)
    return blend, spec_path, complete
