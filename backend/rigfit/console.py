# SPDX-License-Identifier: Apache-2.0
"""What a person at a terminal sees: progress bars, one-sentence errors, exit codes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rigfit.errors import UserError

Progress = Callable[[int, int, str], None]


def say(text: str) -> None:
    """A line of result on standard output."""
    print(text, flush=True)


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A progress bar with the time left, on standard error; plain lines when that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        last = -1

        def report(done: int, total: int, text: str) -> None:
            nonlocal last
            # Ten lines are enough for a log.
            step = (10 * done) // max(total, 1)
            if step != last:
                last = step
                print(f"{title}: {text} {done}/{total}", file=sys.stderr, flush=True)

        yield report
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=1)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=f"{title}: {text}")


def with_exit_codes(command: Callable[..., Any]) -> Callable[..., Any]:
    """Run a command: UserError → its sentence on standard error and exit code 2; Ctrl-C → 130; no traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except UserError as error:
            print(f"rigfit: {error.message}", file=sys.stderr)
            raise SystemExit(error.exit_code) from None
        except KeyboardInterrupt:
            print("rigfit: stopped; nothing half-written was left behind.", file=sys.stderr)
            raise SystemExit(130) from None

    return run
