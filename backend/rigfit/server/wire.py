# SPDX-License-Identifier: Apache-2.0
"""Frames and proofs, as docs/protocol.md defines them. numpy arrays go out; nothing here imports numpy."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"RGF1"
HEADER = struct.Struct("<4sII")
ITEM_BYTES = {"uint8": 1, "float32": 4}

NONCE_BYTES = 32
TOKEN_BYTES = 32

_DISCARD_BYTES = 1 << 18


@dataclass(frozen=True)
class Limits:
    """How long the parts of a frame may be, in bytes."""

    json: int
    blob: int


# Until the hello is complete the other side may be anybody.
BEFORE_HELLO = Limits(4 << 10, 0)
AFTER_HELLO = Limits(8 << 20, 256 << 20)


class WireError(Exception):
    """A frame that breaks the rules, with the reason in a few words."""


class BadJsonError(WireError):
    """The frame is one, but its JSON is none."""


@dataclass(frozen=True)
class Frame:
    """A received frame: its JSON object without "blobs", and the names of its arrays. No method takes arrays yet, so their
    bytes are counted and dropped."""

    message: dict[str, Any]
    arrays: tuple[str, ...]


# --- out --------------------------------------------------------------------------------------------------------------


def encode(message: Mapping[str, Any], blobs: Mapping[str, np.ndarray] | None = None) -> list[bytes | memoryview]:
    """One frame in pieces. blobs: uint8 or float32 arrays of any shape; contiguous ones are not copied.

    ValueError if the frame would break the rules (NaN, other dtypes, too long): a defect of the caller.
    """
    listed, pieces, blob_bytes = [], [], 0
    for name, array in (blobs or {}).items():
        if array.dtype.name not in ITEM_BYTES:
            raise ValueError(f"the array {name} is {array.dtype.name}")
        listed.append({"name": name, "dtype": array.dtype.name, "shape": list(array.shape)})
        if array.size:
            pieces.append(array.astype(array.dtype.newbyteorder("<"), order="C", copy=False).reshape(-1).data.cast("B"))
        blob_bytes += array.nbytes
    whole = {**message, "blobs": listed} if listed else message
    # ASCII: also a file name that is no UTF-8 (surrogate escapes) gets through as it is.
    body = json.dumps(whole, allow_nan=False, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    if len(body) > AFTER_HELLO.json or blob_bytes > AFTER_HELLO.blob:
        raise ValueError(f"a frame of {len(body)} + {blob_bytes} bytes is too long")
    return [HEADER.pack(MAGIC, len(body), blob_bytes) + body, *pieces]


# --- in ---------------------------------------------------------------------------------------------------------------


async def read_frame(reader: asyncio.StreamReader, limits: Limits) -> Frame:
    """The next frame. WireError; asyncio.IncompleteReadError when the connection ends (`partial` empty: between frames)."""
    json_bytes, blob_bytes = parse_header(await reader.readexactly(HEADER.size), limits)
    message = parse_json(await reader.readexactly(json_bytes))
    names = array_names(message.pop("blobs", None), blob_bytes)
    while blob_bytes:
        blob_bytes -= len(await reader.readexactly(min(blob_bytes, _DISCARD_BYTES)))
    return Frame(message, names)


def parse_header(header: bytes, limits: Limits) -> tuple[int, int]:
    """Lengths of JSON and blob in bytes. WireError."""
    magic, json_bytes, blob_bytes = HEADER.unpack(header)
    if magic != MAGIC:
        raise WireError("it does not begin as a frame does")
    if not 0 < json_bytes <= limits.json:
        raise WireError(f"its JSON is said to have {json_bytes} bytes, allowed are 1 to {limits.json}")
    if blob_bytes > limits.blob:
        raise WireError(f"its blob is said to have {blob_bytes} bytes, allowed are {limits.blob}")
    return json_bytes, blob_bytes


def parse_json(text: bytes) -> dict[str, Any]:
    """The JSON object of a frame. BadJsonError for anything else, NaN and infinite numbers among it."""
    try:
        value = _STRICT.decode(text.decode("utf-8"))
    except RecursionError:
        raise BadJsonError("it is nested too deeply") from None
    except ValueError as error:
        # Not the text itself: it may be a megabyte.
        raise BadJsonError(str(error)[:200]) from None
    if not isinstance(value, dict):
        raise BadJsonError("it is no object")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed")


def _finite(digits: str) -> float:
    # 1e999 is written like a number and read as infinity.
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is too large")
    return number


_STRICT = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def array_names(listed: Any, blob_bytes: int) -> tuple[str, ...]:
    """The names of the arrays that "blobs" describes. WireError unless their sizes add up to the length of the blob."""
    if listed is None:
        listed = []
    if not isinstance(listed, list):
        raise WireError('"blobs" is no list')
    names: list[str] = []
    total = 0
    for item in listed:
        if not isinstance(item, dict):
            raise WireError("an array is not described by an object")
        name, dtype, shape = item.get("name"), item.get("dtype"), item.get("shape")
        if not isinstance(name, str) or name in names:
            raise WireError("an array has no name of its own")
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise WireError(f"the dtype of the array {name[:40]!r} is neither uint8 nor float32")
        if not isinstance(shape, list) or len(shape) > 32 or not all(type(n) is int and n >= 0 for n in shape):
            raise WireError(f"the shape of the array {name[:40]!r} is no list of whole numbers")
        names.append(name)
        total += math.prod(shape) * ITEM_BYTES[dtype]
    if total != blob_bytes:
        raise WireError("its arrays do not take as many bytes as its blob has")
    return tuple(names)


# --- proofs -----------------------------------------------------------------------------------------------------------


def server_proof(token: bytes, client_nonce: bytes, server_nonce: bytes) -> str:
    """What this side shows to prove that it knows the token; hexadecimal. HMAC: RFC 2104."""
    return hmac.new(token, b"rigfit server" + client_nonce + server_nonce, hashlib.sha256).hexdigest()


def client_proof(token: bytes, client_nonce: bytes, server_nonce: bytes) -> str:
    """What the add-on has to show; hexadecimal."""
    return hmac.new(token, b"rigfit client" + client_nonce + server_nonce, hashlib.sha256).hexdigest()


def same_proof(expected: str, shown: str) -> bool:
    """Comparison in constant time."""
    return shown.isascii() and hmac.compare_digest(expected, shown)


def hex_bytes(text: str, count: int) -> bytes:
    """The `count` bytes that these hexadecimal digits say. ValueError."""
    # fromhex skips spaces, so the length alone proves nothing.
    value = bytes.fromhex(text)
    if len(text) != 2 * count or len(value) != count:
        raise ValueError(f"it has to be {2 * count} hexadecimal digits")
    return value
