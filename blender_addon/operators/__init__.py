# SPDX-License-Identifier: GPL-3.0-or-later
"""What an artist clicks: operators and their menu entries."""

from __future__ import annotations

import importlib

# Order matters: unregistered in reverse.
MODULES: tuple[str, ...] = ("export_rig", "photos", "fit_photo", "remedy", "default_head", "backend")


def register() -> None:
    """Register the operators of every module of MODULES (needs bpy)."""
    for name in MODULES:
        importlib.import_module(f".{name}", __package__).register()


def unregister() -> None:
    """Undo `register`, last module first."""
    for name in reversed(MODULES):
        importlib.import_module(f".{name}", __package__).unregister()
