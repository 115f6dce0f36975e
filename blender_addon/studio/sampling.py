# SPDX-License-Identifier: GPL-3.0-or-later
"""Random faces, cameras and lights, numbered: sample i of a seed is the same whatever else is drawn. No bpy in here."""

from __future__ import annotations

import math

import numpy as np

from ..messages import RigError

# What a light is. Angles: azimuth about the vertical from the camera's side (positive: to the right of the picture
# for an upright camera), elevation above the horizon.
DEFAULT_LIGHT: dict = {
    "azimuth_deg": 30.0,
    "elevation_deg": 30.0,
    "size": 1.5,
    "strength": 0.9,
    "temperature_k": 5600.0,
    "fill": 0.35,
    "rim": 0.3,
    "world": 0.3,
    "centre": None,
    "size_m": None,
}


def check_light(light: dict) -> dict:
    """Check a complete light. RigError bad_light with the reason."""
    unknown = set(light) - set(DEFAULT_LIGHT)
    if unknown:
        raise RigError("bad_light", reason=f"it has an unknown part {sorted(unknown)[0]}")
    checked = dict(light)
    for name, low, high in (
        ("azimuth_deg", -360.0, 360.0),
        ("elevation_deg", -90.0, 90.0),
        ("size", 1e-3, 100.0),
        ("strength", 0.0, 100.0),
        ("temperature_k", 1667.0, 25000.0),
        ("fill", 0.0, 100.0),
        ("rim", 0.0, 100.0),
        ("world", 0.0, 100.0),
    ):
        value = light[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise RigError("bad_light", reason=f"{name} must be a number from {low:g} to {high:g}")
        checked[name] = float(value)
    if (light["centre"] is None) != (light["size_m"] is None):
        raise RigError("bad_light", reason="centre and size_m belong together")
    if light["centre"] is not None:
        centre = np.asarray(light["centre"], dtype=np.float64)
        if centre.shape != (3,) or not np.isfinite(centre).all():
            raise RigError("bad_light", reason="centre must be three finite numbers")
        size = light["size_m"]
        if isinstance(size, bool) or not isinstance(size, (int, float)) or not 0 < size < math.inf:
            raise RigError("bad_light", reason="size_m must be a positive number")
        checked["centre"], checked["size_m"] = centre.tolist(), float(size)
    return checked


def blackbody_rgb(temperature_k: float) -> tuple[float, float, float]:
    """Linear sRGB colour of a black body, luminance 1, 1667 K to 25000 K.

    Chromaticity: the cubic splines of Kim et al., US patent 7024034 (2006), as widely tabulated; XYZ to linear sRGB by
    IEC 61966-2-1. Components below zero (outside the sRGB gamut) become zero.
    """
    inverse = 1e3 / temperature_k
    if temperature_k < 4000:
        x = -0.2661239 * inverse**3 - 0.2343589 * inverse**2 + 0.8776956 * inverse + 0.179910
    else:
        x = -3.0258469 * inverse**3 + 2.1070379 * inverse**2 + 0.2226347 * inverse + 0.240390
    if temperature_k < 2222:
        y = -1.1063814 * x**3 - 1.34811020 * x**2 + 2.18555832 * x - 0.20219683
    elif temperature_k < 4000:
        y = -0.9549476 * x**3 - 1.37418593 * x**2 + 2.09137015 * x - 0.16748867
    else:
        y = 3.0817580 * x**3 - 5.87338670 * x**2 + 3.75112997 * x - 0.37001483
    xyz = np.array([x / y, 1.0, (1 - x - y) / y])
    to_rgb = np.array(
        [[3.2404542, -1.5371385, -0.4985314], [-0.9692660, 1.8760108, 0.0415560], [0.0556434, -0.2040259, 1.0572252]]
    )
    rgb = np.maximum(to_rgb @ xyz, 0.0)
    rgb /= rgb @ np.array([0.2126729, 0.7151522, 0.0721750])
    return (float(rgb[0]), float(rgb[1]), float(rgb[2]))
