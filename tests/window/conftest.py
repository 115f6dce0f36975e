# SPDX-License-Identifier: Apache-2.0
"""Tests in a real Blender window. `scripts/run.py test --tier window` sets what they need; see blender_window.py.

RIGFIT_TEST_WINDOW: the Blender executable. RIGFIT_TEST_ZIP: the built extension. RIGFIT_TEST_BACKEND: a Python with
rigfit. One screen for the whole run, one Blender for a module (`window`), further ones by `start_window`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from blender_window import BlenderWindow
from display import Display, folder_of_reports

REPOSITORY = Path(__file__).resolve().parents[2]
VARIABLES = ("RIGFIT_TEST_WINDOW", "RIGFIT_TEST_ZIP", "RIGFIT_TEST_BACKEND")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    reason = f"{', '.join(missing)} not set (scripts/run.py sets it)" if missing else ""
    reason = reason or (f"not installed: {', '.join(Display.missing())}" if Display.missing() else "")
    for item in items if reason else []:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def reports() -> Path:
    """Where screenshots and Blender's logs stay; pictures of what went wrong in an earlier run are removed."""
    folder = folder_of_reports(REPOSITORY)
    for name in ("failed-*.png", "not-*.png"):
        for path in folder.glob(name):
            path.unlink()
    return folder


@pytest.fixture(scope="session")
def display() -> Iterator[Display]:
    with Display() as screen:
        yield screen


@pytest.fixture(scope="module")
def start_window(
    request: pytest.FixtureRequest, display: Display, reports: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], BlenderWindow]]:
    """Start a Blender with a folder of its own and the zip installed; ended with the module if not before.

    One at a time: two on one screen would take each other's keys.
    """
    with ExitStack() as stack:

        def start(name: str) -> BlenderWindow:
            window = BlenderWindow(
                display,
                Path(os.environ["RIGFIT_TEST_WINDOW"]),
                Path(os.environ["RIGFIT_TEST_ZIP"]),
                Path(os.environ["RIGFIT_TEST_BACKEND"]),
                tmp_path_factory.mktemp(f"{request.module.__name__}-{name}-"),
                reports,
            )
            print(f"{name}: Blender in a window after {stack.enter_context(window).start_s:.1f} s")
            return window

        yield start


@pytest.fixture(scope="module")
def window(start_window: Callable[[str], BlenderWindow]) -> BlenderWindow:
    """The module's Blender."""
    return start_window("shared")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failed test leaves a picture of the screen, and the end of Blender's log in its report."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when != "call" or not report.failed:
        return
    for value in getattr(item, "funcargs", {}).values():
        if isinstance(value, BlenderWindow):
            name = re.sub(r"\W+", "-", item.name)
            with contextlib.suppress(Exception):
                value.shot(f"failed-{name}", blank_allowed=True)
            report.sections.append((f"Blender's log, {value.folder.name}", value.last_log()))
