# SPDX-License-Identifier: GPL-3.0-or-later
"""Every test starts from Blender's factory settings with an empty scene.

It is done before any fixture of the test runs. A module whose tests share what a module fixture builds says
``pytestmark = pytest.mark.keep_scene``: then it is done once, before the module's first test.
"""

from __future__ import annotations

import importlib.util

import pytest

HAS_BPY = importlib.util.find_spec("bpy") is not None
collect_ignore_glob = [] if HAS_BPY else ["test_*.py"]

_previous_module: str | None = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _previous_module
    module = item.nodeid.partition("::")[0]
    shares = item.get_closest_marker("keep_scene") is not None and module == _previous_module
    _previous_module = module
    if HAS_BPY and not shares:
        import bpy

        bpy.ops.wm.read_factory_settings(use_empty=True)
