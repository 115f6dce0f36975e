# SPDX-License-Identifier: GPL-3.0-or-later
"""Frames and proofs of the link, as docs/protocol.md defines them. No bpy in here."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

PROTOCOL = 1

MAGIC = b"RGF1"
HEADER = struct.Struct("<4sII")
JSON_LIMIT = 8 << 20
BLOB_LIMIT = 256 << 20
# Until the hello is complete the other side may be anybody.
JSON_LIMIT_BEFORE_HELLO = 4 << 10

NONCE_BYTES = 32
TOKEN_BYTES = 32

_DTYPES = {"uint8": np.dtype("u1"), "float32": np.dtype("<f4")}


class WireError(Exception):
    """A frame that breaks the rules, with the reason in a few words."""


class Frame(NamedTuple):
    """One received frame. message: its JSON object without "blobs"; blobs: arrays by name, uint8 or float32."""

    message: dict[str, Any]
    blobs: dict[str, np.ndarray]


# --- out --------------------------------------------------------------------------------------------------------------


def encode(message: Mapping[str, Any], blobs: Mapping[str, np.ndarray] | None = None) -> list[memoryview]:
    """The bytes of one frame in pieces, so that large arrays are not copied (contiguous ones are views).

    blobs: uint8 or float32 arrays of any shape. WireError if the frame cannot be made or would be above the limits.
    """
    pieces: list[memoryview] = []
    listed = []
    blob_bytes = 0
    for name, value in (blobs or {}).items():
        array = np.asarray(value)
        dtype = _DTYPES.get(array.dtype.name)
        if dtype is None:
            raise WireError(f"the array {name} is {array.dtype.name}, not uint8 or float32")
        listed.append({"name": str(name), "dtype": array.dtype.name, "shape": list(array.shape)})
        blob_bytes += array.nbytes
        if blob_bytes > BLOB_LIMIT:
            raise WireError(f"its arrays are longer than {BLOB_LIMIT} bytes")
        if array.size:
            flat = np.ascontiguousarray(array, dtype=dtype).reshape(-1)
            pieces.append(flat.view(np.uint8).data)
    whole = dict(message)
    if listed:
        whole["blobs"] = listed
    try:
        # ASCII: also a file name that is no UTF-8 (surrogate escapes) gets through as it is.
        body = json.dumps(whole, allow_nan=False, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"it has no JSON form: {error}") from None
    if len(body) > JSON_LIMIT:
        raise WireError(f"its JSON is {len(body)} bytes long, more than {JSON_LIMIT}")
    return [memoryview(HEADER.pack(MAGIC, len(body), blob_bytes) + body), *pieces]


# --- in ---------------------------------------------------------------------------------------------------------------


class Decoder:
    """Turns bytes into frames without copying them: the caller receives straight into `buffer()`.

    A blob is received into the arrays that are handed out. Their sizes are checked before they are made, and their
    memory is not touched before the bytes arrive. After a WireError the decoder is of no further use.
    """

    def __init__(self) -> None:
        self._json_limit = JSON_LIMIT_BEFORE_HELLO
        self._blob_limit = 0
        self._begin()

    def _begin(self) -> None:
        self._part = "header"
        # What is still to be filled, last first.
        self._targets: list[memoryview] = [memoryview(bytearray(HEADER.size))]
        self._filled = 0
        self._message: dict[str, Any] = {}
        self._blobs: dict[str, np.ndarray] = {}
        self._blob_bytes = 0

    @property
    def between_frames(self) -> bool:
        return self._part == "header" and self._filled == 0

    def trust(self) -> None:
        """The hello is complete: the full limits apply from the next frame on."""
        self._json_limit, self._blob_limit = JSON_LIMIT, BLOB_LIMIT

    def buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        return self._targets[-1][self._filled :]

    def advance(self, count: int) -> Frame | None:
        """Say that `count` bytes of `buffer()` are filled; returns the frame if it is whole now. WireError."""
        self._filled += count
        target = self._targets[-1]
        if self._part == "header" and count:
            known = min(self._filled, len(MAGIC))
            if target[:known] != MAGIC[:known]:
                raise WireError("it does not begin as a frame does")
        if self._filled < len(target):
            return None
        self._targets.pop()
        self._filled = 0
        if self._part == "header":
            self._read_header(target)
            return None
        if self._part == "json":
            self._read_json(target)
        if self._targets:
            return None
        frame = Frame(self._message, self._blobs)
        self._begin()
        return frame

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """All frames that these bytes complete: for those who have the bytes already."""
        frames = []
        rest = memoryview(data)
        while len(rest):
            buffer = self.buffer()
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            rest = rest[count:]
            frame = self.advance(count)
            if frame is not None:
                frames.append(frame)
        return frames

    def _read_header(self, header: memoryview) -> None:
        _, json_bytes, self._blob_bytes = HEADER.unpack(header)
        if not 0 < json_bytes <= self._json_limit:
            raise WireError(f"its JSON is said to have {json_bytes} bytes, allowed are 1 to {self._json_limit}")
        if self._blob_bytes > self._blob_limit:
            raise WireError(f"its blob is said to have {self._blob_bytes} bytes, allowed are {self._blob_limit}")
        self._part = "json"
        self._targets = [memoryview(bytearray(json_bytes))]

    def _read_json(self, text: memoryview) -> None:
        self._message = _object(text)
        self._blobs = _empty_arrays(self._message.pop("blobs", None), self._blob_bytes)
        self._part = "blob"
        self._targets = [array.reshape(-1).view(np.uint8).data for array in self._blobs.values() if array.size]
        self._targets.reverse()


def _object(text: memoryview) -> dict[str, Any]:
    try:
        value = _STRICT.decode(str(text, "utf-8"))
    except RecursionError:
        raise WireError("its JSON is nested too deeply") from None
    except ValueError as error:
        raise WireError(f"its JSON is none: {error}") from None
    if not isinstance(value, dict):
        raise WireError("its JSON is no object")
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


def _empty_arrays(listed: Any, blob_bytes: int) -> dict[str, np.ndarray]:
    """Arrays to receive the blob into, in its order; their sizes have been checked against its length."""
    if listed is None:
        listed = []
    if not isinstance(listed, list):
        raise WireError('"blobs" is no list')
    shapes: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    total = 0
    for item in listed:
        name, dtype, shape = _array_form(item)
        if name in shapes:
            raise WireError(f"two arrays are named {name!r}")
        shapes[name] = (dtype, shape)
        total += math.prod(shape) * dtype.itemsize
    if total != blob_bytes:
        raise WireError(f"its arrays take {total} bytes, its blob has {blob_bytes}")
    try:
        return {name: np.empty(shape, dtype) for name, (dtype, shape) in shapes.items()}
    except (ValueError, MemoryError) as error:
        raise WireError(f"its arrays cannot be made: {error}") from None


def _array_form(item: Any) -> tuple[str, np.dtype, tuple[int, ...]]:
    if not isinstance(item, dict):
        raise WireError("an array is not described by an object")
    name, dtype, shape = item.get("name"), item.get("dtype"), item.get("shape")
    if not isinstance(name, str):
        raise WireError("an array has no name")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise WireError(f"the dtype of the array {name!r} is neither uint8 nor float32")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise WireError(f"the shape of the array {name!r} is no list of whole numbers")
    return name, _DTYPES[dtype], tuple(shape)


# --- proofs -----------------------------------------------------------------------------------------------------------


def server_proof(token: bytes, client_nonce: bytes, server_nonce: bytes) -> str:
    """What the backend shows to prove that it knows the token; hexadecimal. HMAC: RFC 2104."""
    return _proof(token, (b"rigfit server", client_nonce, server_nonce))


def client_proof(token: bytes, client_nonce: bytes, server_nonce: bytes) -> str:
    """What the add-on shows to prove that it knows the token; hexadecimal."""
    return _proof(token, (b"rigfit client", client_nonce, server_nonce))


def _proof(token: bytes, parts: Iterable[bytes]) -> str:
    return hmac.new(token, b"".join(parts), hashlib.sha256).hexdigest()


def same_proof(expected: str, shown: Any) -> bool:
    """Comparison in constant time; anything that is no ASCII text is wrong."""
    return isinstance(shown, str) and shown.isascii() and hmac.compare_digest(expected, shown)


def hex_bytes(text: Any, count: int) -> bytes | None:
    """The `count` bytes that these hexadecimal digits say; None if they do not."""
    if not isinstance(text, str) or len(text) != 2 * count:
        return None
    try:
        value = bytes.fromhex(text)
    except ValueError:
        return None
    # fromhex skips spaces.
    return value if len(value) == count else None
