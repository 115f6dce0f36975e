# SPDX-License-Identifier: GPL-3.0-or-later
"""The error report that an artist can send: versions on top, user name and home folder masked. No bpy in here."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Iterable, Mapping

from ..messages import RigError

LOG_LINES = 60


def report(versions: Mapping[str, str], error: RigError | None, log_lines: Iterable[str] = ()) -> str:
    """Plain text: versions, the error with its kind and facts, the end of the backend's log."""
    lines = ["rigfit report", *(f"{name}: {value}" for name, value in versions.items()), ""]
    if error is not None:
        lines += [f"{error.kind}: {error.message}", *(f"  {name}: {value}" for name, value in error.facts.items()), ""]
    tail = list(log_lines)[-LOG_LINES:]
    if tail:
        lines += ["end of the backend's log:", *(line.rstrip() for line in tail)]
    return masked("\n".join(lines)) + "\n"


def masked(text: str, *, home: str | None = None, user: str | None = None) -> str:
    """The text without the home folder and the user's name (also inside other paths)."""
    home = os.path.expanduser("~") if home is None else home
    if user is None:
        try:
            user = getpass.getuser()
        except (OSError, KeyError, ImportError):
            user = ""
    for form in {home, home.replace("\\", "/"), home.replace("\\", "\\\\")}:
        if len(form) > 1:
            text = re.sub(re.escape(form) + r"(?![\w-])", "~", text, flags=re.IGNORECASE if os.name == "nt" else 0)
    # Homes of other accounts and mounted copies, whatever the user is called here.
    text = re.sub(r"(?i)(/home/|/users/|\\users\\|\\\\users\\\\)[^/\\\s:\"']+", r"\1USER", text)
    if len(user) > 1 and user != "root":
        text = re.sub(rf"(?<![\w-]){re.escape(user)}(?![\w-])", "USER", text)
    return text


def tail(path: str, lines: int = LOG_LINES) -> list[str]:
    """The last lines of a text file; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64_000))
            return file.read().decode("utf-8", "replace").splitlines()[-lines:]
    except OSError:
        return []
