# SPDX-License-Identifier: Apache-2.0
"""A backend that does as it is told, wrongly if it is told so: for the tests of the add-on's end of the link.

Written from docs/protocol.md alone and with the standard library alone: it shares no code with what it tests.

    python fake_backend.py [--fault NAME] [--attach] --address-file PATH

Faults that are there from the start are the names in `FAULTS`; what can go wrong later are the methods of `Work`.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

FAULTS = {
    "": "none",
    "no-address": "never says where it listens",
    "exit-at-start": "ends with code 3 and a word",
    "bad-address": "writes nonsense into the address file",
    "other-host": "says that it listens on another machine",
    "other-protocol-address": "says in the address file that it speaks protocol 99",
    "other-protocol-hello": "says in the hello that it speaks protocol 99",
    "refuses-protocol": "answers the hello with the error bad_protocol",
    "in-use": "answers the hello with the error in_use",
    "dead-port": "names a port where nobody listens",
    "slow-accept": "accepts the connection after 0.5 s",
    "silent": "accepts, and says nothing",
    "closes-twice": "closes the first two connections before the hello",
    "always-closes": "closes every connection before the hello",
    "garbage": "answers the hello with random bytes",
    "half-frame": "answers the hello with half a frame and silence",
    "half-frame-closed": "answers the hello with half a frame and closes",
    "large-hello": "answers the hello with more than 4 KiB",
    "blob-hello": "answers the hello with a blob",
    "no-token": "does not know the token",
    "wrong-id": "answers another question than the hello",
    "deaf": "answers nothing after the hello",
    "stubborn": "does not end when standard input does, nor at `shutdown`",
    "chatter": "prints without end",
}


def frame(message: dict, blob: bytes = b"") -> bytes:
    text = json.dumps(message).encode()
    return b"RGF1" + struct.pack("<II", len(text), len(blob)) + text + blob


class Wire:
    """Blocking frames over a socket."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.lock = threading.Lock()

    def exactly(self, count: int) -> bytes:
        parts = []
        while count:
            part = self.peer.recv(min(count, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def receive(self) -> tuple[dict, bytes]:
        magic, json_length, blob_length = struct.unpack("<4sII", self.exactly(12))
        assert magic == b"RGF1", magic
        return json.loads(self.exactly(json_length)), self.exactly(blob_length)

    def raw(self, data: bytes) -> None:
        with self.lock:
            self.peer.sendall(data)

    def send(self, message: dict, blob: bytes = b"") -> None:
        self.raw(frame({"jsonrpc": "2.0", **message}, blob))


class Work:
    """The jobs; each is named as its method."""

    def __init__(self, wire: Wire, number: int, cancelled: threading.Event) -> None:
        self.wire, self.number, self.cancelled = wire, number, cancelled

    def echo(self, params: dict, blobs: list, blob: bytes) -> None:
        self.wire.send({"id": self.number, "result": params, **({"blobs": blobs} if blobs else {})}, blob)

    def steps(self, params: dict, *_: object) -> None:
        """Progress, `count` times, `pause_s` apart; listens to cancel."""
        for done in range(params["count"]):
            self.progress(done, params["count"], f"step {done}")
            if self.cancelled.wait(params.get("pause_s", 0)):
                self.fail(2, "Cancelled.", "cancelled")
                return
        self.wire.send({"id": self.number, "result": {"steps": params["count"]}})

    def flood(self, params: dict, *_: object) -> None:
        """`count` progress notifications as fast as the socket takes them."""
        lines = [
            frame({"jsonrpc": "2.0", "method": "progress", "params": self._progress(i, 100, f"{i}")})
            for i in range(100)
        ]
        many = b"".join(lines)
        for _ in range(params["count"] // 100):
            self.wire.raw(many)
        self.wire.send({"id": self.number, "result": {}})

    def large(self, params: dict, *_: object) -> None:
        """A blob of so many bytes, and another small array after an odd one."""
        count = params["bytes"]
        blobs = [
            {"name": "large", "dtype": "uint8", "shape": [count]},
            {"name": "after", "dtype": "float32", "shape": [2, 1]},
        ]
        body = (b"0123456789abcdef" * (count // 16 + 1))[:count] + struct.pack("<2f", 1.5, -2.0)
        self.wire.send({"id": self.number, "result": {"bytes": count}, "blobs": blobs}, body)

    def refuse(self, params: dict, *_: object) -> None:
        self.fail(params.get("code", 1), params["message"], params["kind"])

    def cancelled_by_itself(self, *_: object) -> None:
        self.fail(2, "Cancelled.", "cancelled")

    def stubborn_job(self, params: dict, *_: object) -> None:
        """Does not listen to cancel."""
        self.progress(0, 0, "stubborn")
        time.sleep(params.get("seconds", 60))
        self.wire.send({"id": self.number, "result": {"late": True}})

    def late(self, params: dict, *_: object) -> None:
        """Notices the cancel, and answers with a result nevertheless, after a while."""
        self.progress(0, 0, "late")
        self.cancelled.wait(20)
        time.sleep(params.get("seconds", 0.2))
        self.wire.send({"id": self.number, "result": {"late": True}})

    def hold_everything(self, params: dict, *_: object) -> None:
        """As a long call into C does: nothing is answered meanwhile, pings neither."""
        self.wire.send({"id": self.number, "result": {"held": params["seconds"]}})

    def die(self, params: dict, *_: object) -> None:
        self.progress(0, 0, "about to die")
        print("these are my last words", flush=True)
        time.sleep(params.get("after_s", 0.05))
        if params.get("with_children"):
            start_child()
        if params.get("signal"):
            os.kill(os.getpid(), params["signal"])
            # Any thread may be the one that it reaches.
            time.sleep(10)
        os._exit(params.get("code", 7))

    def result_then_die(self, params: dict, *_: object) -> None:
        """A large answer, and dead before it is read."""
        self.large(params)
        os._exit(0)

    def close(self, *_: object) -> None:
        self.wire.peer.shutdown(socket.SHUT_RDWR)

    def half(self, *_: object) -> None:
        """Half an answer, then death."""
        whole = frame({"jsonrpc": "2.0", "id": self.number, "result": {"half": True}}, b"")
        with self.wire.lock:
            self.wire.peer.sendall(whole[: len(whole) // 2])
            time.sleep(0.05)
            os._exit(9)

    def garbage(self, params: dict, *_: object) -> None:
        self.wire.raw(bytes.fromhex(params["hex"]))

    def odd_answer(self, params: dict, *_: object) -> None:
        """An answer with any members at all."""
        self.wire.send({"id": self.number, **params["members"]})

    def strangers(self, *_: object) -> None:
        """Messages that nobody asked for, before the answer."""
        self.wire.send({"method": "progress", "params": {"id": 424242, "done": 1, "total": 2, "text": "not yours"}})
        self.wire.send({"method": "progress", "params": None})
        self.wire.send({"method": "progress", "params": {"id": self.number, "done": "x", "total": 2, "text": 5}})
        self.wire.send({"method": "surprise", "params": {}})
        self.wire.send({"id": 5, "method": "question", "params": {}})
        self.wire.send({"id": 999999, "result": {"not": "yours"}})
        self.wire.send({"id": None, "error": {"code": -32600, "message": "?", "data": {"kind": "bad_request"}}})
        self.wire.send({"id": self.number, "result": {"mine": True}})

    def environment(self, *_: object) -> None:
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "RIGFIT", "__PY"))}
        self.wire.send(
            {
                "id": self.number,
                "result": {"environment": kept, "folder": os.getcwd(), "argv": sys.argv, "files": os.listdir()},
            }
        )

    def child(self, *_: object) -> None:
        """Starts a process of its own that never ends by itself."""
        self.wire.send({"id": self.number, "result": {"pid": start_child()}})

    # --- answers ---

    def _progress(self, done: int, total: int, text: str) -> dict:
        return {"id": self.number, "done": done, "total": total, "text": text}

    def progress(self, done: int, total: int, text: str) -> None:
        self.wire.send({"method": "progress", "params": self._progress(done, total, text)})

    def fail(self, code: int, message: str, kind: str) -> None:
        self.wire.send({"id": self.number, "error": {"code": code, "message": message, "data": {"kind": kind}}})


def start_child() -> int:
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], **quiet).pid


class Backend:
    def __init__(self, fault: str, token: bytes) -> None:
        self.fault, self.token = fault, token
        self.connections = 0

    def serve(self, peer: socket.socket) -> None:
        self.connections += 1
        wire = Wire(peer)
        try:
            if self.greet(wire):
                self.work(wire)
        except (EOFError, OSError):
            pass
        finally:
            peer.close()

    def greet(self, wire: Wire) -> bool:
        if self.fault == "always-closes" or (self.fault == "closes-twice" and self.connections <= 2):
            return False
        hello, _ = wire.receive()
        assert hello["method"] == "hello", hello
        number = hello["id"]
        if self.fault == "silent":
            time.sleep(60)
        if self.fault == "garbage":
            wire.raw(secrets.token_bytes(300))
            time.sleep(60)
        if self.fault in ("in-use", "refuses-protocol"):
            kind = {"in-use": "in_use", "refuses-protocol": "bad_protocol"}[self.fault]
            wire.send({"id": number, "error": {"code": 3, "message": "No.", "data": {"kind": kind}}})
            return False
        client_nonce, server_nonce = bytes.fromhex(hello["params"]["nonce"]), secrets.token_bytes(32)
        proof = hmac.new(self.token, b"rigfit server" + client_nonce + server_nonce, hashlib.sha256).hexdigest()
        answer = {
            "jsonrpc": "2.0",
            "id": number + 5 if self.fault == "wrong-id" else number,
            "result": {
                "protocol": 99 if self.fault == "other-protocol-hello" else hello["params"]["protocol"],
                "server": "fake 1.0" + ("x" * 5000 if self.fault == "large-hello" else ""),
                "pid": os.getpid(),
                "nonce": server_nonce.hex(),
                "proof": proof,
            },
        }
        if self.fault == "blob-hello":
            wire.raw(frame({**answer, "blobs": [{"name": "a", "dtype": "uint8", "shape": [4]}]}, b"1234"))
        whole = frame(answer)
        if self.fault in ("half-frame", "half-frame-closed"):
            wire.raw(whole[: len(whole) // 2])
            time.sleep(60 if self.fault == "half-frame" else 0)
            return False
        wire.raw(whole)
        second, _ = wire.receive()
        assert second["method"] == "authenticate", second
        wanted = hmac.new(self.token, b"rigfit client" + client_nonce + server_nonce, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(wanted, second["params"]["proof"]):
            wire.send({"id": second["id"], "error": {"code": 3, "message": "No.", "data": {"kind": "bad_proof"}}})
            return False
        wire.send({"id": second["id"], "result": {}})
        return True

    def work(self, wire: Wire) -> None:
        running: dict[int, threading.Event] = {}
        while True:
            message, blob = wire.receive()
            if self.fault == "deaf":
                continue
            method, number, params = message["method"], message["id"], message.get("params", {})
            if method == "ping":
                wire.send({"id": number, "result": {"busy": bool(running), "queued": 0, "uptime_s": 1.0}})
            elif method == "cancel":
                found = params["id"] in running
                if found:
                    running[params["id"]].set()
                wire.send({"id": number, "result": {"found": found}})
            elif method == "shutdown":
                wire.send({"id": number, "result": {}})
                if self.fault != "stubborn":
                    os._exit(0)
            else:
                running[number] = threading.Event()
                if method == "hold_everything":
                    time.sleep(params["seconds"])
                job = getattr(Work(wire, number, running[number]), method)
                threading.Thread(target=job, args=(params, message.get("blobs", []), blob), daemon=True).start()


def watch_input(fault: str) -> None:
    while os.read(0, 1024):
        pass
    if fault != "stubborn":
        os._exit(0)


def write_address(path: str, fault: str, port: int, token: bytes | None) -> None:
    address = {
        "schema": "rigfit.address/1",
        "host": "192.0.2.1" if fault == "other-host" else "127.0.0.1",
        "port": port,
        "pid": os.getpid(),
        "protocol": 99 if fault == "other-protocol-address" else 1,
        "version": "0.0-fake",
    }
    if token is not None:
        address["token"] = token.hex()
    text = "{nonsense" if fault == "bad-address" else json.dumps(address)
    descriptor = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(descriptor, text.encode())
    os.close(descriptor)
    os.replace(path + ".new", path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="")
    parser.add_argument("--attach", action="store_true")
    parser.add_argument("--address-file", required=True)
    given = parser.parse_args()
    fault = given.fault
    if hasattr(signal, "SIGINT"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if given.attach:
        token = secrets.token_bytes(32)
    else:
        line = sys.stdin.buffer.raw.readline()
        assert len(line) == 65, line
        token = bytes.fromhex(line.decode())
        threading.Thread(target=watch_input, args=(fault,), daemon=True).start()
    if fault == "exit-at-start":
        print("ModuleNotFoundError: No module named 'rigfit'", file=sys.stderr)
        sys.exit(3)
    if fault == "chatter":
        line = b"I have a lot to say, and nobody reads it. " * 25 + b"\n"
        threading.Thread(target=lambda: [os.write(1, line * 100) for _ in iter(int, 1)], daemon=True).start()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    if fault == "dead-port":
        listener.close()
    if fault != "no-address":
        write_address(given.address_file, fault, port, token if given.attach else None)
    if fault in ("no-address", "dead-port"):
        time.sleep(60)
        return
    if fault == "slow-accept":
        time.sleep(0.5)
    if fault == "no-token":
        token = secrets.token_bytes(32)
    backend = Backend(fault, token)
    while True:
        peer, _ = listener.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=backend.serve, args=(peer,), daemon=True).start()


if __name__ == "__main__":
    main()
