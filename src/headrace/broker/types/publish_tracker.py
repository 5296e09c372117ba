"""Tells each publisher of a flush whether its own publishes were stored.

One flush carries the publishes of many connections, to many logs, and each log may store or refuse its part. A
publisher that needs to know the outcome of its publishes makes a PublishTracker and sets it as the coordinator's
`tracker` while it publishes: every view it writes to then adds the tracker to its batch. When the flush ends, the
waiter gets one error for the whole flush, and `tracker.outcome(error)` reduces it to the publishes of this tracker.
"""

from collections.abc import Iterable
from typing import Any, Protocol

from headrace.errors import HeadraceError, StorageError


class CachedRoute(Protocol):
    """A publisher's route that caches the writers of its queues (wire.amqp.scan.Target)."""

    def reset(self) -> None:
        """Forget the writers: the next publish opens them again, and registers the tracker of that time."""


class HasViews(Protocol):
    """A queue."""

    @property
    def views(self) -> Iterable[Any]: ...


class PublishTracker:
    """Stands for the publishes of one publisher between two confirms. A batch may carry several trackers."""

    __slots__ = ("_targets", "stores")

    def __init__(self) -> None:
        self.stores = False  # a publish goes to a durable queue
        self._targets: list[CachedRoute] = []

    def add(self, target: CachedRoute | None, *, durable: bool) -> None:
        """A publish opened a writer; `target` has cached it."""
        self.stores = self.stores or durable
        if target is not None:
            self._targets.append(target)

    def detach(self) -> None:
        """Stop tracking. Cached writers are dropped: publishes through them would not be seen by the next tracker."""
        for target in self._targets:
            target.reset()
        self._targets.clear()

    def outcome(self, error: HeadraceError | None) -> HeadraceError | None:
        """The result of a flush for the publishes of this tracker."""
        if error is None or not self.stores:
            return None
        return error.outcome_for(self) if isinstance(error, PartialFlush) else error


Trackers = frozenset[PublishTracker]


class PartialFlush(StorageError):
    """Some logs stored their part of a flush and some refused it."""

    def __init__(self, cause: HeadraceError, stored: Trackers, refused: Trackers, refusing: frozenset[Any]) -> None:
        super().__init__(str(cause))
        self._cause, self._stored, self._refused = cause, stored, refused
        self._refusing = refusing  # views

    def is_stored_in(self, queues: Iterable[HasViews]) -> bool:
        """Whether no view of these queues refused its part."""
        return self._refusing.isdisjoint(view for queue in queues for view in queue.views)

    def outcome_for(self, tracker: PublishTracker) -> HeadraceError | None:
        if tracker in self._refused:
            return self if tracker in self._stored else self._cause
        # A tracker that is in neither set is treated as failed.
        return None if tracker in self._stored else StorageError(str(self._cause))
