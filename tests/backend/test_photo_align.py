# SPDX-License-Identifier: Apache-2.0
"""Similarities, resampling, and faces at the standard place."""

from __future__ import annotations

import dataclasses

import numpy as np
import photos
import pytest
from PIL import Image
from rigfit.errors import UserError
from rigfit.geometry import similarity
from rigfit.photo import mesh478
from rigfit.photo.align import (
    align_face,
    apply_2d,
    invert_2d,
    mean_face,
    scale_2d,
    similarity_2d,
    standard_face,
    standard_positions,
    warp,
)


def rotation(dimension: int, rng: np.random.Generator) -> np.ndarray:
    q, _ = np.linalg.qr(rng.normal(size=(dimension, dimension)))
    if np.linalg.det(q) < 0:
        q[:, 0] *= -1
    return q


# --- similarity -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dimension", [2, 3])
def test_similarity_recovers_a_known_one(dimension):
    rng = np.random.default_rng(dimension)
    for _ in range(20):
        source = rng.normal(size=(12, dimension)) * 5 + 100
        r, s, t = rotation(dimension, rng), rng.uniform(0.1, 9), rng.normal(size=dimension) * 50
        found = similarity(source, s * source @ r.T + t)
        assert found.scale == pytest.approx(s)
        assert found.rotation == pytest.approx(r)
        assert found.translation == pytest.approx(t, abs=1e-8)
        assert found.inverse().apply(found.apply(source)) == pytest.approx(source)
        assert source @ found.matrix()[:, :-1].T + found.matrix()[:, -1] == pytest.approx(found.apply(source))


@pytest.mark.parametrize("dimension", [2, 3])
def test_similarity_never_mirrors(dimension):
    rng = np.random.default_rng(3)
    source = rng.normal(size=(30, dimension))
    mirrored = source * ([-1.0] + [1.0] * (dimension - 1))
    found = similarity(source, mirrored)
    assert np.linalg.det(found.rotation) == pytest.approx(1)
    assert found.scale > 0


def test_similarity_is_the_least_squares_one():
    rng = np.random.default_rng(4)
    source, target, weights = rng.normal(size=(40, 3)), rng.normal(size=(40, 3)) * 3, rng.uniform(0, 2, 40)
    target = target + 4 * source
    best = similarity(source, target, weights)

    def cost(scale, turn, shift):
        error = target - (scale * source @ turn.T + shift)
        return (weights * (error**2).sum(axis=1)).sum()

    least = cost(best.scale, best.rotation, best.translation)
    for _ in range(100):
        nudge = rng.normal(size=3) * 1e-3
        skew = np.array([[0, -nudge[2], nudge[1]], [nudge[2], 0, -nudge[0]], [-nudge[1], nudge[0], 0]])
        turn, _, v = np.linalg.svd(best.rotation @ (np.eye(3) + skew))
        scale, shift = best.scale * (1 + rng.normal() * 1e-3), best.translation + rng.normal(size=3) * 1e-3
        assert cost(scale, turn @ v, shift) >= least - 1e-9


def test_similarity_leaves_out_unknown_and_weightless_points():
    rng = np.random.default_rng(5)
    source = rng.normal(size=(10, 2))
    target = 2 * source + 1
    source[0], target[1] = np.nan, np.inf
    target[2] = 1e6
    weights = np.ones(10)
    weights[2] = 0
    found = similarity(source, target, weights)
    assert found.scale == pytest.approx(2)
    assert found.rotation == pytest.approx(np.eye(2), abs=1e-9)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (np.zeros((5, 2)), np.ones((5, 2))),
        (np.arange(10.0).reshape(5, 2), np.ones((5, 2))),
        (np.zeros((1, 2)), np.zeros((1, 2))),
        (np.zeros((5, 2)), np.zeros((5, 3))),
        (np.full((5, 3), np.nan), np.zeros((5, 3))),
    ],
)
def test_similarity_refuses_what_has_no_answer(source, target):
    with pytest.raises(ValueError, match="similarity"):
        similarity(source, target)


# --- resampling -----------------------------------------------------------------------------------------------------


def test_warp_by_quarter_turns_and_whole_pixels_is_exact():
    image = photos.face()
    height, width = image.shape[:2]
    assert np.array_equal(warp(image, np.array([[1.0, 0, 0], [0, 1, 0]]), (width, height)), image)
    moved = warp(image, np.array([[1.0, 0, -30], [0, 1, -40]]), (100, 100))
    assert np.array_equal(moved, image[40:140, 30:130])
    turned = warp(image, np.array([[0.0, -1, height], [1, 0, 0]]), (height, width))
    assert np.array_equal(turned, np.rot90(image, -1))


@pytest.mark.parametrize("scale", [0.13, 0.5, 0.9, 1.7])
def test_warp_puts_things_where_the_matrix_says(scale):
    y, x = np.mgrid[0:300, 0:300] + 0.5
    at = np.array([161.3, 133.8])
    spot = 250 * np.exp(-((x - at[0]) ** 2 + (y - at[1]) ** 2) / (2 * 14**2))
    image = np.repeat(spot[..., None], 3, axis=2).round().astype(np.uint8)
    matrix = np.array([[0.8, -0.6, 90.0], [0.6, 0.8, -50.0]]) * scale
    out = warp(image, matrix, (round(300 * scale), round(300 * scale)))[..., 0].astype(float)
    out[out < 12] = 0  # rounding far from the spot would pull the centre
    v, u = np.mgrid[0 : out.shape[0], 0 : out.shape[1]] + 0.5
    center = np.array([(out * u).sum(), (out * v).sum()]) / out.sum()
    assert center == pytest.approx(apply_2d(matrix, at), abs=0.1)


def test_warp_does_not_alias():
    checks = (np.indices((800, 800)).sum(axis=0) % 2 * 255).astype(np.uint8)
    image = np.repeat(checks[..., None], 3, axis=2)
    out = warp(image, np.array([[0.11, 0.02, 3.0], [-0.02, 0.11, 12.0]]), (60, 60))
    assert np.abs(out[20:40, 20:40].astype(int) - 127).max() <= 3, "the mean grey, no moiré"


def test_warp_repeats_the_border_outside():
    image = np.full((20, 30, 3), (10, 200, 90), np.uint8)
    far = [[[1.0, 0, -500], [0, 1, 900]], [[1.0, 0, 1e7], [0, 1, -1e7]]]
    for matrix in ([[1.0, 0, 100], [0, 1, 100]], [[0.01, 0, 50], [0, 0.01, 50]], *far):
        out = warp(image, np.array(matrix), (64, 64))
        assert np.abs(out.astype(int) - [10, 200, 90]).max() <= 1


# --- the standard face ----------------------------------------------------------------------------------------------


def test_standard_face_is_symmetric_and_normalised():
    face = standard_face()
    assert face.shape == (478, 3)
    assert face[mesh478.MIRROR] * [-1, 1, 1] == pytest.approx(face, abs=2e-4)
    assert np.linalg.norm(face[263] - face[33]) == pytest.approx(1, abs=1e-3)
    assert face[list(mesh478.STABLE)].mean(axis=0) == pytest.approx([0, 0, 0], abs=1e-3)
    assert face[33, 0] < 0 < face[263, 0]
    assert face[10, 1] < face[33, 1] < face[1, 1] < face[61, 1] < face[152, 1]
    assert face[1, 2] < face[33, 2] < face[234, 2], "the nose is nearest, the side of the face furthest"


def test_mean_face_of_copies_is_their_shape():
    rng = np.random.default_rng(6)
    copies = [rng.uniform(1, 90) * standard_face() @ rotation(3, rng).T + rng.normal(size=3) * 99 for _ in range(4)]
    mean = mean_face(copies)
    moved = similarity(mean, standard_face()).apply(mean)
    assert moved == pytest.approx(standard_face(), abs=1e-3)
    assert np.linalg.norm(mean[263] - mean[33]) == pytest.approx(1)


def test_standard_positions_fill_the_square_but_for_the_margin():
    for margin in (0.0, 0.25, 1.0):
        oval = standard_positions(200, margin)[list(mesh478.FACE_OVAL)]
        low, high = oval.min(axis=0), oval.max(axis=0)
        assert (high - low).max() == pytest.approx(200 / (1 + 2 * margin))
        assert (low + high) / 2 == pytest.approx([100, 100])


# --- aligned faces --------------------------------------------------------------------------------------------------


def test_aligned_face_is_upright_centred_and_of_one_size():
    references = []
    for roll in (0, 35, -90, 170):
        image, _ = photos.turned(roll)
        landmarks = photos.detector().detect(image)[0]
        aligned = align_face(image, landmarks, 192)
        assert aligned.image.shape == (192, 192, 3)
        points = apply_2d(aligned.to_aligned, landmarks.points_px)
        stable = list(mesh478.STABLE)
        error = np.linalg.norm(points[stable] - standard_positions(192)[stable], axis=1)
        assert error.mean() < 4
        linear = aligned.to_aligned[:, :2]
        assert linear @ linear.T == pytest.approx(scale_2d(aligned.to_aligned) ** 2 * np.eye(2))
        assert np.linalg.det(linear) > 0, "never a mirror image"
        assert apply_2d(aligned.from_aligned, points) == pytest.approx(landmarks.points_px)
        references.append(aligned.image.astype(int))
    middle = np.s_[40:150, 50:142]
    for other in references[1:]:
        assert np.abs(other[middle] - references[0][middle]).mean() < 6, "the same picture whatever the roll"


def test_aligned_face_of_one_person_at_two_sizes():
    small = align_face(photos.portrait(), photos.portrait_landmarks(), 64).image.astype(int)
    big = photos.resized(photos.portrait(), 2048, 2048)
    large = align_face(big, photos.detector().detect(big)[0], 64).image.astype(int)
    assert np.abs(small - large).mean() < 3


def test_a_detection_on_the_aligned_face_agrees():
    landmarks = photos.portrait_landmarks()
    aligned = align_face(photos.portrait(), landmarks, 256, margin=0.5)
    again = photos.detector().detect(aligned.image)[0]
    assert photos.difference_percent(again, aligned.from_aligned) < 0.5


def test_few_points_are_enough_and_none_is_refused():
    landmarks = photos.portrait_landmarks()
    points = np.full((478, 2), np.nan)
    for index in (33, 263, 61, 291, 1):
        points[index] = landmarks.points_px[index]
    few = dataclasses.replace(landmarks, points_px=points, visible=np.isfinite(points).all(axis=1))
    full, part = align_face(photos.portrait(), landmarks), align_face(photos.portrait(), few)
    corners = np.array([[180.0, 80.0], [270.0, 80.0], [225.0, 175.0]])
    shift = apply_2d(full.to_aligned, corners) - apply_2d(part.to_aligned, corners)
    assert np.abs(shift).max() < 12
    points[:] = np.nan
    points[33] = 5
    with pytest.raises(UserError) as caught:
        align_face(photos.portrait(), dataclasses.replace(few, points_px=points))
    assert caught.value.kind == "too_few_landmarks"
    points[:] = 5
    with pytest.raises(UserError) as caught:
        align_face(photos.portrait(), dataclasses.replace(few, points_px=points, visible=np.ones(478, bool)))
    assert caught.value.kind == "bad_landmarks"


def test_hidden_points_do_not_move_the_face():
    landmarks = photos.portrait_landmarks()
    points, visible = landmarks.points_px.copy(), landmarks.visible.copy()
    wrong = list(mesh478.STABLE[4:8])
    points[wrong] += 60
    visible[wrong] = False
    aligned = align_face(photos.portrait(), dataclasses.replace(landmarks, points_px=points, visible=visible))
    reference = align_face(photos.portrait(), landmarks)
    assert np.abs(aligned.to_aligned[:, 2] - reference.to_aligned[:, 2]).max() < 5


def test_similarity_2d_and_inverse():
    points = photos.portrait_landmarks().points_px
    matrix = similarity_2d(points, standard_positions(256))
    assert apply_2d(invert_2d(matrix), apply_2d(matrix, points)) == pytest.approx(points)
    assert Image.fromarray(warp(photos.portrait(), matrix, (256, 256))).size == (256, 256)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="size_px"):
        align_face(photos.portrait(), photos.portrait_landmarks(), 2)
    with pytest.raises(ValueError, match="margin"):
        align_face(photos.portrait(), photos.portrait_landmarks(), 64, margin=-0.5)
