# SPDX-License-Identifier: GPL-3.0-or-later
"""The add-on's preferences, and what follows from them: which backend is started, and how."""

# No `from __future__ import annotations`: Blender reads the properties from the annotations themselves.
import os
import sys
import time

import bpy

from . import __package__ as PACKAGE
from .backend.locate import command, data_folder, is_installed
from .link.client import Launch
from .messages import RigError

LOG = "backend.log"
# What the process prints before its own log begins, or when Python itself cannot start.
START_LOG = "backend-start.log"


def addon_version() -> str:
    """The version in the manifest that this add-on was installed with (in a checkout: that of the repository)."""
    import tomllib

    here = os.path.dirname(os.path.abspath(__file__))
    for folder in (here, os.path.dirname(here)):
        path = os.path.join(folder, "blender_manifest.toml")
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return str(tomllib.load(file)["version"])
    return "unknown"


class RIGFIT_AP_preferences(bpy.types.AddonPreferences):
    """Where the backend is, and how it runs"""

    bl_idname = PACKAGE

    backend: bpy.props.StringProperty(
        name="Backend",
        subtype="FILE_PATH",
        description="The Python of an environment with rigfit, or its `rigfit` program. "
        "Empty: the one that the button installed, or `rigfit` on the PATH",
    )
    device: bpy.props.EnumProperty(
        name="Device",
        items=(
            ("AUTO", "Automatic", "Use a graphics card where there is one"),
            ("CPU", "Processor", "Leave the graphics card alone"),
        ),
        description="What the background Blender renders the check with",
    )
    blender: bpy.props.StringProperty(
        name="Blender for Renders",
        subtype="FILE_PATH",
        description="The Blender that renders in the background. Empty: this one",
    )
    attach: bpy.props.StringProperty(
        name="Attach",
        subtype="FILE_PATH",
        description="For developers: the address file of a backend that you started with "
        "`rigfit serve --attach --address-file FILE`",
    )
    developer: bpy.props.BoolProperty(name="Developer", description="Show the settings for developers")

    def draw(self, context: bpy.types.Context) -> None:
        from .panels import draw_backend

        layout = self.layout
        layout.use_property_split = True
        layout.use_property_decorate = False
        draw_backend(layout, context)
        layout.prop(self, "backend")
        layout.prop(self, "device")
        layout.prop(self, "developer")
        if self.developer:
            layout.prop(self, "blender")
            layout.prop(self, "attach")


def preferences() -> RIGFIT_AP_preferences | None:
    """This add-on's preferences; None where it is not enabled as an add-on (tests, scripts)."""
    addon = bpy.context.preferences.addons.get(PACKAGE)
    return addon.preferences if addon is not None else None


def log_path() -> str:
    return os.path.join(data_folder(), "logs", LOG)


def blender_program() -> str:
    """The program that renders in the background: the preference, the variable RIGFIT_BLENDER, or this Blender.

    Blender as a Python module is its interpreter.
    """
    options = preferences()
    if options is not None and options.blender.strip():
        return os.path.abspath(os.path.expanduser(options.blender.strip()))
    return os.environ.get("RIGFIT_BLENDER") or bpy.app.binary_path or sys.executable


def launch() -> Launch:
    """How the backend is started now. RigError backend_missing, backend_not_there, file_unwritable."""
    options = preferences()
    log = log_path()
    try:
        os.makedirs(os.path.dirname(log), exist_ok=True)
    except OSError as error:
        raise RigError("file_unwritable", path=log, reason=error.strerror or str(error)) from None
    if options is not None and options.attach.strip():
        attach = os.path.abspath(os.path.expanduser(options.attach.strip()))
        return Launch(None, attach, log)
    start = command(options.backend if options is not None else "", addon_version())
    return Launch([*start, "serve", "--log", log], None, os.path.join(os.path.dirname(log), START_LOG))


# A panel is drawn many times a second; what it says of the disk may be this old.
_FRESH_S = 2.0
_summary: tuple[float, str] = (-_FRESH_S, "")
NOT_INSTALLED = "not installed"


def backend_summary(fresh: bool = False) -> str:
    """One line for the panel: which backend would be used. fresh: look now."""
    global _summary
    now = time.monotonic()
    if fresh or now - _summary[0] >= _FRESH_S:
        _summary = (now, _look_for_backend())
    return _summary[1]


def _look_for_backend() -> str:
    options = preferences()
    if options is not None and options.attach.strip():
        return f"attached: {options.attach}"
    try:
        start = command(options.backend if options is not None else "", addon_version())
    except RigError as error:
        return NOT_INSTALLED if error.kind == "backend_missing" else error.message
    own = is_installed(addon_version()) and start[0].startswith(data_folder())
    return "installed" if own else start[0]


register, unregister = bpy.utils.register_classes_factory((RIGFIT_AP_preferences,))
