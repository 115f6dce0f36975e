# SPDX-License-Identifier: Apache-2.0
"""Least-squares similarity transforms between point sets (Umeyama 1991)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Similarity:
    """``target ≈ scale · rotation @ source + translation`` in D dimensions (2 or 3); never a reflection.

    scale: > 0. rotation: (D,D) float64, determinant +1. translation: (D,) float64.
    """

    scale: float
    rotation: np.ndarray
    translation: np.ndarray

    def apply(self, points: np.ndarray) -> np.ndarray:
        """Move (...,D) points; rows that are NaN stay NaN."""
        return self.scale * (np.asarray(points, np.float64) @ self.rotation.T) + self.translation

    def inverse(self) -> Similarity:
        """The similarity that undoes this one."""
        rotation = self.rotation.T
        return Similarity(1.0 / self.scale, rotation, -(rotation @ self.translation) / self.scale)

    def matrix(self) -> np.ndarray:
        """(D,D+1) float64: ``matrix @ [x, 1]``."""
        return np.concatenate([self.scale * self.rotation, self.translation[:, None]], axis=1)


def similarity(source: np.ndarray, target: np.ndarray, weights: np.ndarray | None = None) -> Similarity:
    """The similarity that moves ``source`` onto ``target`` with the least weighted sum of squared distances.

    source, target: (N,D) with D = 2 or 3, same unit or not. weights: (N,) ≥ 0 or None (all 1). Rows that are not finite
    in either set, or have weight 0, are left out.

    Umeyama, "Least-squares estimation of transformation parameters between two point patterns", PAMI 13(4), 1991,
    eq. 40–43, with weights; the sign matrix S of eq. 43 keeps the determinant at +1.

    Raises ValueError when fewer than D points are usable or when they coincide.
    """
    source = np.asarray(source, np.float64)
    target = np.asarray(target, np.float64)
    if source.ndim != 2 or source.shape != target.shape or source.shape[1] not in (2, 3):
        raise ValueError(f"similarity needs two (N,2) or two (N,3) arrays, not {source.shape} and {target.shape}")
    count, dimension = source.shape
    w = np.ones(count) if weights is None else np.asarray(weights, np.float64)
    if w.shape != (count,) or not np.all(np.isfinite(w)) or np.any(w < 0):
        raise ValueError(f"similarity needs {count} finite weights that are not negative")
    used = (w > 0) & np.isfinite(source).all(axis=1) & np.isfinite(target).all(axis=1)
    if np.count_nonzero(used) < dimension:
        raise ValueError(f"similarity needs {dimension} usable points or more, got {np.count_nonzero(used)}")
    source, target, w = source[used], target[used], w[used] / w[used].sum()

    source_mean, target_mean = w @ source, w @ target
    a, b = source - source_mean, target - target_mean
    variance = float(w @ (a * a).sum(axis=1))
    extent = float(np.abs(source).max()) + 1e-300
    if variance <= (1e-12 * extent) ** 2:
        raise ValueError("similarity needs points that do not coincide")
    u, singular, vt = np.linalg.svd((b * w[:, None]).T @ a)
    sign = np.ones(dimension)
    if np.linalg.det(u) * np.linalg.det(vt) < 0:
        sign[-1] = -1.0
    rotation = (u * sign) @ vt
    scale = float(singular @ sign) / variance
    if scale <= 0:
        raise ValueError("similarity needs target points that do not coincide")
    return Similarity(scale, rotation, target_mean - scale * rotation @ source_mean)
