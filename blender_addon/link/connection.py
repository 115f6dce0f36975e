# SPDX-License-Identifier: GPL-3.0-or-later
"""The socket to the backend: never waits, and works only as long as it is told. No bpy in here."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable

from .wire import Decoder, Frame

# The literal: a name could be made to mean another machine.
HOST = "127.0.0.1"

# How much is moved between two looks at the clock: some 0.02 ms, where the memory has been in use before.
PIECE_BYTES = 64 << 10

# Blender leaves SIGPIPE at its default, which ends the process at a write to a closed socket; so each write says no.
_SEND_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)
_SO_NOSIGPIPE = 0x1022  # macOS, <sys/socket.h>; Python has no name for it.

# Windows numbers its errors differently; Python translates some of them only.
_IN_PROGRESS = {errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN, getattr(errno, "WSAEWOULDBLOCK", errno.EWOULDBLOCK)}


class ConnectionLost(Exception):
    """The connection could not be made or is gone, with the reason in a few words."""


class Connection:
    """One connection to 127.0.0.1. Nothing in here blocks; `deadline` is always on `time.perf_counter`.

    is_open: the connection stands. drained: the last `receive` left nothing in the socket.
    """

    def __init__(self, port: int) -> None:
        """Begin to connect. ConnectionLost."""
        self.is_open = False
        self.drained = True
        self._decoder = Decoder()
        self._outgoing: deque[memoryview] = deque()
        try:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            raise ConnectionLost(_words(error)) from None
        try:
            self._socket.setblocking(False)
            if sys.platform == "darwin":
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_NOSIGPIPE, 1)
            code = self._socket.connect_ex((HOST, port))
            if code == 0:
                self._opened()
            elif code not in _IN_PROGRESS:
                raise OSError(code, os.strerror(code))
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise ConnectionLost(_words(error)) from None
        except ConnectionLost:
            self._socket.close()
            raise

    def connect(self) -> bool:
        """Whether the connection stands by now. ConnectionLost if it cannot be made."""
        if not self.is_open and self._settled():
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise ConnectionLost(_words(OSError(code, os.strerror(code))))
            self._opened()
        return self.is_open

    def trust(self) -> None:
        """The hello is complete: frames may be as large as the protocol allows."""
        self._decoder.trust()

    def send(self, pieces: Iterable[memoryview]) -> None:
        """Put the pieces of a frame into the queue; `flush` sends them."""
        self._outgoing.extend(piece for piece in pieces if len(piece))

    def flush(self, deadline: float) -> None:
        """Send what the socket takes. A connection that is gone is reported by `receive`, after what came before."""
        while self._outgoing and self.is_open:
            piece = self._outgoing[0]
            try:
                sent = self._socket.send(piece[:PIECE_BYTES], _SEND_FLAGS)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._outgoing.clear()
                return
            if sent == len(piece):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = piece[sent:]
            if time.perf_counter() >= deadline:
                return

    def receive(self, deadline: float) -> Frame | None:
        """The next whole frame; None if there is none yet, or no time. WireError, ConnectionLost.

        At least one piece is read, so even a caller without time gets on.
        """
        self.drained = False
        while True:
            buffer = self._decoder.buffer()
            try:
                count = self._socket.recv_into(buffer[:PIECE_BYTES])
            except (BlockingIOError, InterruptedError):
                self.drained = True
                return None
            except OSError as error:
                raise ConnectionLost(_words(error)) from None
            if count == 0:
                where = "" if self._decoder.between_frames else " in the middle of a message"
                raise ConnectionLost(f"the connection was closed{where}")
            frame = self._decoder.advance(count)
            if frame is not None or time.perf_counter() >= deadline:
                return frame

    def close(self) -> None:
        self.is_open = False
        self._outgoing.clear()
        with contextlib.suppress(OSError):
            self._socket.close()

    def _settled(self) -> bool:
        # `selectors` knows that Windows reports a failed attempt as an exception, not as writable. poll has no limit
        # on the number of the descriptor, and makes none of its own.
        chosen = getattr(selectors, "PollSelector", selectors.SelectSelector)
        with chosen() as selector:
            selector.register(self._socket, selectors.EVENT_WRITE)
            return bool(selector.select(0))

    def _opened(self) -> None:
        try:
            # A port of the range for outgoing connections where nobody listens any more can connect to itself.
            if self._socket.getsockname() == self._socket.getpeername():
                raise ConnectionLost("nobody listens there")
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise ConnectionLost(_words(error)) from None
        self.is_open = True


def _words(error: OSError | OverflowError) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
