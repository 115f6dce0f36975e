# SPDX-License-Identifier: Apache-2.0
"""The session as a table: every phase with every event that matters in it."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import itertools
import random

import pytest

from blender_addon.link import session
from blender_addon.link.session import (
    Addressed,
    Began,
    Broken,
    Cancel,
    Cancelled,
    Closed,
    CloseInput,
    Connect,
    Connected,
    Disconnect,
    Done,
    Exited,
    Failed,
    Failure,
    Halt,
    Kill,
    Launch,
    Launched,
    Limits,
    Phase,
    Progressed,
    Received,
    Request,
    Send,
    State,
    Stop,
    Submit,
    Tick,
    Trust,
    Unlaunched,
    answering,
    describe,
    step,
)

TOKEN, MINE, THEIRS = b"t" * 32, b"m" * 32, b"s" * 32


def proof(who: str, token: bytes = TOKEN) -> str:
    return hmac.new(token, f"rigfit {who}".encode() + MINE + THEIRS, hashlib.sha256).hexdigest()


def hello(number: int, **changes: object) -> dict:
    result = {"protocol": 1, "server": "rigfit 0.1", "pid": 5, "nonce": THEIRS.hex(), "proof": proof("server")}
    return {"jsonrpc": "2.0", "id": number, "result": {**result, **changes}}


def error(number: object, kind: str, message: str = "No.", code: int = 1) -> dict:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message, "data": {"kind": kind}}}


def request(ticket: int, method: str = "fit") -> Request:
    return Request(ticket, method, {"a": ticket})


def play(state: State, *events: session.Event) -> tuple[State, list]:
    effects: list = []
    for event in events:
        state, more = step(state, event)
        effects += more
    return state, effects


def wire(effects: list) -> list[tuple[str, int, dict]]:
    """What goes out, as (method, id, params)."""
    return [(e.message["method"], e.message["id"], e.message["params"]) for e in effects if isinstance(e, Send)]


def reach(phase: str, *, attached: bool = False, waiting: int = 0) -> State:
    """A session in that phase at time 10, by the events that lead there.

    Ticket 1 was submitted first, and is what runs in "working" and was running in "cancelling". `waiting` more requests,
    tickets 2, 3, …, wait.
    """
    state = State()
    if phase == "off":
        return state
    steps: list[tuple[str, session.Event]] = [
        ("starting", Submit(0.0, request(1))),
        ("starting", Launched(0.5, attached)),
        ("connecting", Addressed(10.0, 5000, 1, TOKEN)),
        ("greeting", Connected(10.0, MINE)),
    ]
    last = {"starting": 1, "connecting": 2, "greeting": 3}.get(phase, 3)
    if phase == "failed":
        return play(state, Submit(0.0, request(1)), Exited(10.0, 1, "exit code 1"))[0]
    for _, event in steps[: last + 1]:
        state, _ = step(state, event)
    if phase == "greeting" or last < 3:
        state, _ = play(state, *(Submit(10.0, request(2 + i)) for i in range(waiting)))
        return state
    state, _ = play(state, Received(10.0, hello(1)), Received(10.0, {"id": 2, "result": {}}))
    assert state.running.id == 3
    if phase == "ready":
        state, _ = play(state, Received(10.0, {"id": 3, "result": {}}))
        return state
    state, _ = play(state, *(Submit(10.0, request(2 + i)) for i in range(waiting)))
    if phase == "cancelling":
        state, _ = play(state, Cancel(10.0, 1))
    if phase == "stopping":
        state, _ = play(state, Stop(10.0))
    return state


REACHABLE = ("off", "starting", "connecting", "greeting", "ready", "working", "cancelling", "stopping", "failed")


@pytest.mark.parametrize("phase", REACHABLE)
def test_the_helper_reaches_each_phase(phase):
    assert reach(phase).phase == {"working": "ready"}.get(phase, phase)


# --- the good way -----------------------------------------------------------------------------------------------------


def test_from_the_first_request_to_its_answer():
    state, effects = step(State(), Submit(0.0, request(1)))
    assert (state.phase, effects) == (Phase.STARTING, (Launch(),))
    state, effects = step(state, Launched(0.1, False))
    assert (state.phase, effects) == (Phase.STARTING, ())
    state, effects = step(state, Addressed(3.0, 5000, 1, TOKEN))
    assert (state.phase, effects) == (Phase.CONNECTING, (Connect(5000),))
    state, effects = step(state, Connected(3.1, MINE))
    assert state.phase == Phase.GREETING
    assert wire(effects) == [("hello", 1, {"protocol": 1, "client": "rigfit add-on", "nonce": MINE.hex()})]
    state, effects = step(state, Received(3.2, hello(1)))
    assert wire(effects) == [("authenticate", 2, {"proof": proof("client")})]
    state, effects = step(state, Received(3.3, {"jsonrpc": "2.0", "id": 2, "result": {}}))
    assert state.phase == Phase.READY
    assert effects[0] == Trust()
    assert wire(effects) == [("fit", 3, {"a": 1})]
    assert effects[-1] == Began(1)
    note = {"jsonrpc": "2.0", "method": "progress", "params": {"id": 3, "done": 1, "total": 4, "text": "looking"}}
    state, effects = step(state, Received(3.4, note))
    assert effects == (Progressed(1, (1, 4, "Looking")),)
    assert describe(state, 3.4) == "Looking"
    assert step(state, Received(3.4, note))[1] == ()
    state, effects = step(state, Received(3.5, {"jsonrpc": "2.0", "id": 3, "result": {"x": 1}}, {"b": "array"}))
    assert effects == (Done(1, {"x": 1}),)
    assert effects[0].blobs == {"b": "array"}
    assert (state.phase, state.running, state.waiting) == (Phase.READY, None, ())
    assert describe(state, 3.5) == "Ready"


def test_one_request_at_a_time_in_order():
    state = reach("working", waiting=2)
    state, effects = play(state, Received(11.0, {"id": 3, "result": {}}))
    assert effects[0] == Done(1, {})
    assert wire(effects) == [("fit", 4, {"a": 2})]
    assert effects[-1] == Began(2)
    state, effects = play(state, Received(12.0, error(4, "no_face", "No face: take another photo.")))
    assert effects[0] == Failed(2, Failure("no_face", {}, "No face: take another photo."))
    assert wire(effects) == [("fit", 5, {"a": 3})]


def test_numbers_on_the_wire_only_count_up():
    state, effects = State(), []
    for event in (
        Submit(0.0, request(1)),
        Submit(0.0, request(2)),
        Cancel(0.0, 1),
        Submit(0.0, request(3)),
        Launched(0.0, False),
        Addressed(0.0, 1, 1, TOKEN),
        Connected(0.0, MINE),
        Received(0.0, hello(1)),
        Received(0.0, {"id": 2, "result": {}}),
        Tick(6.0),
        Cancel(6.0, 2),
        Received(7.0, {"id": 3, "result": {}}),
        Tick(20.0),
        Stop(21.0),
    ):
        state, more = step(state, event)
        effects += more
    numbers = [number for _, number, _ in wire(effects)]
    assert numbers == sorted(set(numbers))
    assert [m for m, _, _ in wire(effects)] == [
        *("hello", "authenticate", "fit", "ping", "cancel", "fit", "ping", "shutdown"),
    ]


# --- what comes to nothing before the hello is over -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "event", "kind"),
    [
        ("starting", Unlaunched(11.0, Failure("backend_missing")), "backend_missing"),
        ("starting", Exited(11.0, 3, "exit code 3"), "backend_start_ended"),
        ("starting", Exited(11.0, 0, "exit code 0"), "backend_start_ended"),
        ("starting", Addressed(11.0, 5000, 2, TOKEN), "backend_protocol"),
        ("starting", Tick(60.1), "backend_start_slow"),
        ("connecting", Exited(11.0, -9, "ended by SIGKILL"), "backend_start_ended"),
        ("connecting", Tick(15.1), "backend_unreachable"),
        ("greeting", Exited(11.0, -9, "ended by SIGKILL"), "backend_start_ended"),
        ("greeting", Tick(15.1), "backend_no_hello"),
        ("greeting", Broken(11.0, "it does not begin as a frame does"), "backend_no_hello"),
        ("greeting", Received(11.0, error(1, "in_use", code=3)), "backend_in_use"),
        ("greeting", Received(11.0, error(1, "bad_protocol", code=3)), "backend_protocol"),
        ("greeting", Received(11.0, error(1, "bad_proof", code=3)), "backend_proof"),
        ("greeting", Received(11.0, error(1, "not_authenticated", code=3)), "backend_no_hello"),
        ("greeting", Received(11.0, {"id": 1, "error": "no"}), "backend_no_hello"),
        ("greeting", Received(11.0, {"id": 1, "error": {"data": {"kind": ["in_use"]}}}), "backend_no_hello"),
        ("greeting", Received(11.0, hello(1, protocol=2)), "backend_protocol"),
        ("greeting", Received(11.0, hello(1, protocol="1")), "backend_protocol"),
        ("greeting", Received(11.0, hello(1, nonce="00")), "backend_no_hello"),
        ("greeting", Received(11.0, hello(1, nonce=None)), "backend_no_hello"),
        ("greeting", Received(11.0, hello(1, proof="0" * 64)), "backend_proof"),
        ("greeting", Received(11.0, hello(1, proof=None)), "backend_proof"),
        ("greeting", Received(11.0, hello(1, proof=proof("client"))), "backend_proof"),
        ("greeting", Received(11.0, hello(1, proof=proof("server", b"x" * 32))), "backend_proof"),
        ("greeting", Received(11.0, hello(2)), "backend_no_hello"),
        ("greeting", Received(11.0, {"id": 1, "result": []}), "backend_no_hello"),
        ("greeting", Received(11.0, {"method": "progress", "params": {}}), "backend_no_hello"),
        # Our own hello, back from a socket that is connected to itself.
        ("greeting", Received(11.0, {"id": 1, "method": "hello", "params": {}}), "backend_no_hello"),
    ],
)
def test_failures_before_the_hello(phase, event, kind):
    state, effects = step(reach(phase, waiting=1), event)
    assert state.phase == Phase.FAILED
    assert state.failure.kind == kind
    assert [e.ticket for e in effects if isinstance(e, Failed)] == [1, 2]
    assert {e.failure.kind for e in effects if isinstance(e, Failed)} == {kind}
    assert effects[-2:] == (Disconnect(), Kill())
    assert state.waiting == ()
    assert not wire(effects)
    assert state.token == b""


def test_nothing_is_asked_before_the_proof_is_seen():
    """What waits is sent after `authenticate` is answered, not after the hello."""
    state, effects = step(reach("greeting"), Received(11.0, hello(1)))
    assert [method for method, _, _ in wire(effects)] == ["authenticate"]
    state, effects = step(state, Received(11.0, error(2, "bad_proof", code=3)))
    assert (state.phase, state.failure.kind) == (Phase.FAILED, "backend_proof")
    # The hello twice does not count as the second answer.
    state, effects = play(reach("greeting"), Received(11.0, hello(1)), Received(11.0, hello(1)))
    assert (state.phase, state.failure.kind) == (Phase.FAILED, "backend_no_hello")


def test_a_stranger_sends_no_words_to_the_panel():
    state, _ = step(reach("greeting"), Received(11.0, error(1, "pwned", "Visit example.org")))
    assert "example" not in str(state.failure)


@pytest.mark.parametrize(
    ("phase", "before"), [("starting", 59.9), ("connecting", 14.9), ("greeting", 14.9), ("stopping", 11.9)]
)
def test_not_a_moment_too_early(phase, before):
    state = reach(phase)
    assert step(state, Tick(before)) == (state, ())


def test_a_closed_connection_is_tried_again_three_times_in_all():
    state = reach("connecting")
    for attempt in (1, 2):
        state, effects = step(state, Closed(11.0 * attempt, "connection refused"))
        assert (state.phase, effects) == (Phase.CONNECTING, (Disconnect(),))
        assert step(state, Tick(11.0 * attempt + 0.4))[1] == ()
        state, effects = step(state, Tick(11.0 * attempt + 0.6))
        assert effects == (Connect(5000),)
    state, effects = step(state, Closed(40.0, "connection refused"))
    assert state.failure == Failure("backend_unreachable", {"reason": "connection refused"})


def test_a_second_attempt_can_succeed():
    state, _ = play(reach("greeting"), Closed(11.0, "closed"), Tick(12.0))
    state, effects = step(state, Connected(12.0, MINE))
    assert [(m, n) for m, n, _ in wire(effects)] == [("hello", 2)]
    # The answer to the first hello is no answer to the second.
    assert step(state, Received(12.0, hello(1)))[0].failure.kind == "backend_no_hello"
    state, effects = play(state, Received(12.0, hello(2)), Received(12.0, {"id": 3, "result": {}}))
    assert state.phase == Phase.READY
    assert Began(1) in effects


# --- cancel -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["starting", "connecting", "greeting", "working", "cancelling"])
def test_what_waits_is_cancelled_without_a_word(phase):
    state, effects = step(reach(phase, waiting=2), Cancel(11.0, 3))
    assert effects == (Cancelled(3),)
    assert 3 not in [r.ticket for r in state.waiting]
    assert 2 in [r.ticket for r in state.waiting]


def test_what_runs_is_cancelled_at_once_and_the_backend_is_told():
    state, effects = step(reach("working", waiting=1), Cancel(11.0, 1))
    assert state.phase == Phase.CANCELLING
    assert effects[0] == Cancelled(1)
    assert wire(effects) == [("cancel", 4, {"id": 3})]
    assert describe(state, 11.0) == "Cancelling"


@pytest.mark.parametrize(
    "answer", [{"id": 3, "result": {"late": 1}}, error(3, "cancelled", code=2), error(3, "no_face")]
)
def test_a_late_answer_is_dropped_and_the_next_request_goes_out(answer):
    state = reach("cancelling", waiting=1)
    found = {"id": 4, "result": {"found": True}}
    state, effects = play(state, Received(10.5, found), Received(11.0, answer))
    assert not [e for e in effects if isinstance(e, Done | Failed | Cancelled)]
    assert wire(effects) == [("fit", 5, {"a": 2})]
    assert state.phase == Phase.READY
    # Once more: nobody waits for it now.
    assert step(state, Received(12.0, answer))[1] == ()


def test_nothing_is_sent_while_a_cancel_is_under_way():
    state, effects = step(reach("cancelling"), Submit(11.0, request(2)))
    assert effects == ()
    assert [r.ticket for r in state.waiting] == [2]


def test_progress_of_what_is_cancelled_is_dropped():
    note = {"method": "progress", "params": {"id": 3, "done": 1, "total": 4, "text": "still at it"}}
    state = reach("cancelling")
    after, effects = step(state, Received(11.0, note))
    assert effects == ()
    assert describe(after, 11.0) == "Cancelling"


@pytest.mark.parametrize("attached", [False, True])
def test_a_backend_that_does_not_stop_is_ended(attached):
    state = reach("cancelling", attached=attached)
    assert step(state, Tick(14.9))[0].phase == Phase.CANCELLING
    state, effects = step(state, Tick(15.1))
    assert (state.phase, effects) == (Phase.OFF, (Disconnect(), Kill()))


def test_what_waits_meanwhile_gets_a_new_backend():
    state, effects = step(reach("cancelling", waiting=2), Tick(15.1))
    assert (state.phase, effects) == (Phase.STARTING, (Disconnect(), Kill(), Launch()))
    assert [r.ticket for r in state.waiting] == [2, 3]


def test_cancelling_what_is_not_there_changes_nothing():
    for phase in REACHABLE:
        state = reach(phase)
        assert step(state, Cancel(11.0, 77)) == (state, ())
    state = reach("cancelling")
    assert step(state, Cancel(11.0, 1)) == (state, ())


def test_the_backend_may_cancel_by_itself():
    state, effects = step(reach("working"), Received(11.0, error(3, "cancelled", code=2)))
    assert effects == (Cancelled(1),)
    assert state.phase == Phase.READY


# --- death ------------------------------------------------------------------------------------------------------------


def test_death_fails_what_ran_and_restarts_for_what_waits():
    state, effects = step(reach("working", waiting=2), Exited(11.0, -11, "ended by SIGSEGV"))
    assert effects[0] == Failed(1, Failure("backend_died", {"reason": "ended by SIGSEGV"}))
    assert effects[1:] == (Disconnect(), Kill(), Launch())
    assert state.phase == Phase.STARTING
    assert [r.ticket for r in state.waiting] == [2, 3]
    assert state.running is None


def test_death_with_nothing_waiting_is_a_failure_until_the_next_request():
    state, effects = step(reach("working"), Exited(11.0, 0, "exit code 0"))
    assert (state.phase, state.failure.kind) == (Phase.FAILED, "backend_died")
    assert effects == (Failed(1, state.failure), Disconnect(), Kill())
    state, effects = step(state, Submit(12.0, request(2)))
    assert (state.phase, state.failure, effects) == (Phase.STARTING, None, (Launch(),))


@pytest.mark.parametrize(("code", "phase"), [(0, Phase.OFF), (1, Phase.FAILED), (-9, Phase.FAILED)])
def test_an_end_with_nothing_to_do_alarms_nobody_if_it_is_in_order(code, phase):
    state, effects = step(reach("ready"), Exited(11.0, code, "?"))
    assert state.phase == phase
    assert not [e for e in effects if isinstance(e, Failed)]


def test_a_closed_connection_waits_for_the_exit_code():
    state, effects = step(reach("working"), Closed(11.0, "closed"))
    assert effects == (Disconnect(),)
    assert not answering(state, 11.0)
    assert step(state, Tick(11.4))[1] == ()
    died, effects = step(state, Exited(11.3, -9, "ended by SIGKILL"))
    assert effects[0] == Failed(1, Failure("backend_died", {"reason": "ended by SIGKILL"}))
    lost, effects = step(state, Tick(11.6))
    assert effects == (Failed(1, Failure("backend_died", {"reason": "closed"})), Disconnect(), Kill())
    assert died.phase == lost.phase == Phase.FAILED


def test_requests_meanwhile_wait_and_cancel_meanwhile_works():
    state, _ = step(reach("working"), Closed(11.0, "closed"))
    state, effects = play(state, Submit(11.1, request(2)), Cancel(11.2, 1))
    assert effects == [Cancelled(1)]
    state, effects = step(state, Exited(11.3, -9, "?"))
    assert (state.phase, effects) == (Phase.STARTING, (Disconnect(), Kill(), Launch()))


def test_an_attached_backend_is_gone_with_its_connection():
    state, effects = step(reach("working", attached=True), Closed(11.0, "closed"))
    assert (state.phase, state.failure.kind) == (Phase.FAILED, "backend_died")
    assert effects[0] == Failed(1, state.failure)
    assert step(reach("ready", attached=True), Closed(11.0, "closed"))[0].phase == Phase.OFF


def test_death_while_cancelling_is_nobodys_failure():
    for event in (Exited(11.0, -9, "?"), Broken(11.0, "?")):
        state, effects = step(reach("cancelling"), event)
        assert (state.phase, effects) == (Phase.OFF, (Disconnect(), Kill()))


def test_nonsense_fails_what_ran():
    state, effects = step(reach("working", waiting=1), Broken(11.0, "it does not begin as a frame does"))
    assert effects[0] == Failed(1, Failure("backend_broken", {"reason": "it does not begin as a frame does"}))
    assert effects[1:] == (Disconnect(), Kill(), Launch())
    state, effects = step(reach("ready"), Broken(11.0, "?"))
    assert (state.phase, state.failure.kind) == (Phase.FAILED, "backend_broken")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ({"id": 3}, "backend_broken"),
        ({"id": 3, "result": None}, "backend_broken"),
        ({"id": 3, "result": [1]}, "backend_broken"),
        ({"id": 3, "error": None}, "backend_broken"),
        ({"id": 3, "error": {"code": 1}}, "backend_broken"),
        ({"id": 3, "error": {"message": "Sorry."}}, "unexpected"),
        ({"id": 3, "error": {"message": "Sorry.", "data": {"kind": 5}}}, "unexpected"),
        ({"id": 3, "error": {"message": "Sorry.", "data": {"kind": "bad_params"}}}, "bad_params"),
    ],
)
def test_odd_answers_fail_their_request_only(answer, kind):
    state, effects = step(reach("working"), Received(11.0, answer))
    assert state.phase == Phase.READY
    (failed,) = effects
    assert (failed.ticket, failed.failure.kind) == (1, kind)


def test_the_backends_sentence_is_shown_as_one_line():
    sentence = "No face\nin \x1b[31m" + "ü" * 5000
    _, effects = step(reach("working"), Received(11.0, error(3, "no_face", sentence)))
    shown = effects[0].failure.message
    assert shown.startswith("No face in  [31mü")
    assert len(shown) == 2000
    assert shown.isprintable()


@pytest.mark.parametrize(
    "message",
    [
        {"method": "progress", "params": {"id": 99, "done": 1, "total": 2, "text": "x"}},
        {"method": "progress", "params": {"id": 3, "done": 1.5, "total": 2, "text": "x"}},
        {"method": "progress", "params": {"id": 3, "done": True, "total": 2, "text": "x"}},
        {"method": "progress", "params": {"id": 3}},
        {"method": "progress", "params": None},
        {"method": "surprise"},
        {"method": "question", "id": 3},
        {"id": 99, "result": {}},
        {"id": "3", "result": {}},
        {"id": [3], "result": {}},
        {"id": None, "error": {"message": "?"}},
        {},
    ],
)
def test_what_nobody_asked_for_is_passed_over(message):
    state = reach("working")
    after, effects = step(state, Received(10.0, message))
    assert (after, effects) == (state, ())


# --- alive, answering -------------------------------------------------------------------------------------------------


def test_pings_while_it_works_one_at_a_time():
    state = reach("working")
    assert step(state, Tick(14.9))[1] == ()
    state, effects = step(state, Tick(15.0))
    assert wire(effects) == [("ping", 4, {})]
    # No second one while the first has no answer, however long.
    for now in (20.0, 30.0, 500.0):
        assert step(state, Tick(now))[1] == ()
    state, effects = play(state, Received(16.0, {"id": 4, "result": {"busy": True}}), Tick(19.9))
    assert effects == []
    assert wire(play(state, Tick(20.0))[1]) == [("ping", 5, {})]


def test_no_pings_while_it_rests():
    for phase in ("off", "ready", "starting", "greeting", "failed"):
        assert not wire(list(step(reach(phase), Tick(14.0))[1]))


def test_silence_is_said_and_is_not_death():
    state, _ = step(reach("working"), Tick(15.0))
    assert answering(state, 40.0)
    assert describe(state, 40.0) == "Fitting the photo"
    assert not answering(state, 40.1)
    assert describe(state, 45.0) == "Busy, not answering for 35 s"
    after, effects = step(state, Tick(10_000.0))
    assert (after.phase, effects) == (Phase.READY, ())
    # Progress is a sign of life as good as a ping.
    state, _ = step(
        state, Received(50.0, {"method": "progress", "params": {"id": 3, "done": 1, "total": 2, "text": "on"}})
    )
    assert answering(state, 79.0)
    assert describe(state, 79.0) == "On"


def test_rest_is_not_silence():
    state = reach("ready")
    assert answering(state, 5000.0)
    state, _ = step(state, Submit(5000.0, request(2)))
    assert answering(state, 5029.0)
    assert not answering(state, 5031.0)


@pytest.mark.parametrize("phase", ["off", "starting", "connecting", "greeting", "stopping", "failed"])
def test_only_a_proved_backend_answers(phase):
    assert not answering(reach(phase), 10.0)


def test_every_phase_has_its_phrase():
    phrases = {phase: describe(reach(phase), 0.0) for phase in REACHABLE}
    assert phrases == {
        "off": "Off",
        "starting": "Starting the backend",
        "connecting": "Connecting to the backend",
        "greeting": "Connecting to the backend",
        "ready": "Ready",
        "working": "Fitting the photo",
        "cancelling": "Cancelling",
        "stopping": "Stopping the backend",
        "failed": "",
    }
    assert "first time" in describe(reach("starting"), 10.0)


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "settled", "sent"),
    [
        ("starting", [1, 2], []),
        ("connecting", [1, 2], []),
        ("greeting", [1, 2], []),
        ("working", [1, 2], ["shutdown"]),
        ("cancelling", [2], ["shutdown"]),
        ("ready", [], ["shutdown"]),
    ],
)
def test_the_gentle_end(phase, settled, sent):
    state = reach(phase) if phase == "ready" else reach(phase, waiting=1)
    state, effects = step(state, Stop(11.0))
    assert state.phase == Phase.STOPPING
    assert [e.ticket for e in effects if isinstance(e, Cancelled)] == settled
    assert [method for method, _, _ in wire(effects)] == sent
    assert effects[-1] == CloseInput()
    gone, effects = step(state, Exited(11.5, 0, ""))
    assert (gone.phase, gone.failure) == (Phase.OFF, None)
    stuck, effects = step(state, Tick(13.1))
    assert (stuck.phase, effects) == (Phase.OFF, (Disconnect(), Kill()))


@pytest.mark.parametrize("phase", ["connecting", "greeting", "working", "cancelling", "ready"])
def test_an_attached_backend_is_only_left(phase):
    state, effects = step(reach(phase, attached=True), Stop(11.0))
    assert state.phase == Phase.OFF
    assert effects[-1] == Disconnect()
    assert not wire(effects)
    assert CloseInput() not in effects


def test_a_request_while_it_stops_starts_a_new_one():
    state, effects = step(reach("stopping"), Submit(11.0, request(2)))
    assert (state.phase, effects) == (Phase.STOPPING, ())
    for event in (Exited(11.5, 0, ""), Tick(12.1)):
        again, effects = step(state, event)
        assert (again.phase, effects) == (Phase.STARTING, (Disconnect(), Kill(), Launch()))
        assert [r.ticket for r in again.waiting] == [2]
    again, effects = step(state, Stop(11.2))
    assert (again.phase, again.waiting, effects) == (Phase.STOPPING, (), (Cancelled(2),))


def test_the_end_twice_or_of_nothing():
    assert step(reach("off"), Stop(11.0)) == (reach("off"), ())
    assert step(reach("stopping"), Stop(11.0)) == (reach("stopping"), ())
    state, effects = step(reach("failed"), Stop(11.0))
    assert (state.phase, state.failure, effects) == (Phase.OFF, None, ())


@pytest.mark.parametrize("phase", REACHABLE)
def test_the_end_at_once(phase):
    state, effects = step(reach(phase), Halt(11.0))
    assert state.phase == Phase.OFF
    assert effects[-2:] == (Disconnect(), Kill())
    assert (state.waiting, state.running, state.token) == ((), None, b"")


# --- in general -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["off", "failed", "stopping"])
def test_what_comes_late_means_nothing(phase):
    state = reach(phase)
    for event in (
        Launched(11.0, False),
        Addressed(11.0, 1, 1, TOKEN),
        Connected(11.0, MINE),
        Received(11.0, {"id": 3, "result": {}}),
        Tick(11.0),
    ):
        assert step(state, event) == (state, ()), event


def test_what_is_no_event():
    with pytest.raises(TypeError):
        step(State(), object())


def test_the_token_is_not_in_the_repr():
    text = repr(reach("greeting")) + repr(Addressed(0.0, 1, 1, b"secret" * 5))
    assert repr(TOKEN)[2:-1] not in text
    assert "secret" not in text


def test_states_and_effects_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        State().phase = Phase.READY
    with pytest.raises(dataclasses.FrozenInstanceError):
        Kill().x = 1


def test_any_order_of_events_keeps_the_promises():
    """Random walks: each ticket is settled once and not before it was submitted, a request is sent once, at most one runs,
    time limits end every phase that waits for somebody else."""
    numbers = itertools.count(1)
    seen: set[Phase] = set()
    for seed in range(150):
        chance = random.Random(seed)
        state, now = State(limits=Limits()), 0.0
        open_tickets: set[int] = set()
        began: set[int] = set()
        for _ in range(120):
            now += chance.choice((0.0, 0.1, 1.0, 3.0))
            last = state.next_id - 1
            likely: list[session.Event] = [
                Launched(now, chance.random() < 0.3),
                Addressed(now, 5000, 1, TOKEN),
                Connected(now, MINE),
                Received(now, hello(last)),
                Received(now, {"id": last, "result": {}}),
                Received(now, {"id": state.running.id if state.running else 0, "result": {}}),
            ]
            rare: list[session.Event] = [
                Received(now, error(chance.randint(1, last + 2), chance.choice(("cancelled", "no_face")))),
                Received(now, {"method": "progress", "params": {"id": last, "done": 1, "total": 2, "text": "x"}}),
                Unlaunched(now, Failure("backend_missing")),
                Broken(now, "?"),
                Closed(now, "?"),
                Exited(now, chance.choice((0, 1, -9)), "?"),
                Stop(now),
                Halt(now),
            ]
            wishes: list[session.Event] = [
                Submit(now, request(next(numbers))),
                Cancel(now, state.running.ticket if state.running else chance.choice([*open_tickets, 0])),
                Cancel(now, chance.choice([*open_tickets, 0])),
            ]
            event = chance.choice(chance.choices((likely, [Tick(now)], wishes, rare), (14, 3, 2, 1))[0])
            if isinstance(event, Submit):
                open_tickets.add(event.request.ticket)
            state, effects = step(state, event)
            seen.add(state.phase)
            for effect in effects:
                if isinstance(effect, Began):
                    assert effect.ticket in open_tickets
                    assert effect.ticket not in began
                    began.add(effect.ticket)
                if isinstance(effect, Done | Failed | Cancelled):
                    open_tickets.remove(effect.ticket)
            known = {r.ticket for r in state.waiting}
            if state.running is not None and state.phase is not Phase.CANCELLING:
                known.add(state.running.ticket)
            assert known == open_tickets
            assert (state.failure is not None) == (state.phase is Phase.FAILED)
            if state.phase in (Phase.OFF, Phase.FAILED):
                assert not open_tickets
        for _ in range(400):
            now += 1.0
            state, _ = step(state, Tick(now))
        assert state.phase in (Phase.OFF, Phase.FAILED, Phase.READY)
    assert seen == set(Phase)
