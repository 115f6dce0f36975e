# SPDX-License-Identifier: GPL-3.0-or-later
"""Which meshes a fit is for, whether it may, and whether they are still the same when the answer comes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import bpy
import numpy as np

from ..compat import text
from ..messages import RigError
from ..rig.checks import Reason, why_not_readable, why_not_writable
from ..rig.parameters import key_blocks

# Meshes that share this share of their key names with the target move with it.
SHARED_KEYS = 0.5


@dataclass(frozen=True)
class Mark:
    """What identifies a mesh of the target: no reference, which could be stale when it is used."""

    name: str
    session_uid: int
    vertices: int
    topology: str


def has_keys(obj: bpy.types.Object | None) -> bool:
    return obj is not None and obj.type == "MESH" and bool(key_blocks(obj))


def target_objects(context: bpy.types.Context) -> list[bpy.types.Object]:
    """The meshes to fit: the chosen target, or the selected meshes, else the active one; and those that move with them.

    A mesh moves with the target when it is visible and at least half of its keys have names that the target's have, as
    eyes, teeth and brows of one rig do. RigError no_selection, no_shape_keys.
    """
    chosen = context.scene.rigfit.target
    if chosen is not None and chosen.name in context.scene.objects:
        first = [chosen]
    else:
        first = [obj for obj in context.selected_objects if obj.type == "MESH"]
        active = context.view_layer.objects.active
        if not first and active is not None and active.type == "MESH" and active.visible_get():
            first = [active]
    if not first:
        raise RigError("no_selection")
    if not any(has_keys(obj) for obj in first):
        raise RigError("no_shape_keys", objects=", ".join(text(obj) for obj in first))
    names = {name for obj in first for name in key_blocks(obj)}
    mates = [
        obj
        for obj in context.scene.objects
        if obj not in first and has_keys(obj) and obj.visible_get() and _shared(obj, names) >= SHARED_KEYS
    ]
    return first + mates


def _shared(obj: bpy.types.Object, names: set[str]) -> float:
    own = key_blocks(obj)
    return len(names & own.keys()) / len(own)


def why_not(objects: Sequence[bpy.types.Object]) -> list[Reason]:
    """Everything that stands in the way of a fit of these meshes."""
    reasons = [reason for obj in objects for reason in why_not_readable(obj)]
    told = {(reason.kind, str(reason.facts)) for reason in reasons}
    for obj in objects:
        if has_keys(obj):
            reasons += [r for r in why_not_writable(obj, True, objects) if (r.kind, str(r.facts)) not in told]
    return reasons


def mark(objects: Sequence[bpy.types.Object]) -> tuple[Mark, ...]:
    """Remember the meshes without a reference to them."""
    return tuple(
        Mark(text(obj), obj.session_uid, len(obj.data.vertices), _topology(obj.data))
        for obj in objects
        if obj.type == "MESH"
    )


def require_unchanged(marks: Sequence[Mark]) -> list[bpy.types.Object]:
    """The meshes behind the marks. RigError target_changed if one is gone, renamed or has another topology."""
    by_id = {obj.session_uid: obj for obj in bpy.context.scene.objects if obj.type == "MESH"}
    found = []
    for item in marks:
        obj = by_id.get(item.session_uid)
        if (
            obj is None
            or text(obj) != item.name
            or len(obj.data.vertices) != item.vertices
            or _topology(obj.data) != item.topology
        ):
            raise RigError("target_changed", objects=item.name)
        found.append(obj)
    return found


def _topology(data: bpy.types.Mesh) -> str:
    """A hash of the polygons: which vertices each has."""
    corners = np.empty(len(data.loops), np.int32)
    data.loops.foreach_get("vertex_index", corners)
    starts = np.empty(len(data.polygons), np.int32)
    data.polygons.foreach_get("loop_start", starts)
    return hashlib.sha1(corners.tobytes() + starts.tobytes(), usedforsecurity=False).hexdigest()
