#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build the zip that an artist installs in Blender: ``python scripts/build_extension.py [--out dist]``.

The manifest lies at the root of the repository and the code in ``blender_addon/``, and Blender wants both in one folder:
they are staged there, with the licences and the backend's wheel (``backend/rigfit-VERSION-py3-none-any.whl``, which the
add-on's button installs into an environment of its own). Blender's own tool builds and validates; it is a plain Python
script, so no Blender runs. The same sources and tools give the same bytes. ``scripts/run.py extension`` installs what is
needed and then does this.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TOOL = "scripts/addons_core/bl_pkg/cli/blender_ext.py"
LIMIT_S = 120.0
# hatchling's own default: 2 February 2020. Zip files cannot say anything before 1980.
EPOCH = 1580601600
ZIP_BEGINS = (1980, 1, 1, 0, 0, 0)


class CannotBuild(Exception):
    """One sentence with what to do. Exit code 2."""


def find_tool(repository: Path) -> Path | None:
    """Blender's ``blender_ext.py``: of this Python's bpy, of a bpy environment under .venv/, of an unpacked Blender."""
    places: list[Path] = []
    own = importlib.util.find_spec("bpy")  # found, not imported
    if own is not None and own.origin:
        places += Path(own.origin).parent.glob(f"*/{TOOL}")
    environments = repository / ".venv"
    found = [*environments.glob(f"bpy-*/lib/python*/site-packages/bpy/*/{TOOL}")]
    found += environments.glob(f"bpy-*/Lib/site-packages/bpy/*/{TOOL}")  # Windows
    places += sorted(found, reverse=True)  # the newest Blender first
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rigfit"
    places += sorted(cache.glob(f"*/root/usr/share/blender/{TOOL}"), reverse=True)
    return next((path for path in places if path.is_file()), None)


def version_of(repository: Path) -> str:
    """The one version: of the manifest and of the backend, which must be equal."""
    manifest = tomllib.loads((repository / "blender_manifest.toml").read_text(encoding="utf-8"))["version"]
    source = (repository / "backend" / "rigfit" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE)
    backend = found[1] if found else "none"
    if manifest != backend:
        raise CannotBuild(
            f"blender_manifest.toml has the version {manifest} and backend/rigfit/__init__.py has {backend}: make them equal."
        )
    return manifest


def sources(folder: Path) -> Iterator[Path]:
    """The files of a package, sorted: without byte code, hidden files and what editors leave behind."""
    for path in sorted(folder.rglob("*")):
        names = path.relative_to(folder).parts
        if any(name.startswith(".") or name == "__pycache__" for name in names):
            continue
        if path.is_file() and path.suffix not in (".pyc", ".pyo", ".orig", ".rej", ".swp") and path.name[-1] != "~":
            yield path


def _copy_package(folder: Path, to: Path) -> None:
    for path in sources(folder):
        target = to / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)  # without its mode and time
        target.chmod(0o644)


def _run(command: Sequence[str], cwd: Path, what: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment.setdefault("SOURCE_DATE_EPOCH", str(EPOCH))
    try:
        done = subprocess.run(
            list(command),
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{what} failed: {error}.") from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()] or ["no output"]
        told = [line for line in lines if re.search(r"error|fail|invalid|cannot", line, re.IGNORECASE)]
        raise CannotBuild(f"{what} failed: {(told or lines)[-1]}")
    return done.stdout


def python_with_hatchling(repository: Path) -> Path:
    """The interpreter that builds the wheel: this one, or that of the backend's environment."""
    inside = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    for python in (Path(sys.executable), (repository / ".venv" / "backend").joinpath(*inside)):
        if (
            python.exists()
            and subprocess.run([str(python), "-I", "-c", "import hatchling"], capture_output=True).returncode == 0
        ):
            return python
    raise CannotBuild(
        "The backend's wheel is built with hatchling, which is not installed: `pip install hatchling`, or run "
        "`python3 scripts/run.py extension`, which sets up everything."
    )


def build_wheel(repository: Path, python: Path, work: Path) -> Path:
    """The wheel of a copy of the sources, so that nothing of the working folder gets in, and without a network."""
    source = work / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(repository / name, source / name)
    for name in ("LICENSES", "backend/rigfit", "blender_addon"):
        _copy_package(repository / name, source / name)
    wheels = work / "wheels"
    command = [str(python), "-I", "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
    _run(command, source, "Building the backend's wheel")
    return next(wheels.glob("*.whl"))


def stage(repository: Path, wheel: Path, folder: Path) -> None:
    """Lay out the extension as Blender wants it: the manifest beside ``__init__.py``."""
    _copy_package(repository / "blender_addon", folder)
    for name in ("blender_manifest.toml", "LICENSE"):
        shutil.copyfile(repository / name, folder / name)
    _copy_package(repository / "LICENSES", folder / "LICENSES")
    (folder / "backend").mkdir(exist_ok=True)
    shutil.copyfile(wheel, folder / "backend" / wheel.name)


def pack_again(built: Path, to: Path) -> None:
    """The same entries sorted, with fixed times and modes: Blender's tool writes them as the folder is today."""
    moment = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", EPOCH)))[:6]
    with zipfile.ZipFile(built) as source, zipfile.ZipFile(to, "w") as target:
        for name in sorted(item.filename for item in source.infolist() if not item.is_dir()):
            entry = zipfile.ZipInfo(name, max(moment, ZIP_BEGINS))
            entry.create_system = 3  # Unix, whatever builds it: the mode below is read so
            entry.external_attr = 0o100644 << 16
            entry.compress_type = zipfile.ZIP_STORED if name.endswith(".whl") else zipfile.ZIP_DEFLATED
            target.writestr(entry, source.read(name))


def build(repository: Path, out: Path, tool: Path | None = None) -> Path:
    """Build and validate ``out/rigfit-VERSION.zip`` and return its path. CannotBuild; then nothing is written."""
    version = version_of(repository)
    tool = tool or find_tool(repository)
    if tool is None or not tool.is_file():
        raise CannotBuild(
            f"Blender's tool for extensions (blender_ext.py) is not at {tool}: name the right path with --tool."
            if tool
            else "Blender's tool for extensions (blender_ext.py) is nowhere here: run `python3 scripts/run.py extension`, "
            "which installs it, or name it with --tool (it lies in Blender under scripts/addons_core/bl_pkg/cli)."
        )
    python = python_with_hatchling(repository)
    # The tools below work in folders of their own.
    out = out.resolve()
    final = out / f"rigfit-{version}.zip"
    try:
        out.mkdir(parents=True, exist_ok=True)
        # In the folder of the result, so that the last step is a rename.
        with tempfile.TemporaryDirectory(prefix=".rigfit-extension-", dir=out) as name:
            work = Path(name)
            wheel = build_wheel(repository, python, work)
            if wheel.name != f"rigfit-{version}-py3-none-any.whl":
                raise CannotBuild(
                    f"The wheel came out as {wheel.name} and the version is {version}: clear the difference."
                )
            staged, built, packed = work / "staged", work / "built.zip", work / final.name
            staged.mkdir()
            stage(repository, wheel, staged)
            plain = [sys.executable, "-I", str(tool)]
            command = [*plain, "build", "--source-dir", str(staged), "--output-filepath", str(built)]
            _run(command, work, "Blender's build of the extension")
            pack_again(built, packed)
            _run([*plain, "validate", str(packed)], work, "Blender's validation of the extension")
            with packed.open("rb") as file:
                os.fsync(file.fileno())
            packed.replace(final)
    except OSError as error:
        where = error.filename or out
        raise CannotBuild(
            f"{where}: {error.strerror or error}; make room or choose another folder with --out."
        ) from None
    return final


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the zip that an artist installs in Blender.")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "dist", help="folder of the zip (default: dist/)")
    parser.add_argument("--tool", type=Path, help="Blender's blender_ext.py (default: looked for)")
    options = parser.parse_args(arguments)
    try:
        path = build(REPOSITORY, options.out, options.tool)
    except CannotBuild as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
