"""What a read needs from the disk is fetched on other threads: the owner serves everybody and waits for nobody.

A read on the owner thread takes only what is in memory. Where that is not enough it raises ReadWaits, and whoever
asked has the rest loaded and reads again. The retry finds everything as it is by then, also if retention or a rewrite
was faster, so nothing of the reading itself happens off the owner thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from headrace.errors import LogClosed
from headrace.log.counters import Counters
from headrace.log.disk.file_cache import FileCache
from headrace.log.disk.workers import Done, Job, Post, ThreadWorker, Worker

THREADS = 4  # a slow read must not hold up the next client's
OUTCOMES_MAX = 64  # of jobs whose reader never came back


class ReadWaits(Exception):
    """No failure: a read needs something that is not in memory yet."""

    def __init__(self, loads: "Loads", key: Hashable, job: Job) -> None:
        super().__init__(f"{key} is not in memory")
        self._loads, self._key, self._job = loads, key, job

    def then(self, callback: Callable[[], object]) -> None:
        """Load it elsewhere, then call back on the owner thread, where the read is to be tried again."""
        # Who waits keeps this exception, and with it all that the read had in its hands: a megabyte, or a large batch.
        self.__traceback__ = None
        self._loads.run(self._key, self._job, callback)

    def load(self) -> None:
        """Load it here and now: for those who may wait."""
        try:
            outcome = self._job()
        except Exception as error:  # noqa: BLE001 - raised by the retry, as after `then`
            outcome = error
        self._loads.keep(self._key, outcome)


class Loader:
    """The threads; made when the first read has to wait. Without `post` there are none: jobs go to `inline`.

    What `alone` is given is done one after the other, by a thread beside them: for jobs that take much memory."""

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
                self._threads.close()  # whoever closed it, on another thread, may have found none to end
        if self._is_closed:
            done(None, LogClosed("the log is closed"))
            return
        worker = self._threads or self._inline
        assert worker is not None
        worker.submit(job, done)

    def close(self) -> None:
        """Whoever waits for what was not begun is gone: thousands may have asked."""
        self._is_closed = True
        if self._threads is not None:
            self._threads.close(finish=False)
        if self.alone is not self:
            self.alone.close()


class Loads:
    """What the loads of one reader came to, until the retry asks. Used by the owner thread only."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.outcomes: OrderedDict[Hashable, Any] = OrderedDict()
        self._running: dict[Hashable, list[Callable[[], object]]] = {}

    def run(self, key: Hashable, job: Job, callback: Callable[[], object]) -> None:
        """Several may wait for the same: it is done once."""
        waiting = self._running.get(key)
        if waiting is not None:
            waiting.append(callback)
            return
        self._running[key] = [callback]

        def done(result: Any, error: BaseException | None) -> None:
            self.keep(key, result if error is None else error)
            for one in self._running.pop(key):
                one()

        self._loader.submit(job, done)

    def keep(self, key: Hashable, outcome: Any) -> None:
        self.outcomes[key] = outcome
        if len(self.outcomes) > OUTCOMES_MAX:
            self.outcomes.popitem(last=False)

    def result(self, key: Hashable, job: Job) -> Any:
        """What the job returned, or its error; ReadWaits as long as it has not been done. Each result is given once."""
        if key not in self.outcomes:
            raise ReadWaits(self, key, job)
        outcome = self.outcomes.pop(key)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def forget(self, key: Hashable) -> None:
        self.outcomes.pop(key, None)


class CachedFiles:
    """Files as far as they are in the page cache; ReadWaits where they are not."""

    def __init__(self, files: FileCache, loads: Loads, counters: Counters) -> None:
        self._files = files
        self._loads = loads
        self._counters = counters

    def read(self, path: str, size: int, position: int) -> bytes:
        data = self._files.read_cached(path, size, position)
        if data is not None:
            if self._loads.outcomes:
                self._loads.forget((path, position, size))
            return data
        self._counters.cold_reads += 1
        self._loads.result((path, position, size), lambda: self._warm(path, size, position))
        # It was loaded and is gone again: with memory that short, wait rather than never get on.
        return self._files.read(path, size, position)

    def _warm(self, path: str, size: int, position: int) -> bool:
        """Into the page cache, and nowhere else: nobody may come back for it."""
        self._files.read(path, size, position)
        return True
