# SPDX-License-Identifier: Apache-2.0
"""A detector whose faults are known: it shrinks every face, sits beside the skin and shares noise between neighbours."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from mask_rig import camera_for, mask_rig, random_values
from rigfit.errors import UserError
from rigfit.fitting.calibrate import learn_detector_model, learn_prior, residuals
from rigfit.fitting.detector_model import DetectorModel
from rigfit.fitting.face_frame import FaceFrame, landmark_model
from rigfit.fitting.landmark_fit import Observation, fit_landmarks

SHRINKS = 0.65


@dataclass
class FaultyDetector:
    """Answers for a known face: u, v, depth."""

    spec: object
    seed: int

    def __post_init__(self):
        self.model = landmark_model(self.spec)
        self.frame = FaceFrame.from_landmarks(self.model.neutral)
        rng = np.random.default_rng(99)  # the faults are the same for every seed of faces
        self.bias = 0.02 * rng.normal(size=(478, 3))
        self.noise = DetectorModel.uncalibrated(self.frame.to_face(self.model.neutral), np.ones(19), 0.012)

    def faces(self, count):
        """values (N,P), cameras, detected (N,478,3)."""
        rng = np.random.default_rng(self.seed)
        rows = [self._one(rng) for _ in range(count)]
        return np.stack([r[0] for r in rows]), [r[1] for r in rows], np.stack([r[2] for r in rows])

    def _one(self, rng):
        values = random_values(self.spec, rng)
        camera = camera_for(
            self.spec, *rng.uniform(-20, 20, 3), face_px=rng.uniform(60, 160), focal_px=rng.uniform(700, 1500)
        )
        rotation, translation = self.frame.camera_to_face(camera)
        scale = camera.focal_px / translation[2]
        seen = self.model.neutral + SHRINKS * (self.model.points(values) - self.model.neutral)
        noise = self.noise.noise_factor @ rng.normal(size=self.noise.noise_factor.shape[2])
        noise = noise + np.sqrt(self.noise.noise_diagonal) * rng.normal(size=(478, 3))
        image = (self.bias + noise) @ rotation.T * scale
        depth = scale * (self.frame.to_face(seen) @ rotation.T)[:, 2] + rng.uniform(-50, 50)
        return values, camera, np.column_stack([camera.project(seen), depth]) + image


def observation(detected, depth=True):
    return Observation(detected[:, :2], np.ones(478), 640, 480, depth_px=detected[:, 2] if depth else None)


@pytest.fixture(scope="module")
def spec():
    return mask_rig()


@pytest.fixture(scope="module")
def training(spec):
    return FaultyDetector(spec, 0).faces(400)


@pytest.fixture(scope="module")
def learned(spec, training):
    return learn_detector_model(spec, *training)


def test_residuals_are_relative_to_the_neutral_face_and_do_not_know_the_pose(spec):
    """The same face seen twice, rolled and from another distance, has the same residuals in the face frame."""
    model = landmark_model(spec)
    values = random_values(spec, np.random.default_rng(1))
    frame = FaceFrame.from_landmarks(model.neutral)
    both = []
    for camera in (camera_for(spec, 5, 3, 0), camera_for(spec, 5, 3, 25, face_px=90)):
        rotation, translation = frame.camera_to_face(camera)
        points = model.points(values)
        depth = camera.focal_px / translation[2] * (frame.to_face(points) @ rotation.T)[:, 2] + 17
        both.append(residuals(spec, [camera], np.column_stack([camera.project(points), depth])[None])[0][0])
    assert np.abs(both[0]).max() > 0.02
    assert np.abs(both[0] - both[1]).max() < 0.015


def test_what_is_left_unexplained_is_the_noise(spec, learned):
    """On fresh faces the model predicts the detector to within the noise that was put in; and says so."""
    values, cameras, detected = FaultyDetector(spec, 1).faces(60)
    errors, bases = residuals(spec, cameras, detected)
    expected = np.tensordot(bases, learned.bias, 1)
    expected += np.tensordot((values - spec.default) / learned.sd, learned.response, 1)
    left = np.sqrt(np.mean(np.square(errors - expected)))
    before = np.sqrt(np.mean(np.square(errors)))
    assert left < 0.5 * before
    assert left < 0.016  # 0.012 a component went in, more on the outline
    told = np.sqrt(np.mean(learned.noise_diagonal + (learned.noise_factor**2).sum(axis=2)))
    assert 0.8 < told / left < 1.25


def test_a_faulty_detector_is_seen_through_once_it_is_calibrated(spec, learned):
    rig = spec.with_detector(learned.to_arrays(), None)
    values, _, detected = FaultyDetector(spec, 2).faces(12)
    identity = spec.group("identity")
    error = {"bare": [], "calibrated": [], "without depth": []}
    for truth, seen in zip(values, detected, strict=True):
        error["bare"].append(np.abs(fit_landmarks(spec, [observation(seen)]).values - truth)[identity].mean())
        error["calibrated"].append(np.abs(fit_landmarks(rig, [observation(seen)]).values - truth)[identity].mean())
        flat = fit_landmarks(rig, [observation(seen, depth=False)])
        error["without depth"].append(np.abs(flat.values - truth)[identity].mean())
    assert np.mean(error["calibrated"]) < 0.75 * np.mean(error["bare"])
    assert np.mean(error["calibrated"]) < np.mean(error["without depth"]) < np.mean(error["bare"])


def test_calibrated_fits_keep_the_rules(spec, learned):
    """Limits, locks, several photos of one person, and what is not solved."""
    rig = spec.with_detector(learned.to_arrays(), None)
    _, _, detected = FaultyDetector(spec, 3).faces(3)
    fit = fit_landmarks(rig, [observation(d) for d in detected], locked={"nose-width": 0.7, "jawOpen": 0.1})
    for photo in fit.photos:
        assert photo.values[rig.names.index("nose-width")] == 0.7
        assert photo.values[rig.names.index("jawOpen")] == 0.1
        assert (photo.values >= rig.minimum).all()
        assert (photo.values <= rig.maximum).all()
        assert (photo.values[rig.group("identity")] == fit.values[rig.group("identity")]).all()
    assert fit.values[rig.names.index("skin_tone")] == rig.default[-1]
    roll = fit_landmarks(rig, [observation(detected[0])])
    turned = detected[0].copy()
    turned[:, :2] = 480 - turned[:, 1::-1][:, ::-1]  # a half turn of the picture
    turned[:, 0] += 160
    upside_down = fit_landmarks(rig, [observation(turned)])
    assert np.abs(roll.values - upside_down.values).max() < 0.02


def test_a_photo_of_an_average_face_stays_near_the_default(spec, learned):
    rig = spec.with_detector(learned.to_arrays(), None)
    detector = FaultyDetector(spec, 0)
    camera = camera_for(spec, 5)
    rotation, translation = detector.frame.camera_to_face(camera)
    scale = camera.focal_px / translation[2]
    depth = scale * (detector.frame.to_face(detector.model.neutral) @ rotation.T)[:, 2]
    seen = np.column_stack([camera.project(detector.model.neutral), depth]) + detector.bias @ rotation.T * scale
    fit = fit_landmarks(rig, [observation(seen)])
    assert np.abs(fit.values - spec.default)[spec.group("identity")].mean() < 0.15


def test_failed_and_gross_detections_are_left_out(spec, training, learned):
    values, cameras, detected = training
    dirty = detected.copy()
    dirty[::10] = np.nan
    dirty[1::10] = dirty[1::10, np.random.default_rng(0).permutation(478)]
    model = learn_detector_model(spec, values, cameras, dirty)
    assert model.samples == 320
    assert np.sqrt(np.mean((model.bias[0] - learned.bias[0]) ** 2)) < 0.004


def test_too_few_detections_are_refused(spec, training):
    values, cameras, detected = training
    dirty = detected.copy()
    dirty[20:] = np.nan
    with pytest.raises(UserError, match="20 of 400"):
        learn_detector_model(spec, values, cameras, dirty)


def test_prior_learns_correlations_and_stays_invertible():
    spec = mask_rig()
    rng = np.random.default_rng(0)
    drawn = np.stack([random_values(spec, rng) for _ in range(3000)])
    a, b = (spec.names.index(f"mouthSmile{side}") for side in ("Left", "Right"))
    drawn[:, b] = drawn[:, a]
    sd, precision = learn_prior(spec, drawn)
    covariance = np.linalg.inv(precision)
    assert np.allclose(np.sqrt(np.diag(covariance)), sd)
    assert covariance[a, b] / (sd[a] * sd[b]) > 0.9
    assert np.linalg.eigvalsh(precision).min() > 0
    identity, expression = np.flatnonzero(spec.group("identity")), np.flatnonzero(spec.group("expression"))
    assert np.abs(precision[np.ix_(identity, expression)]).max() < 1e-9


def test_half_precision_of_the_shipped_form_changes_nothing_that_matters(spec, learned):
    half = replace(
        learned,
        response=learned.response.astype(np.float16).astype(float),
        noise_factor=learned.noise_factor.astype(np.float16).astype(float),
    )
    _, _, detected = FaultyDetector(spec, 4).faces(1)
    fits = [
        fit_landmarks(spec.with_detector(m.to_arrays(), None), [observation(detected[0])]).values
        for m in (learned, half)
    ]
    assert np.abs(fits[0] - fits[1]).max() < 0.01
