# SPDX-License-Identifier: Apache-2.0
"""For every tier: a marked test that needs a Blender is skipped in words where none is named."""

from __future__ import annotations

import os

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("blender") and not os.environ.get("RIGFIT_BLENDER"):
        pytest.skip("RIGFIT_BLENDER names no Blender")
