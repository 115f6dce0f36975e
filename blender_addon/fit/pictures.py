# SPDX-License-Identifier: GPL-3.0-or-later
"""Pictures from the backend as previews that a panel can draw; nothing of them enters the artist's file."""

from __future__ import annotations

import bpy.utils.previews
import numpy as np

_previews: bpy.utils.previews.ImagePreviewCollection | None = None


def show(name: str, pixels: np.ndarray) -> None:
    """Keep a picture under a name. pixels: uint8 (H,W,3) or (H,W,4) sRGB, straight alpha, first row on top."""
    if _previews is None:
        return
    height, width = pixels.shape[:2]
    picture = np.ones((height, width, 4), np.float32)
    picture[..., : pixels.shape[2]] = pixels.astype(np.float32) / 255
    if name in _previews:
        del _previews[name]
    preview = _previews.new(name)
    preview.image_size = (width, height)
    # Blender's first row is the lowest.
    preview.image_pixels_float.foreach_set(np.ascontiguousarray(picture[::-1]).reshape(-1))


def icon(name: str) -> int:
    """The number by which a layout draws the picture; 0 if there is none."""
    return _previews[name].icon_id if _previews is not None and name in _previews else 0


def forget(*names: str) -> None:
    for name in names:
        if _previews is not None and name in _previews:
            del _previews[name]


def on_grey(pixels: np.ndarray, grey: int = 60) -> np.ndarray:
    """uint8 (H,W,4) with straight alpha over a plain grey, as uint8 (H,W,3)."""
    if pixels.shape[2] == 3:
        return pixels
    alpha = pixels[..., 3:].astype(np.float32) / 255
    return (pixels[..., :3] * alpha + grey * (1 - alpha) + 0.5).astype(np.uint8)


def register() -> None:
    global _previews
    _previews = bpy.utils.previews.new()


def unregister() -> None:
    global _previews
    if _previews is not None:
        bpy.utils.previews.remove(_previews)
        _previews = None
