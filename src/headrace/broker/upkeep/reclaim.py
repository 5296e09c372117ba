"""Reclaims the disk space of settled messages: deletes whole segments, and rewrites segments around a stuck message.

The pure functions decide, `Reclaim` acts, periodically and one log at a time. Settled history that the queue is to
keep (x-retain-ms, x-retain-bytes), or that a cursor pins, stays.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from headrace.broker.cooperative import YieldEvery
from headrace.broker.queues.flush import FlushCoordinator
from headrace.broker.queues.queue_arguments import QueueArguments
from headrace.broker.queues.view import View, stored_log
from headrace.broker.types.range_set import RangeSet
from headrace.clock import Clock
from headrace.errors import HeadraceError, StorageError
from headrace.log.segments.segment import Segment
from headrace.log.shard import Shard
from headrace.record.types import BatchInfo

EMPTY_BYTES_MIN = 1 << 20  # an empty queue with less than this on disk is not touched
REWRITE_BYTES_MIN = 1 << 20
LIVE_SHARE_MAX = 0.25  # a sealed segment with fewer live records than this is rewritten


class Retain(NamedTuple):
    """How much settled history a queue keeps; None is none."""

    age_ms: int | None = None
    size_bytes: int | None = None

    @property
    def is_wanted(self) -> bool:
        return self.age_ms is not None or self.size_bytes is not None


def settled_start(
    segments: Sequence[Segment], *, low: int, end: int, holds: Iterable[int], retain: Retain, now_ms: int
) -> int:
    """The offset before which whole segments may be deleted; 0 if none. Everything below `low` is settled."""
    start = 0
    low = min([low, *holds])
    total = sum(segment.size for segment in segments)
    for at, segment in enumerate(segments):
        is_last = at == len(segments) - 1
        after = end if is_last else segments[at + 1].base
        if after > low or (is_last and total < EMPTY_BYTES_MIN):
            break
        if retain.age_ms is not None and segment.records and now_ms - segment.max_timestamp <= retain.age_ms:
            break
        if retain.size_bytes is not None and total - segment.size < retain.size_bytes:
            break
        start = after
        total -= segment.size
    return start


def mostly_settled(segments: Sequence[Segment], settled: RangeSet, holds: Iterable[int]) -> list[list[Segment]]:
    """Runs of adjacent sealed segments that are large and have few live records: each is rewritten as one."""
    hold = min(holds, default=None)
    runs: list[list[Segment]] = [[]]
    for segment in segments:
        if not segment.is_sealed or (hold is not None and hold < segment.next_offset):
            break
        live = segment.next_offset - segment.base - settled.count(segment.base, segment.next_offset)
        if segment.records and live < segment.records * LIVE_SHARE_MAX:
            runs[-1].append(segment)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if sum(segment.size for segment in run) >= REWRITE_BYTES_MIN]


Keep = Callable[[memoryview, BatchInfo], list[int] | None]


def keep_unsettled(settled: RangeSet) -> Keep:
    """A filter for rewriting. It uses a copy of the set, because it runs in another thread."""
    copy = RangeSet(list(settled))

    def keep(_data: memoryview, info: BatchInfo) -> list[int] | None:
        kept: list[int] = []
        at, end = info.base_offset, info.last_offset + 1
        while (gap := copy.gap(at, end)) is not None:
            if gap == (info.base_offset, end):
                return None
            kept.extend(range(*gap))
            at = gap[1]
        return kept

    return keep


class Hosts(Protocol):
    @property
    def flushes(self) -> FlushCoordinator: ...

    def own_views(self) -> Iterator[tuple[QueueArguments, View]]: ...


class Reclaim:
    def __init__(self, shard: Shard, hosts: Hosts, clock: Clock) -> None:
        self._shard = shard
        self._hosts = hosts
        self._clock = clock
        self.segments_rewritten = 0
        self.bytes_freed = 0

    async def once(self) -> None:
        turns = YieldEvery()
        failed: HeadraceError | None = None
        async for policy, view in turns.each(list(self._hosts.own_views())):
            try:
                if not stored_log(view).is_closed:
                    await self._reclaim(view, Retain(policy.retain_ms, policy.retain_bytes))
            except HeadraceError as error:  # a damaged log must not stop the others
                if not stored_log(view).is_closed:
                    failed = failed or error
        if failed is not None:
            raise failed

    async def _reclaim(self, view: View, retain: Retain) -> None:
        log = stored_log(view)
        start = self._start(view, retain)
        if start > log.start_offset and await self._moves_are_stored(view):
            await self._delete_before(view, min(start, self._start(view, retain)))
        if not retain.is_wanted:
            # Segments before the start are being deleted already.
            wanted = [segment for segment in log.segments if segment.next_offset > log.start_offset]
            for run in mostly_settled(wanted, view.settled, log.pins.values()):
                keep = keep_unsettled(view.settled)
                if not await self._moves_are_stored(view) or not set(log.segments).issuperset(run):
                    return
                await self._rewrite(view, run, keep)

    def _start(self, view: View, retain: Retain) -> int:
        """Compute it again after each await: a new pin may hold what was free."""
        log = stored_log(view)
        return settled_start(
            log.segments,
            low=view.low,
            end=log.visible_end,
            holds=log.pins.values(),
            retain=retain,
            now_ms=self._clock.now_ms(),
        )

    async def _delete_before(self, view: View, start: int) -> None:
        log = stored_log(view)
        if start > log.start_offset:
            before = log.size_bytes
            await self._shard.maintenance.starts.retire_before(log, start)
            self.bytes_freed += max(0, before - log.size_bytes)

    async def _moves_are_stored(self, view: View) -> bool:
        """Wait until moves to other queues are durable; False if they are not.

        A message that is being moved counts as settled here. Its old copy may be deleted only when the new one is on
        disk: a crash or a full disk would otherwise leave it in neither queue."""
        try:
            await self._hosts.flushes.wait_all_durable()
        except HeadraceError:
            return False
        return not stored_log(view).is_closed

    async def _rewrite(self, view: View, run: list[Segment], keep: Keep) -> None:
        done: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

        def finished(result: object, error: BaseException | None) -> None:
            if result is not None:
                self.segments_rewritten += 1
                self.bytes_freed += getattr(result, "bytes_before", 0) - getattr(result, "bytes_after", 0)
            if not done.done():
                done.set_result(error)

        def is_free() -> bool:
            return all(hold >= run[-1].next_offset for hold in stored_log(view).pins.values())

        self._shard.maintenance.rewrite_segments(stored_log(view), run, keep, finished, if_still=is_free)
        error = await done
        if error is not None:
            raise StorageError(f"a segment of {stored_log(view).slug} could not be rewritten: {error}") from error
