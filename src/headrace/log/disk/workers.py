"""Where the slow half of the log's work runs: threads in production, on demand in tests and tools."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from headrace.log.disk.disk import Disk, RealDisk, is_untouched, ran, run_chain, tell_chain
from headrace.log.disk.io_chain import IoThread, Step, SyncFailure
from headrace.log.standby.acks import StandbyAcks

Job = Callable[[], Any]
Done = Callable[[Any, BaseException | None], None]
Post = Callable[[Callable[[], object]], object]
Watch = Callable[[int, Callable[[], object] | None], object]  # call back when the file is readable; None: no more


class Worker(Protocol):
    def submit(self, job: Job, done: Done) -> None:
        """Run job elsewhere, then done(result, error) on the owner thread. Jobs run in order, one at a time."""

    def close(self) -> None:
        """Finish what was submitted, then stop."""


class ThreadWorker:
    """With more than one thread, jobs begin in order and end in any."""

    def __init__(self, name: str, post: Post, threads: int = 1) -> None:
        self._post = post
        # Waiting for it is part of every confirm: a Semaphore is a dozen Python calls more, and as many locks.
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
            except BaseException as caught:  # noqa: BLE001 - the owner decides what it means
                error = caught
            self._post(partial(done, result, error))

    def close(self, *, finish: bool = True) -> None:
        """Without `finish` what was not begun is left out, and nobody is told."""
        with suppress(Empty):
            while not finish:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()


class InlineWorker:
    """Runs a job when asked to: `pump` is the whole scheduler, so that a test decides the order of events."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Job, Done]] = deque()

    def submit(self, job: Job, done: Done) -> None:
        self._jobs.append((job, done))

    def pump(self) -> bool:
        """One job, if there is one."""
        if not self._jobs:
            return False
        job, done = self._jobs.popleft()
        result, error = None, None
        try:
            result = job()
        except Exception as caught:  # noqa: BLE001 - as the thread does it
            error = caught
        done(result, error)
        return True

    def close(self) -> None:
        while self.pump():
            pass


class SerialExecutor:
    """The worker's jobs and the chains of rounds: in the order in which they came, one at a time, so that what they
    all change has one user at any moment. For the owner thread.

    With `watch` a chain runs in a thread that needs no interpreter; without, it is one more job of the worker.
    """

    def __init__(self, worker: Worker, disk: Disk, failure: SyncFailure, watch: Watch | None = None) -> None:
        self._worker = worker
        self._disk = disk
        self._failure = failure
        self._watch = watch
        self._engine: IoThread | None = None
        self._ended: Done | None = None
        self._steps: Sequence[Step] = ()
        self._is_taken = False
        self.confirms: StandbyAcks | None = None  # whose standbys are asked before anybody hears of what was done
        self._waiting: deque[Callable[[], object] | tuple[Job, Done]] = deque()
        if watch is not None and is_untouched(disk):
            self._real: RealDisk = disk
            self._engine = IoThread(failure)
            watch(self._engine.fileno(), self._collect)

    def submit(self, job: Job, done: Done) -> None:
        """As a Worker does it."""
        if self._is_taken:
            self._waiting.append((job, done))
        else:
            self._is_taken = True
            self.give(job, done)

    def enter(self, start: Callable[[], object]) -> None:
        """Call start when it is its turn, which ends with a job that was given, or with `leave`."""
        if self._is_taken:
            self._waiting.append(start)
        else:
            self._is_taken = True
            start()

    def leave(self) -> None:
        self._is_taken = False
        while self._waiting and not self._is_taken:
            self._is_taken = True
            following = self._waiting.popleft()
            if isinstance(following, tuple):
                self.give(*following)
            else:
                following()

    def give(self, job: Job, done: Done) -> None:
        """In one's turn: a job for the worker, with which the turn ends."""

        def over(result: Any, error: BaseException | None) -> None:
            try:
                done(result, error)
            finally:
                self.leave()

        self._worker.submit(job, partial(self._tell, over))

    def _tell(self, done: Done, result: Any, error: BaseException | None) -> None:
        if self.confirms is None or error is not None:
            done(result, error)
        else:
            self.confirms.then(lambda: done(result, None))

    def run(self, steps: Sequence[Step], ended: Done) -> None:
        """In one's turn, which goes on: a chain. What the disk refuses is in its result; an error is our bug."""
        if self._engine is None:
            self._worker.submit(lambda: run_chain(self._disk, steps, self._failure), partial(self._tell, ended))
        else:
            self._ended = ended
            self._steps = steps
            self._engine.start(steps)

    def _collect(self) -> None:
        assert self._engine is not None
        result = self._engine.collect()
        if result is not None and self._ended is not None:
            ended, self._ended = self._ended, None
            watcher = self._real.watcher
            if watcher is not None:
                tell_chain(watcher, self._steps, result)
            self._tell(ended, ran(result), None)

    def stop_watching(self) -> None:
        """On the owner thread, before its loop ends: no chain follows."""
        if self._engine is not None and self._watch is not None:
            self._watch(self._engine.fileno(), None)
            self._watch = None

    def close(self) -> None:
        """Finish the jobs that were submitted; a chain that is under way ends, and nobody is told."""
        if self._engine is not None:
            self.stop_watching()
            self._engine.close()
        waiting, self._waiting = self._waiting, deque()
        for one in waiting:
            if isinstance(one, tuple):
                self._worker.submit(*one)
        self._worker.close()
