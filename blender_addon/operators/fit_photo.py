# SPDX-License-Identifier: GPL-3.0-or-later
"""Fit from photo: the button, cancel, keep, revert, and what the panel gets of a result."""

# No `from __future__ import annotations`: Blender reads the properties from the annotations themselves.
from collections.abc import Iterator

import bpy

from ..compat import text
from ..fit import pictures
from ..fit.job import Fitted, Request, check_steps, fit_steps, is_applied, push_undo, revert
from ..fit.status import Result
from ..fit.target import target_objects, why_not
from ..link.client import Ticket
from ..link.flow import Flow, Steps
from ..link.pump import pump, redraw, scratch_folder, status
from ..messages import RigError
from ..preferences import blender_program, preferences
from ..properties import locks_of
from ..rig.parameters import discover

PICTURES = ("photo", "landmarks", "render", "over")
BACKGROUND_TIMEOUT_S = 900.0


def _request(context: bpy.types.Context, first: bpy.types.Object) -> Request:
    settings, options = context.scene.rigfit, preferences()
    photos = tuple(bpy.path.abspath(photo.path) for photo in settings.photos if photo.path)
    if not photos:
        raise RigError("no_photo")
    return Request(
        photos=photos,
        solve=settings.solve,
        locks=locks_of(first),
        face=settings.face,
        focal_mm=settings.focal_mm if settings.use_focal else None,
        strength=context.window_manager.rigfit.strength,
        blender=blender_program(),
        gpu=options is None or options.device != "CPU",
    )


class RIGFIT_OT_fit_photo(bpy.types.Operator):
    """Fit the head to the photos: landmarks are found in them, and the face parameters that explain them are applied"""

    bl_idname = "rigfit.fit_photo"
    bl_label = "Fit from Photo"
    bl_options = {"REGISTER"}  # noqa: RUF012  the undo step comes when the values are written

    @classmethod
    def poll(cls, context: bpy.types.Context) -> bool:
        if status().work is not None:
            cls.poll_message_set("Something is running: cancel it, or wait for its end")
            return False
        return True

    def execute(self, context: bpy.types.Context) -> set[str]:
        board, remedy = status(), ""
        board.clear_error()
        try:
            objects = target_objects(context)
            reasons = why_not(objects)
            if reasons:
                remedy = reasons[0].remedy
                raise reasons[0].error()
            request = _request(context, objects[0])
            folder = scratch_folder()
        except RigError as error:
            board.fail(error, remedy)
            redraw()
            # In the window the panel shows it, in background an error stops the script.
            self.report({"ERROR" if bpy.app.background else "WARNING"}, error.message)
            return {"CANCELLED"}
        put_away_result()
        context.window_manager.rigfit.rows.clear()
        # Begins the start of the backend, if need be, while the rig is read.
        waking = pump().client.submit("ping", {})
        check = context.scene.rigfit.check
        owner = text(objects[0])
        board.begin("Fit from photo", "Reading the rig")
        board.work = pump().start(
            fit_steps(request, objects, folder, board),
            lambda flow: _fit_over(flow, waking, request, folder, owner, check),
            board.say,
        )
        if bpy.app.background:
            return self._wait(board.work)
        redraw()
        return {"FINISHED"}

    def _wait(self, flow: Flow) -> set[str]:
        over = pump().run_until(lambda: status().work is None and status().background is None, BACKGROUND_TIMEOUT_S)
        if not over:
            pump().cancel_all()
            self.report({"ERROR"}, f"The fit did not end within {BACKGROUND_TIMEOUT_S:.0f} s and was stopped.")
            return {"CANCELLED"}
        if flow.state == "done":
            return {"FINISHED"}
        error = status().error
        self.report({"ERROR"}, error.message if error is not None else "The fit was cancelled.")
        return {"CANCELLED"}


def _fit_over(flow: Flow, waking: Ticket, request: Request, folder: str, owner: str, check: bool) -> None:
    board = status()
    board.work = None
    if flow.state == "cancelled":
        # A backend that does not even answer this is ended like one that does not stop.
        pump().client.cancel(waking)
    if flow.state == "failed":
        show_failure(flow.error)
        return
    if flow.state != "done":
        return
    fitted: Fitted = flow.result
    board.result = fitted.result
    # Moved while the fit ran: what the slider says now is what the artist wants.
    session = bpy.context.window_manager.rigfit
    if session.strength != fitted.result.strength:
        session.strength = session.strength
    board.background_text = ""
    board.background = pump().start(
        _after_fit(fitted, request, folder, owner, check),
        lambda over: _check_over(over, fitted.result),
        lambda done, total, said: setattr(board, "background_text", said or board.background_text),
    )


def _after_fit(fitted: Fitted, request: Request, folder: str, owner: str, check: bool) -> Steps:
    """Pictures and list of the result, a little at a time, then the check; returns (Check, blobs) or None."""
    for name, blob in (("photo", "photo_0"), ("landmarks", "landmarks_0")):
        if blob in fitted.blobs:
            pictures.show(name, fitted.blobs[blob])
            yield None
    bpy.context.window_manager.rigfit.picture = "landmarks"
    yield from fill_rows(fitted.result, owner)
    redraw()
    if not check:
        return None
    yield 0, 0, "Blender renders the check"
    return (yield from check_steps(request, fitted.result, folder))


def _check_over(flow: Flow, result: Result) -> None:
    board = status()
    board.background = None
    if flow.state == "failed":
        error = flow.error
        result.check_trouble = error.message if isinstance(error, RigError) else f"The check failed: {error}"
        if not isinstance(error, RigError):
            show_failure(error)
    elif flow.state == "done" and flow.result is not None:
        result.check, blobs = flow.result
        if "render" in blobs:
            pictures.show("render", pictures.on_grey(blobs["render"]))
        if "over" in blobs:
            pictures.show("over", blobs["over"])
        bpy.context.window_manager.rigfit.picture = "render"


def put_away_result() -> None:
    """The result is kept, reverted or followed by another fit: its check ends and its pictures go."""
    pump().cancel(status().background)
    status().result = None
    pictures.forget(*PICTURES)


def show_failure(error: BaseException | None) -> None:
    """An error of a flow in the panel; a defect also goes to the console with its traceback."""
    if isinstance(error, RigError):
        remedy = "install" if error.kind in ("backend_missing", "backend_not_there") else ""
        status().fail(error, remedy)
        return
    status().fail_by_defect(error)


def fill_rows(result: Result, owner: str) -> Iterator[None]:
    """The list of parameters, the strongest of each group first; a few rows a step."""
    rows = bpy.context.window_manager.rigfit.rows
    rows.clear()
    rig = bpy.data.objects.get(owner)
    locks = locks_of(rig) if rig is not None else frozenset()
    order = {"expression": 0, "identity": 1, "pose": 2, "appearance": 3}
    for row in sorted(result.rows, key=lambda r: (order.get(r.group, 4), not r.identifiable, -abs(r.value), r.name)):
        item = _add_row(rows, row.name, row.group, owner, locks)
        item.value, item.standard_deviation, item.known = row.value, row.standard_deviation, row.identifiable
        item.fitted = True
        if len(rows) % 20 == 0:
            yield


def _add_row(
    rows: bpy.types.bpy_prop_collection, name: str, group: str, owner: str, locks: frozenset[str]
) -> bpy.types.PropertyGroup:
    item = rows.add()
    item.name, item.group, item.owner = name, group, owner
    item.locked = name in locks
    return item


class RIGFIT_OT_list_parameters(bpy.types.Operator):
    """List the face parameters of the target, to lock some of them before the fit"""

    bl_idname = "rigfit.list_parameters"
    bl_label = "List Parameters"
    bl_options = {"REGISTER"}  # noqa: RUF012

    def execute(self, context: bpy.types.Context) -> set[str]:
        try:
            objects = target_objects(context)
            found = discover(objects)
        except RigError as error:
            status().fail(error)
            self.report({"WARNING"}, error.message)
            return {"CANCELLED"}
        rows = context.window_manager.rigfit.rows
        rows.clear()
        locks = locks_of(objects[0])
        for parameter in found.parameters:
            _add_row(rows, parameter.name, parameter.group, text(objects[0]), locks).known = True
        return {"FINISHED"}


class RIGFIT_OT_cancel(bpy.types.Operator):
    """Stop what is running; nothing is written"""

    bl_idname = "rigfit.cancel"
    bl_label = "Cancel"
    bl_options = {"REGISTER"}  # noqa: RUF012

    @classmethod
    def poll(cls, context: bpy.types.Context) -> bool:
        return status().work is not None or status().background is not None

    def execute(self, context: bpy.types.Context) -> set[str]:
        board = status()
        pump().cancel(board.work if board.work is not None else board.background)
        redraw()
        return {"FINISHED"}


class _OnResult:
    @classmethod
    def poll(cls, context: bpy.types.Context) -> bool:
        return status().result is not None and status().work is None


class RIGFIT_OT_keep(_OnResult, bpy.types.Operator):
    """Keep the fitted face as it is now"""

    bl_idname = "rigfit.keep"
    bl_label = "Keep"
    bl_options = {"REGISTER"}  # noqa: RUF012

    def execute(self, context: bpy.types.Context) -> set[str]:
        result = status().result
        if result is not None and result.strength != 1.0:
            push_undo("Fit Strength")
        put_away_result()
        redraw()
        return {"FINISHED"}


class RIGFIT_OT_revert(_OnResult, bpy.types.Operator):
    """Put every slider back to where it was before the fit"""

    bl_idname = "rigfit.revert"
    bl_label = "Revert"
    bl_options = {"REGISTER"}  # noqa: RUF012

    def execute(self, context: bpy.types.Context) -> set[str]:
        board = status()
        result = board.result
        assert result is not None
        try:
            lost = revert(result) if not result.undone else []
        except RigError as error:
            board.fail(error)
            self.report({"WARNING"}, error.message)
            return {"CANCELLED"}
        put_away_result()
        if lost:
            self.report({"WARNING"}, f"No longer there: {', '.join(lost[:5])}")
        redraw()
        return {"FINISHED"}


class RIGFIT_OT_enlarge(bpy.types.Operator):
    """Show the pictures larger"""

    bl_idname = "rigfit.enlarge"
    bl_label = "rigfit: Photo and Result"

    @classmethod
    def poll(cls, context: bpy.types.Context) -> bool:
        return pictures.icon("photo") != 0

    def invoke(self, context: bpy.types.Context, event: bpy.types.Event) -> set[str]:
        return context.window_manager.invoke_popup(self, width=840)

    def draw(self, context: bpy.types.Context) -> None:
        session = context.window_manager.rigfit
        self.layout.prop(session, "picture", expand=True)
        row = self.layout.row()
        for name in ("photo", session.picture):
            if pictures.icon(name):
                row.template_icon(icon_value=pictures.icon(name), scale=20)

    def execute(self, context: bpy.types.Context) -> set[str]:
        return {"FINISHED"}


# --- registration -----------------------------------------------------------------------------------------------------------

CLASSES = (
    RIGFIT_OT_fit_photo,
    RIGFIT_OT_list_parameters,
    RIGFIT_OT_cancel,
    RIGFIT_OT_keep,
    RIGFIT_OT_revert,
    RIGFIT_OT_enlarge,
)

_keymap: list[tuple[bpy.types.KeyMap, bpy.types.KeyMapItem]] = []


@bpy.app.handlers.persistent
def _after_undo(*_: object) -> None:
    """The panel must not offer to keep what the artist undid, and offer it again after a redo."""
    try:
        result = status().result
    except RuntimeError:
        return
    if result is not None:
        applied = is_applied(result)
        result.undone = applied is False
        if applied is not None:
            redraw()


def register() -> None:
    for cls in CLASSES:
        bpy.utils.register_class(cls)
    bpy.app.handlers.undo_post.append(_after_undo)
    bpy.app.handlers.redo_post.append(_after_undo)
    configuration = bpy.context.window_manager.keyconfigs.addon
    if configuration is not None:  # none in background
        keymap = configuration.keymaps.new(name="Window", space_type="EMPTY")
        _keymap.append((keymap, keymap.keymap_items.new(RIGFIT_OT_cancel.bl_idname, "ESC", "PRESS")))


def unregister() -> None:
    for keymap, item in _keymap:
        keymap.keymap_items.remove(item)
    _keymap.clear()
    bpy.app.handlers.redo_post.remove(_after_undo)
    bpy.app.handlers.undo_post.remove(_after_undo)
    for cls in reversed(CLASSES):
        bpy.utils.unregister_class(cls)
