# SPDX-License-Identifier: Apache-2.0
"""Find a Blender: the bpy module or a `blender` executable, and the folder of the add-on that it is to run."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rigfit.errors import UserError

OLDEST = (4, 2)
VARIABLE = "RIGFIT_BLENDER"

# The Debian package of each shared library that Blender wants and a bare machine lacks.
DEBIAN_PACKAGES: dict[str, str] = {
    "libEGL.so.1": "libegl1",
    "libGL.so.1": "libgl1",
    "libICE.so.6": "libice6",
    "libSM.so.6": "libsm6",
    "libX11.so.6": "libx11-6",
    "libXfixes.so.3": "libxfixes3",
    "libXi.so.6": "libxi6",
    "libXrender.so.1": "libxrender1",
    "libXxf86vm.so.1": "libxxf86vm1",
    "libgomp.so.1": "libgomp1",
    "libxkbcommon.so.0": "libxkbcommon0",
}

_HINT = (
    "install it into this environment with `pip install 'rigfit[blender]'`, or name a Blender 4.2 or newer with "
    f"--blender PATH or the variable {VARIABLE}"
)


@dataclass(frozen=True)
class Blender:
    """A Blender that can be started as a child process.

    kind: "bpy" (path is a Python interpreter that has the bpy module) or "executable" (path is `blender` itself).
    version: as the program says it, for example "4.5.15"; empty if only starting it can tell (a bpy without metadata).
    """

    kind: Literal["bpy", "executable"]
    path: Path
    version: str


def locate(explicit: str | os.PathLike[str] | None = None, *, environment: Mapping[str, str] | None = None) -> Blender:
    """The Blender to use: `explicit`, else $RIGFIT_BLENDER, else bpy in this interpreter, else `blender` on PATH.

    explicit: a `blender` executable, the folder or .app that holds it, or a Python interpreter that has bpy.
    environment: os.environ by default. bpy is never imported here.
    UserError (kinds no_blender, blender_too_old, blender_cannot_start) when there is none that can be used; a Blender
    that was named and cannot be used is an error, never silently replaced by another one.
    """
    environment = os.environ if environment is None else environment
    if explicit is not None:
        return _examine(Path(explicit), "--blender")
    if environment.get(VARIABLE):
        return _examine(Path(environment[VARIABLE]), VARIABLE)
    if importlib.util.find_spec("bpy") is not None:
        return _checked(Blender("bpy", Path(sys.executable), _own_bpy_version()))
    on_path = shutil.which("blender", path=environment.get("PATH"))
    if on_path is not None:
        return _examine(Path(on_path), "PATH")
    raise UserError(f"There is no Blender: {_HINT}.", kind="no_blender")


def addon_folder() -> Path:
    """The folder of the add-on: of the source checkout, or the copy inside the installed package.

    UserError (kind no_addon) if neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parents[1] / "blender_addon", package / "_blender_addon"):
        if (folder / "worker.py").is_file():
            return folder
    raise UserError("The Blender part of rigfit is missing: install the package again.", kind="no_addon")


def missing_library_message(text: str) -> str | None:
    """One sentence for a loader's complaint about a shared library in `text`, or None if there is none in it."""
    found = re.findall(r"(lib[\w+.-]+?\.so(?:\.\d+)*)[^\n]*(?:cannot open shared object|not found)", text)
    if not found:
        return None
    names = list(dict.fromkeys(found))
    # One missing library is rarely alone, and the loader names only the first: give the whole list once.
    packages = sorted(
        {*DEBIAN_PACKAGES.values(), *(DEBIAN_PACKAGES[name] for name in names if name in DEBIAN_PACKAGES)}
    )
    unknown = [name for name in names if name not in DEBIAN_PACKAGES]
    also = f" and the package that holds {', '.join(unknown)}" if unknown else ""
    return (
        f"Blender cannot start because the system library {', '.join(names)} is missing: "
        f"on Debian or Ubuntu run `sudo apt install {' '.join(packages)}`{also}."
    )


def _own_bpy_version() -> str:
    try:
        return importlib.metadata.version("bpy")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _examine(path: Path, origin: str) -> Blender:
    # Symbolic links stay: the python of a virtual environment is one, and would lose its packages if resolved.
    path = Path(os.path.abspath(path.expanduser()))
    if path.is_dir():
        inside = [path / "Contents" / "MacOS" / "Blender", path / "blender", path / "blender.exe"]
        path = next((candidate for candidate in inside if candidate.is_file()), path)
    if not path.is_file():
        raise UserError(f"There is no Blender at {path} (from {origin}): {_HINT}.", kind="no_blender")
    try:
        process = _ask([path, "--version"])
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else "no answer to --version in 60 s"
        raise UserError(f"{path} (from {origin}) cannot be started ({reason}): {_HINT}.", kind="no_blender") from None
    output = process.stdout + process.stderr
    if library := missing_library_message(output):
        raise UserError(library, kind="blender_cannot_start")
    if match := re.search(r"^Blender (\d+\.\d+[.\d]*)", output, re.MULTILINE):
        return _checked(Blender("executable", path, match[1]))
    if re.match(r"Python \d", output):
        return _checked(Blender("bpy", path, _bpy_version_of(path, origin)))
    raise UserError(f"{path} (from {origin}) is neither Blender nor a Python with bpy: {_HINT}.", kind="no_blender")


def _bpy_version_of(interpreter: Path, origin: str) -> str:
    question = (
        "import importlib.util as u, importlib.metadata as m, sys\n"
        "if u.find_spec('bpy') is None: sys.exit(3)\n"
        "try: print(m.version('bpy'))\n"
        "except m.PackageNotFoundError: print()"
    )
    process = _ask([interpreter, "-P", "-c", question], child_environment(interpreter))
    if process.returncode:
        raise UserError(f"The Python {interpreter} (from {origin}) has no bpy module: {_HINT}.", kind="no_blender")
    return process.stdout.strip()


# The questions that wait for an answer.
_asked: set[subprocess.Popen[str]] = set()


def _ask(command: list[str | Path], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program that answers at once; one that does not within 60 s is ended (subprocess.TimeoutExpired)."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        # Its own group, so that all of it can be ended: a `blender` may be a shell script.
        start_new_session=True,
    ) as process:
        _asked.add(process)
        try:
            out, err = process.communicate(timeout=60)
        except BaseException:
            kill_group(process)
            raise
        finally:
            _asked.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def stop_asking() -> None:
    """End what `locate` waits for, from any thread; it fails then."""
    for process in list(_asked):
        if process.poll() is None:
            kill_group(process)


def kill_group(process: subprocess.Popen[Any]) -> None:
    """End a child that was started with `start_new_session`, and its own children, at once."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def child_environment(interpreter: Path) -> dict[str, str]:
    """Environment of a child: ours, but PYTHONPATH and PYTHONHOME only for this very interpreter."""
    environment = dict(os.environ)
    if os.path.abspath(interpreter) != os.path.abspath(sys.executable):
        # Packages made for this Python (numpy above all) would break another one.
        environment.pop("PYTHONPATH", None)
        environment.pop("PYTHONHOME", None)
    environment["PYTHONUTF8"] = "1"
    return environment


def check_version(version: str, path: Path) -> None:
    """UserError (kind blender_too_old) if `version` is older than 4.2; an empty one passes."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers and numbers < OLDEST:
        raise UserError(f"Blender {version} at {path} is too old, 4.2 is the oldest: {_HINT}.", kind="blender_too_old")


def _checked(blender: Blender) -> Blender:
    check_version(blender.version, blender.path)
    return blender
