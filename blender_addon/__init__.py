# SPDX-License-Identifier: GPL-3.0-or-later
"""rigfit, the Blender side: carry a face rig out of Blender, write fitted values back, render it.

Importing this package needs no bpy, so that its modules without bpy can be used and tested anywhere.
"""

from __future__ import annotations

import importlib

# What Blender registers, in order. Each module has `register()` and `unregister()`.
MODULES: tuple[str, ...] = ("preferences", "properties", "fit.pictures", "link.pump", "operators", "panels")


def register() -> None:
    """Register every module of MODULES; if one fails, unregister those before it and raise."""
    done = []
    try:
        for name in MODULES:
            module = importlib.import_module(f".{name}", __package__)
            module.register()
            done.append(module)
    except BaseException:
        for module in reversed(done):
            module.unregister()
        raise


def unregister() -> None:
    """Undo `register`, last module first."""
    for name in reversed(MODULES):
        importlib.import_module(f".{name}", __package__).unregister()
