# SPDX-License-Identifier: Apache-2.0
"""From a seen face to a result: warnings that an artist needs, without a detector."""

from pathlib import Path

import numpy as np
import pytest
from mask_rig import camera_for, mask_rig, random_values
from rigfit.fitting.face_frame import landmark_model
from rigfit.fitting.fit_photos import SeenFace, fit_seen_faces
from rigfit.photo.face import FaceLandmarks
from rigfit.photo.load import Photo


def seen(spec, yaw_deg, faces_found=1):
    """A face turned by yaw; the landmarks of the far side are flagged as hidden."""
    values = random_values(spec, np.random.default_rng(2))
    model = landmark_model(spec)
    camera = camera_for(spec, yaw_deg)
    points = camera.project(model.points(values))
    hidden = model.neutral[:, 0] * np.sign(yaw_deg) * (abs(yaw_deg) > 30) < -0.02
    box = (*points.min(axis=0), *points.max(axis=0))
    face = FaceLandmarks(points, np.full(478, np.nan), tuple(map(float, box)), 1.0, 0, ~hidden)
    photo = Photo(np.zeros((480, 640, 3), np.uint8), Path("photo.png"), None, (640, 480), 1.0, "PNG")
    return SeenFace(photo, face, faces_found), values


@pytest.mark.parametrize("yaw_deg", [0, 20, 40, 60, 80, -60, -80])
def test_profiles_are_fitted_inside_the_limits_and_said_to_be_uncertain(yaw_deg):
    spec = mask_rig()
    one, truth = seen(spec, yaw_deg)
    result, fit = fit_seen_faces(spec, [one])
    assert np.isfinite(fit.values).all()
    assert ((fit.values >= spec.minimum) & (fit.values <= spec.maximum)).all()
    assert abs(result.photos[0].angles_deg[0] - yaw_deg) < 12
    warned = any("turned far" in warning for warning in result.photos[0].warnings)
    assert warned == (abs(yaw_deg) > 45)
    identity = spec.group("identity")
    # The hidden side follows the seen one or the default; it does not run to the limits.
    assert np.abs(fit.values - truth)[identity].mean() < 0.3


def test_several_faces_are_reported():
    spec = mask_rig()
    one, _ = seen(spec, 0, faces_found=3)
    result, _ = fit_seen_faces(spec, [one])
    assert any("3 faces found" in warning for warning in result.photos[0].warnings)
    assert result.photos[0].faces_found == 3
