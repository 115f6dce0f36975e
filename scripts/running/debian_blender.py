# SPDX-License-Identifier: Apache-2.0
"""A real Blender executable for the tests: Debian 13's package, unpacked into a folder of the user's cache.

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

RELEASE = "trixie"
RECIPE = 1  # raise it when what is unpacked changes
PACKAGES = ("blender", "python3-numpy", "python3-pytest")
KEYRINGS = (
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    Path("/usr/share/keyrings/debian-archive-keyring.pgp"),
)
GIGABYTES = 1.9

_LAUNCHER = """#!/bin/sh
# Debian 13's Blender with its own loader and libraries.
here=$(dirname "$(readlink -f "$0")")/root/usr
export BLENDER_SYSTEM_RESOURCES="$here/share/blender" BLENDER_SYSTEM_PYTHON="$here"
lib="$here/lib/{triplet}"
exec "$lib/{loader}" --library-path "$lib:$here/lib:$lib/blas:$lib/lapack:$lib/openblas-pthread:$lib/pulseaudio" \\
    --argv0 "$here/bin/blender" "$here/bin/blender" "$@"
"""


class NotHere(Exception):
    """Why there is no such Blender on this machine: the reason for which the tier is skipped."""


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "rigfit" / f"debian-{RELEASE}-blender-{RECIPE}"


def blender(repository: Path) -> Path:
    """The path of the launcher; the first call downloads about 320 MB and unpacks 1.2 GB. NotHere with the reason."""
    folder = cache_folder()
    launcher = folder / "blender"
    if launcher.exists():
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
                _unpack(folder, mirror, keyring, repository / ".venv" / "logs" / "debian-blender.log")
    except CannotRun as error:
        raise NotHere(str(error)) from error
    return launcher


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
        if addresses and "main" in components and {codename, "stable", "testing", RELEASE} & set(suites)
    ]
    return next((address for address in suitable if re.search(r"debian(\.list)?$", address)), None)


def _unpack(folder: Path, mirror: str, keyring: Path, log: Path) -> None:
    started = time.monotonic()
    say(f"[blender] unpacking Debian 13's Blender into {folder} (once, about 320 MB to download)")
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
        (state / "sources.list").write_text(f"deb [signed-by={keyring}] {mirror} {RELEASE} main\n", encoding="utf-8")
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
        for command in ([*apt, "update"], [*apt, "-y", "--download-only", "install", *PACKAGES]):
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
        loader = next((root / "usr" / "lib").glob("*-linux-*/ld-linux*.so.*"), None)
        if loader is None:
            raise CannotRun("Debian's packages hold no dynamic loader where one is expected")
        launcher = work / "blender"
        launcher.write_text(_LAUNCHER.format(triplet=loader.parent.name, loader=loader.name), encoding="utf-8")
        launcher.chmod(0o755)
        proof = "import numpy, pytest; print('all', 'there')"
        code, output = ask(
            [str(launcher), "-b", "--factory-startup", "--python-exit-code", "3", "--python-expr", proof]
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
