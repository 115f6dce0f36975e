# SPDX-License-Identifier: Apache-2.0
"""Points on a triangle mesh: where a pixel's ray meets it, which of its points is closest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import trimesh
from numpy.typing import NDArray
from scipy.spatial import KDTree

from rigfit.render.camera import Camera
from rigfit.rig.spec import RigSpec


@dataclass(frozen=True)
class SurfacePoints:
    """triangle: (N,) int32, −1 where there is none. barycentric: (N,3) float64. position: (N,3), NaN where none."""

    triangle: NDArray[np.int32]
    barycentric: NDArray[np.float64]
    position: NDArray[np.float64]


def in_parts(spec: RigSpec, *names: str) -> NDArray[np.bool_]:
    """(F,) whether a triangle belongs to one of the named parts."""
    return np.isin(spec.part, [i for i, name in enumerate(spec.parts) if name in names])


def points_at(vertices: NDArray, triangles: NDArray, triangle: NDArray, barycentric: NDArray) -> NDArray[np.float64]:
    """(N,3) positions of barycentric points; NaN where triangle is −1. vertices (V,3), triangles (F,3)."""
    position = np.einsum("nk,nkc->nc", barycentric, np.asarray(vertices, np.float64)[triangles[triangle]])
    position[np.asarray(triangle) < 0] = np.nan
    return position


def cast_pixels(
    vertices: NDArray[np.floating], triangles: NDArray[np.integer], camera: Camera, pixels: NDArray[np.floating]
) -> SurfacePoints:
    """First hit of the viewing ray of each of (N,2) pixels. Triangles that reach behind the camera are passed over.

    Works in the picture: a ray meets a triangle where its pixel lies in the projected triangle, and 1/z is linear
    there, so depth and barycentric coordinates are perspective-correct. Back faces count: rigs have single-sided parts.
    """
    cam = camera.to_camera(np.asarray(vertices, np.float64))
    front = cam[triangles][:, :, 2].min(axis=1) > 1e-6
    ids = np.flatnonzero(front)
    screen = camera.project(vertices)[triangles[ids]]
    depth = cam[:, 2][triangles[ids]]
    low, high = screen.min(axis=1), screen.max(axis=1)
    found = np.full(len(pixels), -1, np.int32)
    weights = np.zeros((len(pixels), 3))
    for n, pixel in enumerate(np.asarray(pixels, np.float64)):
        if not np.isfinite(pixel).all():
            continue
        near = np.flatnonzero(((low <= pixel) & (pixel <= high)).all(axis=1))
        if len(near) == 0:
            continue
        a, b, c = screen[near, 0], screen[near, 1], screen[near, 2]
        area = _cross(b - a, c - a)
        with np.errstate(divide="ignore", invalid="ignore"):
            flat = (
                np.stack([_cross(c - b, pixel - b), _cross(a - c, pixel - c), _cross(b - a, pixel - a)], 1)
                / area[:, None]
            )
        inside = (flat >= -1e-9).all(axis=1)
        if not inside.any():
            continue
        over_z = flat[inside] / depth[near[inside]]
        z = 1 / over_z.sum(axis=1)
        best = int(np.argmin(z))
        found[n] = ids[near[inside][best]]
        weights[n] = over_z[best] * z[best]
    return SurfacePoints(found, weights, points_at(vertices, triangles, found, weights))


def closest_points(
    vertices: NDArray[np.floating],
    triangles: NDArray[np.integer],
    points: NDArray[np.floating],
    allowed: NDArray[np.bool_] | None = None,
    candidates: int = 48,
) -> SurfacePoints:
    """Closest surface point to each of (N,3) points among the `allowed` (F,) triangles; NaN points give −1.

    Candidates are the triangles with the nearest centroids: exact as long as triangles near a point are of like size.
    """
    ids = np.arange(len(triangles)) if allowed is None else np.flatnonzero(allowed)
    corners = np.asarray(vertices, np.float64)[triangles[ids]]
    known = np.flatnonzero(np.isfinite(points).all(axis=1))
    found = np.full(len(points), -1, np.int32)
    weights = np.zeros((len(points), 3))
    if len(ids) and len(known):
        count = min(candidates, len(ids))
        _, near = KDTree(corners.mean(axis=1)).query(points[known], k=count)
        near = near.reshape(len(known), count)
        repeated = np.repeat(points[known], count, axis=0)
        on = trimesh.triangles.closest_point(corners[near.ravel()], repeated)
        distance = np.linalg.norm(on - repeated, axis=1).reshape(len(known), count)
        pick = distance.argmin(axis=1)
        chosen = near[np.arange(len(known)), pick]
        position = on.reshape(len(known), count, 3)[np.arange(len(known)), pick]
        found[known] = ids[chosen]
        weights[known] = np.clip(trimesh.triangles.points_to_barycentric(corners[chosen], position), 0, 1)
        weights[known] /= weights[known].sum(axis=1, keepdims=True)
    return SurfacePoints(found, weights, points_at(vertices, triangles, found, weights))


def vertex_normals(vertices: NDArray[np.floating], triangles: NDArray[np.integer]) -> NDArray[np.float64]:
    """(V,3) unit normals, triangles weighted by area; zero for loose vertices."""
    corners = np.asarray(vertices, np.float64)[triangles]
    face = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    normal = np.zeros((len(vertices), 3))
    for slot in range(3):
        np.add.at(normal, triangles[:, slot], face)
    return normal / np.maximum(np.linalg.norm(normal, axis=1, keepdims=True), 1e-20)


def _cross(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
