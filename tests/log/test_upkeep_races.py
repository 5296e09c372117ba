"""Maintenance of a log while a round, a deletion or other maintenance is in progress."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest

from headrace.errors import Conflict, DiskFull
from headrace.log.disk import paths
from headrace.log.disk.disk import RealDisk
from headrace.log.segments.replacement import Rewritten
from headrace.log.settings import StreamSettings
from headrace.record import codec
from tests.crash.shards import batch as simulated_batch
from tests.crash.shards import every_cut, lost, new_disk, reopen, spec, write
from tests.crash.shards import values as simulated_values
from tests.log.helpers import Bench, batch, records


class Interrupted(RealDisk):
    """Lets the owner thread act while the worker creates a segment's file."""

    meanwhile: Callable[[], object] | None = None
    is_full = False

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, readonly: bool = False) -> int:
        if create and path.endswith(".log") and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device", path)
        return super().open(path, create=create, exclusive=exclusive, readonly=readonly)


COMPACTED = StreamSettings(segment_size=1000, cleanup_policy="compact", tombstone_retention_ms=0)


def put(bench: Bench, key: bytes, value: bytes | None, size: int = 0) -> None:
    data = codec.build([(key, None if value is None else value.ljust(size, b"."), (), 1000)])
    ticket = bench.shard.log(1).append(data)
    bench.shard.pump()
    assert ticket.done and ticket.error is None


def test_a_segment_sealed_by_a_round_in_progress_is_compacted_and_survives_a_kill(tmp_path: Path) -> None:
    """The log was not written since the last checkpoint, but the next one must include it."""
    disk = Interrupted()
    bench = Bench(tmp_path, disk)
    shard = bench.open(stream=COMPACTED)
    log = shard.log(1)
    for value in (b"1", b"2"):
        put(bench, b"k", value, 200)
    put(bench, b"other", b"stays", 200)
    shard.checkpoint()
    shard.pump()
    told: list[BaseException | None] = []
    disk.meanwhile = lambda: shard.maintenance.compact(log, lambda _made, error: told.append(error))
    put(bench, b"last", b"rolls", 200)
    assert told == [None] and len(log.segments) == 2
    expected = [(r.offset, r.key) for r in records(log)]
    assert expected == [(1, b"k"), (2, b"other"), (3, b"last")]
    bench.kill()
    again = bench.open(stream=COMPACTED)
    assert not bench.report.damaged
    assert [(r.offset, r.key) for r in records(again.log(1))] == expected
    again.close()


def test_a_segment_that_is_reopened_on_a_full_disk_is_not_replaced(tmp_path: Path) -> None:
    """It was sealed for a moment, and a compaction began then."""
    disk = Interrupted()
    bench = Bench(tmp_path, disk)
    stream = StreamSettings(segment_size=3000, cleanup_policy="compact")
    shard = bench.open(stream=stream)
    log = shard.log(1)
    for value in (b"1", b"2"):
        put(bench, b"k", value, 800)
    told: list[BaseException | None] = []
    disk.meanwhile = lambda: shard.maintenance.compact(log, lambda _made, error: told.append(error))
    disk.is_full = True
    refused = log.append(batch([b"x" * 2000]))
    shard.pump()
    assert isinstance(refused.error, DiskFull)
    shard.tick()  # there is space again
    put(bench, b"other", b"confirmed")
    assert [(r.offset, r.key) for r in records(log)] == [(0, b"k"), (1, b"k"), (2, b"other")]
    assert [type(error) for error in told] == [Conflict]
    bench.kill()
    again = bench.open(stream=stream)
    assert not bench.report.damaged
    assert [(r.offset, r.key) for r in records(again.log(1))] == [(0, b"k"), (1, b"k"), (2, b"other")]
    again.close()


class Overtaken(RealDisk):
    """Lets other threads act while the cleaner creates its file."""

    meanwhile: Callable[[], object] | None = None

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, readonly: bool = False) -> int:
        file = super().open(path, create=create, exclusive=exclusive, readonly=readonly)
        if path.endswith(paths.UNFINISHED) and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return file


def test_a_deleted_key_does_not_return_when_part_of_a_compaction_is_abandoned(tmp_path: Path) -> None:
    """A tombstone is dropped only if the value that it deletes is gone."""
    disk = Overtaken()
    bench = Bench(tmp_path, disk)
    stream = StreamSettings(segment_size=1000, segment_age_ms=1000, cleanup_policy="compact", tombstone_retention_ms=0)
    shard = bench.open(stream=stream)
    log = shard.log(1)
    for key, value, size in ((b"a", b"1", 100), (b"k", b"deleted", 100), (b"k", None, 0), (b"b", b"2", 0)):
        put(bench, key, value, size)
        if key == b"k" and value is None:
            put(bench, b"filler", b"", 700)  # too large to be rewritten together with the segments before it
        bench.clock.advance(2)
    put(bench, b"c", b"active")
    assert [s.base for s in log.segments] == [0, 1, 2, 4, 5]

    def delete() -> None:
        shard.maintenance.starts.delete_before(log, 1)
        shard.pump()

    disk.meanwhile = delete
    shard.maintenance.compact(log, lambda _made, _error: None)
    shard.pump()
    shard.maintenance.compact(log, lambda _made, _error: None)
    shard.pump()
    assert log.start_offset == 1 and shard.failure is None
    assert [r.value for r in records(log) if r.key == b"k"] in ([], [None])
    shard.close()


def test_a_compaction_reports_its_total_gain_or_a_conflict(bench: Bench) -> None:
    """Without the conflict the caller would take the log for compacted."""
    shard = bench.open(stream=COMPACTED)
    log = shard.log(1)
    for _ in range(9):
        put(bench, b"k", b"v", 400)
    before = sum(segment.size for segment in log.segments if segment.is_sealed)
    told: list[tuple[Rewritten | None, BaseException | None]] = []
    for _ in range(2):
        shard.maintenance.compact(log, lambda made, error: told.append((made, error)))
    shard.pump()
    (_, refused), (made, error) = told
    assert isinstance(refused, Conflict)
    assert error is None and made is not None
    assert (made.bytes_before, made.records_before, made.records_after) == (before, 8, 1)
    shard.close()


@pytest.mark.parametrize("size", [100, 2000])  # inline in the journal, and straight to the segment
def test_a_full_disk_refuses_the_first_append_after_retention_emptied_a_log(tmp_path: Path, size: int) -> None:
    """The active segment has no file yet, so there is nothing to undo."""
    disk = Interrupted()
    bench = Bench(tmp_path, disk)
    shard = bench.open()
    log = shard.log(1)
    bench.append(1, [b"old"])
    shard.maintenance.starts.delete_before(log, 1)
    shard.pump()
    disk.is_full, disk.meanwhile = True, lambda: None
    ticket = log.append(batch([b"x" * size]))
    shard.pump()
    assert shard.failure is None and shard.is_full
    for _ in range(2):  # there is space again: first for the stuck round, then for others
        shard.tick()
        shard.pump()
    assert ticket.done and (ticket.error is None) == (size == 100), "a journaled round is not refused"
    bench.append(1, [b"next"])
    assert [len(r.value or b"") for r in records(log)] == ([100, 4] if size == 100 else [4])
    shard.close()


def test_refused_bytes_do_not_reappear_in_the_first_file_of_a_segment() -> None:
    """They were written, as far as there was space, to a new file."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "old")
    shard.maintenance.starts.delete_before(shard.logs[1], 1)
    shard.pump()
    disk.capacity = disk.used + 1000
    tickets = [shard.logs[1].append(simulated_batch("refused", 700)) for _ in range(2)]
    shard.pump()
    assert [type(ticket.error) for ticket in tickets] == [DiskFull, DiskFull]
    for image in [disk.power_cut(Random(seed), mode) for seed in range(20) for mode in ("kept", "prefix", "mixed")]:
        image.capacity = 1 << 50
        assert simulated_values(reopen(image, spec())) == []


class NoRoomToRewrite(RealDisk):
    def pwrite(self, file: int, buffers: Sequence[bytes | bytearray | memoryview], position: int) -> int:
        if position and os.readlink(f"/proc/self/fd/{file}").endswith(".log.tmp"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().pwrite(file, buffers, position)


def test_a_compaction_that_finds_no_space_frees_what_it_used(tmp_path: Path) -> None:
    """Otherwise it would use the last space of a full disk until the next start."""
    bench = Bench(tmp_path, NoRoomToRewrite())
    shard = bench.open(stream=COMPACTED)
    log = shard.log(1)
    for key in (b"a", b"b", b"c"):
        put(bench, key, b"v", 400)
    told: list[BaseException | None] = []
    shard.maintenance.compact(log, lambda _made, error: told.append(error))
    shard.pump()
    assert isinstance(told[0], OSError) and shard.failure is None
    assert [path.name for path in Path(log.tail.folder).iterdir() if path.name.endswith(".tmp")] == []
    bench.append(1, [b"next"])
    shard.close()


def test_a_pin_set_during_a_compaction_keeps_the_records_after_it(tmp_path: Path) -> None:
    disk = Overtaken()
    bench = Bench(tmp_path, disk)
    shard = bench.open(stream=COMPACTED)
    log = shard.log(1)
    for value in (b"1", b"2", b"3", b"4", b"5"):
        put(bench, b"k", value, 200)
    before = [r.offset for r in records(log)]
    told: list[BaseException | None] = []
    disk.meanwhile = lambda: log.set_pin("job", 0)
    shard.maintenance.compact(log, lambda _made, error: told.append(error))
    shard.pump()
    assert [type(error) for error in told] == [Conflict]
    assert [r.offset for r in records(log)] == before
    log.set_pin("job", None)
    shard.maintenance.compact(log, lambda _made, error: told.append(error))
    shard.pump()
    assert told[1:] == [None] and len(records(log)) < len(before)
    shard.close()


def test_a_compaction_gives_way_to_retention(tmp_path: Path) -> None:
    """Regression: it failed because a file was missing, and housekeeping counted and logged an error."""
    bench = Bench(tmp_path)
    shard = bench.open(stream=COMPACTED)
    log = shard.log(1)
    for value in (b"1", b"2", b"3", b"4", b"5"):
        put(bench, b"k", value, 200)
    shard.checkpoint()
    shard.pump()
    first = log.segments[0]
    told: list[BaseException | None] = []
    shard.maintenance.starts.delete_before(log, first.next_offset)
    shard.maintenance.compact(log, lambda _made, error: told.append(error))
    shard.pump()
    assert not Path(first.path()).exists() and first not in log.segments
    assert [type(error) for error in told] == [Conflict]
    shard.close()


def test_a_rewrite_cancelled_by_a_pin_is_not_applied_after_a_crash() -> None:
    """Regression: it had its final name, and a start uses the newest generation: the pinned records were gone."""
    disk = new_disk()
    segmented = spec(segment_size=100)
    shard = reopen(disk, segmented)
    for text in "abc":
        write(shard, text, size=60)
    log = shard.logs[1]
    oldest = log.segments[0]
    told: list[tuple[Rewritten | None, BaseException | None]] = []
    shard.maintenance.rewrite_segments(
        log,
        [oldest],
        lambda data, info: [],
        lambda rewritten, error: told.append((rewritten, error)),
        if_still=lambda: all(hold >= oldest.next_offset for hold in log.pins.values()),
    )
    log.set_pin("cursor", 0)
    group = shard.group()
    group.put("cursors", b"cursor", b"0")
    group.commit()
    images = every_cut(disk)
    shard.pump()
    disk.before = None
    assert told == [(None, None)]
    pinned = 0
    for image in [*images, lost(disk)]:
        again = reopen(image, segmented)
        if again.state.get("cursors", b"cursor"):
            pinned += 1
            assert simulated_values(again) == ["a", "b", "c"]
    assert pinned > 5
    assert not [name for name in disk.listdir(log.tail.folder) if "-000001" in name], "its files are removed"
