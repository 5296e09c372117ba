"""Where the index of keys is kept: RocksDB, a log-structured merge tree with Bloom filters. Known nowhere else.

For every key of a log the offset of its last record, and how far each log has been read. Nothing here is synced, nor
written to a log of its own: what a crash takes is read from the log again. Entries and how far they go are one write,
so that what is left is always the index of some earlier end.
"""

import logging
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.errors import Conflict

logger = logging.getLogger("headrace.keys")

ENTRIES_MAX = 1_000  # of one write: it keeps the interpreter to itself, a few milliseconds for so many
WRITE_BUFFER_BYTES = 8 << 20
BLOCK_CACHE_BYTES = 16 << 20
BLOOM_BITS = 10  # a key: one look in a hundred for a key that is not there reads a block
OPEN_FILES_MAX = 64
KEY, END = b"k", b"w"
NOT_INSTALLED = "an index of keys needs rocksdict: pip install 'headrace[keys]'"

Entry = tuple[bytes, int]  # a key, and the offset of its last record


def is_installed() -> bool:
    try:
        import rocksdict  # noqa: F401
    except ImportError:
        return False
    return True


class KeyStore:
    """Of all logs of a broker. For any thread."""

    def __init__(self, folder: str) -> None:
        if not is_installed():
            raise Conflict(NOT_INSTALLED)
        self._folder = folder
        try:
            self._db = _open(folder)
        except Exception as error:  # noqa: BLE001 - it has no class of its own, and whatever is wrong, it is derived
            logger.warning("the index of keys cannot be read, and is made again: %s", error)
            shutil.rmtree(folder, ignore_errors=True)
            self._db = _open(folder)

    def close(self) -> None:
        self._db.close()  # writes what is in memory

    def end(self, log_id: int) -> int:
        """The first offset that is not in it; 0 for a log it does not know."""
        return _number(self._db.get(END + _prefix(log_id)))

    def logs(self) -> list[int]:
        return [int.from_bytes(key[1:], "big") for key, _ in self._from(END, END + b"\xff" * 9)]

    def find(self, log_id: int, key: bytes) -> int | None:
        found = self._db.get(KEY + _prefix(log_id) + key)
        return None if found is None else _number(found)

    def put(self, log_id: int, entries: Sequence[Entry], end: int) -> None:
        """In the order of the log; the last of a key counts."""
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
        """Drops the entries of records that are gone from the beginning of the log: how many."""
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
        """Everything of a log."""
        prefix = KEY + _prefix(log_id)
        # First, so that a crash between the two leaves a log that is not known, and not one without its entries.
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
    # Filters and indexes count as blocks, or they would grow with the number of keys; and in small parts, or one of a
    # large file would not fit into its share of the cache, and would be read for every look.
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
    """The first key behind all that begin with this."""
    return (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big")


def _number(value: bytes | None) -> int:
    return 0 if value is None else int.from_bytes(value, "big")
