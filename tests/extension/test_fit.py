# SPDX-License-Identifier: GPL-3.0-or-later
"""Fit from photo through the installed add-on and a real backend process: apply, read back, undo, refuse."""

from __future__ import annotations

import os

import bpy
import pytest
from conftest import PACKAGE, PHOTO


def key_values(obj):
    return {block.name: block.value for block in obj.data.shape_keys.key_blocks[1:]}


@pytest.fixture
def status(addon):
    board = addon("link.pump").status()
    board.clear_error()
    board.result = None
    return board


def fit(**options):
    """Press the button; the sentence of the error, or None."""
    for name, value in options.items():
        setattr(bpy.context.scene.rigfit, name, value)
    try:
        assert bpy.ops.rigfit.fit_photo() == {"FINISHED"}
    except RuntimeError as error:
        return str(error)
    return None


def test_fit_apply_read_back_undo_redo(head, photo, status):
    before = key_values(head)
    assert fit(check=False) is None
    result = status.result
    assert result is not None
    assert result.photos[0].error_percent < 4
    after = key_values(head)
    moved = {name for name in after if after[name] != before[name]}
    assert len(moved) > 40
    for block in head.data.shape_keys.key_blocks:
        assert block.slider_min <= block.value <= block.slider_max
    # The demo portrait smiles with an open mouth.
    assert after["mouthSmileLeft"] > 0.5
    assert after["mouthSmileRight"] > 0.5
    rows = {row.name: row for row in bpy.context.window_manager.rigfit.rows}
    assert rows["mouthSmileLeft"].value == pytest.approx(after["mouthSmileLeft"], abs=1e-6)
    assert any(not row.known for row in rows.values())
    name = head.name
    bpy.ops.ed.undo()
    assert key_values(bpy.data.objects[name]) == before
    assert status.result.undone
    bpy.ops.ed.redo()
    assert key_values(bpy.data.objects[name]) == after
    assert not status.result.undone


def test_revert_puts_back_exactly_what_was(head, photo, status):
    blocks = head.data.shape_keys.key_blocks
    blocks["jawOpen"].value = 0.37
    blocks["mouthSmileLeft"].mute = True
    blocks[5].slider_max = 2.0
    blocks[5].value = 1.7
    before = key_values(head)
    assert fit(check=False) is None
    assert key_values(head) != before
    assert bpy.ops.rigfit.revert() == {"FINISHED"}
    assert key_values(head) == before
    assert blocks["mouthSmileLeft"].mute
    assert status.result is None


def test_strength_moves_between_before_and_fit(head, photo, status):
    session = bpy.context.window_manager.rigfit
    assert fit(check=False) is None
    full = key_values(head)
    session.strength = 0.5
    half = key_values(head)
    assert half["mouthSmileLeft"] == pytest.approx(full["mouthSmileLeft"] / 2, abs=1e-6)
    session.strength = 0.0
    assert max(key_values(head).values()) == 0.0
    session.strength = 1.0
    assert key_values(head) == full
    assert bpy.ops.rigfit.keep() == {"FINISHED"}
    assert key_values(head) == full


def test_expression_only_leaves_the_identity_alone(head, photo, status):
    assert fit(check=False) is None
    first = key_values(head)
    groups = {row.name: row.group for row in bpy.context.window_manager.rigfit.rows}
    bpy.ops.rigfit.keep()
    head.data.shape_keys.key_blocks["mouthSmileLeft"].value = 0.0
    assert fit(check=False, solve="expression") is None
    second = key_values(head)
    # Identity keys are mostly pairs, whose parameter has another name than its keys.
    identity = [name for name in first if groups.get(name) != "expression"]
    assert len(identity) > 100
    assert all(first[name] == second[name] for name in identity)
    assert second["mouthSmileLeft"] > 0.3


def test_a_lock_holds(head, photo, status):
    head.data.shape_keys.key_blocks["jawOpen"].value = 0.9
    assert bpy.ops.rigfit.list_parameters() == {"FINISHED"}
    rows = bpy.context.window_manager.rigfit.rows
    rows["jawOpen"].locked = True
    assert [lock.name for lock in head.rigfit_locks] == ["jawOpen"]
    assert fit(check=False) is None
    assert head.data.shape_keys.key_blocks["jawOpen"].value == pytest.approx(0.9)
    assert bpy.context.window_manager.rigfit.rows["jawOpen"].locked
    # The fit itself was made with the mouth at that, not only written without it.
    assert bpy.context.window_manager.rigfit.rows["jawOpen"].value == pytest.approx(0.9)
    bpy.context.window_manager.rigfit.rows["jawOpen"].locked = False
    assert len(head.rigfit_locks) == 0


def test_check_render_comes_back(head, photo, status, addon):
    assert fit(check=True) is None
    assert status.result.check is not None, status.result.check_trouble
    assert status.result.check.face_found
    assert status.result.check.error_percent < 5
    pictures = addon("fit.pictures")
    if not bpy.app.background or pictures.icon("photo"):
        assert pictures.icon("render") != 0


# --- what artists meet --------------------------------------------------------------------------------------------------


def refused(head, words, status, before=None):
    """The fit is refused with these words, the panel has the sentence, and nothing was written."""
    before = before or {
        obj.name: key_values(obj) for obj in bpy.data.objects if obj.type == "MESH" and obj.data.shape_keys
    }
    said = fit(check=False)
    assert said is not None
    assert words in said
    assert status.error is not None
    assert words in status.error.message
    assert status.result is None
    assert status.work is None
    for name, values in before.items():
        assert key_values(bpy.data.objects[name]) == values


def test_no_photo(head, status):
    refused(head, "add one", status)


def test_a_photo_that_is_gone(head, status, tmp_path):
    bpy.context.scene.rigfit.photos.add().path = str(tmp_path / "gone.png")
    refused(head, "gone.png", status)


def test_a_photo_without_a_face(head, status, tmp_path):
    image = bpy.data.images.new("noise", 256, 256)
    image.filepath_raw, image.file_format = str(tmp_path / "grey.png"), "PNG"
    image.save()
    bpy.context.scene.rigfit.photos.add().path = str(tmp_path / "grey.png")
    refused(head, "face", status)


def test_a_file_that_is_no_picture(head, status, tmp_path):
    path = tmp_path / "text.png"
    path.write_text("hello")
    bpy.context.scene.rigfit.photos.add().path = str(path)
    refused(head, "text.png", status)


def test_nothing_selected(head, photo, status):
    head.select_set(False)
    bpy.context.view_layer.objects.active = None
    refused(head, "select the head", status)


def test_no_shape_keys(scene, photo, status):
    bpy.ops.mesh.primitive_cube_add()
    refused(None, "no shape keys", status)


def test_edit_mode_and_its_remedy(head, photo, status):
    bpy.ops.object.mode_set(mode="EDIT")
    refused(head, "Object Mode", status)
    assert status.remedy == "object_mode"
    assert bpy.ops.rigfit.remedy(remedy="object_mode") == {"FINISHED"}
    assert head.mode == "OBJECT"
    assert status.error is None


def hidden_twin(head):
    """Another object with the same mesh, which is not part of the rig that is fitted."""
    twin = bpy.data.objects.new("Twin", head.data)
    bpy.context.collection.objects.link(twin)
    twin.hide_set(True)


@pytest.mark.parametrize(
    ("spoil", "words", "remedy"),
    [
        (lambda head: setattr(head.data.shape_keys, "use_relative", False), "absolute", "relative_keys"),
        (lambda head: setattr(head, "show_only_shape_key", True), "pinned", "unpin"),
        (lambda head: hidden_twin(head), "shares", "make_single_user"),
    ],
)
def test_rigs_that_cannot_be_written_and_their_remedies(head, photo, status, spoil, words, remedy):
    spoil(head)
    refused(head, words, status)
    assert status.remedy == remedy
    assert bpy.ops.rigfit.remedy(remedy=remedy) == {"FINISHED"}
    assert status.error is None, status.error
    assert fit(check=False) is None


def test_a_rig_whose_keys_are_all_driven(scene, photo, status):
    bpy.ops.mesh.primitive_cube_add()
    cube = bpy.context.object
    cube.shape_key_add(name="Basis")
    key = cube.shape_key_add(name="wide")
    key.value = 0.0
    key.driver_add("value").driver.expression = "0.5"
    bpy.context.view_layer.update()
    refused(None, "none can be moved freely", status)


def test_an_override_is_refused_and_made_local(head, photo, status, tmp_path):
    library = str(tmp_path / "library.blend")
    bpy.data.libraries.write(library, {head})
    bpy.ops.wm.read_homefile(use_empty=True, use_factory_startup=True)
    scene = bpy.context.scene
    scene.rigfit.photos.add().path = str(PHOTO)
    with bpy.data.libraries.load(library, link=True) as (source, target):
        target.objects = source.objects
    scene.collection.objects.link(target.objects[0])
    own = target.objects[0].override_create(remap_local_usages=True)
    own.data.override_create(remap_local_usages=True)
    bpy.context.view_layer.update()
    own.select_set(True)
    bpy.context.view_layer.objects.active = own
    refused(own, "make it local", status)
    assert bpy.ops.rigfit.remedy(remedy="make_local") == {"FINISHED"}
    assert status.error is None, status.error
    assert fit(check=False) is None


def test_a_linked_rig_and_make_local(head, photo, status, tmp_path):
    library = str(tmp_path / "library.blend")
    bpy.data.libraries.write(library, {head})
    bpy.ops.wm.read_homefile(use_empty=True, use_factory_startup=True)
    scene = bpy.context.scene
    scene.rigfit.photos.add().path = str(PHOTO)
    with bpy.data.libraries.load(library, link=True) as (source, target):
        target.objects = source.objects
    linked = target.objects[0]
    scene.collection.objects.link(linked)
    linked.select_set(True)
    bpy.context.view_layer.objects.active = linked
    refused(linked, "make it local", status)
    assert status.remedy == "make_local"
    assert bpy.ops.rigfit.remedy(remedy="make_local") == {"FINISHED"}
    assert status.error is None, status.error
    assert fit(check=False) is None


def another_head(head):
    """The head is replaced by its own copy under the same name: not what the fit was for."""
    name, copy = head.name, head.copy()
    copy.data = head.data.copy()
    bpy.data.objects.remove(head)
    copy.name = name
    bpy.context.collection.objects.link(copy)


def to_edit_mode(head):
    bpy.ops.object.mode_set(mode="EDIT")


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda head: bpy.data.objects.remove(head), "target_changed"),
        (another_head, "target_changed"),
        (to_edit_mode, "edit_mode"),
    ],
)
def test_target_changed_during_the_fit(head, photo, status, addon, change, kind):
    pump = addon("link.pump").pump()
    module = addon("operators.fit_photo")
    request = module._request(bpy.context, head)
    folder = addon("link.pump").scratch_folder()
    steps = addon("fit.job").fit_steps(request, [head], folder, status)
    flow = pump.start(steps, lambda flow: None, status.say)
    assert pump.run_until(lambda: pump.client.busy and flow._ticket is not None, 60)
    change(head)
    assert pump.run_until(lambda: flow.state != "running", 60)
    assert flow.state == "failed"
    assert flow.error.kind == kind
    assert status.result is None
    for obj in bpy.context.scene.objects:
        assert max(key_values(obj).values()) == 0.0


def test_cancel_writes_nothing_and_the_next_fit_works(head, photo, status, addon):
    pump = addon("link.pump").pump()
    before = key_values(head)
    request = addon("operators.fit_photo")._request(bpy.context, head)
    steps = addon("fit.job").fit_steps(request, [head], addon("link.pump").scratch_folder(), status)
    flow = pump.start(steps, lambda flow: None, status.say)
    assert pump.run_until(lambda: pump.client.state == "ready" and flow._ticket is not None, 60)
    pump.cancel(flow)
    assert flow.state == "cancelled"
    assert key_values(head) == before
    assert fit(check=False) is None


def test_a_killed_backend_is_an_error_and_the_next_fit_starts_another(head, photo, status, addon):
    import signal

    pump = addon("link.pump").pump()
    assert fit(check=False) is None
    bpy.ops.rigfit.revert()
    first = pump.client.pid
    request = addon("operators.fit_photo")._request(bpy.context, head)
    steps = addon("fit.job").fit_steps(request, [head], addon("link.pump").scratch_folder(), status)
    flow = pump.start(steps, lambda flow: None, status.say)
    assert pump.run_until(lambda: flow._ticket is not None, 60)
    os.kill(first, signal.SIGKILL)
    assert pump.run_until(lambda: flow.state != "running", 30)
    assert flow.state == "failed"
    assert flow.error.kind == "backend_died"
    assert fit(check=False) is None
    assert pump.client.pid != first


def test_a_defect_is_said_and_the_next_fit_works(head, photo, status, addon):
    pump = addon("link.pump").pump()

    def broken():
        yield None

    def after(flow):
        raise ZeroDivisionError("of a test")

    status.work = pump.start(broken(), after, status.say)
    assert pump.run_until(lambda: status.work is None, 5)
    assert status.error.kind == "defect"
    assert "of a test" in status.error.message
    assert fit(check=False) is None


def test_report_names_versions_and_no_home(head, status, addon):
    status.fail(addon("messages").RigError("photo_missing", path=os.path.expanduser("~/secret/x.png")))
    text = addon("operators.backend").error_report()
    assert text.startswith("rigfit report\nrigfit: ")
    assert bpy.app.version_string in text
    assert "~/secret/x.png" in text
    assert os.path.expanduser("~") + "/secret" not in text


def test_new_file_cancels_what_runs(head, photo, status, addon):
    pump = addon("link.pump").pump()
    request = addon("operators.fit_photo")._request(bpy.context, head)
    steps = addon("fit.job").fit_steps(request, [head], addon("link.pump").scratch_folder(), status)
    flow = pump.start(steps, lambda flow: None, status.say)
    pump.tick()
    bpy.ops.wm.read_homefile(use_empty=True, use_factory_startup=True)
    assert flow.state == "cancelled"
    assert PACKAGE in bpy.context.preferences.addons


def test_an_unknown_rig_of_several_meshes_gets_landmarks_and_moves_together(head, photo, status):
    """Another rig than the default head: its landmarks are found on renders of a copy; a second mesh follows.

    A driven key is left out and listed, a muted one is said and unmuted.
    """
    blocks = head.data.shape_keys.key_blocks
    blocks["jawOpen"].name = "mouth wide"
    blocks["tongueOut"].driver_add("value").driver.expression = "0.25"
    blocks["mouthSmileRight"].mute = True
    bpy.context.view_layer.update()
    tongue = blocks["tongueOut"].value
    bpy.ops.mesh.primitive_uv_sphere_add(radius=0.004, location=(0.2, 0, 0))
    stone = bpy.context.view_layer.objects.active
    stone.shape_key_add(name="Basis")
    stone.shape_key_add(name="mouth wide").value = 0.0
    stone.data.shape_keys.key_blocks["mouth wide"].data[0].co.z += 0.01
    stone.select_set(False)
    head.select_set(True)
    bpy.context.view_layer.objects.active = head
    assert fit(check=False) is None
    result = status.result
    assert result.objects == [head.name, stone.name]
    assert result.photos[0].error_percent < 5
    wide = head.data.shape_keys.key_blocks["mouth wide"].value
    assert wide > 0.05
    assert stone.data.shape_keys.key_blocks["mouth wide"].value == wide
    assert [line for line in result.left_out if line.startswith("tongueOut")]
    assert "tongueOut" not in result.fitted
    assert blocks["tongueOut"].value == tongue
    assert [note for note in result.notes if "mouthSmileRight" in note and "muted" in note]
    assert not blocks["mouthSmileRight"].mute
    bpy.ops.rigfit.revert()
    assert blocks["mouthSmileRight"].mute
    assert stone.data.shape_keys.key_blocks["mouth wide"].value == 0.0
    # The second time it is known: no search for landmarks.
    assert fit(check=False) is None
    assert status.result.seconds < 10
