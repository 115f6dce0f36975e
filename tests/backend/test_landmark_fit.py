# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import numpy as np
import pytest
from mask_rig import camera_for, mask_rig, random_values
from rigfit.errors import UserError
from rigfit.fitting.bounded import bounded_quadratic
from rigfit.fitting.detector_model import DetectorModel, pose_basis
from rigfit.fitting.face_frame import FaceFrame, landmark_model
from rigfit.fitting.landmark_fit import LandmarkFitConfig, Observation, _Photo, _Solver, fit_landmarks
from rigfit.fitting.projection import Pose, landmark_jacobian, project_face
from rigfit.render.camera import rotation_from_vector
from scipy.optimize import lsq_linear

SHARP = LandmarkFitConfig(noise=2e-4, follow_outline=False, expression_l1=0.0, student_dof=np.inf, tolerance=1e-10)


def observe(spec, camera, values, noise_px=0.0, seed=0, **kwargs):
    pixels = camera.project(landmark_model(spec).points(values))
    pixels = pixels + noise_px * np.random.default_rng(seed).normal(size=pixels.shape)
    return Observation(pixels, np.ones(len(pixels)), camera.width, camera.height, **kwargs)


def solved(spec):
    return ~spec.group("appearance")


# --- pieces with known answers ------------------------------------------------------------------------------------


def test_projection_jacobian_against_differences():
    rng = np.random.default_rng(3)
    points, basis = rng.normal(size=(7, 3)), rng.normal(size=(5, 7, 3)) * 0.1
    pose = Pose(
        rotation_from_vector(np.array([0.3, -0.2, 0.5])), np.array([12.0, -30.0]), np.log(140.0), np.log(1100.0)
    )
    principal = np.array([320.0, 240.0])
    by_parameter, by_pose = landmark_jacobian(points, basis, pose)
    h = 1e-6
    for j in range(5):
        difference = project_face(points + h * basis[j], pose, principal) - project_face(
            points - h * basis[j], pose, principal
        )
        assert np.allclose(by_parameter[:, :, j], difference / (2 * h), atol=1e-5)
    for j in range(7):
        step = np.zeros(7)
        step[j] = h
        difference = project_face(points, pose.moved(step), principal) - project_face(
            points, pose.moved(-step), principal
        )
        assert np.allclose(by_pose[:, :, j], difference / (2 * h), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("mode", ["geometry", "learned"])
def test_gradient_of_the_whole_cost_against_differences(mode):
    """The normal equations' gradient is half the derivative of the cost, for parameters and pose."""
    spec = calibrated(mask_rig()) if mode == "learned" else mask_rig()
    truth = random_values(spec, np.random.default_rng(5))
    photo = observe(spec, camera_for(spec, 15, 5, 8), truth, 1.0, depth_px=np.linspace(-30, 40, 478))
    solver = _Solver(spec, [photo], LandmarkFitConfig(follow_outline=False), {}, {})
    if mode == "learned":
        solver.pose_of_neutral()
        solver.start_learned()
        assert solver.photos[0].residual.shape[1] == 3
    solver.values[0] = np.where(solver.free, np.clip(truth + 0.07, solver.lower, solver.upper), solver.default)
    held = [solver._held(p.pose) for p in solver.photos]
    precision = [solver._precision(0, held[0])]
    _, gradient, shared, own = solver._normal_equations(solver.free, held, precision)

    def cost(step):
        values, poses = solver._take(step, shared, own)
        if mode == "learned":
            poses = [p.pose for p in solver.photos]
        return solver._cost(values, poses, held, precision)

    for j in range(len(gradient)):
        h = 1e-5
        step = np.zeros(len(gradient))
        step[j] = h
        slope = (cost(step) - cost(-step)) / (2 * h)
        assert np.isclose(2 * gradient[j], slope, rtol=2e-3, atol=2e-3 * np.abs(gradient).max()), j
    assert np.abs(gradient).max() > 1


@pytest.mark.parametrize("seed", range(6))
def test_bounded_quadratic_agrees_with_scipy(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(60, 25)), 3 * rng.normal(size=60)
    low, high = -rng.uniform(0, 0.4, 25), rng.uniform(0, 0.4, 25)
    low[:3] = 0
    mine = bounded_quadratic(a.T @ a, -a.T @ b, low, high)
    reference = lsq_linear(a, b, (low, high + 1e-12), method="bvls", tol=1e-12).x
    assert np.allclose(mine, reference, atol=1e-5)


# --- known answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_exact_landmarks_give_the_exact_parameters(seed):
    spec = mask_rig()
    rng = np.random.default_rng(seed)
    truth = random_values(spec, rng)
    camera = camera_for(spec, *rng.uniform(-25, 25, 3))
    fit = fit_landmarks(spec, [observe(spec, camera, truth, focal_px=camera.focal_px)], SHARP)
    assert np.abs(fit.values - truth)[solved(spec)].max() < 0.02
    assert fit.photos[0].error_px < 0.05
    assert np.allclose(fit.photos[0].camera.rotation, camera.rotation, atol=2e-3)
    assert np.allclose(fit.photos[0].camera.project(spec.neutral[::40]), camera.project(spec.neutral[::40]), atol=0.5)


def test_noise_gives_an_error_that_the_standard_deviations_admit():
    """z = (found − true) / sd over many fits: neither over-confident nor blind."""
    spec = mask_rig()
    z = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        truth = spec.default.copy()
        identity = spec.group("identity")
        truth[identity] = np.clip(rng.normal(0, 0.35, identity.sum()), spec.minimum[identity], 1)
        camera = camera_for(spec, *rng.uniform(-20, 20, 3))
        model = landmark_model(spec)
        face = FaceFrame.from_landmarks(model.neutral).to_face(model.neutral)
        detector = DetectorModel.uncalibrated(face, np.full(len(truth), 0.35), 0.025)
        drawn = detector.noise_factor[:, :2] @ rng.normal(size=detector.noise_factor.shape[2])
        drawn += np.sqrt(detector.noise_diagonal[:, :2]) * rng.normal(size=(478, 2))
        pixels = camera.project(model.points(truth)) + 140 * drawn
        fit = fit_landmarks(
            spec, [Observation(pixels, np.ones(478), 640, 480)], LandmarkFitConfig(follow_outline=False)
        )
        free = identity & fit.identifiable
        z.append((fit.values - truth)[free] / fit.standard_deviation[free])
    z = np.concatenate(z)
    assert 0.6 < np.sqrt(np.mean(z**2)) < 1.5
    assert np.mean(np.abs(z) < 2) > 0.85


def test_signed_pair_is_found_on_both_sides_of_its_kink():
    spec = mask_rig()
    for value in (-0.8, 0.8):
        truth = spec.default.copy()
        truth[spec.names.index("mouth-width")] = value
        fit = fit_landmarks(spec, [observe(spec, camera_for(spec), truth)], SHARP)
        assert abs(fit.values[spec.names.index("mouth-width")] - value) < 0.02


def test_values_never_leave_their_limits_even_when_the_photo_asks_for_it():
    spec = mask_rig()
    truth = 3.0 * np.where(solved(spec), spec.maximum, 0) + np.where(solved(spec), 0, spec.default)
    fit = fit_landmarks(spec, [observe(spec, camera_for(spec), truth)])
    assert np.isfinite(fit.values).all()
    assert (fit.values >= spec.minimum).all()
    assert (fit.values <= spec.maximum).all()
    assert fit.values[spec.names.index("jawOpen")] > 0.99


def test_cost_falls_step_by_step():
    """Without robust weights, which change the cost between steps, only the held scale and angles may lift it a little."""
    spec = mask_rig()
    truth = random_values(spec, np.random.default_rng(1))
    config = LandmarkFitConfig(student_dof=np.inf, follow_outline=False)
    history = np.array(fit_landmarks(spec, [observe(spec, camera_for(spec, 20), truth, 1.5)], config).cost_history)
    assert (history[1:] < 1.02 * history[:-1]).all()
    assert history[-1] < 0.6 * history[0]


# --- one frame for all rigs, one answer for all placements ----------------------------------------------------------


def test_scale_orientation_and_place_of_the_rig_do_not_matter():
    """A rig in centimetres, Y up, far from the origin gives the same parameters from the same photo."""
    spec = mask_rig()
    truth = random_values(spec, np.random.default_rng(2))
    photo = observe(spec, camera_for(spec, 12, -4, 6), truth, 0.8)
    y_up = np.array([[1.0, 0, 0], [0, 0, 1], [0, -1, 0]])
    reference = fit_landmarks(spec, [photo])
    for other in (
        mask_rig(scale=100.0),
        mask_rig(rotation=y_up, offset=(3.0, -1.0, 0.5)),
        mask_rig(rotation=np.diag([-1.0, -1, 1])),
    ):
        fit = fit_landmarks(other, [photo])
        assert np.abs(fit.values - reference.values).max() < 2e-3
        assert np.allclose(fit.photos[0].points_px, reference.photos[0].points_px, atol=0.1)


@pytest.mark.parametrize("roll", [-30, 30, 90, 180])
def test_roll_does_not_change_the_parameters(roll):
    spec = mask_rig()
    truth = random_values(spec, np.random.default_rng(4))
    upright = fit_landmarks(spec, [observe(spec, camera_for(spec, 10, 5, width=600, height=600), truth)])
    rolled = fit_landmarks(spec, [observe(spec, camera_for(spec, 10, 5, roll, width=600, height=600), truth)])
    assert np.abs(upright.values - rolled.values).max() < 0.02


def test_the_result_does_not_depend_on_the_start():
    spec = mask_rig()
    truth = random_values(spec, np.random.default_rng(6))
    photo = observe(spec, camera_for(spec, 10), truth, 1.0)
    initial = {n: float(v) for n, v in zip(spec.names, random_values(spec, np.random.default_rng(7)), strict=True)}
    one, two = fit_landmarks(spec, [photo]), fit_landmarks(spec, [photo], initial=initial)
    free = one.identifiable & two.identifiable
    assert np.abs(one.values - two.values)[free].max() < 0.03


# --- several photos, locks, what the photo does not tell ------------------------------------------------------------


def test_photos_of_one_person_share_identity_and_keep_their_own_expression_and_camera():
    spec = mask_rig()
    identity, expression = spec.group("identity"), spec.group("expression")
    rng = np.random.default_rng(8)
    person = random_values(spec, rng)
    photos, truths = [], []
    for k, yaw in enumerate((-35, 0, 35)):
        truth = np.where(identity, person, random_values(spec, np.random.default_rng(20 + k)))
        truths.append(truth)
        photos.append(observe(spec, camera_for(spec, yaw, focal_px=800 + 300 * k), truth, 1.2, seed=k))
    together = fit_landmarks(spec, photos)
    for photo in together.photos:
        assert (photo.values[identity] == together.values[identity]).all()
    found = np.stack([p.values[expression] for p in together.photos])
    assert np.abs(found - np.stack(truths)[:, expression]).mean() < 0.12
    alone = [fit_landmarks(spec, [photo]) for photo in photos]
    error = np.abs(together.values - person)[identity].mean()
    assert error < np.mean([np.abs(f.values - person)[identity].mean() for f in alone])
    assert (together.standard_deviation[identity] <= alone[1].standard_deviation[identity] + 1e-6).all()


def test_locked_parameters_keep_their_value():
    spec = mask_rig()
    truth = random_values(spec, np.random.default_rng(9))
    fit = fit_landmarks(spec, [observe(spec, camera_for(spec), truth)], locked={"jawOpen": 0.33, "nose-width": 0.0})
    assert fit.values[spec.names.index("jawOpen")] == 0.33
    assert fit.values[spec.names.index("nose-width")] == 0.0
    assert fit.locked.sum() == 2
    assert not fit.identifiable[fit.locked].any()


def test_groups_that_are_not_solved_stay():
    spec = mask_rig()
    truth = random_values(spec, np.random.default_rng(9))
    fit = fit_landmarks(spec, [observe(spec, camera_for(spec), truth)], LandmarkFitConfig(solve=("expression",)))
    rest = ~spec.group("expression")
    assert (fit.values[rest] == spec.default[rest]).all()


def test_a_parameter_that_moves_nothing_seen_stays_at_its_default_and_is_reported():
    """Hide the lower face: the chin's length is not in the photo."""
    spec = mask_rig()
    truth = random_values(spec, np.random.default_rng(10))
    photo = observe(spec, camera_for(spec), truth)
    low = landmark_model(spec).neutral[:, 2] < 0.0
    photo.points_px[np.nan_to_num(low).astype(bool)] = np.nan
    fit = fit_landmarks(spec, [photo])
    chin = spec.names.index("chin-length")
    assert not fit.identifiable[chin]
    assert fit.values[chin] == 0.0
    assert fit.identifiable[spec.names.index("forehead-width")]
    assert not fit.identifiable[spec.names.index("skin_tone")]


def test_depth_of_the_nose_is_less_certain_from_the_front_than_from_the_side():
    spec = mask_rig()
    j = spec.names.index("nose-depth")
    front, side = (fit_landmarks(spec, [observe(spec, camera_for(spec, yaw), spec.default)]) for yaw in (0, 40))
    assert side.standard_deviation[j] < 0.7 * front.standard_deviation[j]


def test_outliers_do_not_pull_the_fit_along():
    """A bar over the eyes: a tenth of the landmarks is elsewhere."""
    spec = mask_rig()
    truth = random_values(spec, np.random.default_rng(11))
    clean = observe(spec, camera_for(spec, 5), truth, 1.0)
    dirty = replace(clean, points_px=clean.points_px.copy())
    hit = np.random.default_rng(0).choice(468, 47, replace=False)
    dirty.points_px[hit] += np.array([60.0, -45.0])
    robust = fit_landmarks(spec, [dirty])
    plain = fit_landmarks(spec, [dirty], LandmarkFitConfig(student_dof=np.inf))
    reference = fit_landmarks(spec, [clean]).values
    assert np.abs(robust.values - reference).mean() < 0.5 * np.abs(plain.values - reference).mean()
    assert robust.photos[0].robust_weight[hit].mean() < 0.3
    assert robust.photos[0].coverage < 0.95


@pytest.mark.parametrize(
    "name", ["jawOpen", "mouthSmileLeft", "mouthSmileRight", "browUp", "eyeBlinkLeft", "eyeBlinkRight"]
)
def test_each_expression_alone_is_found_alone(name):
    """A wink is a wink: that key is high, the other expressions stay low."""
    spec = mask_rig()
    truth = spec.default.copy()
    truth[spec.names.index(name)] = 1.0
    fit = fit_landmarks(spec, [observe(spec, camera_for(spec), truth, 0.5)], LandmarkFitConfig(noise=0.01))
    assert fit.values[spec.names.index(name)] >= 0.8
    others = spec.group("expression")
    others[spec.names.index(name)] = False
    assert fit.values[others].max() <= 0.2


def test_focal_length_from_the_photo_is_kept():
    spec = mask_rig()
    camera = camera_for(spec, 10, focal_px=2500)
    fit = fit_landmarks(spec, [observe(spec, camera, spec.default, 0.5, focal_px=2500.0)])
    assert abs(fit.photos[0].camera.focal_px / 2500 - 1) < 0.05
    assert fit.photos[0].focal_from == "exif"
    low, high = (mm * 640 / 36 for mm in LandmarkFitConfig().focal_mm[1:])
    free = fit_landmarks(spec, [observe(spec, camera, spec.default, 0.5)])
    assert low <= free.photos[0].camera.focal_px <= high


# --- outline --------------------------------------------------------------------------------------------------------


def test_outline_landmarks_follow_the_silhouette():
    """A detector that answers with the outermost visible point: following it beats pinning the landmark to the skin."""
    from toy_rig import toy_rig  # a closed head: a mask has no silhouette of its own

    spec = toy_rig()
    solver = _Solver(spec, [observe(spec, camera_for(spec, 0), spec.default)], LandmarkFitConfig(), {}, {})
    photo, outline = solver.photos[0], solver.marching
    assert outline is not None
    seen = 0
    for yaw in (0.0, 0.7, -0.7):
        photo.pose.rotation = rotation_from_vector(np.array([0.0, yaw, 0.0]))
        outline.follow(0, photo.pose, photo.principal, solver.values[0])
        pixels = project_face(outline.moving.points(solver.values[0]), photo.pose, photo.principal)[:, :2]
        middle = project_face(np.zeros((1, 3)), photo.pose, photo.principal)[0, :2]
        for landmark, row in outline.taken[0].items():
            out = (photo.pose.rotation @ outline.candidates.outward[landmark])[:2]
            reach = (pixels[outline.candidates.rows[landmark]] - middle) @ out
            assert (pixels[row] - middle) @ out >= reach.max() - 1e-9
            seen += 1
    assert seen > 5


# --- calibrated detector --------------------------------------------------------------------------------------------


def calibrated(spec, seed=0):
    """The spec with a detector model that has a bias, a response of seven tenths of the shape, and correlated noise."""
    rng = np.random.default_rng(seed)
    model = landmark_model(spec)
    frame = FaceFrame.from_landmarks(model.neutral)
    sd = np.full(len(spec.parameters), 0.35)
    base = DetectorModel.uncalibrated(frame.to_face(model.neutral), sd, 0.01)
    learned = replace(
        base,
        bias=0.01 * rng.normal(size=base.bias.shape),
        response=0.7 * 0.35 * frame.direction_to_face(model.positive) + 0.002 * rng.normal(size=base.response.shape),
        samples=500,
    )
    return spec.with_detector(learned.to_arrays(), {"samples": 500})


def test_detector_model_survives_the_rig_spec_file(tmp_path):
    spec = calibrated(mask_rig())
    spec.save(tmp_path / "rig.npz")
    from rigfit.rig.spec import RigSpec

    again = RigSpec.load(tmp_path / "rig.npz")
    one, two = (DetectorModel.from_arrays(s.detector, len(s.parameters)) for s in (spec, again))
    assert np.array_equal(one.bias, two.bias)
    assert one.samples == two.samples == 500
    assert len(pose_basis(0.1, 0.2)) == len(one.bias)


@pytest.mark.parametrize("damage", ["missing", "shape", "nan", "variance"])
def test_a_damaged_detector_model_is_refused(damage):
    spec = calibrated(mask_rig())
    arrays = {k: v.copy() for k, v in spec.detector.items()}
    if damage == "missing":
        del arrays["response"]
    elif damage == "shape":
        arrays["response"] = arrays["response"][1:]
    elif damage == "nan":
        arrays["bias"][0, 0, 0] = np.nan
    else:
        arrays["noise_diagonal"][3, 0] = -1
    with pytest.raises(UserError, match="rig calibrate"):
        fit_landmarks(spec.with_detector(arrays, None), [observe(spec, camera_for(spec), spec.default)])


# --- bad input ------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_in_words():
    spec = mask_rig()
    photo = observe(spec, camera_for(spec), spec.default)
    with pytest.raises(UserError, match="no landmarks"):
        fit_landmarks(spec.with_landmarks(None), [photo])
    with pytest.raises(UserError, match="No photo"):
        fit_landmarks(spec, [])
    with pytest.raises(UserError, match="'nope'"):
        fit_landmarks(spec, [photo], locked={"nope": 0.0})
    with pytest.raises(UserError, match="outside its limits"):
        fit_landmarks(spec, [photo], locked={"jawOpen": 7.0})
    with pytest.raises(UserError, match="outside its limits"):
        fit_landmarks(spec, [photo], initial={"jawOpen": float("nan")})
    few = replace(photo, points_px=np.where(np.arange(478)[:, None] < 9, photo.points_px, np.nan))
    with pytest.raises(UserError, match="at least 12"):
        fit_landmarks(spec, [few])


def test_first_pose_from_any_direction_is_close():
    """The closed form must not depend on a starting guess."""
    spec = mask_rig()
    model = landmark_model(spec)
    frame = FaceFrame.from_landmarks(model.neutral)
    points = frame.model_to_face(model)
    for yaw, pitch, roll in ((0, 0, 0), (60, 0, 0), (-40, 20, 100), (10, -30, 180)):
        camera = camera_for(spec, yaw, pitch, roll)
        photo = _Photo(observe(spec, camera, spec.default), points, LandmarkFitConfig())
        truth, _ = frame.camera_to_face(camera)
        angle = np.degrees(np.arccos(np.clip((np.trace(photo.pose.rotation.T @ truth) - 1) / 2, -1, 1)))
        assert angle < 12, (yaw, pitch, roll, angle)
