"""What the parts of maintenance share: background threads, retries, and the state of the shard."""

from collections.abc import Callable
from typing import Protocol

from headrace.errors import StorageError
from headrace.log.disk.workers import InlineWorker, Post, ThreadWorker, Worker

CLEANER, REMOVER = "headrace-cleaner", "headrace-remover"


class ShardHealth(Protocol):
    """Whether the shard still works. A failure that leaves the disk in an unknown state is reported here."""

    @property
    def failure(self) -> StorageError | None: ...
    @property
    def is_closed(self) -> bool: ...
    def fail(self, error: BaseException) -> None: ...


def report_failure(health: ShardHealth) -> Callable[[object, BaseException | None], None]:
    """A callback for jobs whose failure is one of the shard."""

    def done(_result: object, error: BaseException | None) -> None:
        if error is not None:
            health.fail(error)

    return done


class BackgroundWorkers:
    """Threads for long jobs, started when there is something to do. An inline shard uses its keeper instead."""

    def __init__(self, keeper: Worker, post: Post) -> None:
        self._keeper = keeper
        self._post = post
        self._workers: dict[str, ThreadWorker] = {}

    def get(self, name: str) -> Worker:
        if isinstance(self._keeper, InlineWorker):
            return self._keeper
        if name not in self._workers:
            self._workers[name] = ThreadWorker(name, self._post)
        return self._workers[name]

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


class Retries:
    """Steps that failed for lack of disk space, repeated at every tick."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def add(self, step: Callable[[], None]) -> None:
        self._waiting.append(step)

    def run(self) -> None:
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            step()
