# SPDX-License-Identifier: Apache-2.0
"""One connection: frames in, requests checked, answers out. For the event loop's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rigfit.server import messages, wire
from rigfit.server.messages import METHODS, BadParamsError, Method, Params

if TYPE_CHECKING:
    import numpy as np

# A client that does not read gets no more progress.
UNREAD_BYTES = 1 << 20
# How long the last words may take to go out.
CLOSE_S = 0.3


class Failed(Exception):
    """An error to answer. number: the id of the request, where it has one."""

    def __init__(self, code: int, kind: str, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.code, self.kind, self.message, self.number = code, kind, message, number


class Connection:
    """One side of the socket, in the event loop's thread."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.limits = wire.BEFORE_HELLO

    async def receive(self) -> wire.Frame:
        return await wire.read_frame(self._reader, self.limits)

    def send(self, message: Mapping[str, Any], blobs: Mapping[str, np.ndarray] | None = None) -> None:
        if not self._writer.is_closing():
            self._writer.writelines(wire.encode({"jsonrpc": "2.0", **message}, blobs))

    def result(self, number: int, result: messages.Result, blobs: Mapping[str, np.ndarray] | None = None) -> None:
        self.send({"id": number, "result": result.model_dump()}, blobs)

    def error(self, failed: Failed) -> None:
        error = {"code": failed.code, "message": failed.message, "data": {"kind": failed.kind}}
        self.send({"id": failed.number, "error": error})

    def progress(self, number: int, done: int, total: int, text: str) -> None:
        if self._writer.transport.get_write_buffer_size() < UNREAD_BYTES:
            self.send({"method": "progress", "params": {"id": number, "done": done, "total": total, "text": text}})

    async def drain(self) -> None:
        await self._writer.drain()

    async def close(self) -> None:
        """Close after what was sent, but wait for a reader that does not read no longer than a moment."""
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self._writer.transport.abort()


def read_request(frame: wire.Frame) -> tuple[int, Method, Params]:
    """(id, method, checked parameters) of a request. Failed."""
    message = frame.message
    number = message.get("id")
    if type(number) is not int or not 0 <= number <= 2**53:
        raise Failed(messages.BAD_REQUEST, "bad_request", "A request needs an id, a whole number.")
    unknown = message.keys() - {"jsonrpc", "id", "method", "params"}
    if message.get("jsonrpc") != "2.0" or unknown or not isinstance(message.get("method"), str):
        raise Failed(messages.BAD_REQUEST, "bad_request", "This is no request of JSON-RPC 2.0.", number)
    method = METHODS.get(message["method"])
    if method is None:
        told = f"There is no method {message['method'][:40]!r}."
        raise Failed(messages.UNKNOWN_METHOD, "unknown_method", told, number)
    if frame.arrays:
        raise Failed(messages.BAD_PARAMS, "bad_params", f"{method.name}: it takes no arrays.", number)
    try:
        return number, method, messages.read_params(method, message.get("params", {}))
    except BadParamsError as error:
        raise Failed(messages.BAD_PARAMS, "bad_params", str(error), number) from None
