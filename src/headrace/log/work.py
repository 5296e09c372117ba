"""Where the slow half of the log's work runs: threads in production, on demand in tests and tools."""

import threading
from collections import deque
from collections.abc import Callable
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
    def __init__(self, name: str, post: Post) -> None:
        self._post = post
        self._jobs: deque[tuple[Job, Done] | None] = deque()
        self._wake = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job, done: Done) -> None:
        self._jobs.append((job, done))
        self._wake.release()

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            entry = self._jobs.popleft()
            if entry is None:
                return
            job, done = entry
            result, error = None, None
            try:
                result = job()
            except BaseException as caught:  # noqa: BLE001 - the owner decides what it means
                error = caught
            self._post(_Call(done, result, error))

    def close(self) -> None:
        self._jobs.append(None)
        self._wake.release()
        self._thread.join()


class _Call:
    __slots__ = ("_done", "_error", "_result")

    def __init__(self, done: Done, result: Any, error: BaseException | None) -> None:
        self._done, self._result, self._error = done, result, error

    def __call__(self) -> None:
        self._done(self._result, self._error)


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
