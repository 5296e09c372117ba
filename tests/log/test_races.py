"""What two threads, a full disk or an aborted transaction can do to the upkeep of a log."""

import errno
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest

from headrace.log.disk.disk import RealDisk
from headrace.log.disk.file_cache import FileCache
from headrace.log.log import Log
from headrace.log.maintenance.retention import RetentionLimits, new_start
from headrace.log.segments.segment import Segment
from headrace.log.settings import StreamSettings
from headrace.record import codec
from tests.crash.simdisk import Fault, SimulatedDisk
from tests.log.helpers import Bench, batch, values


class SyncedWhileWritten(RealDisk):
    """The keeper syncs a file while the worker writes to it."""

    files: FileCache

    def pwrite(self, file: int, buffers: Sequence[bytes | bytearray | memoryview], position: int) -> int:
        self.files.sync(self.path)
        return super().pwrite(file, buffers, position)

    path = ""


def test_a_write_during_the_sync_of_a_checkpoint_is_synced_by_the_next_checkpoint(tmp_path: Path) -> None:
    disk = SyncedWhileWritten()
    disk.files, disk.path = FileCache(disk, 8), f"{tmp_path}/segment"
    disk.files.write(disk.path, [b"confirmed"], 0, create=True)
    assert [file.path for file in disk.files.take_dirty().files] == [disk.path]
    disk.files.close()


def test_a_log_deleted_during_its_compaction_stops_nothing_else(tmp_path: Path) -> None:
    class Adding(RealDisk):
        """A compaction makes its file right before the folder is renamed for deletion."""

        def rename(self, source: str, target: str) -> None:
            if target.endswith(".deleted"):
                Path(source, "00000000000000000000-000001.log.tmp").write_bytes(b"half")
            super().rename(source, target)

    bench = Bench(tmp_path, Adding())
    shard = bench.open(1, 2)
    bench.append(1, [b"gone"])
    shard.delete_log(1)
    shard.pump()
    assert shard.failure is None
    assert [path.name for path in (tmp_path / "logs").iterdir()] == []
    bench.append(2, [b"goes on"])
    shard.close()


class NoRoomForSeals(RealDisk):
    is_full = False

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, readonly: bool = False) -> int:
        if self.is_full and create and path.endswith(".seal"):
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return super().open(path, create=create, exclusive=exclusive, readonly=readonly)


def test_retention_on_a_full_disk_frees_what_it_can_and_the_rest_later(tmp_path: Path) -> None:
    disk = NoRoomForSeals()
    bench = Bench(tmp_path, disk)
    shard = bench.open(stream=StreamSettings(segment_size=1000, retention_ms=1000))
    for i in range(30):
        bench.append(1, [b"%02d" % i * 50])
    log = shard.log(1)
    assert len(log.segments) > 2
    disk.is_full = True
    shard.maintenance.starts.apply_retention(log, bench.clock.now_ms())
    shard.pump()
    assert shard.failure is None
    assert len(log.segments) == 1 and log.start_offset == 30
    disk.is_full = False
    shard.tick()
    shard.pump()
    assert log.size_bytes == 0
    bench.append(1, [b"after"])
    assert values(log) == [b"after"]
    shard.close()


def segment(base: int, end: int, records: int, last_ms: int) -> Segment:
    made = Segment("f", base)
    made.next_offset, made.size, made.max_timestamp, made.records = end, records * 10, last_ms, records
    return made


@pytest.mark.parametrize(("age_ms_max", "start"), [(500, 20), (-1, 0)])
def test_a_segment_without_records_does_not_prevent_the_removal_of_later_ones(age_ms_max: int, start: int) -> None:
    rewritten_away, old, young = segment(0, 10, 0, -1), segment(10, 20, 10, 1000), segment(20, 30, 10, 2000)
    assert new_start([rewritten_away, old, young], RetentionLimits(age_ms_max, -1, None), 0, 30, 2100) == start


# Compaction and transactions.

COMMIT, ABORT = b"\0\0\0\1", b"\0\0\0\0"


def written(bench: Bench, producer: int, key: bytes, value: bytes) -> None:
    _append(bench, codec.build([(key, value, (), 1000)], producer_id=producer, producer_epoch=0, transactional=True))


def ended(bench: Bench, producer: int, how: bytes) -> None:
    record = (how, b"\0\0\0\0\0\0", (), 1000)
    marker = codec.build([record], producer_id=producer, producer_epoch=0, transactional=True, control=True)
    _append(bench, marker)


def _append(bench: Bench, data: bytearray) -> None:
    bench.shard.log(1).append(data)
    bench.shard.pump()


def compacted(bench: Bench) -> Log:
    log = bench.shard.log(1)
    for _ in range(12):
        bench.append(1, [b"x" * 100])  # without keys: they only fill and seal the segment
    told: list[object] = []
    bench.shard.maintenance.compact(log, lambda gained, error: told.append(error))
    bench.shard.pump()
    assert told == [None]
    return log


def kept(log: Log) -> list[tuple[bytes | None, bytes | None]]:
    found: list[tuple[bytes | None, bytes | None]] = []
    offset = log.start_offset
    while offset < log.visible_end:
        chunk = log.read(offset, 1)
        found += [(r.key, r.value) for r in codec.records(chunk.data, from_offset=offset) if r.key is not None]
        offset = chunk.next_offset
    return found


COMPACTED = StreamSettings(segment_size=1000, cleanup_policy="compact")


def test_aborted_records_do_not_replace_committed_ones(bench: Bench) -> None:
    bench.open(stream=COMPACTED)
    written(bench, 7, b"k", b"committed")
    ended(bench, 7, COMMIT)
    written(bench, 7, b"k", b"aborted")
    ended(bench, 7, ABORT)
    assert kept(compacted(bench)) == [(b"k", b"committed")]
    bench.shard.close()


def test_committed_records_of_a_transaction_replace_earlier_ones(bench: Bench) -> None:
    bench.open(stream=COMPACTED)
    _append(bench, codec.build([(b"k", b"old", (), 1000)]))
    written(bench, 7, b"k", b"new")
    ended(bench, 7, COMMIT)
    assert kept(compacted(bench)) == [(b"k", b"new")]
    bench.shard.close()


def test_nothing_is_dropped_for_a_transaction_whose_end_was_not_seen(bench: Bench) -> None:
    bench.open(stream=COMPACTED)
    _append(bench, codec.build([(b"k", b"old", (), 1000)]))
    written(bench, 7, b"k", b"perhaps")
    _append(bench, codec.build([(b"other", b"1", (), 1000)]))
    _append(bench, codec.build([(b"other", b"2", (), 1000)]))
    log = compacted(bench)
    assert kept(log) == [(b"k", b"old"), (b"k", b"perhaps"), (b"other", b"1"), (b"other", b"2")]
    bench.shard.close()


def test_a_segment_of_a_refused_round_does_not_return_with_a_power_cut() -> None:
    """A checkpoint had just synced the folder with the new segment when it was removed again, and the folder was not
    marked dirty for the removal. The retry made no new segment, because segments may be larger by then."""
    disk = SimulatedDisk()
    bench = Bench("/data", disk)
    shard = bench.open(stream=StreamSettings(segment_size=3500))
    log = shard.log(1)
    bench.append(1, [b"a" * 3000])
    disk.arm(Fault("pwrite", 1, errno.ENOSPC, within=f"{1:020}.log", forever=True))

    def checkpoint_syncs(kind: str, path: str) -> None:
        if kind == "pwrite" and path.endswith(f"{1:020}.log"):
            shard.files.sync_all(shard.files.take_dirty())

    disk.before = checkpoint_syncs
    log.append(batch([b"b" * 900]))
    shard.pump()
    assert shard.committer.is_stuck and shard.failure is None
    disk.disarm()
    disk.before = None
    log.tail.settings = msgspec.structs.replace(log.tail.settings, segment_size=100_000)
    for _ in range(2):
        shard.tick()
        shard.pump()
    shard.checkpoint()
    shard.pump()
    bench.append(1, [b"c" * 5000])  # past the journal
    assert len(log.segments) == 1
    found = Bench("/data", disk.power_cut(Random(1), "lost"))
    found.open()
    assert found.shard.log(1).damage is None
    assert values(found.shard.log(1)) == values(log) == [b"a" * 3000, b"b" * 900, b"c" * 5000]
