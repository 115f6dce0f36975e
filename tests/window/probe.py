# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs inside Blender's window for the tests (never shipped): installs the zip, measures ticks, answers questions.

Started as ``blender --python probe.py -- FOLDER``. The test and this file talk through files in FOLDER: `probe.json` says
what to do at the start, `ready.json` (or `failed.json`) comes when the window is up, then every `request.json` is answered
by an `answer-ID.json`. Everything is evaluated in Blender's main thread, by a timer of its own.
"""

import importlib
import json
import os
import sys
import time
import traceback

import bpy

TICK_S = 0.005
SETTLE_TICKS = 20  # so that the window is drawn when it is said to be ready
FOLDER = sys.argv[sys.argv.index("--") + 1]
with open(os.path.join(FOLDER, "probe.json"), encoding="utf-8") as file:
    SETTINGS = json.load(file)

# Each kind of widget in a colour (of 255) that nothing else on the screen has.
LOUD = {
    "tool": (255, 0, 255),
    "toggle": (0, 255, 255),
    "radio": (255, 255, 0),
    "option": (0, 255, 0),
    "text": (255, 0, 0),
    "numslider": (0, 0, 255),
    "num": (255, 153, 0),
    "menu": (153, 0, 255),
}


# --- what requests may use ----------------------------------------------------------------------------------------------


def addon(module: str = ""):
    """A module of the installed add-on, by its name inside it."""
    return importlib.import_module(f"{SETTINGS['package']}.{module}" if module else SETTINGS["package"])


def main_window():
    return bpy.context.window_manager.windows[0]


def view3d():
    """The largest 3D view of the window: (area, its sidebar, its space)."""
    areas = [area for area in main_window().screen.areas if area.type == "VIEW_3D"]
    area = max(areas, key=lambda one: one.width * one.height)
    return area, next(region for region in area.regions if region.type == "UI"), area.spaces.active


def in_view(region_type: str = "WINDOW"):
    """A context for operators: the 3D view, as if the mouse were over it."""
    area = view3d()[0]
    region = next(one for one in area.regions if one.type == region_type)
    return bpy.context.temp_override(window=main_window(), area=area, region=region)


def sidebar():
    """[x, y, width, height] of the sidebar in pixels from the lower left corner, and the open tab; None if it is closed."""
    _area, region, space = view3d()
    if not space.show_region_ui or region.width <= 1:
        return None
    return [region.x, region.y, region.width, region.height, region.active_panel_category]


def view_rectangle():
    """[x, y, width, height] of the 3D view."""
    area = view3d()[0]
    return [area.x, area.y, area.width, area.height]


_drawn = [0]  # times that the sidebar was
_drawn_names: set = set()  # what was drawn since the last tick
_quiet: list = []

# The regions whose drawing is told beside a long gap.
DRAWN = {
    "SpaceView3D": {"WINDOW": "3D view", "UI": "sidebar", "HEADER": "header", "TOOLS": "toolbar"},
    "SpaceProperties": {"WINDOW": "properties"},
    "SpaceOutliner": {"WINDOW": "outliner"},
    "SpaceDopeSheetEditor": {"WINDOW": "timeline"},
}


def _on_draw(name: str) -> None:
    _drawn_names.add(name)
    if name == "sidebar":
        _drawn[0] += 1


def draw_sidebar() -> int:
    """Have the sidebar drawn, and nothing else; `drawn() > ` what this returns says that it was."""
    view3d()[1].tag_redraw()
    return _drawn[0]


def drawn() -> int:
    return _drawn[0]


def loud(on: bool) -> int:
    """Give every kind of widget its own colour, or put the theme back; then as `draw_sidebar`.

    `foreach_set` writes the colours without telling all of Blender: the rest of the window need not be drawn again.
    """
    theme = bpy.context.preferences.themes[0]
    if on and not _quiet:
        for kind, colour in LOUD.items():
            widget = getattr(theme.user_interface, f"wcol_{kind}")
            for name in ("inner", "inner_sel", "item"):
                value = getattr(widget, name)
                _quiet.append((value, tuple(value)))
                value.foreach_set([*(part / 255 for part in colour), 1.0][: len(value)])
    elif not on:
        while _quiet:
            value, before = _quiet.pop()
            value.foreach_set(before)
    return draw_sidebar()


def scroll(direction: str, pixels: int) -> bool:
    """Scroll the sidebar up or down; whether it moved."""
    region = view3d()[1]
    before = tuple(region.view2d.region_to_view(0, 0))
    with in_view("UI"):
        operator = getattr(bpy.ops.view2d, f"scroll_{direction}")
        while operator.poll() and pixels > 0:
            at = tuple(region.view2d.region_to_view(0, 0))
            operator(deltay=int(pixels))
            step = abs(region.view2d.region_to_view(0, 0)[1] - at[1])
            if step == 0:
                break
            pixels -= step
    return before != tuple(region.view2d.region_to_view(0, 0))


def hovered() -> dict:
    """What the button under the mouse does: its operator as Python, or the path of its property."""
    area, region, _space = view3d()
    manager = bpy.context.window_manager
    kept, found = manager.clipboard, {}
    with bpy.context.temp_override(window=main_window(), area=area, region=region):
        for name, operator in (
            ("operator", bpy.ops.ui.copy_python_command_button),
            ("property", bpy.ops.ui.copy_data_path_button),
        ):
            if operator.poll():
                operator(**({"full_path": True} if name == "property" else {}))
                found[name] = manager.clipboard
    manager.clipboard = kept
    return found


# --- ticks ----------------------------------------------------------------------------------------------------------------


class Ticks:
    """The longest times in which Blender's main loop did not come round, without what this file does itself."""

    def __init__(self) -> None:
        self.last = self.last_drawn = time.perf_counter()
        self.mark()

    def mark(self) -> None:
        self.count, self.longest, self.longest_undrawn, self.long_ones = 0, 0.0, 0.0, []
        self.since = time.perf_counter()

    def begin(self) -> None:
        now = time.perf_counter()
        gap = now - self.last
        self.count += 1
        self.longest = max(self.longest, gap)
        if _drawn_names:
            self.last_drawn = now
        else:
            self.longest_undrawn = max(self.longest_undrawn, gap)
        if gap > 0.03 and len(self.long_ones) < 1000:
            self.long_ones.append([time.monotonic(), gap, sorted(_drawn_names)])
        _drawn_names.clear()

    def end(self) -> None:
        self.last = time.perf_counter()

    def still_s(self) -> float:
        """How long nothing has been drawn."""
        return time.perf_counter() - self.last_drawn

    def told(self) -> dict:
        return {
            "count": self.count,
            "longest_s": self.longest,
            "longest_undrawn_s": self.longest_undrawn,
            "seconds": time.perf_counter() - self.since,
            "long_ones": self.long_ones,
        }


ticks = Ticks()
watched: dict = {}  # name -> [compiled expression, [[monotonic time, value], …]]


def watch(name: str, expression: str) -> None:
    """Evaluate the expression in every tick from now on, and keep each new value with its time."""
    watched[name] = [compile(expression, f"<watched {name}>", "eval"), []]


def _look() -> None:
    for code, history in watched.values():
        try:
            value = eval(code, SPACE)
        except Exception as error:
            value = f"{type(error).__name__}: {error}"
        if not history or history[-1][1] != value:
            history.append([time.monotonic(), value])


# --- requests ---------------------------------------------------------------------------------------------------------------

SPACE: dict = {
    name: globals()[name]
    for name in (
        "bpy", "os", "addon", "main_window", "view3d", "in_view", "sidebar", "view_rectangle", "draw_sidebar", "drawn", "loud",
        "LOUD", "scroll", "hovered", "ticks", "watch",
        "watched",
    )
}  # fmt: skip


def write(name: str, content: dict) -> None:
    path = os.path.join(FOLDER, name)
    with open(path + ".partial", "w", encoding="utf-8") as file:
        json.dump(content, file, default=_plain)
    os.replace(path + ".partial", path)


def _plain(value):
    try:
        return list(value)
    except TypeError:
        return repr(value)


def _answer() -> None:
    path = os.path.join(FOLDER, "request.json")
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as file:
        request = json.load(file)
    os.remove(path)
    answer = {}
    try:
        if request["kind"] == "value":
            answer["value"] = eval(request["code"], SPACE)
        else:
            exec(request["code"], SPACE)
    except BaseException as error:
        answer = {"error": "".join(traceback.format_exception(error))}
    write(f"answer-{request['id']}.json", answer)


def tick() -> float:
    ticks.begin()
    try:
        _look()
        _answer()
        if ticks.count == SETTLE_TICKS and not os.path.exists(os.path.join(FOLDER, "ready.json")):
            write("ready.json", {"version": list(bpy.app.version), "pid": os.getpid(), "package": SETTINGS["package"]})
    except BaseException:
        traceback.print_exc()
    ticks.end()
    return TICK_S


# --- the start ----------------------------------------------------------------------------------------------------------------


def prepare() -> None:
    view = bpy.context.preferences.view
    view.show_splash = False
    view.ui_scale = 1.0
    view.show_tooltips = False  # they would cover what is looked for
    view.use_save_prompt = False
    # Otherwise Blender draws the 3D view eight times after each change, to smooth its edges.
    bpy.context.preferences.system.viewport_aa = "OFF"
    bpy.context.preferences.use_preferences_save = False


def install() -> None:
    done = bpy.ops.extensions.package_install_files(
        filepath=SETTINGS["zip"], repo=SETTINGS["repository"], enable_on_install=True
    )
    if done != {"FINISHED"} or SETTINGS["package"] not in bpy.context.preferences.addons:
        raise RuntimeError(f"the zip was not installed and enabled: {done}")
    bpy.context.preferences.addons[SETTINGS["package"]].preferences.backend = SETTINGS["backend"]


try:
    prepare()
    started = time.monotonic()
    if SETTINGS["zip"]:
        install()
    print(f"probe: installed after {time.monotonic() - started:.2f} s", flush=True)
    for space, regions in DRAWN.items():
        for region, name in regions.items():
            getattr(bpy.types, space).draw_handler_add(_on_draw, (name,), region, "POST_PIXEL")
    bpy.app.timers.register(tick, first_interval=0.0, persistent=True)
except BaseException:
    write("failed.json", {"error": traceback.format_exc()})
