# SPDX-License-Identifier: Apache-2.0
"""Random faces, cameras and lights: numbered, inside their limits, plausible."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from blender_addon.messages import RigError
from blender_addon.studio import sampling
from blender_addon.studio.sampling import DEFAULT_CONFIG, SamplingConfig, actions, sample, split_side, write_samples

ARKIT = (
    *("browDownLeft", "browDownRight", "browInnerUp", "browOuterUpLeft", "browOuterUpRight", "cheekPuff"),
    *("cheekSquintLeft", "cheekSquintRight", "eyeBlinkLeft", "eyeBlinkRight", "eyeLookDownLeft", "eyeLookDownRight"),
    *("eyeLookInLeft", "eyeLookInRight", "eyeLookOutLeft", "eyeLookOutRight", "eyeLookUpLeft", "eyeLookUpRight"),
    *("eyeSquintLeft", "eyeSquintRight", "eyeWideLeft", "eyeWideRight", "jawForward", "jawLeft", "jawOpen"),
    *("jawRight", "mouthClose", "mouthDimpleLeft", "mouthDimpleRight", "mouthFrownLeft", "mouthFrownRight"),
    *("mouthFunnel", "mouthLeft", "mouthLowerDownLeft", "mouthLowerDownRight", "mouthPressLeft", "mouthPressRight"),
    *("mouthPucker", "mouthRight", "mouthRollLower", "mouthRollUpper", "mouthShrugLower", "mouthShrugUpper"),
    *("mouthSmileLeft", "mouthSmileRight", "mouthStretchLeft", "mouthStretchRight", "mouthUpperUpLeft"),
    *("mouthUpperUpRight", "noseSneerLeft", "noseSneerRight", "tongueOut"),
)


def parameter(name, group="identity", minimum=-1.0, maximum=1.0, default=0.0, shape=None) -> dict:
    return {
        "name": name,
        "group": group,
        "minimum": minimum,
        "maximum": maximum,
        "default": default,
        "shape": shape,
        "negative_shape": None,
        "sources": [],
    }


PARAMETERS = [
    *(parameter(name) for name in ("sex", "age", "weight", "muscle")),
    *(parameter(f"ancestry-{name}", minimum=0.0) for name in ("african", "asian", "caucasian")),
    *(parameter(f"nose-{i}") for i in range(18)),
    *(parameter(f"mouth-{i}", minimum=-0.5, maximum=2.0, default=0.25) for i in range(18)),
    *(parameter(f"head-{i}", minimum=0.0) for i in range(7)),
    *(parameter(name, "expression", 0.0, 0.7) for name in ARKIT),
    parameter("turn", "pose"),
    parameter("skin_tone", "appearance", 0.0, 1.0, 0.3),
]
NAMES = [item["name"] for item in PARAMETERS]
FACE = {"centre": (0.01, -0.05, 1.6), "size_m": 0.2}


def draw(count=400, parameters=PARAMETERS, seed=7, **options) -> list[dict]:
    return [sample(parameters, seed, i, **FACE, **options) for i in range(count)]


@pytest.fixture(scope="module")
def drawn() -> list[dict]:
    return draw()


def column(drawn: list[dict], name: str) -> np.ndarray:
    return np.array([item["values"][NAMES.index(name)] for item in drawn])


def test_a_sample_is_the_same_whatever_is_drawn_with_it(drawn):
    again = sample(PARAMETERS, 7, 123, **FACE)
    assert np.array_equal(again["values"], drawn[123]["values"])
    assert (again["camera"], again["light"]) == (drawn[123]["camera"], drawn[123]["light"])
    for other in (sample(PARAMETERS, 8, 123, **FACE), sample(PARAMETERS, 7, 124, **FACE)):
        assert not np.array_equal(other["values"], again["values"])
        assert other["camera"] != again["camera"]
        assert other["light"] != again["light"]


def test_numbers_do_not_depend_on_the_numpy_version():
    # Philox4x64-10 with key (7, 3), counter (0, 0, 0, 1): these words are the same everywhere and for ever.
    draws = sampling.Draws(7, 3, 1)
    assert [draws.uniform() for _ in range(3)] == pytest.approx(
        [0.20846739571851047, 0.5383972497385711, 0.30355944665111945], abs=1e-15
    )


def test_pictures_of_another_size_show_the_same_face(drawn):
    other = sample(PARAMETERS, 7, 5, **FACE, width=256, height=256)
    small, large = other["camera"], drawn[5]["camera"]
    assert (small["width"], large["width"]) == (256, 512)
    assert small["focal_px"] == pytest.approx(large["focal_px"] / 2)
    assert small["principal_px"] == [128, 128]
    assert small["rotation"] == large["rotation"]
    assert small["translation"] == pytest.approx(large["translation"])


@pytest.mark.parametrize("maximum", [0.7, 0.1, 1 / 3])
def test_values_stay_inside_their_limits_also_as_float32(maximum):
    # float32(0.7) lies below 0.7 and float32(0.1) above 0.1.
    ranges = [parameter(f"k{i}", "expression", -maximum, maximum) for i in range(3)]
    ranges += [parameter(f"a{i}", "appearance", -maximum, maximum) for i in range(3)]
    for item in draw(300, ranges, config=dataclasses.replace(DEFAULT_CONFIG, action_strength=(1.0, 1.0))):
        values = item["values"].astype(np.float64)
        assert (values >= -maximum).all()
        assert (values <= maximum).all()
    for end in (-maximum, maximum):
        value = sampling._inside(end, -maximum, maximum)
        assert value.dtype == np.float32
        assert -maximum <= float(value) <= maximum
        assert float(value) == pytest.approx(end, rel=2e-7)


def test_limits_hold_for_every_parameter(drawn):
    values = np.array([item["values"] for item in drawn], dtype=np.float64)
    assert values.shape == (400, len(PARAMETERS))
    assert np.isfinite(values).all()
    assert (values >= [p["minimum"] for p in PARAMETERS]).all()
    assert (values <= [p["maximum"] for p in PARAMETERS]).all()


def test_identity_is_spread_around_the_default_and_one_region_is_no_monster(drawn):
    nose = np.array([column(drawn, f"nose-{i}") for i in range(18)])
    assert abs(nose.mean()) < 0.02
    assert 0.15 < nose.std() < DEFAULT_CONFIG.detail_deviation
    norms = np.linalg.norm(nose, axis=0)
    assert norms.max() <= DEFAULT_CONFIG.region_limit * (1 + 1e-6)
    assert norms.min() > 0.3
    mouth = np.array([column(drawn, f"mouth-{i}") for i in range(18)])
    strengths = np.where(mouth > 0.25, (mouth - 0.25) / 1.75, (mouth - 0.25) / 0.75)
    assert np.linalg.norm(strengths, axis=0).max() <= DEFAULT_CONFIG.region_limit * (1 + 1e-6)
    assert abs(np.mean(strengths)) < 0.02
    heads = np.array([column(drawn, f"head-{i}") for i in range(7)])
    assert (heads >= 0).all()
    assert np.mean(heads > 0) == pytest.approx(DEFAULT_CONFIG.one_sided_active, abs=0.04)


def test_whole_face_parameters_of_the_default_head(drawn):
    ancestry = np.array([column(drawn, f"ancestry-{n}") for n in ("african", "asian", "caucasian")])
    # One of them is always zero (a common part moves nothing), each is the largest equally often.
    assert ancestry.min(axis=0) == pytest.approx(0)
    assert ancestry.sum(axis=0).max() <= 1 + 1e-6
    assert np.bincount(ancestry.argmax(axis=0)) == pytest.approx([133] * 3, abs=45)
    sex = column(drawn, "sex")
    assert (np.abs(sex) > 0.3).mean() > 0.7
    assert 0.4 < (sex > 0).mean() < 0.6
    assert column(drawn, "age").min() > -0.3
    # Without all of these names they are parameters like others.
    plain = [parameter("sex"), parameter("tail", minimum=0.0)]
    assert np.std([item["values"][0] for item in draw(200, plain)]) < 0.45


def test_expressions_are_few_actions_and_a_quarter_is_neutral(drawn):
    values = np.array([item["values"] for item in drawn])[:, [NAMES.index(name) for name in ARKIT]]
    by_name = {name: values[:, i] for i, name in enumerate(ARKIT)}
    assert (values == 0).all(axis=1).mean() == pytest.approx(DEFAULT_CONFIG.neutral_share, abs=0.06)
    assert (values.max(axis=0) > 0.2).mean() > 0.9  # nearly all are seen in 400 samples
    known = actions(ARKIT)
    active = np.array([[max(by_name[m][i] for m in members) > 0 for members in known.values()] for i in range(400)])
    assert active.sum(axis=1).max() <= DEFAULT_CONFIG.largest_actions + 1  # and the jaw that a tongue needs
    left, right = by_name["mouthSmileLeft"], by_name["mouthSmileRight"]
    smiles = (left > 0) | (right > 0)
    assert ((left > 0) & (right > 0))[smiles].mean() > 0.6
    assert ((left > 0) ^ (right > 0)).any()
    assert not ((by_name["eyeBlinkLeft"] > 0) & (by_name["eyeWideLeft"] > 0)).any()
    assert not ((by_name["mouthSmileLeft"] > 0) & (by_name["mouthFrownLeft"] > 0)).any()
    assert (by_name["mouthClose"] <= by_name["jawOpen"] + 1e-6).all()
    assert np.array_equal(by_name["eyeLookOutLeft"], by_name["eyeLookInRight"])


def test_pose_stays_and_appearance_is_even(drawn):
    assert (column(drawn, "turn") == 0).all()
    tone = column(drawn, "skin_tone")
    assert np.histogram(tone, 4, (0, 1))[0] == pytest.approx([100] * 4, abs=35)


@pytest.mark.parametrize(
    ("name", "stem", "side"),
    [
        ("mouthSmileLeft", "mouthSmile", "left"),
        ("smile_L", "smile", "left"),
        ("Brow.R", "Brow", "right"),
        ("cheek-left", "cheek", "left"),
        ("L_brow", "brow", "left"),
        ("right eye", "eye", "right"),
        ("jawLeft", "jawLeft", ""),
        ("mouthRight", "mouthRight", ""),
        ("jowl", "jowl", ""),
        ("Bright", "Bright", ""),
        ("L", "L", ""),
    ],
)
def test_sides_are_read_from_names(name, stem, side):
    assert split_side(name) == (stem, side)


@pytest.mark.parametrize(
    ("name", "region"),
    [("nose-hump", "nose"), ("NoseWidth", "nose"), ("nose_tip.001", "nose"), ("noseTip", "nose"), ("12", "12")],
)
def test_regions_are_read_from_names(name, region):
    assert sampling.region(name) == region


def test_strange_rigs_can_be_drawn():
    for parameters in ([], [parameter("", "expression")], [parameter("x", minimum=0.0, maximum=0.0)]):
        assert all(np.isfinite(item["values"]).all() for item in draw(20, parameters))
    three = [parameter(f"lid{s}", "expression") for s in ("_L", "_R", ".L")]
    assert sum(len(members) for members in actions(p["name"] for p in three).values()) == 3


# --- camera and light -------------------------------------------------------------------------------------------------


def test_cameras_see_the_face_as_the_configuration_says(drawn):
    centre, size = np.array(FACE["centre"]), FACE["size_m"]
    front = np.array([[1, 0, 0], [0, 0, -1], [0, 1, 0]])
    seen = []
    for item in drawn:
        view = item["camera"]
        rotation, translation = np.array(view["rotation"]), np.array(view["translation"])
        assert np.allclose(rotation @ rotation.T, np.eye(3))
        assert np.linalg.det(rotation) == pytest.approx(1)
        middle = rotation @ centre + translation
        pixel = view["focal_px"] * middle[:2] / middle[2] + view["principal_px"]
        turns = rotation @ front.T  # roll · pitch · yaw
        seen.append(
            (
                math.degrees(math.atan2(-turns[2, 0], turns[2, 2])),
                math.degrees(math.asin(turns[2, 1])),
                math.degrees(math.atan2(-turns[0, 1], turns[1, 1])),
                view["focal_px"] / 512 * 36,
                view["focal_px"] * size / middle[2] / 512,
                np.abs(pixel - 256).max() / 512,
            )
        )
    low, high = np.min(seen, axis=0), np.max(seen, axis=0)
    assert low == pytest.approx([-30, -15, -15, 35, 0.45, 0], abs=1)
    assert high == pytest.approx([30, 15, 15, 135, 0.70, 0.06], abs=1)
    assert max(row[4] for row in seen) <= 0.70 + 1e-9
    assert min(row[4] for row in seen) >= 0.45 - 1e-9
    assert max(row[5] for row in seen) <= 0.06 + 1e-9


def test_the_signs_of_the_camera_angles():
    def facing(**spans):
        still = dict.fromkeys(("yaw_deg", "pitch_deg", "roll_deg"), (0.0, 0.0))
        view = sample([], 0, 0, **FACE, config=SamplingConfig(**{**still, **spans}))["camera"]
        rotation = np.array(view["rotation"])
        return rotation @ [0, -1, 0], rotation @ [0, 0, 1]

    look, up = facing()
    assert np.allclose(look, [0, 0, -1])
    assert np.allclose(up, [0, -1, 0])
    assert facing(yaw_deg=(20.0, 20.0))[0][0] < -0.3  # to the left of the picture
    assert facing(pitch_deg=(20.0, 20.0))[0][1] > 0.3  # down
    assert facing(roll_deg=(20.0, 20.0))[1][0] > 0.3  # clockwise


def test_lights_are_ones_that_the_studio_takes(drawn):
    for item in drawn:
        light = item["light"]
        assert sampling.check_light(light) == light
        assert set(light) == set(sampling.DEFAULT_LIGHT)
        total = light["strength"] * (1 + 0.2 * light["fill"]) + light["world"]
        assert DEFAULT_CONFIG.exposure[0] <= total <= DEFAULT_CONFIG.exposure[1]


@pytest.mark.parametrize(
    ("kelvin", "xy"), [(2856, (0.4476, 0.4074)), (6504, (0.3128, 0.3236)), (2000, (0.5267, 0.4133))]
)
def test_black_bodies_have_their_colour(kelvin, xy):
    # CIE 1931 chromaticities: illuminant A and points of the Planckian locus.
    from_rgb = np.linalg.inv(
        [[3.2404542, -1.5371385, -0.4985314], [-0.9692660, 1.8760108, 0.0415560], [0.0556434, -0.2040259, 1.0572252]]
    )
    rgb = np.array(sampling.blackbody_rgb(kelvin))
    xyz = from_rgb @ rgb
    assert xyz[1] == pytest.approx(1, abs=1e-6)
    tolerance = 1e-3 if (rgb > 0).all() else 0.03
    assert xyz[:2] / xyz.sum() == pytest.approx(xy, abs=tolerance)


@pytest.mark.parametrize(("seed", "index"), [(-1, 0), (0, -1), (2**63, 0), (1.5, 0), (True, 0)])
def test_bad_numbers_are_refused(seed, index):
    with pytest.raises(RigError) as caught:
        sample(PARAMETERS, seed, index, **FACE)
    assert caught.value.kind == "bad_sampling"


# --- from a rig spec --------------------------------------------------------------------------------------------------


def write_spec(path, reach=1.0, landmarks=False):
    """A body of three stacked quads, 1.8 m tall; only the uppermost (the face, 0.2 m) is moved by an expression."""
    heights = [0.0, 0.8, 0.9, 1.5, 1.6, 1.8]
    neutral = np.array([[x, -0.1, z] for z in heights for x in (-0.1, 0.1)], np.float32)
    triangles = np.array([t for i in (0, 4, 8) for t in ((i, i + 1, i + 3), (i, i + 3, i + 2))], np.int32)
    face = np.arange(8, 12)
    parameters = [parameter("smile", "expression", 0.0, 1.0, shape=0), parameter("wide", shape=1)]
    arrays = {
        "neutral": neutral,
        "triangles": triangles,
        "part": np.zeros(len(triangles), np.uint8),
        "shape_offsets": np.array([0, 4, 16], np.int64),
        "shape_vertices": np.r_[face, np.arange(12)].astype(np.int32),
        "shape_deltas": np.r_[
            np.tile([[0.01, 0, 0]], (4, 1)), reach * np.c_[0.02 * np.sign(neutral[:, 0]), np.zeros((12, 2))]
        ].astype(np.float32),
    }
    if landmarks:
        arrays["landmark_triangle"] = np.array([2, -1] * 239, np.int32)
        arrays["landmark_barycentric"] = np.tile(np.array([[[1, 0, 0]], [[0, 0, 1]]], np.float32), (120, 1, 1)).reshape(
            -1, 3
        )[np.r_[0:478] // 2]
    document = {"schema": "rigfit.rig/1", "parts": ["skin"], "parameters": parameters}
    np.savez_compressed(path, json=np.frombuffer(json.dumps(document).encode(), np.uint8), **arrays)
    return path


def test_the_camera_finds_the_face_of_a_whole_body(tmp_path):
    spec = sampling.read_spec(str(write_spec(tmp_path / "rig.npz")))
    centre, size, face = sampling.face_frame(spec)
    assert centre == pytest.approx([0, -0.1, 1.7], abs=1e-3)
    assert size == pytest.approx(0.2, abs=2e-3)
    assert face.tolist() == [8, 9, 10, 11]
    for item in spec["document"]["parameters"]:
        item["group"] = "identity"
    assert sampling.face_frame(spec)[1] == pytest.approx(1.8, rel=0.02)


def test_the_camera_finds_the_face_by_its_landmarks(tmp_path):
    spec = sampling.read_spec(str(write_spec(tmp_path / "rig.npz", landmarks=True)))
    centre, size, _ = sampling.face_frame(spec)
    # Triangle 2 lies between 0.9 m and 1.5 m.
    assert centre[2] == pytest.approx(1.2, abs=1e-3)
    assert size == pytest.approx(0.6, abs=1e-2)


def test_a_rig_that_reaches_far_is_drawn_more_gently(tmp_path):
    scales = {}
    for reach in (0.1, 2.0, 200.0):
        spec = sampling.read_spec(str(write_spec(tmp_path / "rig.npz", reach)))
        _, size, face = sampling.face_frame(spec)
        scales[reach] = sampling.identity_scale(spec, size, face)
    # The expected displacement is reach · 0.02 m · deviation.
    assert scales[0.1] == 1.0
    assert scales[2.0] == pytest.approx(
        DEFAULT_CONFIG.identity_percent / (100 * 0.04 * DEFAULT_CONFIG.detail_deviation / 0.2), rel=0.02
    )
    assert scales[200.0] == pytest.approx(scales[2.0] / 100, rel=1e-3)


def test_samples_are_written_the_same_in_any_batch(tmp_path):
    spec = str(write_spec(tmp_path / "rig.npz"))
    out = str(tmp_path / "s.npz")
    assert write_samples(spec, seed=3, start=0, count=6, out=out) == {"count": 6, "parameters": 2}
    with np.load(out, allow_pickle=False) as archive:
        values, document = archive["values"], json.loads(bytes(archive["json"]))
    assert (values.shape, values.dtype) == ((6, 2), np.float32)
    assert document["parameters"] == ["smile", "wide"]
    write_samples(spec, seed=3, start=4, count=1, out=out)
    with np.load(out, allow_pickle=False) as archive:
        assert np.array_equal(archive["values"], values[4:5])
        alone = json.loads(bytes(archive["json"]))
    assert alone["cameras"] == document["cameras"][4:5]
    assert alone["lights"] == document["lights"][4:5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rig.npz", "s.npz"]


def test_bad_specs_and_places_are_refused_in_words(tmp_path):
    spec = write_spec(tmp_path / "rig.npz")
    garbage = tmp_path / "garbage.npz"
    garbage.write_bytes(b"PK\x03\x04 no")
    pickled = tmp_path / "pickled.npz"
    np.savez(pickled, json=np.array([{}], dtype=object))
    cases = [
        ("file_missing", {"spec": str(tmp_path / "none.npz")}),
        ("bad_sampling", {"spec": str(garbage)}),
        ("bad_sampling", {"spec": str(pickled)}),
        ("bad_sampling", {"count": 0}),
        ("bad_sampling", {"count": 2**40}),
        ("bad_sampling", {"start": -1}),
        ("bad_sampling", {"seed": -1}),
        ("bad_sampling", {"width": 0}),
        ("file_unwritable", {"out": str(tmp_path / "none" / "s.npz")}),
        ("file_unwritable", {"out": str(tmp_path)}),
    ]
    for kind, change in cases:
        request = {"spec": str(spec), "seed": 1, "start": 0, "count": 2, "out": str(tmp_path / "s.npz"), **change}
        with pytest.raises(RigError) as caught:
            write_samples(request.pop("spec"), **request)
        assert caught.value.kind == kind, change
    assert sorted(path.name for path in tmp_path.iterdir()) == ["garbage.npz", "pickled.npz", "rig.npz"]
