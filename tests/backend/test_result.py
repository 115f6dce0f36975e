# SPDX-License-Identifier: Apache-2.0
import json

import numpy as np
import pytest
from mask_rig import camera_for, mask_rig
from rigfit.errors import UserError
from rigfit.fitting.result import FitResult, ParameterResult, PhotoResult, Verification


def a_result(spec):
    camera = camera_for(spec, 10)
    parameters = {p.name: ParameterResult(p.default, 0.1, p.group != "appearance", p.group) for p in spec.parameters}
    photo = PhotoResult(
        "gesicht – 顔.jpg", (640, 480), camera, "solved", {"jawOpen": 0.4}, 1.2, 1.9, 0.97, 2, (10.0, 0.0, 0.0), ["2 faces found"],
        Verification(True, 2.5, "4.5.0", 3.0),
    )  # fmt: skip
    return FitResult(spec.rig_hash, "landmarks", parameters, [photo], 0.05)


def test_round_trip(tmp_path):
    spec = mask_rig()
    result = a_result(spec)
    result.save(tmp_path / "fit.json")
    again = FitResult.load(tmp_path / "fit.json")
    assert again.to_json() == result.to_json()
    assert again.values()["jawOpen"] == 0.4
    assert np.array_equal(again.photos[0].camera.rotation, result.photos[0].camera.rotation)
    again.check_rig(spec)


def test_a_result_of_another_rig_says_what_differs():
    spec = mask_rig()
    from dataclasses import replace

    other = replace(
        spec, parameters=(replace(spec.parameters[0], name="snout-width"), *spec.parameters[1:]), rig_hash=""
    )
    with pytest.raises(UserError, match="nose-width"):
        a_result(spec).check_rig(other)
    moved = replace(spec, neutral=(spec.neutral * 1.1).astype(np.float32), rig_hash="")
    with pytest.raises(UserError, match="geometry or limits"):
        a_result(spec).check_rig(moved)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not a fit result"),
        ("[]", "schema"),
        ('{"schema": "rigfit.fit/9"}', "rigfit.fit/9"),
        ('{"schema": "rigfit.fit/1"}', "damaged"),
    ],
)
def test_files_that_are_no_result_are_refused(tmp_path, text, told):
    file = tmp_path / "fit.json"
    file.write_text(text)
    with pytest.raises(UserError, match=told):
        FitResult.load(file)


def test_not_a_number_is_never_written(tmp_path):
    from dataclasses import replace

    result = a_result(mask_rig())
    bad = replace(result, parameters={"a": ParameterResult(float("nan"), 0.1, True, "identity")})
    with pytest.raises(ValueError, match="JSON"):
        bad.save(tmp_path / "fit.json")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_one_sentence_and_leaves_nothing(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        a_result(mask_rig()).save(blocker / "fit.json")
    assert blocker.read_text() == "x"


def test_a_failed_write_keeps_the_old_file(tmp_path):
    file = tmp_path / "fit.json"
    a_result(mask_rig()).save(file)
    before = file.read_bytes()
    from rigfit.files import write_atomically

    def fails(path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left"):
        write_atomically(file, fails)
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["fit.json"]
    assert json.loads(before)["schema"] == "rigfit.fit/1"
