# SPDX-License-Identifier: Apache-2.0
"""The extension's zip, built in the backend's environment; what is missing for that is set up."""

from __future__ import annotations

from pathlib import Path

from build_extension import find_tool

from .children import CannotRun, ask
from .environments import Environment, known_environments, prepare

TOOL_FROM = "bpy-5.0"  # Blender's tool comes with this environment where no other Blender is here


def build(repository: Path, out: Path) -> Path:
    """Build ``out/rigfit-VERSION.zip`` and return its path; CannotRun with the builder's own sentence."""
    environments = known_environments(repository)
    wanted: list[tuple[Environment, tuple[str, ...]]] = [(environments["backend"], ("base", "build"))]
    if find_tool(repository) is None:
        wanted.append((environments[TOOL_FROM], ("base",)))
    prepare(wanted, repository)
    script = repository / "scripts" / "build_extension.py"
    code, output = ask([str(environments["backend"].python), str(script), "--out", str(out)])
    words = output.strip().splitlines() or ["no output"]
    if code != 0:
        raise CannotRun(words[-1])
    return Path(words[-1].rpartition(" (")[0])
