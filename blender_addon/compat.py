# SPDX-License-Identifier: GPL-3.0-or-later
"""Every difference between Blender versions that the add-on has to know, with the release note it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bpy


def text(owner: Any, attribute: str = "name") -> str:
    """A text property of Blender data, whatever its bytes are.

    Blender 4.x cuts a name after 63 bytes, also inside a character, and then reading it raises UnicodeDecodeError
    (5.0 release notes, Core: names are up to 255 bytes and stay valid UTF-8). The half character is dropped here.
    """
    try:
        return getattr(owner, attribute)
    except UnicodeDecodeError as error:
        return bytes(error.object).decode("utf-8", errors="ignore")


def new_shape_key(obj: bpy.types.Object, name: str) -> bpy.types.ShapeKey:
    """Add a shape key that starts at 0.

    5.0 release notes, Animation & Rigging: a new shape key has the value 1.0 (0.0 before).
    """
    key = obj.shape_key_add(name=name, from_mix=False)
    key.value = 0.0
    return key


def fcurves(animation: bpy.types.AnimData | None) -> Iterator[bpy.types.FCurve]:
    """The F-curves of the action that animates a datablock.

    4.4 release notes, Animation & Rigging: actions have layers, strips and slots; 5.0: `Action.fcurves` is gone.
    """
    action = animation.action if animation is not None else None
    if action is None:
        return
    if bpy.app.version < (4, 4, 0):
        yield from action.fcurves
        return
    slot = animation.action_slot
    if slot is None:
        return
    for layer in action.layers:
        for strip in layer.strips:
            bag = strip.channelbag(slot)
            if bag is not None:
                yield from bag.fcurves
