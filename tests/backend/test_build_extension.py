# SPDX-License-Identifier: Apache-2.0
"""scripts/build_extension.py: the zip is whole, always the same, valid for Blender, and holds only what may run there."""

from __future__ import annotations

import ast
import io
import os
import shutil
import stat
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
import rigfit

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import build_extension  # noqa: E402
from build_extension import CannotBuild, build, find_tool  # noqa: E402

TOOL = find_tool(REPOSITORY)
pytestmark = pytest.mark.skipif(
    TOOL is None, reason="Blender's tool for extensions is not here (needs a bpy environment)"
)

# What comes with Blender's Python.
BLENDER = {"bpy", "bpy_extras", "bmesh", "mathutils", "gpu", "gpu_extras", "blf", "idprop", "addon_utils", "numpy"}
THREADS = {"threading", "_thread", "concurrent", "multiprocessing", "asyncio"}


def copy_of_sources(folder: Path) -> Path:
    """The part of the repository that the zip is made of, elsewhere."""
    copy = folder / "copy"
    copy.mkdir()
    for name in ("blender_manifest.toml", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy)
    for name in ("LICENSES", "backend/rigfit", "blender_addon"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A copy, so that the two builds of the first test see the same sources even while somebody edits them.
    return copy_of_sources(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, tmp_path_factory.mktemp("dist"), TOOL)


@pytest.fixture(scope="module")
def modules(built: Path) -> dict[str, ast.Module]:
    with zipfile.ZipFile(built) as archive:
        return {name: ast.parse(archive.read(name)) for name in archive.namelist() if name.endswith(".py")}


def test_the_same_sources_give_the_same_bytes_whatever_lies_about(built, source, tmp_path):
    other = tmp_path / "elsewhere"
    shutil.copytree(source, other)
    addon = other / "blender_addon"
    for path in addon.rglob("*.py"):
        path.chmod(0o755)
        os.utime(path, (time.time() - 1e6, time.time() - 1e6))
    for name in ("__pycache__/panels.cpython-311.pyc", "rig/.hidden.py", "rig/export.py~", "rig/export.py.orig"):
        stray = addon / name
        stray.parent.mkdir(exist_ok=True)
        stray.write_text("stray")
    (other / "backend" / "rigfit" / "__pycache__").mkdir()
    (other / "backend" / "rigfit" / "__pycache__" / "cli.cpython-311.pyc").write_text("stray")
    again = build(other, tmp_path / "dist", TOOL)
    assert again.read_bytes() == built.read_bytes()
    assert sorted(path.name for path in again.parent.iterdir()) == [built.name]  # nothing half made stays


def test_what_is_in_it(built, source):
    assert built.name == f"rigfit-{rigfit.__version__}.zip"
    with zipfile.ZipFile(built) as archive:
        assert archive.testzip() is None
        entries = archive.infolist()
        names = [entry.filename for entry in entries]
        manifest = tomllib.loads(archive.read("blender_manifest.toml").decode())
        wheel_name = f"backend/rigfit-{rigfit.__version__}-py3-none-any.whl"
        wheel = zipfile.ZipFile(io.BytesIO(archive.read(wheel_name)))
    assert names == sorted(set(names))
    assert manifest["id"] == "rigfit"
    assert manifest["version"] == rigfit.__version__
    assert {"__init__.py", "panels.py", "link/pump.py", "operators/fit_photo.py", "LICENSE"} <= set(names)
    assert {f"LICENSES/{path.name}" for path in (REPOSITORY / "LICENSES").iterdir()} <= set(names)
    here = {path.relative_to(source / "blender_addon") for path in (source / "blender_addon").rglob("*.py")}
    assert {Path(name) for name in names if name.endswith(".py")} == here
    assert not [name for name in names if {"tests", "__pycache__"} & set(name.split("/")) or "/." in name]
    for entry in entries:
        assert entry.date_time == (2020, 2, 2, 0, 0, 0)
        assert stat.S_IMODE(entry.external_attr >> 16) == 0o644
    inside = set(wheel.namelist())
    assert {"rigfit/cli.py", "rigfit/_blender_addon/worker.py", "rigfit/assets/astronaut.png"} <= inside
    info = f"rigfit-{rigfit.__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert f"\nVersion: {rigfit.__version__}\n" in metadata
    assert "\nRequires-Dist: mediapipe==0.10.21\n" in metadata
    assert f"{info}/licenses/LICENSES/GPL-3.0-or-later.txt" in inside
    assert not [name for name in inside if "__pycache__" in name or name.startswith("tests")]


def test_every_blender_at_hand_calls_it_valid(built):
    tools = {TOOL, *(REPOSITORY / ".venv").glob(f"bpy-*/lib/python*/site-packages/bpy/*/{build_extension.TOOL}")}
    for tool in tools:
        done = subprocess.run([sys.executable, "-I", str(tool), "validate", str(built)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def imports_of(module: ast.Module) -> list[tuple[str, int]]:
    """The absolute imports, with their lines."""
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append((node.module or "", node.lineno))
    return found


def test_only_what_blender_has_is_imported(modules):
    allowed = set(sys.stdlib_module_names) | BLENDER
    for name, module in modules.items():
        for one, line in imports_of(module):
            assert one.split(".")[0] in allowed, f"{name}:{line} imports {one}"


def test_relative_imports_lead_to_modules_that_are_there(modules):
    for name, module in modules.items():
        package = name.split("/")[:-1]
        for node in ast.walk(module):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            folder = package[: len(package) - node.level + 1]
            assert len(package) >= node.level - 1, f"{name}:{node.lineno} leads out of the add-on"
            target = "/".join([*folder, *(node.module or "").split(".")]).strip("/")
            beneath = [f"{target}.py", f"{target}/__init__.py".lstrip("/")]
            assert not target or any(one in modules for one in beneath), f"{name}:{node.lineno}: no {target}"


def test_no_search_path_is_changed_and_no_thread_started(modules):
    for name, module in modules.items():
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and node.attr == "path" and isinstance(node.value, ast.Name):
                assert node.value.id != "sys", f"{name}:{node.lineno} uses sys.path"
            if isinstance(node, ast.ImportFrom) and node.module == "sys":
                assert "path" not in [alias.name for alias in node.names], f"{name}:{node.lineno} imports sys.path"
        # worker.py runs without a window, in a process of its own; its reader thread never touches bpy.
        for one, line in imports_of(module) if name != "worker.py" else []:
            assert one.split(".")[0] not in THREADS, f"{name}:{line} uses threads"


def test_the_version_is_one(tmp_path):
    copy = copy_of_sources(tmp_path)
    replace_in(copy / "blender_manifest.toml", f'version = "{rigfit.__version__}"', 'version = "9.9.9"')
    with pytest.raises(CannotBuild, match=rf"9\.9\.9 and .* has {rigfit.__version__}: make them equal"):
        build(copy, tmp_path / "dist", TOOL)
    assert not (tmp_path / "dist").exists()


def test_what_blender_refuses_is_one_sentence_and_the_old_zip_stays(built, tmp_path):
    copy = copy_of_sources(tmp_path)
    replace_in(copy / "blender_manifest.toml", 'tagline = "', 'tagline = "A full stop is not allowed. Really. ')
    replace_in(copy / "blender_manifest.toml", "to a photo", "to a photo.")
    out = tmp_path / "dist"
    out.mkdir()
    shutil.copy(built, out)
    with pytest.raises(CannotBuild, match=r"^Blender's build of the extension failed: .*tagline"):
        build(copy, out, TOOL)
    assert [path.name for path in out.iterdir()] == [built.name]
    assert (out / built.name).read_bytes() == built.read_bytes()


def test_sources_that_make_no_wheel_are_one_sentence(tmp_path):
    copy = copy_of_sources(tmp_path)
    replace_in(copy / "pyproject.toml", 'name = "rigfit"', 'nome = "rigfit"')
    with pytest.raises(CannotBuild, match=r"^Building the backend's wheel failed: [^\n]+$"):
        build(copy, tmp_path / "dist", TOOL)
    assert list((tmp_path / "dist").iterdir()) == []


def test_refusals_on_the_command_line(tmp_path):
    script = [sys.executable, str(REPOSITORY / "scripts" / "build_extension.py")]
    (tmp_path / "file").touch()
    for arguments, words in (
        (["--out", str(tmp_path), "--tool", str(tmp_path / "none.py")], "none.py: name the right path with --tool"),
        (["--out", str(tmp_path / "file" / "dist"), "--tool", str(TOOL)], "choose another folder with --out"),
    ):
        done = subprocess.run([*script, *arguments], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2
        assert words in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_machine_without_blenders_tool_is_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copy = copy_of_sources(tmp_path)
    assert find_tool(copy) is None  # bpy is not installed where the backend is tested
    with pytest.raises(CannotBuild, match=r"is nowhere here: run `python3 scripts/run\.py extension`"):
        build(copy, tmp_path / "dist")
    place = tmp_path / "rigfit" / "debian-some" / "root" / "usr" / "share" / "blender" / build_extension.TOOL
    place.parent.mkdir(parents=True)
    place.touch()
    assert find_tool(copy) == place
