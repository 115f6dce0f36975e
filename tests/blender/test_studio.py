# SPDX-License-Identifier: GPL-3.0-or-later
"""The studio: exact cameras, measured light, and an open file that is as it was."""

from __future__ import annotations

import hashlib
import math

import bpy
import numpy as np
import pytest

from blender_addon.messages import RigError
from blender_addon.studio.render import render
from blender_addon.studio.sampling import _turn
from blender_addon.studio.scene import studio_scene

DARK = {"strength": 0.0, "world": 0.0, "background": [0.0, 0.0, 0.0]}
FRONT = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 1.0, 0.0]])


def camera(width=64, height=64, focal_px=160.0, principal=None, rotation=FRONT, translation=(0.0, 0.0, 1.0)) -> dict:
    return {
        "width": width,
        "height": height,
        "focal_px": focal_px,
        "principal_px": list(principal or (width / 2, height / 2)),
        "rotation": np.asarray(rotation).tolist(),
        "translation": list(translation),
    }


def project(view: dict, points: np.ndarray) -> np.ndarray:
    """(N,2) pixels of (N,3) metres, written out once more from docs/architecture.md."""
    x = points @ np.array(view["rotation"]).T + np.array(view["translation"])
    return view["focal_px"] * x[:, :2] / x[:, 2:] + np.array(view["principal_px"])


SKEWED = {
    "landscape, shifted, turned": camera(
        240, 176, 420.0, (151.3, 62.7), _turn(2, 12) @ _turn(0, -9) @ _turn(1, 21) @ FRONT, (-0.03, 0.045, 1.1)
    ),
    "portrait, shifted out of the picture": camera(
        140, 230, 700.0, (-35.5, 260.25), _turn(2, -8) @ _turn(1, -17) @ FRONT, (0.16, -0.22, 1.4)
    ),
}


def pixels(path) -> np.ndarray:
    """(H,W,4) float, sRGB 0…255, first row on top."""
    image = bpy.data.images.load(str(path))
    values = np.array(image.pixels[:], dtype=np.float64).reshape(image.size[1], image.size[0], 4)
    bpy.data.images.remove(image)
    return values[::-1] * 255.0


def linear(srgb: np.ndarray) -> np.ndarray:
    share = srgb / 255.0
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def material(kind: str, colour=(1.0, 1.0, 1.0)) -> bpy.types.Material:
    made = bpy.data.materials.new(kind)
    if bpy.app.version < (5, 0):
        made.use_nodes = True
    nodes = made.node_tree.nodes
    nodes.clear()
    shader = nodes.new(f"ShaderNode{kind}")
    shader.inputs["Color"].default_value = (*colour, 1.0)
    made.node_tree.links.new(shader.outputs[0], nodes.new("ShaderNodeOutputMaterial").inputs["Surface"])
    return made


def head(size: float = 0.1, colour=(0.8, 0.4, 0.2)) -> bpy.types.Object:
    """A monkey with a shape key."""
    bpy.ops.mesh.primitive_monkey_add(size=size)
    made = bpy.context.object
    made.data.materials.append(material("BsdfDiffuse", colour))
    made.shape_key_add(name="Basis")
    wide = made.shape_key_add(name="wide")
    wide.value = 0.0
    for point in wide.data:
        point.co.x *= 1.6
    return made


def wall(size: float = 0.2) -> bpy.types.Object:
    """A white matt square that faces −Y."""
    bpy.ops.mesh.primitive_plane_add(size=size, rotation=(math.pi / 2, 0, 0))
    made = bpy.context.object
    made.data.materials.append(material("BsdfDiffuse"))
    return made


def inventory() -> dict[str, list[tuple[str, int]]]:
    """Every datablock of the file with its number of users."""
    out = {}
    for name in dir(bpy.data):
        collection = getattr(bpy.data, name)
        if isinstance(collection, bpy.types.bpy_prop_collection):
            out[name] = sorted((item.name, item.users) for item in collection if hasattr(item, "users"))
    return out


# --- the camera -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metres_per_unit", [1.0, 0.01])
@pytest.mark.parametrize("name", SKEWED)
def test_rendered_points_land_where_the_camera_says(tmp_path, name, metres_per_unit):
    view = SKEWED[name]
    bpy.context.scene.unit_settings.scale_length = metres_per_unit
    wanted = np.array([[0.13, 0.12], [0.86, 0.17], [0.52, 0.48], [0.09, 0.84], [0.91, 0.9]])
    wanted = wanted * [view["width"], view["height"]] + [0.37, -0.21]
    depth = np.array([1.0, 1.15, 0.9, 1.3, 1.05]) * view["translation"][2]
    rays = np.c_[(wanted - view["principal_px"]) / view["focal_px"], np.ones(5)]
    rotation, translation = np.array(view["rotation"]), np.array(view["translation"])
    points = (rays * depth[:, None] - translation) @ rotation
    assert np.allclose(project(view, points), wanted)
    glow = material("Emission")
    for point, z in zip(points, depth, strict=True):
        bpy.ops.mesh.primitive_ico_sphere_add(
            subdivisions=3, radius=1.5 * z / view["focal_px"] / metres_per_unit, location=point / metres_per_unit
        )
        bpy.context.object.data.materials.append(glow)
    render(view, str(tmp_path / "points.png"), light=DARK, samples=128)
    bright = linear(pixels(tmp_path / "points.png")[..., 0])
    assert bright.shape == (view["height"], view["width"])
    v, u = np.indices(bright.shape) + 0.5  # the centre of the first pixel is (0.5, 0.5)
    for expected in wanted:
        near = bright * (np.hypot(u - expected[0], v - expected[1]) < 8)
        assert near.sum() > 3.0
        found = np.array([(near * u).sum(), (near * v).sum()]) / near.sum()
        assert np.abs(found - expected).max() < 0.1


@pytest.mark.parametrize("metres_per_unit", [1.0, 0.01, 2.5])
@pytest.mark.parametrize("name", SKEWED)
def test_agrees_with_blenders_own_projection(name, metres_per_unit):
    from bpy_extras.object_utils import world_to_camera_view
    from mathutils import Vector

    bpy.context.scene.unit_settings.scale_length = metres_per_unit
    head(0.1 / metres_per_unit)
    view = SKEWED[name]
    points = np.random.default_rng(3).uniform(-0.2, 0.2, (50, 3))
    with studio_scene(view) as scene:
        shares = np.array([world_to_camera_view(scene, scene.camera, Vector(p / metres_per_unit)) for p in points])
    found = np.c_[shares[:, 0] * view["width"], (1 - shares[:, 1]) * view["height"]]
    assert np.abs(found - project(view, points)).max() <= 1e-3


@pytest.mark.parametrize("distance", [0.02, 1.0, 3000.0])
def test_clipping_follows_the_rig(tmp_path, distance):
    wall(0.2 * distance)
    bpy.context.scene.unit_settings.scale_length = 0.01
    view = camera(translation=(0, 0, 0.01 * distance))
    render(view, str(tmp_path / "a.png"), light={"world": 1.0, "strength": 0.0}, background=[0, 0, 0], samples=4)
    assert pixels(tmp_path / "a.png")[32, 32, 0] == pytest.approx(255, abs=1)


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("width", 0, "whole numbers"),
        ("height", 100_000, "whole numbers"),
        ("width", "64", "whole numbers"),
        ("width", 64.5, "whole numbers"),
        ("focal_px", float("nan"), "focal_px"),
        ("focal_px", 0.5, "focal_px"),
        ("focal_px", "long", "could not convert"),
        ("principal_px", [1], "principal_px"),
        ("rotation", (2 * FRONT).tolist(), "not a rotation"),
        ("rotation", (-FRONT).tolist(), "not a rotation"),
        ("translation", [0, float("inf"), 1], "translation"),
    ],
)
def test_a_bad_camera_is_refused_in_words(tmp_path, part, value, words):
    head()
    with pytest.raises(RigError, match=words) as caught:
        render({**camera(), part: value}, str(tmp_path / "a.png"))
    assert caught.value.kind == "bad_camera"
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_camera_is_refused(tmp_path):
    view = camera()
    del view["rotation"]
    with pytest.raises(RigError, match="it has no rotation"):
        render(view, str(tmp_path / "a.png"))


# --- the light --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metres_per_unit", [1.0, 0.01])
def test_strength_is_the_brightness_of_a_white_surface(tmp_path, metres_per_unit):
    bpy.context.scene.unit_settings.scale_length = metres_per_unit
    wall(0.2 / metres_per_unit)
    key = {"azimuth_deg": 0, "elevation_deg": 0, "size": 0.05, "fill": 0, "rim": 0, "centre": [0, 0, 0], "size_m": 0.3}
    view = camera(focal_px=640.0)
    render(view, str(tmp_path / "key.png"), light={**key, "strength": 0.5, "world": 0.0}, samples=64)
    colour = linear(pixels(tmp_path / "key.png")[24:40, 24:40, :3]).mean(axis=(0, 1))
    assert colour @ [0.2126, 0.7152, 0.0722] == pytest.approx(0.5, rel=0.02)
    assert colour[0] > 1.05 * colour[2]  # 5600 K is warmer than the white of sRGB
    render(view, str(tmp_path / "world.png"), light={"strength": 0.0, "world": 0.25}, samples=16)
    assert linear(pixels(tmp_path / "world.png")[32, 32, :3]) == pytest.approx([0.25] * 3, rel=0.02)


def test_the_key_light_comes_from_the_side_that_it_says(tmp_path):
    bpy.ops.mesh.primitive_uv_sphere_add(radius=0.1)
    bpy.context.object.data.materials.append(material("BsdfDiffuse"))
    key = {"strength": 0.7, "fill": 0.0, "rim": 0.0, "world": 0.0, "elevation_deg": 0.0}
    means = {}
    for name, change in {
        "right": {"azimuth_deg": 70},
        "left": {"azimuth_deg": -70},
        "above": {"azimuth_deg": 0, "elevation_deg": 70},
    }.items():
        render(camera(), str(tmp_path / "a.png"), light={**key, **change}, background=[0, 0, 0], samples=8)
        grey = linear(pixels(tmp_path / "a.png")[..., 0])
        means[name] = grey[:, 32:].sum() / grey.sum(), grey[:32].sum() / grey.sum()
    assert means["right"][0] > 0.8
    assert means["left"][0] < 0.2
    assert means["above"][1] > 0.8


def test_nothing_of_the_artists_light_leaks_in(tmp_path):
    head()
    view, light = camera(), {"world": 0.3, "strength": 0.4}
    render(view, str(tmp_path / "before.png"), light=light, samples=4)
    scene = bpy.context.scene
    scene.world = bpy.data.worlds.new("sunset")
    scene.world.color = (1, 0, 0)
    if bpy.app.version < (5, 0):
        scene.world.use_nodes = True
    next(n for n in scene.world.node_tree.nodes if n.type == "BACKGROUND").inputs["Strength"].default_value = 9.0
    lamp = bpy.data.objects.new("lamp", bpy.data.lights.new("lamp", "SUN"))
    lamp.data.energy = 50.0
    scene.collection.objects.link(lamp)
    kit = bpy.data.collections.new("kit")
    kit.objects.link(bpy.data.objects.new("inner lamp", lamp.data))
    empty = bpy.data.objects.new("instance", None)
    empty.instance_type, empty.instance_collection = "COLLECTION", kit
    scene.collection.objects.link(empty)
    scene.view_settings.exposure = 2.0
    render(view, str(tmp_path / "after.png"), light=light, samples=4)
    assert np.array_equal(pixels(tmp_path / "before.png"), pixels(tmp_path / "after.png"))
    assert not bpy.data.objects["inner lamp"].hide_render


@pytest.mark.parametrize(
    "light",
    [
        {"strength": -1},
        {"strength": float("nan")},
        {"size": "big"},
        {"temperature_k": 100},
        {"colour": 1},
        {"centre": [0, 0, 0]},
        {"centre": [0, 0], "size_m": 1},
        {"background": [0, 0, 2]},
        {"background": None},
    ],
)
def test_a_bad_light_is_refused(tmp_path, light):
    head()
    with pytest.raises(RigError) as caught:
        render(camera(), str(tmp_path / "a.png"), light=light)
    assert caught.value.kind == "bad_light"


# --- the picture ------------------------------------------------------------------------------------------------------


def test_background_is_exact_and_alpha_is_where_nothing_is(tmp_path):
    head()
    render(camera(), str(tmp_path / "a.png"), background=[0.2, 0.4, 0.6], samples=4)
    solid = pixels(tmp_path / "a.png")
    assert np.rint(solid[0, 0]).tolist() == [51, 102, 153, 255]
    assert (solid[..., 3] == 255).all()
    render(camera(), str(tmp_path / "b.png"), transparent=True, samples=4)
    alpha = pixels(tmp_path / "b.png")[..., 3]
    assert alpha[0, 0] == 0
    assert alpha[32, 32] == 255
    # The same silhouette in both.
    covered, changed = alpha > 0, (solid != solid[0, 0]).any(axis=2)
    assert covered.sum() > 150
    assert (covered ^ changed).mean() < 0.005


def test_the_seed_decides_the_noise(tmp_path):
    head()
    digest = {}
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        render(camera(), str(tmp_path / f"{name}.png"), samples=2, seed=seed)
        digest[name] = hashlib.sha256(pixels(tmp_path / f"{name}.png").tobytes()).hexdigest()
    assert digest["a"] == digest["b"] != digest["c"]


def test_what_the_artist_hides_stays_hidden(tmp_path):
    shown = wall()
    front = head()
    front.location.y = -0.2
    view, light = camera(), {"strength": 0.0, "world": 1.0}

    def centre_is_white(**options) -> bool:
        render(view, str(tmp_path / "a.png"), light=light, samples=4, **options)
        return bool((pixels(tmp_path / "a.png")[32, 32, :3] > 250).all())

    assert not centre_is_white()
    assert centre_is_white(hide=[front.name])
    assert centre_is_white(objects=[shown.name])
    front.hide_render = True
    assert centre_is_white()
    front.hide_render = False
    inner = bpy.data.collections.new("inner")
    bpy.context.scene.collection.children.link(inner)
    inner.objects.link(front)
    bpy.context.scene.collection.objects.unlink(front)
    assert not centre_is_white()
    inner.hide_render = True
    assert centre_is_white()
    inner.hide_render = False
    bpy.context.view_layer.layer_collection.children["inner"].exclude = True
    assert centre_is_white()


def test_nothing_to_render_is_said(tmp_path):
    with pytest.raises(RigError) as caught:
        render(camera(), str(tmp_path / "a.png"))
    assert caught.value.kind == "nothing_to_render"
    made = head()
    with pytest.raises(RigError, match="Nothing would be seen"):
        render(camera(), str(tmp_path / "a.png"), hide=[made.name])


def test_the_artists_frame_is_what_is_rendered(tmp_path):
    made = head()
    key = made.data.shape_keys.key_blocks["wide"]
    for frame, value in ((1, 0.0), (20, 1.0)):
        key.value = value
        key.keyframe_insert("value", frame=frame)
    width = {}
    for frame in (1, 20):
        bpy.context.scene.frame_set(frame)
        render(camera(), str(tmp_path / "a.png"), transparent=True, samples=2)
        width[frame] = (pixels(tmp_path / "a.png")[..., 3].max(axis=0) > 128).sum()
    assert width[20] > 1.4 * width[1]


def test_without_subsurface_is_another_picture_and_the_material_is_as_it_was(tmp_path):
    made = head()
    skin = bpy.data.materials.new("skin")
    if bpy.app.version < (5, 0):
        skin.use_nodes = True
    shader = next(node for node in skin.node_tree.nodes if node.type == "BSDF_PRINCIPLED")
    shader.inputs["Subsurface Weight"].default_value = 0.75
    shader.inputs["Subsurface Scale"].default_value = 0.5
    made.data.materials[0] = skin
    render(camera(), str(tmp_path / "a.png"), samples=2)
    render(camera(), str(tmp_path / "b.png"), samples=2, subsurface=False)
    assert shader.inputs["Subsurface Weight"].default_value == 0.75
    assert not np.array_equal(pixels(tmp_path / "a.png"), pixels(tmp_path / "b.png"))
    shader.inputs["Subsurface Weight"].default_value = 0.0
    render(camera(), str(tmp_path / "c.png"), samples=2)
    assert np.array_equal(pixels(tmp_path / "b.png"), pixels(tmp_path / "c.png"))


def test_denoise_says_whether_it_did(tmp_path):
    head()
    plain = render(camera(), str(tmp_path / "a.png"), samples=1, light={"size": 6.0})
    smooth = render(camera(), str(tmp_path / "b.png"), samples=1, light={"size": 6.0}, denoise=True)
    assert plain["denoised"] is False
    same = np.array_equal(pixels(tmp_path / "a.png"), pixels(tmp_path / "b.png"))
    assert smooth["denoised"] is not same


# --- the open file and the disk ---------------------------------------------------------------------------------------


def test_the_open_file_is_as_it_was(tmp_path):
    made = head()
    scene = bpy.context.scene
    scene.camera = bpy.data.objects.new("mine", bpy.data.cameras.new("mine"))
    scene.collection.objects.link(scene.camera)
    scene.render.resolution_x = 123
    scene.render.filepath = "//mine"
    made.data.shape_keys.key_blocks["wide"].value = 0.3
    before = inventory(), made.matrix_world.copy(), scene.render.engine, scene.world
    for options in ({}, {"transparent": True}, {"seed": -1}, {"light": {"size": 0}}, {"hide": [made.name]}):
        try:
            render(camera(), str(tmp_path / "a.png"), samples=1, **options)
        except RigError:
            assert options
        assert (inventory(), made.matrix_world, scene.render.engine, scene.world) == before
        assert bpy.context.scene == scene
        assert bpy.context.view_layer.objects.active == made
    assert made.data.shape_keys.key_blocks["wide"].value == pytest.approx(0.3)
    assert (scene.render.resolution_x, scene.render.filepath) == (123, "//mine")


def test_an_exception_inside_the_studio_leaves_nothing_behind():
    head()
    before = inventory()
    with pytest.raises(ZeroDivisionError), studio_scene(camera()):
        raise ZeroDivisionError
    assert inventory() == before


@pytest.mark.parametrize("name", ["frame ##.png", "{blend_name} %04d.png", "Gesicht äöü 顔 🙂.png", "no_extension"])
def test_any_file_name_is_taken_literally(tmp_path, name):
    head()
    folder = tmp_path / "a #1 {x} é"
    folder.mkdir()
    assert render(camera(8, 8), str(folder / name), samples=1)["seconds"] > 0
    assert [path.name for path in folder.iterdir()] == [name]
    assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_an_unwritable_place_is_refused_and_the_old_picture_stays(tmp_path):
    head()
    old = tmp_path / "old.png"
    old.write_bytes(b"old")
    for out in (tmp_path / "missing" / "a.png", old / "a.png", tmp_path):
        with pytest.raises(RigError) as caught:
            render(camera(), str(out), samples=1)
        assert caught.value.kind == "file_unwritable"
    with pytest.raises(RigError):
        render({**camera(), "width": 1}, str(old))
    assert [path.name for path in tmp_path.iterdir()] == ["old.png"]
    assert old.read_bytes() == b"old"


@pytest.mark.parametrize("options", [{"samples": 0}, {"samples": True}, {"seed": 2**31}, {"threads": 0}])
def test_bad_options_are_refused(tmp_path, options):
    head()
    with pytest.raises(RigError) as caught:
        render(camera(), str(tmp_path / "a.png"), **options)
    assert caught.value.kind == "bad_request"


# --- the add-on -------------------------------------------------------------------------------------------------------


def test_the_add_on_registers_exports_and_unregisters(tmp_path):
    import blender_addon

    entries = len(bpy.types.TOPBAR_MT_file_export._dyn_ui_initialize())
    blender_addon.register()
    try:
        with pytest.raises(RuntimeError, match="Nothing is selected"):
            bpy.ops.rigfit.export_rig(filepath=str(tmp_path / "rig.npz"))
        head()
        assert bpy.ops.rigfit.export_rig(filepath=str(tmp_path / "rig.npz")) == {"FINISHED"}
        with np.load(tmp_path / "rig.npz", allow_pickle=False) as spec:
            assert len(spec["neutral"]) == len(bpy.context.object.data.vertices)
        assert len(bpy.types.TOPBAR_MT_file_export._dyn_ui_initialize()) == entries + 1
    finally:
        blender_addon.unregister()
    assert len(bpy.types.TOPBAR_MT_file_export._dyn_ui_initialize()) == entries
    assert not hasattr(bpy.types, "RIGFIT_OT_export_rig")
