"""Recent reads: readers of the same records share one read, and a single reader fills no cache."""

from collections import Counter

from headrace.log.read.recent_reads import SHARED_READS
from headrace.log.settings import LogSettings
from tests.log.helpers import Bench, batch


def many(bench: Bench, count: int = 100) -> Counter[str]:
    """Append batches to a log, and count the reads of its files."""
    shard = bench.open(settings=LogSettings())
    for number in range(count):
        bench.append(1, [b"%d" % number * 100])
    reads: Counter[str] = Counter()
    read_cached = shard.files.read_cached

    def counted(path: str, size: int, position: int) -> bytes | None:
        data = read_cached(path, size, position)
        reads[path.rpartition(".")[2]] += data is not None  # None: evicted from the page cache, and read again
        return data

    shard.files.read_cached = counted  # type: ignore[method-assign]
    return reads


def test_readers_at_the_same_offset_share_a_read(bench: Bench) -> None:
    reads = many(bench)
    log, offset, chunks = bench.shard.log(1), 0, []
    while offset < 100:
        for _ in range(10):
            chunks.append(log.read(offset, 1000))
        offset = chunks[-1].next_offset
    steps = len(chunks) // 10
    assert all(len({bytes(chunk.data) for chunk in chunks[n : n + 10]}) == 1 for n in range(0, len(chunks), 10))
    assert reads["log"] == steps + 1, "the first read is repeated, which shows that there are several readers"
    assert bench.shard.counters.records_read >= 1000, "records from the cache are counted, too"


def test_a_single_reader_keeps_nothing(bench: Bench) -> None:
    many(bench)
    log, offset = bench.shard.log(1), 0
    while offset < 100:
        offset = log.read(offset, 1000).next_offset
        assert bench.shard.recent_reads.size_bytes == 0


def test_the_cache_is_cleared_when_reads_are_no_longer_shared(bench: Bench) -> None:
    many(bench, SHARED_READS + 10)
    log = bench.shard.log(1)
    log.read(0, 1)
    log.read(0, 1)
    log.read(1, 1)
    assert bench.shard.recent_reads.size_bytes > 0
    for offset in range(2, SHARED_READS + 5):
        log.read(offset, 1)
    assert bench.shard.recent_reads.size_bytes == 0


def test_the_cache_stays_within_its_bounds(bench: Bench) -> None:
    many(bench)
    bench.shard.recent_reads._bytes_max = 4000
    log = bench.shard.log(1)
    for offset in range(40):
        for _ in range(3):
            log.read(offset, 1)
        assert bench.shard.recent_reads.size_bytes <= 4000


def test_a_truncated_log_is_read_again(bench: Bench) -> None:
    many(bench, 10)
    log = bench.shard.log(1)
    for _ in range(3):
        assert b"5555" in bytes(log.read(5).data)
    bench.shard.maintenance.truncations.truncate(log, 5, lambda _error: None)
    bench.shard.pump()
    for number in range(5):
        bench.append(1, [b"x%d" % number * 50])
    after = bytes(log.read(5).data)
    assert b"x0x0" in after and b"5555" not in after


def test_records_appended_meanwhile_are_seen(bench: Bench) -> None:
    many(bench, 3)
    log = bench.shard.log(1)
    for _ in range(3):
        assert log.read(0).next_offset == 3
    log.append(batch([b"new"]))
    bench.shard.pump()
    assert log.read(0).next_offset == 4
