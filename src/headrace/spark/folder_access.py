"""FolderAccess: reads the files of a data folder that the driver and the executors can see, without a broker."""

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
from headrace.spark.access import CHUNK_BYTES, ChunkReader, DataLoss, Lease, ReadTask, State
from headrace.spark.broker_leases import BrokerLeases
from headrace.spark.hard_links import HardLinks, links_from
from headrace.spark.offsets import Partition
from headrace.spark.options import BadOption

STARTING_S_MAX = 5.0  # a starting broker rewrites the slots
RETRY_S = 0.02
ATTEMPTS_MAX = 10
MTIME_RESOLUTION_NS = 100_000_000
DEFAULT_VHOST = "/"
UNPROTECTED = (
    "%s is read-only and option 'bootstrap' is not set, so the files of a batch are not protected: records that "
    "retention deletes or compaction rewrites before a task or its retry has read them are missing or changed. Make "
    "the folder writable, or set 'bootstrap' to the broker, which then keeps the files."
)

logger = logging.getLogger("headrace.spark")


T = TypeVar("T")


def _with_retries(look: Callable[[], T]) -> T:
    """Calls `look`, and again if a file was rewritten or deleted during the call."""
    for _ in range(ATTEMPTS_MAX - 1):
        try:
            return look()
        except SegmentGone:
            time.sleep(RETRY_S)
    return look()


class FolderAccess:
    def __init__(self, path: str, *, committed: bool, fail_on_data_loss: bool, bootstrap: str | None = None) -> None:
        self.path = path.removeprefix("file://").rstrip("/") or "/"
        self._committed = committed
        self._fail_on_data_loss = fail_on_data_loss
        self._files = LogFiles(self.path)
        self._broker_leases = None if bootstrap is None else BrokerLeases(bootstrap)
        self._has_warned = False
        self._logs: dict[str, list[int]] = {}
        self._catalog_time = -1
        if not Path(self.path, LOGS).is_dir():
            raise BadOption("path", f"{self.path} is not a data folder: it has no {LOGS}/")

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
                continue  # deleted since the listing
            if document["vhost"] == DEFAULT_VHOST:
                found[document["name"]] = list(document["logs"])
        self._logs = found
        # Modification times are coarse: a folder changed just now may change again without a new time.
        self._catalog_time = changed if time.time_ns() - changed > MTIME_RESOLUTION_NS else -1

    def states(self, topics: Sequence[str]) -> dict[Partition, State]:
        self._load()
        deadline = time.monotonic() + STARTING_S_MAX
        while True:
            found, missing = self._states(topics)
            if not missing:
                return found
            if time.monotonic() > deadline:
                raise NotFound(
                    f"{self.path}/slots has no entry for log {missing[0]}: start a broker on the folder once"
                )
            time.sleep(RETRY_S)

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
                    found[Partition(topic, number)] = State(log_id, -1, 0, 0)  # nothing has ever been written to it
                else:
                    missing.append(log_id)
        return found, missing

    # Planning.

    def start(self, partition: Partition, state: State) -> int:
        segments = self._files.segments(state.log_id, state.end)
        return max(state.start, segments[0].base) if segments else state.start

    def offset_for_timestamp(self, partition: Partition, state: State, timestamp_ms: int) -> int | None:
        start, files = self.start(partition, state), self._files
        return _with_retries(lambda: files.offset_for_timestamp(state.log_id, timestamp_ms, start, state.end))

    def epoch_before(self, partition: Partition, state: State, offset: int) -> int | None:
        return _with_retries(lambda: self._files.epoch_before(state.log_id, offset, self.start(partition, state)))

    def size_between(self, partition: Partition, state: State, start: int, end: int) -> int:
        return self._files.size_between(state.log_id, start, end)

    def estimate_size(self, partition: Partition, state: State, start: int, end: int) -> int:
        return self._files.estimated_size(state.log_id, start, end)

    def offset_after_bytes(self, partition: Partition, state: State, start: int, end: int, size: int) -> int:
        return _with_retries(lambda: self._files.offset_after_bytes(state.log_id, start, end, size))

    def tasks(self, partition: Partition, state: State, start: int, end: int, split_bytes: int) -> list[ReadTask]:
        cut = self._files.slices(state.log_id, start, end, split_bytes)
        return [
            ReadTask(partition, state.log_id, max(start, part.base_offset), min(end, part.next_offset), part)
            for part in cut
            if part.next_offset > start
        ]

    def lease(self, tasks: Sequence[ReadTask], for_ms: int) -> tuple[list[ReadTask], Lease | None]:
        """By hard links; in a read-only folder by leases at the broker, if `bootstrap` is set."""
        if not tasks:
            return [], None
        planned, folder = HardLinks(self.path, self._files).link(tasks, for_ms)
        if folder is not None:
            return planned, folder
        if self._broker_leases is not None:
            slices = (task.slice for task in planned if task.slice is not None)
            return planned, self._broker_leases.lease_segments(slices, for_ms)
        self._warn()
        return planned, None

    def warn_if_unprotected(self) -> None:
        if self._broker_leases is None and not HardLinks(self.path, self._files).can_link():
            self._warn()

    def _warn(self) -> None:
        if not self._has_warned:
            logger.warning(UNPROTECTED, self.path)
        self._has_warned = True

    def close(self) -> None:
        """Files are not kept open; only the broker's connection is closed."""
        if self._broker_leases is not None:
            self._broker_leases.close()

    # Reading.

    def open_readers(self, task: ReadTask) -> Iterator[tuple[int, int, ChunkReader]]:
        assert task.slice is not None
        # Try the hard link first: it is the same file, and exists even if the log was deleted.
        for link in (task.link, None) if task.link is not None else (None,):
            files = self._files
            try:
                with files.open(task.slice) if link is None else files.open_link(link, task.slice) as source:
                    yield task.start, task.end, FileChunkReader(files, task, source)
                return
            except SegmentGone:
                continue
        # The segment was rewritten or deleted since planning: read the same offsets from the current segments. Look up
        # the slices before the start of the log; otherwise a deletion in between would go unnoticed.
        found = self._files.slices(task.log_id, task.start, task.end, 1 << 62)
        segments = self._files.segments(task.log_id, task.end)
        if (not segments or segments[0].base > task.start) and self._fail_on_data_loss:
            raise DataLoss(
                f"offsets {task.start} to {task.end - 1} of partition {task.partition.number} of "
                f"{task.partition.topic!r} were deleted while they were being read"
            )
        for again in found:
            with self._files.open(again) as source:
                start, end = max(task.start, again.base_offset), min(task.end, again.next_offset)
                yield start, end, FileChunkReader(self._files, task, source)


class FileChunkReader:
    def __init__(self, files: LogFiles, task: ReadTask, source: SliceFile) -> None:
        self._files = files
        self._task = task
        self._source = source
        self._rest = memoryview(b"")

    def read(self, offset: int) -> memoryview:
        # A small rest of the last chunk is read again with the next one, so that no tiny batches of rows arise.
        if len(self._rest) < CHUNK_BYTES // 2:
            self._rest = self._source.read(CHUNK_BYTES)
        return self._rest

    def consume(self, size: int) -> None:
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
        """Batch headers from `start` to the visible end: from the open file, then from the links of the same plan, then
        from the log. The log may have deleted the first two since planning."""
        cut, end = self._source.slice, self._visible_end()
        yield from self._source.again().headers(start, end)
        start = max(start, cut.next_offset)
        try:
            for base, link in links_from(self._task.link, cut) if self._task.link is not None else ():
                linked = self._files.link_headers(link, start, end, cut.end if base == cut.segment else 0)
                for data, info in linked:
                    yield data, info
                    start = info.next_offset
        except SegmentGone:
            pass  # the links have expired: read the rest from the log
        yield from self._files.headers(self._task.log_id, start, end)

    def _visible_end(self) -> int:
        deadline = time.monotonic() + STARTING_S_MAX
        while (ends := self._files.ends().get(self._task.log_id)) is None:  # the slot may be just being written
            if self._files.folder(self._task.log_id) is None:
                return MAX_OFFSET  # the log was deleted, so its linked files do not grow
            if time.monotonic() > deadline:
                raise CorruptLog(self._source.path, self._source.position, "its log has no slot")
            time.sleep(RETRY_S)
        return ends.visible_end

    def close(self) -> None:
        self._rest = memoryview(b"")
