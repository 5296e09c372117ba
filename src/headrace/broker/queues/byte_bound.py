"""How many bytes of bodies wait in a queue, for queues that are bounded by them.

What has become visible is counted from the log, a piece at a time, so it does not matter through which listener it
came, or
whether it was there before the bound was, or before the broker was. `counted` is how far that is: what is taken or
comes back below it changes the sum, what is taken above it is not met as waiting when the count gets there. A backlog
that was never counted is gone through in turns, beside other work; the sum is too small until then, never too large.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from headrace.broker.queues.view import Run, View
from headrace.broker.streams.browse import READY, state_of
from headrace.broker.streams.partition import ReadWaits
from headrace.errors import HeadraceError
from headrace.record import codec

if TYPE_CHECKING:
    from headrace.broker.queues.backlog import QueueContents

TURN_BYTES = 256 * 1024


class ReadyBytes:
    def __init__(self, queue: "QueueContents", counted_all: Callable[[], object]) -> None:
        self._queue = queue
        self._counted_all = counted_all
        self._counted: dict[View, int] = {view: view.low for view in queue.views}
        self._unflushed: deque[list[int]] = deque()  # [flush, bytes]: published here and not visible yet
        self._returned: dict[tuple[View, int], int] = {}  # waiting again, and read for their size
        self._is_busy = False
        self.total = 0

    @property
    def with_unflushed(self) -> int:
        return self.total + sum(size for _, size in self._unflushed)

    # What the queue tells.

    def published(self, flush: int, size: int) -> None:
        if self._unflushed and self._unflushed[-1][0] == flush:
            self._unflushed[-1][1] += size
        else:
            self._unflushed.append([flush, size])

    def flushed(self, flush: int) -> None:
        """All that was published before that flush is visible now, or was refused."""
        while self._unflushed and self._unflushed[0][0] <= flush:
            self._unflushed.popleft()
        self.catch_up()

    def taken(self, view: View, offset: int, size: int) -> None:
        if offset < self._counted[view]:
            self.total -= size

    def came_back(self, view: View, offset: int) -> None:
        if offset < self._counted[view]:
            self._add_returned(view, offset)

    def _add_returned(self, view: View, offset: int) -> bool:
        """False: it is being read from the disk, and is counted when it is there."""
        try:
            self.total += _size_of(view, offset)
        except ReadWaits as cold:
            self._returned[view, offset] = self._returned.get((view, offset), 0) + 1
            cold.then(partial(self._read_returned, view, offset))
            return False
        return True

    def _read_returned(self, view: View, offset: int) -> None:
        times = self._returned.pop((view, offset), 0)
        if self._queue.is_deleted or not times:
            return  # purged meanwhile
        if times > 1:  # it was taken and came back once more
            self._returned[view, offset] = times - 1
        if self._add_returned(view, offset):
            self._counted_all()

    def purged(self) -> None:
        self.total = 0
        self._returned.clear()

    def up_to(self, view: View, start: int, end: int) -> int:
        """Where a run from start to end has to be cut, so that all of it is counted or none is."""
        counted = self._counted[view]
        return min(end, counted) if start < counted else end

    # Counting.

    def catch_up(self) -> None:
        if not self._is_busy:
            self._go_on()

    def _go_on(self) -> None:
        self._is_busy = False
        if self._queue.is_deleted:
            return
        left = TURN_BYTES
        for view in self._queue.views:
            while self._counted[view] < view.log.stable_end:
                if left <= 0:
                    self._is_busy = True
                    self._queue.vhost.loop.call_soon(self._go_on)
                    return
                try:
                    left -= self._count_some(view)
                except ReadWaits as cold:
                    self._is_busy = True
                    cold.then(self._go_on)
                    return
        self._counted_all()

    def _count_some(self, view: View) -> int:
        """How many bytes were looked at."""
        start, stable_end = self._counted[view], view.log.stable_end
        gap = view.settled.gap(start, stable_end)
        if gap is None:
            self._counted[view] = stable_end
            return 0
        start = max(gap[0], view.log.start_offset)
        try:
            chunk = view.committed(view.log.read_now(start, TURN_BYTES))
            upto = min(stable_end, chunk.next_offset)
            records = codec.records(chunk.data, from_offset=start, to_offset=upto) if chunk.data else []
        except ReadWaits:
            raise
        except HeadraceError:  # damaged, or gone meanwhile: whoever reads it is told
            self._counted[view] = start + 1
            return 1
        for record in records:
            if state_of(view, record.offset) == READY:
                self.total += len(record.value or b"")
        self._counted[view] = max(upto, start + 1)
        return len(chunk.data)


def _size_of(view: View, offset: int) -> int:
    run = Run(offset, offset + 1, 0, True)
    try:
        view.load_chunk(run)
        data = view.chunk(run).data
        found = codec.records(data, from_offset=offset, to_offset=offset + 1, limit=1) if data else []
    except ReadWaits:
        raise
    except HeadraceError:  # damaged, or gone meanwhile: whoever reads it is told
        return 0
    return len(found[0].value or b"") if found else 0
