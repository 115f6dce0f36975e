# SPDX-License-Identifier: Apache-2.0
"""Recovery: Blender renders random held-out faces, the photo path gets the pictures alone, and the mesh is compared.

Each picture goes through the same road as a user's photo (PNG file, detector, solver). Truth is used only to measure.
In the same run: the neutral face, the mean of the sampling distribution, and the solver fed with the true positions of
the landmarks (the floor that a perfect detector would give).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rigfit.bench.report import Figure
from rigfit.blender.locate import Blender
from rigfit.blender.worker import BlenderWorker
from rigfit.data.random_faces import random_faces, sample_values
from rigfit.errors import UserError
from rigfit.fitting.face_frame import FaceFrame, landmark_model
from rigfit.fitting.fit_photos import SeenFace, fit_seen_faces, see_face
from rigfit.fitting.landmark_fit import LandmarkFitConfig, Observation, fit_landmarks
from rigfit.geometry import similarity
from rigfit.photo import mesh478
from rigfit.photo.landmarks import LandmarkDetector
from rigfit.rig.blendshapes import evaluate
from rigfit.rig.spec import RigSpec
from rigfit.rig.surface import in_parts

SIZE_PX, SAMPLES = 512, 8
# A fit that leaves the face this far from the truth found something else.
FAILURE_MM = 10.0
# The first one warms caches and is not counted.
TIMED_FACES = 21
# The true points carry a noise of this size for the solver: a perfect detector, not a solver told to be infinitely sure.
PERFECT_NOISE = 0.002

Progress = Callable[[int, int, str], None]


def face_region(spec: RigSpec) -> NDArray[np.intp]:
    """Vertices of the face: skin, lips and brows in front of the ears, inside the outline of the landmarks."""
    from PIL import Image, ImageDraw

    model = landmark_model(spec)
    frame = FaceFrame.from_landmarks(model.neutral)
    outline = frame.to_face(model.neutral)[list(mesh478.FACE_OVAL)]
    outline = outline[np.isfinite(outline).all(axis=1)]
    vertices = frame.to_face(spec.neutral)
    mask = Image.new("1", (600, 600))
    to_pixel = lambda p: p[:, :2] * 150 + 300  # noqa: E731
    ImageDraw.Draw(mask).polygon([(float(x), float(y)) for x, y in to_pixel(outline)], fill=1)
    pixel = np.clip(to_pixel(vertices).round().astype(int), 0, 599)
    inside = np.asarray(mask)[pixel[:, 1], pixel[:, 0]]
    skin = np.zeros(len(vertices), bool)
    skin[np.unique(spec.triangles[in_parts(spec, "skin", "lips", "brow")])] = True
    # The back of the head and the throat also project into the outline.
    front = vertices[:, 2] < np.percentile(outline[:, 2], 95) + 0.1
    return np.flatnonzero(inside & skin & front)


@dataclass
class _Errors:
    """Vertex errors of one method over all faces, millimetres."""

    aligned: list[float] = field(default_factory=list)
    aligned_p95: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    def add(self, found: NDArray, truth: NDArray, unit_mm: float) -> None:
        """found, truth: (n,3) vertices of the region, rig frame, metres."""
        after = np.linalg.norm(similarity(found, truth).apply(found) - truth, axis=1) * unit_mm
        self.aligned.append(float(after.mean()))
        self.aligned_p95.append(float(np.percentile(after, 95)))
        self.plain.append(float(np.linalg.norm(found - truth, axis=1).mean() * unit_mm))


@dataclass(frozen=True)
class Recovery:
    """Outcome: a row a method, and the figures with their targets. faces: one dict a face, for plots and post-mortems."""

    figures: list[Figure]
    rows: list[dict[str, float | str]]
    faces: list[dict[str, float | int | str]]


def recovery(
    blend: Path,
    spec_path: Path,
    detector: LandmarkDetector,
    *,
    count: int,
    seed: int,
    method: str = "landmarks",
    blender: Blender | None = None,
    workers: int | None = None,
    config: LandmarkFitConfig | None = None,
    progress: Progress | None = None,
    keep: Path | None = None,
) -> Recovery:
    """Measure `method` ("landmarks") on `count` random faces of `seed`. keep: folder that receives the pictures."""
    if count < 1:
        raise UserError("--count must be at least 1.", kind="bad_option")
    spec = RigSpec.load(spec_path)
    config = config or LandmarkFitConfig()
    model = landmark_model(spec)
    frame = FaceFrame.from_landmarks(model.neutral)
    region = face_region(spec)
    # Real heads: the outer eye corners of an adult are about 90 mm apart. Rigs in other units are reported at that size.
    unit_mm = 1000.0 if 0.05 < frame.size < 0.2 else 90.0 / frame.size
    names = ("neutral face", "mean of the sampling distribution", f"fit: {method}", "fit: true landmark positions")
    errors = {name: _Errors() for name in names}
    faces, failures, outside, landmark_percent, timed = [], 0, 0, [], []
    parameter_error, reach = [], spec.maximum - spec.minimum
    with tempfile.TemporaryDirectory(prefix="rigfit-recovery-") as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with BlenderWorker(blender) as worker:
            # From another seed, so that the held-out faces have no say in their own baseline.
            drawn, _, _ = sample_values(worker, spec_path, seed + 1_000_003, 0, 2000, folder)
        mean_values = np.clip(drawn.mean(axis=0), spec.minimum, spec.maximum)
        for n, face in enumerate(
            random_faces(
                blend, spec_path, seed=seed, indices=range(count), size_px=SIZE_PX, samples=SAMPLES,
                folder=folder, blender=blender, workers=workers,
            )
        ):  # fmt: skip
            truth = evaluate(spec, face.values)[region]
            errors[names[0]].add(evaluate(spec, spec.default)[region], truth, unit_mm)
            errors[names[1]].add(evaluate(spec, mean_values)[region], truth, unit_mm)
            record: dict[str, float | int | str] = {"index": face.index}
            try:
                seen = see_face(face.picture, detector)
                result, fit = fit_seen_faces(spec, [seen], config)
            except UserError as error:
                failures += 1
                record["failure"] = error.kind
            else:
                outside += int(not _inside(spec, fit.values))
                errors[names[2]].add(evaluate(spec, fit.values)[region], truth, unit_mm)
                difference = np.abs(fit.values - face.values) / np.where(reach > 0, reach, 1)
                parameter_error += list(100 * difference[fit.identifiable])
                landmark_percent.append(result.photos[0].landmark_error_percent)
                failures += int(errors[names[2]].aligned[-1] > FAILURE_MM)
                record |= {"aligned_mm": errors[names[2]].aligned[-1], "landmark_percent": landmark_percent[-1]}
                errors[names[3]].add(*_perfect(spec, face, seen, config, region, truth), unit_mm)
                record["true_landmarks_mm"] = errors[names[3]].aligned[-1]
            faces.append(record)
            if len(timed) < TIMED_FACES and "failure" not in record:
                timed.append(face.picture)
            elif keep is None:
                face.picture.unlink()
            if progress:
                progress(n + 1, count, "rendering and fitting random faces")
        # Timed at the end, when no Blender shares the cores: that is how a user meets it.
        seconds_each = [_seconds(spec, picture, detector, config) for picture in timed][1:]
    return _report(
        seconds_each, errors, names, method, faces, failures, outside, landmark_percent, parameter_error, count
    )


def _seconds(spec: RigSpec, picture: Path, detector: LandmarkDetector, config: LandmarkFitConfig) -> float:
    start = time.perf_counter()
    fit_seen_faces(spec, [see_face(picture, detector)], config)
    return time.perf_counter() - start


def _inside(spec: RigSpec, values: NDArray[np.float64]) -> bool:
    return bool(np.isfinite(values).all() and (values >= spec.minimum).all() and (values <= spec.maximum).all())


def _perfect(spec: RigSpec, face, seen: SeenFace, config: LandmarkFitConfig, region, truth):
    """The same solver, uncalibrated, on the true projections of the embedded landmarks."""
    from dataclasses import replace

    true_px = face.camera.project(landmark_model(spec).points(face.values))
    bare = spec.with_landmarks(spec.landmarks)
    sharp = replace(config, noise=PERFECT_NOISE, follow_outline=False)
    height, width = seen.photo.image.shape[:2]
    fit = fit_landmarks(bare, [Observation(true_px, np.ones(len(true_px)), width, height)], sharp)
    return evaluate(spec, fit.values)[region], truth


def _report(
    seconds_each, errors, names, method, faces, failures, outside, landmark_percent, parameter_error, count
) -> Recovery:
    rows: list[dict[str, float | str]] = []
    for name in names:
        e = errors[name]
        rows.append(
            {
                "method": name,
                "aligned mean mm": float(np.mean(e.aligned)) if e.aligned else float("nan"),
                "aligned p95 mm": float(np.mean(e.aligned_p95)) if e.aligned else float("nan"),
                "worst face mm": float(np.max(e.aligned)) if e.aligned else float("nan"),
                "unaligned mean mm": float(np.mean(e.plain)) if e.plain else float("nan"),
            }
        )
    product = errors[names[2]]
    baselines = {name: float(np.mean(errors[name].aligned)) for name in names[:2]}
    peer = min(baselines, key=lambda name: baselines[name])
    own = float(np.mean(product.aligned)) if product.aligned else float("inf")
    spread = [float(np.percentile(product.aligned, q)) for q in (25, 75)] if product.aligned else None
    figures = [
        Figure(f"aligned vertex error, {method} / {peer}", own / baselines[peer], "ratio", None, 0.65, "lower"),
        Figure(f"aligned vertex error, {method}", own, "mm", spread, None, "lower"),
        Figure(
            f"aligned vertex error, 95th percentile over the face, {method}",
            float(rows[2]["aligned p95 mm"]),
            "mm",
            None,
            None,
            "lower",
        ),
        Figure(f"aligned vertex error, {peer}", baselines[peer], "mm", None, None, "lower"),
        Figure(
            "aligned vertex error, true landmark positions",
            float(rows[3]["aligned mean mm"]),
            "mm",
            None,
            None,
            "lower",
        ),
        Figure("failures", 100 * failures / count, "%", None, 2.0, "lower"),
        Figure("fits with a value outside its limits or not a number", float(outside), "fits", None, 0.0, "lower"),
        Figure("parameter error, identifiable parameters", _mean(parameter_error), "% of range", None, None, "lower"),
        Figure("landmark error", _mean(landmark_percent), "% of eye distance", None, None, "lower"),
        Figure("time a photo, detection and fit, median", _median(seconds_each), "s", None, 0.3, "lower"),
    ]
    return Recovery(figures, rows, faces)


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else float("nan")
