# SPDX-License-Identifier: GPL-3.0-or-later
"""The list of photos: add by dialog or by dropping them on the sidebar, remove."""

# No `from __future__ import annotations`: Blender reads the properties from the annotations themselves.
import os

import bpy
from bpy_extras.io_utils import ImportHelper

from ..link.pump import redraw

# What the backend reads (rigfit.photo.load); the file dialog shows these, and these can be dropped on the sidebar.
SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".webp", ".avif", ".heic", ".heif", ".tif", ".tiff", ".bmp", ".gif",
)  # fmt: skip


class RIGFIT_OT_add_photos(bpy.types.Operator, ImportHelper):
    """Add photos of one person"""

    bl_idname = "rigfit.add_photos"
    bl_label = "Add Photos"
    bl_options = {"REGISTER", "UNDO"}  # noqa: RUF012  Blender wants plain sets

    filter_glob: bpy.props.StringProperty(default=";".join("*" + s for s in SUFFIXES), options={"HIDDEN"})
    directory: bpy.props.StringProperty(subtype="DIR_PATH", options={"HIDDEN", "SKIP_SAVE"})
    files: bpy.props.CollectionProperty(type=bpy.types.OperatorFileListElement, options={"HIDDEN", "SKIP_SAVE"})

    def invoke(self, context: bpy.types.Context, event: bpy.types.Event) -> set[str]:
        if self.files and any(item.name for item in self.files):  # dropped: the names are here already
            return self.execute(context)
        return super().invoke(context, event)

    def execute(self, context: bpy.types.Context) -> set[str]:
        named = [os.path.join(self.directory, item.name) for item in self.files if item.name]
        settings = context.scene.rigfit
        there = {bpy.path.abspath(photo.path) for photo in settings.photos}
        added = 0
        for path in named or [self.filepath]:
            if os.path.isfile(path) and path not in there:
                settings.photos.add().path = path
                added += 1
        settings.photo_index = max(len(settings.photos) - 1, 0)
        if not added:
            self.report({"WARNING"}, "No new photo was chosen: choose files, not a folder.")
            return {"CANCELLED"}
        redraw()
        return {"FINISHED"}


class RIGFIT_OT_remove_photo(bpy.types.Operator):
    """Take the chosen photo off the list; the file stays"""

    bl_idname = "rigfit.remove_photo"
    bl_label = "Remove Photo"
    bl_options = {"REGISTER", "UNDO"}  # noqa: RUF012

    @classmethod
    def poll(cls, context: bpy.types.Context) -> bool:
        return len(context.scene.rigfit.photos) > 0

    def execute(self, context: bpy.types.Context) -> set[str]:
        settings = context.scene.rigfit
        settings.photos.remove(min(settings.photo_index, len(settings.photos) - 1))
        settings.photo_index = max(settings.photo_index - 1, 0)
        return {"FINISHED"}


class RIGFIT_FH_photos(bpy.types.FileHandler):
    """Photos that are dropped on the sidebar join the list"""

    bl_idname = "RIGFIT_FH_photos"
    bl_label = "rigfit photos"
    bl_import_operator = "rigfit.add_photos"
    bl_file_extensions = ";".join(SUFFIXES)

    @classmethod
    def poll_drop(cls, context: bpy.types.Context) -> bool:
        return context.area is not None and context.area.type == "VIEW_3D"


# --- registration -----------------------------------------------------------------------------------------------------

CLASSES = (RIGFIT_OT_add_photos, RIGFIT_OT_remove_photo, RIGFIT_FH_photos)


register, unregister = bpy.utils.register_classes_factory(CLASSES)
