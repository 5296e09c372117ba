"""Workers: where the log's disk work runs. Threads in production; on demand (inline) in tests and tools."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from headrace.log.disk.disk import Disk, RealDisk, is_untouched, ran, report_chain, run_chain
from headrace.log.disk.io_chain import IoThread, Step, SyncFailure

Job = Callable[[], Any]
Done = Callable[[Any, BaseException | None], None]
Post = Callable[[Callable[[], object]], object]
Watch = Callable[[int, Callable[[], object] | None], object]  # call back when the descriptor is readable; None: stop


class Worker(Protocol):
    def submit(self, job: Job, done: Done) -> None:
        """Run job elsewhere, then done(result, error) on the owner thread. Jobs run in order, one at a time."""

    def close(self) -> None:
        """Finish the submitted jobs, then stop."""


class Confirmation(Protocol):
    """Decides when work that is on the local disk may be reported as done. See standby/acks.py."""

    def then(self, callback: Callable[[], object]) -> None:
        """Call back once everything done so far is confirmed; in the order of the calls."""


class ThreadWorker:
    """Runs jobs on threads of its own. With more than one thread, jobs start in order and end in any order."""

    def __init__(self, name: str, post: Post, threads: int = 1) -> None:
        self._post = post
        # Every confirm waits for this queue once: a Semaphore would cost a dozen Python calls and locks more.
        self._jobs: SimpleQueue[tuple[Job, Done] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, done: Done) -> None:
        self._jobs.put((job, done))

    def _run(self) -> None:
        while True:
            entry = self._jobs.get()
            if entry is None:
                return
            job, done = entry
            result, error = None, None
            try:
                result = job()
            except BaseException as caught:  # noqa: BLE001 - the owner thread handles it
                error = caught
            self._post(partial(done, result, error))

    def close(self, *, finish: bool = True) -> None:
        """Without `finish`, jobs that have not started are dropped without calling their `done`."""
        with suppress(Empty):
            while not finish:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()


class InlineWorker:
    """Runs one job per call of `pump`, so that a test decides the order of events."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Job, Done]] = deque()

    def submit(self, job: Job, done: Done) -> None:
        self._jobs.append((job, done))

    def pump(self) -> bool:
        """Run one job, if there is one."""
        if not self._jobs:
            return False
        job, done = self._jobs.popleft()
        result, error = None, None
        try:
            result = job()
        except Exception as caught:  # noqa: BLE001 - as ThreadWorker does
            error = caught
        done(result, error)
        return True

    def close(self) -> None:
        while self.pump():
            pass


class SerialExecutor:
    """Runs the worker's jobs and the I/O chains of rounds in order, one at a time, so that the journal, the segments
    and the slots have one user at any moment. Used on the owner thread.

    A turn is held from `take_turn` (or `submit`) to `release_turn` (or the end of a job). With `watch`, chains run on
    an I/O thread without the GIL; without, as jobs of the worker.
    """

    def __init__(self, worker: Worker, disk: Disk, failure: SyncFailure, watch: Watch | None = None) -> None:
        self._worker = worker
        self._disk = disk
        self._failure = failure
        self._watch = watch
        self._io_thread: IoThread | None = None
        self._chain_done: Done | None = None
        self._steps: Sequence[Step] = ()
        self._is_busy = False
        self.confirms: Confirmation | None = None  # waits for standbys before a result is reported
        self._waiting: deque[Callable[[], object] | tuple[Job, Done]] = deque()
        if watch is not None and is_untouched(disk):
            self._real: RealDisk = disk
            self._io_thread = IoThread(failure)
            watch(self._io_thread.fileno(), self._collect)

    def submit(self, job: Job, done: Done) -> None:
        """See Worker.submit."""
        if self._is_busy:
            self._waiting.append((job, done))
        else:
            self._is_busy = True
            self.submit_in_turn(job, done)

    def take_turn(self, start: Callable[[], object]) -> None:
        """Call start in a turn of its own, which `release_turn`, or a job of `submit_in_turn`, ends."""
        if self._is_busy:
            self._waiting.append(start)
        else:
            self._is_busy = True
            start()

    def release_turn(self) -> None:
        self._is_busy = False
        while self._waiting and not self._is_busy:
            self._is_busy = True
            following = self._waiting.popleft()
            if isinstance(following, tuple):
                self.submit_in_turn(*following)
            else:
                following()

    def submit_in_turn(self, job: Job, done: Done) -> None:
        """For the holder of the turn: a job for the worker, after which the turn ends."""

        def finished(result: Any, error: BaseException | None) -> None:
            try:
                done(result, error)
            finally:
                self.release_turn()

        self._worker.submit(job, partial(self._report, finished))

    def _report(self, done: Done, result: Any, error: BaseException | None) -> None:
        if self.confirms is None or error is not None:
            done(result, error)
        else:
            self.confirms.then(lambda: done(result, None))

    def run(self, steps: Sequence[Step], done: Done) -> None:
        """For the holder of the turn, which keeps it: run an I/O chain. Disk errors are in its result; any other error
        is a bug."""
        if self._io_thread is None:
            self._worker.submit(lambda: run_chain(self._disk, steps, self._failure), partial(self._report, done))
        else:
            self._chain_done = done
            self._steps = steps
            self._io_thread.start(steps)

    def _collect(self) -> None:
        assert self._io_thread is not None
        result = self._io_thread.collect()
        if result is not None and self._chain_done is not None:
            done, self._chain_done = self._chain_done, None
            watcher = self._real.watcher
            if watcher is not None:
                report_chain(watcher, self._steps, result)
            self._report(done, ran(result), None)

    def stop_watching(self) -> None:
        """Before the event loop ends: no chain may follow."""
        if self._io_thread is not None and self._watch is not None:
            self._watch(self._io_thread.fileno(), None)
            self._watch = None

    def close(self) -> None:
        """Finish the submitted jobs. A chain under way ends without a report."""
        if self._io_thread is not None:
            self.stop_watching()
            self._io_thread.close()
        waiting, self._waiting = self._waiting, deque()
        for entry in waiting:
            if isinstance(entry, tuple):
                self._worker.submit(*entry)
        self._worker.close()
