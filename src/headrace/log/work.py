"""Where the slow half of the log's work runs: threads in production, on demand in tests and tools."""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

Job = Callable[[], Any]
Done = Callable[[Any, BaseException | None], None]
Post = Callable[[Callable[[], object]], object]


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

    def close(self) -> None:
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
