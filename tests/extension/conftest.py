# SPDX-License-Identifier: GPL-3.0-or-later
"""The built zip installed as an artist installs it, in a Blender with a user folder of its own.

RIGFIT_TEST_ZIP: the zip. RIGFIT_TEST_BACKEND: a Python with rigfit, for real fits. BLENDER_USER_RESOURCES must name an
empty folder before Blender starts; `scripts/run.py` sets all three.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

HAS_BPY = importlib.util.find_spec("bpy") is not None
collect_ignore_glob = [] if HAS_BPY else ["test_*.py"]

REPOSITORY = Path(__file__).resolve().parents[2]
PHOTO = REPOSITORY / "backend" / "rigfit" / "assets" / "astronaut.png"
PACKAGE = "bl_ext.user_default.rigfit"


@pytest.fixture(scope="session")
def package() -> ModuleType:
    """The installed and enabled add-on, under its real package name."""
    for name in ("RIGFIT_TEST_ZIP", "RIGFIT_TEST_BACKEND", "BLENDER_USER_RESOURCES"):
        if not os.environ.get(name):
            pytest.skip(f"{name} is not set (scripts/run.py sets it)")
    import bpy

    bpy.ops.wm.read_factory_settings(use_empty=True)
    done = bpy.ops.extensions.package_install_files(
        filepath=os.environ["RIGFIT_TEST_ZIP"], repo="user_default", enable_on_install=True
    )
    assert done == {"FINISHED"}
    assert PACKAGE in bpy.context.preferences.addons
    return sys.modules[PACKAGE]


@pytest.fixture(scope="session")
def addon(package):
    """Modules of the installed add-on by their names inside it: addon("link.pump")."""
    import bpy

    bpy.context.preferences.addons[PACKAGE].preferences.backend = os.environ["RIGFIT_TEST_BACKEND"]
    yield lambda name: importlib.import_module(f"{PACKAGE}.{name}")
    if PACKAGE in bpy.context.preferences.addons:
        bpy.ops.preferences.addon_disable(module=PACKAGE)


@pytest.fixture
def scene(addon):
    """An empty file, with the add-on still enabled."""
    import bpy

    bpy.ops.wm.read_homefile(use_empty=True, use_factory_startup=True)
    return bpy.context.scene


@pytest.fixture(scope="session")
def head_file(addon, tmp_path_factory):
    """A file with the default head, added by its operator; made once."""
    import bpy

    bpy.ops.wm.read_homefile(use_empty=True, use_factory_startup=True)
    assert bpy.ops.rigfit.add_default_head() == {"FINISHED"}
    assert bpy.context.view_layer.objects.active.select_get()
    path = tmp_path_factory.mktemp("head") / "head.blend"
    bpy.ops.wm.save_as_mainfile(filepath=str(path))
    return path


@pytest.fixture
def head(head_file):
    """The default head in a file of its own, selected and active; the undo steps begin here."""
    import bpy

    bpy.ops.wm.open_mainfile(filepath=str(head_file))
    bpy.ops.ed.undo_push(message="start")
    return bpy.context.view_layer.objects.active


@pytest.fixture
def photo(request, addon):
    """The demo photo, in the list of the open file."""
    import bpy

    # The file first, whatever the order in which a test names its fixtures.
    request.getfixturevalue("head" if "head" in request.fixturenames else "scene")
    bpy.context.scene.rigfit.photos.add().path = str(PHOTO)
    return PHOTO
