# SPDX-License-Identifier: GPL-3.0-or-later
"""The backend from the artist's side: install it, end it, see its log, copy an error report."""

# No `from __future__ import annotations`: Blender reads the properties from the annotations themselves.
import os
import platform
import sys

import bpy

from ..backend.install import Plan, bundled_wheel, candidate_pythons, install_steps, remove_older
from ..fit.report import report, tail
from ..link.flow import Flow
from ..link.pump import pump, redraw, status
from ..messages import RigError
from ..preferences import START_LOG, addon_version, backend_summary, log_path
from .fit_photo import show_failure


def install_log() -> str:
    return os.path.join(os.path.dirname(log_path()), "install.log")


class RIGFIT_OT_install_backend(bpy.types.Operator):
    """Install rigfit's backend into an environment of its own outside Blender: about 300 MB to download"""

    bl_idname = "rigfit.install_backend"
    bl_label = "Install Backend"
    bl_options = {"REGISTER"}  # noqa: RUF012  Blender wants plain sets

    @classmethod
    def poll(cls, context: bpy.types.Context) -> bool:
        return status().work is None

    def execute(self, context: bpy.types.Context) -> set[str]:
        board = status()
        board.clear_error()
        try:
            if not bpy.app.online_access:
                raise RigError("offline")
            wheel = bundled_wheel(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        except RigError as error:
            board.fail(error)
            self.report({"ERROR" if bpy.app.background else "WARNING"}, error.message)
            return {"CANCELLED"}
        pump().client.stop()
        plan = Plan(wheel, candidate_pythons(sys.executable), addon_version(), install_log())
        board.begin("Installing the backend", "Looking for Python 3.11", total=20)
        board.work = pump().start(install_steps(plan), _installed, board.say)
        if not bpy.app.background:
            redraw()
            return {"FINISHED"}
        pump().run_until(lambda: status().work is None, 3600)
        if board.error is not None:
            self.report({"ERROR"}, board.error.message)
            return {"CANCELLED"}
        return {"FINISHED"}


def _installed(flow: Flow) -> None:
    status().work = None
    if flow.state == "failed":
        show_failure(flow.error)
    elif flow.state == "done":
        remove_older(addon_version())
        backend_summary(fresh=True)


class RIGFIT_OT_stop_backend(bpy.types.Operator):
    """End the backend; the next fit starts it again"""

    bl_idname = "rigfit.stop_backend"
    bl_label = "Stop Backend"

    @classmethod
    def poll(cls, context: bpy.types.Context) -> bool:
        return pump().client.alive

    def execute(self, context: bpy.types.Context) -> set[str]:
        pump().cancel_all()
        pump().client.stop()
        pump().wake()
        redraw()
        return {"FINISHED"}


class RIGFIT_OT_open_logs(bpy.types.Operator):
    """Open the folder with the backend's logs"""

    bl_idname = "rigfit.open_logs"
    bl_label = "Open Logs"

    def execute(self, context: bpy.types.Context) -> set[str]:
        folder = os.path.dirname(log_path())
        os.makedirs(folder, exist_ok=True)
        bpy.ops.wm.path_open(filepath=folder)
        return {"FINISHED"}


def error_report() -> str:
    """The report that Copy Report puts on the clipboard."""
    versions = {
        "rigfit": addon_version(),
        "Blender": bpy.app.version_string,
        "system": platform.platform(),
        "Python": sys.version.split()[0],
        "backend": backend_summary(),
        "backend state": pump().client.state,
    }
    error = status().error
    if error is not None and error.kind in ("install_failed", "no_network"):
        return report(versions, error, tail(install_log()))
    started = os.path.join(os.path.dirname(log_path()), START_LOG)
    return report(versions, error, [*tail(log_path()), *tail(started, 20)])


class RIGFIT_OT_copy_report(bpy.types.Operator):
    """Copy versions, the message and the end of the log, without your name and folders, to send to the developers"""

    bl_idname = "rigfit.copy_report"
    bl_label = "Copy Report"

    def execute(self, context: bpy.types.Context) -> set[str]:
        context.window_manager.clipboard = error_report()
        self.report({"INFO"}, "The report is on the clipboard.")
        return {"FINISHED"}


CLASSES = (
    RIGFIT_OT_install_backend,
    RIGFIT_OT_stop_backend,
    RIGFIT_OT_open_logs,
    RIGFIT_OT_copy_report,
)


register, unregister = bpy.utils.register_classes_factory(CLASSES)
