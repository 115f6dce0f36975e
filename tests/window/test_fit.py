# SPDX-License-Identifier: Apache-2.0
"""Fit from photo as an artist does it: real clicks on the real buttons, a real backend, and everything that goes wrong.

The tests of this module share one Blender and go through a session in order.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from blender_window import PACKAGE, BlenderWindow

PHOTO = Path(__file__).resolve().parents[2] / "backend" / "rigfit" / "assets" / "astronaut.png"
STATUS = "addon('link.pump').status()"
TICK = "addon('link.pump').pump().longest_tick_s"
CLIENT = "addon('link.pump').pump().client"
KEYS = "{b.name: b.value for b in bpy.data.objects['Head'].data.shape_keys.key_blocks[1:]}"

# The figures of the project. A gap is a time in which Blender's main loop did not come round; what software OpenGL needs
# to draw the window (a graphics card does it in a millisecond) is left out of it and printed.
# A test must not fail because the machine is busy: it asks for SLACK times the figure, and prints what was measured.
SLACK = 3.0
LONGEST_GAP_S = 0.05
WARM_FIT_S = 1.5
COLD_START_S = 15.0
CANCEL_SHOWN_S = 0.2
CANCEL_DONE_S = 5.0
GONE_S = 5.0


def light_view(window: BlenderWindow) -> None:
    """A 3D view that software OpenGL draws in less than the gap that is allowed: the add-on is measured, not Mesa.

    What is left of it is printed beside every gap (`draw_cost`).
    """
    window.run(
        "bpy.context.preferences.system.viewport_aa = 'OFF'\n"
        "space = view3d()[2]\n"
        "space.overlay.show_overlays = space.show_gizmo = space.shading.show_object_outline = False\n"
        "space.shading.show_shadows = space.shading.show_cavity = False\n"
    )


def fine_view(window: BlenderWindow) -> None:
    """The 3D view as artists have it, for pictures."""
    window.run(
        "space = view3d()[2]\n"
        "space.overlay.show_overlays = space.show_gizmo = space.shading.show_object_outline = True\n"
        "space.shading.show_cavity = True\n"
    )
    time.sleep(0.5)


def draw_cost(window: BlenderWindow) -> float:
    """Seconds that the 3D view takes to draw the head once it has moved."""
    window.run(
        "import time\n"
        "key = bpy.data.objects['Head'].data.shape_keys.key_blocks[3]\n"
        "cost = []\n"
        "for number in range(5):\n"
        "    key.value = 0.01 * (number + 1)\n"
        "    began = time.perf_counter()\n"
        "    with in_view():\n"
        "        bpy.ops.wm.redraw_timer(type='DRAW_SWAP', iterations=1)\n"
        "    cost.append(time.perf_counter() - began)\n"
        "key.value = 0.0\n"
    )
    return sorted(window.ask("cost"))[2]


def add_photos(window: BlenderWindow, *paths: Path) -> None:
    """Put photos on the list as a drop on the sidebar does."""
    files = [{"name": path.name} for path in paths]
    window.run("bpy.context.scene.rigfit.photos.clear()")
    for path, file in zip(paths, files, strict=True):
        window.run(
            "with in_view('UI'):\n"
            f"    bpy.ops.rigfit.add_photos('INVOKE_DEFAULT', directory={str(path.parent)!r}, files=[{file!r}])\n"
        )
    assert window.ask("len(bpy.context.scene.rigfit.photos)") == len(paths)


def make_ready(window: BlenderWindow) -> None:
    """A file with the default head and the demo photo, the sidebar open, nothing running."""
    window.open_sidebar("rigfit")
    if not window.ask("'Head' in bpy.data.objects"):
        window.run("bpy.data.objects.remove(bpy.data.objects['Cube'])")
        light_view(window)
        window.click(window.find(operator="rigfit.add_default_head"))
        window.wait_for("'Head' in bpy.context.scene.objects", within_s=40)
    add_photos(window, PHOTO)
    window.run(f"{STATUS}.clear_error()")


def begin_fit(window: BlenderWindow) -> float:
    """Press the button; the time of the press, once the work has begun."""
    pressed = window.click(window.find(operator="rigfit.fit_photo"))
    window.wait_for(f"{STATUS}.work is not None", within_s=5)
    return pressed


def reach_backend(window: BlenderWindow) -> None:
    """Wait until the backend itself works on the photos of `many_photos`."""
    window.wait_for(f"'ooking at photo ' in {STATUS}.text", within_s=25)


def hold_backend(window: BlenderWindow) -> int:
    """Stop the backend in its tracks, as one that is busy in a long call and answers nothing; its process id."""
    pid = window.ask(f"{CLIENT}.pid")
    os.kill(pid, signal.SIGSTOP)
    return pid


def when(window: BlenderWindow, name: str, value: object, since: float) -> float:
    """Seconds from `since` until the watched expression took the value."""
    times = [moment for moment, seen in window.history(name) if seen == value and moment >= since]
    assert times, f"{name} never was {value!r}: {window.history(name)}"
    return times[0] - since


# --- the session --------------------------------------------------------------------------------------------------------


def test_first_look_and_default_head(window):
    window.run("bpy.data.objects.remove(bpy.data.objects['Cube'])")
    light_view(window)
    window.open_sidebar("rigfit")
    window.shot("panel_start", sidebar_only=True)
    button = window.find(operator="rigfit.add_default_head")
    window.watch("head text", f"{STATUS}.text if {STATUS}.work is not None else None")
    window.mark()
    pressed = window.click(button)
    window.wait_for("'Head' in bpy.context.scene.objects", within_s=COLD_START_S + 10)
    print(f"\ndefault head {time.monotonic() - pressed:.1f} s after the click, backend started; {window.gaps()}")
    print([(round(moment - pressed, 2), text) for moment, text in window.history("head text")])
    assert window.ask("bpy.context.object.name") == "Head"
    assert window.gaps().longest_undrawn_s < SLACK * 0.1


def test_fit_by_click_cold_and_warm(window):
    add_photos(window, PHOTO)
    window.run(f"{CLIENT}.kill()")
    window.run("view3d()[1].tag_redraw()")
    window.shot("panel_ready", sidebar_only=True)
    window.watch("text", f"{STATUS}.text if {STATUS}.work is not None else None")
    window.watch(
        "open",
        "bpy.data.objects['Head'].data.shape_keys.key_blocks['mouthSmileLeft'].value > 0.3 if 'Head' in bpy.data.objects else None",
    )
    cost = draw_cost(window)
    button = window.find(operator="rigfit.fit_photo")
    window.mark()
    cold = window.click(button)
    window.wait_for(f"{STATUS}.work is not None")
    window.wait_for(f"{STATUS}.result is not None", within_s=COLD_START_S + 5)
    gaps = window.gaps()
    seconds = when(window, "open", True, cold)
    words = [text for moment, text in window.history("text") if text and moment > cold]
    print(f"\ncold fit: {seconds:.2f} s from click to applied; {gaps}; the view alone draws in {1e3 * cost:.0f} ms")
    print("said: " + " | ".join(words))
    assert seconds < COLD_START_S
    assert "Reading the rig" in " ".join(words)
    assert len(set(words)) >= 3, "the artist sees what is going on"
    # The check render belongs to the first fit; the warm one is measured when it is over.
    window.wait_for(f"{STATUS}.background is None", within_s=60)
    assert window.ask(f"{STATUS}.result.check is not None"), window.ask(f"{STATUS}.result.check_trouble")
    fine_view(window)
    window.shot("window_result")
    window.shot("panel_result", sidebar_only=True)
    light_view(window)
    window.click(window.find(operator="rigfit.revert"))
    window.wait_for(f"{STATUS}.result is None")
    window.run("bpy.context.scene.rigfit.check = False")
    measured = []
    for _ in range(3):
        button = window.find(operator="rigfit.fit_photo")
        window.run("addon('link.pump').pump().longest_tick_s = 0.0")
        window.mark()
        pressed = window.click(button)
        window.wait_for(f"{STATUS}.result is not None", within_s=20)
        gaps = window.gaps()
        measured.append((when(window, "open", True, pressed), gaps.longest_undrawn_s))
        undrawn = [
            (round(moment - pressed, 2), round(1e3 * seconds)) for moment, seconds, drawn in gaps.long_ones if not drawn
        ]
        print(
            f"warm fit: {measured[-1][0]:.2f} s from click to applied; {gaps}; not drawing: {undrawn}; "
            f"longest tick of the add-on {1e3 * window.ask(TICK):.0f} ms"
        )
        window.click(window.find(operator="rigfit.revert"))
        window.wait_for(f"{STATUS}.result is None")
    assert min(seconds for seconds, _ in measured) < SLACK * WARM_FIT_S
    assert min(longest for _, longest in measured) < SLACK * LONGEST_GAP_S, (
        "without the time that software OpenGL draws"
    )


def test_what_the_artist_sees_while_it_runs(window):
    make_ready(window)
    window.wait_for(f"{CLIENT}.state == 'ready'", within_s=30)
    pid = hold_backend(window)
    try:
        begin_fit(window)
        window.wait_for(f"'photo' in {STATUS}.text.lower() or 'rig' in {STATUS}.text.lower()")
        fine_view(window)
        window.shot("panel_running", sidebar_only=True)
        window.shot("window_running")
        light_view(window)
        # Also while the backend answers nothing at all, the window comes round.
        window.mark()
        time.sleep(2.0)
        gaps = window.gaps()
        print(f"\nbackend held: {gaps}")
        assert gaps.longest_undrawn_s < SLACK * LONGEST_GAP_S
    finally:
        os.kill(pid, signal.SIGCONT)
    window.wait_for(f"{STATUS}.result is not None", within_s=20)


def test_ctrl_z_takes_the_fit_back_in_one_step(window):
    after = window.ask(KEYS)
    assert max(after.values()) > 0.3
    window.park()
    window.key("ctrl+z")
    window.wait_for(f"{STATUS}.result is not None and {STATUS}.result.undone", within_s=5)
    assert max(window.ask(KEYS).values()) == 0.0
    window.key("ctrl+shift+z")
    window.wait_for(f"not {STATUS}.result.undone", within_s=5)
    assert window.ask(KEYS) == after


def test_strength_and_keep(window):
    full = window.ask(KEYS)
    assert window.find(property="rigfit.strength").width > 100
    window.run("bpy.context.window_manager.rigfit.strength = 0.5")
    half = window.ask(KEYS)
    assert half["mouthSmileLeft"] == pytest.approx(full["mouthSmileLeft"] / 2, abs=1e-5)
    window.run("bpy.context.window_manager.rigfit.strength = 1.0")
    window.click(window.find(operator="rigfit.keep"))
    window.wait_for(f"{STATUS}.result is None")
    assert window.ask(KEYS) == full


def _cancelled(window: BlenderWindow, stop) -> None:
    """A fit of several photos (so that it lasts) is stopped by `stop`; shown at once, nothing written, backend idle."""
    before = window.ask(KEYS)
    window.watch("working", f"{STATUS}.work is not None")
    window.watch("busy", f"{CLIENT}.busy or {CLIENT}.state == 'cancelling'")
    begin_fit(window)
    reach_backend(window)
    pressed = stop()
    window.wait_for(f"{STATUS}.work is None", within_s=3)
    shown = when(window, "working", False, pressed)
    window.wait_for(f"{CLIENT}.state == 'ready'", within_s=CANCEL_DONE_S + 1)
    idle = when(window, "busy", False, pressed)
    print(f"\ncancel shown after {1e3 * shown:.0f} ms, backend idle after {1e3 * idle:.0f} ms")
    assert shown < SLACK * CANCEL_SHOWN_S
    assert idle < CANCEL_DONE_S
    time.sleep(0.3)
    assert window.ask(KEYS) == before
    assert window.ask(f"{STATUS}.result is None and {STATUS}.error is None")


@pytest.fixture
def many_photos(window, tmp_path):
    """Photos enough for a fit that lasts a few seconds."""
    make_ready(window)
    paths = []
    for number in range(12):
        path = tmp_path / f"photo {number}.png"
        path.write_bytes(PHOTO.read_bytes())
        paths.append(path)
    add_photos(window, *paths)
    yield paths
    if window.running:
        window.run("bpy.context.scene.rigfit.photos.clear()")


def test_escape_cancels(window, many_photos):
    _cancelled(window, lambda: window.key("Escape"))


def test_the_cancel_button_cancels(window, many_photos):
    _cancelled(window, lambda: window.click(window.find(operator="rigfit.cancel")))


def test_an_unanswering_backend_is_ended_after_cancel(window):
    make_ready(window)
    window.wait_for(f"{CLIENT}.state == 'ready'", within_s=30)
    pid = hold_backend(window)
    begin_fit(window)
    time.sleep(0.5)
    pressed = window.key("Escape")
    window.wait_for(f"{STATUS}.work is None", within_s=1)
    window.wait_for(f"{CLIENT}.pid != {pid}", within_s=GONE_S + 2)
    assert time.monotonic() - pressed < GONE_S + 1.5
    assert pid not in window.backends()


def test_a_killed_backend_is_said_and_the_next_fit_works(window, many_photos):
    before = window.ask(KEYS)
    begin_fit(window)
    reach_backend(window)
    os.kill(window.ask(f"{CLIENT}.pid"), signal.SIGKILL)
    window.wait_for(f"{STATUS}.error is not None", within_s=5)
    assert window.ask(f"{STATUS}.work is None")
    assert window.ask(f"{STATUS}.error.kind") == "backend_died"
    assert window.ask(KEYS) == before
    add_photos(window, PHOTO)
    begin_fit(window)
    window.wait_for(f"{STATUS}.result is not None", within_s=COLD_START_S + 5)
    window.click(window.find(operator="rigfit.revert"))
    window.wait_for(f"{STATUS}.result is None")


def test_a_rig_that_cannot_be_written_has_a_remedy_to_click(window):
    make_ready(window)
    window.run("bpy.data.objects['Head'].data.shape_keys.use_relative = False")
    window.click(window.find(operator="rigfit.fit_photo"))
    window.wait_for(f"{STATUS}.error is not None")
    time.sleep(0.3)
    window.shot("panel_error", sidebar_only=True)
    window.click(window.find(operator="rigfit.copy_report"))
    window.wait_for("bpy.context.window_manager.clipboard.startswith('rigfit report')")
    assert str(window.folder) not in window.ask("bpy.context.window_manager.clipboard")
    window.click(window.find(operator="rigfit.remedy"))
    window.wait_for(f"{STATUS}.error is None")
    assert window.ask("bpy.data.objects['Head'].data.shape_keys.use_relative")


def test_parameters_are_listed_with_what_the_photo_cannot_tell(window):
    make_ready(window)
    begin_fit(window)
    window.wait_for(f"{STATUS}.result is not None and {STATUS}.background is None", within_s=20)
    rows = "bpy.context.window_manager.rigfit.rows"
    assert window.ask(f"sum(not row.known for row in {rows})") > 5
    # The rows begin with the strongest expression: the open smile of the demo photo.
    assert "Smile" in window.ask(f"{rows}[0].name") or "jaw" in window.ask(f"{rows}[0].name")
    window.run("bpy.context.window_manager.rigfit.only_unknown = False; view3d()[1].tag_redraw()")
    # The header of the list is the next thing below Keep and Revert.
    keep = window.find(operator="rigfit.keep")
    window.click((keep.x + 60, keep.centre[1] + 2 * keep.height - 10))
    window.find(property="rigfit.only_unknown")
    window.park()
    window.ask("scroll('down', 300)")
    time.sleep(0.3)
    window.shot("panel_parameters", sidebar_only=True)
    window.click(window.find(property="rigfit.only_unknown"))
    window.wait_for("bpy.context.window_manager.rigfit.only_unknown")
    window.click(window.find(property="rigfit.only_unknown"))
    window.click(window.find(operator="rigfit.keep"))
    window.wait_for(f"{STATUS}.result is None")


def test_a_new_file_during_a_fit(window, many_photos):
    begin_fit(window)
    reach_backend(window)
    window.new_file()
    window.wait_for(f"{STATUS}.work is None", within_s=2)
    window.wait_for(f"not {CLIENT}.busy", within_s=CANCEL_DONE_S + 1)
    assert window.ask("'Head' not in bpy.data.objects")
    assert window.ask(f"{STATUS}.error is None")


def test_disabling_the_addon_during_a_fit_ends_the_backend(window, tmp_path):
    make_ready(window)
    add_photos(window, PHOTO)
    begin_fit(window)
    window.wait_for(f"{CLIENT}.alive", within_s=20)
    pid = window.ask(f"{CLIENT}.pid")
    window.run(f"bpy.ops.preferences.addon_disable(module={PACKAGE!r})")
    deadline = time.monotonic() + GONE_S
    while window.backends() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pid not in window.backends()
    assert window.backends() == {}
    window.run(f"bpy.ops.preferences.addon_enable(module={PACKAGE!r})")
    window.wait_for("hasattr(bpy.types.Scene, 'rigfit')")
    # Blender forgets the preferences of an add-on that is disabled.
    window.run(f"bpy.context.preferences.addons[{PACKAGE!r}].preferences.backend = {str(window.backend)!r}")
    make_ready(window)
    begin_fit(window)
    window.wait_for(f"{STATUS}.result is not None", within_s=COLD_START_S + 5)


def test_quit_during_a_fit_leaves_no_process(window, many_photos):
    begin_fit(window)
    reach_backend(window)
    assert window.backends()
    window.park()
    window.key("ctrl+q")
    assert window.wait_ended(within_s=10) == 0
    deadline = time.monotonic() + GONE_S
    while window.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert window.processes() == {}
