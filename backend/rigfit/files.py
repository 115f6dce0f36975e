# SPDX-License-Identifier: Apache-2.0
"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rigfit.errors import UserError


def user_cache() -> Path:
    """rigfit's folder in the user's cache: what can be made again."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "rigfit"


def make_folder(folder: Path) -> None:
    """Make a folder, and try whether it can be written. UserError kind ``file_unwritable``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".rigfit-probe"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"The folder {folder} cannot be written ({error.strerror}): choose another.", kind="file_unwritable"
        ) from None


def write_atomically(
    path: Path, write: Callable[[Path], object], *, parents: bool = False, mode: int | None = None
) -> None:
    """Call `write` with a temporary path in the same folder, flush it to disk and rename it to `path`.

    parents: make the missing folders. The temporary name keeps the suffix, by which some writers choose the format.
    mode: the file's permissions, by default what the user's mask leaves; until the rename they are 0600.
    Raises UserError kind ``file_unwritable`` when the folder or the disk does not take it; the old file stays.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.stem[:40]}-", suffix=path.suffix, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        if mode is None:
            mask = os.umask(0)
            os.umask(mask)
            mode = 0o666 & ~mask
        temporary.chmod(mode)
        temporary.replace(path)
        temporary = None
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}): choose another folder or free some space.",
            kind="file_unwritable",
        ) from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, data: Any, *, parents: bool = False) -> None:
    """Write `data` as indented UTF-8 JSON, atomically. NaN and infinity are refused: they are not JSON."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), parents=parents)
