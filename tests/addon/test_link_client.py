# SPDX-License-Identifier: Apache-2.0
"""The client with a real child that does everything wrong that can go wrong (fake_backend.py)."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from processes import runs

from blender_addon.link import session
from blender_addon.link.client import Client, Launch, Ticket
from blender_addon.link.session import Limits
from blender_addon.messages import BackendError, RigError

FAKE = str(Path(__file__).with_name("fake_backend.py"))
ROOT = Path(__file__).resolve().parents[2]
POSIX = pytest.mark.skipif(os.name != "posix", reason="POSIX only")

# What is waited for half a minute takes a third of a second here.
QUICK = Limits(
    start_s=8.0,
    connect_s=2.0,
    hello_s=0.4,
    retry_s=0.05,
    ping_s=0.05,
    silence_s=0.3,
    cancel_s=0.4,
    stop_s=0.4,
    lost_s=0.2,
)


class Desk:
    """A client at work: it polls as Blender's timer does, and remembers what was to be seen."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.states: list[str] = []
        self.texts: list[str] = []
        # By the clock, and what this thread worked.
        self.looks_s: list[float] = []
        self.work_s: list[float] = []

    def look(self) -> bool:
        started, busy = time.perf_counter(), time.thread_time()
        changed = self.client.poll()
        self.looks_s.append(time.perf_counter() - started)
        self.work_s.append(time.thread_time() - busy)
        for seen, value in ((self.states, self.client.state), (self.texts, self.client.text)):
            if not seen or seen[-1] != value:
                seen.append(value)
        return changed

    def until(self, happened: Callable[[], object], timeout_s: float = 12.0) -> None:
        end = time.monotonic() + timeout_s
        while not happened():
            if time.monotonic() > end:
                raise AssertionError(f"it did not happen: {self.states} {self.texts}")
            self.look()
            time.sleep(0.002)

    def settle(self, ticket: Ticket) -> Ticket:
        self.until(lambda: ticket.settled)
        return ticket

    def ask(self, method: str, **params: object) -> Ticket:
        return self.settle(self.client.submit(method, params))

    def begin(self, method: str, **params: object) -> Ticket:
        """Submit and wait until it runs and has said something."""
        ticket = self.client.submit(method, params)
        self.until(lambda: ticket.progress[2] or ticket.settled)
        assert ticket.state == "running"
        return ticket


@pytest.fixture
def desk(tmp_path):
    """`desk(fault, limits)`: a desk at a client whose backend has that fault; everything is gone afterwards."""
    made: list[Desk] = []

    def make(fault: str = "", limits: Limits = QUICK) -> Desk:
        argv = [sys.executable, FAKE, "--fault", fault]
        client = Client(lambda: Launch(argv, None, str(tmp_path / f"{len(made)}.log")), limits=limits)
        made.append(Desk(client))
        return made[-1]

    yield make
    for one in made:
        children = [process.pid for process in (one.client._process, *one.client._ending) if process is not None]
        one.client.kill()
        assert (one.client.state, one.client.alive, one.client.busy) == ("off", False, False)
        assert not [pid for pid in children if runs(pid)]


# --- the good way -----------------------------------------------------------------------------------------------------


def test_a_request_and_its_answer(desk):
    one = desk()
    client = one.client
    assert (client.state, client.text, client.alive, client.answering, client.busy) == (
        "off",
        "Off",
        False,
        False,
        False,
    )
    array = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    ticket = client.submit("echo", {"path": "/ä\udcff", "n": 1}, {"a": array, "b": np.arange(5, dtype=np.uint8)})
    assert (ticket.state, ticket.settled, client.state, client.busy) == ("waiting", False, "starting", True)
    one.settle(ticket)
    assert (ticket.state, ticket.error) == ("done", None)
    assert ticket.result == {"path": "/ä\udcff", "n": 1}
    assert np.array_equal(ticket.blobs["a"], array)
    assert ticket.blobs["b"].tolist() == [0, 1, 2, 3, 4]
    # One look can see several of them come and go.
    assert (one.states[0], one.states[-1]) == ("starting", "ready")
    assert set(one.states) <= {"starting", "connecting", "greeting", "ready"}
    one.look()
    assert (client.state, client.text, client.alive, client.answering, client.busy) == (
        "ready",
        "Ready",
        True,
        True,
        False,
    )
    assert client.server == "fake 1.0"
    assert runs(client.pid)


def test_progress_is_seen_and_told_as_news(desk):
    one = desk()
    ticket = one.client.submit("steps", {"count": 5, "pause_s": 0.03})
    seen = []
    while not ticket.settled:
        before = (ticket.state, ticket.progress, one.client.text, one.client.state)
        news = one.look()
        after = (ticket.state, ticket.progress, one.client.text, one.client.state)
        assert news or before == after
        if ticket.progress[2] and ticket.progress not in seen:
            seen.append(ticket.progress)
        time.sleep(0.002)
    assert seen == [(i, 5, f"Step {i}") for i in range(5)]
    assert ticket.result == {"steps": 5}
    one.look()
    assert [one.look() for _ in range(5)] == [False] * 5


def test_many_requests_one_after_the_other(desk):
    one = desk()
    tickets = [one.client.submit("echo", {"i": i}) for i in range(50)]
    one.settle(tickets[-1])
    assert [ticket.result["i"] for ticket in tickets] == list(range(50))


def test_messages_that_nobody_asked_for(desk):
    assert desk().ask("strangers").result == {"mine": True}


def test_a_backend_error_is_carried_through(desk):
    one = desk()
    ticket = one.ask("refuse", kind="no_face", message="No face was found in a.jpg: take another photo.")
    assert ticket.state == "failed"
    assert isinstance(ticket.error, BackendError)
    assert isinstance(ticket.error, RigError)
    assert ticket.error.kind == "no_face"
    assert ticket.error.message == str(ticket.error) == "No face was found in a.jpg: take another photo."
    assert one.client.state == "ready"
    assert one.ask("cancelled_by_itself").state == "cancelled"


@pytest.mark.parametrize(
    ("params", "blobs", "word"),
    [
        ({"x": float("nan")}, {}, "no JSON form"),
        ({"x": {1, 2}}, {}, "no JSON form"),
        ({"x": "y" * (8 << 20)}, {}, "more than"),
        ({}, {"a": np.zeros(3)}, "float64"),
    ],
)
def test_a_request_that_cannot_be_sent_starts_nothing(desk, params, blobs, word):
    one = desk()
    ticket = one.client.submit("fit", params, blobs)
    assert (ticket.state, ticket.error.kind, one.client.state) == ("failed", "bad_request", "off")
    assert word in ticket.error.message
    assert one.look()


def test_what_the_child_is_given_goes_with_it(desk):
    one = desk()
    result = one.ask("environment").result
    assert result["argv"][-2] == "--address-file"
    assert result["files"] == ["address.json"]
    assert os.path.isdir(result["folder"])
    one.client.kill()
    assert not os.path.exists(result["folder"])


def test_environment_of_the_launch(tmp_path):
    launch = Launch([sys.executable, FAKE], None, str(tmp_path / "log"), {"RIGFIT_TEST": "x"})
    client = Client(lambda: launch)
    try:
        assert Desk(client).ask("environment").result["environment"]["RIGFIT_TEST"] == "x"
    finally:
        client.kill()


# --- at the start -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "kind", "word"),
    [
        ("exit-at-start", "backend_start_ended", "exit code 3, its last words: ModuleNotFoundError"),
        ("bad-address", "backend_bad_address", "not JSON"),
        ("other-host", "backend_bad_address", "host"),
        ("other-protocol-address", "backend_protocol", "protocol 99"),
        ("other-protocol-hello", "backend_protocol", "protocol 99"),
        ("refuses-protocol", "backend_protocol", "another"),
        ("in-use", "backend_in_use", "Another Blender"),
        ("dead-port", "backend_unreachable", "refused"),
        ("silent", "backend_no_hello", "without an answer"),
        ("always-closes", "backend_no_hello", "closed|reset|aborted"),
        ("garbage", "backend_no_hello", "begin|bytes"),
        ("half-frame", "backend_no_hello", "without an answer"),
        ("half-frame-closed", "backend_no_hello", "in the middle"),
        ("large-hello", "backend_no_hello", "4096"),
        ("blob-hello", "backend_no_hello", "blob"),
        ("no-token", "backend_proof", "not the backend"),
        ("wrong-id", "backend_no_hello", "no question"),
    ],
)
def test_faults_of_the_start(desk, fault, kind, word):
    one = desk(fault)
    first, second = one.client.submit("echo", {}), one.client.submit("echo", {})
    one.settle(second)
    assert (first.state, second.state) == ("failed", "failed")
    assert first.error.kind == second.error.kind == one.client.error.kind == kind
    assert re.search(word, first.error.message), first.error.message
    assert one.client.state == "failed"
    assert one.client.text == first.error.message
    # It is ended, and nothing is left of it.
    one.until(lambda: not one.client.alive)
    assert one.client.pid is None


def test_a_backend_that_does_not_get_ready(desk):
    one = desk("no-address", Limits(start_s=0.4))
    ticket = one.ask("echo")
    assert ticket.error.kind == "backend_start_slow"
    assert one.texts[:1] == ["Starting the backend"]


@pytest.mark.parametrize("fault", ["slow-accept", "closes-twice"])
def test_a_start_with_difficulties(desk, fault):
    one = desk(fault, Limits(retry_s=0.05))
    assert one.ask("echo", a=1).result == {"a": 1}


def test_a_launch_that_is_refused():
    def launch() -> Launch:
        raise RigError("backend_missing")

    client = Client(launch)
    ticket = client.submit("echo", {})
    assert ticket.state == "waiting"
    assert client.poll()
    assert (ticket.state, ticket.error.kind, client.state) == ("failed", "backend_missing", "failed")
    assert not isinstance(ticket.error, BackendError)
    assert client.text == ticket.error.message


def test_a_program_that_is_not_there(tmp_path):
    client = Client(lambda: Launch([str(tmp_path / "python")], None, str(tmp_path / "log")))
    ticket = Desk(client).ask("echo")
    assert ticket.error.kind == "backend_not_started"


def test_a_defect_of_the_launch_is_no_defect_of_the_window(capsys):
    client = Client(lambda: 1 // 0)
    ticket = Desk(client).ask("echo")
    assert ticket.error.kind == "defect"
    assert "ZeroDivisionError" in ticket.error.message
    assert "ZeroDivisionError" in capsys.readouterr().err
    client.kill()


def test_after_a_failure_the_next_request_starts_anew(desk, tmp_path):
    faults = ["exit-at-start", "no-token", ""]
    client = Client(lambda: Launch([sys.executable, FAKE, "--fault", faults.pop(0)], None, str(tmp_path / "log")))
    one = Desk(client)
    try:
        assert one.ask("echo").error.kind == "backend_start_ended"
        assert one.ask("echo").error.kind == "backend_proof"
        assert one.ask("echo", a=1).result == {"a": 1}
        assert client.error is None
    finally:
        client.kill()


# --- death ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "params", "word"),
    [
        ("die", {"code": 7}, "exit code 7, its last words: these are my last words"),
        pytest.param("die", {"signal": 9}, "ended by SIGKILL", marks=POSIX),
        pytest.param("die", {"signal": 11}, "ended by SIGSEGV", marks=POSIX),
        ("half", {}, "exit code 9"),
        ("die", {"code": 0}, "exit code 0"),
    ],
)
def test_death_in_the_middle(desk, method, params, word):
    one = desk()
    running = one.client.submit(method, params)
    waiting = one.client.submit("echo", {"a": 1})
    one.settle(running)
    assert running.error.kind == "backend_died"
    assert word in running.error.message
    # What had not been sent is served by the next one.
    assert one.settle(waiting).result == {"a": 1}
    assert one.states.count("starting") == 2


@POSIX
def test_a_closed_connection_ends_a_process_that_lives_on(desk):
    one = desk()
    ticket = one.client.submit("close", {})
    one.until(lambda: one.client.pid)
    pid = one.client.pid
    one.settle(ticket)
    assert ticket.error.kind == "backend_died"
    assert "closed" in ticket.error.message
    one.until(lambda: not runs(pid), 2)


@POSIX
def test_a_last_answer_is_read_before_the_death_is_noticed(desk):
    one = desk()
    one.ask("echo")
    ticket = one.client.submit("result_then_die", {"bytes": 1_000_000})
    one.look()
    pid = one.client.pid
    end = time.monotonic() + 5
    while runs(pid):
        assert time.monotonic() < end
    # It is dead, and its answer lies in the socket: more than a look without any time can take.
    assert not ticket.settled
    for _ in range(200):
        one.client.poll(0.0)
    assert ticket.state == "done"
    assert ticket.blobs["large"].shape == (1_000_000,)
    one.until(lambda: one.client.state == "off")


@POSIX
def test_killed_while_it_rests(desk):
    one = desk()
    one.ask("echo")
    os.kill(one.client.pid, signal.SIGKILL)
    one.until(lambda: one.client.state == "failed")
    assert one.client.error.kind == "backend_died"
    assert one.ask("echo", a=2).result == {"a": 2}


def test_garbage_in_the_middle(desk):
    one = desk()
    ticket = one.client.submit("garbage", {"hex": "00" * 40})
    later = one.client.submit("echo", {"a": 1})
    one.settle(ticket)
    assert ticket.error.kind == "backend_broken"
    assert one.settle(later).result == {"a": 1}


@pytest.mark.parametrize("members", [{}, {"result": 5}, {"error": "sorry"}, {"error": {"code": 1}}])
def test_odd_answers(desk, members):
    one = desk()
    assert one.ask("odd_answer", members=members).error.kind == "backend_broken"
    assert one.ask("echo", a=1).result == {"a": 1}


@POSIX
@pytest.mark.parametrize("how", ["dies", "is killed"])
def test_its_own_children_go_with_it(desk, how):
    one = desk()
    child = one.ask("child").result["pid"]
    assert runs(child)
    if how == "dies":
        one.ask("die")
    else:
        one.client.kill()
    one.until(lambda: not runs(child), 3)


# --- cancel -----------------------------------------------------------------------------------------------------------


def test_cancel_acts_at_once_and_the_backend_goes_on_living(desk):
    one = desk()
    ticket = one.begin("steps", count=1000, pause_s=0.01)
    pid = one.client.pid
    started = time.perf_counter()
    one.client.cancel(ticket)
    assert (ticket.state, ticket.settled) == ("cancelled", True)
    assert time.perf_counter() - started < 0.05
    assert (one.client.state, one.client.text) == ("cancelling", "Cancelling")
    assert one.ask("echo", a=1).result == {"a": 1}
    assert one.client.pid == pid
    one.client.cancel(ticket)
    assert (ticket.state, one.client.state) == ("cancelled", "ready")


def test_a_late_result_is_dropped(desk):
    one = desk()
    ticket = one.begin("late", seconds=0.2)
    pid = one.client.pid
    one.client.cancel(ticket)
    assert one.ask("echo", a=1).result == {"a": 1}
    assert (ticket.state, ticket.result, ticket.blobs, ticket.error) == ("cancelled", {}, {}, None)
    assert one.client.pid == pid


@POSIX
def test_a_backend_that_ignores_cancel_is_ended(desk):
    one = desk()
    ticket = one.begin("stubborn_job")
    pid = one.client.pid
    one.client.cancel(ticket)
    started = time.monotonic()
    one.until(lambda: not runs(pid), 3)
    assert 0.3 < time.monotonic() - started < 1.5
    assert (one.client.state, one.client.error) == ("off", None)
    assert one.ask("echo", a=1).result == {"a": 1}


def test_cancel_before_the_backend_has_seen_it(desk):
    one = desk()
    first, second = one.client.submit("echo", {"i": 1}), one.client.submit("echo", {"i": 2})
    one.client.cancel(first)
    assert first.state == "cancelled"
    assert one.settle(second).result == {"i": 2}


def test_a_cancelled_ticket_is_news(desk):
    """Also if the state, its text and everything else stay as they are."""
    one = desk()
    one.begin("stubborn_job")
    second = one.client.submit("echo", {})
    assert one.look()
    assert not one.look()
    one.client.cancel(second)
    assert one.look()


def test_silence_is_not_death(desk):
    one = desk()
    ticket = one.ask("hold_everything", seconds=0.5)
    assert ticket.result == {"held": 0.5}
    assert any(text.startswith("Busy, not answering for") for text in one.texts)
    assert one.texts[-1] == "Ready" or one.client.answering
    assert one.states[-1] == "ready"


def test_a_deaf_backend_is_alive_and_does_not_answer(desk):
    one = desk("deaf")
    ticket = one.client.submit("echo", {})
    one.until(lambda: one.client.state == "ready" and not one.client.answering)
    assert (one.client.alive, ticket.state) == (True, "running")
    pid = one.client.pid
    one.client.cancel(ticket)
    one.until(lambda: one.client.state == "off")
    assert ticket.state == "cancelled"
    one.until(lambda: not one.client.alive)
    assert not runs(pid)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_the_gentle_end(desk):
    one = desk("", Limits(stop_s=30))
    ticket = one.begin("steps", count=1000, pause_s=0.01)
    pid = one.client.pid
    one.client.stop()
    assert (ticket.state, one.client.state) == ("cancelled", "stopping")
    one.until(lambda: one.client.state == "off", 5)
    assert not runs(pid)
    assert one.ask("echo", a=1).result == {"a": 1}


@pytest.mark.parametrize("fault", ["stubborn", "no-address"])
def test_the_gentle_end_of_one_that_does_not_want_to(desk, fault):
    one = desk(fault)
    one.client.submit("echo", {})
    one.until(lambda: one.client.pid and (fault == "no-address" or one.client.state == "ready"))
    pid = one.client.pid
    one.client.stop()
    one.until(lambda: one.client.state == "off" and not one.client.alive, 4)
    assert not runs(pid)


def test_the_end_before_anything_was_started(desk):
    one = desk("", Limits(stop_s=30))
    ticket = one.client.submit("echo", {})
    one.client.stop()
    one.until(lambda: one.client.state == "off", 1)
    assert ticket.state == "cancelled"
    assert one.client.pid is None


@pytest.mark.parametrize("fault", ["", "stubborn", "silent", "no-address", "chatter"])
def test_the_end_at_once(desk, fault):
    one = desk(fault)
    ticket = one.client.submit("stubborn_job", {})
    one.until(lambda: one.client.pid)
    for _ in range(30):
        one.look()
        time.sleep(0.005)
    pid = one.client.pid
    started = time.monotonic()
    one.client.kill()
    assert time.monotonic() - started < 2.0
    assert not runs(pid)
    assert (ticket.state, one.client.state, one.client.alive) == ("cancelled", "off", False)
    one.client.kill()


ARTIST = """
import signal, sys, time, atexit
if hasattr(signal, "SIGPIPE"):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)   # as in Blender
from blender_addon.link.client import Client, Launch
client = Client(lambda: Launch([sys.executable, sys.argv[1]], None, sys.argv[2]))
if sys.argv[3] == "atexit":
    atexit.register(client.kill)
ticket = client.submit("stubborn_job", {})
while not ticket.progress[2]:
    client.poll()
    time.sleep(0.002)
print(client.pid, flush=True)
if sys.argv[3] == "survives":
    import os
    for _ in range(3):
        os.kill(client.pid, 9)
        while not ticket.settled:
            # Written to a socket that nobody reads any more.
            client.cancel(ticket)
            client.submit("steps", {"count": 1, "pad": "x" * 100000})
            client.poll()
        ticket = client.submit("stubborn_job", {})
        while not ticket.progress[2]:
            client.poll()
    client.kill()
    print("survived", flush=True)
elif sys.argv[3] == "wait":
    time.sleep(60)
"""


@POSIX
@pytest.mark.parametrize("end", ["killed", "exits", "atexit"])
def test_no_process_is_left_when_blender_is_gone(tmp_path, end):
    mode = {"killed": "wait", "exits": "go", "atexit": "atexit"}[end]
    parent = subprocess.Popen(
        [sys.executable, "-c", ARTIST, FAKE, str(tmp_path / "log"), mode],
        cwd=ROOT,
        # Whoever is killed leaves its private folder behind.
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        child = int(parent.stdout.readline())
        if end == "killed":
            assert runs(child)
            parent.kill()
        parent.wait(10)
        end_s = time.monotonic() + 5
        while runs(child) and time.monotonic() < end_s:
            time.sleep(0.01)
        assert not runs(child)


@POSIX
def test_blender_survives_the_death_of_the_backend(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ARTIST, FAKE, str(tmp_path / "log"), "survives"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("survived\n")


# --- time -------------------------------------------------------------------------------------------------------------


def check_looks(one: Desk) -> None:
    """Five milliseconds a look, and a little. By the clock only for the better looks: the others also tell what else this
    machine does. By the work for nearly all: memory that a virtual machine has never used takes it milliseconds to find."""
    assert len(one.looks_s) > 10
    assert statistics.quantiles(one.looks_s, n=4)[0] < 0.008
    assert statistics.quantiles(one.work_s, n=50)[-1] < 0.012


def test_a_flood_of_progress_takes_no_more_than_its_share(desk):
    one = desk()
    ticket = one.ask("flood", count=10_000)
    assert ticket.state == "done"
    check_looks(one)


def test_a_large_answer_takes_no_more_than_its_share(desk):
    one = desk()
    ticket = one.ask("large", bytes=100_000_001)
    assert ticket.state == "done"
    large, after = ticket.blobs["large"], ticket.blobs["after"]
    assert large.shape == (100_000_001,)
    assert bytes(large[:16]) == b"0123456789abcdef"
    assert large[-1] == ord("0")
    assert after.tolist() == [[1.5], [-2.0]]
    assert after.flags.aligned
    check_looks(one)


def test_a_flood_on_standard_output_harms_nothing(desk):
    one = desk("chatter")
    assert one.ask("steps", count=20, pause_s=0.01).state == "done"
    check_looks(one)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_only_time_that_was_looked_at_counts(tmp_path):
    """Ten minutes of rendering between two looks are not ten minutes without an answer."""
    clock = Clock()
    client = Client(lambda: Launch([sys.executable, FAKE], None, str(tmp_path / "log")), clock=clock)
    try:
        ticket = client.submit("echo", {"a": 1})
        for _ in range(5):
            client.poll()
            clock.now += 600.0
        end = time.monotonic() + 10
        while not ticket.settled and time.monotonic() < end:
            client.poll()
            clock.now += 0.002
            time.sleep(0.002)
        assert ticket.result == {"a": 1}
        # Nor does a clock that is put back make anything last longer.
        ticket = client.submit("stubborn_job", {})
        one = Desk(client)
        one.until(lambda: ticket.progress[2])
        client.cancel(ticket)
        clock.now -= 5000.0
        for _ in range(9):
            client.poll()
            assert client.state == "cancelling"
            clock.now += 0.5
        for _ in range(3):
            client.poll()
            clock.now += 0.5
        assert client.state == "off"
    finally:
        client.kill()


# --- attach -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def attached(tmp_path):
    """(desk, the process that a developer started, the attach file)."""
    path = tmp_path / "attach.json"
    process = subprocess.Popen(
        [sys.executable, FAKE, "--attach", "--address-file", str(path)], stdin=subprocess.DEVNULL
    )
    end = time.monotonic() + 5
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    client = Client(lambda: Launch(None, str(path), str(tmp_path / "log")), limits=QUICK)
    yield Desk(client), process, path
    client.kill()
    process.kill()
    process.wait()


def test_attached(attached):
    one, process, _ = attached
    assert one.ask("echo", a=1).result == {"a": 1}
    assert (one.client.alive, one.client.answering, one.client.pid) == (True, True, None)
    one.client.stop()
    one.look()
    assert (one.client.state, one.client.alive) == ("off", False)
    assert process.poll() is None
    assert one.ask("echo", a=2).result == {"a": 2}
    one.client.kill()
    assert process.poll() is None


def test_an_attached_backend_that_ignores_cancel_is_left(attached):
    one, process, _ = attached
    ticket = one.begin("stubborn_job")
    one.client.cancel(ticket)
    one.until(lambda: one.client.state == "off", 3)
    assert process.poll() is None
    assert one.ask("echo", a=2).result == {"a": 2}


def test_an_attached_backend_dies(attached):
    one, process, path = attached
    ticket = one.begin("stubborn_job")
    process.kill()
    one.settle(ticket)
    assert ticket.error.kind == "backend_died"
    # The file still says where it was.
    assert one.ask("echo").error.kind == "backend_unreachable"
    path.unlink()
    assert one.ask("echo").error.kind == "attach_missing"
    assert str(path) in one.client.text


@POSIX
def test_an_attach_file_that_others_can_read(attached):
    one, _, path = attached
    path.chmod(0o644)
    assert one.ask("echo").error.kind == "attach_unsafe"


def test_the_limits_are_those_that_were_agreed():
    agreed = {"start_s": 60, "connect_s": 5, "hello_s": 5, "ping_s": 5, "silence_s": 30, "cancel_s": 5, "stop_s": 2}
    assert {name: getattr(session.Limits(), name) for name in agreed} == agreed
