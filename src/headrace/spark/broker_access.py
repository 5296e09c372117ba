"""Reading through a broker, where executors cannot see its files: the same batches, over HTTP."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from headrace.errors import OffsetOutOfRange
from headrace.record import codec
from headrace.record.layout import HEADER_BYTES, LEADER_EPOCH_AT
from headrace.record.types import BatchInfo
from headrace.spark.access import DataLoss, Feed, Piece, State
from headrace.spark.broker import BrokerLink
from headrace.spark.offsets import Partition

PIECES_MAX = 10_000


class BrokerAccess:
    def __init__(self, url: str, *, committed: bool, fail_on_data_loss: bool) -> None:
        self._link = BrokerLink(url)
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
        if len(data) < HEADER_BYTES:
            return None
        return int.from_bytes(data[LEADER_EPOCH_AT : LEADER_EPOCH_AT + 4], "big", signed=True)

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

    def hold(self, pieces: Sequence[Piece], for_ms: int) -> tuple[list[Piece], Path | None]:
        """Offsets are read from the broker, not files: only a cursor with a pin keeps them from retention."""
        return list(pieces), None

    def release(self, folders: Iterable[Path]) -> None:
        """Nothing is held."""

    def close(self) -> None:
        self._link.close()

    def feeds(self, piece: Piece) -> Iterator[tuple[int, int, Feed]]:
        yield piece.start, piece.end, HttpFeed(self._link, piece, self._fail_on_data_loss)


class HttpFeed:
    def __init__(self, link: BrokerLink, piece: Piece, fail_on_data_loss: bool) -> None:
        self._link = link
        self._piece = piece
        self._fail_on_data_loss = fail_on_data_loss
        self._rest = memoryview(b"")
        self.path = f"{link.url} {piece.place.topic}/{piece.place.number}"

    def read(self, offset: int) -> memoryview:
        while not self._rest and offset < self._piece.end:
            try:
                data, next_offset = self._link.batches(*self._piece.place, offset)
            except OffsetOutOfRange as gone:
                if self._fail_on_data_loss or gone.start <= offset:
                    raise DataLoss(
                        f"offset {offset} of partition {self._piece.place.number} of {self._piece.place.topic!r} "
                        f"was removed while it was being read: {gone}"
                    ) from gone
                offset = gone.start
                continue
            if not data and next_offset <= offset:
                break
            self._rest = memoryview(data)
            offset = next_offset if not data else offset
        return self._rest

    def used(self, size: int) -> None:
        self._rest = self._rest[size:]

    def need_more(self, data: memoryview) -> None:
        raise DataLoss(f"{self.path} ends in the middle of a batch")  # a broker answers with whole ones

    def recover(self) -> bool:
        return False

    def headers(self, start: int) -> Iterator[tuple[memoryview | bytes, BatchInfo]]:
        offset = start
        while True:
            data, next_offset = self._link.batches(*self._piece.place, offset)
            for info in codec.scan(data, verify_crc=False):
                yield data, info
            if next_offset <= offset:
                return
            offset = next_offset

    def close(self) -> None:
        self._link.close()
