# SPDX-License-Identifier: Apache-2.0
"""Writing values back by name: what is written is read back, what cannot be kept is refused before anything changes."""

from __future__ import annotations

from pathlib import Path

import bpy
import numpy as np
import pytest
import rigs

from blender_addon.messages import RigError
from blender_addon.rig.checks import why_not_writable
from blender_addon.rig.export import export_rig
from blender_addon.rig.parameters import apply_parameters, hold, put_back, read_parameters, read_spec


@pytest.fixture
def spec(tmp_path: Path) -> str:
    """The spec of a head with a signed pair, a wide range, two meshes and a property."""
    head = rigs.add_head("Head", ["jawOpen", "cheek-in", "cheek-out"])
    rigs.add_key(head, "nose", low=-2.0, high=3.0)
    rigs.add_head("Teeth", ["jawOpen"])
    rigs.add_property(head, "skin_tone", 0.0, 1.0, 0.3)
    head["rigfit"] = '{"appearance": ["skin_tone"]}'
    path = str(tmp_path / "rig.npz")
    export_rig(path)
    return path


def key(name: str, obj: str = "Head") -> bpy.types.ShapeKey:
    return bpy.data.objects[obj].data.shape_keys.key_blocks[name]


def state() -> dict:
    return {
        (obj.name, block.name): (block.value, block.mute)
        for obj in bpy.data.objects
        if obj.type == "MESH" and obj.data.shape_keys
        for block in obj.data.shape_keys.key_blocks
    } | {obj.name: obj.get("skin_tone") for obj in bpy.data.objects}


def refused(spec: str, kind: str, values: dict, objects: list[str] | None = None) -> str:
    before = state()
    with pytest.raises(RigError) as caught:
        apply_parameters(spec, values, objects)
    assert caught.value.kind == kind
    assert state() == before, "a refusal must write nothing"
    return caught.value.message


def test_what_is_written_is_read_back(spec: str) -> None:
    random = np.random.RandomState(3)
    for _ in range(5):
        values = {
            "jawOpen": random.uniform(0, 1),
            "cheek": random.uniform(-1, 1),
            "nose": random.uniform(-2, 3),
            "skin_tone": random.uniform(0, 1),
        }
        assert apply_parameters(spec, values)["written"] == list(values)
        read = read_parameters(spec)["values"]
        for name in ("jawOpen", "cheek", "nose"):
            assert read[name] == float(np.float32(values[name]))
        assert read["skin_tone"] == values["skin_tone"]
        assert key("jawOpen").value == key("jawOpen", "Teeth").value
        assert min(key("cheek-in").value, key("cheek-out").value) == 0.0


def test_limits_themselves_can_be_written(spec: str) -> None:
    for values in ({"nose": -2.0, "cheek": -1.0}, {"nose": 3.0, "cheek": 1.0}):
        apply_parameters(spec, values)
        assert {name: read_parameters(spec)["values"][name] for name in values} == values


def test_parameters_that_are_not_named_keep_what_they_have(spec: str) -> None:
    key("nose").value = 1.25
    apply_parameters(spec, {"jawOpen": 0.5})
    assert key("nose").value == 1.25


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("value_not_finite", {"jawOpen": 0.5, "nose": float("nan")}),
        ("value_not_finite", {"nose": float("inf")}),
        ("value_not_finite", {"nose": "1"}),
        ("value_out_of_limits", {"jawOpen": 0.5, "nose": 3.01}),
        ("value_out_of_limits", {"jawOpen": -0.01}),
        ("parameter_unknown", {"jawOpen": 0.5, "nobody": 0.1}),
    ],
)
def test_bad_values(spec: str, kind: str, values: dict) -> None:
    refused(spec, kind, values)


def test_a_range_that_was_narrowed_since(spec: str) -> None:
    key("nose").slider_max = 1.0
    refused(spec, "value_out_of_limits", {"jawOpen": 0.5, "nose": 2.0})
    apply_parameters(spec, {"nose": 1.0})


def test_muted_keys_are_unmuted_and_reported(spec: str) -> None:
    key("jawOpen").mute = key("nose").mute = True
    result = apply_parameters(spec, {"jawOpen": 0.5, "nose": 0.0})
    assert result["unmuted"] == ["jawOpen"]
    assert (key("jawOpen").mute, key("nose").mute) == (False, True)


def test_edit_mode_absolute_and_pinned(spec: str) -> None:
    head = bpy.data.objects["Head"]
    bpy.context.view_layer.objects.active = head
    bpy.ops.object.mode_set(mode="EDIT")
    assert "Object Mode" in refused(spec, "edit_mode", {"jawOpen": 0.5})
    bpy.ops.object.mode_set(mode="OBJECT")
    head.show_only_shape_key = True
    refused(spec, "pinned_key", {"jawOpen": 0.5})
    head.show_only_shape_key = False
    head.data.shape_keys.use_relative = False
    refused(spec, "absolute_keys", {"jawOpen": 0.5})
    head.data.shape_keys.use_relative = True
    apply_parameters(spec, {"jawOpen": 0.5})


def test_a_target_that_was_deleted_or_changed(spec: str) -> None:
    teeth = bpy.data.objects["Teeth"]
    teeth.name = "Renamed"
    assert "Teeth" in refused(spec, "object_missing", {"jawOpen": 0.5})
    assert apply_parameters(spec, {"jawOpen": 0.5}, ["Head"])["written"] == ["jawOpen"]
    teeth.name = "Teeth"
    head = bpy.data.objects["Head"]
    head.shape_key_remove(key("nose"))
    assert "nose" in refused(spec, "source_missing", {"jawOpen": 0.1, "nose": 0.2})
    del head["skin_tone"]
    assert "skin_tone" in refused(spec, "source_missing", {"jawOpen": 0.1, "skin_tone": 0.2})
    points, faces = rigs.head_data(rings=8)
    bpy.data.objects.remove(teeth)
    other = rigs.add_mesh("Teeth", points, faces)
    rigs.add_key(other, "jawOpen")
    refused(spec, "mesh_changed", {"jawOpen": 0.1})
    bpy.data.objects.remove(head)
    refused(spec, "object_missing", {"nose": 0.1})


def test_objects_that_were_not_chosen_are_left_out(spec: str) -> None:
    result = apply_parameters(spec, {"jawOpen": 0.5, "nose": 1.0}, ["Teeth"])
    assert result["written"] == ["jawOpen"]
    assert [item["name"] for item in result["left_out"]] == ["nose"]
    assert (key("jawOpen", "Teeth").value, key("jawOpen").value, key("nose").value) == (0.5, 0.0, 0.0)
    read = read_parameters(spec, ["Teeth"])
    assert read["values"] == {"jawOpen": 0.5}
    assert {item["name"] for item in read["left_out"]} == {"cheek", "nose", "skin_tone"}


def test_a_key_that_got_a_driver(spec: str) -> None:
    rigs.drive(key("nose"), "a", a=(bpy.data.objects["Head"], "location.x"))
    assert "nose" in refused(spec, "driven", {"jawOpen": 0.5, "nose": 0.1})


def test_a_mesh_with_other_users(spec: str) -> None:
    head = bpy.data.objects["Head"]
    other = bpy.data.objects.new("Other", head.data)
    assert "Other" in refused(spec, "multi_user", {"jawOpen": 0.5})
    assert why_not_writable(head, True)[0].remedy == "make_single_user"
    bpy.data.objects.remove(other)
    apply_parameters(spec, {"jawOpen": 0.5})


def library(tmp_path: Path) -> str:
    path = str(tmp_path / "library.blend")
    bpy.ops.wm.save_as_mainfile(filepath=path, copy=True)
    return path


def link(path: str, as_data: bool = False) -> None:
    """Open an empty file and link the heads from the library: whole objects, or only their meshes."""
    bpy.ops.wm.read_factory_settings(use_empty=True)
    with bpy.data.libraries.load(path, link=True) as (_, target):
        if as_data:
            target.meshes = ["Head", "Teeth"]
        else:
            target.objects = ["Head", "Teeth"]
    for name in ("Head", "Teeth"):
        obj = bpy.data.objects.new(name, bpy.data.meshes[name]) if as_data else bpy.data.objects[name]
        bpy.context.scene.collection.objects.link(obj)


@pytest.mark.parametrize("as_data", [False, True])
def test_linked_rigs_can_be_exported_but_not_written(spec: str, tmp_path: Path, as_data: bool) -> None:
    key("nose").value = 0.5
    link(library(tmp_path), as_data)
    message = refused(spec, "linked", {"jawOpen": 0.5})
    assert "library.blend" in message
    assert "Make Local" in message
    assert why_not_writable(bpy.data.objects["Head"], True)[0].remedy == "make_local"
    result = export_rig(str(tmp_path / "linked.npz"))
    assert key("nose").value == 0.5
    assert any("linked from" in warning for warning in result["warnings"])
    there, here = rigs.Spec(tmp_path / "linked.npz"), rigs.Spec(spec)
    for name in ("jawOpen", "cheek", "nose"):
        assert np.array_equal(there.delta(name), here.delta(name))


def test_overrides_are_refused(spec: str, tmp_path: Path) -> None:
    link(library(tmp_path))
    for name in ("Head", "Teeth"):
        bpy.data.objects[name].override_create(remap_local_usages=True)
    assert bpy.data.objects["Head"].override_library is not None
    assert "override" in refused(spec, "overridden", {"jawOpen": 0.5})
    refused(spec, "overridden", {"skin_tone": 0.5})


def test_a_local_copy_of_a_linked_rig_is_written(spec: str, tmp_path: Path) -> None:
    link(library(tmp_path))
    for name in ("Head", "Teeth"):
        obj = bpy.data.objects[name]
        obj.make_local()
        obj.data.make_local()
    apply_parameters(spec, {"jawOpen": 0.5})
    assert key("jawOpen").value == 0.5


def test_a_value_that_does_not_stay_is_put_back(spec: str) -> None:
    def meddle(*_: object) -> None:
        if key("jawOpen").value != 0.0:
            key("jawOpen").value = 0.0

    bpy.app.handlers.depsgraph_update_post.append(meddle)
    try:
        refused(spec, "write_lost", {"nose": 1.0, "jawOpen": 0.5})
    finally:
        bpy.app.handlers.depsgraph_update_post.remove(meddle)


def test_an_animated_key_is_written_with_a_warning(spec: str) -> None:
    key("jawOpen").keyframe_insert("value", frame=1)
    result = apply_parameters(spec, {"jawOpen": 0.5, "nose": 1.0})
    assert result["warnings"] == ["jawOpen of Head is animated: the value lasts until the frame changes"]
    assert key("jawOpen").value == 0.5


def test_a_bone_property_is_written(tmp_path: Path) -> None:
    head = rigs.add_head(keys=["a"])
    armature = rigs.add_armature(head)
    bone = armature.pose.bones["high"]
    bone["grin"] = 0.0
    bone.id_properties_ui("grin").update(min=0.0, max=1.0, soft_min=0.0, soft_max=1.0)
    rigs.drive(head.data.shape_keys.key_blocks["a"], "p", p=(armature, 'pose.bones["high"]["grin"]'))
    path = str(tmp_path / "rig.npz")
    export_rig(path)
    apply_parameters(path, {"grin": 0.625})
    assert bone["grin"] == 0.625
    assert head.data.shape_keys.key_blocks["a"].value == 0.625
    assert rigs.largest_error(path, apply_parameters) < 1e-6


def test_files_that_are_no_spec(spec: str, tmp_path: Path) -> None:
    refused(str(tmp_path / "none.npz"), "file_missing", {"jawOpen": 0.5})
    broken = tmp_path / "broken.npz"
    broken.write_bytes(Path(spec).read_bytes()[:200])
    refused(str(broken), "bad_spec", {"jawOpen": 0.5})
    np.savez(tmp_path / "other.npz", json=np.frombuffer(b'{"schema": "rigfit.rig/2"}', np.uint8))
    assert "schema" in refused(str(tmp_path / "other.npz"), "bad_spec", {"jawOpen": 0.5})
    np.savez(tmp_path / "pickle.npz", json=np.array([{"schema": 1}], dtype=object))
    refused(str(tmp_path / "pickle.npz"), "bad_spec", {"jawOpen": 0.5})


# --- holding and putting back -------------------------------------------------------------------------------------------


def test_what_was_held_comes_back_exactly(tmp_path):
    head = rigs.add_head()
    head["glow"] = 0.25
    head.id_properties_ui("glow").update(min=0.0, max=1.0)
    head["rigfit"] = '{"appearance": ["glow"]}'
    blocks = head.data.shape_keys.key_blocks
    blocks["jawOpen"].slider_max = 2.0
    path = str(tmp_path / "rig.npz")
    export_rig(path)
    blocks["jawOpen"].value, blocks["jawOpen"].mute = 1.7, True
    blocks["cheek-out"].value, blocks["cheek-in"].value = 0.4, 0.1  # both sides of a pair at once
    names = [item["name"] for item in read_spec(path)["parameters"]]
    held = hold(path, names)
    apply_parameters(path, dict.fromkeys(names, 0.5))
    assert blocks["jawOpen"].value == pytest.approx(0.5)
    assert head["glow"] == 0.5
    assert put_back(held) == []
    assert blocks["jawOpen"].value == pytest.approx(1.7)
    assert blocks["jawOpen"].mute
    assert (blocks["cheek-out"].value, blocks["cheek-in"].value) == pytest.approx((0.4, 0.1))
    assert head["glow"] == 0.25
    del head["glow"]
    head.shape_key_remove(blocks["nose-size"])
    assert sorted(put_back(held)) == ["glow", "nose-size"]
    head.data.shape_keys.use_relative = False
    with pytest.raises(RigError) as caught:
        put_back(held)
    assert caught.value.kind == "absolute_keys"
