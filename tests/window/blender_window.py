# SPDX-License-Identifier: Apache-2.0
"""A real Blender in a real window, driven from outside: mouse, keys, screenshots, and questions to the probe inside.

    with Display() as display, BlenderWindow(display, blender, zip, backend, folder, reports) as window:
        window.open_sidebar("rigfit")
        window.watch("work", "addon('link.pump').status().work is not None")
        pressed = window.click(window.find(operator="rigfit.fit_photo"))
        window.mark()
        window.wait_for("addon('link.pump').status().result is not None", within_s=30)
        assert window.gaps().longest_s < 0.05
        window.shot("fitted")
        window.key("ctrl+z")

Expressions are Python, evaluated in Blender's main thread; what they may use is in probe.py (`bpy`, `addon(module)`,
`view3d()`, `in_view()`, …). Times are `time.monotonic()`, which is one clock for all processes of the machine. Positions
are pixels from the upper left corner of the screen, which Blender's window fills.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from display import Display, assert_not_blank, die_with_parent
from PIL import Image
from scipy import ndimage

HERE = Path(__file__).resolve().parent
PACKAGE = "bl_ext.user_default.rigfit"
MARK = "RIGFIT_WINDOW_SESSION"  # every process that Blender starts, and theirs, has it in its environment

START_S = 60.0
ANSWER_S = 20.0
ORPHANS_END_S = 5.0  # the issue's own figure: after a `kill -9` of Blender its backend is gone
SMALLEST_PX = 10  # of a button; less is an icon's corner
SCROLLS = 10
HOVER_S = 0.5
DRAW_S = 10.0
SETTLE_S = 10.0
STILL_S = 0.15


class BlenderEnded(AssertionError):
    """Blender is gone, and something was asked of it."""


class ProbeError(AssertionError):
    """What was evaluated in Blender raised; the text is its traceback."""


class NotSeen(AssertionError):
    """What was waited or looked for did not come."""


@dataclass(frozen=True)
class Gaps:
    """How Blender's main loop came round since `mark`."""

    longest_s: float
    longest_undrawn_s: float  # the longest in which Blender drew no region: what is left is Python, or waiting
    ticks: int
    seconds: float
    long_ones: list[tuple[float, float, list[str]]]  # (when it ended, seconds, what was drawn) of each above 30 ms

    def __str__(self) -> str:
        longest, undrawn = 1e3 * self.longest_s, 1e3 * self.longest_undrawn_s
        return f"longest gap {longest:.0f} ms, {undrawn:.0f} ms without drawing, in {self.seconds:.1f} s ({self.ticks} ticks)"


@dataclass(frozen=True)
class Button:
    """A widget on the screen; its operator (as Python) or the path of its property, where Blender was asked."""

    kind: str
    x: int
    y: int
    width: int
    height: int
    operator: str = ""
    data_path: str = ""

    @property
    def centre(self) -> tuple[int, int]:
        return self.x + self.width // 2, self.y + self.height // 2


@dataclass
class BlenderWindow:
    """One Blender on a display, with the zip installed. Use as a context manager.

    blender: the executable. zip_path: the extension, or None. backend: a Python with rigfit. folder: an empty folder for
    all that this Blender writes. reports: where screenshots stay.
    """

    display: Display
    blender: Path
    zip_path: Path | None
    backend: Path
    folder: Path
    reports: Path
    version: tuple[int, int, int] = (0, 0, 0)
    pid: int = 0
    start_s: float = 0.0
    _process: subprocess.Popen[bytes] | None = None
    _mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _asked: int = 0

    # --- start and end ------------------------------------------------------------------------------------------------

    def __enter__(self) -> BlenderWindow:
        started = time.monotonic()
        channel = self.folder / "channel"
        for name in ("home", "temporary", "channel"):
            (self.folder / name).mkdir(parents=True)
        settings = {
            "zip": str(self.zip_path) if self.zip_path else None,
            "repository": "user_default",
            "package": PACKAGE,
            "backend": str(self.backend),
        }
        (channel / "probe.json").write_text(json.dumps(settings), encoding="utf-8")
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "XDG_RUNTIME_DIR") if name in os.environ}
        environment = {
            **kept,
            MARK: self._mark,
            "DISPLAY": self.display.name,
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "temporary"),
            "BLENDER_USER_RESOURCES": str(self.folder / "resources"),
            "LIBGL_ALWAYS_SOFTWARE": "1",
            "MESA_SHADER_CACHE_DIR": str(self.reports.parent / "window-shaders"),  # half of a cold start
            "PYTHONNOUSERSITE": "1",
        }
        size = [str(number) for number in (0, 0, self.display.width, self.display.height)]
        command = [str(self.blender), "--offline-mode", "-noaudio", "--window-geometry", *size]
        command += ["--python", str(HERE / "probe.py"), "--", str(channel)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        try:
            told = self._await_start(channel, started + START_S)
            self.version, self.pid = tuple(told["version"]), told["pid"]
            self.park()
        except BaseException:
            with contextlib.suppress(AssertionError):
                self.close()
            raise
        self.start_s = time.monotonic() - started
        return self

    def _await_start(self, channel: Path, deadline: float) -> dict[str, Any]:
        while time.monotonic() < deadline:
            if (channel / "failed.json").exists():
                raise ProbeError(json.loads((channel / "failed.json").read_text(encoding="utf-8"))["error"])
            if (channel / "ready.json").exists():
                return json.loads((channel / "ready.json").read_text(encoding="utf-8"))
            self._check_running()
            time.sleep(0.02)
        raise NotSeen(f"Blender was not ready within {START_S:.0f} s:\n{self.last_log()}")

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except AssertionError:
            if error is None:
                raise

    def close(self) -> None:
        """Kill Blender if it still runs, and everything it started; AssertionError if that did not end by itself."""
        if self._process is None:
            return
        process, self._process = self._process, None
        if process.poll() is None:
            process.kill()
        process.wait()
        self._until(lambda: not self.processes(), ORPHANS_END_S)
        left = self.processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._until(lambda: not self.processes(), ORPHANS_END_S)
        shutil.copyfile(self.log, self.reports / f"{self.folder.name}.log")
        assert not left, f"still running {ORPHANS_END_S:.0f} s after Blender's end: {left}"

    @property
    def log(self) -> Path:
        """Everything that Blender printed."""
        return self.folder / "blender.log"

    def last_log(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_ended(self, within_s: float = 15.0) -> int:
        """Wait for Blender to end by itself; its exit code."""
        assert self._process is not None
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise NotSeen(f"Blender still runs after {within_s:.0f} s:\n{self.last_log()}") from None

    def kill(self) -> None:
        """`kill -9` for Blender alone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def processes(self) -> dict[int, str]:
        """Blender and everything that it and its children started and that still runs: pid -> command line."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self._mark}".encode() in (folder / "environ").read_bytes():
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if words:
                        found[int(folder.name)] = words
        return found

    def backends(self) -> dict[int, str]:
        """The processes that run ``rigfit serve``: pid -> command line."""
        return {pid: line for pid, line in self.processes().items() if "rigfit" in line and " serve " in f"{line} "}

    def _check_running(self) -> None:
        if not self.running:
            code = self._process.returncode if self._process is not None else None
            raise BlenderEnded(f"Blender has ended (exit code {code}):\n{self.last_log()}")

    # --- questions ----------------------------------------------------------------------------------------------------

    def ask(self, expression: str, within_s: float = ANSWER_S) -> Any:
        """The value of a Python expression in Blender's main thread, as JSON carries it. ProbeError, BlenderEnded."""
        return self._request("value", expression, within_s).get("value")

    def run(self, statements: str, within_s: float = ANSWER_S) -> None:
        """Run Python statements in Blender's main thread; names stay for later questions. ProbeError, BlenderEnded."""
        self._request("run", statements, within_s)

    def _request(self, kind: str, code: str, within_s: float) -> dict[str, Any]:
        self._check_running()
        self._asked += 1
        channel = self.folder / "channel"
        answer = channel / f"answer-{self._asked}.json"
        partial = channel / "request.partial"
        partial.write_text(json.dumps({"id": self._asked, "kind": kind, "code": code}), encoding="utf-8")
        partial.replace(channel / "request.json")
        deadline = time.monotonic() + within_s
        while not answer.exists():
            self._check_running()
            if time.monotonic() > deadline:
                (channel / "request.json").unlink(missing_ok=True)
                raise NotSeen(f"Blender's main loop did not answer within {within_s:.0f} s: {code}\n{self.last_log()}")
            time.sleep(0.003)
        told = json.loads(answer.read_text(encoding="utf-8"))
        answer.unlink()
        if "error" in told:
            raise ProbeError(f"{code}\n{told['error']}")
        return told

    def wait_for(self, expression: str, within_s: float = 10.0) -> Any:
        """Ask until the value is true, and return it. NotSeen with the last value."""
        deadline = time.monotonic() + within_s
        while True:
            value = self.ask(expression)
            if value:
                return value
            if time.monotonic() > deadline:
                self.shot(f"not-seen-{self._asked}", blank_allowed=True)
                raise NotSeen(f"{expression} is still {value!r} after {within_s:.0f} s")
            time.sleep(0.02)

    def watch(self, name: str, expression: str) -> None:
        """Have the expression evaluated in every tick (about each 7 ms) from now on; see `history`."""
        self.run(f"watch({name!r}, {expression!r})")

    def history(self, name: str) -> list[tuple[float, Any]]:
        """(time, value) of every change of what is watched, the first value first."""
        return [(moment, value) for moment, value in self.ask(f"watched[{name!r}][1]")]

    # --- ticks --------------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Count gaps from now on. Look for buttons before, not after: `find` has the whole window drawn."""
        self.run("ticks.mark()")

    def settle(self, within_s: float = SETTLE_S) -> None:
        """Wait until Blender has not drawn anything for a moment: after opening, moving, changing something."""
        if not self._until(lambda: self.ask("ticks.still_s()") > STILL_S, within_s):
            raise NotSeen(f"Blender has not stopped drawing within {within_s:.0f} s")

    def gaps(self) -> Gaps:
        told = self.ask("ticks.told()")
        long_ones = [(moment, seconds, names) for moment, seconds, names in told["long_ones"]]
        return Gaps(told["longest_s"], told["longest_undrawn_s"], told["count"], told["seconds"], long_ones)

    # --- mouse and keys -----------------------------------------------------------------------------------------------

    def move(self, x: int, y: int) -> None:
        self.display.xdotool("mousemove", x, y)

    def park(self) -> None:
        """Put the mouse where it hovers over nothing: into the 3D view."""
        x, y, width, height = self.ask("view_rectangle()")
        self.move(x + width // 3, self.display.height - (y + height // 3))
        self._until(lambda: not self.ask("hovered()"), HOVER_S)

    def click(self, target: Button | tuple[int, int], button: int = 1) -> float:
        """Move the real mouse there and press; the time of the press."""
        x, y = target.centre if isinstance(target, Button) else target
        self.move(x, y)
        self.ask("None")  # Blender has come round since, so that it knows where the mouse is
        time.sleep(0.03)
        pressed = time.monotonic()
        self.display.xdotool("click", button)
        return pressed

    def key(self, *names: str) -> float:
        """Press keys on the real keyboard, as xdotool names them ("ctrl+z", "Escape"); the time of the first press.

        They go to what is under the mouse, as always in Blender.
        """
        pressed = time.monotonic()
        self.display.xdotool("key", *names)
        return pressed

    def new_file(self, within_s: float = 10.0) -> None:
        """File > New > General by keys, as an artist does it; returns when the new file is there."""
        self.park()
        self.run("bpy.context.scene['rigfit_window_old'] = 1")
        self.key("ctrl+n")
        time.sleep(0.3)  # the menu unfolds; its first entry is under the keyboard
        self.key("Return")
        self.wait_for("'rigfit_window_old' not in bpy.context.scene", within_s)

    # --- what is on the screen ----------------------------------------------------------------------------------------

    def open_sidebar(self, tab: str) -> None:
        """Open the 3D view's sidebar with this tab."""
        self.run("view3d()[2].show_region_ui = True")
        self.wait_for("sidebar()")
        self.run(f"view3d()[1].active_panel_category = {tab!r}; draw_sidebar()")
        self.wait_for(f"sidebar()[4] == {tab!r}")
        self.settle()  # it slides in

    def sidebar(self) -> tuple[int, int, int, int]:
        """x, y, width, height of the open sidebar."""
        told = self.ask("sidebar()")
        if told is None:
            raise NotSeen("the sidebar is closed")
        x, y, width, height, _tab = told
        return x, self.display.height - (y + height), width, height

    def widgets(self, kind: str | None = None) -> list[Button]:
        """The enabled widgets that the sidebar shows, from top to bottom, left to right.

        kind: one of tool, toggle, radio, option, text, numslider, num, menu; None: all. Each kind gets a colour of its own
        for one picture, and the theme its own colours back; only the sidebar is drawn for that.
        """
        self.park()
        left, top, width, height = self.sidebar()
        try:
            self._until_drawn(self.ask("loud(True)"))
            picture = self.display.picture()[top : top + height, left : left + width].astype(int)
        finally:
            self._until_drawn(self.ask("loud(False)"))
        found = []
        for name, colour in self.ask("LOUD").items():
            mask = np.abs(picture - np.array(colour)).max(axis=2) <= 2
            labels, _count = ndimage.label(mask, np.ones((3, 3)))
            for rows, columns in ndimage.find_objects(labels):
                size = columns.stop - columns.start, rows.stop - rows.start
                if min(size) >= SMALLEST_PX:
                    found.append(Button(name, left + columns.start, top + rows.start, *size))
        # An icon cuts a piece out of its button: a rectangle inside another is part of it.
        whole = [one for one in found if not any(_inside(one, other) for other in found if other is not one)]
        return sorted((one for one in whole if kind in (None, one.kind)), key=lambda one: (one.y // 4, one.x))

    def _until_drawn(self, before: int) -> None:
        if not self._until(lambda: self.ask("drawn()") > before, DRAW_S):
            raise NotSeen(f"the sidebar was not drawn within {DRAW_S:.0f} s")
        self.ask("None")  # what was drawn is on the screen when Blender has come round once more

    def known(self, buttons: list[Button]) -> Iterator[Button]:
        """The same buttons with what Blender itself says that each does when the mouse is over it."""
        self.park()
        last: dict[str, str] = {}
        for button in buttons:
            self.move(*button.centre)
            # Until Blender has seen the mouse there, it tells of the button before; two may also do the same.
            told = self._until(lambda last=last: (now := self.ask("hovered()")) != last and now, HOVER_S) or last
            last = told
            yield replace(button, operator=told.get("operator", ""), data_path=told.get("property", ""))

    @staticmethod
    def _until(question: Callable[[], Any], within_s: float) -> Any:
        deadline = time.monotonic() + within_s
        while True:
            value = question()
            if value or time.monotonic() > deadline:
                return value
            time.sleep(0.01)

    def find(self, operator: str = "", property: str = "", kind: str | None = None) -> Button:
        """The enabled widget of the sidebar that runs an operator or shows a property, scrolled into view. NotSeen.

        operator: "rigfit.fit_photo", or with the beginning of its arguments "rigfit.remedy(remedy='unpin'". property: the
        end of its path, "rigfit.strength".
        """
        wanted = f"bpy.ops.{operator}" if "(" in operator else f"bpy.ops.{operator}("
        kind = kind or ("tool" if operator else None)
        seen: list[str] = []
        for scroll in ("", "scroll('up', 10000)", *("scroll('down', 300)",) * SCROLLS):
            if scroll and not self.ask(scroll):
                continue  # nothing new to see
            for button in self.known(self.widgets(kind)):
                seen.append(button.operator or button.data_path or f"{button.kind} at {button.centre}")
                if (operator and button.operator.startswith(wanted)) or (
                    property and button.data_path.endswith(property)
                ):
                    return button
        self.shot(f"not-found-{self._asked}", blank_allowed=True)
        raise NotSeen(f"no enabled widget for {operator or property} in the sidebar; there are {sorted(set(seen))}")

    def shot(self, name: str, sidebar_only: bool = False, blank_allowed: bool = False) -> Path:
        """A picture of the screen, kept under .venv/reports/window/; a blank one fails."""
        picture = self.display.picture()
        if sidebar_only:
            x, y, width, height = self.sidebar()
            picture = picture[y : y + height, x : x + width]
        path = self.reports / f"{name}.png"
        Image.fromarray(np.ascontiguousarray(picture)).save(path)
        if not blank_allowed:
            assert_not_blank(picture, path.name)
        return path


def _inside(one: Button, other: Button) -> bool:
    return (
        other.x <= one.x
        and other.y <= one.y
        and one.x + one.width <= other.x + other.width
        and one.y + one.height <= other.y + other.height
        and (one.width, one.height) != (other.width, other.height)
    )
