# SPDX-License-Identifier: GPL-3.0-or-later
"""Work that is written in steps, done in one go. No bpy in here."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

S = TypeVar("S")
R = TypeVar("R")


def run_through(steps: Generator[S, None, R], each: Callable[[S], object] | None = None) -> R:
    """Take every step, tell `each` of it, and return what the generator returns."""
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            return end.value
        if each is not None:
            each(step)
