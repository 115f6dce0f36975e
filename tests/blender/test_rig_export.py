# SPDX-License-Identifier: Apache-2.0
"""The exported rig spec against Blender's own evaluated mesh, for every kind of rig that is known to break tools."""

from __future__ import annotations

import math
from pathlib import Path

import bpy
import numpy as np
import pytest
import rigs
from mathutils import Matrix
from rigfit.rig.spec import RigSpec
from rigs import Spec, evaluated, largest_error

from blender_addon.messages import RigError
from blender_addon.rig.export import export_rig, export_steps
from blender_addon.rig.parameters import apply_parameters, read_spec

EXACT_M = 1e-6  # the heads are 0.2 m: this is 1/200,000 of their size, and float32


def exported(tmp_path: Path, *objects: str, **options: bool) -> Spec:
    """Export, load once with the backend's reader (every check and the hash), and return the raw file."""
    path = tmp_path / "rig.npz"
    updates: list[int] = []

    def count(*_: object) -> None:
        updates.append(1)

    bpy.app.handlers.depsgraph_update_post.append(count)
    try:
        export_rig(str(path), list(objects) or None, **options)
    finally:
        bpy.app.handlers.depsgraph_update_post.remove(count)
    assert RigSpec.load(path).names == tuple(Spec(path).parameters)
    spec = Spec(path)
    spec.updates = len(updates)
    return spec


def check_direct(tmp_path: Path, spec: Spec) -> None:
    """Exact, and read from the keys: had the first comparison failed, Blender would have evaluated each key."""
    assert 0 < spec.updates <= 8
    check_exact(tmp_path, spec)


def check_exact(tmp_path: Path, spec: Spec) -> None:
    assert spec.json["linear"], spec.json["warnings"]
    assert largest_error(tmp_path / "rig.npz", apply_parameters) < EXACT_M


def outward_share(spec: Spec, part: slice = slice(None)) -> float:
    """Share of triangles whose normal points away from the middle."""
    points = spec.arrays["neutral"].astype(np.float64)[spec.arrays["triangles"][part]]
    normal = np.cross(points[:, 1] - points[:, 0], points[:, 2] - points[:, 0])
    return float(((normal * (points.mean(axis=1) - points.reshape(-1, 3).mean(axis=0))).sum(axis=1) > 0).mean())


def test_plain_rig(tmp_path: Path) -> None:
    head = rigs.add_head()
    spec = exported(tmp_path)
    assert np.abs(spec.arrays["neutral"] - evaluated(head)).max() < 1e-7
    assert list(spec.parameters) == ["jawOpen", "nose-size", "cheek"]
    assert spec.parameters["cheek"]["negative_shape"] is not None
    assert len(spec.arrays["triangles"]) == 2 * rigs.SEGMENTS * (rigs.RINGS - 1)
    assert outward_share(spec) == 1.0
    assert spec.json["meshes"] == [{"object": "Head", "vertex_start": 0, "vertex_count": 110, "control_vertices": 110}]
    check_direct(tmp_path, spec)


def test_only_rows_that_move_are_stored(tmp_path: Path) -> None:
    rigs.add_head(keys=["jawOpen"])
    spec = exported(tmp_path)
    moving = np.flatnonzero(np.abs(rigs.bump(rigs.head_data()[0], "jawOpen")).max(axis=1) > 1e-7)
    assert 0 < len(moving) < 110
    assert spec.arrays["shape_vertices"].tolist() == moving.tolist()


def test_the_start_values_and_mutes_do_not_matter_and_come_back(tmp_path: Path) -> None:
    head = rigs.add_head()
    head.data.shape_keys.key_blocks["jawOpen"].mute = True
    first = exported(tmp_path)
    blocks = head.data.shape_keys.key_blocks
    for block, value in zip(blocks[1:], (0.3, 0.9, 0.1, 1.0), strict=True):
        block.value = value
    blocks["nose-size"].mute = True
    blocks["cheek-in"].slider_max = 0.5  # its value 1.0 now lies outside the range
    blocks["cheek-in"].slider_max = 1.0
    head.active_shape_key_index = 2
    head["mine"] = 3.5
    before = [(block.value, block.mute) for block in blocks]
    second = exported(tmp_path)
    assert [(block.value, block.mute) for block in blocks] == before
    assert (head.active_shape_key_index, head["mine"], head.mode) == (2, 3.5, "OBJECT")
    assert second.json["rig_hash"] == first.json["rig_hash"]
    assert any("nose-size of Head is muted" in warning for warning in second.json["warnings"])
    check_exact(tmp_path, second)


def test_values_outside_a_narrowed_range_come_back(tmp_path: Path) -> None:
    head = rigs.add_head(keys=["jawOpen"])
    key = head.data.shape_keys.key_blocks["jawOpen"]
    key.value = 0.75
    key.slider_max = 0.5
    value = key.value
    exported(tmp_path)
    assert (key.value, key.slider_max) == (value, 0.5)


def test_the_state_comes_back_after_an_error(tmp_path: Path) -> None:
    head = rigs.add_head()
    key = head.data.shape_keys.key_blocks["jawOpen"]
    key.value = 0.3

    def stop(done: int, total: int, text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_rig(str(tmp_path / "rig.npz"), progress=stop)
    assert key.value == pytest.approx(0.3)
    assert list(tmp_path.iterdir()) == []


def test_slider_ranges_beyond_one(tmp_path: Path) -> None:
    head = rigs.add_head(keys=[])
    rigs.add_key(head, "a", low=-2.0, high=3.0)
    rigs.add_key(head, "b", low=0.5, high=1.5)
    spec = exported(tmp_path)
    assert spec.parameters["b"]["default"] == 0.5
    check_direct(tmp_path, spec)


def test_relative_key_and_vertex_group_mask(tmp_path: Path) -> None:
    head = rigs.add_head(keys=["smile", "wide"])
    blocks = head.data.shape_keys.key_blocks
    blocks["wide"].relative_key = blocks["smile"]
    group = head.vertex_groups.new(name="left side")
    for vertex in head.data.vertices:
        if vertex.co.x > 0:
            group.add([vertex.index], float(vertex.co.x * 10), "REPLACE")
    blocks["smile"].vertex_group = "left side"
    rigs.add_key(head, "lost").vertex_group = "left side"
    head.data.shape_keys.key_blocks["lost"].vertex_group = ""
    spec = exported(tmp_path)
    right = spec.arrays["neutral"][:, 0] < -1e-6
    assert np.abs(spec.delta("smile")[right]).max() == 0
    raw = rigs.bump(rigs.head_data()[0], "wide") - rigs.bump(rigs.head_data()[0], "smile")
    assert np.abs(spec.delta("wide") - raw).max() < 1e-7
    check_direct(tmp_path, spec)


TRANSFORMS = {
    "moved and turned": Matrix.Translation((3, -2, 1.5)) @ Matrix.Rotation(0.7, 4, (1, 2, 3)),
    "non-uniform scale": Matrix.Diagonal((1.5, 0.5, 2.0, 1)),
    "negative scale": Matrix.Diagonal((-1, 1, 1, 1)),
    "all negative": Matrix.Diagonal((-1, -2, -1, 1)) @ Matrix.Rotation(0.4, 4, "X"),
    "Y-up import": Matrix.Rotation(math.pi / 2, 4, "X") @ Matrix.Diagonal((0.01, 0.01, 0.01, 1)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_object_transforms(tmp_path: Path, name: str) -> None:
    head = rigs.add_head()
    plain = exported(tmp_path)
    head.matrix_world = TRANSFORMS[name]
    spec = exported(tmp_path)
    assert [(p["name"], p["minimum"], p["maximum"]) for p in spec.parameters.values()] == [
        (p["name"], p["minimum"], p["maximum"]) for p in plain.parameters.values()
    ]
    assert np.abs(spec.arrays["neutral"] - evaluated(head)).max() < 1e-6
    assert outward_share(spec) == 1.0
    check_direct(tmp_path, spec)


def test_a_parent_moves_the_head(tmp_path: Path) -> None:
    empty = bpy.data.objects.new("Root", None)
    bpy.context.scene.collection.objects.link(empty)
    head = rigs.add_head()
    head.parent = empty
    empty.location, empty.scale = (1, 2, 3), (2, 2, 2)
    spec = exported(tmp_path)
    assert np.abs(spec.arrays["neutral"].mean(axis=0) - (1, 2, 3)).max() < 0.05
    check_direct(tmp_path, spec)


def test_a_scene_in_centimetres_gives_metres(tmp_path: Path) -> None:
    head = rigs.add_head(keys=[])
    points, _ = rigs.head_data(size=10)
    head.data.vertices.foreach_set("co", points.reshape(-1))
    rigs.add_key(head, "jawOpen", rigs.bump(rigs.head_data()[0], "jawOpen") * 100)
    bpy.context.scene.unit_settings.scale_length = 0.01
    spec = exported(tmp_path)
    assert spec.json["metres_per_unit"] == pytest.approx(0.01)
    assert np.abs(spec.arrays["neutral"] - rigs.head_data()[0]).max() < 1e-6
    assert np.abs(spec.delta("jawOpen") - rigs.bump(rigs.head_data()[0], "jawOpen")).max() < 1e-6
    check_direct(tmp_path, spec)
    bpy.context.scene.unit_settings.system = "NONE"  # then Blender ignores the scale
    assert exported(tmp_path).json["metres_per_unit"] == 1.0


def test_subdivision(tmp_path: Path) -> None:
    head = rigs.add_head()
    head.modifiers.new("Subdivision", "SUBSURF").levels = 2
    spec = exported(tmp_path)
    assert len(spec.arrays["neutral"]) > 1500
    assert spec.json["meshes"][0]["control_vertices"] == 110
    assert head.modifiers["Subdivision"].show_viewport
    check_exact(tmp_path, spec)


def test_a_modifier_that_is_switched_off_does_not_count(tmp_path: Path) -> None:
    head = rigs.add_head()
    head.modifiers.new("Subdivision", "SUBSURF").show_viewport = False
    spec = exported(tmp_path)
    assert len(spec.arrays["neutral"]) == 110
    assert not head.modifiers[0].show_viewport


def half_head(keys: dict[str, np.ndarray]) -> bpy.types.Object:
    """The side x ≥ 0 of a grid, whose row x = 0 a mirror merges."""
    axis = np.linspace(0, 0.1, 6)
    points = np.array([(x, -0.05 * math.cos(9 * x), z) for x in axis for z in axis], np.float32)
    faces = [(i * 6 + j, i * 6 + j + 1, i * 6 + j + 7, i * 6 + j + 6) for i in range(5) for j in range(5)]
    head = rigs.add_mesh("Half", points, faces)
    for name, delta in keys.items():
        rigs.add_key(head, name, delta)
    modifier = head.modifiers.new("Mirror", "MIRROR")
    modifier.use_mirror_merge, modifier.merge_threshold = True, 0.001
    return head


def test_mirror_with_merge(tmp_path: Path) -> None:
    random = np.random.RandomState(4)
    delta = random.uniform(-0.01, 0.01, (36, 3)).astype(np.float32)
    delta[:6, 0] = 0  # the seam stays on the plane
    half_head({"a": delta, "b": delta[::-1] * np.array([0, 1, 1], np.float32)})
    spec = exported(tmp_path)
    assert len(spec.arrays["neutral"]) == 66
    check_exact(tmp_path, spec)


def test_a_key_that_tears_the_merged_seam_is_left_out(tmp_path: Path) -> None:
    tear = np.zeros((36, 3), np.float32)
    tear[:3, 0] = 0.01
    half_head({"good": np.full((36, 3), (0, 0.01, 0), np.float32), "tear": tear})
    spec = exported(tmp_path)
    assert list(spec.parameters) == ["good"]
    assert "changes the number of vertices" in spec.left_out["tear"]
    check_exact(tmp_path, spec)


def test_armature_on_top(tmp_path: Path) -> None:
    head = rigs.add_head()
    armature = rigs.add_armature(head)
    pose = [tuple(bone.rotation_euler) for bone in armature.pose.bones]
    head.modifiers.new("Subdivision", "SUBSURF").levels = 1
    spec = exported(tmp_path)
    assert np.abs(spec.arrays["neutral"] - evaluated(head)).max() < 1e-7
    # The bend is in it: the head without its armature is another one.
    head.modifiers["Armature"].show_viewport = False
    assert np.abs(spec.arrays["neutral"] - evaluated(head)).max() > 0.005
    head.modifiers["Armature"].show_viewport = True
    assert [tuple(bone.rotation_euler) for bone in armature.pose.bones] == pose
    check_exact(tmp_path, spec)


def test_an_armature_as_parent(tmp_path: Path) -> None:
    head = rigs.add_head()
    armature = rigs.add_armature(head)
    head.modifiers.clear()
    head.parent, head.parent_type = armature, "ARMATURE"
    bpy.context.view_layer.update()
    spec = exported(tmp_path)
    assert np.abs(spec.arrays["neutral"] - np.array(head.data.vertices[0].co)).max() > 0
    check_exact(tmp_path, spec)


def test_a_modifier_that_is_not_linear_is_named(tmp_path: Path) -> None:
    head = rigs.add_head()
    head.modifiers.new("Smooth", "SMOOTH").iterations = 2
    bend = head.modifiers.new("Round it", "CAST")
    bend.factor = 0.8
    spec = exported(tmp_path)
    assert spec.json["linear"] is False
    (warning,) = [w for w in spec.json["warnings"] if "not linear" in w]
    assert "Round it of Head" in warning
    assert "Smooth" not in warning
    assert all(modifier.show_viewport for modifier in head.modifiers)


def test_several_meshes_driven_together(tmp_path: Path) -> None:
    head, teeth = rigs.add_head("Head", ["jawOpen", "smile"]), rigs.add_head("Teeth", ["jawOpen"])
    teeth.location, teeth.scale = (0, 0.05, 0), (0.5, 0.5, -0.5)
    hat = rigs.add_mesh("Hat", *rigs.head_data())
    spec = exported(tmp_path, "Hat", "Teeth", "Head")
    assert [item["object"] for item in spec.json["meshes"]] == ["Head", "Teeth", "Hat"]
    delta = np.abs(spec.delta("jawOpen")).max(axis=1)
    assert delta[:110].max() > 0 < delta[110:220].max()
    assert delta[220:].max() == 0
    assert np.abs(spec.arrays["neutral"] - evaluated(head, teeth, hat)).max() < 1e-7
    check_direct(tmp_path, spec)


def test_one_mesh_under_two_objects(tmp_path: Path) -> None:
    head = rigs.add_head()
    twin = bpy.data.objects.new("Twin", head.data)
    bpy.context.scene.collection.objects.link(twin)
    twin.location.x = 1
    spec = exported(tmp_path)
    assert len(spec.arrays["neutral"]) == 220
    check_direct(tmp_path, spec)


def test_a_mesh_that_follows_another_by_driver_or_modifier(tmp_path: Path) -> None:
    head, teeth, lashes = (
        rigs.add_head("Head", ["jawOpen"]),
        rigs.add_head("Teeth", ["drop"]),
        rigs.add_head("Lashes", []),
    )
    path = 'key_blocks["jawOpen"].value'
    rigs.drive(teeth.data.shape_keys.key_blocks["drop"], "v", v=(head.data.shape_keys, path))
    modifier = lashes.modifiers.new("Bind", "SURFACE_DEFORM")
    modifier.target = head
    bpy.context.view_layer.objects.active = lashes
    with bpy.context.temp_override(object=lashes, active_object=lashes):
        bpy.ops.object.surfacedeform_bind(modifier="Bind")
    if not modifier.is_bound:
        pytest.skip("this Blender could not bind a surface deform")
    spec = exported(tmp_path, "Head", "Teeth", "Lashes")
    assert list(spec.parameters) == ["jawOpen"]
    delta = np.abs(spec.delta("jawOpen")).max(axis=1)
    assert all(delta[part].max() > 1e-3 for part in (slice(0, 110), slice(110, 220), slice(220, 330)))


def test_a_follower_moves_with_its_leader(tmp_path: Path) -> None:
    head, teeth = rigs.add_head("Head", ["jawOpen"]), rigs.add_head("Teeth", ["drop"])
    path = 'key_blocks["jawOpen"].value'
    rigs.drive(teeth.data.shape_keys.key_blocks["drop"], "v*0.5", v=(head.data.shape_keys, path))
    spec = exported(tmp_path)
    assert np.abs(spec.delta("jawOpen")[110:] - 0.5 * rigs.bump(rigs.head_data()[0], "drop")).max() < 1e-6
    check_exact(tmp_path, spec)


def test_correctives_are_no_sliders_and_are_reported(tmp_path: Path) -> None:
    head = rigs.add_head(keys=["jawOpen", "smile", "fix"])
    keys = head.data.shape_keys
    path = 'key_blocks["{}"].value'.format
    rigs.drive(keys.key_blocks["fix"], "a*b", a=(keys, path("jawOpen")), b=(keys, path("smile")))
    spec = exported(tmp_path)
    assert list(spec.parameters) == ["jawOpen", "smile"]
    assert "corrective" in spec.left_out["fix"]
    assert spec.json["linear"] is False
    assert any("the key fix is driven by" in warning for warning in spec.json["warnings"])
    # Each slider alone is exact all the same.
    for name in spec.parameters:
        apply_parameters(str(tmp_path / "rig.npz"), {"jawOpen": 0.0, "smile": 0.0, name: 0.7})
        assert np.abs(evaluated(head) - spec.vertices({name: 0.7})).max() < EXACT_M


def test_the_driving_property_is_measured(tmp_path: Path) -> None:
    head = rigs.add_head(keys=["up", "down", "free"])
    rigs.add_property(head, "brow", -1.0, 1.0, 0.0)
    blocks = head.data.shape_keys.key_blocks
    rigs.drive(blocks["up"], "max(p,0)", p=(head, '["brow"]'))
    rigs.drive(blocks["down"], "max(-p,0)", p=(head, '["brow"]'))
    head["brow"] = 0.25
    spec = exported(tmp_path)
    assert head["brow"] == 0.25
    assert list(spec.parameters) == ["free", "brow"]
    points = rigs.head_data()[0]
    assert np.abs(spec.delta("brow") - rigs.bump(points, "up")).max() < 1e-6
    assert np.abs(spec.delta("brow", negative=True) + rigs.bump(points, "down")).max() < 1e-6
    check_exact(tmp_path, spec)


def test_a_property_that_moves_out_of_proportion_is_reported(tmp_path: Path) -> None:
    head = rigs.add_head(keys=["up"])
    rigs.add_property(head, "brow")
    rigs.drive(head.data.shape_keys.key_blocks["up"], "p*p", p=(head, '["brow"]'))
    spec = exported(tmp_path)
    assert spec.json["linear"] is False
    assert spec.json["warnings"] == ["The rig is not linear: brow does not move the mesh in proportion to its value"]


def test_appearance_moves_nothing(tmp_path: Path) -> None:
    head = rigs.add_head()
    rigs.add_property(head, "skin_tone", default=0.3)
    head["rigfit"] = '{"appearance": ["skin_tone"]}'
    spec = exported(tmp_path)
    tone = spec.parameters["skin_tone"]
    assert (tone["group"], tone["shape"], tone["default"]) == ("appearance", None, 0.3)
    check_exact(tmp_path, spec)


def test_whole_head_moves_are_pose(tmp_path: Path) -> None:
    points, _ = rigs.head_data()
    head = rigs.add_head(keys=["jawOpen"])
    eyes = rigs.add_head("Eyes", [])
    for obj in (head, eyes):
        rigs.add_key(obj, "head-bigger", points * np.float32(0.2))
        rigs.add_key(obj, "head-turn", np.cross((0, 0, 0.3), points).astype(np.float32))
        rigs.add_key(obj, "head-tall", points * np.array([0, 0, 0.3], np.float32))
    rigs.add_key(eyes, "eyes-turn", np.cross((0, 0, 0.3), points).astype(np.float32))
    spec = exported(tmp_path)
    groups = {name: item["group"] for name, item in spec.parameters.items()}
    assert {name for name, group in groups.items() if group == "pose"} == {"head-bigger", "head-turn"}


def test_a_key_that_moves_nothing_stays_a_parameter_without_a_shape(tmp_path: Path) -> None:
    head = rigs.add_head(keys=["jawOpen"])
    rigs.add_key(head, "tongueOut", np.zeros((110, 3), np.float32))
    spec = exported(tmp_path)
    assert spec.parameters["tongueOut"]["shape"] is None
    check_exact(tmp_path, spec)


def test_parts_and_uv(tmp_path: Path) -> None:
    head, eyes, hat = (
        rigs.add_head("Head", ["a"]),
        rigs.add_head("Pupil_L", ["a"]),
        rigs.add_mesh("Thing", *rigs.head_data()),
    )
    for name in ("Std_Skin_Head", "Lipstick", "Eyelashes"):
        head.data.materials.append(bpy.data.materials.new(name))
    for polygon in head.data.polygons:
        polygon.material_index = polygon.index % 3
    uv = head.data.uv_layers.new(name="UV")
    for loop in head.data.loops:
        uv.uv[loop.index].vector = (loop.vertex_index / 110, loop.index / 1000)
    part = hat.data.attributes.new("rigfit_part", "INT", "FACE")
    part.data.foreach_set("value", [8] * 50 + [99] * (len(hat.data.polygons) - 50))
    spec = exported(tmp_path, "Head", "Pupil_L", "Thing")
    parts = np.array(spec.json["parts"])[spec.arrays["part"]]
    faces = len(parts) // 3
    assert set(parts[:faces]) == {"skin", "lips", "lash"}
    assert set(parts[faces : 2 * faces]) == {"iris"}
    assert set(parts[2 * faces :]) == {"hair", "other"}
    assert np.abs(spec.arrays["uv"][:faces, :, 0] - spec.arrays["triangles"][:faces] / 110).max() < 1e-6
    assert np.abs(spec.arrays["uv"][faces:]).max() == 0
    assert eyes.data.uv_layers.active is None


def test_uv_and_winding_stay_together_in_a_mirrored_object(tmp_path: Path) -> None:
    head = rigs.add_head(keys=["a"])
    uv = head.data.uv_layers.new(name="UV")
    for loop in head.data.loops:
        uv.uv[loop.index].vector = (loop.vertex_index / 110, 0)
    head.scale.x = -1
    spec = exported(tmp_path)
    assert np.abs(spec.arrays["uv"][..., 0] - spec.arrays["triangles"] / 110).max() < 1e-6


def test_names_that_break_tools_survive_the_round_trip(tmp_path: Path) -> None:
    keys = ['quo"te', "back\\slash", "日本語キー", "emoji 😀", "a" * 63, "é" * 40, "new\nline"]
    head = rigs.add_head('He"ad 頭', keys)
    rigs.add_key(head, 'quo"te')
    spec = exported(tmp_path)
    assert len(spec.parameters) == 8
    check_exact(tmp_path, spec)


def test_an_animated_key_is_exported_at_its_default_and_reported(tmp_path: Path) -> None:
    head = rigs.add_head(keys=["jawOpen", "smile"])
    key = head.data.shape_keys.key_blocks["jawOpen"]
    key.value = 0.5
    key.keyframe_insert("value", frame=1)
    spec = exported(tmp_path)
    assert any("jawOpen of Head is animated" in warning for warning in spec.json["warnings"])
    assert np.abs(spec.arrays["neutral"] - rigs.head_data()[0]).max() < 1e-7
    check_exact(tmp_path, spec)


def refused(tmp_path: Path, kind: str, *objects: str) -> str:
    with pytest.raises(RigError) as caught:
        export_rig(str(tmp_path / "rig.npz"), list(objects) or None)
    assert caught.value.kind == kind
    assert list(tmp_path.iterdir()) == []
    return caught.value.message


def test_refusals_say_what_to_do(tmp_path: Path) -> None:
    refused(tmp_path, "no_shape_keys")
    head = rigs.add_head(keys=["jawOpen"])
    keys = head.data.shape_keys
    refused(tmp_path, "object_missing", "Nobody")
    rigs.add_mesh("Cube", *rigs.head_data())
    assert "Cube has no shape keys" in refused(tmp_path, "no_shape_keys", "Cube")
    keys.use_relative = False
    assert "tick Relative" in refused(tmp_path, "absolute_keys")
    keys.use_relative = True
    head.show_only_shape_key = True
    assert "pinned" in refused(tmp_path, "pinned_key")
    head.show_only_shape_key = False
    head.hide_viewport = True
    refused(tmp_path, "hidden", "Head")
    head.hide_viewport = False
    bpy.context.view_layer.objects.active = head
    bpy.ops.object.mode_set(mode="EDIT")
    assert "Edit mode" in refused(tmp_path, "edit_mode")
    assert head.mode == "EDIT"
    bpy.ops.object.mode_set(mode="OBJECT")
    rigs.drive(keys.key_blocks["jawOpen"], "a", a=(head, "location.x"))
    assert "driven by location.x of Head" in refused(tmp_path, "no_parameters")


def test_a_mesh_without_faces_and_an_unwritable_folder(tmp_path: Path) -> None:
    cloud = rigs.add_mesh("Cloud", rigs.head_data()[0], [])
    rigs.add_key(cloud, "a")
    refused(tmp_path, "no_geometry")
    bpy.data.objects.remove(cloud)
    rigs.add_head()
    with pytest.raises(RigError) as caught:
        export_rig(str(tmp_path / "missing" / "rig.npz"))
    assert caught.value.kind == "file_unwritable"


def test_progress_reaches_its_total(tmp_path: Path) -> None:
    rigs.add_head()
    steps: list[tuple[int, int]] = []
    export_rig(str(tmp_path / "rig.npz"), progress=lambda done, total, text: steps.append((done, total)))
    assert steps[-1] == (3, 3)
    done = [number for number, _ in steps]
    assert done == sorted(done)
    assert set(done) == {0, 1, 2, 3}


def test_many_keys_at_once_are_exact_with_few_updates(tmp_path: Path) -> None:
    """200 keys; `measure_export.py` prints what 1,000 keys × 20,000 vertices cost."""
    head = rigs.add_mesh("Head", *rigs.head_data(rings=30, segments=40))
    points = rigs.head_data(rings=30, segments=40)[0]
    random = np.random.RandomState(1)
    for index in range(200):
        rigs.add_key(head, f"key {index}", random.normal(0, 1e-3, points.shape).astype(np.float32))
    check_direct(tmp_path, exported(tmp_path))


HASH = "5e816e8eeeb38270924cfb322814a393642884696bef910732ba3dbb944843a7"


def test_the_rig_hash_is_the_same_in_every_blender(tmp_path: Path) -> None:
    head, teeth = rigs.add_head(), rigs.add_head("Teeth", ["jawOpen"])
    teeth.location, teeth.rotation_euler = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    head.modifiers.new("Subdivision", "SUBSURF").levels = 1
    assert exported(tmp_path).json["rig_hash"] == HASH


def test_bones_leave_nothing_behind_and_cost_no_evaluation_for_each_key(tmp_path: Path) -> None:
    head = rigs.add_head(keys=[f"key {index}" for index in range(60)])
    rigs.add_armature(head)
    head.scale = (1.0, 2.0, -1.0)
    before = {name: len(getattr(bpy.data, name)) for name in ("objects", "meshes", "shape_keys", "armatures")}
    spec = exported(tmp_path)
    assert 0 < spec.updates < 20
    assert {name: len(getattr(bpy.data, name)) for name in before} == before
    check_exact(tmp_path, spec)


@pytest.mark.parametrize("option", ["use_deform_preserve_volume", "use_bone_envelopes"])
def test_other_ways_of_skinning(tmp_path: Path, option: str) -> None:
    head = rigs.add_head()
    rigs.add_armature(head)
    setattr(head.modifiers["Armature"], option, True)
    spec = exported(tmp_path)
    if option == "use_deform_preserve_volume":
        check_exact(tmp_path, spec)
    else:
        # Envelopes weigh by position: either this rig is exact all the same, or the export says that it is not.
        error = largest_error(tmp_path / "rig.npz", apply_parameters)
        assert error < EXACT_M or not spec.json["linear"]


# --- in steps, while the artist works -----------------------------------------------------------------------------------


def test_steps_write_the_same_rig_and_give_it_back_at_every_pause(tmp_path):
    head = rigs.add_head()
    head.data.shape_keys.key_blocks["jawOpen"].value = 0.6
    whole, stepped = tmp_path / "whole.npz", tmp_path / "stepped.npz"
    told = export_rig(str(whole))
    steps = export_steps(str(stepped), scratch=True)
    count = 0
    for _ in steps:
        count += 1
        assert head.data.shape_keys.key_blocks["jawOpen"].value == pytest.approx(0.6)
    assert count > 10
    assert read_spec(str(stepped))["rig_hash"] == told["rig_hash"]
    with np.load(whole) as one, np.load(stepped) as other:
        assert one.files == other.files
        assert all(np.array_equal(one[name], other[name]) for name in one.files)


@pytest.mark.parametrize("change", ["remove key", "remove object", "rename", "edit mode", "vertices"])
def test_steps_stop_when_the_target_changes(tmp_path, change):
    head = rigs.add_head()
    out = tmp_path / "rig.npz"
    steps = export_steps(str(out), objects=[head.name], scratch=True)
    for _ in range(3):
        next(steps)
    if change == "remove key":
        head.shape_key_remove(head.data.shape_keys.key_blocks[1])
    elif change == "remove object":
        bpy.data.objects.remove(head)
    elif change == "rename":
        head.name = "Other"
    elif change == "edit mode":
        bpy.context.view_layer.objects.active = head
        bpy.ops.object.mode_set(mode="EDIT")
    else:
        head.data.vertices.add(1)
    with pytest.raises(RigError) as caught:
        for _ in steps:
            pass
    assert caught.value.kind == "target_changed"
    assert list(tmp_path.iterdir()) == []


def test_closing_the_steps_leaves_no_file_and_no_change(tmp_path):
    head = rigs.add_head()
    head.data.shape_keys.key_blocks["jawOpen"].value = 0.6
    steps = export_steps(str(tmp_path / "rig.npz"), scratch=True)
    for step in steps:
        if isinstance(step, tuple) and step[2].startswith("Writing"):
            break
    steps.close()
    assert list(tmp_path.iterdir()) == []
    assert head.data.shape_keys.key_blocks["jawOpen"].value == pytest.approx(0.6)


def test_a_rig_that_was_proven_is_not_compared_again_but_a_changed_one_is(tmp_path, monkeypatch):
    monkeypatch.setattr("blender_addon.rig.export._proven", set())
    head = rigs.add_head()

    def checks() -> int:
        steps = export_steps(str(tmp_path / "rig.npz"), scratch=True)
        return sum(1 for step in steps if isinstance(step, tuple) and step[2].startswith("Checking"))

    assert checks() > 0
    assert checks() == 0
    head.modifiers.new("Wave", "WAVE")
    assert checks() > 0, "a modifier is no part of the hash, and may bend the shapes"
    head.modifiers.clear()
    head.data.shape_keys.key_blocks["jawOpen"].points[0].co.x += 0.01
    assert checks() > 0
