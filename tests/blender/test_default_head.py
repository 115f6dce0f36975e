# SPDX-License-Identifier: GPL-3.0-or-later
"""The default head in Blender: a small description of nine patches, one a material; the real head where it is at hand.

The real head comes from the file that RIGFIT_TEST_HEAD names (made by `rigfit.rig.default_head`), or is built here if
this environment has the assets and pillow.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import bpy
import numpy as np
import pytest
from rigs import evaluated

from blender_addon.messages import RigError
from blender_addon.rig.default_head import build_default_head, build_steps, paint_brow, paint_lash
from blender_addon.rig.names import PARTS
from blender_addon.rig.parameters import discover

MATERIALS = ["Skin", "Lips", "Eye", "Iris", "Lash", "Brow", "Teeth", "Tongue", "Mouth"]
PART = [PARTS.index(name) for name in ("skin", "lips", "eye", "iris", "lash", "brow", "teeth", "tongue", "other")]
PATCH_M = 0.05
KEYS = ["a-incr", "a-decr", "jawOpen", "mundÖffnen"]


def patches() -> tuple[dict, dict[str, np.ndarray]]:
    """Nine squares of 2 × 2 quads that look along −Y, a material each, in three rows."""
    steps = np.linspace(0, 1, 3)
    u, w = (axis.ravel() for axis in np.meshgrid(steps, steps))
    quad = np.array([[0, 1, 4, 3], [1, 2, 5, 4], [3, 4, 7, 6], [4, 5, 8, 7]])
    vertices, polygons, uv = [], [], []
    for i, name in enumerate(MATERIALS):
        x, z = (i % 3 - 1.5) * PATCH_M, (1.5 - i // 3 - 1) * PATCH_M
        vertices.append(np.stack([x + u * PATCH_M, np.zeros(9), z + w * PATCH_M], axis=-1))
        polygons.append(quad + 9 * i)
        corner = np.stack([u, w], axis=-1)[quad]
        if name in ("Eye", "Iris"):  # on the iris, or far from it
            corner = 0.5 + (corner - 0.5) * 0.08 + (0.3 if name == "Eye" else 0.0)
        uv.append(corner)
    lip = np.repeat([name == "Lips" for name in MATERIALS], 9)
    meta = {
        "schema": "rigfit.head/1",
        "parts": list(PARTS),
        "materials": MATERIALS,
        "attributes": ["lip", "lid", "flush", "scalp"],
        "keys": KEYS,
        "pairs": {"a": ["a-incr", "a-decr"]},
        "groups": {"a": "identity", "a-incr": "identity", "a-decr": "identity", "jawOpen": "expression"},
        "appearance": [
            {"name": name, "minimum": 0.0, "maximum": 1.0, "default": 0.25, "description": f"about {name}"}
            for name in ("skin_tone", "lip_color", "iris_color", "eyebrow_strength")
        ],
        "brow": {"curve_mm": [[5, 5, 5], [25, 6, 5]], "canvas_mm": [0, 0, 30, 11]},
        "iris_uv_radius": 0.064,
    }
    count = 81
    arrays = {
        "vertices": np.concatenate(vertices).astype(np.float32),
        "polygons": np.concatenate(polygons).astype(np.int32),
        "uv": np.concatenate(uv).astype(np.float32),
        "part": np.repeat(PART, 4).astype(np.uint8),
        "material": np.repeat(np.arange(9), 4).astype(np.uint8),
        "attributes": np.stack([lip, np.zeros(count), np.zeros(count), np.zeros(count)]).astype(np.float32),
        "key_offsets": np.array([0, 2, 3, 4, 5], dtype=np.int64),
        "key_vertices": np.array([3, 80, 3, 10, 0], dtype=np.int32),
        "key_deltas": np.array(
            [[0, -0.01, 0], [0.003, 0, 0], [0, 0.01, 0], [0, 0, -0.02], [0, 0, 0.001]], dtype=np.float32
        ),
    }
    return meta, arrays


def write(path: Path, meta: dict, arrays: dict[str, np.ndarray]) -> Path:
    np.savez_compressed(path, json=np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8), **arrays)
    return path


@pytest.fixture
def head(tmp_path: Path) -> bpy.types.Object:
    return build_default_head(write(tmp_path / "patches.npz", *patches()))


def render(
    path: Path, centre: tuple[float, float, float], width_m: float, size: int = 64, samples: int = 8
) -> np.ndarray:
    """(H,W,3) linear light, first row at the top: a flat white surrounding, seen from −Y without perspective."""
    scene = bpy.context.scene
    if scene.camera is None:
        world = bpy.data.worlds.new("white")
        if bpy.app.version < (5, 0, 0):
            world.use_nodes = True
        world.node_tree.nodes["Background"].inputs[0].default_value = (1, 1, 1, 1)
        scene.world = world
        camera = bpy.data.cameras.new("view")
        camera.type = "ORTHO"
        scene.camera = bpy.data.objects.new("view", camera)
        scene.collection.objects.link(scene.camera)
    scene.camera.data.ortho_scale = width_m
    scene.camera.location = (centre[0], centre[1] - 1.0, centre[2])
    scene.camera.rotation_euler = (np.pi / 2, 0, 0)
    scene.render.engine = "CYCLES"
    scene.cycles.samples, scene.cycles.seed, scene.cycles.use_denoising = samples, 1, False
    scene.cycles.use_adaptive_sampling = False
    scene.view_settings.view_transform = "Raw"
    scene.render.resolution_x = scene.render.resolution_y = size
    scene.render.image_settings.file_format = "OPEN_EXR"
    scene.render.filepath = str(path)
    bpy.ops.render.render(write_still=True)
    image = bpy.data.images.load(str(path), check_existing=False)
    pixels = np.array(image.pixels[:]).reshape(size, size, -1)[::-1, :, :3]
    bpy.data.images.remove(image)
    return pixels


def patch_colours(head: bpy.types.Object, path: Path) -> dict[str, np.ndarray]:
    picture = render(path, (0.0, 0.0, 0.0), 3 * PATCH_M, size=63)
    return {
        name: picture[21 * (i // 3) + 4 : 21 * (i // 3) + 17, 21 * (i % 3) + 4 : 21 * (i % 3) + 17].mean(axis=(0, 1))
        for i, name in enumerate(MATERIALS)
    }


class TestPatches:
    def test_keys_start_at_zero_with_their_names_and_shapes(self, head: bpy.types.Object) -> None:
        blocks = head.data.shape_keys.key_blocks
        assert [block.name for block in blocks] == ["Basis", *KEYS]
        assert [block.value for block in blocks[1:]] == [0.0] * 4
        assert {(block.slider_min, block.slider_max) for block in blocks[1:]} == {(0.0, 1.0)}
        rest = patches()[1]["vertices"]
        assert np.allclose(evaluated(head), rest, atol=1e-7)
        blocks["a-incr"].value = 0.5
        blocks["jawOpen"].value = 1.0
        moved = rest.copy()
        moved[3] += (0, -0.005, 0)
        moved[80] += (0.0015, 0, 0)
        moved[10] += (0, 0, -0.02)
        assert np.allclose(evaluated(head), moved, atol=1e-7)

    def test_mesh_carries_uv_parts_and_materials(self, head: bpy.types.Object) -> None:
        mesh, (_, arrays) = head.data, patches()
        assert [material.name for material in mesh.materials] == MATERIALS
        part = np.zeros(len(mesh.polygons), dtype=np.int32)
        mesh.attributes["rigfit_part"].data.foreach_get("value", part)
        assert part.tolist() == arrays["part"].tolist()
        uv = np.zeros(len(mesh.loops) * 2, dtype=np.float32)
        mesh.uv_layers["UVMap"].data.foreach_get("uv", uv)
        assert np.allclose(uv.reshape(-1, 4, 2), arrays["uv"])
        lip = np.zeros(len(mesh.vertices), dtype=np.float32)
        mesh.attributes["lip"].data.foreach_get("value", lip)
        assert lip.tolist() == arrays["attributes"][0].tolist()
        assert not mesh.validate(), "Blender had to repair the mesh"
        flat = [polygon.index for polygon in mesh.polygons if not polygon.use_smooth]
        assert flat == [], "only a cap (part other, material Skin) is flat"

    def test_appearance_properties_have_limits(self, head: bpy.types.Object) -> None:
        for name in ("skin_tone", "lip_color", "iris_color", "eyebrow_strength"):
            assert head[name] == 0.25
            ui = head.id_properties_ui(name).as_dict()
            assert (ui["min"], ui["max"], ui["default"]) == (0.0, 1.0, 0.25)
            assert ui["description"] == f"about {name}"
        assert head.animation_data is None

    def test_notes_make_parameters(self, head: bpy.types.Object) -> None:
        notes = json.loads(head["rigfit"])
        assert notes["pairs"] == {"a": ["a-incr", "a-decr"]}
        assert notes["appearance"] == ["skin_tone", "lip_color", "iris_color", "eyebrow_strength"]
        assert notes["parts"]["Mouth"] == "other"
        assert set(notes["parts"].values()) == set(PARTS) - {"hair"}
        found = {parameter.name: parameter for parameter in discover([head]).parameters}
        assert (found["a"].group, found["a"].minimum, found["a"].maximum) == ("identity", -1.0, 1.0)
        assert found["jawOpen"].group == "expression"
        assert (found["skin_tone"].group, found["skin_tone"].default) == ("appearance", 0.25)
        assert "a-incr" not in found

    def test_each_property_colours_its_own_part(self, head: bpy.types.Object, tmp_path: Path) -> None:
        before = patch_colours(head, tmp_path / "before.exr")
        assert before["Skin"][0] > 1.3 * before["Skin"][2], "skin is reddish"
        assert all(np.isfinite(colour).all() and colour.max() > 1e-4 for colour in before.values())
        for name, changed in {
            "skin_tone": {"Skin", "Lips"},
            "lip_color": {"Lips"},
            "iris_color": {"Iris"},
            "eyebrow_strength": {"Brow"},
        }.items():
            head[name] = 1.0
            head.update_tag()
            after = patch_colours(head, tmp_path / "after.exr")
            seen = {part for part in MATERIALS if np.abs(after[part] - before[part]).max() > 0.01}
            assert seen == changed, name
            if name in ("skin_tone", "lip_color", "eyebrow_strength"):
                assert after[min(changed)].sum() < before[min(changed)].sum(), f"{name}: 1 is the dark end"
            head[name] = 0.25

    def test_images_travel_inside_the_file(self, head: bpy.types.Object, tmp_path: Path) -> None:
        before = patch_colours(head, tmp_path / "before.exr")
        bpy.ops.wm.save_as_mainfile(filepath=str(tmp_path / "head.blend"))
        bpy.ops.wm.open_mainfile(filepath=str(tmp_path / "head.blend"))
        opened = bpy.data.objects["Head"]
        assert {image.name for image in bpy.data.images if image.packed_file} >= {"rigfit brow", "rigfit lash"}
        after = patch_colours(opened, tmp_path / "after.exr")
        for name in MATERIALS:
            assert np.allclose(after[name], before[name], atol=1e-3), name
        assert opened.id_properties_ui("skin_tone").as_dict()["max"] == 1.0

    def test_second_head_beside_the_first(self, head: bpy.types.Object, tmp_path: Path) -> None:
        second = build_default_head(write(tmp_path / "again.npz", *patches()))
        assert second.name == "Head.001"
        parts = json.loads(second["rigfit"])["parts"]
        assert parts["Skin.001"] == "skin"
        assert [material.name for material in second.data.materials] == list(parts)


@pytest.mark.parametrize(
    "damage",
    ["missing", "no zip", "schema", "array", "index", "offsets", "long name", "material"],
)
def test_bad_description_adds_nothing(damage: str, tmp_path: Path) -> None:
    meta, arrays = patches()
    path = tmp_path / "bad.npz"
    if damage == "no zip":
        path.write_bytes(b"PK no")
    elif damage != "missing":
        if damage == "schema":
            meta["schema"] = "rigfit.head/9"
        elif damage == "array":
            del arrays["uv"]
        elif damage == "index":
            arrays["polygons"][0, 0] = 81
        elif damage == "offsets":
            arrays["key_offsets"] = arrays["key_offsets"][:-1]
        elif damage == "long name":
            meta["keys"] = ["ä" * 32, *KEYS[1:]]
        elif damage == "material":
            meta["materials"] = ["Slime", *MATERIALS[1:]]
        write(path, meta, arrays)
    with pytest.raises(RigError) as caught:
        build_default_head(path)
    assert caught.value.kind == "bad_head_description"
    assert str(path) in caught.value.message
    assert len(bpy.data.objects) == len(bpy.data.meshes) == len(bpy.data.materials) == 0


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_head_that_was_cancelled_leaves_nothing(tmp_path: Path, share: float) -> None:
    path = tmp_path / "head.npz"
    write(path, *patches())
    total = sum(1 for _ in build_steps(path))
    bpy.ops.wm.read_factory_settings(use_empty=True)
    steps = build_steps(path)
    for _ in range(max(1, int(share * total))):
        next(steps)
        assert not bpy.context.scene.objects, "the head joins the scene when it is whole"
    steps.close()
    assert len(bpy.data.objects) == len(bpy.data.meshes) == len(bpy.data.materials) == len(bpy.data.images) == 0


def test_painted_hair_is_the_same_every_time() -> None:
    meta = patches()[0]["brow"]
    brow = paint_brow(meta["curve_mm"], meta["canvas_mm"])
    assert np.array_equal(brow, paint_brow(meta["curve_mm"], meta["canvas_mm"]))
    assert brow.shape == (198, 540)
    assert brow.min() == 0.0
    assert 0.3 < brow[60:140, 150:400].mean() < 0.95
    # Single hairs, not a smear: along the brow the opacity goes up and down.
    assert np.abs(np.diff(brow[100, 100:440])).mean() > 0.02
    lash = paint_lash()
    assert lash[0].min() > 0.5, "the roots make a line along the lid"
    assert lash[-1].max() < 0.2, "the tips end inside the picture"


@pytest.fixture
def real_head(tmp_path: Path) -> bpy.types.Object:
    path = os.environ.get("RIGFIT_TEST_HEAD")
    if not path:
        pytest.importorskip("PIL", reason="RIGFIT_TEST_HEAD names no head description and pillow is missing")
        from rigfit.errors import UserError
        from rigfit.rig.default_head import build_head_description

        path = str(tmp_path / "head.npz")
        try:
            build_head_description(path)
        except UserError as error:
            pytest.skip(error.message)
    return build_default_head(path)


class TestRealHead:
    def test_all_keys_at_zero_and_the_face_is_seen(self, real_head: bpy.types.Object, tmp_path: Path) -> None:
        blocks = real_head.data.shape_keys.key_blocks
        assert len(blocks) > 250
        assert all(block.value == 0.0 for block in blocks[1:])
        basis = np.zeros(len(real_head.data.vertices) * 3, dtype=np.float32)
        blocks[0].data.foreach_get("co", basis)
        assert np.allclose(evaluated(real_head), basis.reshape(-1, 3), atol=1e-7)
        assert not real_head.data.validate()

        eyes = np.zeros(len(real_head.data.polygons), dtype=np.int32)
        real_head.data.attributes["rigfit_part"].data.foreach_get("value", eyes)
        iris = [real_head.data.polygons[i].center for i in np.nonzero(eyes == PARTS.index("iris"))[0]]
        left = np.mean([c for c in iris if c.x > 0], axis=0)
        view = (float(left[0]), 0.0, float(left[2]))

        def shot() -> np.ndarray:
            return render(tmp_path / "eye.exr", view, 0.04, size=32, samples=4)

        open_eye = shot()
        middle = (slice(13, 19), slice(13, 19))
        assert open_eye[middle].mean() < 0.5 * open_eye[26:].mean(), "pupil and iris are darker than the cheek"
        blocks["eyeBlinkLeft"].value = 1.0
        assert shot()[middle].mean() > 2 * open_eye[middle].mean(), "the lid covers the pupil"
        blocks["eyeBlinkLeft"].value = 0.0
        real_head["iris_color"] = 1.0
        real_head.update_tag()
        assert np.abs(shot()[10:22, 10:22] - open_eye[10:22, 10:22]).mean() > 0.01
