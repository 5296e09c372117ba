"""How long a compacted log keeps a tombstone after the first compaction that covered it, as in Kafka (KIP-534)."""

from array import array
from pathlib import Path

import pytest

from headrace.log.log import Log
from headrace.log.maintenance.compaction import Deletes, Survivors, is_due_now, kept_of
from headrace.log.recovery.inspect import Inspector
from headrace.log.settings import StreamSettings
from headrace.record import codec
from headrace.record.layout import CODECS
from headrace.record.types import BatchInfo, Record
from tests.log.helpers import Bench, records

RETENTION_MS = 60_000
STREAM = StreamSettings(segment_size=400, cleanup_policy="compact", tombstone_retention_ms=RETENTION_MS)
AT_ONCE = StreamSettings(segment_size=400, cleanup_policy="compact", tombstone_retention_ms=0)
YEARS_AGO, YEARS_AHEAD = 1_000_000_000_000, 3_000_000_000_000
Row = tuple[bytes | None, bytes | None, tuple[()], int]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def append(bench: Bench, rows: list[Row], codec_name: str = "none") -> None:
    bench.shard.log(1).append(codec.build(rows, codec=CODECS[codec_name]))
    bench.shard.pump()


def seal(bench: Bench) -> None:
    """Fill a segment with another key."""
    for _ in range(3):
        append(bench, [(b"filler", b"x" * 300, (), YEARS_AGO)])


def compact(bench: Bench) -> None:
    errors: list[BaseException | None] = []
    bench.shard.maintenance.compact(bench.shard.log(1), lambda _made, error: errors.append(error))
    bench.shard.pump()
    assert errors == [None]


def first_batch(log: Log) -> BatchInfo:
    return codec.scan(log.read(log.start_offset, 1).data)[0]


def about(log: Log, key: bytes) -> list[Record]:
    return [record for record in records(log) if record.key == key]


@pytest.mark.parametrize("timestamp", [YEARS_AGO, YEARS_AHEAD, -1])
@pytest.mark.parametrize("codec_name", ["none", "zstd"])
def test_a_tombstone_stays_for_its_retention_whatever_its_timestamp(
    bench: Bench, timestamp: int, codec_name: str
) -> None:
    """Regression: a tombstone with an old timestamp was dropped at once; one from the future stayed for years."""
    bench.open(stream=STREAM)
    rows: list[Row] = [(b"k", b"x" * 50, (), 7), (b"k", None, (), timestamp), (b"other", b"v" * 50, (), 9)]
    append(bench, rows, codec_name)
    seal(bench)
    log = bench.shard.log(1)
    _, tombstone, other = records(log)[:3]
    compact(bench)
    horizon_ms = bench.clock.now_ms() + RETENTION_MS
    assert records(log)[:2] == [tombstone, other], "the deleted value is gone; offsets and timestamps are unchanged"
    assert first_batch(log).delete_horizon_ms == horizon_ms
    assert first_batch(log).max_timestamp == max(timestamp, 9)
    bench.kill()
    bench.open(stream=STREAM)
    log = bench.shard.log(1)
    bench.clock.advance(RETENTION_MS / 1000 - 1)
    compact(bench)
    assert first_batch(log).delete_horizon_ms == horizon_ms, "a later compaction does not move it"
    assert about(log, b"k") == [tombstone]
    bench.clock.advance(1)
    compact(bench)
    assert not about(log, b"k") and about(log, b"other") == [other]
    bench.shard.close()
    inspector = Inspector(bench.root)
    assert inspector.verify().is_sound
    inspector.close()


def test_without_retention_the_second_compaction_drops_a_tombstone(bench: Bench) -> None:
    bench.open(stream=AT_ONCE)
    append(bench, [(b"k", b"v", (), YEARS_AGO), (b"k", None, (), YEARS_AGO)])
    seal(bench)
    compact(bench)
    assert [record.value for record in about(bench.shard.log(1), b"k")] == [None]
    compact(bench)
    assert not about(bench.shard.log(1), b"k")
    bench.shard.close()


def test_tombstones_alone_do_not_cause_another_rewrite_of_a_log(bench: Bench) -> None:
    bench.open(stream=STREAM)
    append(bench, [(b"k", None, (), YEARS_AGO)])
    seal(bench)
    log = bench.shard.log(1)
    assert is_due_now(log, bench.clock.now_ms())
    compact(bench)
    assert not is_due_now(log, bench.clock.now_ms())
    bench.clock.advance(2 * RETENTION_MS / 1000)
    assert not is_due_now(log, bench.clock.now_ms()), "as in Kafka: the next compaction removes them"
    bench.shard.close()


def test_a_tombstone_beyond_the_compacted_part_gets_no_horizon(bench: Bench) -> None:
    """It would have expired when the value is dropped, and a reader that has seen the value would miss the deletion."""
    bench.open(stream=AT_ONCE)
    append(bench, [(b"a", None, (), YEARS_AGO), (b"k", b"v", (), YEARS_AGO), (b"k", None, (), YEARS_AGO)])
    seal(bench)
    log = bench.shard.log(1)
    log.pins = {"pin": 1}
    compact(bench)
    assert first_batch(log).delete_horizon_ms is None and len(about(log, b"k")) == 2
    log.pins = {}
    compact(bench)
    assert first_batch(log).delete_horizon_ms is not None
    assert [record.value for record in about(log, b"k")] == [None]
    bench.shard.close()


def test_a_batch_without_tombstones_stays_as_it_is(bench: Bench) -> None:
    bench.open(stream=STREAM)
    append(bench, [(b"a", b"v", (), YEARS_AGO), (b"b", b"", (), YEARS_AGO), (None, None, (), YEARS_AGO)])
    seal(bench)
    log = bench.shard.log(1)
    before = bytes(log.read(0, 1).data)
    compact(bench)
    assert bytes(log.read(0, 1).data) == before
    bench.shard.close()


def test_external_survivors_get_the_same_horizon_unless_tombstones_are_kept() -> None:
    batch = memoryview(bytes(codec.build([(b"a", None, (), 5), (b"b", b"v", (), 6)])))
    info, both = codec.scan(batch)[0], array("q", [0, 1])

    def kept(data: memoryview, until: int, deletes: Deletes | None) -> memoryview:
        made = kept_of(data, codec.scan(data)[0], Survivors(both, until=until, deletes=deletes))
        assert made is not None
        return memoryview(bytes(made))

    assert kept(batch, 2, None) == kept(batch, 1, Deletes(1000, 10)) == batch
    marked = kept(batch, 2, Deletes(1000, 10))
    assert codec.scan(marked)[0].delete_horizon_ms == 1010
    assert kept(marked, 2, Deletes(1009, 10)) == kept(marked, 2, None) == marked
    assert [record.key for record in codec.records(kept(marked, 2, Deletes(1010, 10)))] == [b"b"]
    assert codec.records(marked) == codec.records(batch) and info.delete_horizon_ms is None


def test_a_very_long_retention_gives_a_valid_horizon() -> None:
    batch = codec.build([(b"a", None, (), -1)])
    horizon_ms = Deletes(YEARS_AGO, 2**63 - 1).horizon_for(codec.scan(batch)[0])
    made = codec.filter_batch(batch, codec.scan(batch)[0], [0], delete_horizon_ms=horizon_ms)
    assert made is not None
    assert codec.scan(made)[0].delete_horizon_ms == 2**63 - 1 and codec.records(made)[0].timestamp == -1
