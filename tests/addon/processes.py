# SPDX-License-Identifier: Apache-2.0
"""Is a process still there? For the tests of what must not outlive what."""

from __future__ import annotations

import os
from pathlib import Path


def runs(pid: int) -> bool:
    """Whether the process runs; one that nobody has collected yet does not."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return not os.path.isdir("/proc/self")
    return state not in "ZX"
