# SPDX-License-Identifier: Apache-2.0
"""Surface points of a rig as functions of the free parameters alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rigfit.rig.blendshapes import PointModel


class MovingPoints:
    """Points that the free parameters move; the others are folded into the base. Flat arrays: this is the hot path."""

    def __init__(self, model: PointModel, free: NDArray[np.intp], start: NDArray[np.float64]) -> None:
        fixed = start.copy()
        fixed[free] = model.default[free]
        self.free, self.default = free, model.default[free]
        self.base = model.points(fixed).ravel()
        self.positive = np.ascontiguousarray(model.positive[free].reshape(len(free), self.base.size))
        self.negative = np.ascontiguousarray(model.negative[free].reshape(len(free), self.base.size))
        self.same = bool(np.array_equal(self.positive, self.negative))

    def points(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(P,) values → (L,3)."""
        offset = values[self.free] - self.default
        if self.same:
            return (self.base + offset @ self.positive).reshape(-1, 3)
        moved = np.maximum(offset, 0) @ self.positive + np.minimum(offset, 0) @ self.negative
        return (self.base + moved).reshape(-1, 3)

    def slope(self, values: NDArray[np.float64], side: NDArray[np.int8]) -> NDArray[np.float64]:
        """(n,L,3) derivative for the free parameters. side: (n,) what a parameter at its default can do: 1, −1, 0 both."""
        offset = values[self.free] - self.default
        way = np.where(np.abs(offset) < 1e-9, side, np.sign(offset))
        slope = self.positive.copy()
        if not self.same:
            slope[way < 0] = self.negative[way < 0]
            both = way == 0
            slope[both] = 0.5 * (self.positive[both] + self.negative[both])
        return slope.reshape(len(slope), -1, 3)
