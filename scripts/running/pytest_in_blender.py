# SPDX-License-Identifier: Apache-2.0
"""Run pytest inside a Blender executable: ``blender -b ... --python pytest_in_blender.py -- PYTEST ARGUMENTS``."""

import sys

import pytest

if __name__ == "__main__":
    arguments = sys.argv[sys.argv.index("--") + 1 :]
    sys.argv = ["pytest", *arguments]
    code = int(pytest.main(arguments))
    sys.stdout.flush()
    sys.exit(code)  # Blender ends with this code
