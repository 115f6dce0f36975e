# SPDX-License-Identifier: GPL-3.0-or-later
"""The installed extension: its place, its registration, and that nothing of it stays when it is disabled."""

from __future__ import annotations

import sys

import bpy
from conftest import PACKAGE

OPERATORS = (
    "add_photos", "remove_photo", "fit_photo", "list_parameters", "cancel", "keep", "revert", "enlarge", "dismiss",
    "remedy", "add_default_head", "install_backend", "stop_backend", "open_logs", "copy_report", "export_rig",
)  # fmt: skip


def test_it_runs_from_the_extension_folder(package):
    assert "extensions" in package.__file__
    assert "blender_addon" not in sys.modules
    assert not [path for path in sys.path if "rigfit" in path and "extensions" in path]


def test_the_bundled_backend_is_found(addon):
    import os

    folder = os.path.dirname(addon("messages").__file__)
    assert addon("backend.install").bundled_wheel(folder).endswith(".whl")


def test_disable_takes_everything_away_and_enable_brings_it_back(addon):
    def registered():
        return [name for name in OPERATORS if f"RIGFIT_OT_{name}" in dir(bpy.types)]

    assert registered() == list(OPERATORS)
    pump = addon("link.pump").pump()
    assert pump.run_until(lambda: pump.client.submit("ping", {}) is not None, 1)
    assert pump.run_until(lambda: pump.client.state == "ready", 60)
    handlers = len(bpy.app.handlers.load_pre), len(bpy.app.handlers.undo_post)
    bpy.ops.preferences.addon_disable(module=PACKAGE)
    assert registered() == []
    assert not hasattr(bpy.types.Scene, "rigfit")
    assert not hasattr(bpy.types.WindowManager, "rigfit")
    assert not pump.client.alive
    assert (len(bpy.app.handlers.load_pre), len(bpy.app.handlers.undo_post)) == (handlers[0] - 1, handlers[1] - 1)
    bpy.ops.preferences.addon_enable(module=PACKAGE)
    assert registered() == list(OPERATORS)
    assert hasattr(bpy.types.Scene, "rigfit")


def test_offline_installation_is_refused_in_words(addon, monkeypatch):
    status = addon("link.pump").status()
    assert not bpy.app.online_access
    try:
        bpy.ops.rigfit.install_backend()
        said = ""
    except RuntimeError as error:
        said = str(error)
    assert "Allow Online Access" in said
    assert status.error.kind == "offline"
    status.clear_error()
