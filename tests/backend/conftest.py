# SPDX-License-Identifier: Apache-2.0
"""The backend never imports bpy; a session in which it was imported has failed."""

from __future__ import annotations

import sys

import pytest


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "bpy" in sys.modules:
        print("\nbpy was imported into the backend's process, which must not happen.", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
