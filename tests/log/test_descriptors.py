"""No file descriptor is free: rounds wait or are refused, and the log continues when there is one."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace.errors import DiskFull
from headrace.log.disk import paths
from headrace.log.disk.disk import RealDisk, write_atomically
from headrace.log.maintenance.offline_rewrite import rewrite_file
from headrace.log.segments.replacement import Rewritten, adopt
from headrace.log.settings import StreamSettings
from headrace.log.standby.change_feed import Changes
from tests.crash.simdisk import Fault, SimulatedDisk
from tests.log.helpers import Bench, batch, values


@contextmanager
def descriptors_run_out(disk: SimulatedDisk, *, after: int) -> Iterator[None]:
    """After `after` changes, other processes take all free descriptors, including those that are closed."""
    left = after

    def take_them(_kind: str, _path: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            disk.files_limit = 0

    disk.before = take_them
    yield
    disk.before = None
    disk.files_limit = 1 << 30


def test_without_a_descriptor_for_the_next_journal_file_only_the_round_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors may become free again, while a failed broker would refuse everything until its restart."""
    shard = bench.open()
    log, real = shard.log(1), shard.disk.open

    def none_is_free(path: str, **how: bool) -> int:
        if path.endswith(".wal"):
            raise OSError(errno.EMFILE, "too many open files", path)
        return real(path, **how)

    stored, error = 0, None
    with monkeypatch.context() as patch:
        patch.setattr(shard.disk, "open", none_is_free)
        while error is None:
            ticket = log.append(batch([b"x" * 2000]))
            shard.pump()
            error = ticket.error
            stored += error is None
    assert isinstance(error, DiskFull) and shard.failure is None
    shard.tick()
    bench.append(1, [b"later"])
    assert log.visible_end == stored + 1
    shard.close()


@pytest.mark.parametrize("size", [900, 3000], ids=["journalled", "direct"])
def test_without_a_descriptor_for_the_next_segment_a_round_only_waits_or_is_refused(size: int) -> None:
    """Nor does it need a descriptor to undo a write that was not made."""
    disk = SimulatedDisk()
    bench = Bench("/data", disk)
    shard = bench.open(stream=StreamSettings(segment_size=3500))
    log = shard.log(1)
    bench.append(1, [b"x" * 3000])
    shard.files.forget([log.segments[0].path()])  # so that it has no idle file to close
    disk.files_limit = len(disk.open_paths())
    ticket = log.append(batch([b"x" * size]))
    shard.pump()
    assert shard.is_full and shard.failure is None
    disk.files_limit = 1 << 30
    for _ in range(2):
        shard.tick()
        shard.pump()
    bench.append(1, [b"later"])
    assert ticket.done and (ticket.error is None) == (size == 900)
    assert len(values(log)) == (3 if size == 900 else 2)
    shard.close()


@pytest.mark.parametrize("second", [False, True], ids=["its folder", "another file"])
def test_a_written_round_that_finds_no_descriptor_can_still_be_rolled_back(second: bool) -> None:
    """Its first file was synced and closed to free a descriptor, and truncating that file needed one again."""
    disk = SimulatedDisk()
    bench = Bench("/data", disk)
    shard = bench.open(1, 2)
    bench.append(1, [b"a"])
    bench.append(2, [b"a"])
    if second:
        shard.checkpoint()
        shard.pump()
        first = shard.log(1).segments[0].path()
        shard.files.forget([path for path in disk.open_paths() if path != first])
    disk.files_limit = 0  # others have all descriptors, and take those that are closed
    tickets = [shard.log(log_id).append(batch([b"x" * 6000])) for log_id in ((1, 2) if second else (1,))]
    shard.pump()
    assert shard.is_full and shard.failure is None
    assert all(isinstance(ticket.error, DiskFull) for ticket in tickets)
    disk.files_limit = 1 << 30
    shard.tick()
    for log_id in (1, 2):
        bench.append(log_id, [b"b"])
        assert values(shard.log(log_id)) == [b"a", b"b"]
    shard.close()


@pytest.mark.parametrize("flush", [{"flush_interval_ms": 500}, {"flush_interval_ms": 0, "flush_bytes": 1}])
def test_without_a_descriptor_for_a_flush_an_async_log_is_flushed_when_there_is_one(flush: dict[str, Any]) -> None:
    """The folder of a new segment takes one: the shard had failed, and with it all other logs."""
    disk = SimulatedDisk()
    bench = Bench("/data", disk)
    shard = bench.open(stream=StreamSettings(write_mode="async", **flush))
    log = shard.log(1)
    shard.tick()
    bench.append(1, [b"a"])
    disk.files_limit = 0  # others have all of them
    for _ in range(3):
        bench.clock.advance(0.5)
        shard.tick()
        shard.pump()
    assert shard.is_full and shard.failure is None and log.durable_end == 0
    disk.files_limit = 1 << 30
    shard.tick()
    shard.pump()
    assert not shard.is_full and log.durable_end == 1
    shard.close()


def test_an_async_log_is_flushed_on_time_after_a_refused_checkpoint() -> None:
    """It was on no list any more, and only the next checkpoint synced it."""
    disk = SimulatedDisk()
    bench = Bench("/data", disk)
    shard = bench.open(stream=StreamSettings(write_mode="async", flush_interval_ms=500))
    bench.append(1, [b"a"])
    disk.files_limit = 0
    shard.checkpoint(lambda _: None)
    shard.pump()
    assert shard.is_full and shard.log(1).durable_end == 0
    disk.files_limit = 1 << 30
    for _ in range(2):
        bench.clock.advance(0.5)
        shard.tick()
        shard.pump()
    assert shard.log(1).durable_end == 1
    shard.close()


def test_a_journal_file_whose_name_cannot_be_synced_is_not_left_behind() -> None:
    """Each try would leave another, of 64 MB."""
    disk = SimulatedDisk()
    shard = Bench("/data", disk).open()
    shard.journal.reserve(1)
    before = disk.listdir("/data/journal")
    disk.arm(Fault("sync_dir", 1, errno.EMFILE, within="/journal"))
    with pytest.raises(OSError, match="Too many open files"):
        shard.journal.make_ahead()
    assert disk.listdir("/data/journal") == before


@pytest.mark.parametrize("has_one", [False, True], ids=["the first segment", "the next segment"])
@pytest.mark.parametrize("calls", range(12))
def test_a_round_that_rolls_a_segment_is_stored_or_refused_whenever_descriptors_run_out(
    has_one: bool, calls: int
) -> None:
    """There was a descriptor for the new file and none for the folder: syncing the undo needed one more."""
    disk = SimulatedDisk()
    bench = Bench("/data", disk)
    shard = bench.open(stream=StreamSettings(segment_size=3500))
    kept = [b"a" * 3000] if has_one else []
    for value in kept:
        bench.append(1, [value])
        shard.checkpoint()
        shard.pump()
        shard.files.forget([path for path in disk.open_paths() if "/logs/" in path])
    with descriptors_run_out(disk, after=calls):
        ticket = shard.log(1).append(batch([b"x" * 5000]))
        shard.pump()
    assert ticket.done and shard.failure is None
    kept += [b"x" * 5000] if ticket.error is None else []
    assert ticket.error is None or isinstance(ticket.error, DiskFull)
    assert values(shard.log(1)) == kept
    for mode in ("lost", "kept"):
        found = Bench("/data", disk.power_cut(Random(1), mode))
        found.open(stream=StreamSettings(segment_size=3500))
        assert values(found.shard.log(1)) == kept
    shard.tick()
    bench.append(1, [b"later"])
    assert values(shard.log(1)) == [*kept, b"later"]
    shard.close()


def test_a_folder_is_made_without_a_descriptor(tmp_path: Path) -> None:
    """The folder was made and the call failed: a retry found it there, and standbys were never notified of it."""
    disk, made = RealDisk(), str(tmp_path / "made")
    watcher = disk.watcher = Changes(disk, disk.names, str(tmp_path), lambda: 0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(tmp_path, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            disk.open_dir(str(tmp_path))
        disk.mkdir(made)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.path.isdir(made) and watcher.sequence == 1 + 1


@pytest.mark.parametrize("calls", range(36))
def test_a_compaction_succeeds_or_is_abandoned_whenever_descriptors_run_out(calls: int) -> None:
    """The new segment had its name and the folder could not be synced: the shard had failed, and with it all logs."""
    disk = SimulatedDisk()
    bench = Bench("/data", disk)
    small = StreamSettings(segment_size=400, cleanup_policy="compact")
    shard = bench.open(stream=small)
    log = shard.log(1)
    for number in range(6):
        log.append(batch([b"%d" % number * 100], keys=[b"k"]))
        shard.pump()
    wanted = values(log)
    outcomes: list[tuple[Rewritten | None, BaseException | None]] = []
    with descriptors_run_out(disk, after=calls):
        shard.maintenance.compact(log, lambda made, error: outcomes.append((made, error)))
        shard.pump()
    [(made, error)] = outcomes
    assert shard.failure is None
    assert made is not None if error is None else isinstance(error, DiskFull | OSError)
    compacted = values(log)  # one segment perhaps, and another not: each is swapped by itself
    assert compacted == [value for value in wanted if value in compacted] and wanted[-1] in compacted
    for mode in ("lost", "kept"):
        found = Bench("/data", disk.power_cut(Random(1), mode))
        found.open(stream=small)
        assert values(found.shard.log(1)) == compacted
    for _ in range(2):
        shard.tick()
        shard.pump()
    shard.maintenance.compact(log, lambda made, error: outcomes.append((made, error)))
    shard.pump()
    assert outcomes[-1][1] is None and values(log)[-1] == wanted[-1] and len(values(log)) < len(wanted)
    assert not [path for path in disk.files() if path.endswith(paths.UNFINISHED)]
    shard.close()


@pytest.mark.parametrize("calls", range(6))
def test_a_file_is_replaced_or_unchanged_whenever_descriptors_run_out(calls: int) -> None:
    """The file was replaced, and the call failed."""
    disk = SimulatedDisk()
    disk.mkdir("/d")
    write_atomically(disk, "/d/file", b"old")
    with descriptors_run_out(disk, after=calls):
        try:
            write_atomically(disk, "/d/file", b"new")
        except OSError:
            assert disk.files()["/d/file"] == b"old"
        else:
            assert disk.files()["/d/file"] == b"new"
    assert not disk.open_paths()


@pytest.mark.parametrize("calls", range(44))
def test_a_log_is_truncated_or_unchanged_whenever_descriptors_run_out(calls: int) -> None:
    """The removed segment had lost its name and the folder could not be synced, so the shard failed."""
    disk = SimulatedDisk()
    bench = Bench("/data", disk)
    small = StreamSettings(segment_size=400)
    shard = bench.open(stream=small)
    log = shard.log(1)
    for number in range(6):
        bench.append(1, [b"%d" % number * 60, b"%d" % number * 60])
    whole = values(log)
    outcomes: list[BaseException | None] = []
    with descriptors_run_out(disk, after=calls):
        shard.maintenance.truncations.truncate(log, 5, outcomes.append)
        shard.pump()
    for _ in range(3):
        shard.tick()
        shard.pump()
    [error] = outcomes
    assert shard.failure is None and (error is None or isinstance(error, DiskFull))
    left = whole[:5] if error is None else whole
    bench.append(1, [b"later"])
    assert values(log) == [*left, b"later"]
    for mode in ("lost", "kept"):
        found = Bench("/data", disk.power_cut(Random(1), mode))
        found.open(stream=small)
        assert values(found.shard.log(1)) == [*left, b"later"]
    shard.close()


@pytest.mark.parametrize("calls", range(30))
def test_a_rewritten_segment_is_used_or_dropped_whenever_descriptors_run_out(calls: int) -> None:
    """The new segment had its name, and the rewrite was reported as failed: the log continued with the old segment, and
    the next start with the new one."""
    disk = SimulatedDisk()
    bench = Bench("/data", disk)
    small = StreamSettings(segment_size=400)
    shard = bench.open(stream=small)
    log = shard.log(1)
    for number in range(6):
        bench.append(1, [b"%d" % number * 60, b"%d" % number * 60])
    disk.mkdir("/data/staging")
    segment = log.segments[0]
    rewrite_file(segment, "/data/staging/rewritten", lambda data, info: data[info.position : info.end], disk)
    outcomes: list[BaseException | None] = []
    with descriptors_run_out(disk, after=calls):
        shard.maintenance.rewrite_segments(
            log,
            [segment],
            lambda _data, _info: None,
            lambda _made, error: outcomes.append(error),
            make=lambda: adopt(shard.files, segment, "/data/staging/rewritten", 100),
        )
        shard.pump()
    [error] = outcomes
    assert shard.failure is None
    names = [name for name in disk.listdir("/data/logs/1-t") if name.startswith(f"{0:020}-000001")]
    assert (len(names) >= 2 and log.segments[0].generation == 1) if error is None else not names
    shard.close()


def test_a_sync_that_fails_while_maintenance_frees_a_descriptor_is_reported_at_once() -> None:
    """The sync was for an unrelated log, and its failure was not reported before the next round."""
    disk = SimulatedDisk()
    bench = Bench("/data", disk)
    shard = bench.open(stream=StreamSettings(segment_size=400))
    log = shard.log(1)
    for _ in range(6):
        bench.append(1, [b"x" * 100])
    segment = log.segments[0]
    disk.mkdir("/data/staging")
    rewrite_file(segment, "/data/staging/rewritten", lambda data, info: data[info.position : info.end], disk)

    def make() -> Rewritten:
        shard.files.write(f"{log.tail.folder}/other", [b"written by a round"], 0, create=True)
        disk.arm(Fault("sync", 1, errno.EIO, within="/other"), Fault("open", 1, errno.EMFILE, within="1-t"))
        return adopt(shard.files, segment, "/data/staging/rewritten", 100)

    outcomes: list[BaseException | None] = []
    shard.maintenance.rewrite_segments(
        log, [segment], lambda _data, _info: None, lambda _made, error: outcomes.append(error), make=make
    )
    shard.pump()
    assert isinstance(outcomes[0], OSError) and shard.failure is not None
