"""Counts the bytes of message bodies that wait in a queue with a limit on them.

Readable messages are counted from the log, a piece at a time. So it does not matter which listener they came from, or
whether they are older than the limit or the broker's start. `_counted` is how far a view has been counted: taking or
returning a message below it changes the total, and a message taken above it is not counted later. A long backlog is
counted in the background; until then the total is too small, never too large.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.broker.queues.backlog import Backlog
from headrace.broker.queues.view import View, stored_log
from headrace.broker.queues.view_reader import Run
from headrace.broker.streams.browse import READY, state_of
from headrace.broker.streams.decode import INLINE_BYTES_MAX, is_small
from headrace.broker.streams.partition import ReadWaits
from headrace.errors import DecompressedTooLarge, HeadraceError
from headrace.log.read.cold_reads import Loads
from headrace.record import codec

TURN_BYTES = 256 * 1024
TURN_MESSAGES = 5000  # of one chunk
SIZE_BYTES = 64  # counting a message costs about as much as reading so many bytes


class ReadyBytes:
    """Owned by the QueueLimits of one queue. `on_counted` is called whenever the count has caught up."""

    def __init__(self, backlog: Backlog, loop: asyncio.AbstractEventLoop, on_counted: Callable[[], object]) -> None:
        self._backlog = backlog
        self._loop = loop
        self._on_counted = on_counted
        self._counted: dict[View, int] = {view: view.low for view in backlog.views}
        self._unflushed: deque[list[int]] = deque()  # [flush, bytes] of messages published and not readable yet
        self._returned: dict[tuple[View, int], int] = {}  # returned messages whose size is being read, and how often
        self._is_busy = False
        self._loads: Loads | None = None  # made when the first large batch is met
        self.total = 0

    @property
    def with_unflushed(self) -> int:
        return self.total + sum(size for _, size in self._unflushed)

    # Events.

    def published(self, flush: int, size: int) -> None:
        if self._unflushed and self._unflushed[-1][0] == flush:
            self._unflushed[-1][1] += size
        else:
            self._unflushed.append([flush, size])

    def flushed(self, flush: int) -> None:
        """Everything published before that flush is readable now, or was refused."""
        while self._unflushed and self._unflushed[0][0] <= flush:
            self._unflushed.popleft()
        self.catch_up()

    def taken(self, view: View, offset: int, size: int) -> None:
        if offset < self._counted[view]:
            self.total -= size

    def returned(self, view: View, offset: int) -> None:
        if offset < self._counted[view]:
            self._add_returned(view, offset)

    def _add_returned(self, view: View, offset: int) -> bool:
        """False if the message has to be read from the disk; it is counted after that."""
        try:
            self.total += _size_of(view, offset)
        except ReadWaits as cold:
            self._returned[view, offset] = self._returned.get((view, offset), 0) + 1
            cold.then(partial(self._read_returned, view, offset))
            return False
        return True

    def _read_returned(self, view: View, offset: int) -> None:
        times = self._returned.pop((view, offset), 0)
        if self._backlog.is_closed or not times:
            return  # the queue was purged meanwhile
        if times > 1:  # it was taken and returned again meanwhile
            self._returned[view, offset] = times - 1
        if self._add_returned(view, offset):
            self._on_counted()

    def purged(self) -> None:
        self.total = 0
        self._returned.clear()

    def up_to(self, view: View, start: int, end: int) -> int:
        """The end of the run, cut so that either all of it has been counted or nothing."""
        counted = self._counted[view]
        return min(end, counted) if start < counted else end

    # Counting.

    def catch_up(self) -> None:
        if not self._is_busy:
            self._count_on()

    def _count_on(self) -> None:
        self._is_busy = False
        if self._backlog.is_closed:
            return
        left = TURN_BYTES
        for view in self._backlog.views:
            while self._counted[view] < view.log.stable_end:
                if left <= 0:
                    self._is_busy = True
                    self._loop.call_soon(self._count_on)
                    return
                try:
                    left -= self._count_some(view)
                except ReadWaits as cold:
                    self._is_busy = True
                    cold.then(self._count_on)
                    return
        self._on_counted()

    def _count_some(self, view: View) -> int:
        """Count some messages of the view; returns how many bytes were read."""
        start, stable_end = self._counted[view], view.log.stable_end
        gap = view.settled.gap(start, stable_end)
        if gap is None:
            self._counted[view] = stable_end
            return 0
        start = max(gap[0], view.log.start_offset)
        try:
            chunk = view.reader.committed(view.log.read_now(start, TURN_BYTES))
            upto = min(stable_end, chunk.next_offset)
            sizes, next_offset = self._sizes(view, chunk, start, upto)
        except ReadWaits:
            raise
        except HeadraceError:  # damaged or deleted: reported when it is delivered
            self._counted[view] = start + 1
            return 1
        for offset, size in sizes:
            if state_of(view, offset) == READY:
                self.total += size
        self._counted[view] = max(next_offset, start + 1)
        return max(len(chunk.data), SIZE_BYTES * len(sizes))

    def _sizes(self, view: View, chunk: Any, start: int, upto: int) -> tuple[list[tuple[int, int]], int]:
        """Offsets and sizes of the first messages of a chunk, and the offset behind them. A batch that decompresses to
        much is decompressed in a thread: ReadWaits until that is done."""
        sizes: list[tuple[int, int]] = []
        for info in codec.scan(chunk.data, verify_crc=False) if chunk.data else ():
            if info.next_offset <= start:
                continue
            look = partial(codec.value_sizes, chunk.data, info.position, from_offset=start, to_offset=upto)
            look = partial(look, limit=TURN_MESSAGES)
            if sizes and (len(sizes) >= TURN_MESSAGES or not is_small(chunk.data, info)):
                return sizes, info.base_offset
            try:
                found = look(decompressed_bytes_max=INLINE_BYTES_MAX) if is_small(chunk.data, info) else None
            except DecompressedTooLarge:
                found = None  # it holds more than it declares
            if found is None:
                if sizes:
                    return sizes, info.base_offset
                if self._loads is None:
                    self._loads = Loads(stored_log(view).loader.alone, outcomes_max=1)
                key = stored_log(view).id, info.base_offset, info.size, start
                found = self._loads.result(key, partial(look, in_thread=True))
            sizes += found[0]
            if found[1] < min(info.next_offset, upto):
                return sizes, found[1]
        return sizes, upto


def _size_of(view: View, offset: int) -> int:
    run = Run(offset, offset + 1, 0, True)
    try:
        view.reader.load_chunk(run)
        found, _ = view.reader.records(run, 1)
    except ReadWaits:
        raise
    except HeadraceError:  # damaged or deleted: reported when it is delivered
        return 0
    return len(found[0].value or b"") if found else 0
