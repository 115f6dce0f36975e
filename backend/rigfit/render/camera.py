# SPDX-License-Identifier: Apache-2.0
"""The one camera model: a pinhole.

``x_cam = R · x_rig + t`` takes points from the rig frame (Blender world, metres) to the camera frame (x right, y down,
z forward, metres); ``u = f·x/z + cx``, ``v = f·y/z + cy`` takes them to pixels. The origin of the image is its top left
corner and the centre of the first pixel is (0.5, 0.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The width of the film that "35 mm equivalent" focal lengths speak of.
FULL_FRAME_WIDTH_MM = 36.0


@dataclass(frozen=True)
class Camera:
    """A pinhole camera.

    width, height: size of the image in pixels.
    focal_px: focal length in pixels (square pixels).
    principal_px: (2,) the principal point in pixels.
    rotation: (3,3) float64, rig frame to camera frame, determinant +1.
    translation: (3,) float64 metres, camera frame.
    """

    width: int
    height: int
    focal_px: float
    principal_px: NDArray[np.float64]
    rotation: NDArray[np.float64]
    translation: NDArray[np.float64]

    def to_camera(self, points: NDArray[np.floating]) -> NDArray[np.float64]:
        """(…,3) points in the rig frame, metres → (…,3) in the camera frame, metres."""
        return points @ self.rotation.T + self.translation

    def project(self, points: NDArray[np.floating]) -> NDArray[np.float64]:
        """(…,3) points in the rig frame, metres → (…,2) pixels. Points at or behind the camera become NaN."""
        cam = self.to_camera(points)
        z = np.where(cam[..., 2:] > 1e-9, cam[..., 2:], np.nan)
        return self.focal_px * cam[..., :2] / z + self.principal_px

    def rays(self, pixels: NDArray[np.floating]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(N,2) pixels → origin (3,) and unit directions (N,3) of their viewing rays in the rig frame."""
        plane = (np.asarray(pixels, np.float64) - self.principal_px) / self.focal_px
        directions = np.concatenate([plane, np.ones((len(plane), 1))], axis=1) @ self.rotation
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        return self.centre, directions

    @property
    def centre(self) -> NDArray[np.float64]:
        """(3,) position of the camera in the rig frame, metres."""
        return -self.rotation.T @ self.translation

    def resized(self, width: int, height: int) -> Camera:
        """The same view on an image of another size; the aspect must be kept to a pixel."""
        k = width / self.width
        return replace(self, width=width, height=height, focal_px=self.focal_px * k, principal_px=self.principal_px * k)

    def to_json(self) -> dict[str, Any]:
        return {
            "width": int(self.width),
            "height": int(self.height),
            "focal_px": float(self.focal_px),
            "principal_px": [float(c) for c in self.principal_px],
            "rotation": [[float(c) for c in row] for row in self.rotation],
            "translation": [float(c) for c in self.translation],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Camera:
        return Camera(
            width=int(data["width"]),
            height=int(data["height"]),
            focal_px=float(data["focal_px"]),
            principal_px=np.asarray(data["principal_px"], np.float64),
            rotation=np.asarray(data["rotation"], np.float64),
            translation=np.asarray(data["translation"], np.float64),
        )


def look_at(
    target: NDArray[np.floating],
    forward: NDArray[np.floating],
    up: NDArray[np.floating],
    distance: float,
    focal_px: float,
    width: int,
    height: int,
) -> Camera:
    """A camera that sees `target` (3,) in the middle of the picture, from `distance` metres, looking along `forward`."""
    z = np.asarray(forward, np.float64) / np.linalg.norm(forward)
    x = np.cross(z, up)
    x /= np.linalg.norm(x)
    rotation = np.stack([x, np.cross(z, x), z])
    translation = np.array([0.0, 0.0, distance]) - rotation @ np.asarray(target, np.float64)
    return Camera(width, height, focal_px, np.array([width / 2, height / 2]), rotation, translation)


def rotation_from_vector(vector: NDArray[np.floating]) -> NDArray[np.float64]:
    """(3,) rotation vector, radians → (3,3) matrix (Rodrigues)."""
    angle = float(np.linalg.norm(vector))
    k = cross_matrix(np.asarray(vector, np.float64))
    if angle < 1e-8:
        return np.eye(3) + k
    return np.eye(3) + np.sin(angle) / angle * k + (1 - np.cos(angle)) / angle**2 * (k @ k)


def cross_matrix(vector: NDArray[np.floating]) -> NDArray[np.float64]:
    """(3,) v → (3,3) matrix K with K·w = v × w."""
    x, y, z = vector
    return np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
