# SPDX-License-Identifier: GPL-3.0-or-later
"""May we read here, may we write here? Answers are data, so that a panel can show them and offer the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import bpy

from ..compat import text
from ..messages import RigError


@dataclass(frozen=True)
class Reason:
    """Why not: `kind` and `facts` belong to messages.MESSAGES; `remedy` is what an operator could do about it.

    remedy: "make_local", "make_single_user", "object_mode", "relative_keys", "unpin", "show", "export" or "".
    """

    kind: str
    facts: dict[str, object] = field(default_factory=dict)
    remedy: str = ""

    def error(self) -> RigError:
        """The sentence that belongs to the reason."""
        return RigError(self.kind, **self.facts)


def why_not_readable(obj: bpy.types.Object) -> list[Reason]:
    """What keeps the object's evaluated mesh and keys from being what the artist sees; empty if nothing."""
    name = text(obj)
    reasons = []
    mode = "Edit" if obj.data.is_editmode else "Sculpt" if obj.mode == "SCULPT" else ""
    if mode:
        reasons.append(Reason("edit_mode", {"objects": name, "mode": mode}, "object_mode"))
    keys = obj.data.shape_keys
    if keys is not None and not keys.use_relative:
        reasons.append(Reason("absolute_keys", {"objects": name}, "relative_keys"))
    if keys is not None and obj.show_only_shape_key:
        reasons.append(Reason("pinned_key", {"objects": name}, "unpin"))
    if not obj.visible_get():
        reasons.append(Reason("hidden", {"objects": name}, "show"))
    return reasons


def why_not_writable(obj: bpy.types.Object, keys: bool, together: Iterable[bpy.types.Object] = ()) -> list[Reason]:
    """What would make a write to the object's shape keys (keys) or custom properties (not keys) fail or get lost.

    Blender accepts writes to linked and overridden data and forgets them, so each block on the way is asked.
    together: objects that are written in the same go; they may share the mesh.
    """
    name = text(obj)
    blocks: list[bpy.types.ID] = [obj]
    if keys and obj.type == "MESH":
        blocks += [block for block in (obj.data, obj.data.shape_keys) if block is not None]
    reasons = []
    for block in blocks:
        if block.library is not None:
            facts = {"objects": name, "library": block.library.filepath}
            reasons.append(Reason("linked", facts, "make_local"))
            break
        if block.override_library is not None:
            reasons.append(Reason("overridden", {"objects": name}, "make_local"))
            break
        if not block.is_editable:
            reasons.append(Reason("not_editable", {"objects": name}, "make_local"))
            break
    if keys and obj.type == "MESH":
        reasons += [reason for reason in why_not_readable(obj) if reason.kind != "hidden"]
        allowed = {obj, *together}
        others = [text(other) for other in bpy.data.objects if other.data == obj.data and other not in allowed]
        if others:
            facts = {"objects": name, "others": ", ".join(sorted(others))}
            reasons.append(Reason("multi_user", facts, "make_single_user"))
    return reasons


def require(reasons: Sequence[Reason]) -> None:
    """Raise the RigError of the first reason, if there is one."""
    if reasons:
        raise reasons[0].error()
