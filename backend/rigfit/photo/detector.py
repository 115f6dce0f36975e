# SPDX-License-Identifier: Apache-2.0
"""Find every face of an image at any scale and in any rotation, with repeatable landmarks.

Boxes come from two detectors on a pyramid, landmarks from the face mesh on crops that follow from the landmarks of the
pass before. The last pass is an average over several crops and their mirror images, which removes most of what is left
of the dependence on where the crop happened to be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image

from rigfit.geometry import Similarity, similarity
from rigfit.photo import mesh478
from rigfit.photo.align import apply_2d, invert_2d, scale_2d, standard_face, warp
from rigfit.photo.face import FaceLandmarks
from rigfit.photo.mediapipe_nets import MESH_INPUT_PX, BoxDetector, MeshNetwork


class LandmarkDetector(Protocol):
    """Anything that finds faces: ``detect(image (H,W,3) uint8 sRGB)`` → faces, largest box first."""

    def detect(self, image: np.ndarray) -> list[FaceLandmarks]: ...


_BOX_TO_CROP = 1.5
"""Side of a crop / longer side of the box around the face: what the mesh network was trained on."""

_SURE = 15.5
"""Log-odds of presence (mean over the crops): clear faces have 19…28, half-covered ones 16…19, faces upside down below
13. Under this, look in every rotation and at every scale, and keep the best."""

_LIKELY = 11.0
_ACCEPT, _ACCEPT_FRONTAL, _TURNED_DEG = 7.0, 12.0, 30.0
_ACCEPT_BESIDE_A_CLEAR_FACE = 9.0

_WOBBLE_CLEAR, _MAX_WOBBLE, _MAX_WOBBLE_SURE = 0.024, 0.04, 0.06
"""Outer-eye distances: landmarks of clear faces differ by 0.010…0.022 between crops, of half-covered ones by up to
0.035, of drawings, animals and patterns that pass for a face by 0.043…0.08 (none of those is above ``_SURE``)."""

_EVEN_SCORE, _SCORE_STEP = 10.0, 2.5
"""The score is 0.5 at the first log-odds: 0.9 and more for faces that need no warning, 0.99 for clear ones."""

_MAX_RESIDUAL = 0.16
"""Root mean square distance to the standard face after a 3D similarity, in outer-eye distances: faces of people
0.02…0.07, of odd rigs up to 0.11."""

_CLEARLY_NEARER = 0.06
"""In outer-eye distances: contour points of a frontal face cover each other by less."""

_MAX_FACES = 50
_LEVELS_PX = (192, 480, 1200)
_TILE_PX = 192
_TILE_STEP_PX = 144
_TILE_FACE_PX = 64.0
"""Larger boxes on a tile are faces that the level above has seen, or halves of them."""
_SMALLEST_FOUND_PX = 12.0
"""The full-range detector finds faces from this width up (on its 192 px input)."""

_SMALLEST_WANTED_PX = 36.0
"""On the image; the box is a little narrower than the landmarks."""

_MAX_REFINEMENTS = 7
_CONVERGED_PX = 1.5
"""Of the crop's 192 pixels, at its corners; what is left is averaged out by the jittered crops."""

_JITTER = (  # scale, turn in degrees, shift in pixels of the crop
    (1.06, 0.0, 0.0, 2.0),
    (0.96, 6.0, 3.0, -2.0),
    (0.96, -6.0, -3.0, -2.0),
    (1.02, 3.0, -4.0, 3.0),
    (1.02, -3.0, 4.0, 3.0),
    (0.90, 9.0, 0.0, 0.0),
    (0.90, -9.0, 0.0, 0.0),
    (1.10, 0.0, 0.0, -4.0),
)
"""Mirrored twins side by side: then the mirror image of a photo has exactly the mirrored crops."""


@dataclass
class _Candidate:
    """A possible face: ``to_crop`` (2,3) maps image pixels to the 192 px crop."""

    center: np.ndarray
    side: float
    to_crop: np.ndarray
    score: float


@dataclass
class _Mesh:
    """What the mesh network says about a crop, or the mean of that over several crops."""

    points: np.ndarray  # (478,3) image pixels, z relative
    presence: float  # log-odds
    residual: float
    to_crop: np.ndarray  # (2,3) the crop to look at next
    spread: np.ndarray | None = None  # (478,) RMS deviation between the crops, image pixels

    @property
    def wobble(self) -> float:
        """RMS deviation between the crops in outer-eye distances of the head."""
        return 0.0 if self.spread is None else float(np.sqrt((self.spread**2).mean())) / _head_size(self.points)


class MediapipeDetector:
    """The detector of this project: MediaPipe's networks, offline, one thread each.

    passes: crops that the landmarks are averaged over: 1 (no averaging), or an even number up to 16, half of them
        mirrored. 2 is quick and still free of left-right bias.
    threads: CPU threads for the mesh network.
    check: called before each run of a network; what it raises ends the detection, which takes up to ten seconds on a
        large picture without a face.
    The networks are loaded at the first detection (about 0.2 s) and kept.
    """

    def __init__(self, *, passes: int = 6, threads: int = 1) -> None:
        if passes != 1 and (passes % 2 or not 2 <= passes <= 2 * len(_JITTER)):
            raise ValueError(f"passes must be 1 or an even number up to {2 * len(_JITTER)}, not {passes}")
        self.passes = passes
        self.check: Callable[[], None] | None = None
        self._threads = threads
        self._networks: tuple[BoxDetector, BoxDetector, MeshNetwork] | None = None

    def load(self) -> None:
        """Load the networks now, for instance while the user still picks a photo."""
        if self._networks is None:
            self._networks = (BoxDetector("full_range"), BoxDetector("short_range"), MeshNetwork(threads=self._threads))

    def detect(self, image: np.ndarray) -> list[FaceLandmarks]:
        """All faces, largest box first.

        image: (H,W,3) uint8 sRGB. Faces narrower than 2.5 % of the image's long side are looked for only if no larger
        one is clear. Returns points also for faces under 40 px; ``detect_face`` refuses those.
        """
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or 0 in image.shape:
            raise ValueError(f"a detector takes an (H,W,3) uint8 image, not {image.shape} {image.dtype}")
        self.load()
        found: list[_Mesh] = []
        for candidates in self._searches(image):
            refined: list[_Mesh] = []
            for candidate in candidates:
                if not any(_is_part_of(candidate, mesh) for mesh in refined + found):
                    mesh = self._refined(image, candidate)
                    if mesh.presence >= _ACCEPT:
                        refined.append(mesh)
            averaged = [self._averaged(image, mesh) for mesh in _without_doubles(refined)]
            found += [mesh for mesh in averaged if _is_face(mesh)]
            found = _without_doubles(found)
            if any(_is_clear(mesh) for mesh in found):
                # Beside a clear face, something uncertain is that face in a wrong rotation, or a pattern.
                found = [mesh for mesh in found if mesh.presence >= _ACCEPT_BESIDE_A_CLEAR_FACE]
                break
        faces = [_face(image, mesh) for mesh in found[:_MAX_FACES]]
        return sorted(faces, key=lambda f: (-round(f.box_area_px, 3), f.box_px))

    # --- boxes ------------------------------------------------------------------------------------------------------

    def _searches(self, image: np.ndarray) -> Iterator[list[_Candidate]]:
        """Ever more thorough searches; the caller stops when a face is clear."""
        long_side = max(image.shape[:2])
        levels = [_LEVELS_PX[0]]
        for level in _LEVELS_PX[1:]:
            if _SMALLEST_FOUND_PX * long_side / levels[-1] > _SMALLEST_WANTED_PX:
                levels.append(level)
        small: dict[int, np.ndarray] = {}
        larger = Image.fromarray(image)
        for level in reversed(levels):
            larger = _long_side(larger, level)
            small[level] = np.asarray(larger)
        size = (image.shape[1], image.shape[0])
        yield [candidate for level in levels[:2] for candidate in self._boxes(small[level], size, level, 0)]
        for quarters in (1, 2, 3):
            yield self._boxes(small[levels[0]], size, levels[0], quarters)
        for level in levels[2:]:
            yield self._boxes(small[level], size, level, 0)
        for level in levels[1:]:
            for quarters in (1, 2, 3):
                yield self._boxes(small[level], size, level, quarters)

    def _may_go_on(self) -> None:
        if self.check is not None:
            self.check()

    def _boxes(self, small: np.ndarray, size_px: tuple[int, int], level_px: int, quarters: int) -> list[_Candidate]:
        """Candidates on one level of the pyramid, turned by ``quarters`` × 90° counter-clockwise.

        small: the level's pixels. size_px: (width, height) of the image, whose pixels the candidates are in.
        """
        assert self._networks is not None
        full_range, short_range, _ = self._networks
        turned = np.ascontiguousarray(np.rot90(small, quarters))
        found: list[tuple[np.ndarray, float, float, float]] = []  # centre, side, roll (turned pixels), score

        def collect(detector: BoxDetector, part: np.ndarray, x: float, y: float, zoom: float) -> None:
            self._may_go_on()
            for detection in detector.detect(part):
                box = detection.box_px
                eyes = detection.keypoints_px[1] - detection.keypoints_px[0]
                center = np.array([(box[0] + box[2]) / 2, (box[1] + box[3]) / 2]) / zoom + [x, y]
                side = max(box[2] - box[0], box[3] - box[1]) / zoom
                found.append((center, side, math.atan2(eyes[1], eyes[0]), detection.score))

        if level_px == _LEVELS_PX[0]:
            collect(full_range, turned, 0.0, 0.0, 1.0)
            collect(short_range, turned, 0.0, 0.0, 1.0)
            # A face that fills the picture or is cut by its border: the same with room around.
            room = [(s // 2, s // 2) for s in turned.shape[:2]]
            padded = np.pad(turned, (*room, (0, 0)), constant_values=128)
            collect(short_range, padded, -room[1][0], -room[0][0], 1.0)
        else:
            for y in _tile_starts(turned.shape[0]):
                for x in _tile_starts(turned.shape[1]):
                    tile = turned[y : y + _TILE_PX, x : x + _TILE_PX]
                    collect(full_range, tile, x, y, 1.0)
            found = [each for each in found if each[1] < _TILE_FACE_PX]

        # From turned pixels back to the image: undo the quarter turns, then the size.
        w, h = small.shape[1], small.shape[0]
        back = {
            0: np.array([[1.0, 0, 0], [0, 1, 0]]),
            1: np.array([[0.0, -1, w], [1, 0, 0]]),
            2: np.array([[-1.0, 0, w], [0, -1, h]]),
            3: np.array([[0.0, 1, 0], [-1, 0, h]]),
        }[quarters]
        zoom = np.array([size_px[0] / w, size_px[1] / h])
        candidates: list[_Candidate] = []
        for center, side, roll, score in sorted(found, key=lambda f: (-f[3], *f[0])):
            at = apply_2d(back, center) * zoom
            length = side * float(zoom.mean())
            if all(np.abs(at - c.center).max() > 0.35 * min(length, c.side) for c in candidates):
                roll += math.atan2(back[1, 0], back[0, 0])
                to_crop = _crop_matrix(at, _BOX_TO_CROP * length, roll)
                candidates.append(_Candidate(at, length, to_crop, score))
        return candidates[:_MAX_FACES]

    # --- landmarks --------------------------------------------------------------------------------------------------

    def _run(self, source: _Patch, to_crop: np.ndarray, *, mirrored: bool = False) -> _Mesh:
        assert self._networks is not None
        crop = source.crop(to_crop)
        if mirrored:
            crop = np.ascontiguousarray(crop[:, ::-1])
        self._may_go_on()
        points, presence = self._networks[2].run(crop)
        if mirrored:
            points = points[mesh478.MIRROR] * [-1.0, 1.0, 1.0] + [MESH_INPUT_PX, 0.0, 0.0]
        from_crop = invert_2d(to_crop)
        zoom = scale_2d(from_crop)
        on_image = np.concatenate([apply_2d(from_crop, points[:, :2]), points[:, 2:] * zoom], axis=1)
        return _Mesh(on_image, presence, _residual(on_image), to_crop)

    def _refined(self, image: np.ndarray, candidate: _Candidate) -> _Mesh:
        """Run, crop around the result, run again, until the crop stays where it is.

        On clear faces the crop converges to one place from any start (a box half or twice as large, 90° off), in three
        to five passes; candidates that are not faces wander and are given up after four.
        """
        to_crop = candidate.to_crop
        patch = _Patch(image, to_crop)
        best: _Mesh | None = None
        for number in range(_MAX_REFINEMENTS):
            patch = patch if patch.covers(to_crop) else _Patch(image, to_crop)
            mesh = self._run(patch, to_crop)
            if not math.isfinite(mesh.residual):
                break
            before, to_crop = to_crop, _crop_around(mesh.points)
            mesh.to_crop = to_crop
            clear = mesh.presence >= _LIKELY
            if best is None or clear or mesh.presence > best.presence:
                best = mesh
            if clear and _moved_px(before, to_crop) < _CONVERGED_PX:
                break
            if not clear and (number >= 3 or (number >= 1 and mesh.presence < -8.0)):
                break
        return best if best is not None else _Mesh(np.zeros((478, 3)), -math.inf, math.inf, to_crop)

    def _averaged(self, image: np.ndarray, mesh: _Mesh) -> _Mesh:
        """The mean over jittered crops and their mirror images, and how much they differ."""
        patch = _Patch(image, mesh.to_crop)
        runs = []
        for scale, turn, dx, dy in _JITTER[: max(1, self.passes // 2)]:
            jittered = _compose(_jitter(scale, turn, dx, dy), mesh.to_crop)
            runs.append(self._run(patch, jittered))
            if self.passes > 1:
                runs.append(self._run(patch, jittered, mirrored=True))
        each = np.stack([run.points for run in runs])
        points = each.mean(axis=0)
        spread = np.sqrt(((each[..., :2] - points[:, :2]) ** 2).sum(axis=2).mean(axis=0))
        presence = float(np.mean([run.presence for run in runs]))
        return _Mesh(points, presence, _residual(points), mesh.to_crop, spread)


def _is_face(mesh: _Mesh) -> bool:
    if mesh.residual > _MAX_RESIDUAL:
        return False
    if mesh.presence >= _SURE:
        return mesh.wobble <= _MAX_WOBBLE_SURE
    # The network is less sure of a face that looks away; one that looks at the camera has no such excuse.
    turned_deg = math.degrees(math.acos(np.clip(_head(mesh.points).rotation[2, 2], -1.0, 1.0)))
    needed = _ACCEPT if turned_deg > _TURNED_DEG else _ACCEPT_FRONTAL
    return mesh.presence >= needed and mesh.wobble <= _MAX_WOBBLE


def _is_clear(mesh: _Mesh) -> bool:
    """No need to look any further: never true of a face in a wrong rotation, as far as was ever seen."""
    return mesh.presence >= _SURE or (mesh.presence >= _LIKELY and mesh.wobble <= _WOBBLE_CLEAR)


def _face(image: np.ndarray, mesh: _Mesh) -> FaceLandmarks:
    points = mesh.points
    low, high = points[:, :2].min(axis=0), points[:, :2].max(axis=0)
    inside = ((points[:, :2] >= 0) & (points[:, :2] <= [image.shape[1], image.shape[0]])).all(axis=1)
    return FaceLandmarks(
        points_px=np.ascontiguousarray(points[:, :2]),
        depth=np.ascontiguousarray(points[:, 2]),
        box_px=(float(low[0]), float(low[1]), float(high[0]), float(high[1])),
        score=1.0 / (1.0 + math.exp(-(mesh.presence - _EVEN_SCORE) / _SCORE_STEP)),
        rotation_deg=round(math.degrees(_roll(points)) / 90.0) * 90 % 360,
        visible=inside & ~self_occluded(points),
        spread_px=mesh.spread,
    )


class _Patch:
    """The neighbourhood of a crop at about the crop's resolution, so that further crops near it are quick."""

    def __init__(self, image: np.ndarray, to_crop: np.ndarray) -> None:
        scale = scale_2d(to_crop)
        self._scale = min(1.15 * scale, max(scale, 1.0))  # no use in enlarging here; the crop does it
        center = apply_2d(invert_2d(to_crop), np.full(2, MESH_INPUT_PX / 2))
        self._side = math.ceil(1.7 * MESH_INPUT_PX * self._scale / scale)
        self._to_patch = np.array(
            [
                [self._scale, 0, self._side / 2 - self._scale * center[0]],
                [0, self._scale, self._side / 2 - self._scale * center[1]],
            ]
        )
        self._from_patch = invert_2d(self._to_patch)
        self._pixels = warp(image, self._to_patch, (self._side, self._side), quick=True)

    def covers(self, to_crop: np.ndarray) -> bool:
        scale = scale_2d(to_crop)
        corners = np.array([[0, 0], [1, 0], [0, 1], [1, 1]], np.float64) * MESH_INPUT_PX
        inside = apply_2d(self._to_patch, apply_2d(invert_2d(to_crop), corners))
        fits = bool((inside >= 0).all() and (inside <= self._side).all())
        return fits and scale / self._scale > 0.7 and (scale / self._scale < 1.15 or self._scale >= 1.0)

    def crop(self, to_crop: np.ndarray) -> np.ndarray:
        return warp(self._pixels, _compose(to_crop, self._from_patch), (MESH_INPUT_PX, MESH_INPUT_PX), quick=True)


def _long_side(image: Image.Image, side_px: int) -> Image.Image:
    scale = side_px / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)


def _compose(second: np.ndarray, first: np.ndarray) -> np.ndarray:
    """(2,3) matrix of ``second`` after ``first``."""
    linear = second[:, :2] @ first
    linear[:, 2] += second[:, 2]
    return linear


def _moved_px(before: np.ndarray, after: np.ndarray) -> float:
    """How far the corners of a crop move from one crop matrix to the next, in crop pixels."""
    corners = np.array([[0, 0], [1, 0], [0, 1], [1, 1]], np.float64) * MESH_INPUT_PX
    return float(np.abs(apply_2d(before, apply_2d(invert_2d(after), corners)) - corners).max())


def _tile_starts(length: int) -> list[int]:
    last = max(0, length - _TILE_PX)
    return sorted({min(start, last) for start in range(0, last + _TILE_STEP_PX, _TILE_STEP_PX)})


def _crop_matrix(center: np.ndarray, side: float, roll: float) -> np.ndarray:
    """Image pixels → crop pixels for a square of ``side`` around ``center`` that is turned by ``roll`` (clockwise)."""
    zoom = MESH_INPUT_PX / max(side, 1e-6)
    c, s = math.cos(roll) * zoom, math.sin(roll) * zoom
    linear = np.array([[c, s], [-s, c]])
    return np.concatenate([linear, (MESH_INPUT_PX / 2 - linear @ center)[:, None]], axis=1)


def _jitter(scale: float, turn_deg: float, dx: float, dy: float) -> np.ndarray:
    turn = math.radians(turn_deg)
    linear = scale * np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    half = np.full(2, MESH_INPUT_PX / 2)
    shift = half + np.array([dx, dy]) - linear @ half
    return np.concatenate([linear, shift[:, None]], axis=1)


def _posed_standard_face(points: np.ndarray) -> np.ndarray:
    """(478,2): the standard face moved to the head pose of ``points`` (478,3): smooth, and free of expression."""
    return _head(points).apply(standard_face())[:, :2]


def _head(points: np.ndarray) -> Similarity:
    """From the standard face to a detection (478,3): size, pose and place of the head."""
    return similarity(standard_face()[:468], points[:468])


def _in_plane_roll(posed: np.ndarray) -> float:
    rotation = similarity(standard_face()[:, :2], posed).rotation
    return math.atan2(rotation[1, 0], rotation[0, 0])


def _roll(points: np.ndarray) -> float:
    """Clockwise turn of the head in the image plane, radians in −π…π."""
    return _in_plane_roll(_posed_standard_face(points))


def _crop_around(points: np.ndarray) -> np.ndarray:
    """The crop for the next pass: around the posed standard face, upright.

    The box around the landmarks themselves would move with the mouth and with every error of a contour point, and each
    move of the crop moves the next pass's landmarks.
    """
    posed = _posed_standard_face(points)
    roll = _in_plane_roll(posed)
    upright = np.array([[math.cos(roll), math.sin(roll)], [-math.sin(roll), math.cos(roll)]])
    turned = posed @ upright.T
    low, high = turned.min(axis=0), turned.max(axis=0)
    return _crop_matrix(upright.T @ ((low + high) / 2), _BOX_TO_CROP * float((high - low).max()), roll)


def _residual(points: np.ndarray) -> float:
    """RMS distance (outer-eye distances) from the standard face after the best 3D similarity."""
    if not np.isfinite(points).all():
        return math.inf
    try:
        moved = similarity(points[:468], standard_face()[:468]).apply(points[:468])
    except ValueError:
        return math.inf
    return float(np.sqrt(((moved - standard_face()[:468]) ** 2).sum(axis=1).mean()))


def _is_part_of(candidate: _Candidate, mesh: _Mesh) -> bool:
    """True if the candidate's box is centred on a face that the network was sure of."""
    low, high = mesh.points[:, :2].min(axis=0), mesh.points[:, :2].max(axis=0)
    return mesh.presence >= _SURE and bool((candidate.center > low).all() and (candidate.center < high).all())


def _without_doubles(found: list[_Mesh]) -> list[_Mesh]:
    """Of faces whose boxes share more than 40 % of the smaller one, keep the surest; the surest first."""
    kept: list[_Mesh] = []
    for mesh in sorted(found, key=lambda m: -m.presence):
        low, high = mesh.points[:, :2].min(axis=0), mesh.points[:, :2].max(axis=0)
        for other in kept:
            other_low, other_high = other.points[:, :2].min(axis=0), other.points[:, :2].max(axis=0)
            shared = np.clip(np.minimum(high, other_high) - np.maximum(low, other_low), 0, None).prod()
            if shared > 0.4 * min((high - low).prod(), (other_high - other_low).prod()):
                break
        else:
            kept.append(mesh)
    return kept


def self_occluded(points: np.ndarray) -> np.ndarray:
    """(478,) bool: which landmarks the face itself hides.

    points: (478,3), x and y in pixels, z away from the camera in the same unit. A point is hidden if a triangle of the
    mesh covers it (parallel rays) that is nearer by more than the depth can be trusted.
    """
    corners = points[mesh478.triangles()]  # (F,3,3)
    low, high = corners[..., :2].min(axis=1).astype(np.float32), corners[..., :2].max(axis=1).astype(np.float32)
    at = points[:468, None, :2].astype(np.float32)
    near = (at[..., 0] > low[:, 0]) & (at[..., 0] < high[:, 0]) & (at[..., 1] > low[:, 1]) & (at[..., 1] < high[:, 1])
    index, face = np.nonzero(near)  # most pairs are far apart: barycentric coordinates for the others only
    a, e1, e2 = corners[face, 0], corners[face, 1] - corners[face, 0], corners[face, 2] - corners[face, 0]
    d = points[index] - a
    area = e1[:, 0] * e2[:, 1] - e1[:, 1] * e2[:, 0]
    with np.errstate(divide="ignore", invalid="ignore"):  # triangles seen edge-on cover nothing: NaN compares false
        v = (d[:, 0] * e2[:, 1] - d[:, 1] * e2[:, 0]) / area
        w = (d[:, 1] * e1[:, 0] - d[:, 0] * e1[:, 1]) / area
        depth = a[:, 2] + v * e1[:, 2] + w * e2[:, 2]
        clearly = _CLEARLY_NEARER * _head_size(points)
        covers = (v > 0) & (w > 0) & (v + w < 1) & (depth < points[index, 2] - clearly)
    hidden = np.zeros(mesh478.COUNT, bool)
    hidden[index[covers]] = True
    # An iris has no triangles around it and its depth is that of the lids: it is hidden when the eye is.
    for iris, eye in ((mesh478.RIGHT_IRIS, mesh478.RIGHT_EYE), (mesh478.LEFT_IRIS, mesh478.LEFT_EYE)):
        hidden[list(iris)] = hidden[list(eye)].mean() > 0.5
    return hidden


def _head_size(points: np.ndarray) -> float:
    """The outer-eye distance of the head in pixels if it looked at the camera (from all points, any pose)."""
    return _head(points).scale
