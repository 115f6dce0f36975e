# SPDX-License-Identifier: Apache-2.0
"""Evaluate a rig: all vertices, or only some points on its surface.

Both are the linear blendshape model of the rig spec (docs/architecture.md), one-sided so that a pair of opposite shape
keys can be one signed parameter:

    v(p) = neutral + Σ_i max(p_i − d_i, 0) · D⁺_i + min(p_i − d_i, 0) · D⁻_i
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from rigfit.rig.spec import RigSpec

# Three V × S matrices (x, y, z) for each spec in use; they die with it.
_bases: WeakKeyDictionary[RigSpec, tuple[sparse.csc_matrix, ...]] = WeakKeyDictionary()


def _basis(spec: RigSpec) -> tuple[sparse.csc_matrix, ...]:
    basis = _bases.get(spec)
    if basis is None:
        shape = (len(spec.neutral), len(spec.shape_offsets) - 1)
        basis = tuple(
            sparse.csc_matrix(
                (spec.shape_deltas[:, axis].astype(np.float64), spec.shape_vertices, spec.shape_offsets), shape=shape
            )
            for axis in range(3)
        )
        _bases[spec] = basis
    return basis


def _check_values(values: ArrayLike, count: int) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (count,):
        raise ValueError(f"values have shape {array.shape}, the rig has {count} parameters")
    return array


def shape_weights(spec: RigSpec, values: ArrayLike) -> NDArray[np.float64]:
    """(S,) float64: how much of each shape the parameter values (P,) call for."""
    offset = _check_values(values, len(spec.parameters)) - spec.default
    weights = np.zeros(len(spec.shape_offsets) - 1)
    for parameter, amount in zip(spec.parameters, offset, strict=True):
        shape = parameter.shape
        if amount < 0 and parameter.negative_shape is not None:
            shape = parameter.negative_shape
        if shape is not None:
            weights[shape] += amount
    return weights


def evaluate(spec: RigSpec, values: ArrayLike) -> NDArray[np.float64]:
    """(V,3) float64 vertices in the rig frame, metres.

    values: (P,) in spec order, in units of the parameters; limits are the caller's business.
    Raises ValueError if there are not P of them.
    """
    weights = shape_weights(spec, values)
    vertices = spec.neutral.astype(np.float64)
    for axis, matrix in enumerate(_basis(spec)):
        vertices[:, axis] += matrix @ weights
    return vertices


@dataclass(frozen=True, eq=False)
class PointModel:
    """The rig restricted to L points on its surface.

    neutral: (L,3) float64 metres, rig frame, every parameter at its default.
    positive, negative: (P,L,3) float64 metres per unit of the parameter, above and below the default (D⁺ and D⁻).
    default: (P,) float64.
    """

    neutral: NDArray[np.float64]
    positive: NDArray[np.float64]
    negative: NDArray[np.float64]
    default: NDArray[np.float64]

    def points(self, values: ArrayLike) -> NDArray[np.float64]:
        """(L,3) float64 metres for parameter values (P,)."""
        offset = _check_values(values, len(self.default)) - self.default
        return (
            self.neutral
            + np.tensordot(np.maximum(offset, 0.0), self.positive, axes=1)
            + np.tensordot(np.minimum(offset, 0.0), self.negative, axes=1)
        )

    def jacobian(self, values: ArrayLike) -> NDArray[np.float64]:
        """(P,L,3) float64: derivative of `points`; at a default, where a signed pair has a kink, the side above."""
        offset = _check_values(values, len(self.default)) - self.default
        return np.where((offset < 0)[:, None, None], self.negative, self.positive)


def restrict(spec: RigSpec, triangle: ArrayLike, barycentric: ArrayLike) -> PointModel:
    """The rig at L points given as triangle and barycentric weights.

    triangle: (L,) int, rows of `spec.triangles`. barycentric: (L,3) float.
    Raises ValueError for a triangle that does not exist: select the embedded landmarks (triangle ≥ 0) first.
    """
    triangle = np.asarray(triangle, dtype=np.int64)
    weights = np.asarray(barycentric, dtype=np.float64)
    if triangle.ndim != 1 or weights.shape != (len(triangle), 3):
        raise ValueError(f"triangle {triangle.shape} and barycentric {weights.shape} are not (L,) and (L,3)")
    if len(triangle) and (triangle.min() < 0 or triangle.max() >= len(spec.triangles)):
        raise ValueError("a point lies on a triangle that does not exist; pass only points with triangle >= 0")
    count = len(triangle)
    corners = spec.triangles[triangle]
    select = sparse.csr_matrix(
        (weights.ravel(), corners.ravel(), np.arange(0, 3 * count + 1, 3)), shape=(count, len(spec.neutral))
    )
    shapes = np.stack([sparse.csr_matrix(select @ matrix).toarray().T for matrix in _basis(spec)], axis=-1)  # (S,L,3)
    positive = np.zeros((len(spec.parameters), count, 3))
    negative = np.zeros_like(positive)
    for row, parameter in enumerate(spec.parameters):
        if parameter.shape is not None:
            positive[row] = shapes[parameter.shape]
            negative[row] = shapes[parameter.shape if parameter.negative_shape is None else parameter.negative_shape]
    return PointModel(select @ spec.neutral.astype(np.float64), positive, negative, spec.default)
