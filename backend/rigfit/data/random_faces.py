# SPDX-License-Identifier: Apache-2.0
"""Random faces of a rig, rendered by one or several Blender workers, in order."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rigfit.blender.locate import Blender
from rigfit.blender.worker import BlenderWorker
from rigfit.render.camera import Camera
from rigfit.rig.spec import RigSpec

# Blender's memory grows over long runs.
RECYCLE_AFTER = 200


@dataclass(frozen=True)
class RandomFace:
    """Sample `index` of a seed. values: (P,) in spec order. picture: the PNG that Blender rendered through `camera`."""

    index: int
    values: NDArray[np.float64]
    camera: Camera
    picture: Path


def sample_values(worker: BlenderWorker, spec_path: Path, seed: int, start: int, count: int, folder: Path):
    """(count,P) parameter values, cameras and lights of samples start … start+count of a seed; nothing is rendered."""
    out = folder / f"samples-{seed}-{start}-{count}.npz"
    worker.call("studio.sample", spec=str(spec_path), seed=seed, start=start, count=count, out=str(out))
    with np.load(out, allow_pickle=False) as data:
        values = data["values"].astype(np.float64)
        records = json.loads(bytes(data["json"]).decode())
    out.unlink()
    return values, [Camera.from_json(c) for c in records["cameras"]], records["lights"]


def random_faces(
    blend: Path,
    spec_path: Path,
    *,
    seed: int,
    indices: Iterable[int],
    size_px: int,
    samples: int,
    folder: Path,
    subsurface: bool = True,
    denoise: bool = True,
    blender: Blender | None = None,
    workers: int | None = None,
) -> Generator[RandomFace, None, None]:
    """Render samples of a seed. A sample is the same whatever the number of workers.

    samples: Cycles samples per pixel. subsurface: False renders the skin as a plain surface, in half the time. denoise: where
    this Blender has a denoiser. folder: where the pictures go (the caller deletes them). workers: Blender processes; by
    default one a core, at most 4.
    """
    wanted = list(indices)
    if not wanted:
        return
    spec = RigSpec.load(spec_path)
    count = workers or max(1, min(4, (os.cpu_count() or 2)))
    with ExitStack() as stack:
        idle: list[BlenderWorker] = []
        lock = threading.Lock()
        for _ in range(min(count, len(wanted))):
            worker = stack.enter_context(BlenderWorker(blender, recycle_after=RECYCLE_AFTER))
            worker.call("file.open", path=str(blend))
            idle.append(worker)
        first = min(wanted)
        values, cameras, lights = sample_values(idle[0], spec_path, seed, first, max(wanted) - first + 1, folder)

        def render(index: int) -> RandomFace:
            row = index - first
            with lock:
                worker = idle.pop()
            try:
                camera = cameras[row].resized(size_px, size_px)
                named = {n: float(v) for n, v in zip(spec.names, values[row], strict=True)}
                picture = folder / f"{seed}-{index:06d}.png"
                worker.call("rig.apply", spec=str(spec_path), values=named)
                worker.call(
                    "studio.render",
                    camera=camera.to_json(),
                    light=lights[row],
                    samples=samples,
                    seed=index,
                    subsurface=subsurface,
                    denoise=denoise,
                    out=str(picture),
                )
            finally:
                with lock:
                    idle.append(worker)
            return RandomFace(index, values[row], camera, picture)

        pool = stack.enter_context(ThreadPoolExecutor(len(idle)))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        # A few ahead of the reader, so that Blender never waits and the disk does not fill.
        ahead = [pool.submit(render, i) for i in wanted[: 2 * len(idle)]]
        rest = iter(wanted[2 * len(idle) :])
        while ahead:
            face = ahead.pop(0).result()
            following = next(rest, None)
            if following is not None:
                ahead.append(pool.submit(render, following))
            yield face
