# SPDX-License-Identifier: Apache-2.0
"""`rigfit serve` as a process: hello, requests, faults of the other side, secrets, and every way in which it ends."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import secrets
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from backend_client import BACKEND, Backend, RemoteError, frame, running
from mask_rig import camera_for, mask_rig, random_values
from PIL import Image
from rigfit.fitting.face_frame import landmark_model

posix_only = pytest.mark.skipif(os.name != "posix", reason="POSIX only")
linux_only = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    with running(tmp_path_factory.mktemp("backend äö")) as process:
        yield process


@pytest.fixture(scope="module")
def mask(tmp_path_factory):
    """Parameters of `rig.register` and `fit` for a face whose landmarks are known: no detector, no Blender."""
    folder = tmp_path_factory.mktemp("mask")
    spec = mask_rig()
    spec.save(folder / "rig.npz")
    truth = random_values(spec, np.random.default_rng(3))
    pixels = camera_for(spec, 8, -3, 5).project(landmark_model(spec).points(truth))
    Image.fromarray(np.full((480, 640, 3), 127, np.uint8)).save(folder / "photo.png")
    points = [[float(x), float(y)] for x, y in pixels]
    (folder / "points.json").write_text(json.dumps({"schema": "rigfit.landmarks/1", "points": points}))
    photo = {"path": str(folder / "photo.png"), "landmark_file": str(folder / "points.json")}
    return {"spec": str(folder / "rig.npz")}, {"rig_hash": spec.rig_hash, "photos": [photo]}, truth, spec


def is_gone(pid: int, within_s: float) -> bool:
    """Whether a process that may not be our child is gone, or a zombie, within some time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


# --- start and hello --------------------------------------------------------------------------------------------------


def test_the_address_file_is_private_and_says_what_the_page_says(backend):
    address = backend.address()
    assert address.keys() == {"schema", "host", "port", "pid", "protocol", "version"}
    assert address["schema"] == "rigfit.address/1"
    assert address["host"] == "127.0.0.1"
    assert address["pid"] == backend.pid
    assert address["protocol"] == 1
    # Temporary names are renamed, not left.
    assert {path.name for path in backend.address_file.parent.iterdir()} <= {
        "address.json",
        "backend.log",
        "cache",
        "temporary",
    }
    if os.name == "posix":
        assert stat.S_IMODE(backend.address_file.stat().st_mode) == 0o600


def test_hello_and_ping(backend):
    with backend.connect() as client:
        told = client.call("ping")
        assert told.keys() == {"busy", "queued", "uptime_s"}
        assert told["queued"] == 0
        assert told["uptime_s"] > 0
        with pytest.raises(RemoteError) as error:
            client.call("hello", protocol=1, client="again", nonce="00" * 32)
        assert error.value.kind == "bad_request"
        assert client.call("ping")["queued"] == 0


def test_a_second_client_is_told_so_and_the_first_goes_on(backend):
    with backend.connect() as client:
        with backend.stranger() as second:
            with pytest.raises(RemoteError) as error:
                second.hello(backend.token)
            assert (error.value.code, error.value.kind) == (3, "in_use")
            assert second.closed_by_backend()
        client.call("ping")
    # A client that comes back before the end of its last connection was seen is let in.
    first = backend.connect()
    with backend.stranger() as second:
        number = second.send("hello", protocol=1, client="x", nonce="00" * 32)
        time.sleep(0.1)
        first.close()
        assert second.wait(number)[0]["protocol"] == 1


@pytest.mark.parametrize(
    ("first", "kind", "code"),
    [
        (("hello", {"protocol": 2, "client": "x", "nonce": "00" * 32}), "bad_protocol", 3),
        (("hello", {"protocol": 1, "client": "x", "nonce": "00"}), "bad_params", -32602),
        (("hello", {}), "bad_params", -32602),
        (("ping", {}), "not_authenticated", 3),
        (("authenticate", {"proof": "00" * 32}), "not_authenticated", 3),
        (("shutdown", {}), "not_authenticated", 3),
        (("rig.register", {"spec": "/etc/passwd"}), "not_authenticated", 3),
        (("nothing", {}), "unknown_method", -32601),
    ],
)
def test_hellos_that_fail_are_answered_and_closed(backend, first, kind, code):
    with backend.stranger() as client:
        with pytest.raises(RemoteError) as error:
            client.call(first[0], **first[1])
        assert (error.value.kind, error.value.code) == (kind, code)
        assert client.closed_by_backend()
    backend.connect().close()


def test_a_wrong_token_is_refused(backend):
    with backend.stranger() as client:
        client.call("hello", protocol=1, client="x", nonce="00" * 32)
        with pytest.raises(RemoteError) as error:
            client.call("authenticate", proof="00" * 32)
        assert (error.value.code, error.value.kind) == (3, "bad_proof")
        assert client.closed_by_backend()


def test_a_proof_is_good_for_its_own_connection_only(backend):
    """A recorded hello cannot be played again: the nonce of the backend is another one."""
    nonces = set()
    for _ in range(5):
        with backend.stranger() as client:
            nonces.add(client.call("hello", protocol=1, client="x", nonce="11" * 32)["nonce"])
    assert len(nonces) == 5


@pytest.mark.parametrize(
    ("data", "answered"),
    [
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", False),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), False),
        (frame({"jsonrpc": "2.0", "id": 1, "method": "hello", "params": {"client": "x" * 5000}}), False),
        (frame({"jsonrpc": "2.0", "id": 1, "method": "hello", "blobs": [{"name": "a", "dtype": "uint8", "shape": [4]}]}, b"1234"), False),
        (frame(b"{nonsense"), True),
        (frame(b"[" * 4000), True),
        (frame([{"jsonrpc": "2.0", "id": 1, "method": "ping"}]), True),
    ],
)  # fmt: skip
def test_a_stranger_that_talks_nonsense_is_closed(backend, data, answered):
    with backend.stranger(timeout_s=3) as client:
        client.raw(data)
        if answered:
            with pytest.raises(RemoteError) as error:
                client.wait(None)
            assert (error.value.code, error.value.kind) == (-32700, "bad_json")
        with pytest.raises((EOFError, ConnectionError)):
            client.receive()


def test_a_silent_stranger_is_closed_after_five_seconds_and_does_not_keep_others_out(backend):
    silent = [backend.stranger(timeout_s=8) for _ in range(3)]
    silent[1].raw(b"RGF1\x10")
    silent[2].call("hello", protocol=1, client="x", nonce="00" * 32)
    began = time.monotonic()
    with backend.connect() as client:
        client.call("ping")
    assert time.monotonic() - began < 2
    for one in silent:
        assert one.closed_by_backend()
        one.close()
    assert 4 < time.monotonic() - began < 7


def test_a_crowd_of_strangers_is_sent_away(backend):
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(backend.stranger(timeout_s=1)) for _ in range(20)]
        time.sleep(0.3)
        closed = sum(client.closed_by_backend() for client in crowd[-4:])
        assert closed == 4
    time.sleep(0.2)
    backend.connect().close()


@linux_only
def test_it_listens_on_loopback_only(backend):
    port = backend.address()["port"]
    listening = [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if Path(table).exists()
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    ]
    assert listening == [f"0100007F:{port:04X}"]


@linux_only
def test_the_token_is_in_neither_arguments_environment_nor_log(backend):
    backend.connect().close()
    with backend.stranger() as client, contextlib.suppress(RemoteError):
        client.call("authenticate", proof=backend.token.hex())
    for name in ("cmdline", "environ"):
        assert backend.token.hex().encode() not in Path(f"/proc/{backend.pid}/{name}").read_bytes().lower()
    log = backend.log.read_text()
    assert "listens at 127.0.0.1" in log
    assert backend.token.hex() not in log
    assert backend.token.hex() not in backend.address_file.read_text()
    if os.name == "posix":
        assert stat.S_IMODE(backend.log.stat().st_mode) == 0o600


# --- requests ---------------------------------------------------------------------------------------------------------


def test_register_and_fit_with_known_landmarks(backend, mask):
    register, fit, truth, spec = mask
    with backend.connect() as client:
        told = client.call("rig.register", **register)
        assert told["rig_hash"] == spec.rig_hash
        assert told["origin"] == "spec"
        assert told["parameters"] == len(spec.parameters)
        assert told["landmarks"] == 478
        assert not told["calibrated"]
        result, arrays = client.wait(client.send("fit", **fit))
        assert arrays.keys() == {"photo_0", "landmarks_0"}
        assert all(array.shape == (384, 384, 3) and array.dtype == np.uint8 for array in arrays.values())
        assert (arrays["photo_0"] != arrays["landmarks_0"]).any(axis=2).sum() > 300
        found = np.array([result["fit"]["parameters"][name]["value"] for name in spec.names])
        identity = spec.group("identity")
        assert np.abs(found - truth)[identity].mean() < 0.6 * np.abs(truth)[identity].mean()
        assert {told["text"] for told in client.progress} >= {"looking at photo.png", "solving"}
        assert all(told["id"] in (3, 4) for told in client.progress)


def test_solve_and_locks(backend, mask):
    register, fit, _, spec = mask
    groups = {p.name: p.group for p in spec.parameters}
    with backend.connect() as client:
        client.call("rig.register", **register)
        locks = {name: 0.25 for name in spec.names if groups[name] == "identity"}
        told = client.call("fit", **fit, solve="expression", locks=locks)["fit"]["parameters"]
        assert all(told[name]["value"] == 0.25 and told[name]["locked"] for name in locks)
        assert any(told[name]["value"] > 0.1 for name in spec.names if groups[name] == "expression")
        for wrong, kind in (
            ({"locks": {"nothing": 0.0}}, "unknown_parameter"),
            ({"initial": {"jawOpen": 9.0}}, "outside_limits"),
            ({"focal_mm": 1.0}, "bad_focal_length"),
        ):
            with pytest.raises(RemoteError) as error:
                client.call("fit", **fit, **wrong)
            assert (error.value.code, error.value.kind) == (1, kind)


def test_several_photos_have_a_picture_each(backend, mask):
    register, fit, *_ = mask
    with backend.connect() as client:
        client.call("rig.register", **register)
        result, arrays = client.wait(client.send("fit", **{**fit, "photos": fit["photos"] * 3}))
        assert len(result["fit"]["photos"]) == 3
        assert list(arrays) == ["photo_0", "landmarks_0", "photo_1", "landmarks_1", "photo_2", "landmarks_2"]


def test_mistakes_are_answered_with_their_kind(backend, mask, tmp_path):
    register, fit, _, spec = mask
    (tmp_path / "text.png").write_text("no picture")
    mask_rig(1.1).with_landmarks(None).save(tmp_path / "bare.npz")
    Image.fromarray(np.full((300, 300, 3), 127, np.uint8)).save(tmp_path / "grey.png")
    with backend.connect() as client:
        client.call("rig.register", **register)
        rig = {"rig_hash": spec.rig_hash}
        for method, params, kind in (
            ("fit", {**fit, "rig_hash": "0" * 64}, "unknown_rig"),
            ("fit", {**rig, "photos": [{"path": str(tmp_path / "none.png")}]}, "photo_missing"),
            ("fit", {**rig, "photos": [{"path": str(tmp_path / "text.png")}]}, None),
            ("fit", {**rig, "photos": [{"path": str(tmp_path / "grey.png")}]}, "no_face"),
            ("rig.register", {"spec": str(tmp_path / "none.npz")}, "file_missing"),
            ("rig.register", {"spec": str(tmp_path / "text.png")}, "bad_spec"),
            ("rig.register", {"spec": str(tmp_path / "bare.npz")}, "needs_blend"),
            ("verify", {"fit_id": "0", "blend": "/none.blend", "values": {}}, "unknown_fit"),
        ):
            with pytest.raises(RemoteError) as error:
                client.call(method, **params)
            assert error.value.code == 1, (method, params, error.value)
            assert kind is None or error.value.kind == kind
            assert error.value.message.endswith(".")
            assert "Traceback" not in error.value.message
        # Nothing of it harmed anything.
        client.call("fit", **fit)
        fit_id = client.call("fit", **fit)["fit_id"]
        with pytest.raises(RemoteError) as error:
            client.call("verify", fit_id=fit_id, blend="/none.blend", values={}, photo=1)
        assert error.value.kind == "bad_params"
        with pytest.raises(RemoteError) as error:
            client.call("verify", fit_id=fit_id, blend="/none.blend", values={}, blender=str(tmp_path / "none"))
        assert error.value.kind == "no_blender"


def test_requests_that_are_none_leave_the_connection_open(backend):
    with backend.connect() as client:
        for message, number, code in (
            ({"jsonrpc": "2.0", "id": 900, "method": "pickle.loads", "params": {}}, 900, -32601),
            ({"jsonrpc": "2.0", "id": 901, "method": "ping", "params": {"x": 1}}, 901, -32602),
            ({"jsonrpc": "1.0", "id": 902, "method": "ping"}, 902, -32600),
            ({"jsonrpc": "2.0", "method": "shutdown"}, None, -32600),
            ({"jsonrpc": "2.0", "id": "903", "method": "ping"}, None, -32600),
            ({}, None, -32600),
        ):
            client.raw(frame(message))
            with pytest.raises(RemoteError) as error:
                client.wait(number)
            assert error.value.code == code
        blobs = [{"name": "a", "dtype": "float32", "shape": [1 << 20]}]
        client.raw(frame({"jsonrpc": "2.0", "id": 904, "method": "ping", "blobs": blobs}, bytes(4 << 20)))
        with pytest.raises(RemoteError) as error:
            client.wait(904)
        assert error.value.code == -32602
        assert client.call("ping")["queued"] == 0


def test_an_id_that_is_in_use_and_too_many_requests(backend, mask):
    register, fit, *_ = mask
    with backend.connect() as client:
        client.call("rig.register", **register)
        many = [client.send("fit", **fit) for _ in range(60)]
        client.raw(frame({"jsonrpc": "2.0", "id": many[20], "method": "fit", "params": fit}))
        with pytest.raises(RemoteError) as error:
            client.wait(many[59])
        assert error.value.kind == "bad_request"
        told = client.call("ping")
        assert told["busy"]
        assert told["queued"] > 0
    # What the client of before wanted is forgotten.
    with backend.connect() as client:
        deadline = time.monotonic() + 5
        while client.call("ping")["busy"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_job_is_cancelled_and_the_next_one_runs(backend, mask, tmp_path):
    """Noise of 12 megapixels keeps the detector busy for seconds; pings are answered meanwhile."""
    register, fit, _, spec = mask
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 255, (100, 134, 3), dtype=np.uint8))
    small.resize((4000, 3000)).save(tmp_path / "noise.png", compress_level=0)
    with backend.connect() as client:
        client.call("rig.register", **register)
        slow = client.send("fit", rig_hash=spec.rig_hash, photos=[{"path": str(tmp_path / "noise.png")}])
        waiting = client.send("fit", **fit)
        client.wait_for_progress("looking at noise.png")
        time.sleep(0.5)
        longest = 0.0
        for _ in range(20):
            began = time.monotonic()
            assert client.call("ping")["busy"]
            longest = max(longest, time.monotonic() - began)
        assert longest < 0.5
        began = time.monotonic()
        assert client.call("cancel", id=slow) == {"found": True}
        assert client.call("cancel", id=12345) == {"found": False}
        with pytest.raises(RemoteError) as error:
            client.wait(slow)
        assert (error.value.code, error.value.kind) == (2, "cancelled")
        assert time.monotonic() - began < 2
        client.wait(waiting)
        assert client.call("cancel", id=slow) == {"found": False}
        assert not client.call("ping")["busy"]


def test_a_client_that_does_not_read_does_not_stop_the_others(backend, mask):
    register, fit, *_ = mask
    with backend.connect() as client:
        client.call("rig.register", **register)
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(30):
            client.send("fit", **fit)
        with contextlib.suppress(TimeoutError):
            client.socket.settimeout(1)
            for _ in range(20_000):
                client.send("ping")
    with backend.connect() as client:
        client.call("ping")


# --- fuzz -------------------------------------------------------------------------------------------------------------


def mutated(good: list[bytes], rng: random.Random) -> bytes:
    """One of the good frames, spoiled: bytes changed, cut, doubled, lengths wrong, JSON of other shapes."""
    data = bytearray(rng.choice(good))
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(7)
        at = rng.randrange(len(data)) if data else 0
        if kind == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del data[at : at + rng.randint(1, 40)]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randint(1, 40))
        elif kind == 3:
            data[4:12] = struct.pack(
                "<II", *(rng.choice((0, 1, 2**31, 2**32 - 1, rng.randrange(500))) for _ in range(2))
            )
        elif kind == 4:
            data[at:at] = data[at : at + rng.randint(1, 200)]
        elif kind == 5:
            odd = rng.choice(
                [b"null", b"[]", b"{}", b"1e999", b"-1", b'"\\ud800"', b"NaN", b"[" * 300, b"true", b"1" * 400]
            )
            text = bytes(data[12:])
            numbers = list(re.finditer(rb'\d+|"[^"]*"', text))
            if numbers:
                chosen = rng.choice(numbers)
                text = text[: chosen.start()] + odd + text[chosen.end() :]
            data[:] = b"RGF1" + struct.pack("<II", len(text), 0) + text
        else:
            data = bytearray(rng.randbytes(rng.randint(1, 200)))
    return bytes(data)


@pytest.mark.parametrize("after_hello", [False, True])
def test_mutated_frames_never_stop_the_backend(backend, mask, tmp_path, after_hello):
    """5,000 before the hello and 5,000 after it; a good client is answered afterwards, and no defect is in the log."""
    register, fit, *_ = mask
    rng = random.Random(20 + after_hello)
    log_before = backend.log.read_text().count("failed")
    good = [
        frame({"jsonrpc": "2.0", "id": 7, "method": method, "params": params})
        for method, params in (
            ("hello", {"protocol": 1, "client": "x", "nonce": "00" * 32}),
            ("authenticate", {"proof": "00" * 32}),
            ("ping", {}),
            ("cancel", {"id": 3}),
            (
                "rig.register",
                {"spec": str(tmp_path / "none.npz"), "blend": "/none", "objects": ["a"], "metres_per_unit": 1},
            ),
            ("fit", {**fit, "rig_hash": "0" * 64, "locks": {"a": 1}, "initial": {}, "focal_mm": 50, "solve": "both"}),
            ("verify", {"fit_id": "x", "blend": "/none", "values": {"a": 0.5}, "photo": 0, "gpu": False}),
        )
    ]
    good.append(frame({"jsonrpc": "2.0", "id": 8, "method": "ping", "blobs": [{"name": "a", "dtype": "uint8", "shape": [4]}]}, b"1234"))  # fmt: skip
    began = time.monotonic()
    sent = 0
    while sent < 5000:
        with contextlib.suppress(OSError), backend.stranger(timeout_s=5) as client:
            if after_hello:
                client.hello(backend.token)
            # As many as the connection survives, then another one.
            burst = b"".join(mutated(good, rng) for _ in range(10 if after_hello else 4))
            sent += 10 if after_hello else 4
            client.raw(burst)
            client.socket.shutdown(socket.SHUT_WR)
            with contextlib.suppress(EOFError):
                while client.socket.recv(1 << 16):
                    pass
    assert time.monotonic() - began < 60
    with backend.connect() as client:
        client.call("rig.register", **register)
        client.call("fit", **fit)
    log = backend.log.read_text()
    assert "Traceback" not in log
    assert log.count("failed") == log_before


# --- the end ----------------------------------------------------------------------------------------------------------


def slow_blender(folder: Path) -> Path:
    """A program that says it is Blender, opens everything and renders for ever; it leaves its process id."""
    child = folder / "child.py"
    child.write_text(
        "import json, os, sys, time\n"
        f"open({str(folder / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        'print(json.dumps({"method": "hello", "params": {"protocol": 1, "blender_version": "4.5.0"}}), flush=True)\n'
        "for line in sys.stdin:\n"
        "    request = json.loads(line)\n"
        "    time.sleep(60 if request['method'] == 'studio.render' else 0)\n"
        '    print(json.dumps({"id": request["id"], "result": {}}), flush=True)\n'
    )
    program = folder / "blender"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && {{ echo "Blender 4.5.0"; exit; }}\nexec {sys.executable} {child}\n'
    )
    program.chmod(0o755)
    return program


def start_long_job(client, folder: Path) -> tuple[int, int]:
    """A registration that waits for a render. Returns its id and the process id of its Blender."""
    # Not the rig whose landmarks were kept when it was registered.
    mask_rig(1.3).with_landmarks(None).save(folder / "bare.npz")
    (folder / "rig.blend").write_bytes(b"")
    number = client.send(
        "rig.register",
        spec=str(folder / "bare.npz"),
        blend=str(folder / "rig.blend"),
        blender=str(slow_blender(folder)),
    )
    client.wait_for_progress("finding the face")
    return number, int((folder / "pid").read_text())


@posix_only
def test_cancel_during_a_render_ends_it_and_its_blender(backend, tmp_path):
    with backend.connect() as client:
        number, child = start_long_job(client, tmp_path)
        began = time.monotonic()
        assert client.call("cancel", id=number) == {"found": True}
        with pytest.raises(RemoteError) as error:
            client.wait(number)
        assert error.value.kind == "cancelled"
        assert time.monotonic() - began < 2
        assert is_gone(child, 1)
        assert not client.call("ping")["busy"]


@posix_only
def test_the_end_of_a_connection_cancels_its_jobs(backend, tmp_path):
    client = backend.connect()
    _, child = start_long_job(client, tmp_path)
    client.close()
    assert is_gone(child, 2)
    with backend.connect() as client:
        assert not client.call("ping")["busy"]


def test_shutdown(tmp_path):
    with running(tmp_path) as backend:
        client = backend.connect()
        assert client.call("shutdown") == {}
        assert client.closed_by_backend()
        assert backend.ended(3) == 0
        assert backend.output() == ""
        assert not backend.address_file.exists()
        assert list(backend.temporary.iterdir()) == []
        assert "ends: shutdown" in backend.log.read_text()


@posix_only
@pytest.mark.parametrize("how", ["standard input", "SIGTERM", "SIGINT", "shutdown"])
def test_every_end_in_the_middle_of_a_job_leaves_nothing(tmp_path, how):
    with running(tmp_path) as backend, backend.connect() as client:
        _, child = start_long_job(client, tmp_path)
        began = time.monotonic()
        if how == "standard input":
            backend.process.stdin.close()
        elif how == "shutdown":
            client.send("shutdown")
        else:
            backend.process.send_signal(signal.Signals[how])
        assert backend.ended(5) == 0
        took = time.monotonic() - began
        assert is_gone(child, 0.5)
        assert took < 1.5, took
        assert not backend.address_file.exists()
        assert list(backend.temporary.iterdir()) == []


@posix_only
@pytest.mark.parametrize("how", ["standard input", "cancel"])
def test_a_blender_that_does_not_say_its_version_is_ended_too(tmp_path, how):
    mask_rig(1.3).with_landmarks(None).save(tmp_path / "bare.npz")
    program = tmp_path / "blender"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nsleep 60 & echo $! > {tmp_path}/sleeper; wait\n")
    program.chmod(0o755)
    with running(tmp_path) as backend, backend.connect() as client:
        ask = {"spec": str(tmp_path / "bare.npz"), "blend": str(tmp_path / "a.blend"), "blender": str(program)}
        number = client.send("rig.register", **ask)
        client.wait_for_progress("starting Blender")
        deadline = time.monotonic() + 10
        while not (tmp_path / "sleeper").exists() or not (tmp_path / "sleeper").read_text().strip():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if how == "cancel":
            client.call("cancel", id=number)
            with pytest.raises(RemoteError) as error:
                client.wait(number)
            assert error.value.kind == "cancelled"
        else:
            backend.process.stdin.close()
            assert backend.ended(3) == 0
        for name in ("pid", "sleeper"):
            assert is_gone(int((tmp_path / name).read_text()), 1)


def test_the_end_of_standard_input_during_a_long_computation(tmp_path, mask):
    """The detector is in C code then, and nobody asks it to stop but the process itself."""
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 255, (100, 134, 3), dtype=np.uint8))
    small.resize((4000, 3000)).save(tmp_path / "noise.png", compress_level=0)
    with running(tmp_path) as backend, backend.connect() as client:
        client.call("rig.register", **mask[0])
        client.send("fit", rig_hash=mask[3].rig_hash, photos=[{"path": str(tmp_path / "noise.png")}])
        client.wait_for_progress("looking at noise.png")
        began = time.monotonic()
        backend.process.stdin.close()
        assert backend.ended(5) == 0
        assert time.monotonic() - began < 1.5


def test_a_process_whose_threads_are_all_stuck_ends_too(tmp_path):
    """The last resort: neither the loop nor the job thread hears that standard input has ended."""
    code = (
        "import os, sys, tempfile, threading, time\n"
        "from pathlib import Path\n"
        "from rigfit.server.process import _Process\n"
        f"process = _Process(Path({str(tmp_path / 'a.json')!r}))\n"
        f"Path({str(tmp_path / 'a.json')!r}).write_text('{{\"pid\": %d, 1}}' % os.getpid())\n"
        "tempfile.mkstemp()\n"
        "class Deaf:\n"
        "    def stop(self, reason): pass\n"
        "    def interrupt(self): pass\n"
        "process.server = Deaf()\n"
        "threading.Thread(target=process.watch, args=(0,)).start()\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(BACKEND), "TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=environment)
    try:
        deadline = time.monotonic() + 10
        while not list((tmp_path / "temporary").glob("*/*")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        began = time.monotonic()
        process.stdin.close()
        assert process.wait(3) == 0
        assert time.monotonic() - began < 1.2
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "a.json").exists()
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("moment", ["before the token", "at once", "warming up"])
def test_the_end_of_standard_input_at_the_start(tmp_path, moment):
    command = [sys.executable, "-m", "rigfit", "serve", "--address-file", str(tmp_path / "a.json"), "--log", str(tmp_path / "log")]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(BACKEND), "XDG_CACHE_HOME": str(tmp_path)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)  # fmt: skip
    try:
        if moment != "before the token":
            process.stdin.write(secrets.token_hex(32).encode() + b"\n")
            process.stdin.flush()
        if moment == "warming up":
            while not (tmp_path / "a.json").exists():
                time.sleep(0.01)
            time.sleep(0.3)
        out, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert out == b""
    if moment == "before the token":
        assert process.returncode == 2
        assert b"--attach" in err
        assert b"Traceback" not in err
    else:
        assert process.returncode == 0
        assert err == b""
    assert not (tmp_path / "a.json").exists()


@linux_only
def test_kill_9_of_the_parent_ends_the_backend_and_its_blender(tmp_path):
    script = (
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\n"
        "from backend_client import Backend\n"
        f"backend = Backend(Path({str(tmp_path)!r}))\n"
        "print(backend.pid, backend.token.hex(), flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        pid, token = parent.stdout.readline().split()
        backend = Backend.__new__(Backend)
        backend.address_file, backend.token, backend.process = tmp_path / "address.json", bytes.fromhex(token), parent
        with backend.connect() as client:
            _, child = start_long_job(client, tmp_path)
            parent.kill()
            parent.wait()
            assert is_gone(int(pid), 2)
            assert is_gone(child, 1)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_idle_time_counts_from_the_last_client_and_strangers_do_not_count(tmp_path):
    with running(tmp_path, "--idle-s", "1.2") as backend:
        with backend.connect() as client:
            time.sleep(1.5)
            client.call("ping")
        began = time.monotonic()
        strangers = [backend.stranger() for _ in range(2)]
        assert backend.ended(5) == 0
        assert 0.9 < time.monotonic() - began < 3
        for stranger in strangers:
            stranger.close()


def test_attach_writes_the_token_and_does_not_watch_standard_input(tmp_path):
    with running(tmp_path, attach=True) as backend:
        address = backend.address()
        assert re.fullmatch("[0-9a-f]{64}", address["token"])
        if os.name == "posix":
            assert stat.S_IMODE(backend.address_file.stat().st_mode) == 0o600
        backend.process.stdin.close()
        backend.token = bytes.fromhex(address["token"])
        time.sleep(1.2)
        with backend.connect() as client:
            client.call("shutdown")
        assert backend.ended(3) == 0
        assert not backend.address_file.exists()
        assert backend.token.hex() not in backend.log.read_text()


@pytest.mark.parametrize(
    "said", [b"\n", b"hello\n", b"0" * 63 + b"\n", b"0" * 65 + b"\n", b"0" * 100_000, b"g" * 64 + b"\n"]
)
def test_a_token_that_is_none(tmp_path, said):
    command = [sys.executable, "-m", "rigfit", "serve", "--address-file", str(tmp_path / "a.json"), "--log", str(tmp_path / "log")]  # fmt: skip
    done = subprocess.run(command, input=said, capture_output=True, env={**os.environ, "PYTHONPATH": str(BACKEND)}, timeout=20)  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == b""
    assert b"token" in done.stderr
    assert b"Traceback" not in done.stderr
    assert not (tmp_path / "a.json").exists()


def test_an_address_file_that_cannot_be_written_is_said(tmp_path):
    command = [sys.executable, "-m", "rigfit", "serve", "--address-file", str(tmp_path / "none" / "a.json"), "--log", str(tmp_path / "log")]  # fmt: skip
    done = subprocess.run(command, input=b"0" * 64 + b"\n", capture_output=True, env={**os.environ, "PYTHONPATH": str(BACKEND)}, timeout=20)  # fmt: skip
    assert done.returncode == 2
    assert b"a.json cannot be written" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_log_that_cannot_be_written_is_said_and_it_works_without(tmp_path):
    (tmp_path / "taken").write_text("a file")
    backend = Backend(tmp_path)
    backend.kill()
    with running(tmp_path, "--log", str(tmp_path / "taken" / "log")) as backend:
        with backend.connect() as client:
            client.call("shutdown")
        assert backend.ended(3) == 0
        assert "no log" in backend.output()


@posix_only
def test_a_full_pipe_on_standard_error_blocks_nothing(tmp_path, mask):
    """The parent reads nothing; whatever C libraries print goes elsewhere."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 65536)
    os.set_blocking(writing, True)
    token = secrets.token_bytes(32)
    command = [sys.executable, "-m", "rigfit", "serve", "--address-file", str(tmp_path / "address.json"), "--log", str(tmp_path / "log")]  # fmt: skip
    # Something that prints whenever a photo is opened.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, PIL.Image\n"
        "opened = PIL.Image.open\n"
        "def chatter(*arguments, **options):\n"
        "    os.write(1, b'chatter'), os.write(2, b'chatter')\n"
        "    return opened(*arguments, **options)\n"
        "PIL.Image.open = chatter\n"
    )
    path = os.pathsep.join([str(tmp_path), str(BACKEND)])
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=writing, stderr=writing, env=environment)
    os.close(writing)
    backend = Backend.__new__(Backend)
    backend.address_file, backend.token, backend.process = tmp_path / "address.json", token, process
    try:
        process.stdin.write(token.hex().encode() + b"\n")
        process.stdin.flush()
        with backend.connect(timeout_s=20) as client:
            client.call("rig.register", **mask[0])
            client.call("fit", **mask[1])
            client.call("doctor", blender=str(tmp_path / "none"))
            client.call("shutdown")
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        os.close(reading)


def test_two_backends_side_by_side(tmp_path, mask):
    """Two Blenders: one cache, one log, both work."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with contextlib.ExitStack() as stack:
        backends = [stack.enter_context(running(folder, cache=tmp_path / "cache")) for folder in folders]
        clients = [stack.enter_context(backend.connect()) for backend in backends]

        def work(client) -> None:
            for _ in range(2):
                client.call("rig.register", **mask[0])
                client.call("fit", **mask[1])

        threads = [threading.Thread(target=work, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert all(not client.call("ping")["busy"] for client in clients)
    assert len(list((tmp_path / "cache" / "rigfit" / "rigs").glob("*.npz"))) == 1


def test_a_broken_environment_is_said_in_words(tmp_path):
    """A package that is missing: the hello works, every job says what to do."""
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "scipy.py").write_text("raise ImportError('scipy is half installed')")
    backend = Backend.__new__(Backend)
    backend.address_file, backend.token = tmp_path / "address.json", secrets.token_bytes(32)
    command = [sys.executable, "-m", "rigfit", "serve", "--address-file", str(backend.address_file), "--log", str(tmp_path / "log")]  # fmt: skip
    path = os.pathsep.join([str(tmp_path / "shadow"), str(BACKEND)])
    backend.process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
    try:
        backend.process.stdin.write(backend.token.hex().encode() + b"\n")
        backend.process.stdin.flush()
        with backend.connect() as client:
            with pytest.raises(RemoteError) as error:
                client.call("rig.default")
            assert (error.value.code, error.value.kind) == (1, "broken_installation")
            assert "scipy is half installed" in error.value.message
            client.call("shutdown")
        assert backend.process.wait(5) == 0
    finally:
        backend.process.kill()
        backend.process.wait()
        backend.process.stdin.close()
