# SPDX-License-Identifier: Apache-2.0
"""A quadratic minimised inside a box."""

from __future__ import annotations

import numpy as np
import scipy.linalg
from numpy.typing import NDArray


def bounded_quadratic(
    hessian: NDArray[np.float64],
    gradient: NDArray[np.float64],
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    max_iterations: int = 60,
) -> NDArray[np.float64]:
    """argmin ½ xᵀHx + gᵀx with lower ≤ x ≤ upper, H (n,n) positive definite, 0 feasible. Projected Newton (Bertsekas 1982)."""
    x = np.zeros(len(gradient))
    for _ in range(max_iterations):
        slope = hessian @ x + gradient
        held = ((x <= lower) & (slope > 0)) | ((x >= upper) & (slope < 0))
        free = ~held
        if not free.any() or np.abs(np.where(held, 0, slope)).max() < 1e-9 * (1 + np.abs(gradient).max()):
            break
        factor = scipy.linalg.cho_factor(hessian[np.ix_(free, free)], check_finite=False)
        direction = np.zeros_like(x)
        direction[free] = -scipy.linalg.cho_solve(factor, slope[free], check_finite=False)
        value = x @ (0.5 * (hessian @ x) + gradient)
        length = 1.0
        while True:
            trial = np.clip(x + length * direction, lower, upper)
            better = trial @ (0.5 * (hessian @ trial) + gradient)
            if better <= value + 1e-4 * (slope @ (trial - x)) or length < 1e-6:
                break
            length *= 0.5
        if np.abs(trial - x).max() < 1e-12:
            break
        x = trial
    return x
