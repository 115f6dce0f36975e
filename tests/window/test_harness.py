# SPDX-License-Identifier: Apache-2.0
"""The harness itself, on a real Blender: the zip is in, ticks are measured, real clicks and keys arrive, nothing is left."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from blender_window import PACKAGE, NotSeen, ProbeError
from display import assert_not_blank

# A tab with buttons whose effect can be read back.
PANEL = """
class Counts:
    number: bpy.props.IntProperty()
    def execute(self, context):
        pressed.append(self.number)
        return {"FINISHED"}

class PROBE_OT_count(Counts, bpy.types.Operator):
    bl_idname, bl_label = "probe.count", "Count"

class PROBE_OT_other(Counts, bpy.types.Operator):
    bl_idname, bl_label = "probe.other", "Count"

class PROBE_PT_panel(bpy.types.Panel):
    bl_space_type, bl_region_type, bl_category, bl_label = "VIEW_3D", "UI", "probe", "Probe"
    def draw(self, context):
        row = self.layout.row(align=True)
        for number in (1, 2):
            row.operator("probe.count", icon="ADD").number = number
        off = self.layout.row()
        off.enabled = False
        off.operator("probe.other").number = 3
        self.layout.prop(context.scene, "use_gravity", toggle=True)
        self.layout.prop(context.scene.render, "resolution_percentage", slider=True)
        for _ in range(gap):
            self.layout.label(text="…")
        self.layout.operator("probe.count", text="Far down").number = 4

pressed, gap = [], 0
for cls in (PROBE_OT_count, PROBE_OT_other, PROBE_PT_panel):
    bpy.utils.register_class(cls)
"""


@pytest.fixture
def probe_tab(window):
    """The tab above, open, nothing pressed."""
    if not window.ask("hasattr(bpy.types, 'PROBE_PT_panel')"):
        window.run(PANEL)
    window.run("pressed.clear(); gap = 0")
    window.open_sidebar("probe")


def test_the_zip_is_installed_and_enabled_under_its_real_name(window):
    assert window.version >= (4, 2, 0)
    assert window.ask(f"{PACKAGE!r} in bpy.context.preferences.addons")
    assert window.ask("addon().__file__").startswith(str(window.folder / "resources" / "extensions" / "user_default"))
    assert not window.ask("bpy.app.background")
    assert not window.ask("bpy.app.online_access")
    # What rigfit starts for its check renders: Blender's own program is the loader there.
    assert window.ask("os.environ['RIGFIT_BLENDER']") == os.environ["RIGFIT_TEST_WINDOW"]


def test_the_export_menu_has_the_entry(window):
    drawn = "bpy.types.TOPBAR_MT_file_export._dyn_ui_initialize()"
    assert [name for name in window.ask(f"[f.__module__ for f in {drawn}]") if name.startswith(PACKAGE)]


def test_an_idle_window_comes_round_all_the_time(window):
    window.mark()
    time.sleep(1.5)
    gaps = window.gaps()
    print(f"idle: {gaps}")
    assert gaps.ticks > 100
    assert gaps.longest_s < 0.05
    assert gaps.long_ones == []


def test_a_window_that_stands_still_is_noticed(window):
    window.mark()
    before = time.monotonic()
    window.run("import time; bpy.app.timers.register(lambda: time.sleep(0.2))")
    time.sleep(0.4)
    gaps = window.gaps()
    assert 0.2 <= gaps.longest_s < 0.4
    [(moment, seconds, drawn)] = gaps.long_ones
    assert seconds == gaps.longest_s == gaps.longest_undrawn_s
    assert drawn == []
    assert before < moment - seconds < moment < time.monotonic()
    window.run("time.sleep(0.2)")  # the probe's own work is not the add-on's
    window.mark()
    window.run("time.sleep(0.2)")
    assert window.gaps().longest_s < 0.1


def test_drawing_is_told_from_standing_still(window):
    window.run(
        "def slowly():\n"
        "    time.sleep(0.2)\n"
        "    bpy.types.SpaceView3D.draw_handler_remove(slow, 'WINDOW')\n"
        "import time\n"
        "slow = bpy.types.SpaceView3D.draw_handler_add(slowly, (), 'WINDOW', 'POST_PIXEL')\n"
    )
    window.mark()
    window.run("view3d()[0].tag_redraw()")
    time.sleep(0.6)
    gaps = window.gaps()
    assert gaps.longest_s >= 0.2
    assert gaps.longest_undrawn_s < 0.1
    assert "3D view" in max(gaps.long_ones, key=lambda one: one[1])[2]


def test_questions_answers_and_errors(window):
    assert window.ask("{'a': [1, 2.5, None, 'ä'], 'b': tuple(bpy.context.scene.cursor.location)}") == {
        "a": [1, 2.5, None, "ä"],
        "b": [0.0, 0.0, 0.0],
    }
    window.run("kept = 7")
    assert window.ask("kept + 1") == 8
    with pytest.raises(ProbeError, match="ZeroDivisionError"):
        window.ask("1 / 0")
    with pytest.raises(NotSeen, match=r"kept > 7 is still False after 0 s"):
        window.wait_for("kept > 7", within_s=0.1)


def test_what_is_watched_is_kept_with_its_times(window):
    window.run("state = 'before'")
    window.watch("state", "state")
    window.ask("None")
    changed = time.monotonic()
    window.run("state = 'after'")
    window.ask("None")
    (first, before), (second, after) = window.history("state")
    assert (before, after) == ("before", "after")
    assert first < changed <= second < changed + 0.2


@pytest.mark.usefixtures("probe_tab")
def test_the_right_button_is_found_and_really_clicked(window):
    tools = window.widgets("tool")
    assert len(tools) == 3  # the disabled one is not among them
    two = window.find(operator="probe.count(number=2")
    assert two.centre[1] == tools[0].centre[1]
    assert two.x > tools[0].x
    pressed = window.click(two)
    window.wait_for("pressed")
    assert window.ask("pressed") == [2]
    assert time.monotonic() - pressed < 2
    window.click(window.find(operator="probe.count"))  # the first of several
    window.wait_for("len(pressed) == 2")
    assert window.ask("pressed") == [2, 1]
    with pytest.raises(NotSeen, match=r"no enabled widget for probe\.other .*bpy\.ops\.probe\.count\(number=2"):
        window.find(operator="probe.other")


@pytest.mark.usefixtures("probe_tab")
def test_widgets_are_found_by_their_property(window):
    window.run("bpy.context.scene.use_gravity = True")
    toggle = window.find(property="use_gravity")
    assert toggle.kind == "toggle"
    window.click(toggle)
    window.wait_for("not bpy.context.scene.use_gravity")
    assert window.find(property="resolution_percentage").kind == "numslider"


@pytest.mark.usefixtures("probe_tab")
def test_a_button_below_the_sidebars_edge_is_scrolled_to(window):
    window.run("gap = 40; view3d()[1].tag_redraw()")
    window.click(window.find(operator="probe.count(number=4"))
    window.wait_for("pressed == [4]")
    window.click(window.find(operator="probe.count(number=1"))
    window.wait_for("pressed == [4, 1]")


@pytest.mark.usefixtures("probe_tab")
def test_the_theme_is_as_it_was(window):
    colours = "[tuple(bpy.context.preferences.themes[0].user_interface.wcol_tool.inner), tuple(bpy.context.preferences.themes[0].user_interface.wcol_numslider.item)]"
    before = window.ask(colours)
    window.widgets()
    assert window.ask(colours) == before


def test_undo_and_redo_by_keys(window):
    window.park()
    window.run(
        "with in_view():\n"
        "    bpy.ops.ed.undo_push(message='one')\n"
        "    bpy.data.objects['Cube'].location.x = 2.0\n"
        "    bpy.ops.ed.undo_push(message='two')\n"
    )
    window.key("ctrl+z")
    window.wait_for("bpy.data.objects['Cube'].location.x == 0.0")
    window.key("ctrl+shift+z")
    window.wait_for("bpy.data.objects['Cube'].location.x == 2.0")


def test_the_panel_of_the_addon_is_there(window):
    window.open_sidebar("rigfit")
    assert window.find(operator="rigfit.add_photos").width > 100
    path = window.shot("harness-panel", sidebar_only=True)
    assert path.stat().st_size > 2000


def test_a_new_file_by_keys_keeps_the_addon(window):
    window.run("bpy.data.objects['Cube'].location.x = 9.0")
    window.new_file()
    assert window.ask("bpy.data.objects['Cube'].location.x") == 0.0
    assert window.ask(f"{PACKAGE!r} in bpy.context.preferences.addons")


def test_blank_pictures_are_refused(window):
    assert_not_blank(window.display.picture(), "the window")
    black = np.zeros((80, 120, 3), np.uint8)
    with pytest.raises(AssertionError, match="blank"):
        assert_not_blank(black, "black")
    # Blender's empty grey window with nothing but a few rulers in it.
    ruled = np.full((200, 300, 3), 48, np.uint8)
    ruled[50, :200, 0] = np.arange(200)
    with pytest.raises(AssertionError, match="nearly blank"):
        assert_not_blank(ruled, "ruled")
