"""Wake-ups of waiting share fetches.

Many members of a share group wait for the same partitions, most of them in vain, so a wake-up must cost a member a read
of the partition that fired and of no other.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from headrace.broker.groups.share.group import ShareGroup
from headrace.broker.streams.partition import Cancellable, Partition

Key = tuple[bytes, int]  # topic id, partition


class Arrivals:
    """The partitions that became readable since they were watched. Its creator closes it."""

    def __init__(self, group: ShareGroup, *, committed: bool) -> None:
        self.committed = committed
        self._group = group
        self._waiters: dict[Key, Cancellable] = {}
        self._fired: set[Key] = set()
        self._has_returned = False  # records were released to the group, in an unknown partition
        self._event = asyncio.Event()
        group.waiting.add(self._on_returned)

    def watch(self, key: Key, partition: Partition, end: int) -> None:
        """Fire when the partition has records from this end on. To be called again after each read."""
        if (before := self._waiters.get(key)) is not None:
            before.cancel()
        self._waiters[key] = partition.wait(end, partial(self._fire, key), committed=self.committed)

    def _fire(self, key: Key) -> None:
        self._fired.add(key)
        self._event.set()

    def _on_returned(self) -> None:
        self._has_returned = True
        self._event.set()

    async def wait(self, seconds: float) -> None:
        """Wait until a partition fires, records are released to the group, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()

    def take_fired(self, keys: Iterable[Key]) -> list[Key]:
        """Those keys that may have records to read, in their order. Clears them: they have to be watched again."""
        fired, has_returned = self._fired, self._has_returned
        self._fired, self._has_returned = set(), False
        self._event.clear()
        return [key for key in keys if has_returned or key in fired]

    def close(self) -> None:
        self._group.waiting.discard(self._on_returned)
        for waiter in self._waiters.values():
            waiter.cancel()
