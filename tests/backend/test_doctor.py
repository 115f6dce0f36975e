# SPDX-License-Identifier: Apache-2.0
"""rigfit doctor: what is right is ok, what is missing has a fix, nothing ends in a traceback."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from rich.console import Console
from rigfit import doctor
from rigfit.doctor import Check
from rigfit.rig import default_head

BACKEND = Path(__file__).resolve().parents[2] / "backend"


def _by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_whole_environment_is_ok_except_for_the_blender_that_is_not_there(tmp_path, capsys):
    code = doctor.run(json_form=True, blender=tmp_path / "no-blender", folder=tmp_path)
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert code == 1
    blender = checks.pop("Blender")
    assert blender["status"] == "failed"
    assert "no-blender" in blender["fix"]
    assert {name: check["found"] for name, check in checks.items() if check["status"] == "failed"} == {}
    for name in ("Python", "numpy", "mediapipe", "scipy", "face detector", "head assets", "processor", "GPU"):
        assert checks[name]["status"] == "ok", checks[name]
    assert checks["Python"]["found"].startswith("{}.{}".format(*sys.version_info))
    assert f"disk {tmp_path}" in checks


@pytest.mark.blender
def test_a_blender_is_started_and_asked(tmp_path):
    found = _by_name(doctor.run_checks(folder=tmp_path))["Blender"]
    assert found.status == "ok", found
    assert os.environ["RIGFIT_BLENDER"] in found.found
    assert found.found[0].isdigit()


def test_packages():
    good = doctor.check_package(Requirement("numpy>=1.20"))
    assert (good.status, good.fix) == ("ok", None)
    old = doctor.check_package(Requirement("numpy>=99"))
    assert old.status == "failed"
    assert ">=99 is needed" in old.found
    assert "numpy>=99" in (old.fix or "")
    missing = doctor.check_package(Requirement("no-such-package-of-ours==1"))
    assert missing.status == "failed"
    assert "not installed" in missing.found
    assert "pip install 'no-such-package-of-ours==1'" in (missing.fix or "")


def test_the_requirements_are_those_of_the_project_without_extras():
    names = {requirement.name for requirement in doctor.declared_requirements()}
    assert {"mediapipe", "numpy", "scipy", "typer"} <= names
    assert not {"bpy", "torch", "pytest", "ray"} & names


def test_assets_that_are_missing_have_a_fix(tmp_path, monkeypatch):
    monkeypatch.setenv(default_head.ASSETS_VARIABLE, str(tmp_path))
    found = _by_name(doctor.run_checks(blender=tmp_path / "none", folder=tmp_path))["head assets"]
    assert found.status == "failed"
    assert "pip install" in (found.fix or "")


def test_disk(tmp_path, monkeypatch):
    assert doctor.check_disk(tmp_path / "none").status == "failed"
    monkeypatch.setattr(doctor, "DISK_WARN_GB", 1e9)
    assert doctor.check_disk(tmp_path).status == "warning"
    monkeypatch.setattr(doctor, "DISK_FAIL_GB", 1e9)
    full = doctor.check_disk(tmp_path)
    assert full.status == "failed"
    assert str(tmp_path) in (full.fix or "")


def test_a_check_that_breaks_is_a_failed_check(monkeypatch, tmp_path):
    def broken():
        raise OSError("the loader is upset")

    monkeypatch.setattr(doctor, "_face_detector", broken)
    found = _by_name(doctor.run_checks(blender=tmp_path / "none", folder=tmp_path))
    assert found["face detector"].status == "failed"
    assert "the loader is upset" in found["face detector"].found
    assert "GPU" in found  # the checks after it ran


def test_the_table_shows_what_failed_and_text_with_brackets():
    screen = io.StringIO()
    checks = [Check("numpy", "ok", "1.26.4"), Check("thing", "failed", "[bold]odd[/", "do [this]")]
    doctor.show(checks, Console(file=screen, width=100))
    text = screen.getvalue()
    assert "FAILED" in text
    assert "[bold]odd[/" in text
    assert "thing: do [this]" in text


def test_the_checks_can_start_where_the_packages_are_broken():
    """Importing the module must not import what it is there to check."""
    program = (
        "import sys, rigfit.doctor; print([m for m in ('mediapipe', 'scipy', 'numpy', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(BACKEND)}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr
