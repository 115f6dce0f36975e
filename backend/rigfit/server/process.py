# SPDX-License-Identifier: Apache-2.0
"""The process around the server: token, standard streams, log, and an end that waits for nobody.

Threads that are deep in C code cannot be told to stop, and Python's own way out waits for them or crashes: the process ends
by `os._exit`, after everything that it leaves behind has been cleaned up by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import logging.handlers
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NoReturn

from rigfit.errors import UserError
from rigfit.files import user_cache
from rigfit.server import wire
from rigfit.server.app import Server

log = logging.getLogger("rigfit.server")

# After the end of standard input: in good order if that takes no longer.
GRACE_S = 0.7
LOG_BYTES, LOG_FILES = 1 << 20, 2


def serve(address_file: Path, *, attach: bool, idle_s: float, log_path: Path | None) -> NoReturn:
    """Run the backend in this process until it ends. UserError before it listens; exit code 0 when it ends in good order.

    The token is the line on standard input, or made here with `attach`.
    """
    address_file = address_file.absolute()
    if attach:
        token, lifeline = secrets.token_bytes(wire.TOKEN_BYTES), None
    else:
        token, lifeline = read_token(), os.dup(0)
    stderr = _put_streams_away()
    process = _Process(address_file)
    try:
        log_path = _open_log(log_path or user_cache() / "logs" / "backend.log", stderr)
        process.server = server = Server(token, idle_s=idle_s, log_path=log_path)
        # The loop's thread gets its turn within milliseconds while the job thread computes in Python.
        sys.setswitchinterval(0.002)
        if lifeline is not None:
            threading.Thread(target=process.watch, args=(lifeline,), name="rigfit-lifeline", daemon=True).start()
        asyncio.run(_until_the_end(server, process, address_file, attach))
    except UserError:
        process.clean_up()
        os.dup2(stderr, 2)
        raise
    except BaseException as error:
        log.exception("the server failed")
        with contextlib.suppress(OSError):
            os.write(stderr, f"rigfit: the server failed ({type(error).__name__}: {error}).\n".encode(errors="replace"))
    process.leave(1)


async def _until_the_end(server: Server, process: _Process, address_file: Path, tell_token: bool) -> None:
    await server.run(address_file, tell_token=tell_token)
    # Not after the loop: its end waits for threads.
    process.leave(0)


def read_token() -> bytes:
    """The token from the first line of standard input. UserError kind ``no_token``."""
    line = b""
    with contextlib.suppress(OSError):
        while not os.isatty(0) and not line.endswith(b"\n") and len(line) <= 2 * wire.TOKEN_BYTES:
            # Byte by byte: what follows belongs to the lifeline.
            one = os.read(0, 1)
            if not one:
                break
            line += one
    if not re.fullmatch(rb"[0-9a-fA-F]{%d}\n" % (2 * wire.TOKEN_BYTES), line):
        raise UserError(
            "`rigfit serve` is started by the add-on, which writes a token to its standard input: add --attach to start it "
            "by hand.",
            kind="no_token",
        )
    return bytes.fromhex(line.decode("ascii"))


class _Process:
    """How this process ends, once, from whichever thread is first."""

    def __init__(self, address_file: Path) -> None:
        self.server: Server | None = None
        self._address_file = address_file
        self._lock = threading.Lock()
        # Everything temporary in one place: threads that are left behind do not clean up after themselves.
        self._folder = tempfile.mkdtemp(prefix="rigfit-backend-")
        tempfile.tempdir = self._folder
        # Blenders that are ended leave theirs behind, too.
        for name in ("TMPDIR", "TEMP", "TMP"):
            os.environ[name] = self._folder

    def watch(self, lifeline: int) -> None:
        """Wait for the end of standard input, then end the process, whatever its other threads do."""
        with contextlib.suppress(OSError):
            while os.read(lifeline, 4096):
                pass
        assert self.server is not None
        self.server.stop("standard input ended")
        time.sleep(GRACE_S)
        log.info("ends by force")
        self.leave(0)

    def leave(self, code: int) -> NoReturn:
        """End the process now."""
        self._lock.acquire()
        if self.server is not None:
            self.server.interrupt()
        self.clean_up()
        with contextlib.suppress(Exception):
            logging.shutdown()
        os._exit(code)

    def clean_up(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        # Another backend may have taken the name over.
        with contextlib.suppress(OSError):
            if f'"pid": {os.getpid()},' in self._address_file.read_text(encoding="ascii", errors="replace"):
                self._address_file.unlink()


def _put_streams_away() -> int:
    """Standard input, output and error become the null device; returns a descriptor of what standard error was.

    The parent may leave them unread, and whoever prints into a full pipe waits for ever.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    null = os.open(os.devnull, os.O_RDWR)
    try:
        stderr = os.dup(2)
    except OSError:  # closed by the parent
        stderr = os.dup(null)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if null > 2:
        os.close(null)
    # The last words of a crash in C code: a few lines, for which there is always room.
    faulthandler.enable(file=stderr)
    return stderr


def _open_log(path: Path, stderr: int) -> Path | None:
    """Send the log to a file; None, and a line on standard error, if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        handler: logging.Handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8", errors="backslashreplace"
        )
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(stderr, f"rigfit: no log, {path} cannot be written ({error.strerror}).\n".encode(errors="replace"))
        return None
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    # A full disk must not end anything.
    logging.raiseExceptions = False
    logging.captureWarnings(True)
    return path
