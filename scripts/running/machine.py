# SPDX-License-Identifier: Apache-2.0
"""What the machine itself has to bring: shared libraries, the venv module, room on the disk."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from .children import CannotRun, ask, last_words, run_logged, say

# Shared library -> Debian package, for what the bpy wheels need and do not bring along. Found with `ldd` over every
# shared object of the wheels, and checked by starting from a bare Debian 12. The backend's wheels need nothing: of
# MediaPipe only the networks are loaded, not OpenCV with its window support.
BLENDER_LIBRARIES = {
    "libX11.so.6": "libx11-6",
    "libXfixes.so.3": "libxfixes3",
    "libXi.so.6": "libxi6",
    "libXrender.so.1": "libxrender1",
    "libxkbcommon.so.0": "libxkbcommon0",
    "libSM.so.6": "libsm6",
    "libICE.so.6": "libice6",
    "libGL.so.1": "libgl1",
}

# Program -> Debian package: a screen without a monitor, and a mouse and keyboard for it.
SCREEN_PROGRAMS = {"Xvfb": "xvfb", "xdotool": "xdotool"}


def missing_libraries(libraries: Iterable[str]) -> list[str]:
    """Those of the shared libraries that the loader of this Python does not find (Linux only, else none)."""
    if not sys.platform.startswith("linux"):
        return []
    program = (
        "import ctypes, sys\nfor name in sys.argv[1:]:\n    try: ctypes.CDLL(name)\n    except OSError: print(name)\n"
    )
    # In a process of its own: libraries loaded here would stay, and some start threads.
    _code, output = ask([sys.executable, "-I", "-S", "-c", program, *libraries])
    return [line for line in output.split() if line.startswith("lib")]


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def install_system_packages(packages: list[str], why: str, log: Path) -> None:
    """Install Debian packages, or name them in one sentence where that cannot be done from here."""
    if not packages:
        return
    names = " ".join(sorted(set(packages)))
    if shutil.which("apt-get") is None:
        raise CannotRun(f"{why}: install what your system calls the Debian packages {names}, then run this again.")
    if not _is_root():
        raise CannotRun(f"{why}: run `sudo apt-get update && sudo apt-get install {names}`, then run this again.")
    say(f"[system] installing Debian packages: {names}")
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "-q", "update"],
        ["apt-get", "-q", "-y", "--no-install-recommends", "install", *names.split()],
    ):
        code, lines = run_logged(command, log=log, label="system", environment=environment)
        if code != 0 and command[2] == "update":
            say(f"[system] apt-get update: {last_words(lines)}")  # a lame third-party source need not stop us
        elif code != 0:
            raise CannotRun(f"{why}, and apt-get could not install {names}: {last_words(lines)} (all of it: {log}).")


def require_libraries(libraries: dict[str, str], log: Path) -> None:
    """Make sure that the shared libraries are there; as root on Debian they are installed."""
    missing = missing_libraries(libraries)
    if not missing:
        return
    why = f"The shared librar{'y' if len(missing) == 1 else 'ies'} {', '.join(missing)} {_is_are(missing)} missing"
    install_system_packages([libraries[name] for name in missing], why, log)
    still = missing_libraries(missing)
    if still:
        raise CannotRun(f"{', '.join(still)} {_is_are(still)} still missing after the installation, see {log}.")


def require_programs(programs: dict[str, str], log: Path) -> None:
    """Make sure that the programs are on the PATH; as root on Debian they are installed."""
    missing = [name for name in programs if shutil.which(name) is None]
    if not missing:
        return
    why = f"{' and '.join(missing)} {_is_are(missing)} not installed"
    install_system_packages([programs[name] for name in missing], why, log)
    still = [name for name in missing if shutil.which(name) is None]
    if still:
        raise CannotRun(f"{', '.join(still)} {_is_are(still)} still missing after the installation, see {log}.")


def _is_are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def require_venv_module(log: Path) -> None:
    """Debian ships Python without ensurepip; as root it is installed."""
    if _has_venv():
        return
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    install_system_packages([package], "This Python cannot make virtual environments (no ensurepip)", log)
    if not _has_venv():
        raise CannotRun(f"{sys.executable} cannot make virtual environments: use a Python that has venv and ensurepip.")


def _has_venv() -> bool:
    return ask([sys.executable, "-I", "-c", "import ensurepip, venv"])[0] == 0


def require_disk(folder: Path, gigabytes: float, what: str) -> None:
    """Refuse before the download rather than in the middle of it."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK):
        raise CannotRun(f"{existing} is not writable: make it so, or put the checkout in a folder of your own.")
    free = shutil.disk_usage(existing).free / 1e9
    if free < gigabytes:
        raise CannotRun(
            f"Not enough disk space for {what}: about {gigabytes:.1f} GB are needed under {existing} and {free:.1f} GB "
            "are free; make room, or move the checkout to a larger disk."
        )
