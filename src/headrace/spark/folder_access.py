"""Reading the files of a data folder, where driver and executors can see them. No broker is asked."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from headrace.errors import CorruptLog, NotFound
from headrace.log.catalog.document import read as read_document
from headrace.log.disk.paths import CATALOG, LOGS
from headrace.log.read.external import LogFiles, SegmentGone, SliceFile
from headrace.record.layout import MAX_OFFSET
from headrace.record.types import BatchInfo
from headrace.spark.access import CHUNK_BYTES, DataLoss, Feed, Hold, Piece, State
from headrace.spark.held import HeldFiles, links_from
from headrace.spark.lease import BrokerLease
from headrace.spark.offsets import Partition
from headrace.spark.options import BadOption

STARTING_S_MAX = 5.0  # a broker that is just opening the folder writes the slots anew
LOOK_AGAIN_S = 0.02
LOOKS_MAX = 10
SETTLED_NS = 100_000_000
DEFAULT_VHOST = "/"
UNHELD = (
    "%s can only be read, and option 'bootstrap' names no broker: nothing keeps the files of a batch. What retention "
    "removes or compaction rewrites before a task, or its second attempt, has read it is missing there or read as it "
    "is by then. Make the folder writable, or name the broker in 'bootstrap': it keeps them."
)

logger = logging.getLogger("headrace.spark")


T = TypeVar("T")


def _seen(look: Callable[[], T]) -> T:
    """What a look into the files finds; taken again when one of them was rewritten or removed just then."""
    for _ in range(LOOKS_MAX - 1):
        try:
            return look()
        except SegmentGone:
            time.sleep(LOOK_AGAIN_S)
    return look()


class FolderAccess:
    def __init__(self, path: str, *, committed: bool, fail_on_data_loss: bool, bootstrap: str | None = None) -> None:
        self.path = path.removeprefix("file://").rstrip("/") or "/"
        self._committed = committed
        self._fail_on_data_loss = fail_on_data_loss
        self._files = LogFiles(self.path)
        self._lease = None if bootstrap is None else BrokerLease(bootstrap)
        self._has_warned = False
        self._logs: dict[str, list[int]] = {}
        self._catalog_time = -1
        if not Path(self.path, LOGS).is_dir():
            raise BadOption("path", f"{self.path} is not a data folder of a broker: it has no {LOGS}/")

    # The catalog.

    def topics(self) -> Sequence[str]:
        self._load()
        return sorted(self._logs)

    def _load(self) -> None:
        folder = Path(self.path, CATALOG, "streams")
        try:
            changed = folder.stat().st_mtime_ns
        except FileNotFoundError:
            self._logs = {}
            return
        if changed == self._catalog_time:
            return
        found = {}
        for file in folder.glob("*.json"):
            try:
                document = read_document(file.read_bytes(), str(file)).content
            except FileNotFoundError:
                continue  # deleted meanwhile
            if document["vhost"] == DEFAULT_VHOST:
                found[document["name"]] = list(document["logs"])
        self._logs = found
        # A folder's time moves in steps: what changed a moment ago may change again without its time moving.
        self._catalog_time = changed if time.time_ns() - changed > SETTLED_NS else -1

    def states(self, topics: Sequence[str]) -> dict[Partition, State]:
        self._load()
        deadline = time.monotonic() + STARTING_S_MAX
        while True:
            found, missing = self._states(topics)
            if not missing:
                return found
            if time.monotonic() > deadline:
                raise NotFound(f"{self.path}/slots says nothing of log {missing[0]}: start a broker on the folder once")
            time.sleep(LOOK_AGAIN_S)

    def _states(self, topics: Sequence[str]) -> tuple[dict[Partition, State], list[int]]:
        ends = self._files.ends()
        found, missing = {}, []
        for topic in topics:
            for number, log_id in enumerate(self._logs.get(topic, ())):
                slot = ends.get(log_id)
                if slot is not None:
                    end = slot.stable_end if self._committed else slot.visible_end
                    found[Partition(topic, number)] = State(log_id, slot.epoch, slot.start, end)
                elif self._files.folder(log_id) is None:
                    found[Partition(topic, number)] = State(log_id, -1, 0, 0)  # nothing was ever written to it
                else:
                    missing.append(log_id)
        return found, missing

    # Planning.

    def start(self, place: Partition, state: State) -> int:
        segments = self._files.segments(state.log_id, state.end)
        return max(state.start, segments[0].base) if segments else state.start

    def offset_for_timestamp(self, place: Partition, state: State, timestamp_ms: int) -> int | None:
        start, files = self.start(place, state), self._files
        return _seen(lambda: files.offset_for_timestamp(state.log_id, timestamp_ms, start, state.end))

    def epoch_before(self, place: Partition, state: State, offset: int) -> int | None:
        return _seen(lambda: self._files.epoch_before(state.log_id, offset, self.start(place, state)))

    def size_between(self, place: Partition, state: State, start: int, end: int) -> int:
        return self._files.size_between(state.log_id, start, end)

    def rough_size(self, place: Partition, state: State, start: int, end: int) -> int:
        return self._files.rough_size(state.log_id, start, end)

    def reach(self, place: Partition, state: State, start: int, end: int, size: int) -> int:
        return _seen(lambda: self._files.reach(state.log_id, start, end, size))

    def pieces(self, place: Partition, state: State, start: int, end: int, split_bytes: int) -> list[Piece]:
        cut = self._files.slices(state.log_id, start, end, split_bytes)
        return [
            Piece(place, state.log_id, max(start, piece.base_offset), min(end, piece.next_offset), piece)
            for piece in cut
            if piece.next_offset > start
        ]

    def hold(self, pieces: Sequence[Piece], for_ms: int) -> tuple[list[Piece], Hold | None]:
        """By a second name; where that may not be (the data can only be read), the broker is asked to keep the files,
        if it was said where it is."""
        if not pieces:
            return [], None
        planned, folder = HeldFiles(self.path, self._files).hold(pieces, for_ms)
        if folder is not None:
            return planned, folder
        if self._lease is not None:
            return planned, self._lease.hold_segments((p.slice for p in planned if p.slice is not None), for_ms)
        self._warn()
        return planned, None

    def warn_unless_held(self) -> None:
        """At load, where it is plain already that nothing can be held."""
        if self._lease is None and not HeldFiles(self.path, self._files).can_hold():
            self._warn()

    def _warn(self) -> None:
        if not self._has_warned:
            logger.warning(UNHELD, self.path)
        self._has_warned = True

    def close(self) -> None:
        """No file is kept open."""
        if self._lease is not None:
            self._lease.close()

    # Reading.

    def feeds(self, piece: Piece) -> Iterator[tuple[int, int, Feed]]:
        assert piece.slice is not None
        # By its other name first: it is there whatever became of the log, and it is the same file.
        for held in (piece.held, None) if piece.held is not None else (None,):
            files = self._files
            try:
                with files.open(piece.slice) if held is None else files.open_link(held, piece.slice) as source:
                    yield piece.start, piece.end, FileFeed(files, piece, source)
                return
            except SegmentGone:
                continue
        # Rewritten or removed since it was planned: the same offsets, wherever they are now. Found before it is asked
        # where the log begins: what retention takes in between would be missing, and nobody the wiser.
        found = self._files.slices(piece.log_id, piece.start, piece.end, 1 << 62)
        segments = self._files.segments(piece.log_id, piece.end)
        if (not segments or segments[0].base > piece.start) and self._fail_on_data_loss:
            raise DataLoss(
                f"offsets {piece.start} to {piece.end - 1} of partition {piece.place.number} of "
                f"{piece.place.topic!r} were removed while they were being read"
            )
        for again in found:
            with self._files.open(again) as source:
                start, end = max(piece.start, again.base_offset), min(piece.end, again.next_offset)
                yield start, end, FileFeed(self._files, piece, source)


class FileFeed:
    def __init__(self, files: LogFiles, piece: Piece, source: SliceFile) -> None:
        self._files = files
        self._piece = piece
        self._source = source
        self._rest = memoryview(b"")

    def read(self, offset: int) -> memoryview:
        # What is left of the last read is used up only while it is worth a batch of rows.
        if len(self._rest) < CHUNK_BYTES // 2:
            self._rest = self._source.read(CHUNK_BYTES)
        return self._rest

    def used(self, size: int) -> None:
        self._source.advance(size)
        self._rest = self._rest[size:]

    def need_more(self, data: memoryview) -> None:
        self._source.need_more(data)
        self._rest = memoryview(b"")

    def recover(self) -> bool:
        if self._source.position == 0:
            return False
        self._source.rewind()
        self._rest = memoryview(b"")
        return True

    def headers(self, start: int) -> Iterator[tuple[memoryview | bytes, BatchInfo]]:
        """From `start` to the visible end: what is being read from its open file, what was planned with it from its
        links, for the log may have lost both meanwhile; the rest from the log."""
        cut, end = self._source.slice, self._visible_end()
        yield from self._source.again().headers(start, end)
        start = max(start, cut.next_offset)
        try:
            for base, link in links_from(self._piece.held, cut) if self._piece.held is not None else ():
                behind = self._files.link_headers(link, start, end, cut.end if base == cut.segment else 0)
                for data, info in behind:
                    yield data, info
                    start = info.next_offset
        except SegmentGone:
            pass  # their time is over: what is left is in the log
        yield from self._files.headers(self._piece.log_id, start, end)

    def _visible_end(self) -> int:
        deadline = time.monotonic() + STARTING_S_MAX
        while (ends := self._files.ends().get(self._piece.log_id)) is None:  # its slot is just being written, perhaps
            if self._files.folder(self._piece.log_id) is None:
                return MAX_OFFSET  # deleted: nobody appends to what is held of it
            if time.monotonic() > deadline:
                raise CorruptLog(self._source.path, self._source.position, "its log has no slot")
            time.sleep(LOOK_AGAIN_S)
        return ends.visible_end

    def close(self) -> None:
        self._rest = memoryview(b"")
