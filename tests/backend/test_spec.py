# SPDX-License-Identifier: Apache-2.0
"""The rig spec file and the blendshapes in it."""

from __future__ import annotations

import json
import os
import stat
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigfit.errors import UserError
from rigfit.rig.blendshapes import evaluate, restrict
from rigfit.rig.spec import LandmarkEmbedding, Parameter, RigSpec, Source, compute_rig_hash
from toy_rig import toy_rig


@pytest.fixture(scope="module")
def rig() -> RigSpec:
    return toy_rig()


def slow_vertices(spec: RigSpec, values: np.ndarray) -> np.ndarray:
    """The formula of docs/architecture.md, row by row."""
    vertices = [[float(x) for x in row] for row in spec.neutral]
    for parameter, value in zip(spec.parameters, values, strict=True):
        offset = float(value) - parameter.default
        shape = parameter.shape
        if offset < 0 and parameter.negative_shape is not None:
            shape = parameter.negative_shape
        if shape is None:
            continue
        for row in range(int(spec.shape_offsets[shape]), int(spec.shape_offsets[shape + 1])):
            for axis in range(3):
                vertices[int(spec.shape_vertices[row])][axis] += offset * float(spec.shape_deltas[row, axis])
    return np.array(vertices)


def random_values(spec: RigSpec, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(spec.minimum, spec.maximum)


# --- evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_evaluate_is_the_slow_formula(rig: RigSpec, seed: int) -> None:
    values = random_values(rig, seed)
    assert np.abs(evaluate(rig, values) - slow_vertices(rig, values)).max() < 1e-14


def test_a_default_that_is_not_zero_is_the_neutral(rig: RigSpec) -> None:
    parameters = tuple(
        replace(p, minimum=-1.0, default=0.25) if p.name in ("nose-length", "smile") else p for p in rig.parameters
    )
    moved = replace(rig, parameters=parameters, rig_hash="")
    assert np.array_equal(evaluate(moved, moved.default), rig.neutral)
    for seed in range(3):
        values = random_values(moved, seed)
        assert np.abs(evaluate(moved, values) - slow_vertices(moved, values)).max() < 1e-14


def test_the_two_sides_of_a_signed_parameter_differ(rig: RigSpec) -> None:
    index = rig.names.index("nose-length")
    assert rig.parameters[index].negative_shape is not None
    up, down = rig.default, rig.default
    up[index], down[index] = 1, -1
    ahead, back = evaluate(rig, up) - rig.neutral, evaluate(rig, down) - rig.neutral
    assert ahead[:, 1].min() < -0.01
    assert 0.005 < back[:, 1].max() < 0.01


@pytest.mark.parametrize("seed", range(3))
def test_restricted_points_are_the_points_of_the_mesh(rig: RigSpec, seed: int) -> None:
    embedding = rig.landmarks
    assert embedding is not None
    model = restrict(rig, embedding.triangle, embedding.barycentric)
    values = random_values(rig, seed)
    vertices = slow_vertices(rig, values)
    expected = [
        sum(float(w) * vertices[v] for w, v in zip(weights, rig.triangles[t], strict=True))
        for t, weights in zip(embedding.triangle, embedding.barycentric, strict=True)
    ]
    assert np.abs(model.points(values) - expected).max() < 1e-13


def test_the_jacobian_is_the_difference_quotient(rig: RigSpec) -> None:
    embedding = rig.landmarks
    assert embedding is not None
    model = restrict(rig, embedding.triangle[::40], embedding.barycentric[::40])
    values = random_values(rig, 5)
    jacobian = model.jacobian(values)
    for index in range(len(values)):
        step = np.zeros(len(values))
        step[index] = 1e-6
        quotient = (model.points(values + step) - model.points(values - step)) / 2e-6
        assert np.abs(quotient - jacobian[index]).max() < 1e-9


def test_wrong_sizes_are_refused(rig: RigSpec) -> None:
    with pytest.raises(ValueError, match="15 parameters"):
        evaluate(rig, np.zeros(3))
    with pytest.raises(ValueError, match="does not exist"):
        restrict(rig, [-1], [[1, 0, 0]])
    with pytest.raises(ValueError, match="not"):
        restrict(rig, [0, 1], [[1, 0, 0]])


# --- the file ---------------------------------------------------------------------------------------------------------


def same(one: RigSpec, other: RigSpec) -> bool:
    arrays = ("neutral", "triangles", "uv", "part", "shape_offsets", "shape_vertices", "shape_deltas")
    rest = ("parameters", "parts", "meshes", "left_out", "linear", "warnings", "rig_hash", "source", "metres_per_unit")
    return all(np.array_equal(getattr(one, a), getattr(other, a)) for a in arrays) and all(
        getattr(one, r) == getattr(other, r) for r in rest
    )


def test_a_spec_survives_the_file(rig: RigSpec, tmp_path: Path) -> None:
    names = ["日本語", 'quo"te', "half \udcc3", "emoji 😀"]
    extra = tuple(
        Parameter(name, "identity", -0.1, 0.3, 0.1, sources=(Source("shape_key", "Hé", key=name, maximum=0.3),))
        for name in names
    )
    bone = Parameter("grin", "expression", 0, 1, sources=(Source("property", "Arm", property="grin", bone="b"),))
    spec = replace(rig, parameters=(*rig.parameters, *extra, bone), warnings=("w",), linear=False, rig_hash="")
    spec = spec.with_detector({"bias": np.arange(6.0).reshape(2, 3)}, {"schema": "x", "count": 3})
    spec.save(tmp_path / "rig.npz")
    again = RigSpec.load(tmp_path / "rig.npz")
    assert same(spec, again)
    assert again.landmarks is not None
    assert spec.landmarks is not None
    for name in ("triangle", "barycentric", "confidence"):
        assert np.array_equal(getattr(again.landmarks, name), getattr(spec.landmarks, name))
    assert again.detector_json == {"schema": "x", "count": 3}
    assert list(again.detector) == ["bias"]
    assert np.array_equal(again.detector["bias"], spec.detector["bias"])


def test_two_saves_are_the_same_bytes(rig: RigSpec, tmp_path: Path) -> None:
    rig.save(tmp_path / "a.npz")
    RigSpec.load(tmp_path / "a.npz").save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_new_landmarks_drop_the_detector_model(rig: RigSpec) -> None:
    spec = rig.with_detector({"bias": np.zeros(2)}, {"a": 1}).with_landmarks(None)
    assert spec.landmarks is None
    assert not spec.detector
    assert spec.detector_json is None
    assert spec.rig_hash == rig.rig_hash


def test_a_failed_save_leaves_the_old_file_alone(rig: RigSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rig.npz"
    rig.save(path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot be written \(No space left") as caught:
        rig.with_landmarks(None).save(path)
    assert caught.value.kind == "file_unwritable"
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["rig.npz"]
    with pytest.raises(UserError, match="choose another folder"):
        rig.save(tmp_path / "missing" / "rig.npz")


def test_the_file_has_ordinary_permissions(rig: RigSpec, tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    rig.save(tmp_path / "rig.npz")
    assert stat.S_IMODE((tmp_path / "rig.npz").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


# --- the hash ---------------------------------------------------------------------------------------------------------


def test_the_hash_ignores_noise_storage_order_and_landmarks(rig: RigSpec) -> None:
    size = float(np.linalg.norm(rig.neutral.max(axis=0) - rig.neutral.min(axis=0)))
    step = 2.0 ** np.floor(np.log2(1e-5 * size))
    snapped = replace(rig, neutral=(np.rint(rig.neutral / step) * step).astype(np.float32), rig_hash="")
    noise = np.random.default_rng(0).uniform(-0.3, 0.3, rig.neutral.shape) * step
    noise[[rig.neutral[:, axis].argmin() for axis in range(3)]] = 0
    shaken = replace(snapped, neutral=(snapped.neutral + noise).astype(np.float32), rig_hash="")
    assert shaken.rig_hash == snapped.rig_hash
    assert replace(rig, landmarks=None, source="other.blend", warnings=("x",), rig_hash="").rig_hash == rig.rig_hash
    # The same shapes in another order of rows, with a row of zeros.
    order = [1, 0, *range(2, len(rig.shape_offsets) - 1)]
    rows = [np.arange(rig.shape_offsets[s], rig.shape_offsets[s + 1]) for s in order]
    swap = {old: new for new, old in enumerate(order)}
    reordered = replace(
        rig,
        shape_offsets=np.cumsum([0, *map(len, rows)]).astype(np.int64),
        shape_vertices=rig.shape_vertices[np.concatenate(rows)],
        shape_deltas=rig.shape_deltas[np.concatenate(rows)],
        parameters=tuple(replace(p, shape=None if p.shape is None else swap[p.shape]) for p in rig.parameters),
        rig_hash="",
    )
    assert reordered.rig_hash == rig.rig_hash


def changed_delta(rig: RigSpec) -> RigSpec:
    deltas = rig.shape_deltas.copy()
    deltas[np.abs(deltas).max(axis=1).argmax()] *= 1.01
    return replace(rig, shape_deltas=deltas, rig_hash="")


@pytest.mark.parametrize(
    "change",
    [
        lambda rig: replace(rig, neutral=rig.neutral + np.float32(1e-4), rig_hash=""),
        changed_delta,
        lambda rig: replace(rig, triangles=rig.triangles[:, [1, 2, 0]].copy(), rig_hash=""),
        lambda rig: replace(rig, parameters=(replace(rig.parameters[0], name="x"), *rig.parameters[1:]), rig_hash=""),
        lambda rig: replace(rig, parameters=(replace(rig.parameters[0], maximum=2), *rig.parameters[1:]), rig_hash=""),
        lambda rig: replace(
            rig, parameters=(replace(rig.parameters[0], group="pose"), *rig.parameters[1:]), rig_hash=""
        ),
        lambda rig: replace(rig, parameters=(rig.parameters[1], rig.parameters[0], *rig.parameters[2:]), rig_hash=""),
    ],
)
def test_the_hash_sees_every_real_change(rig: RigSpec, change: Callable[[RigSpec], RigSpec]) -> None:
    assert change(rig).rig_hash != rig.rig_hash


def test_a_file_whose_geometry_was_edited_is_refused(rig: RigSpec, tmp_path: Path) -> None:
    edited = replace(rig, neutral=rig.neutral * np.float32(1.01))
    assert compute_rig_hash(edited) != edited.rig_hash
    edited.save(tmp_path / "rig.npz")
    with pytest.raises(UserError, match="do not belong to its rig hash"):
        RigSpec.load(tmp_path / "rig.npz")
    assert RigSpec.load(tmp_path / "rig.npz", verify_hash=False).rig_hash == rig.rig_hash


# --- bad files --------------------------------------------------------------------------------------------------------


def contents(rig: RigSpec, tmp_path: Path) -> dict[str, np.ndarray]:
    rig.save(tmp_path / "good.npz")
    with np.load(tmp_path / "good.npz") as archive:
        return {name: archive[name] for name in archive.files}


def with_json(arrays: dict[str, np.ndarray], change: Callable[[Any], Any]) -> dict[str, np.ndarray]:
    document = json.loads(arrays["json"].tobytes())
    document = change(document) or document
    return arrays | {"json": np.frombuffer(json.dumps(document).encode(), np.uint8)}


def set_(key: str, value: object, parameter: int | None = None) -> Callable[[dict], dict]:
    def change(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        def edit(document: Any) -> None:
            (document if parameter is None else document["parameters"][parameter])[key] = value

        return with_json(arrays, edit)

    return change


def array(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[dict], dict]:
    return lambda arrays: arrays | {name: np.asarray(change(arrays[name].copy()))}


def put(index: Any, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values[index] = value
        return values

    return change


BAD: dict[str, tuple[Callable[[dict], dict], str]] = {
    "other schema": (set_("schema", "rigfit.rig/2"), "its schema is 'rigfit.rig/2'"),
    "json not an object": (lambda a: with_json(a, lambda d: [1]), "not an object"),
    "json cut": (array("json", lambda j: j[:50]), "cannot be parsed"),
    "json not text": (array("json", lambda j: np.full(9, 255, np.uint8)), "cannot be parsed"),
    "json nested": (array("json", lambda j: np.frombuffer(b"[" * 200_000, np.uint8)), "cannot be parsed"),
    "json missing": (lambda a: {k: v for k, v in a.items() if k != "json"}, "JSON text is missing"),
    "array missing": (lambda a: {k: v for k, v in a.items() if k != "part"}, "array part is missing"),
    "wrong dtype": (array("neutral", lambda n: n.astype(np.float64)), "array neutral is float64, not float32"),
    "wrong shape": (array("neutral", lambda n: n[:, :2]), "array neutral has shape"),
    "not finite": (array("neutral", put((3, 1), np.nan)), "array neutral holds numbers that are not finite"),
    "delta infinite": (array("shape_deltas", put((0, 0), np.inf)), "array shape_deltas holds"),
    "no vertices": (array("neutral", lambda n: n[:0]), "no vertices"),
    "triangle out of range": (array("triangles", put((0, 0), 99999)), "a triangle names a missing vertex"),
    "triangle negative": (array("triangles", put((0, 0), -1)), "a triangle names a missing vertex"),
    "part out of range": (array("part", put(0, 200)), "missing part"),
    "uv too short": (array("uv", lambda u: u[1:]), "array uv does not match"),
    "offsets descend": (array("shape_offsets", put(1, 10**9)), "array shape_offsets is not ascending"),
    "offsets end early": (array("shape_offsets", put(-1, 5000)), "shape_offsets"),
    "offsets start late": (array("shape_offsets", put(0, 1)), "does not start at 0"),
    "shape vertex out of range": (array("shape_vertices", put(-1, 99999)), "a shape names a missing vertex"),
    "ids not ascending": (
        array("shape_vertices", lambda v: np.r_[v[1], v[0], v[2:]].astype(np.int32)),
        "not ascending",
    ),
    "ids repeated": (array("shape_vertices", lambda v: np.r_[v[1], v[1], v[2:]].astype(np.int32)), "not ascending"),
    "deltas too few": (array("shape_deltas", lambda d: d[1:]), "shape_deltas does not match"),
    "same name twice": (set_("name", "head-width", 1), "two parameters are named 'head-width'"),
    "empty name": (set_("name", "", 1), "a name is empty"),
    "unknown group": (set_("group", "mood", 2), "unknown group 'mood'"),
    "limits crossed": (set_("minimum", 2, 2), "out of order"),
    "limit not finite": (set_("maximum", 1e999, 2), "not finite"),
    "limit not a number": (set_("maximum", "1", 2), "'maximum' of parameter 'jaw-width' has the wrong type"),
    "limit a bool": (set_("maximum", True, 2), "wrong type"),
    "limit too large": (set_("maximum", 10**400, 2), "too large"),
    "shape missing": (set_("shape", 99, 2), "names a missing shape"),
    "shape negative": (set_("shape", -1, 2), "names a missing shape"),
    "only a negative shape": (
        lambda a: set_("negative_shape", 0, 2)(set_("shape", None, 2)(a)),
        "a negative shape but no",
    ),
    "source kind": (set_("sources", [{"kind": "magic", "object": "x"}], 2), "unknown kind 'magic'"),
    "source sign": (
        set_("sources", [{"kind": "shape_key", "object": "x", "key": "k", "sign": 2}], 2),
        "neither 1 nor -1",
    ),
    "source no object": (set_("sources", [3], 2), "not an object"),
    "parameters no list": (set_("parameters", {}), "'parameters' of its JSON has the wrong type"),
    "mesh gap": (set_("meshes", [{"object": "x", "vertex_start": 5, "vertex_count": 9}]), "have gaps"),
    "mesh short": (set_("meshes", [{"object": "x", "vertex_start": 0, "vertex_count": 9}]), "do not cover"),
    "unit zero": (set_("metres_per_unit", 0), "not above 0"),
    "landmark arrays incomplete": (
        lambda a: {k: v for k, v in a.items() if k != "landmark_triangle"},
        "landmark_triangle is missing",
    ),
    "landmark triangle": (array("landmark_triangle", put(0, 99999)), "a landmark names a missing triangle"),
    "landmark count": (array("landmark_confidence", lambda c: c[:68]), "landmark_confidence has shape"),
    "landmark weights": (array("landmark_barycentric", put((0, 0), 3)), "barycentric weights"),
    "landmark confidence": (array("landmark_confidence", put(0, 2)), "outside 0…1"),
    "pickle": (array("part", lambda p: np.array([{"a": 1}] * len(p), dtype=object)), "pickle, which is never read"),
    "pickle as json": (array("json", lambda p: np.array([{"a": 1}], dtype=object)), "pickle, which is never read"),
    "pickle as detector": (lambda a: a | {"detector_x": np.array([{}], dtype=object)}, "pickle, which is never read"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_one_sentence(rig: RigSpec, tmp_path: Path, name: str) -> None:
    change, message = BAD[name]
    path = tmp_path / "bad.npz"
    np.savez_compressed(path, **change(contents(rig, tmp_path)))
    with pytest.raises(UserError) as caught:
        RigSpec.load(path)
    assert message in caught.value.message
    assert caught.value.message.startswith(f"{path} is not a usable rig spec (")
    assert caught.value.message.endswith("): export the rig again.")
    assert "\n" not in caught.value.message
    assert caught.value.kind == "bad_spec"


def test_files_that_are_no_archive(rig: RigSpec, tmp_path: Path) -> None:
    good = tmp_path / "rig.npz"
    rig.save(good)
    whole = good.read_bytes()
    with pytest.raises(UserError, match="There is no rig spec"):
        RigSpec.load(tmp_path / "none.npz")
    with pytest.raises(UserError, match="is a folder"):
        RigSpec.load(tmp_path)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for data in (b"", b"PK", whole[: len(whole) // 2], whole[:-30], bytes(flipped), b"\x80\x04N."):
        bad = tmp_path / "bad.npz"
        bad.write_bytes(data)
        with pytest.raises(UserError, match="damaged"):
            RigSpec.load(bad)


def test_what_a_header_promises_is_checked_before_it_is_allocated(rig: RigSpec, tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    arrays = contents(rig, tmp_path)
    header = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
    text = "{'descr': '<f4', 'fortran_order': False, 'shape': (400000000, 3), }"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, values in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                if name == "neutral":
                    member.write(header + text.ljust(117).encode() + b"\n")
                else:
                    np.lib.format.write_array(member, values)
    tracemalloc.start()
    with pytest.raises(UserError, match="more than 4 GiB"):
        RigSpec.load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


def test_a_spec_made_in_code_is_checked_too(rig: RigSpec) -> None:
    embedding = rig.landmarks
    assert embedding is not None
    wrong = LandmarkEmbedding(embedding.triangle, embedding.barycentric * np.float32(2), embedding.confidence)
    with pytest.raises(ValueError, match="barycentric"):
        rig.with_landmarks(wrong)
    none = LandmarkEmbedding(np.full(478, -1, np.int32), np.zeros((478, 3), np.float32), np.zeros(478, np.float32))
    assert rig.with_landmarks(none).landmarks is none
