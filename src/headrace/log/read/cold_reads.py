"""Cold reads: bytes that are not in memory are loaded on other threads, so that the owner thread never waits.

A read on the owner thread uses only what is in memory. Where that is not enough it raises ReadWaits, and the caller
has the rest loaded and repeats the read. The retry sees the log as it is by then, even if retention or a rewrite was
faster, so the reading itself happens only on the owner thread.
"""

from collections.abc import Callable, Hashable
from typing import Any

from headrace.errors import LogClosed
from headrace.log.counters import Counters
from headrace.log.disk.file_cache import FileCache
from headrace.log.disk.workers import Done, Job, Post, ThreadWorker, Worker

THREADS = 4  # a slow read must not delay the next client's
OUTCOMES_MAX = 64  # results kept for readers that have not retried yet


class ReadWaits(Exception):
    """Not a failure: a read needs bytes that are not in memory yet."""

    def __init__(self, loads: "Loads", key: Hashable, job: Job) -> None:
        super().__init__(f"{key} is not in memory")
        self._loads, self._key, self._job = loads, key, job

    def then(self, callback: Callable[[], object]) -> None:
        """Load the bytes on another thread, then call back on the owner thread, which repeats the read."""
        # The waiter keeps this exception, and the traceback would keep the read's locals: a megabyte or a large batch.
        self.__traceback__ = None
        self._loads.run(self._key, self._job, callback)

    def load(self) -> None:
        """Load the bytes on this thread, for callers that may wait for the disk."""
        try:
            outcome = self._job()
        except Exception as error:  # noqa: BLE001 - raised by the retry, as after `then`
            outcome = error
        self._loads.keep(self._key, outcome)


class Loader:
    """The loading threads, started when the first read has to wait. Without `post` jobs go to the `inline` worker.

    `alone` is a second loader with a single thread, for jobs that need much memory."""

    def __init__(self, post: Post | None, inline: Worker | None = None, threads: int = THREADS) -> None:
        self._post = post
        self._inline = inline
        self._count = threads
        self._threads: ThreadWorker | None = None
        self._is_closed = False
        self.alone = self if threads == 1 else Loader(post, inline, 1)

    def submit(self, job: Job, done: Done) -> None:
        if self._post is not None and self._threads is None and not self._is_closed:
            self._threads = ThreadWorker("headrace-loader", self._post, self._count)
            if self._is_closed:
                self._threads.close()  # `close` on another thread may have run before these threads existed
        if self._is_closed:
            done(None, LogClosed("the log is closed"))
            return
        worker = self._threads or self._inline
        assert worker is not None
        worker.submit(job, done)

    def close(self) -> None:
        """Drops the jobs that have not started, of which there may be thousands: their waiters are gone."""
        self._is_closed = True
        if self._threads is not None:
            self._threads.close(finish=False)
        if self.alone is not self:
            self.alone.close()


class Loads:
    """The loads of one reader and their results, each kept until the retry takes it, or until `outcomes_max` others
    followed. Used by the owner thread only."""

    __slots__ = ("_loader", "_outcomes_max", "_running", "outcomes")

    def __init__(self, loader: Loader, outcomes_max: int = OUTCOMES_MAX) -> None:
        self._loader = loader
        self._outcomes_max = outcomes_max
        self.outcomes: dict[Hashable, Any] = {}
        self._running: dict[Hashable, list[Callable[[], object]]] = {}

    def run(self, key: Hashable, job: Job, callback: Callable[[], object]) -> None:
        """Run a job once for all callers that wait for the same key."""
        waiting = self._running.get(key)
        if waiting is not None:
            waiting.append(callback)
            return
        self._running[key] = [callback]

        def done(result: Any, error: BaseException | None) -> None:
            self.keep(key, result if error is None else error)
            for notify in self._running.pop(key):
                notify()

        self._loader.submit(job, done)

    def keep(self, key: Hashable, outcome: Any) -> None:
        self.outcomes[key] = outcome
        if len(self.outcomes) > self._outcomes_max:
            del self.outcomes[next(iter(self.outcomes))]

    def result(self, key: Hashable, job: Job) -> Any:
        """The job's result, or its error; ReadWaits until the job has run. A result is returned once."""
        if key not in self.outcomes:
            raise ReadWaits(self, key, job)
        outcome = self.outcomes.pop(key)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def forget(self, key: Hashable) -> None:
        self.outcomes.pop(key, None)


class CachedFiles:
    """Reads files from the page cache; ReadWaits for bytes that are not in it."""

    __slots__ = ("_files", "counters", "loads")

    def __init__(self, files: FileCache, loads: Loads, counters: Counters) -> None:
        self._files = files
        self.loads = loads
        self.counters = counters

    def read(self, path: str, size: int, position: int) -> bytes:
        data = self._files.read_cached(path, size, position)
        if data is not None:
            if self.loads.outcomes:
                self.loads.forget((path, position, size))
            return data
        self.counters.cold_reads += 1
        self.loads.result((path, position, size), lambda: self._warm(path, size, position))
        # The bytes were loaded and evicted again. With so little memory, wait for the disk rather than retry for ever.
        return self._files.read(path, size, position)

    def _warm(self, path: str, size: int, position: int) -> bool:
        """Load into the page cache only: the reader may never retry."""
        self._files.read(path, size, position)
        return True
