# SPDX-License-Identifier: Apache-2.0
"""Calibrate the landmark detector on the rig's own renders: learn a `DetectorModel`.

For every render the truth is known: where the embedded landmarks really are. What the detector answers instead is
regressed on the pose and on the face parameters (ridge regression; the penalty of each landmark by leave-one-out error,
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
from rigfit.fitting.face_frame import FaceFrame, head_angles, landmark_model
from rigfit.fitting.landmark_fit import LandmarkFitConfig
from rigfit.fitting.prepared import prior_sd
from rigfit.photo.landmarks import LandmarkDetector, detect_face
from rigfit.photo.load import load_photo
from rigfit.render.camera import Camera
from rigfit.rig.spec import RigSpec

# A detection whose landmarks are off by this much (median, face units) sat on something else than the face.
GROSS_ERROR = 0.25
PENALTIES = np.geomspace(0.003, 300, 18)
NOISE_FACTORS = 60
MIN_SAMPLES = 60
PRIOR_DRAWS = 5000

Progress = Callable[[int, int, str], None]


def detector_errors(
    spec: RigSpec, values: NDArray[np.float64], cameras: Sequence[Camera], detected: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What the detector adds to the truth, in face units and the roll-free image frame.

    values (N,P), detected (N,478,C) pixels: u, v and with C = 3 relative depth → errors (N,478,C), pose basis (N,7). NaN
    where the truth or the detection is. The origin of a depth is arbitrary: its mean over the landmarks is taken out.
    """
    model = landmark_model(spec)
    frame = FaceFrame.from_landmarks(model.neutral)
    errors = np.full(detected.shape, np.nan)
    bases = []
    for i, camera in enumerate(cameras):
        rotation, translation = frame.camera_to_face(camera)
        yaw, pitch, roll = head_angles(rotation)
        scale = camera.focal_px / translation[2]
        c, s = np.cos(roll), np.sin(roll)
        truth = model.points(values[i])
        difference = (detected[i, :, :2] - camera.project(truth)) / scale
        errors[i, :, :2] = difference @ np.array([[c, s], [-s, c]]).T
        if detected.shape[2] == 3:
            depth = detected[i, :, 2] / scale - (frame.to_face(truth) @ rotation.T)[:, 2]
            errors[i, :, 2] = depth - np.nanmean(depth)
        bases.append(pose_basis(yaw, pitch))
    return errors, np.stack(bases)


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
    """values: (N,P). cameras: N. detected: (N,478,C) as for `detector_errors`, all NaN where no face was found. drawn: (M,P) more faces of
    the same distribution for the prior, which need no picture.

    UserError kind ``calibration_failed`` when too few detections are of any use.
    """
    errors, bases = detector_errors(spec, values, cameras, detected)
    size = np.nanmedian(
        np.where(np.isfinite(errors).any(axis=(1, 2))[:, None], np.linalg.norm(errors[:, :, :2], axis=2), 9.0), axis=1
    )
    good = size < GROSS_ERROR
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
    n, landmarks, components = int(good.sum()), detected.shape[1], detected.shape[2]
    known = np.isfinite(errors[good]).all(axis=(0, 2))
    target = np.nan_to_num(errors[good]).reshape(n, components * landmarks)
    pose = bases[good]
    # The pose functions are not penalised: project them out of both sides first (Frisch–Waugh–Lovell).
    basis, _ = np.linalg.qr(pose)
    mixing = _visible_mixing(spec, sd)[np.ix_(sampled, sampled)]
    q_rest = q @ mixing
    q_rest = q_rest - basis @ (basis.T @ q_rest)
    t_rest = target - basis @ (basis.T @ target)
    u, s, vt = np.linalg.svd(q_rest, full_matrices=False)
    coefficients = u.T @ t_rest
    leverage_pose = np.sum(basis**2, axis=1)
    best = np.full(components * landmarks, np.inf)
    response_q = np.zeros((q.shape[1], components * landmarks))
    left_out = np.zeros_like(target)
    for penalty in PENALTIES:
        shrink = s**2 / (s**2 + penalty)
        fitted = u @ (shrink[:, None] * coefficients)
        leverage = leverage_pose + np.sum(u**2 * shrink, axis=1)
        press = (t_rest - fitted) / np.maximum(1 - leverage, 0.05)[:, None]
        # One penalty for all components of a landmark; medians, since a few renders are outliers.
        score = np.repeat(np.mean(np.minimum(press**2, 0.02), axis=0).reshape(-1, components).sum(axis=1), components)
        better = score < best
        best = np.where(better, score, best)
        solution = mixing @ vt.T @ ((s / (s**2 + penalty))[:, None] * coefficients)
        response_q[:, better] = solution[:, better]
        left_out[:, better] = press[:, better]
    bias = np.linalg.lstsq(pose, target - q @ response_q, rcond=None)[0]
    response = np.zeros((len(spec.parameters), components * landmarks))
    response[sampled] = response_q
    factor, diagonal = _noise(left_out, np.repeat(known, components))
    if components == 3:
        # The origin of the depth is unknown: all depths may move together.
        origin = np.tile([0.0, 0.0, 1.0], landmarks)[:, None]
        factor = np.concatenate([factor, origin], axis=1)
    return DetectorModel(
        bias=bias.reshape(-1, landmarks, components),
        response=response.reshape(-1, landmarks, components),
        mean=default.copy(),
        sd=sd,
        noise_factor=factor,
        noise_diagonal=diagonal,
        prior_precision=prior_precision,
        samples=n,
    )


def _visible_mixing(spec: RigSpec, sd: NDArray[np.float64]) -> NDArray[np.float64]:
    """(P,P) M with M Mᵀ = the overlap of what the parameters move: ridge on q·M penalises a response by how much landmark
    motion it stands for, so that parameters which move little cannot be blamed for what they cannot do."""
    model = landmark_model(spec)
    frame = FaceFrame.from_landmarks(model.neutral)
    moved = (frame.direction_to_face(model.positive) * sd[:, None, None]).reshape(len(sd), -1)
    u, s, _ = np.linalg.svd(moved, full_matrices=False)
    # Unit: the strongest motion has a variance of one. A floor keeps a little of every parameter.
    root = (u * np.maximum(s / s[0], 0.02)) @ u.T + 0.02 * (np.eye(len(sd)) - u @ u.T)
    return root


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
    # Directions that a few hundred renders have not shown exist all the same: never below a twentieth of the variance.
    floor = np.maximum(0.05 * variance, (0.002) ** 2)
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
