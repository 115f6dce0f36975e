#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Set up and run rigfit from a bare checkout: ``python3 scripts/run.py demo | test | bench | extension``.

Standard library only. Everything it installs lies under ``.venv/`` of the checkout; see ``running/`` for the parts.
"""

import os
import shutil
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PYTHON = (3, 11)  # the Blender wheels are built for exactly this version


def use_right_python():
    """Go on under Python 3.11, or say in one sentence that it is missing. Must parse under any Python 3."""
    if sys.version_info[:2] == PYTHON:
        return
    other = shutil.which("python%d.%d" % PYTHON)  # noqa: UP031 (older Pythons read this file too)
    if other:
        os.execv(other, [other, str(Path(__file__).resolve()), *sys.argv[1:]])
    sys.stderr.write(
        "rigfit needs Python 3.11 (the Blender wheels are built for it) and this is Python %d.%d: install "  # noqa: UP031
        "python3.11 so that it is on the PATH, then run the same command again.\n" % sys.version_info[:2]
    )
    sys.exit(2)


if __name__ == "__main__":
    use_right_python()
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    from running.command_line import main

    sys.exit(main(sys.argv[1:], REPOSITORY))
