"""Archiving segments to Parquet and back: the same records as before."""

from pathlib import Path

import msgspec
import pytest

from headrace.errors import OffsetOutOfRange
from headrace.log.read.cold_reads import ReadWaits
from headrace.log.read.external import LogFiles
from headrace.log.recovery.inspect import Inspector
from headrace.log.settings import StreamSettings
from headrace.log.tier import archive as tiering
from headrace.log.tier import parquet
from headrace.log.tier.manifest import Manifest
from headrace.log.tier.row_group_cache import RowGroupCache
from headrace.record import codec
from headrace.record.layout import ZSTD
from tests.log.helpers import SMALL, Bench, batch, records, values
from tests.log.tiers import ROLLING, Stop, archive, every_batch, fill, mixed, restore, sealed, take, write


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several row groups per segment, as a large one would have."""
    monkeypatch.setattr(parquet, "GROUP_BYTES", 600)


def test_an_archived_log_reads_as_before(bench: Bench) -> None:
    shard = bench.open(stream=ROLLING)
    mixed(shard)
    log = shard.log(1)
    before, seen = every_batch(log), records(log)
    times = [log.offset_for_timestamp(ms) for ms in (-1, 2, 3_000, 6_001, 10**12)]
    assert archive(shard) >= 2
    assert {segment.state for segment in log.segments} == {"archived", "active"}
    # With LogAppendTime the timestamps of single records are lost; readers never see them.
    assert [b for b in every_batch(log) if b[22] != 8] == [b for b in before if b[22] != 8]
    assert records(log) == seen
    assert [log.offset_for_timestamp(ms) for ms in (-1, 2, 3_000, 6_001, 10**12)] == times
    for record in seen:
        assert codec.records(log.read(record.offset).data, from_offset=record.offset)[0] == record
    assert not list(Path(log.tail.folder).glob("*.seal")), "the local files are gone"
    bench.kill()
    shard = bench.open(stream=ROLLING)
    assert not bench.report.damaged and records(shard.log(1)) == seen
    shard.close()
    shard = bench.open(stream=ROLLING)
    assert bench.report.clean and records(shard.log(1)) == seen
    report = Inspector(bench.root).verify()
    assert report.is_sound and report.segments == len(shard.log(1).segments)
    shard.close()


def test_another_process_reads_archived_and_live_records_as_one(bench: Bench) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    archive(shard)
    files = LogFiles(bench.root)
    for split in (1, 900, 1 << 62):
        got = []
        for piece in files.slices(1, 0, 30, split):
            with files.open(piece) as source:
                while source.position < source.end:
                    data = source.read(300)
                    infos = codec.scan(data)
                    if not infos:
                        source.need_more(data)
                        continue
                    got += [r.offset for r in codec.records(data, 0, infos[-1].end)]
                    source.advance(infos[-1].end)
        assert got == list(range(30))
    assert files.offset_for_timestamp(1, 1000, 0, 30) == 0
    assert files.epoch_before(1, 7, 0) == shard.log(1).epoch
    assert 0 < files.offset_after_bytes(1, 0, 30, 700) < 30
    shard.close()


def test_restoring_gives_back_the_same_bytes(bench: Bench) -> None:
    shard = bench.open(stream=ROLLING)
    mixed(shard)
    log = shard.log(1)
    before = [Path(segment.path()).read_bytes() for segment in log.segments if segment.is_sealed]
    seen = records(log)
    archive(shard)
    restore(shard)
    assert {segment.state for segment in log.segments} == {"sealed", "active"}
    after = [Path(segment.path()).read_bytes() for segment in log.segments if segment.is_sealed]
    for old, new in zip(before, after, strict=True):
        for a, b in zip(codec.scan(old), codec.scan(new), strict=True):
            same = old[a.position : a.end] == new[b.position : b.end]
            assert same or a.timestamp_type, "only timestamps that readers never see may differ"
    assert records(log) == seen
    assert not list(Path(shard.tier_root).rglob("*.parquet")), "nothing is left in the tier"
    assert Inspector(bench.root).verify().is_sound
    shard.close()


def test_gaps_left_by_compaction_stay_gaps(bench: Bench) -> None:
    stream = StreamSettings(segment_size=2000, cleanup_policy="compact")
    shard = bench.open(stream=stream)
    log = shard.log(1)
    for i in range(30):
        log.append(batch([b"v%d" % i * 40], keys=[b"k%d" % (i % 4)]))
        shard.pump()
    shard.maintenance.compact(log, lambda _gain, error: None)
    shard.pump()
    before = records(log)
    assert len(before) < 25
    archive(shard)
    assert records(log) == before
    # Compaction includes archived segments: a tombstone must reach the value that it deletes.
    for i in range(30, 50):
        log.append(batch([b"w%d" % i * 40], keys=[b"k%d" % (i % 4)]))
        shard.pump()
    shard.maintenance.compact(log, lambda _gain, error: None)
    shard.pump()
    assert [r.value for r in records(log) if r.key == b"k0"] and records(log)[0].offset > before[0].offset
    assert not list(Path(shard.tier_root).rglob("*.parquet"))
    shard.close()


def test_retention_counts_and_removes_archived_segments(bench: Bench) -> None:
    shard = bench.open(stream=StreamSettings(segment_size=2000, retention_ms=10**15))
    fill(bench)
    archive(shard)
    log = shard.log(1)
    first = log.segments[0]
    assert first.stored_bytes == Path(first.data_path).stat().st_size
    assert log.size_bytes == sum(s.stored_bytes for s in log.segments)
    log.set_pin("job", first.next_offset)
    log.settings = StreamSettings(segment_size=2000, retention_bytes=0)
    shard.maintenance.starts.apply_retention(log, bench.clock.now_ms())
    shard.pump()
    assert log.start_offset == first.next_offset and first.state == "deleted"
    assert not Path(first.data_path).exists() and Path(log.segments[0].data_path).exists()
    with pytest.raises(OffsetOutOfRange):
        log.read(0)
    bench.kill()
    shard = bench.open(stream=ROLLING)
    assert values(shard.log(1)) == [b"%03d" % i * 50 for i in range(first.next_offset, 30)]
    shard.close()


def test_deleting_a_log_removes_its_part_of_the_tier_even_after_a_kill(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = bench.open(1, 2, stream=ROLLING)
    fill(bench)
    archive(shard)
    with monkeypatch.context() as patch:
        patch.setattr(shard.disk, "rmdir", lambda path: (_ for _ in ()).throw(Stop(path)))
        shard.delete_log(1)
        shard.pump()
    bench.kill()
    shard = bench.open(2, stream=ROLLING)
    assert not list(Path(shard.tier_root).iterdir()) and len(list(Path(bench.root, "logs").iterdir())) == 0
    shard.close()


@pytest.mark.parametrize("inside", [0, 2])
def test_a_log_can_be_truncated_inside_an_archived_segment(bench: Bench, inside: int) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    archive(shard)
    log = shard.log(1)
    middle = log.segments[1].base + inside
    assert values(log)  # fills the row-group cache
    shard.maintenance.truncations.truncate(log, middle, lambda error: None)
    shard.pump()
    assert values(log) == [b"%03d" % i * 50 for i in range(middle)]
    while len(sealed(log)) < 1:
        bench.append(1, [b"after" * 40])
    expected = values(log)
    archive(shard)  # reuses the file names, with other records
    assert values(log) == expected
    bench.kill()
    shard = bench.open(stream=ROLLING)
    assert values(shard.log(1)) == expected
    shard.close()


def test_a_batch_that_decompresses_beyond_the_limit_is_not_archived(bench: Bench) -> None:
    shard = bench.open(stream=StreamSettings(segment_size=2000, batch_bytes_max=10_000))
    shard.log(1).append(codec.build([(None, b"a" * 50_000, (), 1)], codec=ZSTD))
    shard.pump()
    fill(bench)
    segment = sealed(shard.log(1))[0]
    write(shard, segment)
    error = take(shard, segment)
    assert isinstance(error, tiering.NotArchivable) and "bytes uncompressed" in str(error)
    assert segment in shard.log(1).segments and not list(Path(shard.tier_root).rglob("*.p*"))
    shard.close()


def test_row_groups_are_decoded_off_the_owner_thread(bench: Bench) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    archive(shard)
    log = shard.log(1)
    with pytest.raises(ReadWaits) as waits:
        log.read_now(0)
    told: list[bool] = []
    waits.value.then(lambda: told.append(True))
    assert not told, "the owner thread does not wait"
    shard.pump()
    assert told and codec.records(log.read_now(0).data)[0].value == b"000" * 50
    assert shard.counters.tier_reads == 1 and 0 < shard.archives.cache.size_bytes <= 16 << 20
    shard.close()


def test_a_search_by_time_decompresses_archived_batches_on_another_thread(bench: Bench) -> None:
    shard = bench.open(stream=ROLLING)
    log = shard.log(1)
    for at in (2000, 3000, 4000):
        log.append(codec.build([(None, bytes(2 << 20), (), at)], codec=ZSTD))
        shard.pump()
        fill(bench)
    assert archive(shard)
    assert {segment.state for segment in log.segments[:-1]} == {"archived"}
    for wanted, found in ((5, (0, 2000)), (2000, (0, 2000)), (2001, (31, 3000)), (3500, (62, 4000))):
        assert log.offset_for_timestamp(wanted) == found
    shard.close()


def test_the_row_group_cache_is_bounded(bench: Bench) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    archive(shard)
    segment = shard.log(1).segments[0]
    manifest = segment.source.contents
    assert isinstance(manifest, Manifest) and len(manifest) >= 3
    cache = RowGroupCache(shard.disk, 1200)
    for group in manifest.groups():
        cache.load(manifest, group)
        assert cache.size_bytes <= max(1200, group.size)
    last = manifest.group(len(manifest) - 1)
    assert cache.cached(manifest, last) and not cache.cached(manifest, manifest.group(0))
    cache.forget(manifest)
    assert cache.size_bytes == 0
    shard.close()


def test_two_data_folders_may_share_a_tier_dir(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SMALL, tier_dir=str(tmp_path / "shared"))
    benches = [Bench(tmp_path / name) for name in ("a", "b")]
    for bench in benches:
        shard = bench.open(stream=ROLLING, settings=settings)
        fill(bench)
        archive(shard)
    assert len({bench.shard.tier_root for bench in benches}) == 2
    for bench in benches:  # each removes unknown files of its own folder only
        bench.shard.close()
        shard = bench.open(stream=ROLLING, settings=settings)
        assert values(shard.log(1)) == [b"%03d" % i * 50 for i in range(30)]
        assert all(s.data_path.startswith(str(tmp_path / "shared")) for s in shard.log(1).segments if s.is_archived)
    for bench in benches:
        assert values(bench.shard.log(1)) == [b"%03d" % i * 50 for i in range(30)]
        bench.shard.close()
        moved = bench.open(stream=ROLLING)  # the setting only affects new archives
        assert values(moved.log(1)) == [b"%03d" % i * 50 for i in range(30)]
        moved.close()
