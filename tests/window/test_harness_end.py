# SPDX-License-Identifier: Apache-2.0
"""The harness at the end of a Blender: quit, killed, and what outlives it."""

from __future__ import annotations

import os
import signal

import pytest
from blender_window import BlenderEnded


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
