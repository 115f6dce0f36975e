# SPDX-License-Identifier: GPL-3.0-or-later
"""Long work as a generator that a timer advances a few milliseconds at a time. No bpy in here.

The generator yields `Call(method, params)` to ask the backend, and gets the `Answer` or has the RigError thrown into it;
anything else that it yields only gives the time back. It ends with `return result`. Cancelling closes it, so what it
must put back stands in its `finally` clauses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..messages import RigError


@dataclass(frozen=True)
class Call:
    """A request to the backend. text: what the panel shows until the backend says something itself."""

    method: str
    params: dict[str, Any] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True)
class Answer:
    """What the backend answered. blobs: arrays by name."""

    result: dict[str, Any]
    blobs: dict[str, np.ndarray]


class Ticket(Protocol):
    """A request on its way, as `client.Client.submit` returns it."""

    @property
    def state(self) -> str: ...
    @property
    def settled(self) -> bool: ...
    @property
    def progress(self) -> tuple[int, int, str]: ...
    @property
    def result(self) -> Any: ...
    @property
    def blobs(self) -> Any: ...
    @property
    def error(self) -> RigError | None: ...


class Client(Protocol):
    """What a flow needs of `client.Client`."""

    @property
    def state(self) -> str: ...
    @property
    def answering(self) -> bool: ...
    @property
    def text(self) -> str: ...
    def submit(self, method: str, params: dict[str, Any]) -> Any: ...
    def cancel(self, ticket: Any) -> None: ...


Steps = Generator[Any, Any, Any]


class Flow:
    """One piece of long work.

    state: "running", "done" (see `result`), "failed" (see `error`, a RigError, or another exception: a defect) or
    "cancelled". say: called with (done, total, text) when there is something to show.
    """

    def __init__(
        self,
        steps: Steps,
        client: Client,
        say: Callable[[int, int, str], None] = lambda done, total, text: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._steps = steps
        self._client = client
        self._say = say
        self._clock = clock
        self._ticket: Ticket | None = None
        self._call: Call | None = None
        self._told: tuple[int, int, str] | None = None
        self.state = "running"
        self.result: Any = None
        self.error: BaseException | None = None

    def advance(self, budget_s: float) -> None:
        """Go on for about `budget_s` seconds."""
        deadline = self._clock() + budget_s
        while self.state == "running":
            if self._ticket is not None and not self._ticket.settled:
                self._show_progress()
                return
            self._step()
            if self._clock() >= deadline:
                return

    def cancel(self) -> None:
        """Stop at once: the backend is told, the generator closed."""
        if self.state != "running":
            return
        self.state = "cancelled"
        ticket, self._ticket = self._ticket, None
        if ticket is not None and not ticket.settled:
            self._client.cancel(ticket)
        self._steps.close()

    def _step(self) -> None:
        ticket, self._ticket = self._ticket, None
        try:
            if ticket is None:
                asked = next(self._steps)
            elif ticket.state == "done":
                asked = self._steps.send(Answer(ticket.result, ticket.blobs))
            else:
                # A ticket that somebody else cancelled reads like a cancelled flow.
                asked = self._steps.throw(ticket.error or RigError("cancelled"))
        except StopIteration as end:
            self.state, self.result = "done", end.value
            return
        except Exception as error:
            cancelled = isinstance(error, RigError) and error.kind == "cancelled"
            self.state, self.error = ("cancelled", None) if cancelled else ("failed", error)
            return
        if isinstance(asked, Call):
            self._call, self._told = asked, None
            self._ticket = self._client.submit(asked.method, asked.params)
            self._show_progress()
        elif isinstance(asked, tuple):
            self._say(*asked)

    def _show_progress(self) -> None:
        """Tell how far the request is, if that is news: the link's own words while it is not ready or not answering."""
        assert self._ticket is not None
        assert self._call is not None
        told = self._ticket.progress if self._ticket.state == "running" else (0, 0, "")
        if self._client.state != "ready" or not self._client.answering:
            told = (*told[:2], self._client.text)
        elif not told[2]:
            told = (0, 0, self._call.text)
        if told != self._told:
            self._told = told
            self._say(*told)
