# SPDX-License-Identifier: Apache-2.0
"""A screen without a monitor (Xvfb), looked at from outside, with a real mouse and keyboard (xdotool)."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np
from PIL import ImageGrab

START_S = 15.0
STEP_S = 10.0  # xdotool answers in milliseconds; one that does not hangs
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def die_with_parent() -> Callable[[], None]:
    """For Popen's preexec_fn: the child is killed when this process ends, however it ends."""

    def prepare() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return prepare


class Display:
    """An X server of its own on a free number; screen coordinates are pixels from the upper left corner."""

    def __init__(self, width: int = 1280, height: int = 800) -> None:
        self.width, self.height = width, height
        self.name = ""
        self._server: subprocess.Popen[bytes] | None = None

    @staticmethod
    def missing() -> list[str]:
        """The programs that are not here."""
        return [program for program in ("Xvfb", "xdotool") if shutil.which(program) is None]

    def __enter__(self) -> Display:
        reading, writing = os.pipe()
        try:
            self._server = subprocess.Popen(
                ["Xvfb", "-displayfd", str(writing), "-screen", "0", f"{self.width}x{self.height}x24", "-nolisten", "tcp", "-noreset"],
                pass_fds=(writing,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )  # fmt: skip
        finally:
            os.close(writing)
        os.set_blocking(reading, False)
        said, deadline = b"", time.monotonic() + START_S
        try:
            while not said.endswith(b"\n"):
                if time.monotonic() > deadline or self._server.poll() is not None:
                    raise RuntimeError(f"Xvfb did not start within {START_S:.0f} s (exit code {self._server.poll()})")
                time.sleep(0.02)
                try:
                    said += os.read(reading, 32)
                except BlockingIOError:
                    continue
        except BaseException:
            self.close()
            raise
        finally:
            os.close(reading)
        self.name = f":{int(said)}"
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def picture(self) -> np.ndarray:
        """What is on the screen now: (H,W,3) uint8."""
        return np.asarray(ImageGrab.grab(xdisplay=self.name).convert("RGB"))

    def xdotool(self, *words: str | int) -> None:
        command = ["xdotool", *(str(word) for word in words)]
        done = subprocess.run(
            command, env={**os.environ, "DISPLAY": self.name}, capture_output=True, text=True, timeout=STEP_S
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def assert_not_blank(picture: np.ndarray, what: str) -> None:
    """A black, empty or half drawn picture fails. picture: (H,W,3) uint8."""
    flat = picture.reshape(-1, 3)
    packed = flat.astype(np.uint32) @ np.array([65536, 256, 1], np.uint32)
    colours, counts = np.unique(packed, return_counts=True)
    assert len(colours) >= 64, f"{what} is blank: it has {len(colours)} colours"
    assert counts.max() < 0.9 * len(flat), (
        f"{what} is nearly blank: {100 * counts.max() / len(flat):.0f} % is one colour"
    )
    assert flat.std() > 8, f"{what} is nearly uniform"


def folder_of_reports(repository: Path) -> Path:
    """Where screenshots and logs stay."""
    folder = repository / ".venv" / "reports" / "window"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
