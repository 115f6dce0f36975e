# SPDX-License-Identifier: Apache-2.0
"""Put faces at one place and one size: least squares from detected points to the standard face, then resample."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from rigfit.errors import UserError
from rigfit.geometry import Similarity, similarity
from rigfit.photo import mesh478
from rigfit.photo.face import FaceLandmarks

MARGIN = 0.25
"""Default room around the standard face's oval, as a share of its larger side, on each side."""

_ALIAS_FREE = 0.8
"""Down to this scale the bicubic kernel alone is good enough."""

_STANDARD_FACE_FILE = Path(__file__).with_name("standard_face.json")


@dataclass(frozen=True)
class AlignedFace:
    """A face at the standard place.

    image: (S,S,3) uint8 sRGB. to_aligned: (2,3) float64, a similarity: ``to_aligned @ [x, y, 1]`` moves pixel
    positions of the photo to pixel positions of ``image`` (pixel centres at +0.5 in both). from_aligned: its inverse.
    """

    image: np.ndarray
    to_aligned: np.ndarray
    from_aligned: np.ndarray


@functools.cache
def standard_face() -> np.ndarray:
    """(478,3) float64: the mean of mirrored pairs of detections; x right, y down and z away as seen by the camera.

    The outer eye corners are 1 apart, the origin is the mean of the stable points (``mesh478.STABLE``), x = 0 is the
    plane of symmetry.
    """
    points = np.array(json.loads(_STANDARD_FACE_FILE.read_text("utf-8"))["points"], np.float64)
    points.setflags(write=False)
    return points


def mean_face(detections: list[np.ndarray]) -> np.ndarray:
    """The standard face of some (478,3) detections and their mirror images (generalised Procrustes analysis).

    Gower, "Generalized Procrustes analysis", Psychometrika 40, 1975, with similarities and without reflections.
    """
    stable = list(mesh478.STABLE)
    shapes = []
    for points in detections:
        shapes += [points, points[mesh478.MIRROR] * [-1.0, 1.0, 1.0]]
    mean = np.mean([p - p.mean(axis=0) for p in shapes], axis=0)
    for _ in range(10):
        moved = [similarity(p, mean).apply(p) for p in shapes]
        mean = np.mean([p / math.sqrt(((p - p.mean(axis=0)) ** 2).sum(axis=1).mean()) for p in moved], axis=0)
        mean = (mean + mean[mesh478.MIRROR] * [-1.0, 1.0, 1.0]) / 2
    right, left = mesh478.OUTER_EYE_CORNERS
    mean = mean / np.linalg.norm(mean[left] - mean[right])
    return mean - mean[stable].mean(axis=0)


def similarity_2d(source: np.ndarray, target: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """(2,3) float64 matrix of the least-squares similarity from (N,2) to (N,2); see ``rigfit.geometry.similarity``."""
    return similarity(np.asarray(source)[:, :2], np.asarray(target)[:, :2], weights).matrix()


def invert_2d(matrix: np.ndarray) -> np.ndarray:
    """The inverse of a (2,3) affine matrix."""
    (a, b), (c, d) = matrix[:, :2]
    linear = np.array([[d, -b], [-c, a]]) / (a * d - b * c)
    return np.concatenate([linear, -linear @ matrix[:, 2:]], axis=1)


def apply_2d(matrix: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Move (...,2) points by a (2,3) affine matrix."""
    return points @ matrix[:, :2].T + matrix[:, 2]


def scale_2d(matrix: np.ndarray) -> float:
    """By how much a (2,3) affine matrix enlarges (square root of the change in area)."""
    (a, b), (c, d) = matrix[:, :2]
    return math.sqrt(abs(a * d - b * c))


def standard_positions(size_px: int, margin: float = MARGIN) -> np.ndarray:
    """(478,2) float64: where the standard face's landmarks lie on an aligned image of ``size_px``."""
    points = standard_face()[:, :2]
    oval = points[list(mesh478.FACE_OVAL)]
    low, high = oval.min(axis=0), oval.max(axis=0)
    scale = size_px / ((high - low).max() * (1.0 + 2.0 * margin))
    return (points - (low + high) / 2) * scale + size_px / 2


def to_standard(landmarks: FaceLandmarks, size_px: int, margin: float = MARGIN) -> Similarity:
    """The 2D similarity from the photo to an aligned image, from the stable points that are known.

    Points hidden or outside the picture are used only if fewer than eight others are left.
    """
    index = np.array(mesh478.STABLE)
    known = np.isfinite(landmarks.points_px[index]).all(axis=1)
    if np.count_nonzero(known & landmarks.visible[index]) >= 8:
        known &= landmarks.visible[index]
    elif np.count_nonzero(known) < 3:
        known = np.isfinite(landmarks.points_px).all(axis=1)
        index = np.arange(mesh478.COUNT)
    if np.count_nonzero(known) < 3:
        raise UserError(
            f"Aligning a face takes at least 3 landmarks, and only {np.count_nonzero(known)} are known: "
            "add points to the landmark file.",
            kind="too_few_landmarks",
        )
    chosen = index[known]
    try:
        return similarity(landmarks.points_px[chosen], standard_positions(size_px, margin)[chosen])
    except ValueError:
        raise UserError(
            "The landmarks of this face lie on one spot: check the landmark file.", kind="bad_landmarks"
        ) from None


def align_face(image: np.ndarray, landmarks: FaceLandmarks, size_px: int = 256, margin: float = MARGIN) -> AlignedFace:
    """Cut the face out of ``image`` ((H,W,3) uint8) so that it lies at the standard place, upright and of one size.

    The outer contour of the standard face fills the square but for ``margin`` on each side. Resampling is antialiased;
    outside of the photo its border pixels are repeated.
    """
    if size_px < 8 or not 0.0 <= margin <= 4.0:
        raise ValueError(f"size_px must be 8 or more and margin between 0 and 4, not {size_px} and {margin}")
    matrix = to_standard(landmarks, size_px, margin).matrix()
    return AlignedFace(warp(image, matrix, (size_px, size_px)), matrix, invert_2d(matrix))


def warp(image: np.ndarray, to_output: np.ndarray, size_px: tuple[int, int], *, quick: bool = False) -> np.ndarray:
    """Resample (H,W,3) uint8 through a (2,3) affine matrix from image to output pixels; returns (h,w,3) uint8.

    size_px: (width, height) of the output. Pixel centres at +0.5 on both sides. When the output is smaller, the part
    of the image that is needed is first reduced with a Lanczos filter, so that nothing aliases. Outside of the image
    the border pixels are repeated. quick: simpler kernels, a third of the time.
    """
    width, height = size_px
    from_output = invert_2d(to_output)
    shrink = scale_2d(to_output)  # output pixels per image pixel
    corners = apply_2d(from_output, np.array([[0, 0], [width, 0], [0, height], [width, height]], np.float64))
    reach = 4.0 / min(shrink, 1.0)
    low = np.floor(corners.min(axis=0) - reach)
    high = np.ceil(corners.max(axis=0) + reach)
    image_size = np.array([image.shape[1], image.shape[0]], np.float64)
    # At least one row and column of the image, also when the output lies wholly outside.
    low_in = np.clip(low, 0, image_size - 1)
    high_in = np.maximum(np.clip(high, 0, image_size), low_in + 1)
    x0, y0, x1, y1 = (int(v) for v in (*low_in, *high_in))
    part = Image.fromarray(np.ascontiguousarray(image[y0:y1, x0:x1]))
    # Where the output lies wholly beyond a border, that border's pixels go on for ever: start them at the output.
    at = np.where(low > low_in, low, np.where(high < high_in, high - 1, low_in))
    step_x = step_y = 1.0  # image pixels per pixel of `part`
    if shrink < _ALIAS_FREE:
        reduced = (max(1, round((x1 - x0) * shrink)), max(1, round((y1 - y0) * shrink)))
        step_x, step_y = (x1 - x0) / reduced[0], (y1 - y0) / reduced[1]
        reducer, gap = (Image.Resampling.BICUBIC, 2.0) if quick else (Image.Resampling.LANCZOS, 3.0)
        part = part.resize(reduced, reducer, reducing_gap=gap)
    # Repeat the border where the output looks beyond the image (two pixels more for the bicubic kernel).
    to_part = np.array([[1 / step_x, 0, -at[0] / step_x], [0, 1 / step_y, -at[1] / step_y]])
    need_low = (low - at) / [step_x, step_y]
    need_high = (high - at) / [step_x, step_y] - part.size
    pads = [max(0, math.ceil(v)) for v in (-need_low[0], -need_low[1], need_high[0], need_high[1])]
    if any(pads):
        left, top, right, bottom = pads
        part = Image.fromarray(np.pad(np.asarray(part), ((top, bottom), (left, right), (0, 0)), mode="edge"))
        to_part[:, 2] += [left, top]
    matrix = to_part[:, :2] @ from_output
    matrix[:, 2] += to_part[:, 2]
    # Pillow evaluates an affine map at pixel centres (+0.5), which is the convention here as well.
    kernel = Image.Resampling.BILINEAR if quick else Image.Resampling.BICUBIC
    return np.array(part.transform((width, height), Image.Transform.AFFINE, tuple(matrix.ravel()), resample=kernel))
