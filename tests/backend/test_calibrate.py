# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from mask_rig import camera_for, mask_rig, random_values
from rigfit.errors import UserError
from rigfit.fitting.calibrate import detector_errors, learn_detector_model
from rigfit.fitting.detector_model import DetectorModel
from rigfit.fitting.face_frame import landmark_model
from rigfit.fitting.landmark_fit import Observation, fit_landmarks
from test_landmark_fit import calibrated


def detections(spec, model, count, seed):
    """What a detector that obeys `model` answers on `count` random faces: values, cameras, pixels."""
    rng = np.random.default_rng(seed)
    values, cameras, pixels = [], [], []
    for _ in range(count):
        truth = random_values(spec, rng)
        angles = rng.uniform(-20, 20, 3)
        camera = camera_for(spec, *angles, face_px=rng.uniform(60, 160))
        yaw, pitch, roll = np.radians(angles)
        noise = model.noise_factor @ rng.normal(size=model.noise_factor.shape[1])
        noise = noise + np.sqrt(model.noise_diagonal) * rng.normal(size=len(noise))
        c, s = np.cos(roll), np.sin(roll)
        offset = (model.offset(yaw, pitch, truth) + noise.reshape(-1, 2)) @ np.array([[c, s], [-s, c]])
        scale = camera.focal_px / (camera.rotation @ _origin(spec) + camera.translation)[2] * _size(spec)
        pixels.append(camera.project(landmark_model(spec).points(truth)) + scale * offset)
        values.append(truth)
        cameras.append(camera)
    return np.stack(values), cameras, np.stack(pixels)


def _frame(spec):
    from rigfit.fitting.face_frame import FaceFrame

    return FaceFrame.from_landmarks(landmark_model(spec).neutral)


def _origin(spec):
    return _frame(spec).origin


def _size(spec):
    return _frame(spec).size


@pytest.fixture(scope="module")
def world():
    spec = calibrated(mask_rig())
    model = DetectorModel.from_arrays(spec.detector, len(spec.parameters))
    bare = spec.with_landmarks(spec.landmarks)
    return bare, model, detections(bare, model, 400, 0)


def test_errors_are_what_was_added(world):
    spec, model, (values, cameras, pixels) = world
    errors, bases = detector_errors(spec, values[:5], cameras[:5], pixels[:5])
    yaw, pitch = bases[0, 1], bases[0, 2]
    known = np.isfinite(errors[0]).all(axis=1)
    assert np.abs(errors[0] - model.offset(yaw, pitch, values[0]))[known].max() < 0.08
    assert known.all()


def test_bias_response_and_noise_are_learned(world):
    spec, model, (values, cameras, pixels) = world
    learned = learn_detector_model(spec, values, cameras, pixels)
    fresh = detections(spec, model, 60, 1)
    errors, _ = detector_errors(spec, *fresh)
    left = []
    for k, (truth, camera) in enumerate(zip(fresh[0], fresh[1], strict=True)):
        from rigfit.fitting.face_frame import head_angles

        yaw, pitch, _ = head_angles(_frame(spec).camera_to_face(camera)[0])
        left.append(errors[k] - learned.offset(yaw, pitch, truth))
    unexplained = np.sqrt(np.mean(np.square(left)))
    floor = np.sqrt(np.mean(model.noise_diagonal + (model.noise_factor**2).sum(axis=1)))
    before = np.sqrt(np.nanmean(np.square(errors)))
    assert unexplained < 1.15 * floor
    assert unexplained < 0.6 * before
    told = np.sqrt(np.mean(learned.noise_diagonal + (learned.noise_factor**2).sum(axis=1)))
    assert 0.85 < told / floor < 1.25


def test_a_learned_model_fits_better_than_none(world):
    spec, model, (values, cameras, pixels) = world
    learned = learn_detector_model(spec, values, cameras, pixels)
    spec2 = spec.with_detector(learned.to_arrays(), None)
    fresh = detections(spec, model, 5, 2)
    identity = spec.group("identity")
    errors = []
    for rig in (spec, spec2):
        errors.append(np.mean([
            np.abs(fit_landmarks(rig, [Observation(p, np.ones(478), 640, 480)]).values - v)[identity].mean()
            for v, p in zip(fresh[0], fresh[2], strict=True)
        ]))  # fmt: skip
    assert errors[1] < 0.75 * errors[0]


def test_failed_and_gross_detections_are_left_out(world):
    spec, _, (values, cameras, pixels) = world
    dirty = pixels.copy()
    dirty[::10] = np.nan
    dirty[1::10] += 300
    learned = learn_detector_model(spec, values, cameras, dirty)
    assert learned.samples == 320
    clean = learn_detector_model(spec, values, cameras, pixels)
    assert np.sqrt(np.mean((learned.bias[0] - clean.bias[0]) ** 2)) < 0.003


def test_too_few_detections_are_refused(world):
    spec, _, (values, cameras, pixels) = world
    dirty = pixels.copy()
    dirty[20:] = np.nan
    with pytest.raises(UserError, match="20 of 400"):
        learn_detector_model(spec, values, cameras, dirty)
