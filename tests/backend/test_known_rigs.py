# SPDX-License-Identifier: Apache-2.0
"""What is known of a rig by its hash: the best of what the spec has, what was kept and what is shipped."""

from __future__ import annotations

import os
import threading
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from mask_rig import mask_rig
from rigfit.cli import main
from rigfit.fitting.detector_model import DetectorModel
from rigfit.rig import known_rigs
from rigfit.rig.known_rigs import keep, kept_landmarks, known_rig, shipped_landmarks
from rigfit.rig.spec import LandmarkEmbedding, RigSpec


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rigfit" / "rigs"


def calibrated(spec: RigSpec) -> RigSpec:
    model = DetectorModel.uncalibrated(np.zeros((478, 3)), np.ones(len(spec.parameters)), 0.02)
    return spec.with_detector(replace(model, samples=7).to_arrays(), {"samples": 7, "origin": "test"})


def moved(spec: RigSpec, confidence: float) -> RigSpec:
    """The same rig with another embedding."""
    assert spec.landmarks is not None
    known = spec.landmarks
    return spec.with_landmarks(
        LandmarkEmbedding(known.triangle, known.barycentric, np.full(478, confidence, np.float32))
    )


def same_learned(a: RigSpec, b: RigSpec) -> bool:
    assert a.landmarks is not None
    assert b.landmarks is not None
    embedding = all(
        np.array_equal(getattr(a.landmarks, name), getattr(b.landmarks, name))
        for name in ("triangle", "barycentric", "confidence")
    )
    detector = a.detector.keys() == b.detector.keys() and all(
        np.array_equal(a.detector[name], b.detector[name]) and a.detector[name].dtype == b.detector[name].dtype
        for name in a.detector
    )
    return embedding and detector and a.detector_json == b.detector_json


def test_what_is_kept_comes_back_exactly(folder):
    for spec in (mask_rig(), calibrated(mask_rig())):
        keep(spec)
        back = kept_landmarks(spec.with_landmarks(None))
        assert back is not None
        assert back.rig_hash == spec.rig_hash
        assert same_learned(back, spec)
    assert [path.name for path in folder.iterdir()] == [f"{spec.rig_hash}.npz"]
    assert kept_landmarks(mask_rig(1.1)) is None


def test_the_best_is_chosen():
    spec = mask_rig()
    bare = spec.with_landmarks(None)
    assert known_rig(bare) is None
    own = known_rig(spec)
    assert own is not None
    assert own[1] == "spec"
    keep(moved(spec, 0.5))
    assert [known_rig(one)[1] for one in (bare, spec)] == ["kept", "spec"]
    keep(calibrated(moved(spec, 0.5)))
    assert [known_rig(one)[1] for one in (bare, spec)] == ["kept", "kept"]
    assert [known_rig(one)[1] for one in (calibrated(spec),)] == ["spec"]


def test_a_file_under_the_name_of_another_rig_is_not_used(folder):
    spec, other = mask_rig(), mask_rig(1.1)
    keep(other)
    (folder / f"{other.rig_hash}.npz").rename(folder / f"{spec.rig_hash}.npz")
    assert kept_landmarks(spec) is None


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "text", "folder", "members", "pickle", "shape"])
def test_damaged_files_are_ignored_and_replaced(folder, damage, caplog):
    spec = mask_rig()
    keep(calibrated(spec))
    path = folder / f"{spec.rig_hash}.npz"
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "bit":
        with zipfile.ZipFile(path) as archive:
            at = archive.getinfo("landmark_barycentric.npy").header_offset + 200
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "text":
        path.write_text("hello")
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "members":
        np.savez(path, rig_hash=np.array(spec.rig_hash))
    elif damage == "pickle":
        np.savez(path, rig_hash=np.array([{"a": 1}], dtype=object))
    else:
        arrays = dict(np.load(path))
        arrays["landmark_triangle"] = arrays["landmark_triangle"][:100]
        np.savez(path, **arrays)
    assert kept_landmarks(spec) is None
    assert "is not used" in caplog.text or "not used" in caplog.text
    if damage != "folder":
        keep(spec)
        assert kept_landmarks(spec) is not None


def test_without_a_cache_that_can_be_written_nothing_is_kept_and_nothing_breaks(tmp_path, monkeypatch, caplog):
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    keep(mask_rig())
    assert "not kept" in caplog.text
    assert kept_landmarks(mask_rig()) is None


def test_only_the_least_used_and_uncalibrated_are_forgotten(folder, monkeypatch):
    monkeypatch.setattr(known_rigs, "MOST_UNCALIBRATED", 3)
    rigs = [mask_rig(1 + i / 100) for i in range(6)]
    keep(calibrated(rigs[0]))
    for age, rig in enumerate(rigs[1:4]):
        keep(rig)
        os.utime(folder / f"{rig.rig_hash}.npz", (1000 + age, 1000 + age))
    os.utime(folder / f"{rigs[0].rig_hash}.npz", (1, 1))
    assert kept_landmarks(rigs[1]) is not None  # the oldest, but in use
    keep(rigs[4])
    assert [kept_landmarks(rig) is not None for rig in rigs] == [True, True, False, True, True, False]


def test_many_at_a_time_write_and_read_whole_files():
    spec = mask_rig()
    ones = [moved(spec, 0.1), moved(spec, 0.9)]
    keep(ones[0])
    stop, seen, broken = threading.Event(), set(), []

    def read() -> None:
        while not stop.is_set():
            known = kept_landmarks(spec)
            if known is None or known.landmarks is None:
                broken.append(known)
            else:
                seen.add(round(float(known.landmarks.confidence[0]), 1))

    reader = threading.Thread(target=read)
    reader.start()
    writers = [threading.Thread(target=lambda one=one: [keep(one) for _ in range(30)]) for one in ones]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    stop.set()
    reader.join()
    assert not broken
    assert seen <= {0.1, 0.9}


def test_a_calibration_by_the_command_line_is_kept(tmp_path, monkeypatch, capsys):
    """Its result is given: a real one takes an hour of renders (tests of the calibration: test_calibrate.py)."""
    spec = mask_rig()
    spec.save(tmp_path / "rig.npz")
    model = replace(DetectorModel.uncalibrated(np.zeros((478, 3)), np.ones(len(spec.parameters)), 0.02), samples=900)
    monkeypatch.setattr("rigfit.fitting.calibrate.calibrate", lambda *_, **__: model)
    monkeypatch.setattr("rigfit.blender.locate.locate", lambda named: None)
    monkeypatch.setattr(
        "sys.argv", ["rigfit", "rig", "calibrate", str(tmp_path / "a.blend"), str(tmp_path / "rig.npz")]
    )
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert "calibrated on 900 renders" in capsys.readouterr().out
    known = known_rig(mask_rig().with_landmarks(None))
    assert known is not None
    assert known[1] == "kept"
    assert known[0].detector["samples"] == 900
    assert known[0].detector_json is not None
    assert known[0].detector_json["samples"] == 900


def test_the_shipped_ones_belong_to_the_default_head_only():
    assert shipped_landmarks(mask_rig()) is None
