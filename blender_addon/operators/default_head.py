# SPDX-License-Identifier: GPL-3.0-or-later
"""Add the default head to the open scene."""

# No `from __future__ import annotations`: Blender reads the properties from the annotations themselves.
import bpy

from ..fit.job import push_undo
from ..link.flow import Call, Flow, Steps
from ..link.pump import pump, redraw, status
from ..rig.default_head import build_steps
from .fit_photo import BACKGROUND_TIMEOUT_S, show_failure


class RIGFIT_OT_add_default_head(bpy.types.Operator):
    """Add a head with identity and expression shape keys (MakeHuman's base mesh, CC0), ready to be fitted"""

    bl_idname = "rigfit.add_default_head"
    bl_label = "Add Default Head"
    bl_options = {"REGISTER"}  # noqa: RUF012  the undo step comes when the head is there

    @classmethod
    def poll(cls, context: bpy.types.Context) -> bool:
        return status().work is None and context.mode == "OBJECT"

    def execute(self, context: bpy.types.Context) -> set[str]:
        board = status()
        board.begin("Default head", "Preparing the default head")
        board.work = pump().start(_head_steps(), _head_over, board.say)
        if not bpy.app.background:
            redraw()
            return {"FINISHED"}
        flow = board.work
        pump().run_until(lambda: status().work is None, BACKGROUND_TIMEOUT_S)
        if flow.state == "done" and board.error is None:
            return {"FINISHED"}
        self.report({"ERROR"}, board.error.message if board.error is not None else "The head was not added.")
        return {"CANCELLED"}


def _head_steps() -> Steps:
    """The backend describes the head, Blender builds it; returns its name."""
    answer = yield Call("rig.default", {}, "Preparing the default head")
    head = yield from build_steps(str(answer.result["description"]))
    return head.name


def _head_over(flow: Flow) -> None:
    board = status()
    board.work = None
    if flow.state == "failed":
        show_failure(flow.error)
    if flow.state != "done":
        return
    head = bpy.data.objects[flow.result]
    layer = bpy.context.view_layer
    for obj in layer.objects:
        obj.select_set(False)
    head.select_set(True)
    layer.objects.active = head
    push_undo("Add Default Head")
    _show_from_the_front()


def _show_from_the_front() -> None:
    """Turn the largest 3D view to the face and come near: a head in its real size is a dot in the view of a new file."""
    manager = bpy.context.window_manager
    if bpy.app.background or not manager.windows:
        return
    window = manager.windows[0]
    areas = [area for area in window.screen.areas if area.type == "VIEW_3D"]
    if not areas:
        return
    area = max(areas, key=lambda one: one.width * one.height)
    region = next(one for one in area.regions if one.type == "WINDOW")
    with bpy.context.temp_override(window=window, area=area, region=region):
        bpy.ops.view3d.view_axis(type="FRONT")
        bpy.ops.view3d.view_selected()


register, unregister = bpy.utils.register_classes_factory((RIGFIT_OT_add_default_head,))
