# SPDX-License-Identifier: GPL-3.0-or-later
"""The sidebar panel "rigfit": photos and options, the button, progress, the result, the message with its remedy."""

import os
import textwrap

import bpy

from .compat import text
from .fit import pictures
from .fit.status import Result, Status, verdict
from .fit.target import has_keys, target_objects
from .link.pump import pump, status
from .messages import RigError
from .operators.remedy import REMEDIES
from .preferences import NOT_INSTALLED, backend_summary
from .rig.parameters import key_blocks

CATEGORY = "rigfit"
ROWS = 6
LEFT_OUT_LINES = 4


def wrapped(layout: bpy.types.UILayout, context: bpy.types.Context, words: str, icon: str = "NONE") -> None:
    """A sentence over as many lines as the width of the panel needs."""
    scale = context.preferences.system.ui_scale
    width = context.region.width if context.region is not None else 300
    lines = textwrap.wrap(words, max(20, int((width - 50 * scale) / (6.6 * scale)))) or [""]
    column = layout.column(align=True)
    column.scale_y = 0.8
    for number, line in enumerate(lines):
        column.label(text=line, icon=icon if number == 0 else ("BLANK1" if icon != "NONE" else "NONE"))


def draw_message(layout: bpy.types.UILayout, context: bpy.types.Context, board: Status) -> None:
    """The last error: its sentence, the button that mends it, report and dismiss."""
    if board.error is None:
        return
    box = layout.box()
    wrapped(box, context, board.error.message, "ERROR")
    if board.remedy in REMEDIES:
        box.operator("rigfit.remedy", text=REMEDIES[board.remedy], icon="TOOL_SETTINGS").remedy = board.remedy
    elif board.remedy == "install":
        draw_install(box, context)
    row = box.row(align=True)
    row.operator("rigfit.copy_report", icon="COPYDOWN")
    row.operator("rigfit.dismiss", icon="X")


def draw_work(layout: bpy.types.UILayout, context: bpy.types.Context, board: Status) -> None:
    """The progress bar with its text, and Cancel."""
    box = layout.box()
    box.label(text=board.title)
    box.progress(factor=board.share, type="BAR", text="" if board.total <= 0 else f"{100 * board.share:.0f} %")
    wrapped(box, context, board.text)
    box.operator("rigfit.cancel", text="Cancel (Esc)", icon="X")


def draw_install(layout: bpy.types.UILayout, context: bpy.types.Context) -> None:
    if bpy.app.online_access:
        layout.operator("rigfit.install_backend", icon="IMPORT")
    else:
        wrapped(
            layout,
            context,
            "To install it, tick Preferences > System > Network > Allow Online Access.",
            "INTERNET_OFFLINE",
        )
        layout.operator("screen.userpref_show", text="Open Preferences", icon="PREFERENCES").section = "SYSTEM"


def draw_backend(layout: bpy.types.UILayout, context: bpy.types.Context) -> None:
    """Which backend there is, what it does, and how to get one."""
    board, client = status(), pump().client
    summary = backend_summary()
    column = layout.column()
    state = {"off": "not started", "ready": "ready", "failed": "stopped"}.get(client.state, client.text or client.state)
    if summary == NOT_INSTALLED:
        wrapped(column, context, "The backend is not installed yet.", "INFO")
        draw_install(column, context)
    else:
        column.label(text=f"Backend: {state}", icon="CHECKMARK" if client.state == "ready" else "DOT")
        wrapped(column, context, summary)
    if board.work is not None and board.title.startswith("Installing"):
        draw_work(column, context, board)
    row = column.row(align=True)
    row.operator("rigfit.stop_backend", text="Stop", icon="QUIT")
    row.operator("rigfit.open_logs", text="Logs", icon="TEXT")


class _Sidebar:
    bl_space_type = "VIEW_3D"
    bl_region_type = "UI"
    bl_category = CATEGORY


class RIGFIT_UL_photos(bpy.types.UIList):
    """The photos, the first of which gives the expression"""

    def draw_item(self, context, layout, data, item, icon, active_data, active_property, index=0):  # type: ignore[no-untyped-def]
        name = os.path.basename(bpy.path.abspath(item.path)) or "no file"
        there = os.path.isfile(bpy.path.abspath(item.path))
        layout.label(text=name, icon="IMAGE_DATA" if there else "ERROR")


class RIGFIT_UL_parameters(bpy.types.UIList):
    """The face parameters with their uncertainty and a lock each"""

    def draw_item(self, context, layout, data, item, icon, active_data, active_property, index=0):  # type: ignore[no-untyped-def]
        row = layout.row(align=True)
        row.prop(item, "locked", text="", icon="LOCKED" if item.locked else "UNLOCKED", emboss=False)
        name = row.row()
        name.active = item.known
        name.label(text=item.name)
        if not item.fitted:
            row.label(text=item.group)
        elif item.known:
            row.label(text=f"{item.value:.2f} ± {item.standard_deviation:.2f}")
        else:
            row.label(text="not told")

    def filter_items(self, context, data, propname):  # type: ignore[no-untyped-def]
        items = getattr(data, propname)
        flags = [self.bitflag_filter_item] * len(items)
        if self.filter_name:
            flags = bpy.types.UI_UL_list.filter_items_by_name(
                self.filter_name, self.bitflag_filter_item, items, "name", reverse=False
            )
        if data.only_unknown:
            flags = [flag if not item.known else 0 for flag, item in zip(flags, items, strict=True)]
        return flags, []


class RIGFIT_PT_fit(_Sidebar, bpy.types.Panel):
    """Fit the head to a photo"""

    bl_idname = "RIGFIT_PT_fit"
    bl_label = "Fit from Photo"

    def draw(self, context: bpy.types.Context) -> None:
        layout, board = self.layout, status()
        settings, session = context.scene.rigfit, context.window_manager.rigfit
        if backend_summary() == NOT_INSTALLED and board.work is None:
            box = layout.box()
            wrapped(box, context, "First, install the backend: it does the heavy work.", "INFO")
            draw_install(box, context)
        ready = self._target(layout, context)
        layout.separator(factor=0.5)
        self._photos(layout, settings)
        column = layout.column()
        column.row(align=True).prop(settings, "solve", expand=True)
        column.prop(session, "strength", slider=True)
        if board.work is None:
            button = layout.column()
            button.scale_y = 1.6
            button.enabled = ready and len(settings.photos) > 0
            button.operator("rigfit.fit_photo", icon="USER")
            if ready and not len(settings.photos):
                layout.label(text="Add a photo first", icon="INFO")
        else:
            draw_work(layout, context, board)
        draw_message(layout, context, board)
        if board.result is not None and board.work is None:
            draw_result(layout, context, board, board.result)

    def _target(self, layout: bpy.types.UILayout, context: bpy.types.Context) -> bool:
        """What would be fitted, or what to do to have something; whether a fit can begin."""
        settings = context.scene.rigfit
        layout.prop(settings, "target", text="", icon="MESH_MONKEY", placeholder="Target: the selected head")
        try:
            objects = target_objects(context)
        except RigError:
            wrapped(layout, context, "Select a head with shape keys.", "INFO")
            layout.operator("rigfit.add_default_head", icon="ADD")
            return False
        keyed = [obj for obj in objects if has_keys(obj)]
        others = f" and {len(objects) - 1} more" if len(objects) > 1 else ""
        layout.label(text=f"{text(keyed[0])}{others}: {len(key_blocks(keyed[0]))} shape keys", icon="CHECKMARK")
        return True

    def _photos(self, layout: bpy.types.UILayout, settings: bpy.types.PropertyGroup) -> None:
        if not len(settings.photos):
            layout.operator("rigfit.add_photos", text="Add Photo…", icon="FILE_IMAGE")
            return
        row = layout.row()
        lines = min(max(len(settings.photos), 2), 5)
        row.template_list("RIGFIT_UL_photos", "", settings, "photos", settings, "photo_index", rows=lines)
        side = row.column(align=True)
        side.operator("rigfit.add_photos", text="", icon="ADD")
        side.operator("rigfit.remove_photo", text="", icon="REMOVE")


def draw_result(layout: bpy.types.UILayout, context: bpy.types.Context, board: Status, result: Result) -> None:
    """The score, the pictures, Keep and Revert."""
    session = context.window_manager.rigfit
    box = layout.box()
    if result.undone:
        wrapped(box, context, "The fit is undone. Redo brings it back.", "LOOP_BACK")
    photo = result.photos[0]
    told = f"Fit: {verdict(photo.error_percent)}, off by {photo.error_percent:.1f} % of the eye distance"
    wrapped(box, context, told, "CHECKMARK")
    shown = [name for name in ("photo", session.picture) if pictures.icon(name)]
    if shown:
        row = box.row()
        width = context.region.width / context.preferences.system.ui_scale if context.region is not None else 260
        for name in shown:
            row.template_icon(icon_value=pictures.icon(name), scale=max(4.0, (width - 60) / 20 / len(shown)))
        row = box.row(align=True)
        if pictures.icon("render"):
            row.prop(session, "picture", expand=True)
        row.operator("rigfit.enlarge", text="", icon="FULLSCREEN_ENTER")
    if board.background is not None and board.background_text:
        row = box.row()
        row.label(text=board.background_text, icon="RENDER_STILL")
        row.operator("rigfit.cancel", text="", icon="X")
    elif result.check_trouble:
        wrapped(box, context, result.check_trouble, "ERROR")
    elif result.check is not None:
        percent = result.check.error_percent
        seen = f"Check render: off by {percent:.1f} %" if percent is not None else "Check render: no face found in it"
        wrapped(box, context, seen, "RENDER_STILL")
    for warning in dict.fromkeys([w for line in result.photos for w in line.warnings] + result.notes):
        wrapped(box, context, warning, "INFO")
    row = box.row(align=True)
    row.scale_y = 1.3
    row.operator("rigfit.keep", icon="CHECKMARK")
    row.operator("rigfit.revert", icon="LOOP_BACK")


class RIGFIT_PT_parameters(_Sidebar, bpy.types.Panel):
    """What the photo tells of each face parameter, and locks"""

    bl_idname = "RIGFIT_PT_parameters"
    bl_label = "Parameters"
    bl_parent_id = "RIGFIT_PT_fit"
    bl_options = {"DEFAULT_CLOSED"}  # noqa: RUF012

    def draw(self, context: bpy.types.Context) -> None:
        layout, session = self.layout, context.window_manager.rigfit
        result = status().result
        if not len(session.rows):
            layout.operator("rigfit.list_parameters", icon="PRESET")
            return
        if result is not None:
            known = len(result.rows) - result.unknown
            layout.label(text=f"The photo tells {known} of {len(result.rows)}")
            layout.prop(session, "only_unknown")
        if result is not None and result.left_out:
            count = len(result.left_out)
            wrapped(layout, context, f"{count} key{'s' if count > 1 else ''} left out:", "INFO")
            for line in result.left_out[:LEFT_OUT_LINES]:
                wrapped(layout, context, line)
            if count > LEFT_OUT_LINES:
                layout.label(text=f"and {count - LEFT_OUT_LINES} more")
        layout.template_list("RIGFIT_UL_parameters", "", session, "rows", session, "row_index", rows=ROWS)


class RIGFIT_PT_options(_Sidebar, bpy.types.Panel):
    """Options of the fit"""

    bl_idname = "RIGFIT_PT_options"
    bl_label = "Options"
    bl_parent_id = "RIGFIT_PT_fit"
    bl_options = {"DEFAULT_CLOSED"}  # noqa: RUF012

    def draw(self, context: bpy.types.Context) -> None:
        layout, settings = self.layout, context.scene.rigfit
        layout.use_property_split = True
        layout.use_property_decorate = False
        layout.prop(settings, "check")
        layout.prop(settings, "face")
        row = layout.row(heading="Focal Length")
        row.prop(settings, "use_focal", text="")
        field = row.row()
        field.enabled = settings.use_focal
        field.prop(settings, "focal_mm", text="")


class RIGFIT_PT_backend(_Sidebar, bpy.types.Panel):
    """The process that does the heavy work"""

    bl_idname = "RIGFIT_PT_backend"
    bl_label = "Backend"
    bl_parent_id = "RIGFIT_PT_fit"
    bl_options = {"DEFAULT_CLOSED"}  # noqa: RUF012

    def draw(self, context: bpy.types.Context) -> None:
        draw_backend(self.layout, context)


CLASSES = (
    RIGFIT_UL_photos,
    RIGFIT_UL_parameters,
    RIGFIT_PT_fit,
    RIGFIT_PT_parameters,
    RIGFIT_PT_options,
    RIGFIT_PT_backend,
)


register, unregister = bpy.utils.register_classes_factory(CLASSES)
