# SPDX-License-Identifier: Apache-2.0
"""Modules that say "No bpy in here" can be imported where there is none; so can the package itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ADDON = Path(__file__).resolve().parents[2] / "blender_addon"

# Each module is imported alone, in a process in which importing bpy or the backend fails.
PROBE = """
import sys
for name in ("bpy", "mathutils", "bmesh", "gpu", "bpy_extras", "addon_utils", "rigfit", "scipy", "torch"):
    sys.modules[name] = None
import importlib
importlib.import_module(sys.argv[1])
allowed = set(sys.stdlib_module_names) | {"numpy", "blender_addon", "__mp_main__"}
spec_of = lambda module: getattr(module, "__spec__", None)
strangers = {name.split(".")[0] for name, module in list(sys.modules.items()) if spec_of(module)} - allowed
strangers -= set(sys.argv[2].split(","))
assert not strangers, strangers
"""


def declared_modules() -> list[str]:
    names = []
    for path in sorted(ADDON.rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if "no bpy in here" in docstring.lower():
            names.append(".".join(path.relative_to(ADDON.parent).with_suffix("").parts))
    return names


def test_the_known_modules_declare_it():
    assert {"blender_addon.messages", "blender_addon.studio.sampling", "blender_addon.worker"} <= set(
        declared_modules()
    )


@pytest.mark.parametrize("module", ["blender_addon", "blender_addon.operators", *declared_modules()])
def test_imports_without_bpy(module):
    # What the interpreter brings along by itself (site hooks of an environment) is not the module's doing.
    bare = subprocess.run(
        [sys.executable, "-c", "import sys; print(','.join({n.split('.')[0] for n in sys.modules}))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    done = subprocess.run(
        [sys.executable, "-c", PROBE, module, bare], cwd=ADDON.parent, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
