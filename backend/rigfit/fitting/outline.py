# SPDX-License-Identifier: Apache-2.0
"""Outline landmarks follow the silhouette ("landmark marching", Zhu et al. 2015, section 3.2).

The detector's outline is where the face ends in the picture, not a place on the skin. Candidates for an outline
landmark are mesh vertices in the same direction from the middle of the face (as seen from the front), up to `REACH`
face units away. When the landmark's normal turns away from the camera, the candidate that lies outermost in the picture
takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rigfit.fitting.face_frame import FaceFrame
from rigfit.fitting.moving_points import MovingPoints
from rigfit.fitting.projection import Pose, project_face
from rigfit.photo import mesh478
from rigfit.rig.blendshapes import PointModel, restrict
from rigfit.rig.spec import RigSpec
from rigfit.rig.surface import in_parts

REACH, HALF_ANGLE = 0.55, np.radians(5.0)
# Cosine between normal and view below which a landmark counts as turned away.
TURNED_AWAY = 0.15


@dataclass(frozen=True)
class OutlineCandidates:
    """Where outline landmarks can go on a rig, in the face frame.

    points: PointModel of all candidates. rows: landmark → its rows in `points`. outward: landmark → (3,) the way out.
    normal: (478,3) of the embedded landmarks.
    """

    points: PointModel
    rows: dict[int, NDArray[np.intp]]
    outward: dict[int, NDArray[np.float64]]
    normal: NDArray[np.float64]

    @staticmethod
    def of(spec: RigSpec, frame: FaceFrame, neutral: NDArray[np.float64]) -> OutlineCandidates:
        """neutral: (478,3) landmarks of the neutral rig, face frame, NaN where not embedded."""
        assert spec.landmarks is not None
        vertices = frame.to_face(spec.neutral)
        skin = np.unique(spec.triangles[in_parts(spec, "skin")])
        polar = np.arctan2(vertices[skin, 1], vertices[skin, 0])
        found: dict[int, NDArray[np.intp]] = {}
        for landmark in mesh478.FACE_OVAL:
            if not np.isfinite(neutral[landmark]).all():
                continue
            angle = np.arctan2(neutral[landmark, 1], neutral[landmark, 0])
            apart = np.abs((polar - angle + np.pi) % (2 * np.pi) - np.pi)
            near = np.linalg.norm(vertices[skin] - neutral[landmark], axis=1) < REACH
            chosen = skin[(apart < HALF_ANGLE) & near]
            if len(chosen):
                found[landmark] = chosen
        used = np.unique(np.concatenate([np.zeros(0, np.intp), *found.values()])).astype(np.intp)
        rows = {landmark: np.searchsorted(used, vertex) for landmark, vertex in found.items()}
        # A vertex is a barycentric point: the corner of any triangle that has it.
        triangle = np.zeros(len(vertices), np.int64)
        slot_of = np.zeros(len(vertices), np.int64)
        for slot in range(3):
            triangle[spec.triangles[:, slot]] = np.arange(len(spec.triangles))
            slot_of[spec.triangles[:, slot]] = slot
        points = frame.model_to_face(restrict(spec, triangle[used], np.eye(3)[slot_of[used]]))
        outward = {landmark: points.neutral[r].mean(axis=0) * (1, 1, 0) for landmark, r in rows.items()}
        corners = vertices[spec.triangles[spec.landmarks.triangle]]
        normal = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
        normal /= np.maximum(np.linalg.norm(normal, axis=1, keepdims=True), 1e-12)
        return OutlineCandidates(points, rows, outward, normal)


class Outline:
    """The choices of a fit: which candidate stands for which outline landmark in which photo."""

    def __init__(self, candidates: OutlineCandidates, free: NDArray[np.intp], start: NDArray[np.float64]) -> None:
        self.candidates = candidates
        self.moving = MovingPoints(candidates.points, free, start)
        self.taken: dict[int, dict[int, int]] = {}

    def follow(self, k: int, pose: Pose, principal: NDArray[np.float64], values: NDArray[np.float64]) -> None:
        """Choose the candidates of photo k for the present pose and values."""
        taken: dict[int, int] = {}
        pixels = project_face(self.moving.points(values), pose, principal)[:, :2]
        middle = project_face(np.zeros((1, 3)), pose, principal)[0, :2]
        view = -pose.translation @ pose.rotation
        view = view / np.linalg.norm(view)
        for landmark, rows in self.candidates.rows.items():
            if self.candidates.normal[landmark] @ view > TURNED_AWAY:
                continue
            flat = (pose.rotation @ self.candidates.outward[landmark])[:2]
            taken[landmark] = int(rows[np.argmax((pixels[rows] - middle) @ flat)])
        self.taken[k] = taken

    def _where(self, index: NDArray[np.intp], k: int) -> tuple[NDArray[np.intp], list[int]]:
        taken = self.taken.get(k, {})
        where = np.flatnonzero(np.isin(index, list(taken)))
        return where, [taken[int(i)] for i in index[where]]

    def replace(
        self, points: NDArray[np.float64], index: NDArray[np.intp], values: NDArray[np.float64], k: int
    ) -> NDArray[np.float64]:
        """(l,3) landmarks of photo k with those on the outline moved to their candidates."""
        where, rows = self._where(index, k)
        if len(where):
            points[where] = self.moving.points(values)[rows]
        return points

    def replace_slope(self, slope, index, taken, values, side, k):
        """The same for their derivatives (n,l,3); taken: (n,) which of the free parameters."""
        where, rows = self._where(index, k)
        if len(where):
            slope[:, where] = self.moving.slope(values, side)[np.ix_(taken, rows)]
        return slope
