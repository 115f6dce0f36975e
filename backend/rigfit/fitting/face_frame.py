# SPDX-License-Identifier: Apache-2.0
"""The face frame: coordinates in which every rig looks alike, whatever its unit, place and up axis.

Origin: the middle of the stable landmarks. x: from the subject's right to left outer eye corner (to the right of a
frontal picture). y: down. z: into the head. Unit: the distance between the outer eye corners. A camera looking at the
face from the front, upright, has the identity as its rotation in this frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rigfit.errors import UserError
from rigfit.photo import mesh478
from rigfit.render.camera import Camera
from rigfit.rig.blendshapes import PointModel, restrict
from rigfit.rig.spec import RigSpec


def landmark_model(spec: RigSpec) -> PointModel:
    """The rig's 478 landmarks in the rig frame; `neutral` is NaN and the basis 0 where one is not embedded."""
    if spec.landmarks is None:
        raise UserError(
            "This rig spec has no landmarks: run `rigfit rig landmarks` on it, which needs Blender, and try again.",
            kind="no_landmarks",
        )
    missing = spec.landmarks.triangle < 0
    model = restrict(spec, np.where(missing, 0, spec.landmarks.triangle), spec.landmarks.barycentric)
    model.neutral[missing] = np.nan
    model.positive[:, missing] = 0
    model.negative[:, missing] = 0
    return model


@dataclass(frozen=True)
class FaceFrame:
    """x_face = axes · (x_rig − origin) / size.

    origin: (3,) rig frame, metres. axes: (3,3) rows x, y (down), z (into the head). size: metres.
    """

    origin: NDArray[np.float64]
    axes: NDArray[np.float64]
    size: float

    @staticmethod
    def from_landmarks(points: NDArray[np.floating]) -> FaceFrame:
        """points: (478,3) landmarks of the neutral rig, rig frame, metres; NaN where not embedded."""
        need = points[[*mesh478.OUTER_EYE_CORNERS, mesh478.FOREHEAD, mesh478.CHIN]]
        if not np.isfinite(need).all():
            raise UserError(
                "The landmarks on this rig lack the eye corners, the chin or the forehead: run `rigfit rig landmarks` again.",
                kind="bad_landmarks",
            )
        x = need[1] - need[0]
        size = float(np.linalg.norm(x))
        x = x / size
        y = need[3] - need[2]
        y = y - x * (x @ y)
        y /= np.linalg.norm(y)
        origin = np.nanmean(points[:468], axis=0)
        return FaceFrame(origin, np.stack([x, y, np.cross(x, y)]), size)

    def to_face(self, points: NDArray[np.floating]) -> NDArray[np.float64]:
        """(…,3) rig frame, metres → (…,3) face frame."""
        return (np.asarray(points, np.float64) - self.origin) @ self.axes.T / self.size

    def direction_to_face(self, vectors: NDArray[np.floating]) -> NDArray[np.float64]:
        """(…,3) displacements in the rig frame, metres → face frame."""
        return np.asarray(vectors, np.float64) @ self.axes.T / self.size

    def model_to_face(self, model: PointModel) -> PointModel:
        """The same points and shapes in the face frame."""
        return PointModel(
            self.to_face(model.neutral),
            self.direction_to_face(model.positive),
            self.direction_to_face(model.negative),
            model.default,
        )

    def camera_to_rig(
        self, rotation: NDArray[np.floating], translation: NDArray[np.floating]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Pose (R, t) that acts on face-frame points → the pose that acts on rig-frame points (metres)."""
        rig_rotation = rotation @ self.axes
        return rig_rotation, translation * self.size - rig_rotation @ self.origin

    def camera_to_face(self, camera: Camera) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The inverse of `camera_to_rig`."""
        rotation = camera.rotation @ self.axes.T
        return rotation, (camera.translation + camera.rotation @ self.origin) / self.size


def head_angles(rotation: NDArray[np.floating]) -> tuple[float, float, float]:
    """(3,3) rotation of the face frame → (yaw, pitch, roll) in radians.

    R = Rz(roll) · Rx(pitch) · Ry(yaw): yaw turns about the vertical axis of the head first, roll is in the image plane.
    """
    r = np.asarray(rotation)
    pitch = float(np.arcsin(np.clip(r[2, 1], -1.0, 1.0)))
    yaw = float(np.arctan2(-r[2, 0], r[2, 2]))
    roll = float(np.arctan2(-r[0, 1], r[1, 1]))
    return yaw, pitch, roll


def rotation_from_angles(yaw: float, pitch: float, roll: float) -> NDArray[np.float64]:
    """The inverse of `head_angles`."""
    cy, sy, cp, sp, cr, sr = np.cos(yaw), np.sin(yaw), np.cos(pitch), np.sin(pitch), np.cos(roll), np.sin(roll)
    ry = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    rx = np.array([[1, 0, 0], [0, cp, -sp], [0, sp, cp]])
    rz = np.array([[cr, -sr, 0], [sr, cr, 0], [0, 0, 1]])
    return np.asarray(rz @ rx @ ry, np.float64)
