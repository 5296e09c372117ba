"""The key index in RocksDB, a log-structured merge tree with Bloom filters. Only key_index.py uses it.

It has the offset of the last record of every key of a log, and how far each log is indexed. Nothing here is synced or
journaled: entries that a crash loses are read from the log again. Entries and the indexed end are one write, so after
a crash the index is always that of some earlier end.
"""

import heapq
import logging
import shutil
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, NamedTuple

from headrace.errors import Conflict

logger = logging.getLogger("headrace.keys")

ENTRIES_MAX = 1_000  # per write, which holds the GIL: a few milliseconds
WRITE_BUFFER_BYTES = 8 << 20
BLOCK_CACHE_BYTES = 16 << 20
BLOOM_BITS = 10  # per key: one in a hundred look-ups of a missing key reads a block
OPEN_FILES_MAX = 64
KEY, END = b"k", b"w"
NOT_INSTALLED = "a key index needs rocksdict: pip install 'headrace[keys]'"

Entry = tuple[bytes, int]  # a key, and the offset of its last record


class KeyRange(NamedTuple):
    """Keys from `start` up to but not including `stop`, in the order of their bytes. None: to the last key."""

    start: bytes = b""
    stop: bytes | None = None

    @classmethod
    def of_prefix(cls, prefix: bytes) -> "KeyRange":
        kept = prefix.rstrip(b"\xff")  # no key with the prefix is smaller than the next larger prefix
        return cls(prefix, kept[:-1] + bytes((kept[-1] + 1,)) if kept else None)

    def within(self, other: "KeyRange") -> "KeyRange":
        stops = [stop for stop in (self.stop, other.stop) if stop is not None]
        return KeyRange(max(self.start, other.start), min(stops, default=None))


class KeyEntry(NamedTuple):
    """A key, and where its last record is in each log that has one."""

    key: bytes
    offsets: dict[int, int]  # by log id


def is_installed() -> bool:
    try:
        import rocksdict  # noqa: F401
    except ImportError:
        return False
    return True


class KeyStore:
    """The index of all logs of a broker. Safe in any thread."""

    def __init__(self, folder: str) -> None:
        if not is_installed():
            raise Conflict(NOT_INSTALLED)
        self._folder = folder
        try:
            self._db = _open(folder)
        except Exception as error:  # noqa: BLE001 - rocksdict has no exception class; derived data is rebuilt anyway
            logger.warning("the key index cannot be read and is rebuilt: %s", error)
            shutil.rmtree(folder, ignore_errors=True)
            self._db = _open(folder)

    def close(self) -> None:
        self._db.close()  # flushes the memtable

    def end(self, log_id: int) -> int:
        """The first offset that is not indexed; 0 for an unknown log."""
        return _number(self._db.get(END + _prefix(log_id)))

    def logs(self) -> list[int]:
        return [int.from_bytes(key[1:], "big") for key, _ in self._from(END, END + b"\xff" * 9)]

    def find(self, log_id: int, key: bytes) -> int | None:
        found = self._db.get(KEY + _prefix(log_id) + key)
        return None if found is None else _number(found)

    def scan(self, log_ids: Sequence[int], keys: KeyRange, count_max: int) -> list[KeyEntry]:
        """The first keys of a range over several logs, in order."""
        every = heapq.merge(*(self._entries(log_id, keys) for log_id in log_ids))
        grouped = groupby(every, itemgetter(0))
        return [
            KeyEntry(key, {log_id: offset for _, log_id, offset in found}) for key, found in islice(grouped, count_max)
        ]

    def _entries(self, log_id: int, keys: KeyRange) -> Iterator[tuple[bytes, int, int]]:
        prefix = KEY + _prefix(log_id)
        stop = _after(prefix) if keys.stop is None else prefix + keys.stop
        for key, value in self._from(prefix + keys.start, stop):
            yield key[len(prefix) :], log_id, _number(value)

    def put(self, log_id: int, entries: Sequence[Entry], end: int) -> None:
        """Add entries in the order of the log; the last one of a key wins."""
        from rocksdict import WriteBatch

        prefix = _prefix(log_id)
        for at in range(0, max(1, len(entries)), ENTRIES_MAX):
            some = entries[at : at + ENTRIES_MAX]
            batch = WriteBatch(raw_mode=True)
            for key, offset in some:
                batch.put(KEY + prefix + key, offset.to_bytes(8, "big"))
            is_last = at + ENTRIES_MAX >= len(entries)
            batch.put(END + prefix, (end if is_last else some[-1][1] + 1).to_bytes(8, "big"))
            self._db.write(batch)

    def forget(self, log_id: int, below: int) -> int:
        """Drop the entries below the log's start; returns how many."""
        from rocksdict import WriteBatch

        prefix, gone, batch = KEY + _prefix(log_id), 0, WriteBatch(raw_mode=True)
        for key, value in self._from(prefix, _after(prefix)):
            if _number(value) < below:
                batch.delete(key)
                gone += 1
                if batch.len() >= ENTRIES_MAX:
                    self._db.write(batch)
                    batch = WriteBatch(raw_mode=True)
        self._db.write(batch)
        return gone

    def drop(self, log_id: int) -> None:
        """Drop the index of a log."""
        prefix = KEY + _prefix(log_id)
        # The end first: a crash between the two leaves an unknown log, not an indexed log without entries.
        self._db.delete(END + _prefix(log_id))
        self._db.delete_range(prefix, _after(prefix))

    def _from(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key, value in self._db.items(from_key=start):
            if key >= stop:
                return
            yield key, value


def _open(folder: str) -> Any:
    from rocksdict import BlockBasedIndexType, BlockBasedOptions, Cache, Options, Rdict, WriteOptions

    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(WRITE_BUFFER_BYTES)
    options.set_max_write_buffer_number(2)
    options.set_max_background_jobs(2)
    options.set_max_open_files(OPEN_FILES_MAX)
    options.set_keep_log_file_num(2)
    blocks = BlockBasedOptions()
    blocks.set_bloom_filter(BLOOM_BITS, False)
    blocks.set_block_cache(Cache(BLOCK_CACHE_BYTES))
    # Filters and indexes are in the block cache, or memory would grow with the number of keys. They are partitioned,
    # or those of a large file would not fit the cache and would be read for every look-up.
    blocks.set_cache_index_and_filter_blocks(True)
    blocks.set_index_type(BlockBasedIndexType.two_level_index_search())
    blocks.set_partition_filters(True)
    blocks.set_pin_top_level_index_and_filter(True)
    options.set_block_based_table_factory(blocks)
    db = Rdict(folder, options)
    unlogged: Any = WriteOptions()
    unlogged.disable_wal = True
    db.set_write_options(unlogged)
    return db


def _prefix(log_id: int) -> bytes:
    return log_id.to_bytes(8, "big")


def _after(prefix: bytes) -> bytes:
    """The first key after all keys with this prefix."""
    return (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big")


def _number(value: bytes | None) -> int:
    return 0 if value is None else int.from_bytes(value, "big")
