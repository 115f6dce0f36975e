# SPDX-License-Identifier: Apache-2.0
"""The server: one loopback socket, one client, at-once methods in the event loop, jobs in their thread.

What ends it: `shutdown`, the end of standard input (see `process`), SIGTERM or SIGINT, and a time without a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rigfit
from rigfit.errors import Cancelled, UserError
from rigfit.files import write_atomically
from rigfit.server import messages, wire
from rigfit.server.connection import Connection, Failed, read_request
from rigfit.server.jobs import Job, JobContext, JobQueue
from rigfit.server.messages import BadParamsError, Method, Params

if TYPE_CHECKING:
    from rigfit.server.methods import Answer, Methods

log = logging.getLogger("rigfit.server")

HOST = "127.0.0.1"
SCHEMA = "rigfit.address/1"
HELLO_S = 5.0
# A client that comes back at once may be seen before the end of its last connection.
HANDOVER_S = 0.3
# Anybody on this machine may connect; more strangers than this at a time are sent away.
MOST_STRANGERS = 8
MOST_QUEUED = 32
# How long a job may take to notice that everything ends.
JOB_GRACE_S = 0.3
WARM_UP_TEXT = "loading the landmark detector"


class Server:
    """Listens until `stop`. token: 32 bytes that both sides know. log_path: named in errors, where there is one."""

    def __init__(self, token: bytes, *, idle_s: float, log_path: Path | None) -> None:
        self._token = token
        self._idle_s = idle_s
        self._log_path = log_path
        self._began = time.monotonic()
        self._client: Connection | None = None
        self._strangers = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._methods: Methods | None = None
        self._jobs: JobQueue | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reason = ""

    async def run(self, address_file: Path, *, tell_token: bool) -> None:
        """Listen, write the address file, answer until `stop`."""
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        log_folder = None if self._log_path is None else self._log_path.parent
        blender_log = None if log_folder is None else log_folder / "blender.log"
        self._jobs = JobQueue(self._loop, self._warm_up, WARM_UP_TEXT, blender_log)
        self._handle_signals()
        listener = _listen()
        server = await asyncio.start_server(self._connected, sock=listener)
        port = listener.getsockname()[1]
        address = {
            "schema": SCHEMA, "host": HOST, "port": port, "pid": os.getpid(), "protocol": messages.PROTOCOL,
            "version": rigfit.__version__,
        }  # fmt: skip
        _write_address(address_file, address | ({"token": self._token.hex()} if tell_token else {}))
        log.info("rigfit %s, process %d, listens at %s:%d", rigfit.__version__, os.getpid(), HOST, port)
        self._wait_for_client()
        # After the address file: what it imports would hold up everything else.
        self._jobs.start()
        try:
            await self._stopping.wait()
        finally:
            log.info("ends: %s", self._reason or "unexpectedly")
            server.close()
            self._jobs.close()
            await self._end_connections()
            await asyncio.to_thread(self._jobs.join, JOB_GRACE_S)

    def stop(self, reason: str) -> None:
        """End `run`; from any thread."""
        loop, event = self._loop, self._stopping
        if loop is None or event is None:
            return

        def set_it() -> None:
            self._reason = self._reason or reason
            event.set()

        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(set_it)

    def interrupt(self) -> None:
        """End the Blender children now; from any thread."""
        if self._jobs is not None:
            self._jobs.interrupt()

    def _handle_signals(self) -> None:
        assert self._loop is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            name = signal.Signals(number).name
            try:
                self._loop.add_signal_handler(number, self.stop, name)
            except NotImplementedError:  # Windows
                signal.signal(number, lambda *_, name=name: self.stop(name))

    def _wait_for_client(self) -> None:
        assert self._loop is not None
        self._idle = self._loop.call_later(self._idle_s, self.stop, f"no client for {self._idle_s:g} s")

    async def _end_connections(self) -> None:
        # What is answered already (`shutdown`) still goes out.
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2 * JOB_GRACE_S)

    # --- connections --------------------------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        peer = writer.get_extra_info("peername")
        connection = Connection(reader, writer)
        try:
            if self._strangers >= MOST_STRANGERS or not peer or peer[0] != HOST:
                log.warning("a connection from %s was refused", peer)
                return
            await self._serve(connection)
        except wire.BadJsonError as error:
            log.warning("bad JSON: %s", error)
            connection.error(Failed(messages.BAD_JSON, "bad_json", f"The JSON cannot be read: {error}."))
        except wire.WireError as error:
            log.warning("a frame breaks the rules: %s", error)
        except TimeoutError:
            log.warning("a connection without a hello was closed")
        except (OSError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            pass
        except Exception:
            log.exception("a connection failed")
        finally:
            self._release(connection)
            await connection.close()
            self._tasks.discard(task)

    async def _serve(self, connection: Connection) -> None:
        self._strangers += 1
        try:
            async with asyncio.timeout(HELLO_S):
                greeted = await self._greet(connection)
        finally:
            self._strangers -= 1
        if not greeted:
            return
        log.info("a client is connected")
        while True:
            self._answer(connection, await connection.receive())
            await connection.drain()

    def _release(self, connection: Connection) -> None:
        if self._client is not connection:
            return
        self._client = None
        log.info("the client is gone")
        assert self._jobs is not None
        self._jobs.cancel_all(connection)
        self._wait_for_client()

    # --- hello --------------------------------------------------------------------------------------------------------

    async def _greet(self, connection: Connection) -> bool:
        """Both requests of the hello; whether the other side is the client now."""
        try:
            number, params = await self._expect(connection, "hello")
            assert isinstance(params, messages.HelloParams)
            if params.protocol != messages.PROTOCOL:
                raise _hello_failed(
                    number, "bad_protocol",
                    f"The add-on speaks protocol {params.protocol} and the backend {messages.PROTOCOL}: install both again.",
                )  # fmt: skip
            await self._wait_for_handover()
            self._refuse_second(number)
            nonce = secrets.token_bytes(wire.NONCE_BYTES)
            connection.result(
                number,
                messages.HelloResult(
                    protocol=messages.PROTOCOL,
                    server=f"rigfit {rigfit.__version__}",
                    pid=os.getpid(),
                    nonce=nonce.hex(),
                    proof=wire.server_proof(self._token, params.nonce, nonce),
                ),
            )
            wanted = wire.client_proof(self._token, params.nonce, nonce)
            number, params = await self._expect(connection, "authenticate")
            assert isinstance(params, messages.AuthenticateParams)
            if not wire.same_proof(wanted, params.proof):
                raise _hello_failed(
                    number, "bad_proof", "The add-on does not know this backend's token: start it again."
                )
            self._refuse_second(number)
        except Failed as failed:
            log.warning("hello refused: %s", failed.kind)
            connection.error(failed)
            return False
        self._client = connection
        connection.limits = wire.AFTER_HELLO
        if self._idle is not None:
            self._idle.cancel()
        connection.result(number, messages.Done())
        return True

    async def _expect(self, connection: Connection, name: str) -> tuple[int, Params]:
        number, method, params = read_request(await connection.receive())
        if method.name != name:
            raise _hello_failed(number, "not_authenticated", f"The hello comes first: {name} is expected.")
        return number, params

    async def _wait_for_handover(self) -> None:
        deadline = time.monotonic() + HANDOVER_S
        while self._client is not None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _refuse_second(self, number: int) -> None:
        if self._client is not None:
            raise _hello_failed(number, "in_use", "Another Blender is connected to this backend: close it there.")

    # --- requests -----------------------------------------------------------------------------------------------------

    def _answer(self, connection: Connection, frame: wire.Frame) -> None:
        try:
            number, method, params = read_request(frame)
            if method.kind == "job":
                self._queue(connection, number, method, params)
            else:
                connection.result(number, self._at_once(connection, number, method, params))
        except Failed as failed:
            connection.error(failed)

    def _at_once(self, connection: Connection, number: int, method: Method, params: Params) -> messages.Result:
        assert self._jobs is not None
        if method.name == "ping":
            uptime_s = round(time.monotonic() - self._began, 3)
            return messages.PingResult(busy=self._jobs.busy, queued=self._jobs.queued, uptime_s=uptime_s)
        if method.name == "cancel":
            assert isinstance(params, messages.CancelParams)
            return messages.CancelResult(found=self._jobs.cancel(connection, params.id))
        if method.name == "shutdown":
            self.stop("shutdown")
            return messages.Done()
        raise Failed(messages.BAD_REQUEST, "bad_request", "The hello is over already.", number)

    def _queue(self, connection: Connection, number: int, method: Method, params: Params) -> None:
        jobs = self._jobs
        assert jobs is not None
        if jobs.has(connection, number):
            raise Failed(messages.BAD_REQUEST, "bad_request", "This id is in use: ids are counted up.", number)
        if jobs.queued >= MOST_QUEUED:
            raise Failed(messages.BAD_REQUEST, "bad_request", "Too many requests wait already.", number)
        began = time.monotonic()

        def end(answer: Answer | None, error: BaseException | None) -> None:
            failed = None if error is None else self._failure(method, error)
            took = time.monotonic() - began
            log.info("%s %d: %s after %.3f s", method.name, number, failed.kind if failed else "done", took)
            if failed is None:
                assert answer is not None
                try:
                    connection.result(number, answer.result, answer.blobs)
                except ValueError as defect:
                    failed = self._failure(method, defect)
            if failed is not None:
                failed.number = number
                connection.error(failed)

        def work(context: JobContext) -> Answer:
            return self._loaded().run(method.name, params, context)

        jobs.submit(Job(connection, number, method.name, work, lambda *told: connection.progress(number, *told), end))

    def _failure(self, method: Method, error: BaseException) -> Failed:
        if isinstance(error, Cancelled):
            return Failed(messages.CANCELLED, "cancelled", "It was cancelled.")
        if isinstance(error, UserError):
            return Failed(messages.USER_ERROR, error.kind, error.message)
        if isinstance(error, BadParamsError):
            return Failed(messages.BAD_PARAMS, "bad_params", str(error))
        log.error("%s failed", method.name, exc_info=error)
        if isinstance(error, MemoryError):
            sentence = "There is not enough memory for this: close other programs, or use smaller photos."
            return Failed(messages.USER_ERROR, "out_of_memory", sentence)
        if isinstance(error, ImportError):
            sentence = f"The backend's environment is not complete ({error}): install the backend again."
            return Failed(messages.USER_ERROR, "broken_installation", sentence)
        where = f" (log: {self._log_path})" if self._log_path else ""
        told = f"{type(error).__name__}: {error}"[:300]
        return Failed(messages.UNEXPECTED, "unexpected", f"The backend failed: {told}{where}")

    # --- the job thread -----------------------------------------------------------------------------------------------

    def _loaded(self) -> Methods:
        if self._methods is None:
            from rigfit.server.methods import Methods

            self._methods = Methods()
        return self._methods

    def _warm_up(self) -> None:
        began = time.monotonic()
        self._loaded().warm_up()
        log.info("warm after %.2f s", time.monotonic() - began)


def _hello_failed(number: int, kind: str, message: str) -> Failed:
    return Failed(messages.HELLO_FAILED, kind, message, number)


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    exclusive = getattr(socket, "SO_EXCLUSIVEADDRUSE", None)
    if exclusive is not None:  # Windows: nobody else may listen at the same port
        listener.setsockopt(socket.SOL_SOCKET, exclusive, 1)
    listener.bind((HOST, 0))
    listener.setblocking(False)
    return listener


def _write_address(path: Path, address: dict[str, Any]) -> None:
    text = json.dumps(address) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="ascii"), mode=0o600)
