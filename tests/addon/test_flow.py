# SPDX-License-Identifier: Apache-2.0
"""Long work as a generator: budget, calls, errors, cancelling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from blender_addon.link.flow import Answer, Call, Flow
from blender_addon.messages import RigError


@dataclass
class FakeTicket:
    method: str
    state: str = "waiting"
    progress: tuple[int, int, str] = (0, 0, "")
    result: dict[str, Any] = field(default_factory=dict)
    blobs: dict[str, Any] = field(default_factory=dict)
    error: RigError | None = None

    @property
    def settled(self) -> bool:
        return self.state in ("done", "failed", "cancelled")


class FakeClient:
    text = "Starting the backend"
    state = "starting"
    answering = False

    def __init__(self) -> None:
        self.tickets: list[FakeTicket] = []
        self.cancelled: list[FakeTicket] = []

    def submit(self, method: str, params: dict[str, Any]) -> FakeTicket:
        self.tickets.append(FakeTicket(method))
        return self.tickets[-1]

    def cancel(self, ticket: FakeTicket) -> None:
        self.cancelled.append(ticket)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_tick_keeps_its_budget():
    clock, steps = Clock(), 0

    def work():
        nonlocal steps
        for _ in range(100):
            steps += 1
            clock.now += 0.002
            yield None

    flow = Flow(work(), FakeClient(), clock=clock)
    flow.advance(0.006)
    assert steps == 3
    while flow.state == "running":
        flow.advance(0.006)
    assert steps == 100
    assert flow.state == "done"


def test_a_call_waits_for_its_ticket_and_gets_the_answer():
    told: list[tuple[int, int, str]] = []

    def work():
        answer = yield Call("fit", {}, "Looking at the photo")
        return answer.result["value"], answer.blobs

    client = FakeClient()
    flow = Flow(work(), client, lambda *words: told.append(words))
    flow.advance(1.0)
    assert told == [(0, 0, "Starting the backend")]
    flow.advance(1.0)
    assert len(told) == 1, "nothing new is not told again"
    ticket = client.tickets[0]
    client.state, client.answering = "ready", True
    flow.advance(1.0)
    assert told[-1] == (0, 0, "Looking at the photo"), "it waits behind another request"
    ticket.state = "running"
    ticket.progress = (2, 5, "solving")
    flow.advance(1.0)
    assert told[-1] == (2, 5, "solving")
    client.answering, client.text = False, "Busy, not answering for 31 s"
    flow.advance(1.0)
    assert told[-1] == (2, 5, "Busy, not answering for 31 s")
    ticket.state, ticket.result, ticket.blobs = "done", {"value": 7}, {"photo": 1}
    flow.advance(1.0)
    assert (flow.state, flow.result) == ("done", (7, {"photo": 1}))


def test_an_error_reaches_the_generator_which_may_go_on():
    caught: list[str] = []

    def work():
        try:
            yield Call("fit")
        except RigError as error:
            caught.append(error.kind)
        answer = yield Call("rig.register")
        assert isinstance(answer, Answer)
        return "second"

    client = FakeClient()
    flow = Flow(work(), client)
    flow.advance(1.0)
    client.tickets[0].state, client.tickets[0].error = "failed", RigError("no_photo")
    flow.advance(1.0)
    assert [ticket.method for ticket in client.tickets] == ["fit", "rig.register"]
    client.tickets[1].state = "done"
    flow.advance(1.0)
    assert flow.result == "second"
    assert caught == ["no_photo"]


def test_an_error_that_nobody_catches_ends_the_flow():
    def work():
        yield Call("fit")

    client = FakeClient()
    flow = Flow(work(), client)
    flow.advance(1.0)
    client.tickets[0].state, client.tickets[0].error = "failed", RigError("no_photo")
    flow.advance(1.0)
    assert flow.state == "failed"
    assert isinstance(flow.error, RigError)
    assert flow.error.kind == "no_photo"


def test_a_defect_ends_the_flow_and_not_the_timer():
    def work():
        yield None
        raise ZeroDivisionError

    flow = Flow(work(), FakeClient())
    flow.advance(1.0)
    assert flow.state == "failed"
    assert isinstance(flow.error, ZeroDivisionError)


def test_cancelling_tells_the_backend_and_runs_the_finally_clauses():
    cleaned = []

    def work():
        try:
            yield Call("fit")
        finally:
            cleaned.append(True)

    client = FakeClient()
    flow = Flow(work(), client)
    flow.advance(1.0)
    flow.cancel()
    assert flow.state == "cancelled"
    assert client.cancelled == client.tickets
    assert cleaned == [True]
    client.tickets[0].state = "done"
    flow.advance(1.0)
    assert flow.state == "cancelled", "a late answer is dropped"
    flow.cancel()
    assert len(client.cancelled) == 1


def test_a_request_that_the_link_cancelled_cancels_the_flow():
    def work():
        yield Call("fit")

    client = FakeClient()
    flow = Flow(work(), client)
    flow.advance(1.0)
    client.tickets[0].state = "cancelled"
    flow.advance(1.0)
    assert flow.state == "cancelled"
    assert flow.error is None
