# SPDX-License-Identifier: Apache-2.0
"""The whole photo path: file → face → landmarks → face parameters → fit result, and its verification in Blender."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rigfit.blender.worker import BlenderWorker
from rigfit.errors import UserError
from rigfit.fitting.landmark_fit import LandmarkFit, LandmarkFitConfig, Observation, PhotoFit, fit_landmarks
from rigfit.fitting.result import FitResult, ParameterResult, PhotoResult, Verification
from rigfit.photo import mesh478
from rigfit.photo.landmarks import FaceLandmarks, LandmarkDetector, detect_face, load_landmark_file
from rigfit.photo.load import Photo, load_photo
from rigfit.render.camera import FULL_FRAME_WIDTH_MM, Camera
from rigfit.rig.spec import RigSpec

PROFILE_DEG, STEEP_DEG, LOW_COVERAGE, LARGE_ERROR_PERCENT = 45.0, 30.0, 0.7, 6.0
VERIFY_SIZE_PX, VERIFY_SAMPLES = 512, 32
# The verification looks at a square around the face, this many times the size of its box.
CROP_MARGIN = 1.9

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class SeenFace:
    """A photo and the face that was chosen in it. faces_found: how many there were."""

    photo: Photo
    face: FaceLandmarks
    faces_found: int


def see_face(
    path: Path, detector: LandmarkDetector, *, face: int | None = None, landmark_file: Path | None = None
) -> SeenFace:
    """Load a photo and find its face, or take the landmarks from a file."""
    photo = load_photo(path)
    if landmark_file is not None:
        return SeenFace(photo, load_landmark_file(landmark_file, (photo.image.shape[1], photo.image.shape[0])), 1)
    found = detect_face(photo, detector, face)
    return SeenFace(photo, found, found.faces_found)


def observe(seen: SeenFace, focal_mm: float | None = None) -> Observation:
    """What the solver needs to know of a photo. focal_mm: 35 mm equivalent, where the user knows better than the file.

    UserError kind ``bad_focal_length``.
    """
    height, width = seen.photo.image.shape[:2]
    focal_px = None
    if focal_mm is not None:
        if not 5 <= focal_mm <= 2000:
            raise UserError(f"{focal_mm:g} mm is no focal length: 20 to 200 is usual.", kind="bad_focal_length")
        focal_px = focal_mm * max(width, height) / FULL_FRAME_WIDTH_MM
    weight = np.where(seen.face.visible, 1.0, 0.35)
    return Observation(seen.face.points_px, weight, width, height, focal_px or seen.photo.focal_px, seen.face.depth)


def fit_seen_faces(
    spec: RigSpec,
    seen: Sequence[SeenFace],
    config: LandmarkFitConfig | None = None,
    locked: Mapping[str, float] | None = None,
    initial: Mapping[str, float] | None = None,
    focal_mm: float | None = None,
    check: Callable[[], None] | None = None,
) -> tuple[FitResult, LandmarkFit]:
    """Fit one person seen in one or more photos. UserError as `observe` and `fit_landmarks`."""
    start = time.perf_counter()
    fit = fit_landmarks(spec, [observe(s, focal_mm) for s in seen], config, locked, initial, check)
    seconds = time.perf_counter() - start
    parameters = {
        p.name: ParameterResult(
            value=float(fit.values[j]),
            standard_deviation=float(fit.standard_deviation[j]),
            identifiable=bool(fit.identifiable[j]),
            group=p.group,
            locked=bool(fit.locked[j]),
        )
        for j, p in enumerate(spec.parameters)
    }
    photos = [_photo_result(spec, s, f) for s, f in zip(seen, fit.photos, strict=True)]
    if focal_mm is not None:
        photos = [replace(photo, focal_from="given") for photo in photos]
    return FitResult(spec.rig_hash, "landmarks", parameters, photos, seconds, list(spec.warnings)), fit


def _photo_result(spec: RigSpec, seen: SeenFace, fit: PhotoFit) -> PhotoResult:
    yaw, pitch, _ = fit.angles_deg
    warnings = []
    if abs(yaw) > PROFILE_DEG or abs(pitch) > STEEP_DEG:
        warnings.append(
            f"The head is turned far (yaw {yaw:.0f}°, pitch {pitch:.0f}°): the hidden side is a guess; a more frontal photo is better."
        )
    if fit.coverage < LOW_COVERAGE:
        warnings.append(f"Only {fit.coverage:.0%} of the face agrees with the rig: something may cover it.")
    if fit.error_percent > LARGE_ERROR_PERCENT:
        warnings.append(
            "The landmarks are matched badly: the face may be drawn, covered or far from what the rig can do."
        )
    if seen.faces_found > 1:
        warnings.append(
            f"{seen.faces_found} faces found, the chosen one is {seen.face.width_px:.0f} px wide; "
            "another can be chosen by its number."
        )
    height, width = seen.photo.image.shape[:2]
    expression = {p.name: float(fit.values[j]) for j, p in enumerate(spec.parameters) if p.group == "expression"}
    return PhotoResult(
        path=str(seen.photo.path),
        size_px=(width, height),
        camera=fit.camera,
        focal_from=fit.focal_from,
        expression=expression,
        landmark_error_px=fit.error_px,
        landmark_error_percent=fit.error_percent,
        coverage=fit.coverage,
        faces_found=seen.faces_found,
        angles_deg=fit.angles_deg,
        warnings=warnings,
    )


def face_crop(
    camera: Camera, box_px: Sequence[float], size_px: int = VERIFY_SIZE_PX
) -> tuple[Camera, NDArray[np.float64]]:
    """A camera that sees only the square around the face, and the square (x0, y0, side) in pixels of the photo."""
    x0, y0, x1, y1 = box_px
    side = CROP_MARGIN * max(x1 - x0, y1 - y0)
    corner = np.array([(x0 + x1) / 2 - side / 2, (y0 + y1) / 2 - 0.53 * side])
    k = size_px / side
    crop = replace(
        camera,
        width=size_px,
        height=size_px,
        focal_px=camera.focal_px * k,
        principal_px=(camera.principal_px - corner) * k,
    )
    return crop, np.array([*corner, side])


def verify(
    worker: BlenderWorker,
    spec_path: Path,
    values: Mapping[str, float],
    camera: Camera,
    face: FaceLandmarks,
    detector: LandmarkDetector,
    out: Path,
    *,
    light: Mapping[str, Any] | None = None,
    samples: int = VERIFY_SAMPLES,
    subsurface: bool = True,
    gpu: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Apply `values` to the rig open in `worker`, render it around the face to `out`, detect, compare.

    camera: the fitted one of the photo. face: what was detected in the photo. samples, subsurface, gpu: of the worker's
    ``studio.render``. progress: called before each step.
    """
    start = time.perf_counter()
    say = progress or (lambda done, total, text: None)
    say(0, 3, "applying the parameters")
    worker.call("rig.apply", spec=str(spec_path), values=dict(values))
    camera, square = face_crop(camera, face.box_px, VERIFY_SIZE_PX)
    say(1, 3, "rendering")
    worker.call(
        "studio.render",
        camera=camera.to_json(),
        samples=samples,
        subsurface=subsurface,
        seed=0,
        light=light,
        denoise=True,
        transparent=True,
        gpu=gpu,
        out=str(out),
    )
    say(2, 3, "looking at the render")
    error = None
    try:
        on_render = detect_face(load_photo(out), detector)
    except UserError:
        on_render = None
    if on_render is not None:
        wanted = (face.points_px - square[:2]) * (camera.width / square[2])
        eyes = wanted[list(mesh478.OUTER_EYE_CORNERS)]
        both = np.isfinite(wanted).all(axis=1)
        distance = np.linalg.norm(on_render.points_px - wanted, axis=1)[both]
        error = 100 * float(distance.mean() / np.linalg.norm(eyes[0] - eyes[1]))
        error = error if np.isfinite(error) else None
    version = str(worker.hello.get("blender_version", ""))
    return Verification(on_render is not None, error, version, time.perf_counter() - start)
