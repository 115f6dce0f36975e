# SPDX-License-Identifier: Apache-2.0
"""Discovery: which numbers a rig exposes, under which name, in which group, with which limits."""

from __future__ import annotations

import json

import bpy
import pytest
import rigs

from blender_addon.messages import RigError
from blender_addon.rig.parameters import discover, resolve_objects


def names_of(*objects: bpy.types.Object, **options: bool) -> dict:
    return {parameter.name: parameter for parameter in discover(objects, **options).parameters}


def test_every_key_but_the_basis_becomes_a_parameter_with_its_own_range() -> None:
    head = rigs.add_head(keys=["jawOpen"])
    rigs.add_key(head, "nose-size", low=-1.5, high=2.0)
    found = names_of(head)
    assert list(found) == ["jawOpen", "nose-size"]
    assert (found["nose-size"].minimum, found["nose-size"].maximum, found["nose-size"].default) == (-1.5, 2.0, 0.0)


def test_a_range_without_zero_has_its_nearest_end_as_default() -> None:
    head = rigs.add_head(keys=[])
    rigs.add_key(head, "a", low=0.25, high=1.0, value=0.5)
    rigs.add_key(head, "b", low=-1.0, high=-0.5, value=-0.75)
    assert [(p.name, p.default) for p in names_of(head).values()] == [("a", 0.25), ("b", -0.5)]


def test_same_named_keys_of_several_meshes_are_one_parameter_within_their_common_range() -> None:
    head, brows = rigs.add_head("Head", ["smile"]), rigs.add_head("Brows", [])
    rigs.add_key(brows, "smile", high=0.75)
    rigs.add_key(brows, "brow_raise")
    found = names_of(head, brows)
    assert list(found) == ["smile", "brow_raise"]
    assert [source.object for source in found["smile"].sources] == ["Head", "Brows"]
    assert found["smile"].maximum == 0.75


@pytest.mark.parametrize(
    ("plus", "minus", "name"),
    [
        ("nose-width-incr", "nose-width-decr", "nose-width"),
        ("mouth_trans_up", "mouth_trans_down", "mouth_trans"),
        ("CheekOut", "CheekIn", "Cheek"),
        ("chin convex", "chin concave", "chin"),
        ("eye-size-big", "eye-size-small", "eye-size"),
        ("ear.max", "ear.min", "ear"),
        ("cheek-out_L", "cheek-in_L", "cheek_L"),
        ("Nose+", "Nose-", "Nose"),
    ],
)
def test_opposite_names_become_one_signed_parameter_only_when_asked(plus: str, minus: str, name: str) -> None:
    head = rigs.add_head(keys=[minus, plus])
    rigs.bpy.data.shape_keys[0].key_blocks[minus].slider_max = 0.5
    found = names_of(head, pairs=True)
    assert list(found) == [name]
    assert (found[name].minimum, found[name].maximum) == (-0.5, 1.0)
    assert [(s.key, s.sign) for s in found[name].sources] == [(plus, 1), (minus, -1)]
    assert list(names_of(head, pairs=False)) == [minus, plus]


def test_names_that_only_look_opposite_stay_apart() -> None:
    keys = [
        "eyeLookUpLeft",
        "eyeLookDownLeft",
        "eyeLookInLeft",
        "eyeLookOutLeft",
        "chin",
        "chout",
        "jawLeft",
        "jawRight",
    ]
    assert list(names_of(rigs.add_head(keys=keys))) == keys


def test_a_pair_with_an_overlapping_range_or_a_taken_name() -> None:
    head = rigs.add_head(keys=["nose-in", "nose-out", "nose"])
    assert list(names_of(head)) == ["nose-out / nose-in", "nose"]
    head.data.shape_keys.key_blocks["nose-in"].slider_min = -1.0
    assert list(names_of(head)) == ["nose-in", "nose-out", "nose"]


def test_left_and_right_keys_are_merged_only_when_asked() -> None:
    head = rigs.add_head(
        keys=["smile_L", "smile_R", "browDownLeft", "browDownRight", "jawLeft", "jawRight", "l-ear", "r-ear"]
    )
    assert len(names_of(head)) == 8
    merged = names_of(head, merge_sides=True)
    assert list(merged) == ["smile", "browDown", "jawLeft", "jawRight", "ear"]
    assert [source.key for source in merged["smile"].sources] == ["smile_L", "smile_R"]


def test_notes_name_pairs_and_groups_whatever_the_names_say() -> None:
    head = rigs.add_head(keys=["fat", "thin2", "smile"])
    head["rigfit"] = json.dumps(
        {"pairs": {"weight": ["fat", "thin2"]}, "groups": {"smile": "identity", "weight": "identity"}}
    )
    found = names_of(head, pairs=False)
    assert [(p.name, p.group, p.minimum) for p in found.values()] == [
        ("weight", "identity", -1),
        ("smile", "identity", 0),
    ]


@pytest.mark.parametrize(
    "notes", ["{", "[]", '{"pairs": {"a": ["b"]}}', '{"groups": {"a": "mood"}}', '{"appearance": "x"}', 7]
)
def test_notes_that_cannot_be_used_are_refused(notes: object) -> None:
    head = rigs.add_head()
    head["rigfit"] = notes
    with pytest.raises(RigError) as caught:
        discover([head])
    assert caught.value.kind == "bad_rig_notes"


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("jawOpen", "expression"),
        ("Mouth_Smile_L", "expression"),
        ("vrc.v_aa", "expression"),
        ("Fcl_MTH_A", "expression"),
        ("まばたき", "expression"),
        ("eyeBlink_L", "expression"),
        ("Mouth_Open", "expression"),
        ("AU12", "expression"),
        ("V_Explosive", "expression"),
        ("brow raise", "expression"),
        ("nose-width", "identity"),
        ("head-fat", "identity"),
        ("mouth-scale-horiz", "identity"),
        ("chin-prominent", "identity"),
        ("Face Heart", "identity"),
    ],
)
def test_groups_by_name(name: str, group: str) -> None:
    assert names_of(rigs.add_head(keys=[name]))[name].group == group


def test_driven_keys_are_left_out_with_what_drives_them() -> None:
    head = rigs.add_head(keys=["smile", "jawOpen", "corrective", "follower", "boned", "timed"])
    blocks, keys = head.data.shape_keys.key_blocks, head.data.shape_keys
    path = 'key_blocks["{}"].value'.format
    rigs.drive(blocks["corrective"], "a*b", a=(keys, path("smile")), b=(keys, path("jawOpen")))
    rigs.drive(blocks["follower"], "a", a=(keys, path("smile")))
    rigs.drive(blocks["boned"], "a", a=(head, "location.x"))
    rigs.drive(blocks["timed"], "frame/100")
    found = discover([head])
    assert [parameter.name for parameter in found.parameters] == ["smile", "jawOpen"]
    left_out = dict(found.left_out)
    assert left_out["corrective"] == "driven by the key smile and the key jawOpen together (a corrective)"
    assert left_out["follower"] == "driven by the key smile, which it follows"
    assert left_out["boned"] == "driven by location.x of Head"
    assert "frame/100" in left_out["timed"]


def test_the_driving_property_is_used_where_it_has_finite_limits() -> None:
    head = rigs.add_head(keys=["a", "b", "c", "d"])
    rigs.add_property(head, "smile amount", -1.0, 2.0, 0.5)
    head["open"] = 0.5  # Blender gives it no limits
    head["count"] = 3
    blocks = head.data.shape_keys.key_blocks
    rigs.drive(blocks["a"], "p", p=(head, '["smile amount"]'))
    rigs.drive(blocks["b"], "p*p", p=(head, '["smile amount"]'))
    rigs.drive(blocks["c"], "p", p=(head, '["open"]'))
    rigs.drive(blocks["d"], "p", p=(head, '["count"]'))
    found = discover([head])
    assert [(p.name, p.minimum, p.maximum, p.default, p.group) for p in found.parameters] == [
        ("smile amount", -1.0, 2.0, 0.5, "expression")
    ]
    left_out = dict(found.left_out)
    assert left_out["a"].endswith("the property smile amount of Head, which is used instead")
    assert left_out["c"].endswith("(that property has no finite limits)")
    assert left_out["d"].endswith("(that property is not a single real number)")


def test_a_property_of_a_pose_bone_is_used() -> None:
    head = rigs.add_head(keys=["a"])
    armature = rigs.add_armature(head)
    bone = armature.pose.bones["high"]
    bone["grin"] = 0.0
    bone.id_properties_ui("grin").update(min=0.0, max=1.0, soft_min=0.0, soft_max=1.0)
    rigs.drive(head.data.shape_keys.key_blocks["a"], "p", p=(armature, 'pose.bones["high"]["grin"]'))
    (parameter,) = discover([head]).parameters
    (source,) = parameter.sources
    assert (parameter.name, source.object, source.bone, source.property) == ("grin", "Armature", "high", "grin")


def test_appearance_from_notes_and_from_attribute_nodes_but_not_from_other_properties() -> None:
    head, brows = rigs.add_head("Head", ["a"]), rigs.add_head("Brows", [])
    for name in ("skin_tone", "brow_strength", "unused"):
        rigs.add_property(head, name)
    rigs.add_property(brows, "brow_strength", 0.0, 0.5)
    head["rigfit"] = json.dumps({"appearance": ["skin_tone"]})
    material = bpy.data.materials.new("Brows")
    material.use_nodes = True
    node = material.node_tree.nodes.new("ShaderNodeAttribute")
    node.attribute_type, node.attribute_name = "OBJECT", "brow_strength"
    head.data.materials.append(material)
    brows.data.materials.append(material)
    found = names_of(head, brows)
    assert {p.name: p.group for p in found.values() if p.name != "a"} == {
        "skin_tone": "appearance",
        "brow_strength": "appearance",
    }
    assert [source.object for source in found["brow_strength"].sources] == ["Head", "Brows"]
    assert found["brow_strength"].maximum == 0.5


def test_which_objects_are_the_rig() -> None:
    rigs.add_mesh("Cube", *rigs.head_data())
    with pytest.raises(RigError) as caught:
        resolve_objects()
    assert caught.value.kind == "no_shape_keys"
    head, teeth = rigs.add_head("Head"), rigs.add_head("Teeth", ["jawOpen"])
    assert resolve_objects() == [head, teeth]
    teeth.select_set(True)
    assert resolve_objects() == [teeth]
    assert resolve_objects(["Head", "Cube"]) == [head, bpy.data.objects["Cube"]]
    with pytest.raises(RigError) as caught:
        resolve_objects(["Head", "Nobody"])
    assert caught.value.kind == "object_missing"
    assert "Nobody" in caught.value.message


def test_names_that_break_tools() -> None:
    keys = ['quo"te', "back\\slash", "it's", "日本語キー", "emoji 😀", " blank ", "a" * 63, "[0]", "é" * 40]
    head = rigs.add_head(keys=keys)
    rigs.add_key(head, 'quo"te')
    found = list(names_of(head))
    assert len(found) == len(set(found)) == 10
    assert found[:8] == keys[:8]
    assert found[8] == "é" * 31  # Blender 4.x keeps 63 bytes, half a character among them; the half is dropped
    assert found[9] == 'quo"te.001'
