# SPDX-License-Identifier: GPL-3.0-or-later
"""The backend as a child process, and the address file that says where it listens. Nothing waits. No bpy in here."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..messages import RigError
from .connection import HOST
from .wire import TOKEN_BYTES, hex_bytes

SCHEMA = "rigfit.address/1"
ADDRESS_LIMIT = 64 << 10

# The log takes whatever the backend prints; one that prints without end must not fill the disk.
LOG_LIMIT = 32 << 20
LOG_CHECK_S = 1.0
LAST_WORDS_BYTES = 64 << 10
LAST_WORDS_LENGTH = 200

_WINDOWS_FLAGS = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0) | getattr(subprocess, "CREATE_NO_WINDOW", 0)


@dataclass(frozen=True)
class Address:
    """Where a backend listens. token: 32 bytes, only where the backend made it (attach)."""

    port: int
    protocol: int
    version: str
    token: bytes | None = field(default=None, repr=False)


class BackendProcess:
    """The child: `argv --address-file PATH`, with the token on its standard input.

    token: 32 bytes. log_path: file for what it prints; the file of an earlier child is replaced. environment: what to
    add to the cleaned one. The child ends when this process does: the pipe of its standard input closes then.
    """

    def __init__(self, argv: Sequence[str], log_path: str, environment: Mapping[str, str] | None = None) -> None:
        """RigError backend_not_started."""
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.log_path = log_path
        self.exit_code: int | None = None
        self._input: int | None = None
        self._next_log_check = time.monotonic() + LOG_CHECK_S
        try:
            # Private to this user by mkdtemp. It is also the child's working folder, so that no module is imported from
            # wherever the artist's files lie.
            self._folder = tempfile.mkdtemp(prefix="rigfit-")
        except OSError as error:
            raise RigError("backend_not_started", reason=_words(error)) from None
        self._address_path = os.path.join(self._folder, "address.json")
        try:
            self._process = self._start([*argv, "--address-file", self._address_path], environment or {})
        except (OSError, ValueError) as error:
            self.close_input()
            self._remove_folder()
            raise RigError("backend_not_started", reason=_words(error)) from None

    def _start(self, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        reading, self._input = os.pipe()
        try:
            # Before the child exists: nobody can close the pipe meanwhile (Blender leaves SIGPIPE deadly), and the line
            # is far smaller than the pipe, so this cannot block either.
            os.write(self._input, self.token.hex().encode("ascii") + b"\n")
            with _new_log(self.log_path) as log:
                return subprocess.Popen(
                    command,
                    stdin=reading,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self._folder,
                    # Its temporary files lie here too: one that is killed cannot remove them.
                    env=clean_environment(dict.fromkeys(("TMPDIR", "TEMP", "TMP"), self._folder) | dict(environment)),
                    # A group of its own, so that all of it can be ended, and Ctrl-C in Blender's terminal reaches
                    # Blender only. On Windows also without a console window.
                    start_new_session=sys.platform != "win32",
                    creationflags=_WINDOWS_FLAGS,
                )
        finally:
            os.close(reading)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code once the child has ended (negative: by that signal)."""
        if self.exit_code is None:
            self.exit_code = self._process.poll()
            if self.exit_code is None:
                self._check_log()
            else:
                # What it left running (a Blender of its own) would end by itself, but later.
                self._end_group()
                self.close_input()
        return self.exit_code

    def address(self) -> Address | None:
        """Where the child listens, once it has said so. RigError backend_bad_address."""
        try:
            with open(self._address_path, "rb") as file:
                text = file.read(ADDRESS_LIMIT + 1)
        except OSError:
            # Not there yet; or, on Windows, just being renamed.
            return None
        try:
            return read_address(text)
        except ValueError as error:
            raise RigError("backend_bad_address", reason=str(error)) from None

    def close_input(self) -> None:
        """The gentle end: the child sees the end of its standard input and stops by itself."""
        if self._input is not None:
            with contextlib.suppress(OSError):
                os.close(self._input)
            self._input = None

    def kill(self) -> None:
        """End the child and its children at once; `poll` tells when it is gone."""
        self.close_input()
        if self._process.poll() is None:
            self._end_group()
            with contextlib.suppress(OSError):
                self._process.kill()

    def clean_up(self) -> None:
        """Remove the private folder; only after the child has ended."""
        self.close_input()
        self._remove_folder()

    def last_words(self) -> str:
        """The last line that the child printed, or what it crashed of, cut to a readable length; empty if there is none."""
        try:
            with open(self.log_path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_WORDS_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        spoken = [line for line in ("".join(c for c in line if c.isprintable()).strip() for line in lines) if line]
        # A crash in C code is followed by where it happened (faulthandler), which says less.
        crashes = [line for line in spoken if line.startswith("Fatal Python error:")]
        return (crashes or spoken or [""])[-1][:LAST_WORDS_LENGTH]

    def _end_group(self) -> None:
        # Windows: the interpreter of a virtual environment ends with its launcher, and the Blenders that it started when
        # their standard input does.
        if hasattr(os, "killpg"):
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _check_log(self) -> None:
        if time.monotonic() < self._next_log_check:
            return
        self._next_log_check = time.monotonic() + LOG_CHECK_S
        with contextlib.suppress(OSError):
            if os.stat(self.log_path).st_size > LOG_LIMIT:
                os.truncate(self.log_path, 0)

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def clean_environment(added: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what Blender's Python needs and another Python breaks on."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith("PYTHON") and name != "__PYVENV_LAUNCHER__"
    }
    # UNBUFFERED: the log must hold the last words of a child that is killed. SAFEPATH: nothing is imported from the
    # working folder.
    environment |= {"PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    return environment | dict(added)


def read_address(text: bytes) -> Address:
    """The content of an address file (docs/protocol.md, "Starting"). ValueError with the reason."""
    if len(text) > ADDRESS_LIMIT:
        raise ValueError("it is too long")
    try:
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    if value.get("host") != HOST:
        raise ValueError(f"its host is not {HOST}")
    port, protocol = value.get("port"), value.get("protocol")
    if type(port) is not int or not 0 < port < 65536:
        raise ValueError("its port is no port")
    if type(protocol) is not int:
        raise ValueError("its protocol is no number")
    token = None
    if "token" in value:
        token = hex_bytes(value["token"], TOKEN_BYTES)
        if token is None:
            raise ValueError(f"its token is not {2 * TOKEN_BYTES} hexadecimal digits")
    return Address(port, protocol, str(value.get("version", "")), token)


def read_attach_file(path: str) -> Address:
    """The address with its token that `rigfit serve --attach` wrote. RigError attach_missing, attach_unsafe, attach_bad.

    Whoever wrote the file gets the artist's photos, so on POSIX only a regular file counts that belongs to this user and
    that nobody else can read or write.
    """
    # NONBLOCK: a pipe under that name must not make Blender wait.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        descriptor = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError):
        raise RigError("attach_missing", path=path) from None
    except OSError as error:
        reason = "it is a link" if os.path.islink(path) else _words(error)
        raise RigError("attach_unsafe", path=path, reason=reason) from None
    except ValueError:
        raise RigError("attach_missing", path=path) from None
    try:
        reason = _why_unsafe(os.fstat(descriptor))
        if reason:
            raise RigError("attach_unsafe", path=path, reason=reason)
        text = os.read(descriptor, ADDRESS_LIMIT + 1)
    except OSError as error:
        raise RigError("attach_unsafe", path=path, reason=_words(error)) from None
    finally:
        os.close(descriptor)
    try:
        address = read_address(text)
        if address.token is None:
            raise ValueError("it holds no token")
    except ValueError as error:
        raise RigError("attach_bad", path=path, reason=str(error)) from None
    return address


def describe_exit(code: int) -> str:
    """How a process ended, in words."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = ", perhaps for lack of memory" if name == "SIGKILL" else ""
        return f"ended by {name}{hint}"
    if sys.platform == "win32" and code > 0xFFFF:
        return f"exit code 0x{code:08X}"
    return f"exit code {code}"


def _why_unsafe(status: os.stat_result) -> str:
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file"
    if hasattr(os, "geteuid"):
        if status.st_uid != os.geteuid():
            return "it belongs to another user"
        if stat.S_IMODE(status.st_mode) & 0o077:
            return "other users can read or write it"
    return ""


def _new_log(path: str) -> Any:
    """A new, private, empty file for appending: two writers never overwrite each other."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with contextlib.suppress(OSError):
        # Windows refuses while an earlier child that is being ended still holds it; then it is continued.
        os.unlink(path)
    return open(path, "ab", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600))


def _words(error: Exception) -> str:
    """What the system says, with the file's name where it gives one."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)
