# SPDX-License-Identifier: GPL-3.0-or-later
"""What stands in the way of a fit: close the message, or have it mended."""

# No `from __future__ import annotations`: Blender reads the properties from the annotations themselves.
import bpy

from ..fit.target import target_objects, why_not
from ..link.pump import redraw, status
from ..messages import RigError


class RIGFIT_OT_dismiss(bpy.types.Operator):
    """Close the message"""

    bl_idname = "rigfit.dismiss"
    bl_label = "Dismiss"

    def execute(self, context: bpy.types.Context) -> set[str]:
        status().clear_error()
        redraw()
        return {"FINISHED"}


# Names for the button of each remedy in rig.checks.
REMEDIES = {
    "make_local": "Make Local",
    "make_single_user": "Make Single User",
    "object_mode": "Go to Object Mode",
    "relative_keys": "Make the Keys Relative",
    "unpin": "Release the Pinned Key",
    "show": "Show the Object",
}


class RIGFIT_OT_remedy(bpy.types.Operator):
    """Do what the message proposes"""

    bl_idname = "rigfit.remedy"
    bl_label = "Mend It"
    bl_options = {"REGISTER", "UNDO"}  # noqa: RUF012

    remedy: bpy.props.EnumProperty(items=[(key, name, "") for key, name in REMEDIES.items()], options={"HIDDEN"})

    def execute(self, context: bpy.types.Context) -> set[str]:
        board = status()
        try:
            objects = target_objects(context)
            for obj in objects:
                if any(reason.remedy == self.remedy for reason in why_not([obj])):
                    _mend(context, obj, self.remedy)
        except RigError as error:
            board.fail(error)
            return {"CANCELLED"}
        except RuntimeError as error:
            self.report({"WARNING"}, " ".join(str(error).split()))
            return {"CANCELLED"}
        board.clear_error()
        left = why_not(objects)
        if left:
            board.fail(left[0].error(), left[0].remedy)
        redraw()
        return {"FINISHED"}


def _mend(context: bpy.types.Context, obj: bpy.types.Object, remedy: str) -> None:
    keys = obj.data.shape_keys
    if remedy == "make_local":
        obj.make_local()
        obj.data.make_local()
        if obj.data.shape_keys is not None and obj.data.shape_keys.library is not None:
            obj.data.shape_keys.make_local()
    elif remedy == "make_single_user":
        obj.data = obj.data.copy()
    elif remedy == "object_mode":
        with context.temp_override(active_object=obj, object=obj):
            bpy.ops.object.mode_set(mode="OBJECT")
    elif remedy == "relative_keys" and keys is not None:
        keys.use_relative = True
    elif remedy == "unpin":
        obj.show_only_shape_key = False
    elif remedy == "show":
        obj.hide_set(False)
        obj.hide_viewport = False
    context.view_layer.update()


# --- registration -----------------------------------------------------------------------------------------------------

CLASSES = (RIGFIT_OT_dismiss, RIGFIT_OT_remedy)


register, unregister = bpy.utils.register_classes_factory(CLASSES)
