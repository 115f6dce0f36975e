# SPDX-License-Identifier: Apache-2.0
"""Frames and proofs of the link, against docs/protocol.md and against bytes made by hand."""

from __future__ import annotations

import hashlib
import json
import random
import re
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from blender_addon.link import wire
from blender_addon.link.wire import Decoder, WireError, encode

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


def raw(message: object, blob: bytes = b"", *, json_length: int | None = None, magic: bytes = b"RGF1") -> bytes:
    """A frame by hand."""
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    return magic + struct.pack("<II", len(text) if json_length is None else json_length, len(blob)) + text + blob


def trusting() -> Decoder:
    decoder = Decoder()
    decoder.trust()
    return decoder


def joined(pieces: list[memoryview]) -> bytes:
    return b"".join(bytes(piece) for piece in pieces)


BLOBS = [
    {"name": "odd", "dtype": "uint8", "shape": [3]},
    {"name": "none", "dtype": "float32", "shape": [0, 5]},
    {"name": "picture", "dtype": "float32", "shape": [2, 1, 2]},
    {"name": "number", "dtype": "float32", "shape": []},
]
BODY = bytes([1, 2, 255]) + struct.pack("<4f", 0.5, -1.25, 3.0, 1e-30) + struct.pack("<f", 7.5)
FRAME = raw({"jsonrpc": "2.0", "id": 7, "result": {"größe": "ja"}, "blobs": BLOBS}, BODY)


def check_frame(frame: wire.Frame) -> None:
    assert frame.message == {"jsonrpc": "2.0", "id": 7, "result": {"größe": "ja"}}
    assert list(frame.blobs) == ["odd", "none", "picture", "number"]
    assert frame.blobs["odd"].dtype == np.uint8
    assert frame.blobs["odd"].tolist() == [1, 2, 255]
    assert frame.blobs["none"].shape == (0, 5)
    assert frame.blobs["picture"].dtype == np.float32
    assert frame.blobs["picture"].tolist() == [[[0.5, -1.25]], [[3.0, np.float32(1e-30)]]]
    assert frame.blobs["number"] == np.float32(7.5)
    assert all(array.flags.aligned and array.flags.writeable for array in frame.blobs.values())


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_page():
    assert f'magic "{wire.MAGIC.decode()}"' in PAGE
    assert wire.HEADER.format == "<4sII"
    json_limits = re.search(r"JSON in bytes.*≤ (\d+) MiB\s+\((\d+) KiB before the hello", PAGE)
    blob_limits = re.search(r"blob in bytes.*≤ (\d+) MiB \((\d+) before the hello", PAGE)
    assert (int(json_limits[1]) << 20, int(json_limits[2]) << 10) == (wire.JSON_LIMIT, wire.JSON_LIMIT_BEFORE_HELLO)
    assert (int(blob_limits[1]) << 20, int(blob_limits[2])) == (wire.BLOB_LIMIT, 0)
    assert int(re.search(r'"protocol": (\d+)', PAGE)[1]) == wire.PROTOCOL
    assert int(re.search(r"token \((\d+) hexadecimal", PAGE)[1]) == 2 * wire.TOKEN_BYTES
    assert int(re.search(r"Nonces are (\d+) random bytes", PAGE)[1]) == wire.NONCE_BYTES


def test_the_proofs_are_those_of_the_page():
    """HMAC-SHA256 by its definition (RFC 2104, section 2), with the words that the page gives."""
    token, mine, theirs = bytes(range(32)), bytes(range(100, 132)), bytes(range(200, 232))
    words = re.findall(r'HMAC-SHA256\(token bytes, `"(rigfit \w+)" ‖ client nonce ‖ server nonce`', PAGE)
    words += re.findall(r'HMAC-SHA256\(token bytes, `"(rigfit \w+)"', PAGE)
    assert {"rigfit server", "rigfit client"} <= set(words)

    def by_definition(text: bytes) -> str:
        key = token.ljust(64, b"\0")
        inner = hashlib.sha256(bytes(b ^ 0x36 for b in key) + text).digest()
        return hashlib.sha256(bytes(b ^ 0x5C for b in key) + inner).hexdigest()

    assert wire.server_proof(token, mine, theirs) == by_definition(b"rigfit server" + mine + theirs)
    assert wire.client_proof(token, mine, theirs) == by_definition(b"rigfit client" + mine + theirs)


@pytest.mark.parametrize("shown", [None, 5, "", "é" * 64, "0" * 64, b"0" * 64, ["0" * 64]])
def test_anything_else_is_no_proof(shown):
    right = wire.server_proof(b"t" * 32, b"a" * 32, b"b" * 32)
    assert wire.same_proof(right, right)
    assert not wire.same_proof(right, shown)


@pytest.mark.parametrize("text", [None, 5, "", "0" * 63, "0" * 66, "zz" * 32, "0 " * 32, "00" * 31 + "  ", "٠" * 64])
def test_hexadecimal_is_exact(text):
    assert wire.hex_bytes("aB" * 32, 32) == b"\xab" * 32
    assert wire.hex_bytes(text, 32) is None


# --- whole frames -----------------------------------------------------------------------------------------------------


def test_a_frame_cut_anywhere():
    for cut in range(len(FRAME) + 1):
        decoder = trusting()
        frames = decoder.feed(FRAME[:cut]) + decoder.feed(FRAME[cut:])
        assert len(frames) == 1, cut
        check_frame(frames[0])
        assert decoder.between_frames


def test_byte_by_byte_and_many_at_once():
    decoder = trusting()
    frames = [frame for byte in FRAME * 3 for frame in decoder.feed(bytes([byte]))]
    assert len(frames) == 3
    frames += trusting().feed(FRAME * 4)
    assert len(frames) == 7
    for frame in frames:
        check_frame(frame)


def test_written_as_the_page_says():
    arrays = {
        "a": np.arange(6, dtype=np.uint8).reshape(2, 3)[:, ::-1],
        "b": np.array([[1.5], [-2]], dtype=">f4"),
        "c": np.float32(3),
        "d": np.zeros((0, 4), np.uint8),
    }
    data = joined(encode({"id": 1, "params": {"x": "ü\udcff"}}, arrays))
    magic, json_length, blob_length = struct.unpack("<4sII", data[:12])
    message = json.loads(data[12 : 12 + json_length].decode("utf-8"))
    assert magic == b"RGF1"
    assert message == {
        "id": 1,
        "params": {"x": "ü\udcff"},
        "blobs": [
            {"name": "a", "dtype": "uint8", "shape": [2, 3]},
            {"name": "b", "dtype": "float32", "shape": [2, 1]},
            {"name": "c", "dtype": "float32", "shape": []},
            {"name": "d", "dtype": "uint8", "shape": [0, 4]},
        ],
    }
    assert data[12 + json_length :] == bytes([2, 1, 0, 5, 4, 3]) + struct.pack("<3f", 1.5, -2, 3)
    assert len(data) == 12 + json_length + blob_length
    assert "blobs" not in json.loads(joined(encode({"id": 1}))[12:])
    (again,) = trusting().feed(data)
    assert all(np.array_equal(again.blobs[name], arrays[name]) for name in arrays)


def test_large_arrays_are_not_copied_on_their_way_out():
    array = np.zeros(1 << 20, np.float32)
    pieces = encode({"id": 1}, {"a": array})
    assert np.shares_memory(np.frombuffer(pieces[-1], np.uint8), array)


def test_large_arrays_are_received_where_they_stay():
    size = 48 << 20
    head = raw({"id": 1, "blobs": [{"name": "a", "dtype": "uint8", "shape": [size]}]})
    head = head[:8] + struct.pack("<I", size) + head[12:]
    decoder = trusting()
    tracemalloc.start()
    try:
        assert decoder.feed(head) == []
        piece = bytes(range(256)) * 256
        frames = [frame for _ in range(size // len(piece)) for frame in decoder.feed(piece)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert frames[0].blobs["a"][-1] == 255
    assert peak < size + (2 << 20)


# --- limits -----------------------------------------------------------------------------------------------------------


def of_length(length: int) -> bytes:
    return b'{"x": "' + b"y" * (length - 9) + b'"}'


def test_small_frames_only_before_the_hello():
    assert len(Decoder().feed(raw(of_length(4096)))) == 1
    with pytest.raises(WireError, match="4097 bytes"):
        Decoder().feed(raw(of_length(4097))[:12])
    with pytest.raises(WireError, match="blob"):
        Decoder().feed(raw({"blobs": [{"name": "a", "dtype": "uint8", "shape": [1]}]}, b"1")[:12])


def test_the_header_alone_tells_what_is_too_long():
    assert len(trusting().feed(raw(of_length(8 << 20)))) == 1
    with pytest.raises(WireError, match="JSON"):
        trusting().feed(struct.pack("<4sII", b"RGF1", (8 << 20) + 1, 0))
    with pytest.raises(WireError, match="blob"):
        trusting().feed(struct.pack("<4sII", b"RGF1", 10, (256 << 20) + 1))
    trusting().feed(struct.pack("<4sII", b"RGF1", 10, 256 << 20))


def test_nothing_too_long_is_written():
    with pytest.raises(WireError, match="JSON"):
        encode({"x": "y" * (8 << 20)})
    with pytest.raises(WireError, match="arrays"):
        # Broadcast: 300 MiB to write, nothing to hold.
        encode({}, {"a": np.broadcast_to(np.uint8(1), (300 << 20,))[: (256 << 20) + 1]})


@pytest.mark.parametrize(
    ("message", "blobs", "reason"),
    [
        ({"x": float("nan")}, None, "no JSON form"),
        ({"x": float("inf")}, None, "no JSON form"),
        ({"x": object()}, None, "no JSON form"),
        ({}, {"a": np.zeros(3)}, "float64"),
        ({}, {"a": np.array(["a"])}, "not uint8"),
    ],
)
def test_what_cannot_be_written(message, blobs, reason):
    with pytest.raises(WireError, match=reason):
        encode(message, blobs)


# --- nonsense ---------------------------------------------------------------------------------------------------------


def with_blobs(*blobs: object, body: bytes = b"") -> bytes:
    return raw({"id": 1, "blobs": list(blobs)}, body)


def listed(name: object = "a", dtype: object = "uint8", shape: object = (1,)) -> dict:
    return {"name": name, "dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape}


NONSENSE = {
    "other magic": (raw({}, magic=b"RGF2"), "does not begin"),
    "text": (b"HTTP/1.1 400 Bad Request\r\n", "does not begin"),
    "one wrong byte": (b"X", "does not begin"),
    "no JSON": (struct.pack("<4sII", b"RGF1", 0, 0), "0 bytes"),
    "half JSON": (raw(b'{"id": 1'), "is none"),
    "not UTF-8": (raw(b'{"x": "\xff"}'), "is none"),
    "two objects": (raw(b"{}{}"), "is none"),
    "NaN": (raw(b'{"x": NaN}'), "NaN"),
    "Infinity": (raw(b'{"x": -Infinity}'), "Infinity"),
    "infinite digits": (raw(b'{"x": 1e999}'), "too large"),
    "endless number": (raw(b'{"x": ' + b"9" * 5000 + b"}"), "is none"),
    "a list": (raw([1]), "no object"),
    "a number": (raw(5), "no object"),
    "null": (raw(None), "no object"),
    "deep": (raw(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested"),
    "blobs no list": (raw({"blobs": {"a": 1}}), "no list"),
    "blob no object": (with_blobs(5), "object"),
    "no name": (with_blobs(listed(name=None), body=b"1"), "no name"),
    "same name": (with_blobs(listed(), listed(), body=b"12"), "two arrays"),
    "other dtype": (with_blobs(listed(dtype="float64", shape=(0,))), "dtype"),
    "dtype no text": (with_blobs(listed(dtype=["uint8"]), body=b"1"), "dtype"),
    "objects": (with_blobs(listed(dtype="O"), body=b"12345678"), "dtype"),
    "shape no list": (with_blobs(listed(shape=1), body=b"1"), "shape"),
    "shape of floats": (with_blobs(listed(shape=[1.0]), body=b"1"), "shape"),
    "shape of bools": (with_blobs(listed(shape=[True]), body=b"1"), "shape"),
    "negative": (with_blobs(listed(shape=[-1]), body=b"1"), "shape"),
    "twice negative": (with_blobs(listed(shape=[-1, -1]), body=b"1"), "shape"),
    "too many dimensions": (with_blobs(listed(shape=[1] * 100), body=b"1"), "cannot be made"),
    "empty and enormous": (with_blobs(listed(shape=[0, 2**40, 2**40])), "cannot be made"),
    "overflow": (with_blobs(listed(shape=[2**33, 2**31]), body=b""), "arrays take"),
    "blob too short": (with_blobs(listed(shape=(5,)), body=b"1234"), "arrays take 5 bytes"),
    "blob too long": (with_blobs(listed(shape=(3,)), body=b"1234"), "arrays take 3 bytes"),
    "blob without arrays": (raw({}, b"1234"), "arrays take 0 bytes"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_in_words(name):
    data, reason = NONSENSE[name]
    with pytest.raises(WireError, match=reason):
        trusting().feed(data)


def test_mutated_frames_never_do_anything_else():
    """10,000 frames with bytes changed, cut out or doubled: whole frames, WireError or more is awaited, nothing else."""
    chance = random.Random(5)
    counts = {"frames": 0, "refused": 0, "waiting": 0}
    for _ in range(10_000):
        data = bytearray(FRAME)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(data))
            match chance.randrange(3):
                case 0:
                    data[place] = chance.randrange(256)
                case 1:
                    del data[place : place + chance.randint(1, 9)]
                case 2:
                    data[place:place] = data[place : place + chance.randint(1, 9)]
        try:
            frames = trusting().feed(bytes(data))
        except WireError:
            counts["refused"] += 1
            continue
        counts["frames" if frames else "waiting"] += 1
        for frame in frames:
            assert isinstance(frame.message, dict)
    assert min(counts.values()) > 50, counts
