# SPDX-License-Identifier: GPL-3.0-or-later
"""The backend as the rest of the add-on sees it: submit, poll, cancel. No bpy in here.

client = Client(launch)
ticket = client.submit("fit", {...})
# many times a second, from Blender's timer or in a loop:
client.poll()
# until ticket.settled
"""

from __future__ import annotations

import secrets
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..messages import BackendError, RigError
from . import session
from .connection import Connection, ConnectionLost
from .process import BackendProcess, describe_exit, read_attach_file
from .session import Failure, Limits, Phase, State
from .wire import NONCE_BYTES, WireError, encode

# Blender's window may stand still for minutes (a render, a large file). That time is nobody's delay: what is waited for
# could not be noticed meanwhile.
LONGEST_GAP_S = 1.0

# What `kill` waits for at most; the system needs a few milliseconds.
KILL_WAIT_S = 2.0


@dataclass(frozen=True)
class Launch:
    """How to get a backend: by starting one, or by attaching to one that runs.

    argv: its command line up to `serve`, to which `--address-file` is added; attach_file: the file that
    `rigfit serve --attach` wrote. One of them. log_path: where a started backend prints to. environment: what a started
    backend gets besides the cleaned environment of this process.
    """

    argv: list[str] | None
    attach_file: str | None
    log_path: str
    environment: Mapping[str, str] = field(default_factory=dict)


class Ticket:
    """A request on its way.

    state: "waiting" (the backend has not seen it), "running", "done", "failed" or "cancelled".
    progress: (done, total, text), (0, 0, "") until the backend says something.
    result: the answer's object; blobs: its arrays by name, uint8 or float32; both empty until done.
    error: why it failed.
    """

    def __init__(self, number: int, method: str) -> None:
        self.number = number
        self.method = method
        self.state = "waiting"
        self.progress: tuple[int, int, str] = (0, 0, "")
        self.result: dict[str, Any] = {}
        self.blobs: dict[str, np.ndarray] = {}
        self.error: RigError | None = None

    @property
    def settled(self) -> bool:
        """Whether this is the end of it: done, failed or cancelled."""
        return self.state in ("done", "failed", "cancelled")

    def __repr__(self) -> str:
        return f"<Ticket {self.number} {self.method}: {self.state}>"


class Client:
    """One backend, started when it is first needed and again when it has died.

    launch: asked at each start; a RigError of it fails the requests that wait. clock: seconds that only go forward.
    Everything happens in the calls of the methods; none of them waits, but for `kill`, at most two seconds.
    """

    def __init__(
        self,
        launch: Callable[[], Launch],
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launch = launch
        self._clock = clock
        self._last_look = clock()
        self._now = 0.0
        self._state = State(limits=limits or Limits())
        self._events: deque[session.Event] = deque()
        self._dispatching = False
        self._tickets: dict[int, Ticket] = {}
        self._next_ticket = 1
        self._to_launch = False
        self._process: BackendProcess | None = None
        self._ending: list[BackendProcess] = []
        self._connection: Connection | None = None
        self._log = ""
        self._error: tuple[Failure, RigError] | None = None
        self._changed = False
        self._shown: tuple[Any, ...] = ()

    # --- what the add-on asks for -------------------------------------------------------------------------------------

    def submit(self, method: str, params: Mapping[str, Any], blobs: Mapping[str, np.ndarray] | None = None) -> Ticket:
        """Put a request into the queue, and have the backend started if there is none.

        blobs: uint8 or float32 arrays, which must not be changed until the ticket is settled. A request that cannot be
        sent (too large, no JSON form) is a ticket that has failed already.
        """
        ticket = Ticket(self._next_ticket, method)
        self._next_ticket += 1
        self._changed = True
        params, blobs = dict(params), dict(blobs or {})
        try:
            encode({"jsonrpc": "2.0", "id": 1 << 53, "method": method, "params": params}, blobs)
        except WireError as error:
            ticket.state, ticket.error = "failed", RigError("bad_request", method=method, reason=str(error))
            return ticket
        self._tickets[ticket.number] = ticket
        self._dispatch(session.Submit(self._now, session.Request(ticket.number, method, params, blobs)))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """The ticket is cancelled when this returns, unless it was settled before; what the backend still says about it
        is dropped, and a backend that does not stop within five seconds is ended."""
        if not ticket.settled:
            self._dispatch(session.Cancel(self._now, ticket.number))

    def stop(self) -> None:
        """Begin the gentle end: all requests are cancelled, and two seconds later the backend is gone, if `poll` is
        called until then."""
        self._dispatch(session.Stop(self._now))

    def kill(self) -> None:
        """End the backend now. When this returns it is gone, and what it started too."""
        self._dispatch(session.Halt(self._now))
        deadline = time.monotonic() + KILL_WAIT_S
        self._reap()
        while self._ending and time.monotonic() < deadline:
            time.sleep(0.005)
            self._reap()

    def poll(self, budget_s: float = 0.005) -> bool:
        """Look at everything once, for about `budget_s` seconds at most. Returns whether anything visible changed
        (`state`, `text`, `alive`, `answering`, or any ticket). Never raises."""
        deadline = time.perf_counter() + budget_s
        try:
            self._look(deadline)
        except Exception as error:
            # A defect of the link. The artist's window must not pay for it.
            traceback.print_exc()
            self._defect(error)
        shown = (self._state.phase, self.text, self.alive, self.answering)
        changed = self._changed or shown != self._shown
        self._changed, self._shown = False, shown
        return changed

    # --- what the panel shows -----------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """The phase of the session: off, starting, connecting, greeting, ready, cancelling, stopping or failed."""
        return self._state.phase.value

    @property
    def text(self) -> str:
        """What is going on, as a short phrase; after a failure its sentence."""
        error = self.error
        return error.message if error is not None else session.describe(self._state, self._now)

    @property
    def error(self) -> RigError | None:
        """Why there is no backend, in the state "failed"."""
        failure = self._state.failure
        if failure is None:
            return None
        if self._error is None or self._error[0] is not failure:
            self._error = (failure, self._as_error(failure))
        return self._error[1]

    @property
    def alive(self) -> bool:
        """Whether a process that was started still runs, be it one that is being ended; attached, whether the connection
        stands. While it does, `poll` has something to do."""
        if self._process is not None or self._ending:
            return True
        return self._state.attached and self._connection is not None and self._connection.is_open

    @property
    def answering(self) -> bool:
        """Whether the backend talks to us: connected, and not silent for half a minute of work."""
        return session.answering(self._state, self._now)

    @property
    def busy(self) -> bool:
        """Whether any request is not settled."""
        return bool(self._tickets)

    @property
    def server(self) -> str:
        """What the backend calls itself, once it has proved who it is."""
        return self._state.server if self._state.phase in (Phase.READY, Phase.CANCELLING) else ""

    @property
    def pid(self) -> int | None:
        """The process that was started, while it runs."""
        return self._process.pid if self._process is not None and self._process.exit_code is None else None

    # --- one look -----------------------------------------------------------------------------------------------------

    def _look(self, deadline: float) -> None:
        seen = self._clock()
        self._now += min(max(0.0, seen - self._last_look), LONGEST_GAP_S)
        self._last_look = seen
        self._reap()
        if self._to_launch:
            self._start()
        self._find_address()
        self._use_connection(deadline)
        self._watch_process()
        self._dispatch(session.Tick(self._now))
        if self._connection is not None:
            self._connection.flush(deadline)

    def _start(self) -> None:
        self._to_launch = False
        try:
            launch = self._launch()
            if launch.attach_file:
                self._log = ""
                address = read_attach_file(launch.attach_file)
                self._dispatch(session.Launched(self._now, True))
                self._dispatch(session.Addressed(self._now, address.port, address.protocol, address.token or b""))
            else:
                self._log = launch.log_path
                self._process = BackendProcess(launch.argv or [], launch.log_path, launch.environment)
                self._dispatch(session.Launched(self._now, False))
        except RigError as error:
            self._dispatch(session.Unlaunched(self._now, _as_failure(error)))

    def _find_address(self) -> None:
        if self._state.phase is not Phase.STARTING or self._process is None:
            return
        try:
            address = self._process.address()
        except RigError as error:
            self._dispatch(session.Unlaunched(self._now, _as_failure(error)))
            return
        if address is not None:
            self._dispatch(session.Addressed(self._now, address.port, address.protocol, self._process.token))

    def _use_connection(self, deadline: float) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            if not connection.is_open:
                if not connection.connect():
                    return
                self._dispatch(session.Connected(self._now, secrets.token_bytes(NONCE_BYTES)))
            connection.flush(deadline)
            while self._connection is connection:
                frame = connection.receive(deadline)
                if frame is None:
                    break
                self._dispatch(session.Received(self._now, frame.message, frame.blobs))
        except WireError as error:
            self._dispatch(session.Broken(self._now, str(error)))
        except ConnectionLost as error:
            self._dispatch(session.Closed(self._now, str(error)))

    def _watch_process(self) -> None:
        process = self._process
        if process is None:
            return
        code = process.poll()
        if code is None:
            return
        if self._connection is not None and self._connection.is_open and not self._connection.drained:
            # First what it said before it ended.
            return
        words = process.last_words()
        reason = describe_exit(code) + (f", its last words: {words}" if words else "")
        process.clean_up()
        self._process = None
        self._dispatch(session.Exited(self._now, code, reason))

    def _reap(self) -> None:
        for process in list(self._ending):
            if process.poll() is not None:
                process.clean_up()
                self._ending.remove(process)

    # --- the session's effects ----------------------------------------------------------------------------------------

    def _dispatch(self, event: session.Event) -> None:
        """Step through the event, and through those that its effects bring about, one after the other."""
        self._events.append(event)
        if self._dispatching:
            return
        self._dispatching = True
        try:
            while self._events:
                self._state, effects = session.step(self._state, self._events.popleft())
                for effect in effects:
                    self._carry_out(effect)
        finally:
            self._dispatching = False
            self._events.clear()

    def _carry_out(self, effect: session.Effect) -> None:
        match effect:
            case session.Launch():
                # In the next `poll`: a start takes some milliseconds, which a click should not feel.
                self._to_launch = True
            case session.Connect(port):
                self._connect(port)
            case session.Send(message, blobs):
                if self._connection is not None:
                    self._connection.send(encode(message, blobs))
            case session.Trust():
                if self._connection is not None:
                    self._connection.trust()
            case session.Disconnect():
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
            case session.CloseInput():
                self._end_gently()
            case session.Kill():
                self._to_launch = False
                if self._process is not None:
                    self._process.kill()
                    self._ending.append(self._process)
                    self._process = None
            case _:
                self._tell(effect)

    def _tell(self, effect: session.Effect) -> None:
        """The effects that a ticket shows."""
        assert isinstance(
            effect, session.Began | session.Progressed | session.Done | session.Failed | session.Cancelled
        )
        ticket = self._tickets[effect.ticket]
        self._changed = True
        match effect:
            case session.Began():
                ticket.state = "running"
            case session.Progressed(progress=progress):
                ticket.progress = progress
            case session.Done(result=result, blobs=blobs):
                ticket.result, ticket.blobs, ticket.state = dict(result), dict(blobs), "done"
            case session.Failed(failure=failure):
                ticket.error, ticket.state = self._as_error(failure), "failed"
            case session.Cancelled():
                ticket.state = "cancelled"
        if ticket.settled:
            del self._tickets[effect.ticket]

    def _connect(self, port: int) -> None:
        try:
            self._connection = Connection(port)
        except ConnectionLost as error:
            self._dispatch(session.Closed(self._now, str(error)))

    def _end_gently(self) -> None:
        self._to_launch = False
        if self._connection is not None and self._connection.is_open:
            # The word before the deed: `shutdown` should arrive before the end of standard input.
            self._connection.flush(time.perf_counter())
        if self._process is None:
            self._dispatch(session.Exited(self._now, 0, ""))
        else:
            self._process.close_input()

    def _defect(self, error: Exception) -> None:
        """Whatever the link's state is worth now: end everything, and say so."""
        failure = Failure("defect", {"reason": f"{type(error).__name__}: {error}"})
        for ticket in self._tickets.values():
            ticket.state, ticket.error = "failed", self._as_error(failure)
        self._tickets.clear()
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._ending.append(self._process)
        self._connection = self._process = None
        self._to_launch = False
        self._state = State(limits=self._state.limits, next_id=self._state.next_id, phase=Phase.FAILED, failure=failure)

    def _as_error(self, failure: Failure) -> RigError:
        if failure.message is not None:
            return BackendError(failure.kind, failure.message, **failure.facts)
        return RigError(failure.kind, **{"log": self._log or "what it prints in its terminal", **failure.facts})


def _as_failure(error: RigError) -> Failure:
    return Failure(error.kind, error.facts, error.message if isinstance(error, BackendError) else None)
