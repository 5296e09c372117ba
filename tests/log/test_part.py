"""Ranges for sendfile: the same bytes that a read returns, or no range at all."""

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import CorruptLog
from headrace.log.disk.pread import is_cached
from headrace.log.log import Log
from headrace.log.read import file_range, reader
from headrace.log.read.file_range import FileRange
from headrace.log.settings import LogSettings, StreamSettings
from headrace.record import codec
from headrace.record.layout import LENGTH_AT
from tests.log.helpers import Bench, batch

KB = 1024
LARGE = LogSettings(journal_file_bytes=1 << 20, journal_files=3, disk_reserve=0)
ROLLING = StreamSettings(segment_size=300 * KB, index_interval=1 * KB)


def system_tells(folder: Path) -> bool:
    probe = folder / "probe"
    probe.write_bytes(b"x" * 4096)
    with probe.open("rb") as file:
        return is_cached(file.fileno(), 0, 4096)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    if not system_tells(tmp_path):
        pytest.skip("this system does not tell what the page cache holds (Linux from 6.5 on does)")
    bench = Bench(tmp_path / "log")
    yield bench
    bench.shard.close()
    assert FileRange.made == 0, "every range has closed its descriptor"


def filled(bench: Bench, *, seed: int = 1, size: int = 1 << 20, stream: StreamSettings = ROLLING) -> Log:
    """Batches of 100 bytes to 20 KB, in several segments."""
    chosen = random.Random(seed)
    bench.open(settings=LARGE, stream=stream)
    while size > 0:
        values = [chosen.randbytes(chosen.randrange(50, 2000)) for _ in range(chosen.randrange(1, 20))]
        bench.append(1, values)
        size -= sum(map(len, values))
    return bench.shard.log(1)


def whole(log: Log) -> bytes:
    data, offset = b"", log.start_offset
    while offset < log.visible_end:
        chunk = log.read(offset, 1 << 20)
        data, offset = data + bytes(chunk.data), chunk.next_offset
    return data


def cut_one(log: Log, most: int = 100 * KB) -> FileRange:
    """The first range of a log, after a read: only a sequential reader is known to begin at a batch."""
    found = log.file_range_now(log.read(log.start_offset, 2 * KB).next_offset, most)
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(5))
def test_ranges_and_reads_together_return_the_whole_log(bench: Bench, seed: int) -> None:
    log = filled(bench, seed=seed)
    chosen = random.Random(seed)
    expected, data, offset, parts = whole(log), b"", log.start_offset, 0
    while offset < log.visible_end:
        most = chosen.randrange(70 * KB, 200 * KB)
        found = log.file_range_now(offset, most)
        if found is not None:
            assert reader.PART_BYTES_MIN <= len(found) <= most
            batches = found.read()
            assert codec.scan(batches)[-1].next_offset == found.next_offset
            data, offset, parts = data + batches, found.next_offset, parts + 1
        else:
            chunk = log.read(offset, most)
            data, offset = data + bytes(chunk.data), chunk.next_offset
    assert data == expected and parts > 2


@pytest.mark.parametrize("seed", range(3))
def test_ranges_of_a_growing_log_match_its_reads(bench: Bench, seed: int) -> None:
    """With an index cached before the segment grew, pending index entries, and seals between two reads."""
    log = filled(bench, seed=seed, size=200 * KB)
    chosen = random.Random(seed)
    data, offset, parts = b"", log.start_offset, 0
    for turn in range(400):
        if turn < 300:
            bench.append(1, [chosen.randbytes(chosen.randrange(50, 4000)) for _ in range(chosen.randrange(1, 8))])
        writer = log.tail.writer
        if writer is not None and chosen.random() < 0.1:
            writer.flush_index()
        if chosen.random() < 0.3 and offset < log.visible_end:
            end = chosen.choice((None, offset + 1, log.visible_end - 1, log.visible_end))
            found = log.file_range_now(offset, 150 * KB, end=end)
            if found is not None:
                assert end is None or found.next_offset <= end
                data, offset, parts = data + found.read(), found.next_offset, parts + 1
            else:
                chunk = log.read(offset, 70 * KB)
                data, offset = data + bytes(chunk.data), chunk.next_offset
    while offset < log.visible_end:
        chunk = log.read(offset, 1 << 20)
        data, offset = data + bytes(chunk.data), chunk.next_offset
    assert data == whole(log) and parts > 1 and len(log.tail.segments) > 2


def test_a_range_never_passes_the_requested_end(bench: Bench) -> None:
    log = filled(bench, stream=StreamSettings(segment_size=10 << 20, index_interval=1 * KB))
    start = log.read(log.start_offset, 2 * KB).next_offset
    lengths = set()
    for end in range(start + 1, log.visible_end):
        log.read(log.start_offset, 2 * KB)
        found = log.file_range_now(start, 1 << 20, end=end)
        if found is not None:
            assert found.next_offset <= end
            lengths.add(len(found))
    assert len(lengths) > 10


def test_no_file_range_is_given_before_a_first_read(bench: Bench) -> None:
    log = filled(bench)
    assert log.file_range_now(log.start_offset, 100 * KB) is None


def test_a_wrong_index_gives_no_range(bench: Bench) -> None:
    """Its last entries point into batches. The next read works without the index."""
    log = filled(bench, stream=StreamSettings(segment_size=10 << 20, index_interval=1 * KB))
    writer = log.tail.writer
    assert writer is not None
    writer.flush_index()
    expected = whole(log)
    path = Path(log.tail.segments[0].path(".index"))
    entries = bytearray(path.read_bytes())
    for at in range(4, len(entries), 8):
        entries[at : at + 4] = (int.from_bytes(entries[at : at + 4], "big") + 7).to_bytes(4, "big")
    path.write_bytes(entries)
    log.tail.segments[0].index = None
    assert log.file_range_now(log.read(log.start_offset, 2 * KB).next_offset, 100 * KB) is None
    assert whole(log) == expected


def test_no_file_range_is_given_for_bytes_outside_the_page_cache(bench: Bench) -> None:
    log = filled(bench)
    cut_one(log)
    path = log.tail.segments[0].path()
    offset = log.read(log.start_offset, 2 * KB).next_offset
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert not is_cached(file.fileno(), 0, 300 * KB), "the kernel did not evict it"
    assert log.file_range_now(offset, 100 * KB) is None


def test_bytes_from_the_disk_are_verified_before_they_are_sent(bench: Bench) -> None:
    """After a restart the bytes on disk may have changed."""
    log = filled(bench)
    bench.shard.close()
    log = bench.open(settings=LARGE, stream=ROLLING).log(1)
    offset = log.read(log.start_offset, 2 * KB).next_offset
    assert log.file_range_now(offset, 100 * KB) is None
    whole(log)
    offset = log.read(log.tail.segments[-2].base, 2 * KB).next_offset
    assert log.file_range_now(offset, 100 * KB) is not None, "a read has verified it"


@pytest.mark.parametrize("place", [100, LENGTH_AT], ids=["in a record", "in the length of a batch"])
def test_a_range_that_left_memory_is_verified_again(bench: Bench, place: int) -> None:
    """A range waits for a slow client, its bytes are evicted, and are damaged on the disk."""
    log = filled(bench)
    found, offset = cut_one(log), log.read(log.start_offset, 2 * KB).next_offset
    with open(log.tail.segments[0].path(), "r+b") as file:
        file.seek(found.position + place)
        value = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([value[0] ^ 1]))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert not found.is_cached()
    with pytest.raises(OSError, match="other bytes than were written"):
        found.load()
    with pytest.raises(CorruptLog):  # in memory again, but no longer verified
        log.read(offset, len(found))


def test_no_file_range_is_given_without_an_index(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequential read needs no index: it does not wait for one to be rebuilt, or fail on a full disk."""
    log = filled(bench)
    segment = log.tail.segments[0]
    offset = log.read(log.start_offset, 2 * KB).next_offset
    os.unlink(segment.path(".index"))
    bench.shard.files.forget([segment.path(".index")])
    bench.shard.index_cache.drop(segment)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("headrace.log.segments.segment.write_atomically", full)
    assert log.file_range_now(offset, 100 * KB) is None
    assert log.read(offset, 100 * KB).next_offset > offset
    monkeypatch.undo()
    assert log.read(offset + 1, 2 * KB), "a read that needs the index rebuilds it"
    assert log.file_range_now(offset, 100 * KB) is not None


def test_a_range_is_not_cut_while_a_truncation_empties_the_log(bench: Bench) -> None:
    """The worker has removed all segments, and the owner thread has not been notified yet."""
    log = filled(bench)
    offset = log.read(log.start_offset, 2 * KB).next_offset
    segments, log.tail.segments = log.tail.segments, ()
    assert log.file_range_now(offset, 100 * KB) is None
    log.tail.segments = segments


def test_a_range_outlives_its_file(bench: Bench) -> None:
    log = filled(bench)
    found = cut_one(log)
    expected = found.read()
    os.unlink(log.tail.segments[0].path())
    assert found.read() == expected


def test_the_number_of_ranges_is_limited_by_descriptors(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_range, "PARTS_MAX", 2)
    log = filled(bench)
    offset = log.read(log.start_offset, 2 * KB).next_offset
    kept = [cut_one(log), cut_one(log)]
    assert log.file_range_now(offset, 100 * KB) is None
    kept.pop()
    assert cut_one(log) is not None


def test_a_compacted_log_is_sent_as_it_is_now(bench: Bench) -> None:
    """A reader continues in the rewritten segment, where other records lie at its old position."""
    bench.open(settings=LARGE, stream=ROLLING)
    log, shard = bench.shard.log(1), bench.shard
    chosen = random.Random(3)
    for number in range(600):
        log.append(batch([chosen.randbytes(1500)], keys=[b"k%d" % (number % 500)]))
        shard.pump()
    before = cut_one(log)
    ended: list[BaseException | None] = []
    shard.maintenance.compact(log, lambda _, error: ended.append(error))
    shard.pump()
    assert ended == [None]
    expected, first = whole(log), log.read(log.start_offset, 2 * KB)
    data, offset = bytes(first.data), first.next_offset
    assert log.file_range_now(before.next_offset, 100 * KB) is None
    while offset < log.visible_end:
        found = log.file_range_now(offset, 100 * KB)
        batches, offset = (found.read(), found.next_offset) if found else log.read(offset, 100 * KB)[::2]
        data += bytes(batches)
    assert data == expected
