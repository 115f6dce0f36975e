# SPDX-License-Identifier: Apache-2.0
"""Blender as a child process that answers requests (docs/architecture.md, "Worker messages")."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from rigfit.blender.locate import (
    Blender,
    addon_folder,
    check_version,
    child_environment,
    kill_group,
    locate,
    missing_library_message,
)
from rigfit.errors import UserError

PROTOCOL = 1
START_TIMEOUT_S = 180.0
CLOSE_TIMEOUT_S = 5.0
LOG_TAIL_LINES = 15

Progress = Callable[[int, int, str], None]

# Methods that replace the open scene: what stood before is of no interest to a restarted child.
_SCENE_METHODS = ("file.open", "file.new", "file.append", "head.build")


class BlenderWorker:
    """A Blender child process; a context manager. Not thread safe.

    blender: which one, `locate()` by default.
    recycle_after: restart the child after this many renders and bring its scene back (file opened again, values applied
        again), because Blender's memory grows over long runs; None: never.
    log: file for everything Blender prints. By default a temporary file, deleted after a clean end and kept, and named
        in the error, when the child dies or fails.
    command: the child's command line instead of the one made from `blender` (for tests of the protocol).
    low_priority: the child leaves the processor to what the user looks at.

    The child ends with the context, on any exception (Ctrl-C included), and when this process dies.
    `interrupt` is the one method for other threads.
    """

    def __init__(
        self,
        blender: Blender | None = None,
        *,
        recycle_after: int | None = None,
        log: Path | None = None,
        command: list[str] | None = None,
        low_priority: bool = False,
    ) -> None:
        if recycle_after is not None and recycle_after < 1:
            raise ValueError("recycle_after must be at least 1")
        self._blender = blender
        self._command = command
        self._recycle_after = recycle_after
        self._low_priority = low_priority
        self._interrupted = False
        self._keep_log = log is not None
        self._log_path = log
        self._process: subprocess.Popen[bytes] | None = None
        self._incoming: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._next_id = 1
        self._renders = 0
        self._scene: tuple[str, dict[str, Any]] | None = None
        self._applied: dict[tuple[str, tuple[str, ...] | None], dict[str, float]] = {}
        self.hello: dict[str, Any] = {}
        self.restarts = 0

    # --- life ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> BlenderWorker:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(at_once=kind is not None)

    @property
    def log_path(self) -> Path | None:
        """The log file, while there is one."""
        return self._log_path

    @property
    def blender(self) -> Blender | None:
        """Which Blender it is; None until the start if it is to be looked for."""
        return self._blender

    @property
    def pid(self) -> int | None:
        """Process id of the child, None when it is not running."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the child and wait for its hello. UserError (blender_cannot_start, …) if it does not come."""
        if self._process is not None:
            return
        if self._interrupted:
            raise _interruption()
        if self._command is None and self._blender is None:
            self._blender = locate()
        command = self._command or command_line(self._blender)  # type: ignore[arg-type]
        environment = child_environment(Path(command[0]))
        flags = 0
        if self._low_priority:
            flags = getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0)
            # Not afterwards: the priority is each thread's own, and Blender starts its threads at once.
            nice = shutil.which("nice") if os.name == "posix" else None
            command = [nice, "-n", "10", *command] if nice else command
        if self._log_path is None:
            handle, name = tempfile.mkstemp(prefix="rigfit-blender-", suffix=".log")
            os.close(handle)
            self._log_path = Path(name)
        incoming: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        try:
            with open(self._log_path, "ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    creationflags=flags,
                    # Its own group: Ctrl-C in the terminal reaches this process alone, which then ends the child.
                    start_new_session=True,
                )
        except OSError as error:
            self._discard_log()
            raise UserError(
                f"{command[0]} cannot be started ({error.strerror}).", kind="blender_cannot_start"
            ) from None
        self._incoming = incoming
        if self._interrupted:
            # It came before there was a child to end.
            kill_group(self._process)
        threading.Thread(target=_pump, args=(self._process.stdout, incoming), daemon=True).start()
        try:
            self._wait_for_hello()
        except BaseException:
            self.close(at_once=True)
            raise

    def close(self, *, at_once: bool = False) -> None:
        """End the child: by end of file on its standard input, by force if that takes too long or `at_once`."""
        process, self._process = self._process, None
        if process is None:
            return
        if not at_once:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
            try:
                process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                at_once = True
        if at_once:
            _kill(process)
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        self._discard_log()

    def interrupt(self) -> None:
        """End the child at once, from any thread and for good; what waits for it raises UserError blender_interrupted."""
        self._interrupted = True
        process = self._process
        if process is not None and process.poll() is None:
            kill_group(process)

    def restart(self) -> None:
        """End the child, start another and bring the scene back to what the calls so far made of it."""
        keep, self._keep_log = self._keep_log, True
        self.close()
        self._keep_log = keep
        self.start()
        self.restarts += 1
        self._renders = 0
        if self._scene is not None:
            self._exchange(*self._scene, None, None)
        for (spec, objects), values in self._applied.items():
            params = {"spec": spec, "values": values}
            if objects is not None:
                params["objects"] = list(objects)
            self._exchange("rig.apply", params, None, None)

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(
        self, method: str, progress: Progress | None = None, timeout_s: float | None = None, **params: Any
    ) -> dict[str, Any]:
        """Send one request and wait for its result.

        progress: called with (done, total, text) for each progress notification.
        timeout_s: after that many seconds the child is ended and UserError (kind blender_timeout) raised.
        params: of the method; paths may be `Path`, parameters that are None are not sent.
        UserError: the child's own error, with its kind and sentence; kind blender_died when it ended.
        RuntimeError: a defect (kind "unexpected"); the traceback is in the log, whose tail is quoted.
        """
        if self._process is None:
            raise UserError("Blender is not running: start the worker again.", kind="blender_closed")
        sent = {name: _plain(value) for name, value in params.items() if value is not None}
        recycles = self._recycle_after is not None and self._renders >= self._recycle_after
        if recycles and method in ("studio.render", "rig.apply"):
            self.restart()
        result = self._exchange(method, sent, progress, timeout_s)
        self._remember(method, sent)
        return result

    def _remember(self, method: str, params: dict[str, Any]) -> None:
        if method in _SCENE_METHODS:
            self._scene = (method, params)
            self._applied.clear()
        elif method == "rig.apply":
            objects = params.get("objects")
            key = (params["spec"], None if objects is None else tuple(objects))
            # Taken out and put back, so that a replay keeps the order of the latest writes.
            self._applied[key] = {**self._applied.pop(key, {}), **params["values"]}
        elif method == "studio.render":
            self._renders += 1

    def _exchange(
        self, method: str, params: dict[str, Any], progress: Progress | None, timeout_s: float | None
    ) -> dict[str, Any]:
        request_id = self._next_id
        self._next_id += 1
        line = json.dumps({"id": request_id, "method": method, "params": params}).encode("ascii") + b"\n"
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            raise self._death(method) from None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            message = self._receive(method, deadline)
            if message.get("method") == "progress":
                if progress is not None:
                    said = message.get("params", {})
                    progress(int(said.get("done", 0)), int(said.get("total", 0)), str(said.get("text", "")))
            elif message.get("id") == request_id and "result" in message:
                return message["result"]
            elif "error" in message and message.get("id") in (request_id, None):
                raise self._failure(method, message["error"])

    def _receive(self, method: str, deadline: float | None) -> dict[str, Any]:
        """The next message of the child."""
        try:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            line = self._incoming.get(timeout=remaining)
        except queue.Empty:
            self._keep_log = True
            self.close(at_once=True)
            raise UserError(
                f"Blender did not finish {method} in time and was ended: allow more time or ask for less "
                f"(log: {self._log_path}).",
                kind="blender_timeout",
            ) from None
        except BaseException:
            # Ctrl-C: the reply to this request may still come, so the child is of no further use.
            self.close(at_once=True)
            raise
        if line is None:
            raise self._death(method)
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            self._keep_log = True
            self.close(at_once=True)
            raise RuntimeError(f"Blender's worker broke the protocol during {method}: {line[:200]!r}")
        return message

    def _wait_for_hello(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        chatter: list[str] = []
        while True:
            try:
                line = self._incoming.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self._keep_log = True
                raise UserError(
                    f"Blender did not start within {START_TIMEOUT_S:.0f} s (log: {self._log_path}).",
                    kind="blender_cannot_start",
                ) from None
            if line is None:
                raise self._start_failure("\n".join(chatter))
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if isinstance(message, dict) and message.get("method") == "hello":
                break
            # An executable greets on standard output before it runs the script.
            chatter.append(line.decode("utf-8", "replace").rstrip())
        self.hello = dict(message.get("params", {}))
        if "import_error" in self.hello:
            raise self._start_failure(str(self.hello["import_error"]))
        if self.hello.get("protocol") != PROTOCOL:
            raise UserError(
                "The Blender part of rigfit is of another version: install the package again.", kind="bad_protocol"
            )
        check_version(str(self.hello.get("blender_version", "")), self._blender.path if self._blender else Path("?"))

    # --- errors -------------------------------------------------------------------------------------------------------

    def _start_failure(self, said: str) -> UserError:
        if self._interrupted:
            return _interruption()
        text = f"{said}\n{self._log_tail()}"
        if library := missing_library_message(text):
            return UserError(library, kind="blender_cannot_start")
        if "numpy" in text and "No module named" in text:
            return UserError(
                "This Blender has no numpy: install it for Blender's Python (Debian: `apt install python3-numpy`).",
                kind="blender_cannot_start",
            )
        self._keep_log = True
        return UserError(f"Blender could not start ({self._log_path}): {_last_line(text)}", kind="blender_cannot_start")

    def _death(self, method: str) -> UserError:
        if self._interrupted:
            self.close(at_once=True)
            return _interruption()
        process = self._process
        code = None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_TIMEOUT_S)
            code = process.returncode
        tail = self._log_tail()
        self._keep_log = True
        self.close(at_once=True)
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return UserError(
            f"Blender stopped during {method} ({how}); its last words, from {self._log_path}:\n{tail}",
            kind="blender_died",
        )

    def _failure(self, method: str, error: dict[str, Any]) -> Exception:
        kind, message = str(error.get("kind", "unexpected")), str(error.get("message", ""))
        if kind != "unexpected":
            return UserError(message, kind=kind)
        self._keep_log = True
        return RuntimeError(f"{method} failed in Blender: {message} (log: {self._log_path})\n{self._log_tail()}")

    def _log_tail(self) -> str:
        if self._log_path is None or not self._log_path.exists():
            return ""
        with open(self._log_path, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 20_000))
            lines = log.read().decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def _discard_log(self) -> None:
        if not self._keep_log and self._log_path is not None:
            self._log_path.unlink(missing_ok=True)
            self._log_path = None


def command_line(blender: Blender) -> list[str]:
    """The child's command line."""
    script = str(addon_folder() / "worker.py")
    if blender.kind == "bpy":
        # -P: without it the add-on's folder would stand on sys.path and its `rig`, `link`, … would shadow others.
        return [str(blender.path), "-P", script]
    return [
        str(blender.path),
        "--background",
        "--factory-startup",
        "--python-exit-code",
        "1",
        "--python",
        script,
        "--",
    ]


def _pump(pipe: Any, incoming: queue.SimpleQueue[bytes | None]) -> None:
    # Closed here and not by `close`, which would wait for a grandchild that still holds the other end.
    with contextlib.suppress(OSError, ValueError), pipe:
        for line in pipe:
            if line.strip():
                incoming.put(line)
    incoming.put(None)


def _kill(process: subprocess.Popen[bytes]) -> None:
    kill_group(process)
    process.wait()


def _interruption() -> UserError:
    return UserError("Blender was interrupted.", kind="blender_interrupted")


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
