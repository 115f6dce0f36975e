# SPDX-License-Identifier: Apache-2.0
"""Seconds and peak memory of one export: ``python tests/blender/measure_export.py [KIND] [KEYS]``.

KIND: plain, armature or subdivision. The mesh has 20,000 vertices and every key moves every vertex, which is the worst
case. Run it from the repository root in an environment with bpy.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import bpy  # noqa: E402
import numpy as np  # noqa: E402
import rigs  # noqa: E402

from blender_addon.rig.export import export_rig  # noqa: E402
from blender_addon.rig.parameters import apply_parameters  # noqa: E402


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(kind: str = "plain", keys: int = 1000) -> None:
    bpy.ops.wm.read_factory_settings(use_empty=True)
    head = rigs.add_mesh("Head", *rigs.head_data(rings=101, segments=200))
    count = len(head.data.vertices)
    base = np.empty((count, 3), np.float32)
    head.data.vertices.foreach_get("co", base.reshape(-1))
    head.shape_key_add(name="Basis")
    random = np.random.default_rng(0)
    for index in range(keys):
        key = head.shape_key_add(name=f"key {index}", from_mix=False)
        key.value = 0.0
        moved = base + random.normal(0, 1e-3, base.shape).astype(np.float32)
        key.points.foreach_set("co", moved.reshape(-1))
    if kind == "armature":
        rigs.add_armature(head)
    elif kind == "subdivision":
        head.modifiers.new("Subdivision", "SUBSURF").levels = 1
    bpy.context.view_layer.update()
    before = peak_mb()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rig.npz")
        start, cpu = time.perf_counter(), time.process_time()
        result = export_rig(path)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        size_mb = os.path.getsize(path) / 1e6
        start = time.perf_counter()
        apply_parameters(path, {f"key {index}": 0.25 for index in range(keys)})
        applied = time.perf_counter() - start
    print(f"{kind}: {keys} keys x {count} vertices, {result['vertices']} evaluated, linear: {result['linear']}")
    print(f"export {seconds:.2f} s ({cpu:.2f} s of processor time), file {size_mb:.0f} MB, apply {applied:.2f} s")
    print(f"peak memory {peak_mb():.0f} MB, of which {before:.0f} MB were there before the export")


if __name__ == "__main__":
    main(*sys.argv[1:2], *(int(argument) for argument in sys.argv[2:3]))
