# SPDX-License-Identifier: Apache-2.0
"""Calibrate the landmark detector on the rig's own renders: learn a `DetectorModel`.

For every render the truth is known. Where the detector puts the landmarks, against where the neutral face has them, is
regressed on the pose and on the face parameters (ridge regression; the penalty by the leave-one-out error,
Allen's PRESS: e_i / (1 − h_i)), and what stays unexplained is the noise, with the covariance that landmarks share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rigfit.blender.locate import Blender
from rigfit.blender.worker import BlenderWorker
from rigfit.data.random_faces import random_faces, sample_values
from rigfit.errors import UserError
from rigfit.files import write_atomically
from rigfit.fitting.detector_model import DetectorModel, pose_basis
from rigfit.fitting.face_frame import head_angles, landmark_model
from rigfit.fitting.landmark_fit import LandmarkFitConfig, Observation, neutral_residual
from rigfit.fitting.prepared import prior_sd
from rigfit.photo.landmarks import LandmarkDetector, detect_face
from rigfit.photo.load import load_photo
from rigfit.render.camera import Camera
from rigfit.rig.spec import RigSpec

# A detection whose landmarks are off by this much (median, face units) sat on something else than the face.
GROSS_ERROR = 0.3
PENALTIES = np.geomspace(3, 3000, 13)
OUTLIER = 0.15
NOISE_FACTORS, NOISE_FLOOR = 150, 0.02
MIN_SAMPLES = 60
PRIOR_DRAWS = 5000

Progress = Callable[[int, int, str], None]


def residuals(
    spec: RigSpec, cameras: Sequence[Camera], detected: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`neutral_residual` of many pictures. cameras: N, for the size of the picture only. detected: (N,478,3) pixels, u, v
    and relative depth → (N,478,3), all NaN where no face was found, and pose basis (N,7).

    The depths' mean is taken out, since their origin is arbitrary.
    """
    bare = spec.with_landmarks(spec.landmarks)
    out, bases = np.full(detected.shape, np.nan), np.zeros((len(cameras), len(pose_basis(0, 0))))
    for i, camera in enumerate(cameras):
        if not np.isfinite(detected[i]).any():
            continue
        seen = Observation(
            detected[i, :, :2], np.ones(len(detected[i])), camera.width, camera.height, depth_px=detected[i, :, 2]
        )
        residual, pose = neutral_residual(bare, seen)
        image = residual @ pose.rotation.T
        image[:, 2] -= np.nanmean(image[:, 2])
        out[i] = image @ pose.rotation
        bases[i] = pose_basis(*head_angles(pose.rotation)[:2])
    return out, bases


def learn_prior(spec: RigSpec, drawn: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(N,P) drawn faces → (P,) standard deviation around the defaults and (P,P) inverse covariance.

    The covariance of small samples is shrunk towards its diagonal; a parameter that is never drawn is independent, with
    the deviation that is assumed without a calibration. Identity and expression are independent.
    """
    off = drawn - spec.default
    deviation = np.sqrt(np.mean(off**2, axis=0))
    sampled = deviation > 1e-6
    sd = np.where(sampled, deviation, prior_sd(spec, LandmarkFitConfig().prior_sd))
    correlation = off.T @ off / len(off) / np.outer(sd, sd)
    expression = spec.group("expression")
    keep = len(off) / (len(off) + 2 * len(sd)) * (expression[:, None] == expression[None])
    correlation = np.where(np.eye(len(sd), dtype=bool), 1.0, keep * correlation)
    return sd, np.linalg.inv(correlation) / np.outer(sd, sd)


def learn_detector_model(
    spec: RigSpec,
    values: NDArray[np.float64],
    cameras: Sequence[Camera],
    detected: NDArray[np.float64],
    drawn: NDArray[np.float64] | None = None,
) -> DetectorModel:
    """values: (N,P). cameras: N. detected: (N,478,3) as for `residuals`, all NaN where no face was found. drawn: (M,P) more faces of
    the same distribution for the prior, which need no picture.

    UserError kind ``calibration_failed`` when too few detections are of any use.
    """
    errors, bases = residuals(spec, cameras, detected)
    known = np.isfinite(landmark_model(spec).neutral).all(axis=1)
    size = np.linalg.norm(errors[:, known], axis=2)
    good = np.median(np.where(np.isfinite(size), size, np.inf), axis=1) < GROSS_ERROR
    if good.sum() < MIN_SAMPLES:
        raise UserError(
            f"The detector found the face on {int(good.sum())} of {len(values)} renders, {MIN_SAMPLES} are needed: render "
            "more samples, or look at the rig's materials.",
            kind="calibration_failed",
        )
    default = spec.default
    sd, prior_precision = learn_prior(spec, values if drawn is None else drawn)
    sampled = np.abs(values - default).max(axis=0) > 1e-6
    q = ((values - default) / sd)[good][:, sampled]
    n, landmarks = int(good.sum()), detected.shape[1]
    target = np.nan_to_num(errors[good]).reshape(n, 3 * landmarks)
    pose = bases[good]
    # The pose functions are not penalised: project them out of both sides first (Frisch–Waugh–Lovell).
    basis, _ = np.linalg.qr(pose)
    q_rest = q - basis @ (basis.T @ q)
    t_rest = target - basis @ (basis.T @ target)
    u, s, vt = np.linalg.svd(q_rest, full_matrices=False)
    coefficients = u.T @ t_rest
    leverage_pose = np.sum(basis**2, axis=1)
    best, left_out, response_q = np.inf, t_rest, np.zeros((q.shape[1], target.shape[1]))
    for penalty in PENALTIES:
        shrink = s**2 / (s**2 + penalty)
        leverage = leverage_pose + np.sum(u**2 * shrink, axis=1)
        press = (t_rest - u @ (shrink[:, None] * coefficients)) / np.maximum(1 - leverage, 0.05)[:, None]
        # Cut off, since a few renders are outliers.
        score = float(np.mean(np.minimum(press**2, OUTLIER**2)))
        if score < best:
            best, left_out = score, press
            response_q = vt.T @ ((s / (s**2 + penalty))[:, None] * coefficients)
    bias = np.linalg.lstsq(pose, target - q @ response_q, rcond=None)[0]
    response = np.zeros((len(spec.parameters), 3 * landmarks))
    response[sampled] = response_q
    factor, diagonal = _noise(left_out, np.repeat(known, 3))
    return DetectorModel(
        bias=bias.reshape(-1, landmarks, 3),
        response=response.reshape(-1, landmarks, 3),
        sd=sd,
        noise_factor=factor.reshape(landmarks, 3, -1),
        noise_diagonal=diagonal.reshape(landmarks, 3),
        prior_precision=prior_precision,
        samples=n,
    )


def _noise(residual: NDArray[np.float64], known: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(N,M) left-out residuals, known (M,) → shared factors (M,K) and own variances (M,) (principal factors)."""
    size = np.sqrt(np.mean(residual**2, axis=1))
    # Outliers are what the solver's robust weights are for; they must not widen everybody's noise.
    limit = 3 * np.median(size)
    residual = residual * np.minimum(1, limit / np.maximum(size, 1e-12))[:, None]
    count = min(NOISE_FACTORS, len(residual) // 4)
    _, s, vt = np.linalg.svd(residual / np.sqrt(len(residual)), full_matrices=False)
    factor = vt[:count].T * s[:count]
    variance = np.mean(residual**2, axis=0)
    own = np.maximum(variance - np.sum(factor**2, axis=1), 0)
    # Directions that a few hundred renders have not shown exist all the same: never below a share of the variance.
    floor = np.maximum(NOISE_FLOOR * variance, 0.001**2)
    diagonal = np.maximum(own, floor)
    diagonal[~known] = 1.0
    return factor, diagonal


def calibrate(
    blend: Path,
    spec_path: Path,
    detector: LandmarkDetector,
    *,
    count: int,
    seed: int,
    folder: Path,
    size_px: int = 256,
    samples: int = 4,
    blender: Blender | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> DetectorModel:
    """Render `count` random faces of the rig, detect, learn.

    folder: keeps what was detected so far (`detections-….npz`), so that an interrupted run goes on where it stopped;
    pictures are deleted once they were looked at.
    """
    spec = RigSpec.load(spec_path)
    if count < MIN_SAMPLES:
        raise UserError(
            f"{count} samples are too few to calibrate: at least {MIN_SAMPLES} are needed.", kind="bad_option"
        )
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / f"detections-{spec.rig_hash[:12]}-{_embedding_key(spec)}-{seed}-{size_px}-{samples}.npz"
    done = _load(store)
    faces = random_faces(
        blend,
        spec_path,
        seed=seed,
        indices=[i for i in range(count) if i not in done],
        size_px=size_px,
        samples=samples,
        # Light under the skin moves no landmark, and it is most of a render's time.
        subsurface=False,
        folder=folder,
        blender=blender,
        workers=workers,
    )
    try:
        for face in faces:
            try:
                found = detect_face(load_photo(face.picture), detector)
                points = np.column_stack([found.points_px, found.depth])
            except UserError as error:
                if error.kind not in ("no_face", "face_too_small"):
                    raise
                points = np.full((478, 3), np.nan)
            face.picture.unlink()
            done[face.index] = (face.values, face.camera, points)
            if progress:
                progress(len(done), count, "rendering and detecting random faces")
            if len(done) % 50 == 0:
                _save(store, done)
    finally:
        faces.close()
        if done:
            _save(store, done)
    rows = [done[i] for i in sorted(done) if i < count]
    with BlenderWorker(blender) as worker:
        drawn, _, _ = sample_values(worker, spec_path, seed, count, PRIOR_DRAWS, folder)
    return learn_detector_model(
        spec, np.stack([r[0] for r in rows]), [r[1] for r in rows], np.stack([r[2] for r in rows]), drawn
    )


def _embedding_key(spec: RigSpec) -> str:
    import hashlib

    assert spec.landmarks is not None
    return hashlib.sha256(spec.landmarks.triangle.tobytes()).hexdigest()[:8]


def _save(store: Path, done: dict) -> None:
    order = sorted(done)
    cameras = [done[i][1] for i in order]
    arrays = {
        "index": np.array(order, np.int64),
        "values": np.stack([done[i][0] for i in order]),
        "detected": np.stack([done[i][2] for i in order]),
        "intrinsics": np.array([[c.width, c.height, c.focal_px, *c.principal_px] for c in cameras]),
        "rotation": np.stack([c.rotation for c in cameras]),
        "translation": np.stack([c.translation for c in cameras]),
    }
    write_atomically(store, lambda path: np.savez_compressed(path, **arrays))


def _load(store: Path) -> dict:
    if not store.exists():
        return {}
    with np.load(store, allow_pickle=False) as data:
        a = {name: data[name] for name in data.files}
    done = {}
    for row, index in enumerate(a["index"]):
        width, height, focal, cx, cy = a["intrinsics"][row]
        camera = Camera(
            int(width), int(height), float(focal), np.array([cx, cy]), a["rotation"][row], a["translation"][row]
        )
        done[int(index)] = (a["values"][row], camera, a["detected"][row])
    return done
