"""BrokerAccess: reads batches over HTTP, for executors that cannot see the broker's files."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from headrace.client.exchange import without_password
from headrace.errors import NotFound, OffsetOutOfRange
from headrace.record import codec
from headrace.record.types import BatchInfo
from headrace.spark.access import ChunkReader, DataLoss, Lease, LeasedSegment, ReadTask, State
from headrace.spark.broker import BrokerLink
from headrace.spark.broker_leases import BrokerLeases
from headrace.spark.offsets import Partition

TASKS_MAX = 10_000
SEGMENTS_AFTER = 8  # leased segments after the end of a task that it may look into for transaction markers


class BrokerAccess:
    def __init__(self, url: str, *, committed: bool, fail_on_data_loss: bool) -> None:
        self._link = BrokerLink(url)
        self._leases = BrokerLeases(url)
        self._committed = committed
        self._fail_on_data_loss = fail_on_data_loss
        self._sizes: dict[Partition, int] = {}

    def topics(self) -> Sequence[str]:
        return self._link.topics()

    def states(self, topics: Sequence[str]) -> dict[Partition, State]:
        found = {}
        for topic in topics:
            for log in self._link.logs(topic) or ():
                partition = Partition(topic, log["partition"])
                self._sizes[partition] = log["size_bytes"]
                end = log["stable_end"] if self._committed else log["end"]
                found[partition] = State(log["log"], log["epoch"], log["start"], end)
        return found

    def start(self, partition: Partition, state: State) -> int:
        return state.start

    def offset_for_timestamp(self, partition: Partition, state: State, timestamp_ms: int) -> int | None:
        return self._link.first_at(partition.topic, partition.number, timestamp_ms)

    def epoch_before(self, partition: Partition, state: State, offset: int) -> int | None:
        if offset <= state.start:
            return None
        data, _ = self._link.batches(partition.topic, partition.number, offset - 1, 1)
        first = next(iter(codec.scan(data, verify_crc=False)), None)
        # If compaction removed the record, the broker returns a later batch, whose epoch says nothing about it.
        return first.leader_epoch if first is not None and first.base_offset < offset else None

    def size_between(self, partition: Partition, state: State, start: int, end: int) -> int:
        count = max(1, state.end - state.start)
        return self._sizes.get(partition, 0) * (end - start) // count

    def estimate_size(self, partition: Partition, state: State, start: int, end: int) -> int:
        return self.size_between(partition, state, start, end)

    def offset_after_bytes(self, partition: Partition, state: State, start: int, end: int, size: int) -> int:
        total = max(1, self.size_between(partition, state, start, end))
        return start + (end - start) * min(size, total) // total

    def tasks(self, partition: Partition, state: State, start: int, end: int, split_bytes: int) -> list[ReadTask]:
        """Ranges with equal numbers of offsets, as many as the size suggests: the index is only at the broker."""
        size = self.size_between(partition, state, start, end)
        count = max(1, min(-(-size // split_bytes), end - start, TASKS_MAX))
        cuts = [start + (end - start) * at // count for at in range(count + 1)]
        return [ReadTask(partition, state.log_id, a, b) for a, b in pairwise(cuts)]

    def lease(self, tasks: Sequence[ReadTask], for_ms: int) -> tuple[list[ReadTask], Lease | None]:
        """The broker returns the segments that contain the offsets and keeps them, even if the log is deleted."""
        if not tasks:
            return [], None
        spans: dict[Partition, tuple[int, int]] = {}
        for task in tasks:
            start, end = spans.get(task.partition, (task.start, task.end))
            spans[task.partition] = min(start, task.start), max(end, task.end)
        found, lease = self._leases.lease_ranges([(partition, *span) for partition, span in spans.items()], for_ms)
        segments = dict(zip(spans, found, strict=True))
        planned = [msgspec.structs.replace(t, segments=_needed(segments[t.partition], t)) for t in tasks]
        return planned, lease

    def warn_if_unprotected(self) -> None:
        """The broker can always grant a lease."""

    def close(self) -> None:
        self._link.close()
        self._leases.close()

    def open_readers(self, task: ReadTask) -> Iterator[tuple[int, int, ChunkReader]]:
        yield task.start, task.end, HttpChunkReader(self._link, task, self._fail_on_data_loss)


def _needed(segments: Sequence[LeasedSegment], task: ReadTask) -> tuple[LeasedSegment, ...]:
    """The segments of the task and some after it, where a transaction that starts in the task may end."""
    first = bisect_right(segments, task.start, key=lambda leased: leased.next_offset)
    after = bisect_left(segments, task.end, key=lambda leased: leased.segment)
    return tuple(segments[first : after + SEGMENTS_AFTER])


class HttpChunkReader:
    def __init__(self, link: BrokerLink, task: ReadTask, fail_on_data_loss: bool) -> None:
        self._link = link
        self._task = task
        self._fail_on_data_loss = fail_on_data_loss
        self._rest = memoryview(b"")
        self.path = f"{without_password(link.url)} {task.partition.topic}/{task.partition.number}"

    def read(self, offset: int) -> memoryview:
        while not self._rest and offset < self._task.end:
            data, next_offset = self._batches(offset)
            if not data and next_offset <= offset:
                break
            self._rest = memoryview(data)
            offset = next_offset if not data else offset
        return self._rest

    def _batches(self, offset: int) -> tuple[bytes, int]:
        """Reads from the leased segment; offsets beyond the leased segments are read from the log's current ones."""
        segments = self._task.segments
        at = bisect_right(segments, offset, key=lambda leased: leased.next_offset)
        leased = segments[at] if at < len(segments) and segments[at].segment <= offset else None
        partition, log = self._task.partition, self._task.log_id
        if leased is not None:
            try:
                return self._link.batches(*partition, offset, log=log, segment=(leased.segment, leased.generation))
            except (NotFound, OffsetOutOfRange) as gone:
                if self._fail_on_data_loss:
                    raise self._loss(
                        offset, "is not leased any more (expired, or the broker restarted)", gone
                    ) from gone
        try:
            return self._link.batches(*partition, offset, log=log)
        except NotFound as gone:
            if self._fail_on_data_loss:
                raise self._loss(offset, "was deleted with its topic", gone) from gone
            return b"", offset
        except OffsetOutOfRange as gone:
            if self._fail_on_data_loss or gone.start <= offset:
                raise self._loss(offset, "was deleted while it was being read", gone) from gone
            return b"", gone.start

    def _loss(self, offset: int, why: str, gone: Exception) -> DataLoss:
        partition = self._task.partition
        return DataLoss(f"offset {offset} of partition {partition.number} of {partition.topic!r} {why}: {gone}")

    def consume(self, size: int) -> None:
        self._rest = self._rest[size:]

    def need_more(self, data: memoryview) -> None:
        raise DataLoss(f"{self.path} ends in the middle of a batch")  # brokers return whole batches

    def recover(self) -> bool:
        return False

    def headers(self, start: int) -> Iterator[tuple[memoryview | bytes, BatchInfo]]:
        offset = start
        while True:
            data, next_offset = self._batches(offset)
            for info in codec.scan(data, verify_crc=False):
                yield data, info
            if next_offset <= offset:
                return
            offset = next_offset

    def close(self) -> None:
        self._link.close()
