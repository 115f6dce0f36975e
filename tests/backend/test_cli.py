# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: help at once, one sentence and exit code 2 for a mistake, nothing half-written."""

import json
import subprocess
import sys

import numpy as np
import pytest
from mask_rig import camera_for, mask_rig, random_values
from PIL import Image
from rigfit.cli import main
from rigfit.fitting.face_frame import landmark_model
from rigfit.fitting.result import FitResult


@pytest.fixture
def rigfit(monkeypatch, capsys):
    """Run a command in this process → (exit code, standard output, standard error)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rigfit", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.fixture
def photo_of_mask(tmp_path):
    """A rig spec, a picture, and the landmark file of a known face in it (no detector, no Blender)."""
    spec = mask_rig()
    spec.save(tmp_path / "rig.npz")
    truth = random_values(spec, np.random.default_rng(3))
    camera = camera_for(spec, 8, -3, 5)
    pixels = camera.project(landmark_model(spec).points(truth))
    Image.fromarray(np.full((480, 640, 3), 127, np.uint8)).save(tmp_path / "photo.png")
    points = [[float(x), float(y)] for x, y in pixels]
    (tmp_path / "points.json").write_text(json.dumps({"schema": "rigfit.landmarks/1", "points": points}))
    return tmp_path, spec, truth


def test_help_loads_nothing_heavy():
    code = "import sys, rigfit.cli; print([m for m in ('numpy', 'scipy', 'mediapipe', 'torch', 'PIL', 'trimesh') if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_every_command_has_help(rigfit):
    for command in (
        (),
        ("rig",),
        ("bench",),
        ("fit",),
        ("demo",),
        ("doctor",),
        ("rig", "calibrate"),
        ("bench", "recovery"),
    ):
        code, out, _ = rigfit(*command, "--help")
        assert code == 0
        assert "Usage" in out


def fit_of(folder):
    """The command line of a fit of `photo_of_mask`, without --out."""
    return ("fit", folder / "photo.png", "--rig", folder / "rig.npz", "--landmarks", folder / "points.json")


def test_fit_with_a_landmark_file_needs_no_blender_and_finds_the_face(rigfit, photo_of_mask):
    folder, spec, truth = photo_of_mask
    code, out, err = rigfit(
        *fit_of(folder),
        "--out",
        folder / "out",
    )
    assert code == 0, err
    assert "landmark error" in out
    result = FitResult.load(folder / "out" / "fit.json")
    result.check_rig(spec)
    found = np.array([result.parameters[n].value for n in spec.names])
    identity = spec.group("identity")
    assert np.abs(found - truth)[identity].mean() < 0.6 * np.abs(truth)[identity].mean()
    with Image.open(folder / "out" / "comparison.png") as picture:
        assert picture.width > 900
    assert {p.name for p in (folder / "out").iterdir()} == {"fit.json", "comparison.png"}


def test_locks_and_solve(rigfit, photo_of_mask):
    folder, _, _ = photo_of_mask
    base = (
        *fit_of(folder),
        "--out",
        folder / "out",
    )
    assert rigfit(*base, "--lock", "jawOpen=0.25", "--lock", "nose-width", "--solve", "identity")[0] == 0
    result = FitResult.load(folder / "out" / "fit.json")
    assert result.parameters["jawOpen"].value == 0.25
    assert result.parameters["jawOpen"].locked
    assert result.parameters["nose-width"].value == 0
    assert all(p.value == 0 for n, p in result.parameters.items() if p.group == "expression" and n != "jawOpen")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("fit", "missing.jpg", "--rig", "{rig}"), "missing.jpg"),
        (("fit", "{photo}", "--rig", "missing.npz"), "missing.npz"),
        (("fit", "{photo}", "--rig", "{photo}"), "photo.png"),
        (("fit", "{photo}", "--rig", "{rig}", "--landmarks", "{points}", "--lock", "nose=1"), "'nose"),
        (("fit", "{photo}", "--rig", "{rig}", "--landmarks", "{points}", "--lock", "jawOpen=x"), "not a number"),
        (("fit", "{photo}", "--rig", "{rig}", "--landmarks", "{points}", "--lock", "jawOpen=9"), "outside its limits"),
        (("fit", "{photo}", "--rig", "{rig}", "--landmarks", "{points}", "--landmarks", "{points}"), "one for each"),
        (("fit", "{photo}", "--rig", "{rig}", "--landmarks", "{points}", "--initial", "{points}"), "schema"),
        (("fit", "{photo}", "--rig", "{rig}", "--landmarks", "{points}", "--focal-mm", "0"), "focal length"),
        (("fit", "{photo}", "--rig", "{rig}", "--solve", "hair"), "--solve hair"),
        (("fit", "{photo}", "--blend", "head.blend"), "--rig"),
        (("fit", "{photo}", "--rig", "{rig}"), "No face"),
        (("rig", "inspect", "missing.npz"), "missing.npz"),
        (("rig", "default", "head.txt"), ".blend"),
        (("rig", "default", "nowhere/head.blend"), "nowhere"),
        (("rig", "export", "head.blend", "out.npz", "--blender", "/nonexistent/blender"), "/nonexistent/blender"),
        (("bench", "recovery", "--method", "magic", "--count", "1"), "magic"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence_and_exit_code_2(rigfit, photo_of_mask, monkeypatch, arguments, told):
    folder, _, _ = photo_of_mask
    monkeypatch.chdir(folder)
    before = sorted(p.name for p in folder.iterdir())
    names = {"{rig}": "rig.npz", "{photo}": "photo.png", "{points}": "points.json"}
    code, _, err = rigfit(*(names.get(a, a) for a in arguments))
    assert code == 2, err
    sentence = [line for line in err.splitlines() if line.startswith("rigfit: ")]
    assert len(sentence) == 1
    assert told in sentence[0]
    assert "Traceback" not in err
    left = sorted(p.name for p in folder.iterdir() if p.name != "fit")
    assert left == before
    assert not (folder / "fit").exists() or not list((folder / "fit").iterdir())


def test_an_unwritable_output_folder_is_said_before_the_work(rigfit, photo_of_mask):
    folder, _, _ = photo_of_mask
    (folder / "taken").write_text("a file")
    code, _, err = rigfit(
        *fit_of(folder),
        "--out",
        folder / "taken",
    )
    assert code == 2
    assert "cannot be written" in err
    assert (folder / "taken").read_text() == "a file"


def test_inspect_lists_parameters_and_draws(rigfit, photo_of_mask):
    folder, _, _ = photo_of_mask
    code, out, _ = rigfit("rig", "inspect", folder / "rig.npz", "--out", folder / "look.png")
    assert code == 0
    assert all(name in out for name in ("jawOpen", "nose-width", "appearance"))
    with Image.open(folder / "look.png") as picture:
        colours = len(np.unique(np.asarray(picture.convert("RGB").resize((160, 60))).reshape(-1, 3), axis=0))
    assert colours > 100


def test_ctrl_c_ends_with_130_and_no_traceback(rigfit, photo_of_mask, monkeypatch):
    folder, _, _ = photo_of_mask

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("rigfit.fitting.run.fit_seen_faces", interrupted)
    code, _, err = rigfit(
        *fit_of(folder),
        "--out",
        folder / "out",
    )
    assert code == 130
    assert "Traceback" not in err
    assert list((folder / "out").iterdir()) == []
