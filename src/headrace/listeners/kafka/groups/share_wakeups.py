"""What a share fetch waits for. A share group has many members that wait for the same partitions, and most of them in
vain: what wakes one should cost it a look at that partition, and at no other."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from headrace.broker.groups.share.groups import ShareGroup
from headrace.broker.streams.partition import Cancellable, Partition

Key = tuple[bytes, int]  # topic id, partition


class Arrivals:
    """Which partitions have something to read since they were watched. Closed by who made it."""

    def __init__(self, group: ShareGroup, *, committed: bool) -> None:
        self.committed = committed
        self._group = group
        self._waiters: dict[Key, Cancellable] = {}
        self._fired: set[Key] = set()
        self._came_back = False  # something, to the group: nobody says to which partition
        self._event = asyncio.Event()
        group.waiting.add(self._return)

    def watch(self, key: Key, partition: Partition, end: int) -> None:
        """From this end on. Again after each time that it was read."""
        if (before := self._waiters.get(key)) is not None:
            before.cancel()
        self._waiters[key] = partition.wait(end, partial(self._fire, key), committed=self.committed)

    def _fire(self, key: Key) -> None:
        self._fired.add(key)
        self._event.set()

    def _return(self) -> None:
        self._came_back = True
        self._event.set()

    async def wait(self, seconds: float) -> None:
        """For one of them, or for what came back to the group."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()

    def among(self, keys: Iterable[Key]) -> list[Key]:
        """Those of them that there may be something in, in their order. They are to be watched again."""
        fired, came_back = self._fired, self._came_back
        self._fired, self._came_back = set(), False
        self._event.clear()
        return [key for key in keys if came_back or key in fired]

    def close(self) -> None:
        self._group.waiting.discard(self._return)
        for waiter in self._waiters.values():
            waiter.cancel()
