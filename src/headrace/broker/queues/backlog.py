"""A queue's messages: a view of a log for each priority level in use."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from headrace.broker.queues.view import View
from headrace.broker.queues.view_reader import Run
from headrace.broker.streams.partition import ReadWaits, when_loaded
from headrace.broker.types.message import Message, from_record
from headrace.broker.types.range_set import RangeSet


class TakenMessage(NamedTuple):
    """A message taken from the head of the queue, as the first offset of a run."""

    view: View
    run: Run
    message: Message


class Backlog:
    """Owned by one Queue. Knows neither consumers nor limits."""

    def __init__(self, views: list[View]) -> None:
        self.views = views  # highest priority first
        self.is_closed = False
        self._loading: list[Callable[[], object]] = []  # callbacks that wait for a disk read

    @property
    def ready(self) -> int:
        return sum(view.ready for view in self.views)

    @property
    def pending(self) -> int:
        """Messages published and not readable yet."""
        return sum(view.pending_records for view in self.views)

    @property
    def is_empty(self) -> bool:
        return not any(view.has_ready or view.out or view.pending_records for view in self.views)

    def view_for(self, message: Message) -> View:
        """The view of the message's priority."""
        views = self.views
        if len(views) == 1:
            return views[0]
        highest = len(views) - 1
        return views[highest - min(message.priority(), highest)]

    def follow_starts(self) -> None:
        """Stop counting messages that were deleted from the logs."""
        for view in self.views:
            view.follow_start()

    # Reading.

    def next_run(self) -> tuple[View, Run] | None:
        """The next offsets for a consumer, highest priority first."""
        for view in self.views:
            run = view.next_run()
            if run is not None:
                return view, run
            if view.has_ready:
                return None  # waits for its reservation: a lower priority must not overtake it
        return None

    def lowest_head(self) -> tuple[View, Run] | None:
        """The head of the lowest priority that has messages."""
        for view in reversed(self.views):
            if view.has_ready and (run := view.next_run_unreserved()) is not None:
                return view, run
        return None

    def is_loaded(self, view: View, run: Run, then: Callable[[], object]) -> bool:
        """Whether the run can be read without blocking. If not, the disk read has begun and `then` is called after
        it."""
        try:
            view.reader.load_chunk(run)
        except ReadWaits as cold:
            if then not in self._loading:
                self._loading.append(then)
                cold.then(lambda: self._loaded(then))
            return False
        return True

    def _loaded(self, then: Callable[[], object]) -> None:
        self._loading.remove(then)
        if not self.is_closed:
            then()

    def read(self, view: View, run: Run) -> Message | None:
        """The message at the start of the run. None if there is none; its offset is then settled."""
        found = self.read_some(view, run, 1)
        return found[0][1] if found else None

    def read_some(self, view: View, run: Run, count_max: int) -> list[tuple[int, Message]]:
        """Messages from the start of the run to the first missing offset. Empty if the first offset is missing; the
        missing offsets are then settled."""
        found, next_offset = view.reader.records(run, count_max)
        if not found:
            self.skip(view, run, next_offset)
        return [(record.offset, from_record(record)) for record in found]

    def skip(self, view: View, run: Run, to: int) -> None:
        """Settle offsets of the run that hold no message."""
        view.advance(run, to)
        view.settle(run.start, to)

    def take_head(self, *, lowest: bool = False) -> TakenMessage | None:
        """Take the first message of the highest (or lowest) priority; it is in flight until it is settled."""
        for view in reversed(self.views) if lowest else self.views:
            while view.has_ready:
                run = view.next_run_unreserved()
                if run is None:
                    break
                message = self.read(view, run)
                if message is None:
                    continue
                view.advance(run, run.start + 1)
                return TakenMessage(view, run, message)
        return None

    async def prepare_take(self) -> None:
        """Wait until the next take_head needs neither a reservation nor the disk."""
        for view in self.views:
            await view.reserve_next()
            if self.is_closed:
                return
            if view.has_ready:
                await when_loaded(partial(_load_head, view))
                return

    # Settling.

    def settle_head(self, count: int) -> None:
        """Settle up to so many ready messages of a queue without priorities, without reading them."""
        view = self.views[0]
        run = view.next_run_unreserved()
        if run is None:
            return
        end = min(run.end, run.start + count)
        view.advance(run, end)
        view.settle(run.start, end)

    def settle_ready(self) -> int:
        """Settle all ready messages; returns how many. Messages in flight stay in flight."""
        settled = 0
        for view in self.views:
            while (run := view.next_run_unreserved()) is not None:
                settled += run.end - run.start
                view.advance(run, run.end)
                view.settle(run.start, run.end)
        return settled

    def settle_void(self, view: View, void: RangeSet) -> None:
        """Settle offsets without a message, before a consumer meets them."""
        for start, end in void:
            view.settle(start, end)

    def release_chunks(self) -> None:
        for view in self.views:
            view.reader.release_chunk()

    def close(self) -> None:
        """The queue has been deleted."""
        self.is_closed = True
        for view in self.views:
            view.release_waiters()
            view.take_batch()


def _load_head(view: View) -> None:
    run = view.next_run_unreserved()
    if run is not None:
        view.reader.load_chunk(run)
