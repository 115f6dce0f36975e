# SPDX-License-Identifier: Apache-2.0
"""Head pose in the solver's own unknowns, the projection it stands for, and its exact derivatives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rigfit.render.camera import rotation_from_vector

POSE_SIZE = 7  # rotation (3), shift of the face origin in the picture (2), log scale, log focal length


@dataclass
class Pose:
    """Pose in the face frame: rotation (3,3), shift_px (2,), log s (pixels per face unit), log f (pixels)."""

    rotation: NDArray[np.float64]
    shift_px: NDArray[np.float64]
    log_scale: float
    log_focal: float

    def moved(self, step: NDArray[np.float64]) -> Pose:
        return Pose(
            rotation_from_vector(step[:3]) @ self.rotation,
            self.shift_px + step[3:5],
            self.log_scale + step[5],
            self.log_focal + step[6],
        )

    @property
    def translation(self) -> NDArray[np.float64]:
        scale, focal = np.exp(self.log_scale), np.exp(self.log_focal)
        return np.array([self.shift_px[0] / scale, self.shift_px[1] / scale, focal / scale])


def project_face(points: NDArray[np.float64], pose: Pose, principal: NDArray[np.float64]) -> NDArray[np.float64]:
    """(L,3) face frame → (L,2) pixels."""
    cam = points @ pose.rotation.T + pose.translation
    return np.exp(pose.log_focal) * cam[:, :2] / np.maximum(cam[:, 2:], 1e-6) + principal


def landmark_jacobian(
    points: NDArray[np.float64], basis: NDArray[np.float64], pose: Pose
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Exact derivatives of `project_face`.

    points: (L,3) face frame. basis: (P,L,3) d points / d parameter. Returns (L,2,P) and (L,2,7), the latter for a
    left-multiplied rotation vector, shift_px, log scale and log focal length.
    """
    rotated = points @ pose.rotation.T
    t = pose.translation
    cam = rotated + t
    focal = np.exp(pose.log_focal)
    z = np.maximum(cam[:, 2], 1e-6)
    du = np.zeros((len(points), 2, 3))
    du[:, 0, 0] = du[:, 1, 1] = focal / z
    du[:, :, 2] = -focal * cam[:, :2] / z[:, None] ** 2
    by_parameter = np.einsum("lic,plc->lip", du @ pose.rotation, basis, optimize=True)
    by_pose = np.empty((len(points), 2, POSE_SIZE))
    for axis in range(3):
        by_pose[:, :, axis] = np.einsum("lic,lc->li", du, np.cross(np.eye(3)[axis], rotated))
    by_pose[:, :, 3:5] = du[:, :, :2] / np.exp(pose.log_scale)
    # t = (a/s, b/s, f/s): lowering log s or raising log f moves the face away; f also magnifies.
    by_pose[:, :, 5] = -du @ t
    by_pose[:, :, 6] = du[:, :, 2] * t[2] + focal * cam[:, :2] / z[:, None]
    return by_parameter, by_pose
