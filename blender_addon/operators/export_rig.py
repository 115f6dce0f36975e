# SPDX-License-Identifier: GPL-3.0-or-later
"""File > Export > rigfit rig spec: write the selected meshes as a rig spec."""

# No `from __future__ import annotations`: Blender reads the properties from the annotations themselves.
import bpy
from bpy_extras.io_utils import ExportHelper

from ..messages import RigError
from ..rig.export import export_rig


class RIGFIT_OT_export_rig(bpy.types.Operator, ExportHelper):
    """Write the face parameters and the geometry of the selected meshes for rigfit"""

    bl_idname = "rigfit.export_rig"
    bl_label = "Export Rig Spec"
    bl_options = {"REGISTER"}  # noqa: RUF012  Blender wants a plain set

    filename_ext = ".npz"
    filter_glob: bpy.props.StringProperty(default="*.npz", options={"HIDDEN"})
    pairs: bpy.props.BoolProperty(
        name="Join Opposite Keys",
        description="Make one signed parameter of two opposite shape keys, such as nose-incr and nose-decr",
        default=True,
    )

    def execute(self, context: bpy.types.Context) -> set[str]:
        try:
            selected = [item.name for item in context.selected_objects if item.type == "MESH"]
            if not selected:
                raise RigError("no_selection")
            written = export_rig(self.filepath, objects=selected, pairs=self.pairs)
        except RigError as error:
            self.report({"ERROR"}, error.message)
            return {"CANCELLED"}
        for warning in written["warnings"]:
            self.report({"WARNING"}, warning)
        self.report({"INFO"}, f"{written['parameters']} face parameters written to {self.filepath}")
        return {"FINISHED"}


def _menu_entry(self: bpy.types.Menu, context: bpy.types.Context) -> None:
    self.layout.operator(RIGFIT_OT_export_rig.bl_idname, text="rigfit Rig Spec (.npz)")


def register() -> None:
    bpy.utils.register_class(RIGFIT_OT_export_rig)
    bpy.types.TOPBAR_MT_file_export.append(_menu_entry)


def unregister() -> None:
    bpy.types.TOPBAR_MT_file_export.remove(_menu_entry)
    bpy.utils.unregister_class(RIGFIT_OT_export_rig)
