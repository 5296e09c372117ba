"""The key index: finds the last message of a key, for topics with the setting `key_index`.

It follows the logs in the background. Only look-ups wait for it: they see everything that was confirmed before they
were made. The index is derived data: if it is lost or damaged, it is rebuilt from the logs.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

from headrace.broker.streams.decode import Decoder
from headrace.broker.streams.key_index_rocksdb import NOT_INSTALLED, Entry, KeyRange, KeyStore, is_installed
from headrace.broker.streams.partition import Partition, Readable, when_loaded
from headrace.broker.streams.read import UNLIMITED, PageReader, committed
from headrace.broker.streams.streams import Stream, Streams
from headrace.broker.types.aborted_ranges import Aborts
from headrace.errors import (
    Conflict,
    HeadraceError,
    IndexBehind,
    LogClosed,
    NotFound,
    OffsetOutOfRange,
    StorageError,
)
from headrace.log.disk import paths
from headrace.log.read.reader import Chunk
from headrace.record import codec
from headrace.record.types import BatchInfo, Record

logger = logging.getLogger("headrace.keys")

FOLDER = paths.KEYS
CHUNK_BYTES = 1 << 20
PAUSE_S = 0.05  # between two passes over busy logs: fewer and larger writes
LOOK_S = 2.0  # between two looks for new or changed topics
RETRY_S = 30.0  # after an error
WAIT_S = 10.0  # how long a look-up waits for the index to catch up
SCANNED_MAX = 2_000  # keys per page of a range: bounds the work where most are tombstones
P = ParamSpec("P")
T = TypeVar("T")


class KeyNotFound(NotFound):
    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r} has no message with this key")


class KeyLookup(NamedTuple):
    partition: int
    record: Record


class KeyPage(NamedTuple):
    """The last messages of some keys, in the order of the keys."""

    found: list[KeyLookup]
    next_key: bytes | None  # where the next page starts; None after the last page


class Stuck(NamedTuple):
    why: str
    until: float  # time of the next attempt, by the event loop's clock


class Keys:
    def __init__(
        self,
        streams: Streams,
        pages: PageReader,
        decoder: Decoder,
        aborted: Callable[[int], Aborts],
        folder: str,
        *,
        has_folder: bool,
    ) -> None:
        self._streams = streams
        self._pages = pages
        self._aborted = aborted  # by log id
        self._folder = folder
        self._has_folder = has_folder
        self._decoder = decoder
        self._store: KeyStore | None = None
        self._ends: dict[int, int] = {}  # by log id: the first offset that is not indexed
        self._indexed: set[int] = set()  # the logs of the last pass
        self._swept: dict[int, int] = {}  # by log id: its start when deleted entries were last dropped
        self._stuck: dict[int, Stuck] = {}  # by log id: logs that cannot be read further
        self._task: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()  # a look-up waits
        self._moved = asyncio.Event()  # the index has advanced
        self._indexing = ThreadPoolExecutor(1, "keys")
        self._looking = ThreadPoolExecutor(1, "key-lookup")

    def start(self) -> None:
        """Blocks. Must run before anything is appended: an index that is ahead of its log belongs to records that a
        power failure has lost, and is dropped."""
        if self._has_folder and is_installed():
            self._store = KeyStore(self._folder)
            self._indexed = set(self._store.logs())
            for _, partition in self._partitions():
                log = partition.log
                self._ends[log.id] = self._store.end(log.id)
                if self._ends[log.id] > log.visible_end:
                    self._store.drop(log.id)
                    self._ends[log.id] = 0
        self._task = asyncio.get_running_loop().create_task(self._run(), name="keys")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await asyncio.get_running_loop().run_in_executor(None, self._indexing.shutdown)
        self._looking.shutdown()
        if self._store is not None:
            self._store.close()

    # Look-ups.

    async def find(self, stream: Stream, key: bytes, *, record_bytes_max: int = UNLIMITED) -> KeyLookup:
        """The last message with this key; KeyNotFound if there is none, or if it is a tombstone. RecordTooLarge if it
        takes more than record_bytes_max."""
        partitions = list(stream.partitions)
        store = await self._up_to_date(stream, partitions)
        offsets = await self._in(self._looking, lambda: {one.log.id: store.find(one.log.id, key) for one in partitions})
        last = await self._last(stream, partitions, key, offsets, record_bytes_max)
        if last is None:
            raise KeyNotFound(stream.name)
        return last

    async def scan(
        self, stream: Stream, keys: KeyRange, *, limit: int, bytes_max: int, record_bytes_max: int = UNLIMITED
    ) -> KeyPage:
        """The last message of each key in the range, without tombstones, in the order of the keys. A page ends after
        `limit` messages, when it has `bytes_max`, or when many keys had none: an empty page may have a next one."""
        partitions = list(stream.partitions)
        store = await self._up_to_date(stream, partitions)
        logs = [one.log.id for one in partitions]
        found: list[KeyLookup] = []
        scanned = 0
        while scanned < SCANNED_MAX:
            wanted = min(limit - len(found), SCANNED_MAX - scanned)
            entries = await self._in(self._looking, store.scan, logs, keys, wanted + 1)
            for entry in entries[:wanted]:
                if bytes_max <= 0:
                    return KeyPage(found, entry.key)
                last = await self._last(stream, partitions, entry.key, entry.offsets, record_bytes_max)
                if last is not None:
                    found.append(last)
                    bytes_max -= _size(last.record)
            if len(entries) <= wanted:
                return KeyPage(found, None)
            scanned += wanted
            keys = KeyRange(entries[wanted].key, keys.stop)
            if len(found) == limit:
                break
        return KeyPage(found, keys.start)

    async def _last(
        self,
        stream: Stream,
        partitions: list[Partition],
        key: bytes,
        offsets: Mapping[int, int | None],
        record_bytes_max: int,
    ) -> KeyLookup | None:
        """None for a tombstone. A custom partitioner may have put the key into several partitions."""
        found = []
        for partition in partitions:
            offset = offsets.get(partition.log.id)
            record = None if offset is None else await self._record(stream, partition, offset, record_bytes_max)
            if record is not None and record.key == key:
                found.append(KeyLookup(partition.number, record))
        last = max(found, key=lambda one: (one.record.timestamp, one.partition), default=None)
        return None if last is None or last.record.value is None else last

    async def _record(self, stream: Stream, partition: Partition, offset: int, bytes_max: int) -> Record | None:
        try:
            page = await self._pages.read(
                stream.name, partition, offset, limit=1, bytes_max=CHUNK_BYTES, record_bytes_max=bytes_max
            )
        except OffsetOutOfRange:  # retention has deleted it
            return None
        return page.records[0] if page.records and page.records[0].offset == offset else None

    async def _up_to_date(self, stream: Stream, partitions: list[Partition]) -> KeyStore:
        """The index, once it has everything that is visible now."""
        if not stream.settings.key_index:
            raise Conflict(f"topic {stream.name!r} has no key index: set key_index to true for it")
        if not is_installed():
            raise Conflict(NOT_INSTALLED)
        wanted = {one.log.id: one.stable_end for one in partitions}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WAIT_S
        while True:
            behind = sum(max(0, end - self._ends.get(log_id, 0)) for log_id, end in wanted.items())
            if self._store is not None and not behind:
                return self._store
            for stuck in filter(None, map(self._stuck.get, wanted)):
                raise StorageError(f"the key index of topic {stream.name!r} cannot advance: {stuck.why}")
            self._moved.clear()
            self._wanted.set()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._moved.wait()
            except TimeoutError:
                text = f"the key index of topic {stream.name!r} is {behind:,} messages behind"
                raise IndexBehind(text, retry_after_s=WAIT_S) from None

    # Following the logs.

    async def _run(self) -> None:
        logged = ""
        while True:
            try:
                if not await self._pass():
                    await self._wait()
                logged = ""
            except HeadraceError as error:
                if str(error) != logged:
                    logger.error("the key index cannot advance: %s", error)
                logged = str(error)
                await asyncio.sleep(RETRY_S)
            except Exception:
                logger.exception("the key index cannot advance")
                await asyncio.sleep(RETRY_S)

    def _partitions(self) -> list[tuple[Stream, Partition]]:
        return [
            (stream, partition)
            for stream in self._streams
            if stream.settings.key_index
            for partition in stream.partitions
        ]

    async def _pass(self) -> bool:
        """Advance every index by a chunk; returns whether there may be more."""
        partitions = self._partitions()
        if not partitions and (self._store is None or not self._indexed):
            return False
        store = await self._opened()
        wanted = {partition.log.id for _, partition in partitions}
        if wanted != self._indexed:
            await self._drop_others(store, wanted)
            self._indexed = wanted
        more = False
        for stream, partition in partitions:
            if not stream.is_deleted and not self._is_stuck(partition):
                more |= await self._advance(store, stream, partition)
        return more

    def _is_stuck(self, partition: Partition) -> bool:
        stuck = self._stuck.get(partition.log.id)
        return stuck is not None and asyncio.get_running_loop().time() < stuck.until

    async def _advance(self, store: KeyStore, stream: Stream, partition: Partition) -> bool:
        """Returns whether there is more. A log that cannot be read does not stop the others."""
        log_id = partition.log.id
        try:
            more = await self._follow(store, partition)
        except LogClosed:  # the topic was deleted
            return False
        except (HeadraceError, OSError) as error:
            if log_id not in self._stuck or self._stuck[log_id].why != str(error):
                text = "the key index of partition %d of topic %r cannot advance: %s"
                logger.error(text, partition.number, stream.name, error)
            self._stuck[log_id] = Stuck(str(error), asyncio.get_running_loop().time() + RETRY_S)
            self._moved.set()  # look-ups that wait get the reason
            return False
        self._stuck.pop(log_id, None)
        await self._sweep(store, partition)
        return more

    async def _follow(self, store: KeyStore, partition: Partition) -> bool:
        """Index one chunk; returns whether there is another."""
        log = partition.log
        end, start = partition.stable_end, max(self._ends.setdefault(log.id, 0), partition.start_offset)
        if start >= end:
            self._move(log.id, end)
            return False
        try:
            chunk = await when_loaded(lambda: partition.read_now(start, CHUNK_BYTES, end=end))
        except OffsetOutOfRange:
            return True  # retention has moved the start: try again from there
        known = self._aborted(log.id)
        aborted = Aborts(known.between(chunk.base_offset, chunk.next_offset))  # a copy for the thread
        to = max(chunk.next_offset, start + 1)
        entries: list[Entry] = []
        for info in committed(chunk, aborted):
            entries += await self._decoder.run(partial(_entries, chunk, info, start, end, self._decoder.bytes_max))
        await self._in(self._indexing, store.put, log.id, entries, to)
        self._move(log.id, to)
        return to < end

    async def _sweep(self, store: KeyStore, partition: Partition) -> None:
        """Drop entries of deleted records once half of the log is gone, so that each entry is visited rarely."""
        log_id, start = partition.log.id, partition.start_offset
        before = self._swept.setdefault(log_id, 0)
        if start > before and (start - before) * 2 >= self._ends[log_id] - before:
            await self._in(self._indexing, store.forget, log_id, start)
            self._swept[log_id] = start

    async def _drop_others(self, store: KeyStore, wanted: set[int]) -> None:
        """Drop the index of deleted logs and of topics without `key_index`."""
        for log_id in set(await self._in(self._indexing, store.logs)) - wanted:
            await self._in(self._indexing, store.drop, log_id)
            self._ends.pop(log_id, None)
            self._swept.pop(log_id, None)
            self._stuck.pop(log_id, None)

    async def _wait(self) -> None:
        self._wanted.clear()
        await asyncio.sleep(PAUSE_S)
        waiting = [partition for _, partition in self._partitions() if not self._is_stuck(partition)]
        readable = Readable((partition, self._ends.get(partition.log.id, 0)) for partition in waiting)
        poked = asyncio.ensure_future(self._wanted.wait())
        either: set[asyncio.Future[Any]] = {readable.future, poked}
        try:
            await asyncio.wait(either, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            readable.cancel()
            poked.cancel()

    # Helpers.

    async def _opened(self) -> KeyStore:
        if self._store is None:
            self._store = await self._in(self._indexing, KeyStore, self._folder)
        return self._store

    def _move(self, log_id: int, end: int) -> None:
        self._ends[log_id] = max(end, self._ends.get(log_id, 0))
        self._moved.set()

    async def _in(self, threads: ThreadPoolExecutor, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: work(*args, **named))


def _size(record: Record) -> int:
    return (
        len(record.key or b"") + len(record.value or b"") + sum(len(name) + len(v or b"") for name, v in record.headers)
    )


def _entries(chunk: Chunk, info: BatchInfo, start: int, end: int, bytes_max: int) -> list[Entry]:
    """The keys of a batch. A batch that cannot be decoded has none: reading the topic reports it."""
    try:
        records, _, _ = codec.records_of(
            chunk.data,
            info.position,
            from_offset=start,
            to_offset=end,
            decompressed_bytes_max=bytes_max,
            values=False,
            in_thread=True,
        )
    except HeadraceError as error:
        logger.warning("the key index skips the batch at offset %d: %s", info.base_offset, error)
        return []
    return [(record.key, record.offset) for record in records if record.key is not None]
