# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from rigfit.fitting.face_frame import FaceFrame, head_angles, rotation_from_angles
from rigfit.render.camera import Camera, cross_matrix, look_at, rotation_from_vector
from scipy.spatial.transform import Rotation


def test_a_point_ahead_to_the_right_and_above_lands_right_of_and_above_the_middle():
    camera = look_at(np.zeros(3), np.array([0, 1, 0]), np.array([0, 0, 1]), 2.0, 1000.0, 640, 480)
    assert np.allclose(camera.centre, [0, -2, 0])
    assert np.allclose(camera.project(np.zeros(3)), [320, 240])
    # 0.1 m to the right at 2 m: 1000 · 0.1 / 2 = 50 px; up is smaller v.
    assert np.allclose(camera.project(np.array([[0.1, 0, 0], [0, 0, 0.1]])), [[370, 240], [320, 190]])
    assert np.isclose(np.linalg.det(camera.rotation), 1)


def test_points_behind_the_camera_are_nan():
    camera = look_at(np.zeros(3), np.array([0, 1, 0]), np.array([0, 0, 1]), 2.0, 1000.0, 640, 480)
    assert np.isnan(camera.project(np.array([0.0, -3.0, 0.0]))).all()


def test_rays_go_through_the_points_they_came_from():
    camera = Camera(
        500,
        300,
        700.0,
        np.array([240.0, 160.0]),
        rotation_from_vector(np.array([0.2, -0.4, 0.1])),
        np.array([0.1, 0.2, 3]),
    )
    points = np.random.default_rng(0).normal(size=(20, 3))
    origin, direction = camera.rays(camera.project(points))
    along = points - origin
    assert np.allclose(np.cross(along, direction), 0, atol=1e-9)


def test_resized_keeps_what_is_seen():
    camera = Camera(400, 200, 500.0, np.array([210.0, 90.0]), np.eye(3), np.array([0.0, 0, 2]))
    points = np.random.default_rng(1).normal(size=(5, 3)) * 0.3
    assert np.allclose(camera.resized(800, 400).project(points), 2 * camera.project(points))


def test_json_round_trip():
    camera = Camera(
        400, 200, 500.0, np.array([210.0, 90.0]), rotation_from_vector(np.array([1.0, 2, 3])), np.array([0.0, 0, 2])
    )
    again = Camera.from_json(camera.to_json())
    assert again.to_json() == camera.to_json()


@pytest.mark.parametrize("vector", [[0, 0, 0], [1e-10, 0, 0], [0.3, -0.2, 0.9], [0, 3.0, 0]])
def test_rotation_vector_against_scipy(vector):
    assert np.allclose(rotation_from_vector(np.array(vector)), Rotation.from_rotvec(vector).as_matrix(), atol=1e-9)
    w = np.array([0.3, 0.1, -2])
    assert np.allclose(cross_matrix(np.array(vector)) @ w, np.cross(vector, w))


def test_head_angles_and_their_inverse():
    for angles in ((0.5, -0.3, 0.2), (-1.2, 0.4, -2.8), (0, 0, 0)):
        assert np.allclose(head_angles(rotation_from_angles(*angles)), angles)


def test_angles_mean_what_they_say():
    """Positive yaw turns the nose to the left of the picture, positive pitch down, positive roll clockwise."""
    nose, crown = np.array([0, 0, -1.0]), np.array([0, -1.0, 0])
    assert (rotation_from_angles(0.5, 0, 0) @ nose)[0] < 0
    assert (rotation_from_angles(0, 0.3, 0) @ nose)[1] > 0
    assert (rotation_from_angles(0, 0, 0.3) @ crown)[0] > 0


def test_face_frame_of_a_frontal_face_is_the_camera_frame():
    points = np.full((478, 3), np.nan)
    points[[33, 263, 10, 152]] = [[-0.045, 0, 0.03], [0.045, 0, 0.03], [0, 0, 0.1], [0, 0.01, -0.08]]
    frame = FaceFrame.from_landmarks(points)
    assert np.isclose(frame.size, 0.09)
    assert np.allclose(frame.axes[0], [1, 0, 0])
    assert frame.axes[1] @ [0, 0, -1] > 0.99
    assert np.isclose(np.linalg.det(frame.axes), 1)
    camera = look_at(np.array([0, 0, 0.02]), np.array([0, 1, 0]), np.array([0, 0, 1]), 1.0, 900.0, 512, 512)
    rotation, translation = frame.camera_to_face(camera)
    assert np.allclose(head_angles(rotation)[::2], 0)
    back = frame.camera_to_rig(rotation, translation)
    assert np.allclose(back[0], camera.rotation)
    assert np.allclose(back[1], camera.translation)
