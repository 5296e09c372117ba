"""Archiving segments to Parquet and back: the same records, whatever happens in between."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.errors import CorruptLog, HeadraceError, NotFound, OffsetOutOfRange, StorageError
from headrace.log import parquet, tiering
from headrace.log.disk import RealDisk
from headrace.log.inspect import Inspector
from headrace.log.loading import ReadWaits
from headrace.log.log import Log
from headrace.log.paths import UNFINISHED
from headrace.log.reading import LogFiles
from headrace.log.segment import Segment
from headrace.log.settings import StreamSettings
from headrace.log.shard import Shard
from headrace.log.tiered import GroupCache
from headrace.record import codec
from headrace.record.layout import GZIP, LOG_APPEND_TIME_BIT, ZSTD
from headrace.record.recompress import recompress
from tests.log.helpers import SMALL, Bench, batch, records, values

ROLLING = StreamSettings(segment_size=2000)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several row groups to a segment, as a large one would have."""
    monkeypatch.setattr(parquet, "GROUP_BYTES", 600)


def fill(bench: Bench, count: int = 30) -> None:
    for i in range(count):
        bench.append(1, [b"%03d" % i * 50])


def mixed(shard: Shard) -> None:
    """Records of every kind that must come back as they were."""
    log = shard.log(1)
    plain = [
        (None, b"no key", (), 5_000),
        (b"key", None, (("only", None), ("more", b"\x00\xff")), 4_000),  # earlier than the one before
        (b"", b"", (("", b""),), -1),
    ]
    stamped = batch([b"stamped"] * 3)
    stamped[22] |= LOG_APPEND_TIME_BIT
    reseal(stamped)
    bad_name = codec.build([(b"k", b"v", ((b"\xff\xfe", b"not text"),), 7)])
    batches = [
        codec.build(plain),
        codec.build([(b"z", b"zstd " * 40, (), 6_000 + i) for i in range(5)], codec=ZSTD),
        codec.build([(b"g", b"gzip " * 40, (), 6_000)] * 3, codec=GZIP),
        codec.build(
            [(b"t", b"in a transaction", (), 1)], producer_id=9, producer_epoch=2, base_sequence=4, transactional=True
        ),
        codec.build(
            [(b"\0\0\0\0", b"\0" * 6, (), 2)], producer_id=9, producer_epoch=2, transactional=True, control=True
        ),
        stamped,
        bad_name,
    ]
    for one in batches * 3:
        log.append(bytearray(one))
        shard.pump()
    log.append(batch([b"x" * 3000]))
    shard.pump()
    log.append(batch([b"active"]))
    shard.pump()


def reseal(data: bytearray) -> None:
    from crc32c import crc32c

    data[17:21] = crc32c(memoryview(data)[21:]).to_bytes(4, "big")


def sealed(log: Log) -> list[Segment]:
    return [segment for segment in log.segments if segment.is_sealed and segment.size and segment.tier is None]


def write(shard: Shard, segment: Segment) -> str:
    target = tiering.parquet_path(shard.tier_root, segment) + UNFINISHED
    tiering.write_parquet(segment, target, shard.disk)
    return target


def take(shard: Shard, segment: Segment) -> BaseException | None:
    found: list[BaseException | None] = []
    tiering.archive(shard, shard.log(1), segment, lambda _made, error: found.append(error))
    shard.pump()
    return found[0]


def archive(shard: Shard) -> int:
    segments = sealed(shard.log(1))
    for segment in segments:
        write(shard, segment)
        assert take(shard, segment) is None
    return len(segments)


def restore(shard: Shard) -> None:
    for segment in [s for s in shard.log(1).segments if s.tier is not None]:
        bring_back(shard, segment, f"{shard.root}/back")


def bring_back(shard: Shard, segment: Segment, target: str) -> None:
    tiering.write_segment(segment, target, shard.disk)
    errors: list[BaseException | None] = []
    shard.maintenance.rewrite_segments(
        shard.log(1),
        [segment],
        lambda _data, _info: None,
        lambda _made, error: errors.append(error),
        make=lambda: tiering.take_back(shard.files, segment, target, 4096),
    )
    shard.pump()
    assert errors == [None]


def every_batch(log: Log) -> list[bytes]:
    found, offset = [], log.start_offset
    while offset < log.visible_end:
        chunk = log.read(offset, 700)
        data = memoryview(chunk.data)
        found += [bytes(recompress(data, info, 0)) for info in codec.scan(data)]
        offset = chunk.next_offset
    return found


def test_an_archived_log_reads_as_it_did(bench: Bench) -> None:
    shard = bench.open(stream=ROLLING)
    mixed(shard)
    log = shard.log(1)
    before, seen = every_batch(log), records(log)
    times = [log.offset_for_timestamp(ms) for ms in (-1, 2, 3_000, 6_001, 10**12)]
    assert archive(shard) >= 2
    assert {segment.state for segment in log.segments} == {"archived", "active"}
    # What the broker stamps has no times of its own any more; nobody could see them.
    assert [b for b in every_batch(log) if b[22] != 8] == [b for b in before if b[22] != 8]
    assert records(log) == seen
    assert [log.offset_for_timestamp(ms) for ms in (-1, 2, 3_000, 6_001, 10**12)] == times
    for record in seen:
        assert codec.records(log.read(record.offset).data, from_offset=record.offset)[0] == record
    assert not list(Path(log.tail.folder).glob("*.seal")), "the segments' own files are gone"
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
    assert 0 < files.reach(1, 0, 30, 700) < 30
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
            assert same or a.timestamp_type, "only times that nobody could see may differ"
    assert records(log) == seen
    assert not list(Path(shard.tier_root).rglob("*.parquet")), "nothing is left in the tier"
    assert Inspector(bench.root).verify().is_sound
    shard.close()


def test_gaps_of_compaction_stay_gaps(bench: Bench) -> None:
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
    # Compaction goes on over what is archived: a tombstone must find the value it is for, wherever that is.
    for i in range(30, 50):
        log.append(batch([b"w%d" % i * 40], keys=[b"k%d" % (i % 4)]))
        shard.pump()
    shard.maintenance.compact(log, lambda _gain, error: None)
    shard.pump()
    assert [r.value for r in records(log) if r.key == b"k0"] and records(log)[0].offset > before[0].offset
    assert not list(Path(shard.tier_root).rglob("*.parquet"))
    shard.close()


@pytest.mark.parametrize("byte", [6, 0.4, 0.7, -5])
def test_rot_in_a_parquet_file_is_reported_and_never_served(bench: Bench, byte: float) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    archive(shard)
    log = shard.log(1)
    segment = next(s for s in log.segments if s.tier is not None)
    path = Path(segment.data_path)
    raw = bytearray(path.read_bytes())
    raw[int(byte * len(raw)) if 0 < byte < 1 else int(byte)] ^= 0x40
    path.write_bytes(raw)
    with pytest.raises(CorruptLog, match="parquet"):
        for offset in range(segment.base, segment.next_offset):
            found = codec.records(log.read(offset, 1).data, from_offset=offset, limit=1)
            assert found[0].value == b"%03d" % offset * 50
    assert codec.records(log.read(segment.next_offset).data, limit=1), "other segments are served"
    assert not Inspector(bench.root).verify().is_sound
    with pytest.raises(CorruptLog):
        tiering.write_segment(segment, f"{bench.root}/back", shard.disk)
    shard.close()


def test_a_parquet_file_that_is_gone_is_damage_and_nothing_is_deleted(bench: Bench) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    archive(shard)
    segment = shard.log(1).segments[0]
    kept = sorted(path.name for path in Path(shard.log(1).tail.folder).iterdir())
    shard.close()
    Path(segment.data_path).unlink()
    shard = bench.open(stream=ROLLING)
    assert "were archived" in bench.report.damaged[0]
    assert sorted(path.name for path in Path(shard.log(1).tail.folder).iterdir()) == kept
    assert not Inspector(bench.root).verify().is_sound
    shard.close()


def test_rot_in_a_manifest_is_damage_and_nothing_is_deleted(bench: Bench) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    archive(shard)
    path = Path(shard.log(1).segments[1].path(".tier"))
    shard.close()
    kept = sorted(str(one) for one in Path(bench.root).rglob("*") if one.suffix in {".tier", ".parquet"})
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    problems = Inspector(bench.root).verify().problems
    assert any(str(path) in problem for problem in problems), problems
    with pytest.raises(CorruptLog):
        LogFiles(bench.root).segments(1, 30)
    shard = bench.open(stream=ROLLING)
    assert str(path) in bench.report.damaged[0]
    shard.close()
    assert sorted(str(one) for one in Path(bench.root).rglob("*") if one.suffix in {".tier", ".parquet"}) == kept


def test_what_does_not_hold_the_same_records_is_not_taken_in(bench: Bench) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    first, second = sealed(shard.log(1))[:2]
    target = tiering.parquet_path(shard.tier_root, first) + UNFINISHED
    tiering.write_parquet(second, target, shard.disk)
    error = take(shard, first)
    assert isinstance(error, CorruptLog) and "not those of the segment" in str(error)
    assert not Path(target).exists() and first in shard.log(1).segments
    for garbage in (b"", b"PAR1", b"PAR1" + bytes(100) + b"\xff\xff\xff\x7fPAR1"):
        Path(target).write_bytes(garbage)
        assert isinstance(take(shard, first), HeadraceError)
    assert isinstance(take(shard, first), HeadraceError), "nothing was written"
    assert values(shard.log(1)) == [b"%03d" % i * 50 for i in range(30)]
    shard.close()


def test_what_is_compared_is_what_is_taken_in(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run of the command writes under the same name while the broker compares what the first one wrote."""
    shard = bench.open(stream=ROLLING)
    fill(bench)
    first = sealed(shard.log(1))[0]
    target = Path(write(shard, first))
    unpack = parquet.batches_of

    def disturbed(*arguments: Any) -> bytes:
        target.unlink(missing_ok=True)
        target.write_bytes(b"PAR1 and not much more")
        return unpack(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(parquet, "batches_of", disturbed)
        assert take(shard, first) is None
    assert shard.log(1).segments[0].state == "archived"
    assert values(shard.log(1)) == [b"%03d" % i * 50 for i in range(30)]
    shard.close()


class Stop(Exception):
    """The process dies here."""


def steps() -> Iterator[tuple[str, str]]:
    """What happens on disk while a segment is archived, by the call that a kill comes right before."""
    yield from (("rename", ".parquet"), ("sync_dir", "/tier/1-t"), ("rename", ".tier"), ("unlink", ".log"))


@pytest.mark.parametrize(("call", "ending"), [("pwrite", ""), ("sync", ""), *steps()])
def test_a_kill_at_any_step_leaves_the_records_and_a_second_run_finishes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, call: str, ending: str
) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    segment = sealed(shard.log(1))[0]
    shard.checkpoint()
    shard.pump()
    original: Callable[..., object] = getattr(shard.disk, call)

    def dying(*args: object, **options: object) -> object:
        named = args[1] if call == "rename" else args[0]
        if not ending or str(named).endswith(ending):
            raise Stop(call)
        return original(*args, **options)

    with monkeypatch.context() as patch:
        if call in {"pwrite", "sync"}:
            patch.setattr(shard.disk, call, dying)
            with pytest.raises(Stop):
                write(shard, segment)
        else:
            write(shard, segment)
            patch.setattr(shard.disk, call, dying)
            take(shard, segment)
    bench.kill()
    shard = bench.open(stream=ROLLING)
    log = shard.log(1)
    assert not bench.report.damaged and values(log) == [b"%03d" % i * 50 for i in range(30)]
    known = {s.data_path for s in log.segments if s.tier is not None}
    assert {str(path) for path in Path(shard.tier_root).rglob("*") if path.is_file()} == known, "strays are gone"
    archive(shard)
    assert all(s.tier is not None for s in log.segments if s.is_sealed)
    assert values(log) == [b"%03d" % i * 50 for i in range(30)]
    restore(shard)
    shard.close()
    shard = bench.open(stream=ROLLING)
    assert values(shard.log(1)) == [b"%03d" % i * 50 for i in range(30)]
    shard.close()


def test_retention_counts_and_removes_what_is_archived(bench: Bench) -> None:
    shard = bench.open(stream=StreamSettings(segment_size=2000, retention_ms=10**15))
    fill(bench)
    archive(shard)
    log = shard.log(1)
    first = log.segments[0]
    assert first.stored_bytes == Path(first.data_path).stat().st_size
    assert log.size_bytes == sum(s.stored_bytes for s in log.segments)
    log.set_retention_hold("job", first.next_offset)
    log.settings = StreamSettings(segment_size=2000, retention_bytes=0)
    shard.maintenance.apply_retention(log, bench.clock.now_ms())
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
def test_a_log_is_cut_back_into_what_is_archived(bench: Bench, inside: int) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    archive(shard)
    log = shard.log(1)
    middle = log.segments[1].base + inside
    assert values(log)  # what was unpacked is kept for a while
    shard.maintenance.truncate(log, middle, lambda error: None)
    shard.pump()
    assert values(log) == [b"%03d" % i * 50 for i in range(middle)]
    while len(sealed(log)) < 1:
        bench.append(1, [b"after" * 40])
    expected = values(log)
    archive(shard)  # under names that were there before, with other records
    assert values(log) == expected
    bench.kill()
    shard = bench.open(stream=ROLLING)
    assert values(shard.log(1)) == expected
    shard.close()


def test_a_batch_that_unfolds_too_far_stays_where_it_is(bench: Bench) -> None:
    shard = bench.open(stream=StreamSettings(segment_size=2000, batch_bytes_max=10_000))
    shard.log(1).append(codec.build([(None, b"a" * 50_000, (), 1)], codec=ZSTD))
    shard.pump()
    fill(bench)
    segment = sealed(shard.log(1))[0]
    write(shard, segment)
    error = take(shard, segment)
    assert isinstance(error, tiering.NotArchivable) and "unfolds to" in str(error)
    assert segment in shard.log(1).segments and not list(Path(shard.tier_root).rglob("*.p*"))
    shard.close()


def test_what_is_not_unpacked_yet_is_waited_for_elsewhere(bench: Bench) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    archive(shard)
    log = shard.log(1)
    with pytest.raises(ReadWaits) as waits:
        log.read_now(0)
    told: list[bool] = []
    waits.value.then(lambda: told.append(True))
    assert not told, "the owner goes on meanwhile"
    shard.pump()
    assert told and codec.records(log.read_now(0).data)[0].value == b"000" * 50
    assert shard.counters.tier_reads == 1 and 0 < shard.files.groups.size_bytes <= 16 << 20
    shard.close()


def test_unpacked_row_groups_take_a_bounded_place(bench: Bench) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    archive(shard)
    segment = shard.log(1).segments[0]
    assert segment.tier is not None and len(segment.tier) >= 3
    cache = GroupCache(shard.disk, 1200)
    for group in segment.tier.groups():
        cache.load(segment.tier, group)
        assert cache.size_bytes <= max(1200, group.size)
    last = segment.tier.group(len(segment.tier) - 1)
    assert cache.cached(segment.tier, last) and not cache.cached(segment.tier, segment.tier.group(0))
    cache.forget(segment.tier.path)
    assert cache.size_bytes == 0
    shard.close()


def test_retention_may_take_a_segment_while_it_is_being_archived(bench: Bench) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    log = shard.log(1)
    first = sealed(log)[0]
    write(shard, first)
    found: list[BaseException | None] = []
    tiering.archive(shard, log, first, lambda _made, error: found.append(error))
    shard.maintenance.delete_before(log, first.next_offset)
    shard.pump()
    assert len(found) == 1 and log.start_offset == first.next_offset
    assert values(log) == [b"%03d" % i * 50 for i in range(first.next_offset, 30)]
    assert not list(Path(bench.root).rglob("*.tier")) and not list(Path(bench.root).rglob("*.parquet"))
    bench.kill()
    shard = bench.open(stream=ROLLING)
    assert values(shard.log(1)) == [b"%03d" % i * 50 for i in range(first.next_offset, 30)]
    assert not list(Path(bench.root).rglob("*.parquet*"))
    shard.close()


def test_while_the_tier_cannot_be_reached_only_its_offsets_fail(bench: Bench) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    archive(shard)
    log = shard.log(1)
    tier, away = Path(shard.tier_root), Path(bench.root, "away")
    tier.rename(away)
    with pytest.raises(StorageError, match="cannot be read"):
        log.read(0)
    assert codec.records(log.read(log.segments[-1].base).data)
    bench.append(1, [b"more"])
    away.rename(tier)
    assert values(log) == [*(b"%03d" % i * 50 for i in range(30)), b"more"]
    shard.close()


def test_a_tier_that_is_read_only_for_a_while_stops_nobody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = bench.open(1, 2, stream=ROLLING)
    fill(bench)
    archive(shard)
    log = shard.log(1)
    unlink, first = shard.disk.unlink, log.segments[0]

    def read_only(path: str) -> None:
        if path.endswith(".parquet"):
            raise OSError(errno.EROFS, "Read-only file system", path)
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(shard.disk, "unlink", read_only)
        shard.maintenance.delete_before(log, first.next_offset)
        shard.pump()
        assert shard.failure is None and Path(first.data_path).exists()
        bench.append(1, [b"more"])
    shard.maintenance.sweep()
    shard.pump()
    assert not Path(first.data_path).exists() and len(list(Path(shard.tier_root).rglob("*.parquet"))) >= 1
    with monkeypatch.context() as patch:
        patch.setattr(shard.disk, "unlink", read_only)
        shard.delete_log(1)
        shard.pump()
        assert shard.failure is None
        bench.append(2, [b"another log"])
        bench.kill()
        patch.setattr(RealDisk, "unlink", lambda _, path: read_only(path))
        shard = bench.open(2, stream=ROLLING)
        assert list(Path(shard.tier_root).rglob("*.parquet")), "and it starts nevertheless"
        bench.kill()
    shard = bench.open(2, stream=ROLLING)
    assert not list(Path(shard.tier_root).rglob("*.parquet")) and not list(Path(bench.root, "logs").glob("*.deleted"))
    shard.close()


def test_what_cannot_be_written_is_refused_in_a_sentence(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    segment = sealed(shard.log(1))[0]
    target = tiering.parquet_path(shard.tier_root, segment) + UNFINISHED

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shard.disk, "pwrite", full)
        with pytest.raises(StorageError, match="No space left"):
            write(shard, segment)
    assert not Path(target).exists()
    Path(bench.root, "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot be written"):
        tiering.write_parquet(segment, f"{bench.root}/file/inside/x.parquet.tmp", shard.disk)
    gone = Segment(segment.folder, 999)
    gone.size = 100
    with pytest.raises(NotFound, match="is gone"):
        tiering.write_parquet(gone, target, shard.disk)
    assert not Path(target).exists()
    shard.close()


def test_without_pyarrow_the_reason_is_one_sentence(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    archive(shard)
    shard.files.groups.clear()
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(parquet.PyArrowMissing, match="pip install"):
        shard.log(1).read(0)
    shard.close()


def test_two_data_folders_may_be_given_the_same_place(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SMALL, tier_dir=str(tmp_path / "shared"))
    benches = [Bench(tmp_path / name) for name in ("a", "b")]
    for bench in benches:
        shard = bench.open(stream=ROLLING, settings=settings)
        fill(bench)
        archive(shard)
    assert len({bench.shard.tier_root for bench in benches}) == 2
    for bench in benches:  # each removes what it does not know, of its own
        bench.shard.close()
        shard = bench.open(stream=ROLLING, settings=settings)
        assert values(shard.log(1)) == [b"%03d" % i * 50 for i in range(30)]
        assert all(s.data_path.startswith(str(tmp_path / "shared")) for s in shard.log(1).segments if s.tier)
    for bench in benches:
        assert values(bench.shard.log(1)) == [b"%03d" % i * 50 for i in range(30)]
        bench.shard.close()
        moved = bench.open(stream=ROLLING)  # the setting is for what comes
        assert values(moved.log(1)) == [b"%03d" % i * 50 for i in range(30)]
        moved.close()
