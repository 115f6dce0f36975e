# SPDX-License-Identifier: Apache-2.0
"""The job queue: order, progress, cancel at every moment, Blender children that end with their job."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rigfit.blender import worker as worker_module
from rigfit.blender.worker import BlenderWorker
from rigfit.errors import Cancelled, UserError
from rigfit.server.jobs import Job, JobContext, JobQueue

posix_only = pytest.mark.skipif(os.name != "posix", reason="shell scripts stand for programs")


class Bench:
    """A queue in a loop, and what its jobs told."""

    def __init__(self, warm_up: Callable[[], None] = lambda: None, blender_log: Path | None = None) -> None:
        self.queue = JobQueue(asyncio.get_running_loop(), warm_up, "warming up", blender_log)
        self.told: list[tuple[int, int, int, str]] = []
        self.ends: dict[int, Any] = {}
        self.owner = object()

    def submit(self, number: int, work: Callable[[JobContext], Any], owner: object | None = None) -> None:
        def end(answer: Any, error: BaseException | None) -> None:
            assert number not in self.ends
            self.ends[number] = answer if error is None else error

        def tell(done: int, total: int, text: str) -> None:
            self.told.append((number, done, total, text))

        self.queue.submit(Job(owner or self.owner, number, f"job {number}", work, tell, end))

    async def until(self, happened: Callable[[], object], within_s: float = 10.0) -> None:
        deadline = time.monotonic() + within_s
        while not happened():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)


def in_loop(test: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@in_loop
async def test_jobs_run_in_order_one_at_a_time_in_one_other_thread():
    bench = Bench()
    seen, threads = [], set()

    def work(number: int) -> Callable[[JobContext], int]:
        def run(context: JobContext) -> int:
            threads.add(threading.get_ident())
            seen.append(("begin", number))
            time.sleep(0.01)
            seen.append(("end", number))
            return number * 10

        return run

    for number in range(5):
        bench.submit(number, work(number))
    assert bench.queue.busy
    assert bench.queue.queued == 4
    bench.queue.start()
    await bench.until(lambda: len(bench.ends) == 5)
    assert seen == [(what, number) for number in range(5) for what in ("begin", "end")]
    assert bench.ends == {number: number * 10 for number in range(5)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    assert not bench.queue.busy


@in_loop
async def test_what_a_job_raises_is_its_end_and_the_next_one_runs():
    bench = Bench()
    bench.queue.start()

    def fail(error: BaseException) -> Callable[[JobContext], Any]:
        def run(context: JobContext) -> Any:
            raise error

        return run

    errors = [UserError("No.", kind="no"), ValueError("x"), MemoryError(), SystemExit(3), KeyboardInterrupt()]
    for number, error in enumerate(errors):
        bench.submit(number, fail(error))
    bench.submit(99, lambda context: "still here")
    await bench.until(lambda: 99 in bench.ends)
    assert [bench.ends[number] for number in range(len(errors))] == errors
    assert bench.ends[99] == "still here"


@in_loop
async def test_a_waiting_job_is_cancelled_at_once_and_never_runs():
    bench = Bench()
    hold, ran = threading.Event(), []
    bench.submit(1, lambda context: hold.wait(10))
    bench.submit(2, lambda context: ran.append(2))
    bench.submit(3, lambda context: ran.append(3))
    bench.queue.start()
    assert bench.queue.cancel(bench.owner, 2)
    assert isinstance(bench.ends[2], Cancelled)
    assert not bench.queue.cancel(bench.owner, 2)
    assert not bench.queue.cancel(object(), 1)
    assert not bench.queue.cancel(bench.owner, 77)
    hold.set()
    await bench.until(lambda: 3 in bench.ends)
    assert ran == [3]


@in_loop
async def test_a_running_job_is_cancelled_by_its_next_progress():
    bench = Bench()
    bench.queue.start()

    def work(context: JobContext) -> None:
        for i in range(100_000):
            context.progress(i, 0, "going on")
            time.sleep(0.001)

    bench.submit(1, work)
    await bench.until(lambda: bench.told[-1:] and bench.told[-1][3] == "going on")
    asked = time.monotonic()
    assert bench.queue.cancel(bench.owner, 1)
    assert 1 not in bench.ends  # it says so itself
    await bench.until(lambda: 1 in bench.ends)
    assert time.monotonic() - asked < 0.5
    assert isinstance(bench.ends[1], Cancelled)


@in_loop
async def test_a_job_that_was_cancelled_ends_cancelled_whatever_it_returns_or_raises():
    bench = Bench()
    bench.queue.start()
    begun, go = threading.Event(), threading.Event()

    def deaf(context: JobContext) -> str:
        begun.set()
        go.wait(10)
        return "a result"

    def failing(context: JobContext) -> str:
        deaf(context)
        raise RuntimeError("because its Blender was ended")

    for number, work in enumerate((deaf, failing)):
        begun.clear()
        go.clear()
        bench.submit(number, work)
        await bench.until(begun.is_set)
        assert bench.queue.cancel(bench.owner, number)
        go.set()
        await bench.until(lambda number=number: number in bench.ends)
        assert isinstance(bench.ends[number], Cancelled)


@in_loop
async def test_the_end_of_one_owner_leaves_the_jobs_of_another():
    bench = Bench()
    other, hold = object(), threading.Event()
    bench.submit(1, lambda context: hold.wait(10))
    bench.submit(1 + 10, lambda context: "mine")
    bench.submit(2, lambda context: "theirs", other)
    bench.queue.start()
    assert bench.queue.has(other, 2)
    assert not bench.queue.has(bench.owner, 2)
    bench.queue.cancel_all(bench.owner)
    hold.set()
    await bench.until(lambda: len(bench.ends) == 3)
    assert isinstance(bench.ends[1], Cancelled)
    assert isinstance(bench.ends[11], Cancelled)
    assert bench.ends[2] == "theirs"


@in_loop
async def test_progress_comes_with_every_new_text_and_numbers_not_too_often():
    bench = Bench()
    bench.queue.start()

    def work(context: JobContext) -> None:
        for i in range(1001):
            context.progress(i, 1000, "counting")
        context.progress(0, 0, "another text")

    bench.submit(1, work)
    await bench.until(lambda: 1 in bench.ends)
    told = [one for one in bench.told if one[3] != "warming up"]
    assert told[0] == (1, 0, 1000, "counting")
    assert told[-2:] == [(1, 1000, 1000, "counting"), (1, 0, 0, "another text")]
    assert len(told) < 100


@in_loop
async def test_a_job_that_comes_during_the_warm_up_is_told_so_and_a_failed_warm_up_stops_nothing():
    go = threading.Event()

    def warm_up() -> None:
        go.wait(10)
        raise RuntimeError("no detector")

    bench = Bench(warm_up)
    bench.queue.start()
    bench.submit(1, lambda context: "done")
    assert bench.told == [(1, 0, 0, "warming up")]
    go.set()
    await bench.until(lambda: 1 in bench.ends)
    assert bench.ends[1] == "done"
    bench.submit(2, lambda context: "done")
    await bench.until(lambda: 2 in bench.ends)
    assert bench.told == [(1, 0, 0, "warming up")]


@in_loop
async def test_close_stops_everything_and_the_thread_ends():
    bench = Bench()

    def work(context: JobContext) -> None:
        while True:
            context.check()
            time.sleep(0.001)

    bench.submit(1, work)
    bench.submit(2, work)
    bench.queue.start()
    await asyncio.sleep(0.05)
    bench.queue.close()
    assert isinstance(bench.ends[2], Cancelled)
    assert await asyncio.to_thread(bench.queue.join, 2.0)


@in_loop
async def test_work_that_cannot_be_stopped_is_left_behind():
    bench = Bench()
    bench.queue.start()
    hold = threading.Event()
    bench.submit(1, lambda context: context.apart(lambda: hold.wait(10)))
    await asyncio.sleep(0.05)
    asked = time.monotonic()
    bench.queue.cancel(bench.owner, 1)
    await bench.until(lambda: 1 in bench.ends)
    assert time.monotonic() - asked < 1
    assert isinstance(bench.ends[1], Cancelled)
    hold.set()

    def fail() -> None:
        raise UserError("No.", kind="no")

    bench.submit(2, lambda context: context.apart(lambda: 7))
    bench.submit(3, lambda context: context.apart(fail))
    await bench.until(lambda: 3 in bench.ends)
    assert bench.ends[2] == 7
    assert bench.ends[3].kind == "no"


# --- Blender children -------------------------------------------------------------------------------------------------

SLOW_CHILD = """
import json, os, sys, time
print(json.dumps({"method": "hello", "params": {"protocol": 1, "blender_version": "4.5.0"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["method"] == "ping":
        print(json.dumps({"id": request["id"], "result": {"pid": os.getpid(), "nice": os.nice(0)}}), flush=True)
    else:
        time.sleep(60)
"""


def slow_blender(folder: Path, *, starts_slowly: bool = False) -> Path:
    """A program that says it is Blender and then takes for ever to render, or to start."""
    child = folder / "child.py"
    child.write_text("import time; time.sleep(60)" if starts_slowly else SLOW_CHILD)
    program = folder / "blender"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && {{ echo "Blender 4.5.0"; exit; }}\nexec {sys.executable} {child}\n'
    )
    program.chmod(0o755)
    return program


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@posix_only
@in_loop
async def test_cancel_ends_a_render_and_its_blender_at_once(tmp_path):
    bench = Bench(blender_log=tmp_path / "blender.log")
    bench.queue.start()
    told = {}

    def work(context: JobContext) -> None:
        with context.blender(str(slow_blender(tmp_path))) as worker:
            told.update(worker.call("ping"))
            worker.call("studio.render")

    bench.submit(1, work)
    await bench.until(lambda: told)
    await asyncio.sleep(0.05)
    assert told["nice"] >= 10
    asked = time.monotonic()
    bench.queue.cancel(bench.owner, 1)
    await bench.until(lambda: 1 in bench.ends)
    assert time.monotonic() - asked < 1
    assert isinstance(bench.ends[1], Cancelled)
    await bench.until(lambda: is_gone(told["pid"]))


@posix_only
@in_loop
async def test_cancel_ends_a_blender_that_is_still_starting(tmp_path):
    bench = Bench()
    bench.queue.start()

    def work(context: JobContext) -> None:
        with context.blender(str(slow_blender(tmp_path, starts_slowly=True))):
            raise AssertionError("it never says hello")

    bench.submit(1, work)
    await bench.until(lambda: any(text == "starting Blender" for *_, text in bench.told))
    await asyncio.sleep(0.3)
    asked = time.monotonic()
    bench.queue.cancel(bench.owner, 1)
    await bench.until(lambda: 1 in bench.ends)
    assert time.monotonic() - asked < 1
    assert isinstance(bench.ends[1], Cancelled)


def test_an_interrupted_worker_stays_ended():
    worker = BlenderWorker(command=[sys.executable, "-c", SLOW_CHILD])
    worker.interrupt()
    with pytest.raises(UserError) as error:
        worker.start()
    assert error.value.kind == "blender_interrupted"
    with BlenderWorker(command=[sys.executable, "-c", SLOW_CHILD]) as worker:
        worker.call("ping")
        threading.Timer(0.1, worker.interrupt).start()
        with pytest.raises(UserError) as error:
            worker.call("studio.render")
        assert error.value.kind == "blender_interrupted"
        assert worker.pid is None
    assert worker.log_path is None or not worker.log_path.exists()


def test_an_interrupt_between_the_birth_of_the_child_and_its_registration(monkeypatch):
    """The worst moment: the flag is up, and the child is not known yet."""
    worker = BlenderWorker(command=[sys.executable, "-c", SLOW_CHILD])
    popen = worker_module.subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> Any:
        child = popen(*arguments, **options)
        worker.interrupt()
        return child

    monkeypatch.setattr(worker_module.subprocess, "Popen", interrupted)
    began = time.monotonic()
    with pytest.raises(UserError) as error:
        worker.start()
    assert error.value.kind == "blender_interrupted"
    assert time.monotonic() - began < 5


def test_the_log_of_blender_does_not_grow_for_ever(tmp_path, monkeypatch):
    log = tmp_path / "blender.log"
    context = JobContext(lambda *told: None, log)
    log.write_text("x" * 100)
    assert context._fresh_log() == log
    assert log.read_text() == "x" * 100
    monkeypatch.setattr("rigfit.server.jobs.BLENDER_LOG_LIMIT", 50)
    assert context._fresh_log() == log
    assert not log.exists()
