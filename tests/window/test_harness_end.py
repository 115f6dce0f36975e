# SPDX-License-Identifier: Apache-2.0
"""The harness at the end of a Blender: quit, killed, and what outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from blender_window import BlenderEnded

HERE = Path(__file__).resolve().parent


def test_quit_by_key_leaves_no_process_and_kill_is_noticed(start_window):
    window = start_window("quits")
    window.run("import subprocess; child = subprocess.Popen(['sleep', '60'])")
    lines = window.processes()
    assert window.pid in lines
    assert [line for line in lines.values() if line == "sleep 60"]
    window.run("child.kill(); child.wait()")
    window.key("ctrl+q")
    assert window.wait_ended(within_s=10) == 0
    assert window.processes() == {}
    with pytest.raises(BlenderEnded, match="exit code 0"):
        window.ask("1")


def test_a_process_that_outlives_blender_is_ended_and_told(start_window):
    window = start_window("killed")
    window.run("import subprocess; child = subprocess.Popen(['sleep', '60'], start_new_session=True)")
    child = window.ask("child.pid")
    os.kill(window.pid, signal.SIGKILL)
    window.wait_ended(within_s=5)
    with pytest.raises(AssertionError, match=rf"still running .*{child}: 'sleep 60'"):
        window.close()
    assert window.processes() == {}


def test_a_test_run_that_is_killed_takes_its_screen_along():
    program = (
        "import os, signal\n"
        "from display import Display\n"
        "with Display(320, 200) as display:\n"
        "    print(display._server.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=HERE, stdout=subprocess.PIPE, text=True, timeout=30)
    assert done.returncode == -signal.SIGKILL
    server = Path("/proc") / done.stdout.strip() / "cmdline"
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and server.exists() and b"Xvfb" in server.read_bytes():
        time.sleep(0.02)
    assert not server.exists() or b"Xvfb" not in server.read_bytes()
