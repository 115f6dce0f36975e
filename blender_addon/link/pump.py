# SPDX-License-Identifier: GPL-3.0-or-later
"""The one timer: a few milliseconds at a time it reads the socket, goes on with the work, and has the panel redrawn."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import bpy

from ..fit.status import Status
from ..messages import RigError
from .client import Client, Launch
from .flow import Flow, Steps

# Between two ticks while something goes on, and while the backend only stands by.
BUSY_S, IDLE_S = 0.005, 0.25
# Between two pictures of the panel.
REDRAW_S = 0.1
# What one tick may take: the socket, and the steps of the work.
READ_S, WORK_S = 0.004, 0.010


class Pump:
    """The client, the flows that run, and what the panel shows of them."""

    def __init__(self, launch: Callable[[], Launch]) -> None:
        self.client = Client(launch)
        self.status = Status()
        self._flows: list[tuple[Flow, Callable[[Flow], None]]] = []
        self.longest_tick_s = 0.0
        self._shown: tuple[object, ...] = ()
        self._drawn = 0.0

    # --- work ---------------------------------------------------------------------------------------------------------

    def start(self, steps: Steps, done: Callable[[Flow], None], say: Callable[[int, int, str], None]) -> Flow:
        """Run a generator (see `flow`) to its end, a piece each tick; then call `done` with it."""
        flow = Flow(steps, self.client, say)
        self._flows.append((flow, done))
        self.wake()
        return flow

    def cancel(self, flow: Flow | None) -> None:
        """Stop a flow now; its `done` is called before this returns."""
        if flow is not None and flow.state == "running":
            flow.cancel()
            self._finish()

    def cancel_all(self) -> None:
        for flow, _ in list(self._flows):
            self.cancel(flow)

    # --- time ---------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make sure that the timer runs, and soon."""
        if bpy.app.timers.is_registered(_on_timer):
            bpy.app.timers.unregister(_on_timer)
        bpy.app.timers.register(_on_timer, first_interval=0.0, persistent=True)

    def tick(self) -> None:
        """One look at everything; never waits."""
        started = time.perf_counter()
        self.client.poll(READ_S)
        deadline = time.perf_counter() + WORK_S
        for flow, _ in list(self._flows):
            flow.advance(max(0.001, deadline - time.perf_counter()))
        self._finish()
        self._show(started)
        self.longest_tick_s = max(self.longest_tick_s, time.perf_counter() - started)

    def _show(self, now: float) -> None:
        """Have the panel drawn again if it would look different, but not for every step of the work."""
        status = self.status
        shown = (
            self.client.state, self.client.text, status.text, round(100 * status.share), status.background_text,
            status.work is None, status.background is None, status.result is None, status.error is None,
        )  # fmt: skip
        if shown != self._shown and now >= self._drawn + REDRAW_S:
            self._shown, self._drawn = shown, now
            redraw()

    def _finish(self) -> None:
        over = [(flow, done) for flow, done in self._flows if flow.state != "running"]
        self._flows = [item for item in self._flows if item[0].state == "running"]
        for flow, done in over:
            try:
                done(flow)
            except Exception as error:
                self._defect(error)
        if over:
            redraw()

    def _defect(self, error: Exception) -> None:
        """Something of ours went wrong: say so and be ready for the next click; the timer must not die of it."""
        self.status.work = self.status.background = None
        self.status.fail_by_defect(error)

    @property
    def interval_s(self) -> float | None:
        """Until the next tick; None: nothing to wait for."""
        if self._flows or self.client.state not in ("off", "ready", "failed"):
            return BUSY_S
        return IDLE_S if self.client.alive else None

    def run_until(self, over: Callable[[], bool], timeout_s: float) -> bool:
        """Tick in a loop, as background mode needs, where timers do not run. Whether `over` came before the time."""
        deadline = time.monotonic() + timeout_s
        while not over():
            if time.monotonic() > deadline:
                return False
            self.tick()
            time.sleep(0.002)
        return True


_pump: Pump | None = None


def pump() -> Pump:
    """The pump of the registered add-on."""
    if _pump is None:
        raise RuntimeError("the add-on is not registered")
    return _pump


def status() -> Status:
    return pump().status


def _on_timer() -> float | None:
    if _pump is None:
        return None
    try:
        _pump.tick()
    except Exception as error:
        _pump.cancel_all()
        _pump._defect(error)
    return _pump.interval_s


def redraw() -> None:
    """Have the sidebars of the 3D views drawn again: not the views themselves, which cost far more."""
    manager = bpy.context.window_manager
    for window in manager.windows if manager is not None else ():
        for area in window.screen.areas:
            if area.type == "VIEW_3D":
                for region in area.regions:
                    if region.type == "UI":
                        region.tag_redraw()
            elif area.type == "PREFERENCES":
                area.tag_redraw()


def scratch_folder() -> str:
    """A private folder for files between the two processes; it goes with Blender's own temporary folder."""
    folder = os.path.join(bpy.app.tempdir, "rigfit")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise RigError("file_unwritable", path=folder, reason=error.strerror or str(error)) from None
    return folder


@bpy.app.handlers.persistent
def _before_load(*_: Any) -> None:
    """Another file is about to be opened: what runs was for the old one."""
    if _pump is not None:
        _pump.cancel_all()
        _pump.status.result = None
        _pump.status.clear_error()


def _at_exit() -> None:
    # The child would end by itself, from the end of its standard input; nobody should have to rely on it.
    if _pump is not None:
        with contextlib.suppress(Exception):
            _pump.client.kill()


def _exit_handlers() -> list[Any] | None:
    """5.1 release notes, Python API: `bpy.app.handlers.exit_pre`."""
    return getattr(bpy.app.handlers, "exit_pre", None)


@bpy.app.handlers.persistent
def _before_exit(*_: Any) -> None:
    _at_exit()


def register() -> None:
    from ..preferences import launch

    global _pump
    _pump = Pump(launch)
    bpy.app.handlers.load_pre.append(_before_load)
    handlers = _exit_handlers()
    if handlers is not None:
        handlers.append(_before_exit)
    atexit.register(_at_exit)


def unregister() -> None:
    """Cancel everything, end the backend, take away timer and handlers."""
    global _pump
    if _pump is not None:
        _pump.cancel_all()
    if bpy.app.timers.is_registered(_on_timer):
        bpy.app.timers.unregister(_on_timer)
    if _before_load in bpy.app.handlers.load_pre:
        bpy.app.handlers.load_pre.remove(_before_load)
    handlers = _exit_handlers()
    if handlers is not None and _before_exit in handlers:
        handlers.remove(_before_exit)
    atexit.unregister(_at_exit)
    _at_exit()
    _pump = None
