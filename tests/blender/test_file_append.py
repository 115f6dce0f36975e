# SPDX-License-Identifier: Apache-2.0
"""`file.append`: a rig that was written to a library file stands in the worker as it stood in the artist's scene."""

from __future__ import annotations

import math

import bpy
import numpy as np
import pytest
from rigs import add_mesh, head_data

from blender_addon.messages import RigError
from blender_addon.rig.export import export_rig
from blender_addon.rig.parameters import apply_parameters, read_parameters
from blender_addon.worker import file_append


def artist_rig(tmp_path, metres_per_unit: float = 0.01, system: str = "METRIC"):
    """A head and an eye under a turned, scaled parent, with an armature; the spec, and the library file."""
    scene = bpy.context.scene
    scene.unit_settings.system = system
    scene.unit_settings.scale_length = metres_per_unit
    bpy.ops.object.armature_add()
    armature = bpy.context.object
    armature.rotation_euler = (0.1, 0.2, math.radians(30))
    armature.scale = (10, 12, 10)
    armature.location = (3, -2, 1)
    points, faces = head_data()
    head = add_mesh("Head äö", points, faces, armature)
    eye = add_mesh("Eye", points * 0.2, faces, head)
    for obj in (head, eye):
        obj.shape_key_add(name="Basis")
        key = obj.shape_key_add(name="jawOpen")
        key.value = 0.0
        key.data[5].co.z -= 0.02
    other = add_mesh("Not part of it", points, faces)
    spec = str(tmp_path / "rig.npz")
    told = export_rig(spec, objects=["Head äö", "Eye"])
    library = str(tmp_path / "library äö.blend")
    bpy.data.libraries.write(library, {head, eye}, path_remap="ABSOLUTE", compress=False)
    assert other.name not in (head.name, eye.name)
    return spec, library, told["rig_hash"]


@pytest.mark.parametrize(("metres_per_unit", "system"), [(0.01, "METRIC"), (0.3048, "IMPERIAL"), (1.0, "NONE")])
def test_the_rig_is_the_same_rig(tmp_path, metres_per_unit, system):
    spec, library, rig_hash = artist_rig(tmp_path, metres_per_unit, system)
    told = file_append(library, ["Eye", "Head äö"], metres_per_unit)
    assert told == {"objects": ["Eye", "Head äö"]}
    # The parent came along, but is not in the scene; nothing else did.
    assert {obj.name for obj in bpy.context.scene.objects} == {"Head äö", "Eye"}
    assert "Not part of it" not in bpy.data.objects
    assert bpy.context.scene.unit_settings.scale_length == pytest.approx(metres_per_unit)
    again = export_rig(str(tmp_path / "again.npz"), objects=["Head äö", "Eye"])
    assert again["rig_hash"] == rig_hash
    with np.load(spec) as one, np.load(tmp_path / "again.npz") as two:
        assert np.allclose(one["neutral"], two["neutral"], atol=1e-6)
    apply_parameters(spec, {"jawOpen": 0.6})
    assert read_parameters(spec)["values"]["jawOpen"] == pytest.approx(0.6)
    assert not any(obj.library for obj in bpy.data.objects)


def test_what_was_open_is_gone(tmp_path):
    _, library, _ = artist_rig(tmp_path)
    add_mesh("Left over", *head_data())
    file_append(library, ["Eye"])
    assert [obj.name for obj in bpy.context.scene.objects] == ["Eye"]
    assert bpy.context.scene.unit_settings.scale_length == 1.0
    file_append(library, ["Eye"], 0.5)
    assert [obj.name for obj in bpy.context.scene.objects] == ["Eye"]


def test_what_cannot_be_appended_is_said(tmp_path):
    _, library, _ = artist_rig(tmp_path)
    (tmp_path / "text.blend").write_text("no blend file")
    for path, objects, kind in (
        (str(tmp_path / "none.blend"), ["Eye"], "file_missing"),
        (str(tmp_path), ["Eye"], "file_missing"),
        (str(tmp_path / "text.blend"), ["Eye"], "file_unreadable"),
        (library, ["Eye", "Ear"], "object_missing"),
    ):
        with pytest.raises(RigError) as error:
            file_append(path, objects)
        assert error.value.kind == kind
    assert "Ear" in error.value.message
    assert len(bpy.context.scene.objects) == 0
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(RigError) as error:
            file_append(library, ["Eye"], wrong)
        assert error.value.kind == "bad_request"
