# SPDX-License-Identifier: Apache-2.0
"""Finding the backend and installing it: a real virtual environment from a tiny wheel, and what can go wrong."""

from __future__ import annotations

import os
import sys
import time
import zipfile
from pathlib import Path

import pytest

from blender_addon.backend import install, locate
from blender_addon.backend.install import Plan, candidate_pythons, install_steps
from blender_addon.messages import RigError


@pytest.fixture(autouse=True)
def own_data_folder(tmp_path, monkeypatch):
    for name in ("XDG_DATA_HOME", "LOCALAPPDATA", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "data"))
    monkeypatch.delenv(locate.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


def tiny_wheel(folder: Path, *, broken: bool = False) -> str:
    """A wheel named rigfit with the one function that the installation tries."""
    path = folder / "rigfit-9.9-py3-none-any.whl"
    files = {
        "rigfit/__init__.py": "",
        "rigfit/photo/__init__.py": "",
        "rigfit/photo/mediapipe_nets.py": "raise OSError('broken')" if broken else "class MeshNetwork: pass",
        "rigfit-9.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: rigfit\nVersion: 9.9\n",
        "rigfit-9.9.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr("rigfit-9.9.dist-info/RECORD", "".join(f"{name},,\n" for name in files))
    return str(path)


def run(plan: Plan) -> tuple[str, list[tuple[int, int, str]]]:
    steps, told = install_steps(plan), []
    while True:
        try:
            told.append(next(steps))
        except StopIteration as end:
            return end.value, told
        time.sleep(0.02)


def plan(tmp_path: Path, **changes) -> Plan:
    given = {
        "wheel": tiny_wheel(tmp_path, broken=changes.pop("broken", False)),
        "pythons": (sys.executable,), "version": "9.9", "log": str(tmp_path / "logs" / "install.log"),
    }  # fmt: skip
    return Plan(**(given | changes))


def test_install_makes_an_environment_that_is_then_found(tmp_path, monkeypatch):
    # The default head's assets come from a package index; here nothing is fetched.
    monkeypatch.setattr(install, "ASSETS", tiny_wheel(tmp_path))
    assert not locate.is_installed("9.9")
    python, told = run(plan(tmp_path))
    assert locate.is_installed("9.9")
    assert locate.command("", "9.9") == [python, "-m", "rigfit"]
    assert not locate.is_installed("9.8"), "another version of the add-on has its own"
    done = [step[0] for step in told]
    assert done == sorted(done)
    assert all(total == 20 for _, total, _ in told)
    assert "Successfully installed rigfit" in (tmp_path / "logs" / "install.log").read_text()
    old = Path(locate.installed_folder("9.8"))
    old.mkdir()
    install.remove_older("9.9")
    assert not old.exists()
    assert locate.is_installed("9.9")


def test_a_failed_installation_is_explained_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "ASSETS", tiny_wheel(tmp_path))
    with pytest.raises(RigError) as caught:
        run(plan(tmp_path, broken=True))
    assert caught.value.kind == "install_failed"
    assert "broken" in caught.value.message
    assert not os.path.exists(locate.installed_folder("9.9"))


def test_cancel_ends_pip_and_removes_the_half(tmp_path):
    steps = install_steps(plan(tmp_path))
    for step in steps:
        if step[2].startswith("Making") and os.path.exists(locate.installed_folder("9.9")):
            break
        time.sleep(0.01)
    steps.close()
    assert not os.path.exists(locate.installed_folder("9.9"))


def test_pythons_that_do_not_fit_are_passed_over(tmp_path):
    with pytest.raises(RigError) as caught:
        run(plan(tmp_path, pythons=(str(tmp_path / "none"), "/bin/false", "/bin/true")))
    assert caught.value.kind == "no_python"


def test_lost_network_and_full_disk_are_told_apart():
    log = "x.log"
    lost = [
        "WARNING: Retrying after NewConnectionError: Failed to establish a new connection: [Errno 101]",
        "ERROR: No",
    ]
    assert install._explain(lost, log).kind == "no_network"
    assert install._explain(["OSError: [Errno 28] No space left on device"], log).kind == "disk_full"
    told = install._explain(["ERROR: Could not build wheels for x", "note: more"], log)
    assert told.kind == "install_failed"
    assert "Could not build" in told.message


def test_small_disk_is_refused_before_anything(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "NEEDED_GB", 1e9)
    with pytest.raises(RigError) as caught:
        run(plan(tmp_path))
    assert caught.value.kind == "disk_full"


def test_where_the_backend_is(tmp_path, monkeypatch):
    with pytest.raises(RigError) as caught:
        locate.command("", "1")
    assert caught.value.kind == "backend_missing"
    with pytest.raises(RigError) as caught:
        locate.command(str(tmp_path / "no"), "1")
    assert caught.value.kind == "backend_not_there"
    folder = tmp_path / "env"
    python = Path(locate.python_in(str(folder)))
    python.parent.mkdir(parents=True)
    python.touch()
    assert locate.command(str(folder), "1") == [str(python), "-m", "rigfit"]
    monkeypatch.setenv(locate.VARIABLE, str(python))
    assert locate.command("", "1") == [str(python), "-m", "rigfit"]
    program = tmp_path / "bin" / "rigfit"
    program.parent.mkdir()
    program.touch()
    program.chmod(0o755)
    assert locate.command(str(program), "1") == [str(program)]
    monkeypatch.delenv(locate.VARIABLE)
    monkeypatch.setenv("PATH", str(program.parent))
    assert locate.command("", "1") == [str(program)]


@pytest.mark.parametrize(
    ("platform", "environment", "end"),
    [
        ("linux", {"XDG_DATA_HOME": "/d"}, "/d/rigfit"),
        ("linux", {}, ".local/share/rigfit"),
        ("darwin", {}, "Library/Application Support/rigfit"),
        ("win32", {"LOCALAPPDATA": "L"}, "L/rigfit"),
    ],
)
def test_data_folder_by_the_customs_of_the_system(platform, environment, end):
    assert locate.data_folder(environment, platform).replace(os.sep, "/").endswith(end)


def test_candidates_begin_with_blenders_own():
    assert candidate_pythons("/blender/python")[0] == "/blender/python"
    assert "" not in candidate_pythons("")
