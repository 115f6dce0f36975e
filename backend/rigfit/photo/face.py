# SPDX-License-Identifier: Apache-2.0
"""The landmarks of one face."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class FaceLandmarks:
    """The 478 landmarks of one face on one image (numbering of the MediaPipe face mesh, see ``mesh478``).

    points_px: (478,2) float64, origin at the top left corner of the image, the centre of the first pixel at (0.5, 0.5).
        NaN where unknown (landmark files only).
    depth: (478,) float64, the detector's relative depth in pixels of the image; larger is further from the camera. NaN
        where unknown.
    box_px: (x0, y0, x1, y1) around the finite points; may reach beyond the image.
    score: 0…1, how sure the detector is that this is a face seen well; under 0.9 deserves a warning (strange view, half
        covered). 1 for landmarks from a file.
    rotation_deg: 0, 90, 180 or 270: by how much the face is turned clockwise on the image, to the nearest quarter.
        ``points_px`` belong to the image as it was given, not to the upright one.
    visible: (478,) bool: False for points outside the image, hidden behind the face itself, or unknown.
    spread_px: (478,) float64 or None: by how much (RMS) each point differs between the crops that were averaged. Large
        where the detector guesses: under hair, a hand, a mask.
    """

    points_px: np.ndarray
    depth: np.ndarray
    box_px: tuple[float, float, float, float]
    score: float
    rotation_deg: int
    visible: np.ndarray
    spread_px: np.ndarray | None = field(default=None, kw_only=True)

    @property
    def box_area_px(self) -> float:
        x0, y0, x1, y1 = self.box_px
        return (x1 - x0) * (y1 - y0)

    @property
    def width_px(self) -> float:
        """Width of the face across its own upright direction (the box's other side when it lies on its side)."""
        x0, y0, x1, y1 = self.box_px
        return (x1 - x0) if self.rotation_deg % 180 == 0 else (y1 - y0)
