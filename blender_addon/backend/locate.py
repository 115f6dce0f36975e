# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the backend is: the chosen environment, the one that the button installed, or `rigfit` on the PATH. No bpy in here."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping

from ..messages import RigError

VARIABLE = "RIGFIT_BACKEND"
# Written last by an installation; without it the environment is half made.
STAMP = "rigfit-installed.json"


def data_folder(environment: Mapping[str, str] | None = None, platform: str = sys.platform) -> str:
    """The folder of rigfit's own data for this user, outside Blender, by the customs of the system."""
    environment = os.environ if environment is None else environment
    home = os.path.expanduser("~")
    if platform == "win32":
        base = environment.get("LOCALAPPDATA") or os.path.join(home, "AppData", "Local")
    elif platform == "darwin":
        base = os.path.join(home, "Library", "Application Support")
    else:
        base = environment.get("XDG_DATA_HOME") or os.path.join(home, ".local", "share")
    return os.path.join(base, "rigfit")


def installed_folder(version: str) -> str:
    """The environment that the button installs for this version of the add-on."""
    return os.path.join(data_folder(), f"backend-{version}")


def python_in(folder: str) -> str:
    """The interpreter of a virtual environment."""
    return os.path.join(folder, "Scripts", "python.exe") if os.name == "nt" else os.path.join(folder, "bin", "python")


def is_installed(version: str) -> bool:
    folder = installed_folder(version)
    return os.path.isfile(os.path.join(folder, STAMP)) and os.path.exists(python_in(folder))


def command(chosen: str, version: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """The start of the backend's command line, to which `serve …` is added.

    chosen: the preference, a Python interpreter, its environment's folder or a `rigfit` program; empty: look for one.
    RigError backend_missing, backend_not_there.
    """
    environment = os.environ if environment is None else environment
    named = chosen.strip() or environment.get(VARIABLE, "").strip()
    if named:
        path = os.path.abspath(os.path.expanduser(named))
        if os.path.isdir(path):
            path = python_in(path)
        if not os.path.isfile(path):
            raise RigError("backend_not_there", path=path)
        return _starter(path)
    if is_installed(version):
        return _starter(python_in(installed_folder(version)))
    on_path = shutil.which("rigfit", path=environment.get("PATH"))
    if on_path:
        return [on_path]
    raise RigError("backend_missing")


def _starter(path: str) -> list[str]:
    if os.path.basename(path).lower() in ("rigfit", "rigfit.exe"):
        return [path]
    return [path, "-m", "rigfit"]
