# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import trimesh
from rigfit.render.camera import look_at
from rigfit.rig.surface import cast_pixels, closest_points, points_at, vertex_normals


@pytest.fixture(scope="module")
def ball():
    mesh = trimesh.creation.icosphere(subdivisions=3, radius=0.1)
    return np.asarray(mesh.vertices), np.asarray(mesh.faces, np.int32)


def test_cast_hits_the_front_of_a_ball_where_the_ray_says(ball):
    vertices, triangles = ball
    camera = look_at(np.zeros(3), np.array([0, 1, 0]), np.array([0, 0, 1]), 1.0, 2000.0, 500, 500)
    rng = np.random.default_rng(0)
    pixels = 250 + rng.uniform(-120, 120, (60, 2))
    hit = cast_pixels(vertices, triangles, camera, pixels)
    assert (hit.triangle >= 0).all()
    assert np.allclose(hit.barycentric.sum(axis=1), 1)
    assert np.allclose(camera.project(hit.position), pixels, atol=1e-6)
    # On the near side: the far side of the ball is 0.1 m to 0.2 m further away.
    assert (hit.position[:, 1] < 0).all()
    assert np.abs(np.linalg.norm(hit.position, axis=1) - 0.1).max() < 0.002


def test_cast_misses_are_said(ball):
    vertices, triangles = ball
    camera = look_at(np.zeros(3), np.array([0, 1, 0]), np.array([0, 0, 1]), 1.0, 2000.0, 500, 500)
    hit = cast_pixels(vertices, triangles, camera, np.array([[2.0, 2.0], [np.nan, 3.0], [250.0, 250.0]]))
    assert hit.triangle.tolist()[:2] == [-1, -1]
    assert np.isnan(hit.position[:2]).all()
    assert hit.triangle[2] >= 0


def test_a_triangle_behind_the_camera_is_not_hit():
    vertices = np.array([[-1.0, -3, -1], [1, -3, -1], [0, -3, 1]])
    camera = look_at(np.zeros(3), np.array([0, 1, 0]), np.array([0, 0, 1]), 1.0, 500.0, 100, 100)
    assert cast_pixels(vertices, np.array([[0, 1, 2]]), camera, np.array([[50.0, 50.0]])).triangle[0] == -1


def test_closest_points_against_trimesh_brute_force(ball):
    vertices, triangles = ball
    points = np.random.default_rng(1).normal(size=(40, 3)) * 0.12
    found = closest_points(vertices, triangles, points)
    every = np.stack([
        np.linalg.norm(trimesh.triangles.closest_point(vertices[triangles], np.tile(p, (len(triangles), 1))) - p, axis=1).min()
        for p in points
    ])  # fmt: skip
    assert np.allclose(np.linalg.norm(found.position - points, axis=1), every, atol=1e-9)


def test_closest_points_keep_to_the_allowed_triangles(ball):
    vertices, triangles = ball
    allowed = vertices[triangles][:, :, 2].min(axis=1) > 0.02
    points = np.array([[0, 0, -0.1], [0.05, 0.02, 0.08], [np.nan, 0, 0]])
    found = closest_points(vertices, triangles, points, allowed)
    assert allowed[found.triangle[:2]].all()
    assert found.triangle[2] == -1
    assert np.allclose(points_at(vertices, triangles, found.triangle, found.barycentric)[:2], found.position[:2])


def test_vertex_normals_of_a_ball_point_outward(ball):
    vertices, triangles = ball
    normals = vertex_normals(vertices, triangles)
    assert np.sum(normals * vertices, axis=1).min() > 0.0995
