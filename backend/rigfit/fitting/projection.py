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
    """(L,3) face frame → (L,3): pixels u, v, and depth behind the face's origin in pixels of the same scale.

    The depth is what detectors call relative depth: metric, not perspective, so only turning the head changes it.
    """
    rotated = points @ pose.rotation.T
    cam = rotated + pose.translation
    out = np.empty((len(points), 3))
    out[:, :2] = np.exp(pose.log_focal) * cam[:, :2] / np.maximum(cam[:, 2:], 1e-6) + principal
    out[:, 2] = np.exp(pose.log_scale) * rotated[:, 2]
    return out


def landmark_jacobian(
    points: NDArray[np.float64], basis: NDArray[np.float64], pose: Pose
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Exact derivatives of `project_face`.

    points: (L,3) face frame. basis: (P,L,3) d points / d parameter. Returns (L,3,P) and (L,3,7), the latter for a
    left-multiplied rotation vector, shift_px, log scale and log focal length.
    """
    rotated = points @ pose.rotation.T
    t = pose.translation
    cam = rotated + t
    focal, scale = np.exp(pose.log_focal), np.exp(pose.log_scale)
    z = np.maximum(cam[:, 2], 1e-6)
    du = np.zeros((len(points), 3, 3))
    du[:, 0, 0] = du[:, 1, 1] = focal / z
    du[:, :2, 2] = -focal * cam[:, :2] / z[:, None] ** 2
    du[:, 2, 2] = scale
    by_parameter = np.matmul(du @ pose.rotation, basis.transpose(1, 2, 0))
    by_pose = np.zeros((len(points), 3, POSE_SIZE))
    for axis in range(3):
        by_pose[:, :, axis] = np.einsum("lic,lc->li", du, np.cross(np.eye(3)[axis], rotated))
    # From here on what moves is the translation t = (a/s, b/s, f/s), which the depth does not contain.
    by_pose[:, :2, 3:5] = du[:, :2, :2] / scale
    by_pose[:, :2, 5] = -du[:, :2] @ t
    by_pose[:, 2, 5] = scale * rotated[:, 2]
    by_pose[:, :2, 6] = du[:, :2, 2] * t[2] + focal * cam[:, :2] / z[:, None]
    return by_parameter, by_pose
