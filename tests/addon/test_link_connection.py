# SPDX-License-Identifier: Apache-2.0
"""The socket: real ones, with a peer in this process that does not do what one hopes for."""

from __future__ import annotations

import contextlib
import json
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from blender_addon.link.connection import Connection, ConnectionLost
from blender_addon.link.wire import Frame, WireError, encode

ROOT = Path(__file__).resolve().parents[2]


def soon(seconds: float = 0.005) -> float:
    return time.perf_counter() + seconds


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        yield server


@pytest.fixture
def pair(listener):
    """(connection, the peer's socket)."""
    connection = Connection(listener.getsockname()[1])
    peer, address = listener.accept()
    assert address[0] == "127.0.0.1"
    until(connection.connect)
    yield connection, peer
    connection.close()
    peer.close()


def until(happened, timeout_s: float = 5.0):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        value = happened()
        if value:
            return value
        time.sleep(0.001)
    raise AssertionError("it did not happen")


def frame(message: dict, blob: bytes = b"") -> bytes:
    text = json.dumps(message).encode()
    return b"RGF1" + struct.pack("<II", len(text), len(blob)) + text + blob


def test_frames_come_one_by_one_and_nothing_waits(pair):
    connection, peer = pair
    started = time.perf_counter()
    assert connection.receive(soon(60)) is None
    assert connection.drained
    assert time.perf_counter() - started < 0.05
    peer.sendall(frame({"id": 1}) + frame({"id": 2}) + frame({"id": 3})[:20])
    assert until(lambda: connection.receive(soon())) == Frame({"id": 1}, {})
    assert not connection.drained
    assert connection.receive(soon()) == Frame({"id": 2}, {})
    assert connection.receive(soon()) is None
    assert connection.drained
    peer.sendall(frame({"id": 3})[20:])
    assert until(lambda: connection.receive(soon())) == Frame({"id": 3}, {})


def test_what_the_peer_does_not_take_yet_waits_here(pair):
    """40 MB to a peer that does not read: `flush` returns; later all of it arrives, in order."""
    connection, peer = pair
    array = np.random.default_rng(3).integers(0, 256, 40_000_000, dtype=np.uint8)
    pieces = encode({"id": 1}, {"a": array})
    expected = b"".join(bytes(piece) for piece in pieces)
    connection.send(pieces)
    connection.send(encode({"id": 2}))
    for _ in range(3):
        started = time.perf_counter()
        connection.flush(soon())
        assert time.perf_counter() - started < 0.1
    peer.settimeout(5)
    received = bytearray()
    wanted = len(expected) + len(frame({"id": 2}).replace(b": ", b":"))
    while len(received) < wanted:
        connection.flush(soon())
        received += peer.recv(1 << 20)
    assert received[: len(expected)] == expected
    assert json.loads(bytes(received[len(expected) + 12 :])) == {"id": 2}


class Eager:
    """A socket that takes everything, 2 ms a piece."""

    def send(self, piece: memoryview, flags: int) -> int:
        time.sleep(0.002)
        return len(piece)

    def close(self) -> None:
        pass


def test_a_peer_that_takes_everything_does_not_get_all_the_time(pair):
    connection, _ = pair
    connection._socket.close()
    connection._socket = Eager()
    connection.send(encode({"id": 1}, {"a": np.zeros(10_000_000, np.uint8)}))
    started = time.perf_counter()
    connection.flush(soon(0.01))
    assert time.perf_counter() - started < 0.1
    assert sum(len(piece) for piece in connection._outgoing) > 5_000_000


def test_a_large_blob_takes_many_short_looks(pair):
    connection, peer = pair
    connection.trust()
    body = bytes(range(256)) * (1 << 16)
    data = memoryview(frame({"id": 1, "blobs": [{"name": "a", "dtype": "uint8", "shape": [256, 1 << 16]}]}, body))
    peer.setblocking(False)
    got, longest = None, 0.0
    while got is None:
        if len(data):
            with contextlib.suppress(BlockingIOError):
                data = data[peer.send(data) :]
        started = time.perf_counter()
        got = connection.receive(soon(0.0005))
        longest = max(longest, time.perf_counter() - started)
    assert got.blobs["a"].shape == (256, 1 << 16)
    assert got.blobs["a"].tobytes() == body
    assert longest < 0.1


def test_an_end_between_messages_and_one_inside(pair):
    connection, peer = pair
    peer.sendall(frame({"id": 1}) + frame({"id": 2})[:15])
    peer.close()
    assert until(lambda: connection.receive(soon())).message == {"id": 1}
    with pytest.raises(ConnectionLost, match="in the middle of a message"):
        until(lambda: connection.receive(soon()))


def test_an_end_in_order(pair):
    connection, peer = pair
    peer.close()
    with pytest.raises(ConnectionLost, match=r"closed$"):
        until(lambda: connection.receive(soon()))


def test_a_reset(pair):
    connection, peer = pair
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    with pytest.raises(ConnectionLost, match=r"reset|closed|aborted"):
        until(lambda: connection.receive(soon()))


def test_garbage(pair):
    connection, peer = pair
    peer.sendall(random.Random(1).randbytes(100))
    with pytest.raises(WireError):
        until(lambda: connection.receive(soon()))


@pytest.mark.parametrize("trusted", [False, True])
def test_large_frames_only_after_the_hello(pair, trusted):
    connection, peer = pair
    peer.sendall(frame({"id": 1}))
    assert until(lambda: connection.receive(soon())).message == {"id": 1}
    if trusted:
        connection.trust()
    peer.sendall(frame({"x": "y" * 5000}))
    if trusted:
        assert until(lambda: connection.receive(soon())).message == {"x": "y" * 5000}
    else:
        with pytest.raises(WireError, match="bytes"):
            until(lambda: connection.receive(soon()))


@pytest.fixture(params=["poll", "select"])
def waiting_by(request, monkeypatch):
    """Both ways to ask whether an attempt is over: Windows has no poll."""
    if request.param == "select":
        monkeypatch.delattr(selectors, "PollSelector", raising=False)
    return request.param


def test_somebody_there(listener, waiting_by):
    connection = Connection(listener.getsockname()[1])
    until(connection.connect)
    assert connection.is_open
    connection.close()
    assert not connection.is_open


def test_nobody_there(listener, waiting_by):
    port = listener.getsockname()[1]
    listener.close()

    def attempt() -> None:
        connection = Connection(port)
        try:
            until(connection.connect)
        finally:
            connection.close()

    with pytest.raises(ConnectionLost, match="refused"):
        attempt()


@pytest.mark.parametrize("port", [-1, 1 << 16, 0])
def test_no_port_at_all(port):
    with pytest.raises(ConnectionLost):
        until(Connection(port).connect)


def test_a_connection_to_itself_is_none():
    """A socket that gets the very port as its own that it asks for connects to itself (TCP, simultaneous open)."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        try:
            one.connect(one.getsockname())
        except OSError:
            pytest.skip("this system does not connect a socket to itself")
        connection = Connection.__new__(Connection)
        connection.is_open, connection._socket = False, one
        with pytest.raises(ConnectionLost, match="nobody listens"):
            connection._opened()
        assert not connection.is_open


def test_slow_to_accept():
    """With a full queue the attempt stays in progress; nothing waits for it meanwhile."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port = server.getsockname()[1]
        waiting = []
        for _ in range(8):
            one = Connection(port)
            waiting.append(one)
            if not one.connect():
                break
        started = time.perf_counter()
        for one in waiting:
            one.connect()
            one.flush(soon())
        assert time.perf_counter() - started < 0.2
        for one in waiting:
            one.close()


DEADLY = """
import signal, socket, sys, time
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
from blender_addon.link.connection import Connection, ConnectionLost
from blender_addon.link.wire import encode
with socket.create_server(("127.0.0.1", 0)) as server:
    connection = Connection(server.getsockname()[1])
    peer, _ = server.accept()
    while not connection.connect():
        pass
    peer.close()
    for _ in range(20):
        connection.send(encode({"id": 1}))
        connection.flush(time.perf_counter() + 0.01)
        time.sleep(0.005)
try:
    connection.receive(time.perf_counter() + 0.01)
except ConnectionLost:
    print("survived")
"""


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="there is no SIGPIPE here")
def test_a_write_to_a_closed_socket_is_not_deadly():
    """Blender leaves SIGPIPE at its default, which ends the process."""
    done = subprocess.run([sys.executable, "-c", DEADLY], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr
