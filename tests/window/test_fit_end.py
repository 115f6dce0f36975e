# SPDX-License-Identifier: Apache-2.0
"""Blender killed in the middle of a fit: the backend does not outlive it."""

from __future__ import annotations

import time

from test_fit import CLIENT, GONE_S, begin_fit, make_ready


def test_kill_9_of_blender_ends_the_backend(start_window):
    window = start_window("killed")
    make_ready(window)
    begin_fit(window)
    window.wait_for(f"{CLIENT}.busy", within_s=20)
    assert window.backends()
    killed = time.monotonic()
    window.kill()
    while window.backends() and time.monotonic() - killed < GONE_S:
        time.sleep(0.02)
    print(f"\nkill -9 of Blender: backend gone after {time.monotonic() - killed:.2f} s")
    assert window.backends() == {}
