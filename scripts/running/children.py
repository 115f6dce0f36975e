# SPDX-License-Identifier: Apache-2.0
"""Plain progress lines, child processes that end with this one, and the one error that stops the set-up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

HEARTBEAT_S = 15.0  # after this long without a line, one says that work goes on
END_S = 5.0  # a child that was asked to end gets this long

_print_lock = threading.Lock()
_children: set[subprocess.Popen[str]] = set()
_children_lock = threading.Lock()
_stopping = threading.Event()


class CannotRun(Exception):
    """Something that the user has to mend; its text is one sentence with what to do. Exit code 2."""


class Stopped(Exception):
    """The run is being stopped (Ctrl-C); threads unwind with it."""


def say(text: str) -> None:
    """One plain line at once, whole even when two installations talk at the same time."""
    with _print_lock:
        print(text, flush=True)


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for children: without what would let other Python installations leak in."""
    unwanted = {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER"}
    unwanted.add("PIP_REQUIRE_VIRTUALENV")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment["PYTHONNOUSERSITE"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"
    environment.update(extra or {})
    return environment


def _start(command: Sequence[str], **options: object) -> subprocess.Popen[str]:
    with _children_lock:
        if _stopping.is_set():
            raise Stopped
        child: subprocess.Popen[str] = subprocess.Popen(list(command), text=True, **options)  # pyright: ignore
        _children.add(child)
    return child


def _forget(child: subprocess.Popen[str]) -> None:
    with _children_lock:
        _children.discard(child)


def run_through(
    command: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> int:
    """Run with the terminal of this process and return the exit code; 124 if it ran past ``limit_s``."""
    sys.stdout.flush()
    child = _start(command, cwd=cwd, env=clean_environment(environment))
    try:
        return child.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end([child])
        return 124
    except BaseException:
        _interrupt_politely(child)
        raise
    finally:
        _forget(child)


def _interrupt_politely(child: subprocess.Popen[str]) -> None:
    """Let a child end as it does on Ctrl-C. A terminal has told it already, `kill` on this process has not."""
    try:
        child.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            _end([child])


def run_logged(
    command: Sequence[str],
    *,
    log: Path,
    label: str,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], str | None] | None = None,
) -> tuple[int, list[str]]:
    """Run with all output appended to ``log``; return the exit code and the lines of output.

    on_line: turns a line of output into the progress text that is shown for it, or None.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    started = time.monotonic()
    last_said = [started]
    with log.open("a", encoding="utf-8", errors="replace") as file:
        file.write("$ " + " ".join(command) + "\n")
        file.flush()
        child = _start(
            command,
            cwd=cwd,
            env=clean_environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
            start_new_session=True,  # pip has children of its own: `_end` reaches them as a group
        )
        finished = threading.Event()

        def heartbeat() -> None:
            while not finished.wait(1.0):
                now = time.monotonic()
                if now - last_said[0] >= HEARTBEAT_S:
                    last_said[0] = now
                    say(f"[{label}] still working, {now - started:.0f} s")

        beat = threading.Thread(target=heartbeat, daemon=True)
        beat.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                file.write(line)
                file.flush()
                lines.append(line.rstrip())
                text = on_line(line.rstrip()) if on_line else None
                if text:
                    last_said[0] = time.monotonic()
                    say(f"[{label}] {text}")
            code = child.wait()
        finally:
            finished.set()
            _forget(child)
    if _stopping.is_set():
        raise Stopped
    return code, lines


def ask(command: Sequence[str], *, limit_s: float = 120.0) -> tuple[int, str]:
    """Run a short quiet command; return the exit code and everything it printed."""
    try:
        done = subprocess.run(
            list(command),
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {limit_s:.0f} s"
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout


def _end(children: Sequence[subprocess.Popen[str]]) -> None:
    for child in children:
        _signal(child, signal.SIGTERM)
    deadline = time.monotonic() + END_S
    for child in children:
        try:
            child.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(child, _KILL)
            child.wait()


_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has one way to end a process


def _signal(child: subprocess.Popen[str], number: int) -> None:
    """Signal a child, and its children where it leads a group of its own."""
    if child.poll() is not None:
        return
    try:
        if hasattr(os, "killpg") and os.getpgid(child.pid) == child.pid:
            os.killpg(child.pid, number)
        else:
            child.send_signal(number)
    except ProcessLookupError:
        pass


def end_children() -> None:
    """End every child that still runs; later ones are refused. Called once, when the run is stopped."""
    with _children_lock:
        _stopping.set()
        children = list(_children)
    _end(children)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def stop_on_terminate() -> None:
    """Treat SIGTERM like Ctrl-C, so that a stopped run leaves no children behind."""
    signal.signal(signal.SIGTERM, _interrupt)


def last_words(lines: Sequence[str], pattern: str = r"error|fail|cannot|unable|no space") -> str:
    """The line that explains a failure best: the last that speaks of an error, else the last one."""
    spoken = [line.strip() for line in lines if line.strip()]
    for line in reversed(spoken):
        if re.search(pattern, line, re.IGNORECASE):
            return line
    return spoken[-1] if spoken else "no output"
