# SPDX-License-Identifier: Apache-2.0
"""Frames, requests and their parameters: what is right gets through unchanged, what is wrong is said in words."""

from __future__ import annotations

import asyncio
import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rigfit.server import messages, wire
from rigfit.server.connection import Failed, read_request
from rigfit.server.messages import METHODS, BadParamsError, read_params, signature

PROTOCOL_PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"


def read(data: bytes, limits: wire.Limits = wire.AFTER_HELLO) -> wire.Frame:
    """The first frame of some bytes, after which the connection ends."""

    async def run() -> wire.Frame:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await wire.read_frame(reader, limits)

    return asyncio.run(run())


def packed(text: bytes, blob: bytes = b"", *, magic: bytes = b"RGF1", lengths: tuple[int, int] | None = None) -> bytes:
    return magic + struct.pack("<II", *(lengths or (len(text), len(blob)))) + text + blob


def described(blobs: object, blob: bytes) -> bytes:
    return packed(json.dumps({"id": 1, "blobs": blobs}).encode(), blob)


# --- frames -----------------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
# Lone surrogates too: file names that are no UTF-8.
texts = st.text(st.characters(), max_size=20)
documents = st.dictionaries(
    texts.filter(lambda name: name != "blobs"),
    st.recursive(
        scalars | texts, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4)
    ),
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(documents)
def test_what_is_encoded_is_read_back(document):
    assert read(b"".join(wire.encode(document))) == wire.Frame(document, ())


def test_arrays_are_described_and_sent_in_c_order_without_padding():
    first = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)[:, ::2]
    second = np.array([[1.5], [-2.0]], ">f4")
    data = b"".join(wire.encode({"id": 3}, {"a": first, "b": second, "none": np.zeros((0, 3), np.uint8)}))
    magic, json_bytes, blob_bytes = struct.unpack("<4sII", data[:12])
    assert magic == b"RGF1"
    assert json.loads(data[12 : 12 + json_bytes])["blobs"] == [
        {"name": "a", "dtype": "uint8", "shape": [2, 2, 3]},
        {"name": "b", "dtype": "float32", "shape": [2, 1]},
        {"name": "none", "dtype": "uint8", "shape": [0, 3]},
    ]
    assert data[12 + json_bytes :] == first.tobytes() + struct.pack("<2f", 1.5, -2.0)
    assert blob_bytes == 12 + 8
    assert read(data) == wire.Frame({"id": 3}, ("a", "b", "none"))


@pytest.mark.parametrize(
    ("message", "blobs"),
    [
        ({"x": float("nan")}, None),
        ({"x": float("inf")}, None),
        ({"x": "a" * (9 << 20)}, None),
        ({}, {"a": np.zeros(3)}),
    ],
)
def test_what_is_no_frame_is_not_sent(message, blobs):
    with pytest.raises(ValueError, match=r".+"):
        wire.encode(message, blobs)


@pytest.mark.parametrize(
    "data",
    [
        packed(b"{}", magic=b"RGF2"),
        packed(b""),
        packed(b"{}", lengths=((8 << 20) + 1, 0)),
        packed(b"{}", lengths=(2, (256 << 20) + 1)),
        packed(b"{}", b"1234"),
        described([{"name": "a", "dtype": "uint8", "shape": [5]}], b"1234"),
        described(
            [{"name": "a", "dtype": "uint8", "shape": [2]}, {"name": "a", "dtype": "uint8", "shape": [2]}], b"1234"
        ),
        described([{"name": "a", "dtype": "float64", "shape": [1]}], b"12345678"),
        described([{"name": "a", "dtype": ["uint8"], "shape": [4]}], b"1234"),
        described([{"name": "a", "dtype": "uint8", "shape": [-4]}], b"1234"),
        described([{"name": "a", "dtype": "uint8", "shape": [4.0]}], b"1234"),
        described([{"name": "a", "dtype": "uint8", "shape": [True, 4]}], b"1234"),
        described([{"name": "a", "dtype": "uint8", "shape": 4}], b"1234"),
        described([{"name": "a", "dtype": "uint8", "shape": [2**62] * 40}], b"1234"),
        described([{"name": 1, "dtype": "uint8", "shape": [4]}], b"1234"),
        described(["a"], b"1234"),
        described({"a": 1}, b"1234"),
    ],
)
def test_frames_that_break_the_rules(data):
    with pytest.raises(wire.WireError) as error:
        read(data)
    assert not isinstance(error.value, wire.BadJsonError)


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[]",
        b"7",
        b'"id"',
        b"\xff\xfe{}",
        b'{"x": NaN}',
        b'{"x": Infinity}',
        b'{"x": -Infinity}',
        b'{"x": 1e999}',
        b'{"x": ' + b"1" * 5000 + b"}",
        b'{"x": ' + b"[" * 200_000,
        b'{"x": ' * 100_000,
        b"{} {}",
    ],
)
def test_json_that_is_none(text):
    with pytest.raises(wire.BadJsonError):
        read(packed(text))


def test_a_connection_that_ends_in_the_middle_of_a_frame():
    data = described([{"name": "a", "dtype": "uint8", "shape": [4]}], b"1234")
    for length in range(len(data)):
        with pytest.raises(asyncio.IncompleteReadError):
            read(data[:length])


def test_before_the_hello_frames_are_short():
    assert read(packed(b"{}" + b" " * 4094), wire.BEFORE_HELLO).message == {}
    for data in (packed(b"{}" + b" " * 4095), described([{"name": "a", "dtype": "uint8", "shape": [1]}], b"1")):
        with pytest.raises(wire.WireError):
            read(data, wire.BEFORE_HELLO)


def test_proofs_are_told_apart_and_compared():
    token, mine, theirs = b"t" * 32, b"c" * 32, b"s" * 32
    proofs = {
        wire.server_proof(token, mine, theirs),
        wire.client_proof(token, mine, theirs),
        wire.server_proof(token, theirs, mine),
        wire.client_proof(b"u" * 32, mine, theirs),
    }
    assert len(proofs) == 4
    # Made with another program: printf 'rigfit serverccc…sss…' | openssl dgst -sha256 -mac hmac -macopt key:ttt…
    told = "9ff75322bff9776b0585ea21c655d1fd59ea6ce58d8582166a13ead29f91e363"
    assert wire.server_proof(token, mine, theirs) == told
    one = wire.client_proof(token, mine, theirs)
    assert wire.same_proof(one, one)
    for wrong in (one[:-1], one.upper(), one + "0", "", "ä" * 64):
        assert not wire.same_proof(one, wrong)


@pytest.mark.parametrize("text", ["", "00", "g" * 64, "00" * 33, "0 " * 32, " " + "0" * 63])
def test_hexadecimal_digits(text):
    assert wire.hex_bytes("0a" * 32, 32) == b"\n" * 32
    with pytest.raises(ValueError, match=r".+"):
        wire.hex_bytes(text, 32)


# --- requests ---------------------------------------------------------------------------------------------------------


def request(**message: object) -> wire.Frame:
    return wire.Frame({"jsonrpc": "2.0", "id": 1, "method": "ping", **message}, ())


def test_a_request():
    number, method, params = read_request(request(id=2**53, method="cancel", params={"id": 3}))
    assert (number, method.name, params) == (2**53, "cancel", messages.CancelParams(id=3))
    assert read_request(wire.Frame({"jsonrpc": "2.0", "id": 0, "method": "ping"}, ()))[2] == messages.Nothing()


@pytest.mark.parametrize(
    ("frame", "code", "number"),
    [
        (request(id=True), -32600, None),
        (request(id="1"), -32600, None),
        (request(id=None), -32600, None),
        (request(id=-1), -32600, None),
        (request(id=2**53 + 1), -32600, None),
        (request(id=1.0), -32600, None),
        (wire.Frame({"jsonrpc": "2.0", "method": "ping"}, ()), -32600, None),
        (request(jsonrpc="1.0"), -32600, 1),
        (request(jsonrpc=2.0), -32600, 1),
        (request(extra=1), -32600, 1),
        (request(result={}), -32600, 1),
        (request(method=["ping"]), -32600, 1),
        (request(method="eval"), -32601, 1),
        (request(method="__class__"), -32601, 1),
        (request(params=[]), -32602, 1),
        (request(params=None), -32602, 1),
        (request(params={"x": 1}), -32602, 1),
        (wire.Frame({"jsonrpc": "2.0", "id": 1, "method": "ping"}, ("a",)), -32602, 1),
    ],
)
def test_what_is_no_request(frame, code, number):
    with pytest.raises(Failed) as failed:
        read_request(frame)
    assert (failed.value.code, failed.value.number) == (code, number)


FIT = {"rig_hash": "abc", "photos": [{"path": "/photo.png"}]}
VERIFY = {"fit_id": "abc", "blend": "/rig.blend", "values": {}}


@pytest.mark.parametrize(
    ("method", "params", "named"),
    [
        ("fit", {"rig_hash": "abc"}, "photos"),
        ("fit", {**FIT, "photos": []}, "photos"),
        ("fit", {**FIT, "photos": [{"path": "/a"}] * 33}, "photos"),
        ("fit", {**FIT, "photos": ["/photo.png"]}, "photos.0"),
        ("fit", {**FIT, "photos": [{"path": "photo.png"}]}, "photos.0.path"),
        ("fit", {**FIT, "photos": [{"path": "/a\0b"}]}, "photos.0.path"),
        ("fit", {**FIT, "photos": [{"path": 3}]}, "photos.0.path"),
        ("fit", {**FIT, "photos": [{"path": "/a", "face": -1}]}, "photos.0.face"),
        ("fit", {**FIT, "photos": [{"path": "/a", "face": True}]}, "photos.0.face"),
        ("fit", {**FIT, "photos": [{"path": "/a", "face": "0"}]}, "photos.0.face"),
        ("fit", {**FIT, "photos": [{"path": "/a", "pickle": "/b"}]}, "photos.0.pickle"),
        ("fit", {**FIT, "solve": "hair"}, "solve"),
        ("fit", {**FIT, "locks": {"jawOpen": "1"}}, "locks.jawOpen"),
        ("fit", {**FIT, "locks": {"jawOpen": True}}, "locks.jawOpen"),
        ("fit", {**FIT, "locks": {"jawOpen": 10**400}}, "locks.jawOpen"),
        ("fit", {**FIT, "locks": [["jawOpen", 1]]}, "locks"),
        ("fit", {**FIT, "focal_mm": "50"}, "focal_mm"),
        ("fit", {**FIT, "more": 1}, "more"),
        ("verify", {**VERIFY, "objects": []}, "objects"),
        ("verify", {**VERIFY, "objects": "Head"}, "objects"),
        ("verify", {**VERIFY, "metres_per_unit": 0}, "metres_per_unit"),
        ("verify", {**VERIFY, "gpu": 1}, "gpu"),
        ("rig.register", {"spec": "relative.npz"}, "spec"),
        ("doctor", {"blender": "blender"}, "blender"),
        ("cancel", {"id": "7"}, "id"),
        ("hello", {"protocol": 1, "client": "x", "nonce": "0" * 63}, "nonce"),
        ("hello", {"protocol": "1", "client": "x", "nonce": "0" * 64}, "protocol"),
    ],
)
def test_wrong_parameters_are_named(method, params, named):
    with pytest.raises(BadParamsError) as error:
        read_params(METHODS[method], params)
    sentence = str(error.value)
    assert sentence.startswith(f"{method}: {named}: ")
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_names_that_are_no_unicode_get_through():
    broken = "ä\udcff"
    params = read_params(METHODS["fit"], {**FIT, "photos": [{"path": "/" + broken}], "locks": {broken: 1}})
    assert isinstance(params, messages.FitParams)
    assert params.photos[0].path == "/" + broken
    assert params.locks == {broken: 1.0}
    result = messages.RegisterResult(
        rig_hash="a", parameters=1, landmarks=2, calibrated=False, origin="kept", warnings=[broken]
    )
    assert json.loads(b"".join(wire.encode(result.model_dump()))[12:])["warnings"] == [broken]


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_lists_the_methods_as_they_are():
    text = PROTOCOL_PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| (at once|job) \| `([^`]*)` → `([^`]*)`(.*) \|$", text, re.MULTILINE)
    told = {
        name: (kind, params, result, tuple(re.findall("`([^`]+)`", rest.partition(", blobs")[2])))
        for name, kind, params, result, rest in rows
    }
    assert len(told) == len(rows)
    known = {
        method.name: (method.kind, signature(method.params), signature(method.result), method.blobs)
        for method in METHODS.values()
        if method.kind != "hello"
    }
    assert told == known


def test_the_page_describes_the_hello_as_it_is():
    text = PROTOCOL_PAGE.read_text(encoding="utf-8")
    for name in ("hello", "authenticate"):
        method = METHODS[name]
        assert f"`{name} {signature(method.params)}` → `{signature(method.result)}`" in text


def test_the_page_states_numbers_as_they_are():
    text = PROTOCOL_PAGE.read_text(encoding="utf-8")
    assert f"{wire.AFTER_HELLO.json >> 20} MiB   ({wire.BEFORE_HELLO.json >> 10} KiB before the hello" in text
    assert f"{wire.AFTER_HELLO.blob >> 20} MiB (0 before the hello" in text
    assert f'"protocol": {messages.PROTOCOL},' in text
    codes = {int(code.replace("−", "-")) for code in re.findall(r"^\| ([−\d]+) \|", text, re.MULTILINE)}
    names = (
        "BAD_JSON",
        "BAD_REQUEST",
        "UNKNOWN_METHOD",
        "BAD_PARAMS",
        "UNEXPECTED",
        "USER_ERROR",
        "CANCELLED",
        "HELLO_FAILED",
    )
    assert codes == {getattr(messages, name) for name in names}
    assert f"At most {messages.MAX_PHOTOS} photos" in text
