# SPDX-License-Identifier: Apache-2.0
"""A backend process for tests, and a client that speaks docs/protocol.md: blocking, standard library and numpy only.

It shares no code with the backend, so that both being wrong in the same way is unlikely.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import os
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

BACKEND = Path(__file__).resolve().parents[2] / "backend"
PHOTO = BACKEND / "rigfit" / "assets" / "astronaut.png"


class RemoteError(Exception):
    """The error of a response. params: what progress was told before."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.code, self.message, self.kind = error["code"], error["message"], error["data"]["kind"]


def frame(message: Any, blob: bytes = b"") -> bytes:
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    return b"RGF1" + struct.pack("<II", len(text), len(blob)) + text + blob


class Client:
    """One connection. progress: all notifications so far. frames read while waiting for another answer are kept."""

    def __init__(self, port: int, timeout_s: float = 60.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self.next_id = 1
        self.progress: list[dict[str, Any]] = []
        self.answers: dict[int | None, tuple[dict[str, Any], dict[str, np.ndarray]]] = {}

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    # --- frames ---

    def raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def exactly(self, count: int) -> bytes:
        parts = []
        while count:
            part = self.socket.recv(min(count, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        magic, json_bytes, blob_bytes = struct.unpack("<4sII", self.exactly(12))
        assert magic == b"RGF1"
        message = json.loads(self.exactly(json_bytes))
        blob = self.exactly(blob_bytes)
        arrays, at = {}, 0
        for item in message.pop("blobs", []):
            dtype = np.dtype({"uint8": "u1", "float32": "<f4"}[item["dtype"]])
            count = math.prod(item["shape"])
            arrays[item["name"]] = np.frombuffer(blob, dtype, count, at).reshape(item["shape"])
            at += count * dtype.itemsize
        assert at == len(blob)
        assert message["jsonrpc"] == "2.0"
        return message, arrays

    def closed_by_backend(self) -> bool:
        """Read to the end of the connection."""
        try:
            while self.receive():
                pass
        except (EOFError, ConnectionError):
            return True
        except TimeoutError:
            return False

    # --- messages ---

    def send(self, method: str, **params: Any) -> int:
        number = self.next_id
        self.next_id += 1
        self.raw(frame({"jsonrpc": "2.0", "id": number, "method": method, "params": params}))
        return number

    def wait(self, number: int | None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The result and arrays of a request. RemoteError."""
        while number not in self.answers:
            message, arrays = self.receive()
            if message.get("method") == "progress":
                self.progress.append(message["params"])
            else:
                self.answers[message["id"]] = message, arrays
        message, arrays = self.answers.pop(number)
        if "error" in message:
            assert "result" not in message
            raise RemoteError(message["error"])
        return message["result"], arrays

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.wait(self.send(method, **params))[0]

    def wait_for_progress(self, text: str) -> None:
        while not any(text in told["text"] for told in self.progress):
            message, arrays = self.receive()
            if message.get("method") == "progress":
                self.progress.append(message["params"])
            else:
                self.answers[message["id"]] = message, arrays

    def hello(self, token: bytes, protocol: int = 1) -> dict[str, Any]:
        """The whole hello; checks the backend's proof."""
        nonce = secrets.token_bytes(32)
        told = self.call("hello", protocol=protocol, client="test", nonce=nonce.hex())
        server_nonce = bytes.fromhex(told["nonce"])
        proof = hmac.new(token, b"rigfit server" + nonce + server_nonce, hashlib.sha256).hexdigest()
        assert hmac.compare_digest(proof, told["proof"])
        proof = hmac.new(token, b"rigfit client" + nonce + server_nonce, hashlib.sha256).hexdigest()
        assert self.call("authenticate", proof=proof) == {}
        return told


class Backend:
    """A `rigfit serve` process. cache: its XDG_CACHE_HOME. temporary: its folder for temporary files, its own."""

    def __init__(self, folder: Path, *options: str, cache: Path | None = None, attach: bool = False) -> None:
        self.address_file = folder / "address.json"
        self.log = folder / "backend.log"
        self.temporary = folder / "temporary"
        self.temporary.mkdir(exist_ok=True)
        self.token = secrets.token_bytes(32)
        self.began = time.perf_counter()
        command = [sys.executable, "-m", "rigfit", "serve", "--address-file", str(self.address_file)]
        command += ["--log", str(self.log), *(["--attach"] if attach else []), *options]
        environment = {
            **os.environ,
            "PYTHONPATH": str(BACKEND),
            "XDG_CACHE_HOME": str(cache or folder / "cache"),
            "TMPDIR": str(self.temporary),
        }
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=folder
        )
        if not attach:
            assert self.process.stdin is not None
            self.process.stdin.write(self.token.hex().encode() + b"\n")
            self.process.stdin.flush()

    @property
    def pid(self) -> int:
        return self.process.pid

    def address(self, within_s: float = 20.0) -> dict[str, Any]:
        deadline = time.monotonic() + within_s
        while not self.address_file.exists():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, "no address file"
            time.sleep(0.01)
        return json.loads(self.address_file.read_text())

    def stranger(self, timeout_s: float = 60.0) -> Client:
        """A connection without hello."""
        return Client(self.address()["port"], timeout_s)

    def connect(self, timeout_s: float = 60.0) -> Client:
        client = self.stranger(timeout_s)
        try:
            client.hello(self.token)
        except BaseException:
            client.close()
            raise
        return client

    def output(self) -> str:
        """What the ended process printed."""
        out, err = self.process.communicate(timeout=20)
        return (out + err).decode()

    def ended(self, within_s: float) -> int | None:
        """The exit code; None if it still runs after so long."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        if self.ended(3) is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def running(folder: Path, *options: str, cache: Path | None = None, attach: bool = False) -> Iterator[Backend]:
    backend = Backend(folder, *options, cache=cache, attach=attach)
    try:
        yield backend
    finally:
        backend.kill()
