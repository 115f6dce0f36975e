# SPDX-License-Identifier: GPL-3.0-or-later
"""What happens between the add-on and its backend, as a pure function: `step(state, event) -> (state, effects)`.

Nothing in here reads a clock, a socket or a process: events say what was seen and when, effects say what to do. So every
situation can be tried in a table (tests/addon/test_link_session.py). No bpy in here.

                   Submit            Addressed            Connected           both proofs
    OFF, FAILED ──────────► STARTING ─────────► CONNECTING ─────────► GREETING ───────────► READY ◄────────┐
                                                                                    Cancel │  ▲ it settled │
                                                                                           ▼  │            │
    Stop: ──► STOPPING ──► OFF                                                           CANCELLING ───────┘
    death, silence, nonsense: FAILED; or STARTING again while requests wait that the backend has never seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from .wire import NONCE_BYTES, PROTOCOL, client_proof, hex_bytes, same_proof, server_proof

CLIENT_NAME = "rigfit add-on"
TEXT_LENGTH = 200


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds."""

    start_s: float = 60.0
    connect_s: float = 5.0
    hello_s: float = 5.0
    # A connection that closes before the hello is over is tried again: Blender may have been busy for longer than the
    # backend waits for a hello.
    attempts: int = 3
    retry_s: float = 0.5
    ping_s: float = 5.0
    silence_s: float = 30.0
    cancel_s: float = 5.0
    stop_s: float = 2.0
    # A connection usually closes because the process ends; so long its exit code is waited for.
    lost_s: float = 0.5


class Phase(StrEnum):
    """The states."""

    OFF = "off"
    STARTING = "starting"
    CONNECTING = "connecting"
    GREETING = "greeting"
    READY = "ready"
    CANCELLING = "cancelling"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True)
class Failure:
    """An error as data: a kind of messages.MESSAGES with its facts, or a kind of the backend with its own sentence."""

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    message: str | None = None


@dataclass(frozen=True)
class Request:
    """One request of the add-on. ticket: its number on this side; id: its number on the wire, once sent."""

    ticket: int
    method: str
    params: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    blobs: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False, repr=False)
    id: int | None = None


@dataclass(frozen=True)
class State:
    """Everything that is known. running: what the backend works on; waiting: what it has not seen yet.

    since: when the phase began. heard_at: the last sign of life. ping: number and time of the ping without an answer.
    lost_at: when the connection closed, while the exit of the process is waited for.
    """

    limits: Limits = field(default_factory=Limits)
    phase: Phase = Phase.OFF
    since: float = 0.0
    attached: bool = False
    waiting: tuple[Request, ...] = ()
    running: Request | None = None
    failure: Failure | None = None
    next_id: int = 1
    # The way to the backend and the hello.
    port: int = 0
    token: bytes = field(default=b"", repr=False)
    nonce: bytes = b""
    hello_id: int | None = None
    authenticate_id: int | None = None
    attempts: int = 0
    retry_at: float | None = None
    server: str = ""
    # While it works.
    progress: tuple[int, int, str] = (0, 0, "")
    heard_at: float = 0.0
    pinged_at: float = 0.0
    ping_id: int | None = None
    lost_at: float | None = None
    lost_reason: str = ""


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """Something that was seen. now: seconds, on a clock that only goes forward."""

    now: float


@dataclass(frozen=True)
class Submit(Event):
    """The add-on wants something done."""

    request: Request


@dataclass(frozen=True)
class Cancel(Event):
    """The add-on no longer wants the answer."""

    ticket: int


@dataclass(frozen=True)
class Stop(Event):
    """End the backend gently."""


@dataclass(frozen=True)
class Halt(Event):
    """End the backend at once."""


@dataclass(frozen=True)
class Launched(Event):
    """There is a process; or, attached, one that somebody else started."""

    attached: bool


@dataclass(frozen=True)
class Unlaunched(Event):
    """There will be none, or not one that can be talked to."""

    failure: Failure


@dataclass(frozen=True)
class Addressed(Event):
    """It says where it listens."""

    port: int
    protocol: int
    token: bytes = field(repr=False)


@dataclass(frozen=True)
class Connected(Event):
    """The connection stands. nonce: 32 fresh random bytes."""

    nonce: bytes


@dataclass(frozen=True)
class Received(Event):
    """A message came."""

    message: Mapping[str, Any]
    blobs: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Broken(Event):
    """What came is no message."""

    reason: str


@dataclass(frozen=True)
class Closed(Event):
    """The connection is gone, or could not be made."""

    reason: str


@dataclass(frozen=True)
class Exited(Event):
    """The process has ended. reason: how, in words."""

    code: int
    reason: str


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed."""


# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """Start the process, or read the attach file."""


@dataclass(frozen=True)
class Connect:
    port: int


@dataclass(frozen=True)
class Send:
    message: Mapping[str, Any]
    blobs: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Trust:
    """The other side has proved who it is: large frames may come."""


@dataclass(frozen=True)
class Disconnect:
    pass


@dataclass(frozen=True)
class CloseInput:
    """Close the process's standard input: it ends by itself."""


@dataclass(frozen=True)
class Kill:
    """End the process, if there is one."""


@dataclass(frozen=True)
class Began:
    ticket: int


@dataclass(frozen=True)
class Progressed:
    ticket: int
    progress: tuple[int, int, str]


@dataclass(frozen=True)
class Done:
    ticket: int
    result: Mapping[str, Any]
    blobs: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Failed:
    ticket: int
    failure: Failure


@dataclass(frozen=True)
class Cancelled:
    ticket: int


Effect = (
    Launch | Connect | Send | Trust | Disconnect | CloseInput | Kill | Began | Progressed | Done | Failed | Cancelled
)
Effects = tuple[Effect, ...]
Outcome = tuple[State, Effects]


# --- the function -----------------------------------------------------------------------------------------------------


def step(state: State, event: Event) -> Outcome:
    """The next state and what to do. An event that means nothing in this phase changes nothing."""
    handler = _HANDLERS.get(type(event))
    if handler is None:
        raise TypeError(f"{type(event).__name__} is no event")
    return handler(state, event)


def _submit(state: State, event: Submit) -> Outcome:
    state = replace(state, waiting=(*state.waiting, event.request))
    if state.phase in (Phase.OFF, Phase.FAILED):
        return _launch(state, event.now)
    return _send_next(state, event.now)


def _cancel(state: State, event: Cancel) -> Outcome:
    kept = tuple(request for request in state.waiting if request.ticket != event.ticket)
    if len(kept) < len(state.waiting):
        return replace(state, waiting=kept), (Cancelled(event.ticket),)
    running = state.running
    if state.phase is not Phase.READY or running is None or running.ticket != event.ticket:
        return state, ()
    if state.lost_at is not None:
        # Nobody is there any more to be told.
        return replace(state, running=None), (Cancelled(event.ticket),)
    state, cancel = _control(state, "cancel", {"id": running.id})
    return _enter(state, Phase.CANCELLING, event.now), (Cancelled(event.ticket), cancel)


def _stop(state: State, event: Stop) -> Outcome:
    if state.phase is Phase.FAILED:
        return _enter(state, Phase.OFF, event.now), ()
    if state.phase in (Phase.OFF, Phase.STOPPING):
        return replace(state, waiting=()), _cancel_all(state)
    effects = _cancel_all(state)
    talking = state.phase in (Phase.READY, Phase.CANCELLING) and state.lost_at is None
    state = replace(state, waiting=(), running=None)
    if state.attached:
        # Somebody else's process: only the connection is ours to end.
        return _enter(state, Phase.OFF, event.now), (*effects, Disconnect())
    if talking:
        state, shutdown = _control(state, "shutdown", {})
        effects = (*effects, shutdown)
    return _enter(state, Phase.STOPPING, event.now), (*effects, CloseInput())


def _halt(state: State, event: Halt) -> Outcome:
    effects = _cancel_all(state)
    return _enter(replace(state, waiting=(), running=None), Phase.OFF, event.now), (*effects, Disconnect(), Kill())


def _launched(state: State, event: Launched) -> Outcome:
    if state.phase is not Phase.STARTING:
        return state, ()
    return replace(state, attached=event.attached), ()


def _unlaunched(state: State, event: Unlaunched) -> Outcome:
    if state.phase is Phase.STOPPING:
        return _after_stop(state, event.now)
    if state.phase is not Phase.STARTING:
        return state, ()
    return _give_up(state, event.now, event.failure)


def _addressed(state: State, event: Addressed) -> Outcome:
    if state.phase is not Phase.STARTING:
        return state, ()
    if event.protocol != PROTOCOL:
        return _give_up(state, event.now, Failure("backend_protocol", {"theirs": event.protocol, "ours": PROTOCOL}))
    state = replace(state, port=event.port, token=event.token, attempts=1, retry_at=None)
    return _enter(state, Phase.CONNECTING, event.now), (Connect(event.port),)


def _connected(state: State, event: Connected) -> Outcome:
    if state.phase is not Phase.CONNECTING:
        return state, ()
    params = {"protocol": PROTOCOL, "client": CLIENT_NAME, "nonce": event.nonce.hex()}
    hello_id = state.next_id
    state, hello = _control(state, "hello", params)
    state = replace(state, nonce=event.nonce, hello_id=hello_id, authenticate_id=None)
    return _enter(state, Phase.GREETING, event.now), (hello,)


def _received(state: State, event: Received) -> Outcome:
    if state.phase is Phase.GREETING:
        return _greeting(state, event)
    if state.phase not in (Phase.READY, Phase.CANCELLING):
        return state, ()
    if state.heard_at != event.now:
        state = replace(state, heard_at=event.now)
    message = event.message
    if message.get("method") == "progress" and "id" not in message:
        return _progress(state, message.get("params"))
    if "method" in message:
        # Not of this protocol version, which is equal on both sides; nothing depends on it.
        return state, ()
    number = message.get("id")
    if type(number) is not int:
        return state, ()
    if number == state.ping_id:
        return replace(state, ping_id=None), ()
    if state.running is None or number != state.running.id:
        return state, ()
    return _answered(state, event)


def _answered(state: State, event: Received) -> Outcome:
    """The backend has settled what it was working on."""
    assert state.running is not None
    ticket = state.running.ticket
    late = state.phase is Phase.CANCELLING
    state = replace(state, running=None, progress=(0, 0, ""))
    if late:
        # Cancelled long ago for those who look at the panel.
        return _send_next(_enter(state, Phase.READY, event.now), event.now)
    outcome: Effect
    if "error" in event.message:
        failure = _backend_failure(event.message["error"])
        outcome = Cancelled(ticket) if failure.kind == "cancelled" else Failed(ticket, failure)
    elif isinstance(event.message.get("result"), dict):
        outcome = Done(ticket, event.message["result"], event.blobs)
    else:
        outcome = Failed(ticket, Failure("backend_broken", {"reason": "an answer without a result"}))
    state, effects = _send_next(state, event.now)
    return state, (outcome, *effects)


def _progress(state: State, params: Any) -> Outcome:
    running = state.running
    if state.phase is not Phase.READY or running is None or not isinstance(params, dict):
        return state, ()
    done, total = params.get("done"), params.get("total")
    if params.get("id") != running.id or type(done) is not int or type(total) is not int:
        return state, ()
    text = clean_text(params.get("text", ""))
    # The backend's command line writes its steps small; the panel's phrases begin large.
    progress = (max(0, done), max(0, total), text[:1].upper() + text[1:])
    if progress == state.progress:
        return state, ()
    return replace(state, progress=progress), (Progressed(running.ticket, progress),)


def _greeting(state: State, event: Received) -> Outcome:
    message = event.message
    number = message.get("id")
    error = message.get("error")
    if error is not None:
        return _give_up(state, event.now, _refusal(error))
    result = message.get("result")
    if not isinstance(result, dict):
        return _give_up(state, event.now, Failure("backend_no_hello", {"reason": "an answer without a result"}))
    if state.authenticate_id is None and number == state.hello_id:
        return _check_hello(state, event.now, result)
    if number is not None and number == state.authenticate_id:
        state = replace(state, heard_at=event.now, ping_id=None, lost_at=None, token=b"", nonce=b"")
        state, effects = _send_next(_enter(state, Phase.READY, event.now), event.now)
        return state, (Trust(), *effects)
    return _give_up(state, event.now, Failure("backend_no_hello", {"reason": "an answer to no question"}))


def _check_hello(state: State, now: float, result: Mapping[str, Any]) -> Outcome:
    if result.get("protocol") != PROTOCOL:
        theirs = clean_text(str(result.get("protocol")), 20)
        return _give_up(state, now, Failure("backend_protocol", {"theirs": theirs, "ours": PROTOCOL}))
    nonce = hex_bytes(result.get("nonce"), NONCE_BYTES)
    if nonce is None:
        return _give_up(state, now, Failure("backend_no_hello", {"reason": "an answer without a nonce"}))
    if not same_proof(server_proof(state.token, state.nonce, nonce), result.get("proof")):
        return _give_up(state, now, Failure("backend_proof"))
    authenticate_id = state.next_id
    state, authenticate = _control(state, "authenticate", {"proof": client_proof(state.token, state.nonce, nonce)})
    return replace(state, authenticate_id=authenticate_id, server=clean_text(str(result.get("server", "")))), (
        authenticate,
    )


def _broken(state: State, event: Broken) -> Outcome:
    if state.phase in (Phase.CONNECTING, Phase.GREETING):
        return _give_up(state, event.now, Failure("backend_no_hello", {"reason": event.reason}))
    if state.phase in (Phase.READY, Phase.CANCELLING):
        return _die(state, event.now, Failure("backend_broken", {"reason": event.reason}))
    return state, (Disconnect(),)


def _closed(state: State, event: Closed) -> Outcome:
    if state.phase in (Phase.CONNECTING, Phase.GREETING):
        if state.attempts < state.limits.attempts:
            state = replace(state, retry_at=event.now + state.limits.retry_s)
            return _enter(state, Phase.CONNECTING, event.now), (Disconnect(),)
        kind = "backend_unreachable" if state.phase is Phase.CONNECTING else "backend_no_hello"
        return _give_up(state, event.now, Failure(kind, {"reason": event.reason}))
    if state.phase in (Phase.READY, Phase.CANCELLING) and state.lost_at is None:
        if state.attached and state.running is None:
            return _after_stop(state, event.now)
        if state.attached:
            return _die(state, event.now, Failure("backend_died", {"reason": event.reason}))
        return replace(state, lost_at=event.now, lost_reason=event.reason), (Disconnect(),)
    return state, (Disconnect(),)


def _exited(state: State, event: Exited) -> Outcome:
    if state.phase in (Phase.STARTING, Phase.CONNECTING, Phase.GREETING):
        return _give_up(state, event.now, Failure("backend_start_ended", {"reason": event.reason}))
    if state.phase in (Phase.READY, Phase.CANCELLING):
        if event.code == 0 and state.running is None:
            # It ended in good order with nothing to do: no reason to alarm anybody.
            return _after_stop(state, event.now)
        return _die(state, event.now, Failure("backend_died", {"reason": event.reason}))
    if state.phase is Phase.STOPPING:
        return _after_stop(state, event.now)
    return state, ()


def _tick(state: State, event: Tick) -> Outcome:
    now, limits = event.now, state.limits
    age = now - state.since
    if state.phase is Phase.STARTING and age > limits.start_s:
        return _give_up(state, now, Failure("backend_start_slow", {"seconds": round(limits.start_s)}))
    if state.phase is Phase.CONNECTING:
        if state.retry_at is not None and now >= state.retry_at:
            state = replace(state, retry_at=None, attempts=state.attempts + 1)
            return _enter(state, Phase.CONNECTING, now), (Connect(state.port),)
        if state.retry_at is None and age > limits.connect_s:
            return _give_up(state, now, Failure("backend_unreachable", {"reason": f"{age:.0f} s without an answer"}))
    if state.phase is Phase.GREETING and age > limits.hello_s:
        return _give_up(state, now, Failure("backend_no_hello", {"reason": f"{age:.0f} s without an answer"}))
    if state.phase is Phase.STOPPING and age > limits.stop_s:
        return _after_stop(state, now)
    if state.lost_at is not None and now - state.lost_at > limits.lost_s:
        return _die(state, now, Failure("backend_died", {"reason": state.lost_reason}))
    if state.phase is Phase.CANCELLING and age > limits.cancel_s:
        # It does not listen; ending it is the only way to give the processor back.
        return _die(state, now, Failure("backend_died", {"reason": "it did not stop"}))
    if state.running is not None and state.ping_id is None and now - state.pinged_at >= limits.ping_s:
        ping_id = state.next_id
        state, ping = _control(state, "ping", {})
        return replace(state, ping_id=ping_id, pinged_at=now), (ping,)
    return state, ()


# The events' types are checked by this table.
_HANDLERS: dict[type[Event], Callable[[State, Any], Outcome]] = {
    Submit: _submit,
    Cancel: _cancel,
    Stop: _stop,
    Halt: _halt,
    Launched: _launched,
    Unlaunched: _unlaunched,
    Addressed: _addressed,
    Connected: _connected,
    Received: _received,
    Broken: _broken,
    Closed: _closed,
    Exited: _exited,
    Tick: _tick,
}


# --- parts of it ------------------------------------------------------------------------------------------------------


def _enter(state: State, phase: Phase, now: float) -> State:
    if phase in (Phase.OFF, Phase.FAILED, Phase.STOPPING):
        state = replace(state, token=b"", nonce=b"", server="", ping_id=None, lost_at=None)
        state = replace(state, progress=(0, 0, ""), attached=state.attached and phase is Phase.STOPPING)
    return replace(state, phase=phase, since=now, failure=state.failure if phase is Phase.FAILED else None)


def _control(state: State, method: str, params: Mapping[str, Any]) -> tuple[State, Send]:
    message = {"jsonrpc": "2.0", "id": state.next_id, "method": method, "params": dict(params)}
    return replace(state, next_id=state.next_id + 1), Send(message)


def _launch(state: State, now: float) -> Outcome:
    state = replace(state, ping_id=None, lost_at=None, progress=(0, 0, ""), attached=False, server="")
    return _enter(state, Phase.STARTING, now), (Launch(),)


def _send_next(state: State, now: float) -> Outcome:
    """One request at a time: what the backend has not seen survives its death."""
    if state.phase is not Phase.READY or state.running or state.lost_at is not None or not state.waiting:
        return state, ()
    first = state.waiting[0]
    message = {"jsonrpc": "2.0", "id": state.next_id, "method": first.method, "params": dict(first.params)}
    state = replace(
        state,
        running=replace(first, id=state.next_id),
        waiting=state.waiting[1:],
        next_id=state.next_id + 1,
        progress=(0, 0, ""),
        # While nothing runs, nobody asks whether it is alive.
        heard_at=now,
        pinged_at=now,
        ping_id=None,
    )
    return state, (Send(message, first.blobs), Began(first.ticket))


def _cancel_all(state: State) -> Effects:
    running = () if state.running is None or state.phase is Phase.CANCELLING else (state.running,)
    return tuple(Cancelled(request.ticket) for request in (*running, *state.waiting))


def _give_up(state: State, now: float, failure: Failure) -> Outcome:
    """No connection came about: another start would meet the same, so everything that waits fails."""
    effects = tuple(Failed(request.ticket, failure) for request in state.waiting)
    state = _enter(replace(state, waiting=(), failure=failure), Phase.FAILED, now)
    return state, (*effects, Disconnect(), Kill())


def _die(state: State, now: float, failure: Failure) -> Outcome:
    """A connection that stood is over. What ran fails (a cancelled request has its end already); what waits starts anew."""
    running, cancelled = state.running, state.phase is Phase.CANCELLING
    effects: Effects = (Disconnect(), Kill())
    if running is not None and not cancelled:
        effects = (Failed(running.ticket, failure), *effects)
    state = replace(state, running=None)
    if state.waiting:
        state, launch = _launch(state, now)
        return state, (*effects, *launch)
    if cancelled:
        return _enter(state, Phase.OFF, now), effects
    return _enter(replace(state, failure=failure), Phase.FAILED, now), effects


def _after_stop(state: State, now: float) -> Outcome:
    effects: Effects = (Disconnect(), Kill())
    if state.waiting:
        state, launch = _launch(state, now)
        return state, (*effects, *launch)
    return _enter(state, Phase.OFF, now), effects


def _refusal(error: Any) -> Failure:
    """An error instead of a hello. Whoever says it has proved nothing yet, so none of its words are shown."""
    data = error.get("data") if isinstance(error, dict) else None
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == "in_use":
        return Failure("backend_in_use")
    if kind == "bad_protocol":
        return Failure("backend_protocol", {"theirs": "another", "ours": PROTOCOL})
    if kind == "bad_proof":
        return Failure("backend_proof")
    return Failure("backend_no_hello", {"reason": "it refused"})


def _backend_failure(error: Any) -> Failure:
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        data = error.get("data")
        kind = data.get("kind") if isinstance(data, dict) else None
        return Failure(clean_text(kind) or "unexpected", {}, clean_text(error["message"], 2000))
    return Failure("backend_broken", {"reason": "an error without a sentence"})


def clean_text(value: Any, length: int = TEXT_LENGTH) -> str:
    """Text of the other side as one printable line of at most `length` characters; empty if it is none."""
    text = value if isinstance(value, str) else ""
    return "".join(c if c.isprintable() else " " for c in text[: 2 * length]).strip()[:length]


# --- what it looks like -----------------------------------------------------------------------------------------------

WORK_TEXTS = {
    "doctor": "Checking the backend",
    "rig.default": "Preparing the default head",
    "rig.register": "Reading the rig",
    "fit": "Fitting the photo",
    "verify": "Rendering the result",
}
SLOW_START_S = 8.0


def answering(state: State, now: float) -> bool:
    """Whether the backend talks: it is connected, and while it works something came within the last 30 seconds.

    Not the same as being alive: a long call into C keeps it from talking, and it goes on.
    """
    if state.phase not in (Phase.READY, Phase.CANCELLING) or state.lost_at is not None:
        return False
    return state.running is None or now - state.heard_at <= state.limits.silence_s


def describe(state: State, now: float) -> str:
    """What is going on, in one short phrase; empty for a failure, which has its own sentence."""
    if state.phase is Phase.READY:
        if state.running is None:
            return "Ready"
        if not answering(state, now):
            return f"Busy, not answering for {now - state.heard_at:.0f} s"
        return state.progress[2] or WORK_TEXTS.get(state.running.method, "Working")
    if state.phase is Phase.STARTING and now - state.since > SLOW_START_S:
        return "Starting the backend: the first time takes longest"
    return {
        Phase.OFF: "Off",
        Phase.STARTING: "Starting the backend",
        Phase.CONNECTING: "Connecting to the backend",
        Phase.GREETING: "Connecting to the backend",
        Phase.CANCELLING: "Cancelling",
        Phase.STOPPING: "Stopping the backend",
    }.get(state.phase, "")
