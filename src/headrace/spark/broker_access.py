"""Reading through a broker, where executors cannot see its files: the same batches, over HTTP."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from headrace.client.exchange import without_password
from headrace.errors import NotFound, OffsetOutOfRange
from headrace.record import codec
from headrace.record.types import BatchInfo
from headrace.spark.access import DataLoss, Feed, Held, Hold, Piece, State
from headrace.spark.broker import BrokerLink
from headrace.spark.lease import BrokerLease
from headrace.spark.offsets import Partition

PIECES_MAX = 10_000
SEGMENTS_BEHIND = 8


class BrokerAccess:
    def __init__(self, url: str, *, committed: bool, fail_on_data_loss: bool) -> None:
        self._link = BrokerLink(url)
        self._lease = BrokerLease(url)
        self._committed = committed
        self._fail_on_data_loss = fail_on_data_loss
        self._sizes: dict[Partition, int] = {}

    def topics(self) -> Sequence[str]:
        return self._link.topics()

    def states(self, topics: Sequence[str]) -> dict[Partition, State]:
        found = {}
        for topic in topics:
            for log in self._link.logs(topic) or ():
                place = Partition(topic, log["partition"])
                self._sizes[place] = log["size_bytes"]
                end = log["stable_end"] if self._committed else log["end"]
                found[place] = State(log["log"], log["epoch"], log["start"], end)
        return found

    def start(self, place: Partition, state: State) -> int:
        return state.start

    def offset_for_timestamp(self, place: Partition, state: State, timestamp_ms: int) -> int | None:
        return self._link.first_at(place.topic, place.number, timestamp_ms)

    def epoch_before(self, place: Partition, state: State, offset: int) -> int | None:
        if offset <= state.start:
            return None
        data, _ = self._link.batches(place.topic, place.number, offset - 1, 1)
        first = next(iter(codec.scan(data, verify_crc=False)), None)
        # Where compaction took the record, the broker answers with what comes next: that says nothing of it.
        return first.leader_epoch if first is not None and first.base_offset < offset else None

    def size_between(self, place: Partition, state: State, start: int, end: int) -> int:
        held = max(1, state.end - state.start)
        return self._sizes.get(place, 0) * (end - start) // held

    def rough_size(self, place: Partition, state: State, start: int, end: int) -> int:
        return self.size_between(place, state, start, end)

    def reach(self, place: Partition, state: State, start: int, end: int, size: int) -> int:
        total = max(1, self.size_between(place, state, start, end))
        return start + (end - start) * min(size, total) // total

    def pieces(self, place: Partition, state: State, start: int, end: int, split_bytes: int) -> list[Piece]:
        """Even runs of offsets, as many as the partition's size suggests: the broker's index stays with it."""
        size = self.size_between(place, state, start, end)
        count = max(1, min(-(-size // split_bytes), end - start, PIECES_MAX))
        cuts = [start + (end - start) * at // count for at in range(count + 1)]
        return [Piece(place, state.log_id, a, b) for a, b in pairwise(cuts)]

    def hold(self, pieces: Sequence[Piece], for_ms: int) -> tuple[list[Piece], Hold | None]:
        """The broker says which segments the offsets lie in, and keeps these whatever becomes of the log."""
        if not pieces:
            return [], None
        spans: dict[Partition, tuple[int, int]] = {}
        for piece in pieces:
            start, end = spans.get(piece.place, (piece.start, piece.end))
            spans[piece.place] = min(start, piece.start), max(end, piece.end)
        found, hold = self._lease.hold_ranges([(place, *span) for place, span in spans.items()], for_ms)
        segments = dict(zip(spans, found, strict=True))
        return [msgspec.structs.replace(p, segments=_needed(segments[p.place], p)) for p in pieces], hold

    def warn_unless_held(self) -> None:
        """It is always held."""

    def close(self) -> None:
        self._link.close()
        self._lease.close()

    def feeds(self, piece: Piece) -> Iterator[tuple[int, int, Feed]]:
        yield piece.start, piece.end, HttpFeed(self._link, piece, self._fail_on_data_loss)


def _needed(segments: Sequence[Held], piece: Piece) -> tuple[Held, ...]:
    """Those of the piece, and some behind it: a transaction that begins in it may end there."""
    first = bisect_right(segments, piece.start, key=lambda held: held.next_offset)
    behind = bisect_left(segments, piece.end, key=lambda held: held.segment)
    return tuple(segments[first : behind + SEGMENTS_BEHIND])


class HttpFeed:
    def __init__(self, link: BrokerLink, piece: Piece, fail_on_data_loss: bool) -> None:
        self._link = link
        self._piece = piece
        self._fail_on_data_loss = fail_on_data_loss
        self._rest = memoryview(b"")
        self.path = f"{without_password(link.url)} {piece.place.topic}/{piece.place.number}"

    def read(self, offset: int) -> memoryview:
        while not self._rest and offset < self._piece.end:
            data, next_offset = self._batches(offset)
            if not data and next_offset <= offset:
                break
            self._rest = memoryview(data)
            offset = next_offset if not data else offset
        return self._rest

    def _batches(self, offset: int) -> tuple[bytes, int]:
        """From the segment that was planned on. What was not (a look beyond the piece), as the log has it now."""
        segments = self._piece.segments
        at = bisect_right(segments, offset, key=lambda held: held.next_offset)
        held = segments[at] if at < len(segments) and segments[at].segment <= offset else None
        place, log = self._piece.place, self._piece.log_id
        if held is not None:
            try:
                return self._link.batches(*place, offset, log=log, of=(held.segment, held.generation))
            except (NotFound, OffsetOutOfRange) as gone:
                if self._fail_on_data_loss:
                    raise self._loss(offset, "is not held any more (time over, or broker restarted)", gone) from gone
        try:
            return self._link.batches(*place, offset, log=log)
        except NotFound as gone:
            if self._fail_on_data_loss:
                raise self._loss(offset, "went with its topic", gone) from gone
            return b"", offset
        except OffsetOutOfRange as gone:
            if self._fail_on_data_loss or gone.start <= offset:
                raise self._loss(offset, "was removed while it was being read", gone) from gone
            return b"", gone.start

    def _loss(self, offset: int, why: str, gone: Exception) -> DataLoss:
        place = self._piece.place
        return DataLoss(f"offset {offset} of partition {place.number} of {place.topic!r} {why}: {gone}")

    def used(self, size: int) -> None:
        self._rest = self._rest[size:]

    def need_more(self, data: memoryview) -> None:
        raise DataLoss(f"{self.path} ends in the middle of a batch")  # a broker answers with whole ones

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
