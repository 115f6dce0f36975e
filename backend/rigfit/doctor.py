# SPDX-License-Identifier: Apache-2.0
"""``rigfit doctor``: what this machine has of what rigfit needs, with a fix for every thing that fails."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rigfit.bench.report import describe_machine
from rigfit.blender.locate import locate
from rigfit.blender.worker import BlenderWorker
from rigfit.errors import UserError

Status = Literal["ok", "warning", "failed"]

PYTHON_FROM, PYTHON_BELOW = (3, 11), (3, 13)
DISK_WARN_GB, DISK_FAIL_GB = 2.0, 0.2


@dataclass(frozen=True)
class Check:
    """One line of the report: what was looked at, how it is, what was found, and what to do if it is not ok."""

    name: str
    status: Status
    found: str
    fix: str | None = None


def run(
    *,
    json_form: bool = False,
    blender: str | os.PathLike[str] | None = None,
    folder: Path | None = None,
    console: Console | None = None,
) -> int:
    """Check, print (a table, or JSON) and return the exit code: 1 if a check failed, warnings do not count."""
    checks = run_checks(blender=blender, folder=folder)
    if json_form:
        print(to_json(checks))
    else:
        show(checks, console or Console())
    return int(any(check.status == "failed" for check in checks))


def run_checks(
    *,
    blender: str | os.PathLike[str] | None = None,
    folder: Path | None = None,
    open_blender: Callable[[str | os.PathLike[str] | None], AbstractContextManager[BlenderWorker]] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Check]:
    """All checks, in the order in which they are shown. A check that breaks is a failed check, never an exception.

    blender: as for `rigfit.blender.locate.locate`. folder: where results will be written (default: the current one).
    open_blender: finds and starts the Blender that `blender` names. progress: called before each check.
    """
    open_blender = open_blender or (lambda named: BlenderWorker(locate(named)))
    folder = folder or Path.cwd()
    steps: list[tuple[str, Callable[[], Iterable[Check]]]] = [
        ("Python", _python),
        ("packages", _packages),
        ("face detector", _face_detector),
        ("Blender", lambda: _blender(open_blender(blender))),
        ("head assets", _head_assets),
        ("disk", lambda: _disk({folder, Path(tempfile.gettempdir())})),
        ("machine", _machine),
    ]
    checks: list[Check] = []
    for done, (name, step) in enumerate(steps):
        if progress:
            progress(done, len(steps), f"checking {name}")
        try:
            checks.extend(step())
        except UserError as error:
            checks.append(Check(name, "failed", "not usable", error.message))
        except Exception as error:  # a broken installation breaks in ways nobody foresaw: say it and go on
            told = f"{type(error).__name__}: {error}"
            checks.append(Check(name, "failed", told, "install rigfit again into a new environment; see README.md"))
    return checks


def to_json(checks: Iterable[Check]) -> str:
    """A list of objects with ``name``, ``status``, ``found``, ``fix``."""
    return json.dumps([dataclasses.asdict(check) for check in checks], indent=1, ensure_ascii=False)


def show(checks: Iterable[Check], console: Console) -> None:
    """One row a check; below, the fix of every check that is not ok."""
    checks = list(checks)
    table = Table(title="rigfit doctor", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found", overflow="fold")
    marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "failed": "[bold red]FAILED[/]"}
    for check in checks:
        table.add_row(escape(check.name), marks[check.status], escape(check.found))
    console.print(table)
    for check in checks:
        if check.fix:
            console.print(f"{escape(check.name)}: {escape(check.fix)}", soft_wrap=True)


def _python() -> Iterable[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    found = f"{version} ({sys.executable})"
    if PYTHON_FROM <= sys.version_info[:2] < PYTHON_BELOW:
        yield Check("Python", "ok", found)
    else:
        yield Check("Python", "failed", found, "use Python 3.11 or 3.12: mediapipe 0.10.21 has no wheel for others")


def declared_requirements() -> list[Requirement]:
    """What rigfit requires, extras left out: from the installed package, else from the checkout's pyproject.toml.

    UserError (kind ``not_installed``) when neither is there.
    """
    try:
        lines = importlib.metadata.requires("rigfit") or []
    except importlib.metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parents[2] / "pyproject.toml"
        if not project.is_file():
            raise UserError("rigfit is not installed: run `pip install rigfit`.", kind="not_installed") from None
        lines = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    requirements = [Requirement(line) for line in lines]
    return [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]


def _packages() -> Iterable[Check]:
    for requirement in declared_requirements():
        yield check_package(requirement)


def check_package(requirement: Requirement) -> Check:
    """Whether a package is installed in a version that fits."""
    name = canonicalize_name(requirement.name)
    fix = f"run `{sys.executable} -m pip install '{requirement.name}{requirement.specifier}'`"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "failed", f"not installed, {requirement.specifier or 'any version'} is needed", fix)
    if not requirement.specifier.contains(version, prereleases=True):
        return Check(name, "failed", f"{version}, {requirement.specifier} is needed", fix)
    return Check(name, "ok", version)


def _face_detector() -> Iterable[Check]:
    """Load the models that come inside the mediapipe wheel and run them once."""
    import numpy as np

    from rigfit.photo.mediapipe_nets import BoxDetector, MeshNetwork

    grey = np.full((192, 192, 3), 127, np.uint8)
    loaded: list[str] = []
    for kind in ("full_range", "short_range"):
        if BoxDetector(kind).detect(grey):
            yield Check("face detector", "warning", f"{kind} finds a face in a grey picture", "reinstall mediapipe")
        loaded.append(kind)
    points, _presence = MeshNetwork().run(grey)
    if points.shape != (478, 3) or not np.isfinite(points).all():
        yield Check("face detector", "failed", f"the mesh network returns {points.shape}", "reinstall mediapipe")
        return
    yield Check("face detector", "ok", f"{', '.join(loaded)} and the mesh of 478 points load and run")


def _blender(opening: AbstractContextManager[BlenderWorker]) -> Iterable[Check]:
    with opening as worker:
        answer = worker.call("ping")
        blender = worker.blender
    assert blender is not None
    what = "bpy in" if blender.kind == "bpy" else "executable"
    yield Check("Blender", "ok", f"{answer['blender_version']} ({what} {blender.path}), answers")


def _head_assets() -> Iterable[Check]:
    from rigfit.rig.default_head import locate_assets

    yield Check("head assets", "ok", f"MakeHuman's base mesh and targets in {locate_assets()}")


def _disk(folders: Iterable[Path]) -> Iterable[Check]:
    for folder in sorted(folders):
        yield check_disk(folder)


def check_disk(folder: Path) -> Check:
    """Whether a folder can be written and has room."""
    name = f"disk {folder}"
    if not folder.is_dir():
        return Check(name, "failed", "there is no such folder", f"make the folder {folder} or use another one")
    if not os.access(folder, os.W_OK):
        return Check(name, "failed", "not writable", f"make {folder} writable or use another folder")
    free = shutil.disk_usage(folder).free / 1e9
    fix = f"make room: a fit needs little, an onboarding several GB under {folder}"
    if free < DISK_FAIL_GB:
        return Check(name, "failed", f"{free:.2f} GB free", fix)
    if free < DISK_WARN_GB:
        return Check(name, "warning", f"{free:.2f} GB free", fix)
    return Check(name, "ok", f"{free:.0f} GB free")


def _machine() -> Iterable[Check]:
    machine = describe_machine()
    memory = "unknown memory" if machine["memory_gib"] is None else f"{machine['memory_gib']} GiB memory"
    cores = machine["cores"]
    found = f"{cores} core{'s' if cores != 1 else ''} ({machine['processor']}), {memory}"
    yield Check("processor", "ok", found)
    yield Check("GPU", "ok", machine["gpu"] or "none: everything runs on the processor")
