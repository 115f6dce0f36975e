# SPDX-License-Identifier: Apache-2.0
"""One queue, one thread that works through it, and tokens that stop what runs.

The event loop owns the queue: `submit`, `cancel` and all callbacks happen in its thread. The job thread only runs work;
what it has to say goes to the loop by `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rigfit.blender.locate import Blender, locate, stop_asking
from rigfit.blender.worker import BlenderWorker
from rigfit.errors import Cancelled

log = logging.getLogger("rigfit.server")

PROGRESS_EVERY_S = 0.05
# Cancel is looked for this often while the job thread waits for another one.
CHECK_EVERY_S = 0.05
BLENDER_LOG_LIMIT = 4 << 20

T = TypeVar("T")


class JobContext:
    """What a job may use of its surroundings: progress, cancel, Blender children. For the job thread, but for `stop`."""

    def __init__(self, tell: Callable[[int, int, str], None], blender_log: Path | None) -> None:
        self._tell = tell
        self._blender_log = blender_log
        self._lock = threading.Lock()
        self._stopped = False
        self._workers: set[BlenderWorker] = set()
        self._told: tuple[float, str] = (0.0, "")

    @property
    def stopped(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        """Nobody wants the result any more: the next `check` raises, and Blender children end now. From any thread."""
        with self._lock:
            self._stopped = True
            workers = list(self._workers)
        for worker in workers:
            worker.interrupt()
        stop_asking()

    def check(self) -> None:
        """Cancelled if the job was stopped."""
        if self._stopped:
            raise Cancelled

    def progress(self, done: int, total: int, text: str) -> None:
        """Tell how far the job is. Cancelled if it was stopped."""
        self.check()
        now = time.monotonic()
        before, said = self._told
        # A new text always; numbers no more often than anybody can see.
        if text != said or now - before >= PROGRESS_EVERY_S or done == total:
            self._told = (now, text)
            self._tell(int(done), int(total), text)

    @contextlib.contextmanager
    def blender(self, named: str | None) -> Iterator[BlenderWorker]:
        """A Blender child for this job. named: as for `rigfit.blender.locate.locate`. UserError, Cancelled."""
        self.progress(0, 0, "starting Blender")
        found = self._locate(named)
        worker = BlenderWorker(found, log=self._fresh_log(), low_priority=True)
        with self._lock:
            self._workers.add(worker)
        try:
            # Only now: a stop before it was registered could not interrupt it.
            self.check()
            with worker:
                yield worker
        finally:
            with self._lock:
                self._workers.discard(worker)

    def apart(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread of its own, and leave it behind when the job is stopped: for what has no other end."""
        done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((work(), None))
            except BaseException as error:
                done.put((None, error))

        threading.Thread(target=run, name="rigfit-apart", daemon=True).start()
        while True:
            try:
                result, error = done.get(timeout=CHECK_EVERY_S)
            except queue.Empty:
                self.check()
                continue
            if error is not None:
                raise error
            return result  # type: ignore[return-value]

    def _locate(self, named: str | None) -> Blender:
        # A launcher on a network drive may take its time to say its version.
        return self.apart(lambda: locate(named))

    def _fresh_log(self) -> Path | None:
        """The log that all Blender children of this backend share; begun anew when it is long."""
        path = self._blender_log
        if path is not None:
            with contextlib.suppress(OSError):
                if path.stat().st_size > BLENDER_LOG_LIMIT:
                    path.unlink()
        return path


@dataclass(eq=False)
class Job:
    """One request in the queue.

    work: runs in the job thread and returns the answer. tell, end: called in the loop's thread; `end` once, with what
    `work` returned or raised (Cancelled when it was stopped, whatever it did then).
    """

    owner: object
    id: int
    name: str
    work: Callable[[JobContext], Any]
    tell: Callable[[int, int, str], None]
    end: Callable[[Any, BaseException | None], None]
    context: JobContext = field(init=False)


class JobQueue:
    """Runs jobs in order, one at a time. `warm_up` runs before the first; its failure is logged and nothing else."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        warm_up: Callable[[], None],
        warm_up_text: str,
        blender_log: Path | None = None,
    ) -> None:
        self._loop = loop
        self._warm_up: Callable[[], None] | None = warm_up
        self._warm_up_text = warm_up_text
        self._blender_log = blender_log
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._work: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(warm_up,), name="rigfit-jobs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a job runs or waits."""
        return self._running is not None or bool(self._waiting)

    @property
    def queued(self) -> int:
        """How many jobs wait behind the one that runs."""
        return len(self._waiting)

    def has(self, owner: object, number: int) -> bool:
        return any(job.owner is owner and job.id == number for job in self._all())

    def submit(self, job: Job) -> None:
        job.context = JobContext(lambda *told: self._from_thread(job.tell, *told), self._blender_log)
        self._waiting.append(job)
        if self._warm_up is not None:
            job.tell(0, 0, self._warm_up_text)
        self._next()

    def cancel(self, owner: object, number: int) -> bool:
        """Stop a job; whether there was one. It ends with Cancelled: at once if it waited, soon if it runs."""
        for job in self._all():
            if job.owner is owner and job.id == number:
                self._stop(job)
                return True
        return False

    def cancel_all(self, owner: object | None = None) -> None:
        """Stop all jobs of `owner`, or of everybody."""
        for job in self._all():
            if owner is None or job.owner is owner:
                self._stop(job)

    def close(self) -> None:
        """Stop everything; nothing more will run."""
        self._closed = True
        self.cancel_all()
        self._work.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread after `close`; whether it is done."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def interrupt(self) -> None:
        """End the Blender children of the job that runs, from any thread: for the last moment of the process."""
        job = self._running
        if job is not None:
            job.context.stop()

    def _all(self) -> list[Job]:
        return [*([self._running] if self._running is not None else []), *self._waiting]

    def _stop(self, job: Job) -> None:
        if job is self._running:
            job.context.stop()
        else:
            self._waiting.remove(job)
            job.end(None, Cancelled())

    def _next(self) -> None:
        if self._running is None and self._waiting and not self._closed:
            self._running = self._waiting.popleft()
            self._work.put(self._running)

    def _ended(self, job: Job, answer: Any, error: BaseException | None) -> None:
        self._running = None
        if job.context.stopped:
            answer, error = None, Cancelled()
        try:
            job.end(answer, error)
        finally:
            self._next()

    def _warm(self) -> None:
        self._warm_up = None

    # --- the job thread -----------------------------------------------------------------------------------------------

    def _run(self, warm_up: Callable[[], None]) -> None:
        try:
            warm_up()
        except BaseException:
            log.exception("the warm-up failed")
        self._from_thread(self._warm)
        while (job := self._work.get()) is not None:
            answer, error = None, None
            try:
                job.context.check()
                answer = job.work(job.context)
            except BaseException as raised:
                error = raised
            self._from_thread(self._ended, job, answer, error)
            del job, answer, error

    def _from_thread(self, call: Callable[..., None], *arguments: Any) -> None:
        # The loop is gone when the process is about to end: nobody is there to be told.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)
