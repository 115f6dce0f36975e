# SPDX-License-Identifier: Apache-2.0
"""A real Blender executable for the tests: Debian's package, unpacked into a folder of the user's cache.

Debian 13 ("trixie") has Blender 4.3; another suite ("sid", "testing") has a newer one.

No root, no chroot: apt-get works on a private state folder, `dpkg-deb` unpacks, and a small script starts Blender
through the folder's own loader and libraries, so that it runs on an older or other Debian as well.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import machine
from .children import CannotRun, ask, last_words, run_logged, say
from .environments import locked

SUITE = "trixie"
RECIPE = 1  # raise it when what is unpacked changes
PACKAGES = ("blender", "python3-numpy", "python3-pytest")
# What newer packages of Blender no longer require: the OpenGL that goes with their loader, and a module of Python.
OTHER_SUITES = ("libgl1", "libglx-mesa0", "libegl1", "libegl-mesa0", "libgl1-mesa-dri", "python3-cattr")
KEYRINGS = (
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    Path("/usr/share/keyrings/debian-archive-keyring.pgp"),
)
GIGABYTES = 1.9

_LIBRARIES = "$lib:$here/lib:$lib/blas:$lib/lapack:$lib/openblas-pthread:$lib/pulseaudio"
_LAUNCHER = """#!/bin/sh
# Debian's Blender with its own loader and libraries.
self=$(readlink -f "$0")
here=$(dirname "$self")/root/usr
lib="$here/lib/{triplet}"
export BLENDER_SYSTEM_RESOURCES="$here/share/blender" BLENDER_SYSTEM_PYTHON="$here"
# What Blender takes for its own program is the loader; rigfit starts another Blender by this name.
export RIGFIT_BLENDER="$self"
export LIBGL_DRIVERS_PATH="$lib/dri"
exec "$lib/{loader}" --library-path "{libraries}" \\
    --argv0 "$here/bin/blender" "$here/bin/blender" "$@"
"""
# Blender installs extensions in a process of its Python, which needs the same loader.
_PYTHON = """#!/bin/sh
here=$(dirname "$(dirname "$(readlink -f "$0")")")
lib="$here/lib/{triplet}"
exec "$lib/{loader}" --library-path "{libraries}" \\
    --argv0 "$here/bin/{name}" "$here/bin/{name}.program" "$@"
"""


class NotHere(Exception):
    """Why there is no such Blender on this machine: the reason for which the tier is skipped."""


def cache_folder(suite: str = SUITE) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "rigfit" / f"debian-{suite}-blender-{RECIPE}"


def blender(repository: Path, suite: str = SUITE) -> Path:
    """The path of the launcher; the first call downloads about 320 MB and unpacks 1.2 GB. NotHere with the reason."""
    if not re.fullmatch(r"[a-z][a-z0-9-]*", suite):
        raise CannotRun(f"{suite!r} is no name of a Debian suite: use trixie, testing or sid.")
    folder = cache_folder(suite)
    launcher = folder / "blender"
    if launcher.exists():
        with locked(folder, "blender"):
            _write_launchers(folder)
        return launcher
    if not sys.platform.startswith("linux") or not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise NotHere("Debian's Blender can only be unpacked where apt-get and dpkg-deb are")
    keyring = next((path for path in KEYRINGS if path.exists()), None)
    if keyring is None:
        raise NotHere("Debian's archive keyring is not installed (package debian-archive-keyring)")
    mirror = debian_mirror(apt_sources(Path("/etc/apt")), _os_release().get("VERSION_CODENAME", ""))
    if mirror is None:
        raise NotHere("no Debian mirror is configured in /etc/apt")
    try:
        with locked(folder, "blender"):
            if not launcher.exists():
                machine.require_disk(folder, GIGABYTES, "Debian's Blender")
                log = repository / ".venv" / "logs" / f"debian-blender-{suite}.log"
                _unpack(folder, suite, mirror, keyring, log)
    except CannotRun as error:
        raise NotHere(str(error)) from error
    return launcher


def _write_launchers(folder: Path) -> None:
    """The script that starts Blender, and one in the place of its Python; only what is not there yet is written.

    An older rigfit's are replaced so: nothing is downloaded for that.
    """
    root = folder / "root" / "usr"
    loader = next((root / "lib").glob("*-linux-*/ld-linux*.so.*"), None)
    if loader is None:
        raise CannotRun("Debian's packages hold no dynamic loader where one is expected")
    facts = {"triplet": loader.parent.name, "loader": loader.name, "libraries": _LIBRARIES}
    for program in (root / "bin").glob("python3.*"):
        if re.fullmatch(r"python3\.\d+", program.name):
            if program.read_bytes()[:4] == b"\x7fELF":
                program.rename(program.with_name(f"{program.name}.program"))
            _write_script(program, _PYTHON.format(name=program.name, **facts))
    _write_script(folder / "blender", _LAUNCHER.format(**facts))  # last: its being there says that all is


def _write_script(path: Path, text: str) -> None:
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.chmod(0o755)
    partial.replace(path)


def _os_release() -> dict[str, str]:
    try:
        text = Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return {}
    return {name: value.strip('"') for name, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)}


def apt_sources(folder: Path) -> Iterator[tuple[list[str], list[str], list[str]]]:
    """(addresses, suites, components) of every binary source in apt's configuration, one-line and deb822 files."""
    for path in (folder / "sources.list", *sorted((folder / "sources.list.d").glob("*.list"))):
        for line in _text(path).splitlines():
            found = re.match(r"\s*deb\s+(?:\[[^\]]*\]\s*)?(\S+)\s+(\S+)\s+([^#]+)", line)
            if found:
                yield [found[1]], [found[2]], found[3].split()
    for path in sorted((folder / "sources.list.d").glob("*.sources")):
        lines = [line for line in _text(path).splitlines() if not line.startswith("#")]
        for stanza in re.split(r"\n\s*\n", "\n".join(lines)):
            fields: dict[str, str] = {}
            for name, value in re.findall(r"^([\w-]+):((?:.*(?:\n[ \t]+\S.*)*))", stanza, re.MULTILINE):
                fields[name.lower()] = value
            if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes").strip().lower() != "no":
                yield (
                    fields.get("uris", "").split(),
                    fields.get("suites", "").split(),
                    fields.get("components", "").split(),
                )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def debian_mirror(sources: Iterable[tuple[list[str], list[str], list[str]]], codename: str) -> str | None:
    """The address from which this machine gets Debian itself: a source of the running release's `main`.

    Other vendors use Debian's suite names too, so an address that ends in "debian", as mirrors do, goes first.
    """
    suitable = [
        addresses[0].rstrip("/")
        for addresses, suites, components in sources
        if addresses and "main" in components and {codename, "stable", "testing", SUITE} & set(suites)
    ]
    return next((address for address in suitable if re.search(r"debian(\.list)?$", address)), None)


def _unpack(folder: Path, suite: str, mirror: str, keyring: Path, log: Path) -> None:
    started = time.monotonic()
    say(f"[blender] unpacking the Blender of Debian {suite} into {folder} (once, about 320 MB to download)")
    log.unlink(missing_ok=True)
    for leftover in folder.parent.glob(f"{folder.name}.partial-*"):  # of an interrupted run; we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        work.chmod(0o755)
        state = work / "apt"
        for part in ("state/lists/partial", "cache/archives/partial"):
            (state / part).mkdir(parents=True)
        (state / "status").touch()
        (state / "sources.list").write_text(f"deb [signed-by={keyring}] {mirror} {suite} main\n", encoding="utf-8")
        settings = {
            "Dir::State": state / "state",
            "Dir::State::status": state / "status",
            "Dir::Cache": state / "cache",
            "Dir::Etc::SourceList": state / "sources.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::Etc::Preferences": "/dev/null",
            "Dir::Etc::PreferencesParts": "/dev/null",
            "APT::Sandbox::User": "root",
            "APT::Install-Recommends": "false",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
        }
        apt = ["apt-get", "-q", *(part for item in settings.items() for part in ("-o", f"{item[0]}={item[1]}"))]
        packages = PACKAGES if suite == SUITE else (*PACKAGES, *OTHER_SUITES)
        for command in ([*apt, "update"], [*apt, "-y", "--download-only", "install", *packages]):
            code, lines = run_logged(command, log=log, label="blender", on_line=_progress_of_apt)
            trouble = [line for line in lines if line.startswith(("E:", "Err:"))]
            if code != 0 or (command[-1] == "update" and trouble):
                raise CannotRun(f"Debian's Blender could not be downloaded: {last_words(trouble or lines)}")
        archives = sorted((state / "cache" / "archives").glob("*.deb"))
        say(f"[blender] unpacking {len(archives)} packages")
        root = work / "root"
        for archive in archives:
            code, lines = run_logged(["dpkg-deb", "-x", str(archive), str(root)], log=log, label="blender")
            if code != 0:
                raise CannotRun(f"{archive.name} could not be unpacked: {last_words(lines)}")
        shutil.rmtree(state)
        _write_launchers(work)
        proof = "import numpy, pytest; print('all', 'there')"
        code, output = ask(
            [str(work / "blender"), "-b", "--factory-startup", "--python-exit-code", "3", "--python-expr", proof]
        )
        if code != 0 or "all there" not in output:
            raise CannotRun(f"Debian's Blender does not start here: {last_words(output.splitlines())}")
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"[blender] ready after {time.monotonic() - started:.0f} s")


def _progress_of_apt(line: str) -> str | None:
    found = re.match(r"Need to get (.*) of archives", line)
    return f"downloading {found[1]}" if found else None
