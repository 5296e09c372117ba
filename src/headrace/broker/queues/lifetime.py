"""When a queue that is no longer used is deleted: auto-delete and x-expires."""

import asyncio
from collections.abc import Callable

from headrace.broker.queues.consumers import Consumers
from headrace.clock import Clock


class Lifetime:
    """Owned by one Queue."""

    def __init__(
        self,
        consumers: Consumers,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        *,
        auto_delete: bool,
        expires_ms: int | None,
        delete: "Callable[[], asyncio.Task[None] | None]",
    ) -> None:
        self._consumers = consumers
        self._clock = clock
        self._loop = loop
        self._auto_delete = auto_delete
        self.expires_ms = expires_ms
        self._delete = delete
        self._had_consumer = False
        self._last_used = clock.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        if expires_ms is not None:
            self._arm()

    def used(self) -> None:
        """The queue was declared again or read from: x-expires starts anew."""
        self._last_used = self._clock.monotonic()

    def consumer_added(self) -> None:
        self._had_consumer = True

    def last_consumer_removed(self) -> "asyncio.Task[None] | None":
        """The task that deletes the queue, if it is an auto-delete queue whose deletion takes time."""
        if self._auto_delete and not self._is_closed:
            return self._delete()
        if self.expires_ms is not None:
            self._arm()
        return None

    def set_expires(self, expires_ms: int | None) -> None:
        before, self.expires_ms = self.expires_ms, expires_ms
        if expires_ms is not None and expires_ms != before:
            self._arm()

    @property
    def is_abandoned(self) -> bool:
        """Whether an automatic deletion may still go ahead."""
        return not len(self._consumers) and ((self._auto_delete and self._had_consumer) or self._is_idle)

    def deletion_cancelled(self) -> None:
        """An automatic deletion was given up: try again after x-expires."""
        if self.expires_ms is not None and not self._is_closed and not len(self._consumers):
            self._arm()

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    @property
    def _is_idle(self) -> bool:
        """Whether the queue has been unused for x-expires."""
        expires_ms = self.expires_ms
        return expires_ms is not None and (self._clock.monotonic() - self._last_used) * 1000 >= expires_ms - 1

    def _arm(self, idle_s: float = 0.0) -> None:
        """There is one timer, however often consumers come and go."""
        assert self.expires_ms is not None
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self.expires_ms / 1000 - idle_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._is_closed or len(self._consumers) or self.expires_ms is None:
            return
        if self._is_idle:
            self._delete()
        else:
            self._arm(self._clock.monotonic() - self._last_used)
