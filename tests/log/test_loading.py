"""Cold reads: the owner thread never waits for them, and they return the right records."""

import errno
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import CorruptLog, LogClosed, OffsetOutOfRange, StorageError
from headrace.log.disk.disk import RealDisk
from headrace.log.disk.workers import ThreadWorker
from headrace.log.log import Log
from headrace.log.read import cold_reads
from headrace.log.read.cold_reads import THREADS, Loader, ReadWaits
from headrace.log.settings import StreamSettings
from headrace.record import codec
from tests.log.helpers import Bench, batch, records

ZSTD = 4
ROLLING = StreamSettings(segment_size=3000, index_interval=100)


class ColdDisk(RealDisk):
    """A disk where nothing is in the page cache before it was loaded. Counts reads."""

    def __init__(self) -> None:
        self.warm: set[tuple[str, int]] = set()
        self.is_cold = False
        self.is_short_of_memory = False
        self.waits: list[str] = []
        self.bytes_read = 0
        self.error: OSError | None = None

    def pread_cached(self, file: int, size: int, position: int) -> bytes | None:
        if self.is_cold and (_name(file), position) not in self.warm:
            return None
        self.bytes_read += size
        return super().pread_cached(file, size, position)

    def pread(self, file: int, size: int, position: int) -> bytes:
        if self.error is not None:
            raise self.error
        self.waits.append(_name(file))
        if not self.is_short_of_memory:
            self.warm.add((_name(file), position))
        return super().pread(file, size, position)


def _name(file: int) -> str:
    return os.path.basename(os.readlink(f"/proc/self/fd/{file}"))


@pytest.fixture
def disk() -> ColdDisk:
    return ColdDisk()


@pytest.fixture
def bench(tmp_path: object, disk: ColdDisk) -> Bench:
    return Bench(str(tmp_path), disk)


def filled(bench: Bench, disk: ColdDisk, count: int = 40) -> Log:
    bench.open(stream=ROLLING)
    for i in range(count):
        bench.append(1, [b"%02d" % i * 100])
    disk.is_cold = True
    return bench.shard.log(1)


def eventually(bench: Bench, log: Log, offset: int) -> bytes | None:
    """Read like a listener: after ReadWaits let the event loop run, then retry."""
    for _ in range(10):
        try:
            chunk = log.read_now(offset, 1)
        except ReadWaits as cold:
            cold.then(lambda: None)
            bench.shard.pump()
        else:
            return codec.records(chunk.data, from_offset=offset, limit=1)[0].value
    raise AssertionError("the read never came to an end")


def test_a_read_that_is_not_in_memory_does_not_touch_the_disk(bench: Bench, disk: ColdDisk) -> None:
    log = filled(bench, disk)
    disk.waits.clear()
    with pytest.raises(ReadWaits):
        log.read_now(3, 1)
    assert disk.waits == []
    assert eventually(bench, log, 3) == b"03" * 100
    assert disk.waits != []
    assert bench.shard.counters.cold_reads > 0
    bench.shard.close()


def test_cold_reads_return_the_same_as_warm_reads(bench: Bench, disk: ColdDisk) -> None:
    log = filled(bench, disk)
    assert [eventually(bench, log, offset) for offset in range(40)] == [b"%02d" % i * 100 for i in range(40)]
    bench.shard.close()


def test_blocking_reads_wait_for_the_disk(bench: Bench, disk: ColdDisk) -> None:
    log = filled(bench, disk)
    assert [record.offset for record in records(log)] == list(range(40))
    assert log.offset_for_timestamp(0) == (0, 1000)
    bench.shard.close()


def timed(*times_ms: int, size: int) -> bytearray:
    return codec.build([(None, bytes(size), (), time_ms) for time_ms in times_ms], codec=ZSTD)


def test_a_search_by_time_decompresses_large_batches_on_another_thread(bench: Bench) -> None:
    bench.open()
    log = bench.shard.log(1)
    for data in (timed(10, 11, size=100), timed(20, 30, size=2 << 20), timed(40, size=2 << 20)):
        log.append(data)
    bench.shard.pump()
    assert log.offset_for_timestamp_now(11) == (1, 11)
    for when, found in ((25, (3, 30)), (40, (4, 40))):
        with pytest.raises(ReadWaits) as cold:
            log.offset_for_timestamp_now(when)
        cold.value.then(lambda: None)
        bench.shard.pump()
        assert log.offset_for_timestamp_now(when) == found
    assert log.offset_for_timestamp(30) == (3, 30), "a blocking search waits"
    bench.shard.close()


def test_a_search_by_time_that_decompresses_several_batches_ends(bench: Bench) -> None:
    """The first batch has lost the matching record, but its header still covers the time: every retry meets it."""
    bench.open()
    log = bench.shard.log(1)
    for data in (timed(90, 10, size=2 << 20), timed(80, size=2 << 20)):
        log.append(data)
    bench.shard.pump()
    log.start_offset = 1
    assert eventually_at(bench, log, 50) == (2, 80)
    bench.shard.close()


def test_a_queued_search_by_time_checks_its_batch_when_it_runs(bench: Bench) -> None:
    """The batch is read again then, and may have been evicted since it was checked."""
    bench.open()
    log = bench.shard.log(1)
    for data in (timed(10, size=100), timed(20, 30, size=2 << 20), timed(40, size=100)):
        log.append(data)
    bench.shard.pump()
    with pytest.raises(ReadWaits) as cold:
        log.offset_for_timestamp_now(25)
    position = len(log.read_now(0, 1).data)
    with open(log.tail.segments[0].path(), "r+b") as file:
        file.seek(position + 100)
        file.write(b"?")
    cold.value.then(lambda: None)
    bench.shard.pump()
    with pytest.raises(CorruptLog) as met:
        log.offset_for_timestamp_now(25)
    assert met.value.offset == 1 and met.value.position == position
    with pytest.raises(CorruptLog):
        log.read_now(1, 1)
    assert log.offset_for_timestamp_now(35, 3) == (3, 40)
    bench.shard.close()


def test_a_search_by_time_continues_when_its_batch_is_deleted_meanwhile(bench: Bench) -> None:
    log = bench.open(stream=StreamSettings(segment_size=1000)).log(1)
    for at in (20, 30, 40):
        log.append(codec.build([(None, os.urandom(1000) + bytes(2 << 20), (), at)], codec=ZSTD))
        bench.shard.pump()
    with pytest.raises(ReadWaits) as cold:
        log.offset_for_timestamp_now(15)
    bench.shard.maintenance.starts.delete_before(log, 2)
    bench.shard.pump()
    assert not os.path.exists(f"{log.tail.segments[0].folder}/{0:020d}.log")
    cold.value.then(lambda: None)
    bench.shard.pump()
    assert eventually_at(bench, log, 15) == (2, 40)
    bench.shard.close()


def eventually_at(bench: Bench, log: Log, when: int) -> tuple[int, int] | None:
    for _ in range(10):
        try:
            return log.offset_for_timestamp_now(when)
        except ReadWaits as cold:
            cold.then(lambda: None)
            bench.shard.pump()
    raise AssertionError("the look never came to an end")


def test_bytes_evicted_before_the_retry_are_read_again(bench: Bench, disk: ColdDisk) -> None:
    log = filled(bench, disk)
    disk.is_short_of_memory = True
    assert eventually(bench, log, 30) == b"30" * 100
    bench.shard.close()


def damage(log: Log, offset: int, data: bytes) -> None:
    """The file position of a record, found without the log."""
    for segment in log.tail.segments:
        with open(segment.path(), "r+b") as file:
            at = file.read().find(data)
            if segment.base <= offset < segment.next_offset:
                assert at > 0
                file.seek(at)
                file.write(b"?")


def test_bytes_read_from_the_disk_again_are_verified_again(bench: Bench, disk: ColdDisk) -> None:
    log = filled(bench, disk)
    assert eventually(bench, log, 3) == b"03" * 100
    damage(log, 3, b"03" * 100)
    disk.warm.clear()
    with pytest.raises(CorruptLog):
        eventually(bench, log, 3)
    assert eventually(bench, log, 30) == b"30" * 100
    bench.shard.close()


def test_bytes_that_read_ahead_brought_back_are_verified_again(bench: Bench, disk: ColdDisk) -> None:
    """The kernel reads ahead, so bytes can come back into memory without a cold read."""
    log = filled(bench, disk)
    damage(log, 3, b"03" * 100)
    assert eventually(bench, log, 2) == b"02" * 100
    disk.is_cold = False
    with pytest.raises(CorruptLog):
        log.read_now(3, 1)
    bench.shard.close()


def test_bytes_that_may_come_from_the_disk_are_always_verified(
    bench: Bench, disk: ColdDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> bytes:
        raise OSError(errno.EOPNOTSUPP, "this filesystem does not say what is in memory")

    log = filled(bench, disk)
    disk.is_cold = False
    monkeypatch.setattr("headrace.log.disk.disk.pread_nowait", unknown)
    assert eventually(bench, log, 3) == b"03" * 100
    damage(log, 3, b"03" * 100)
    with pytest.raises(CorruptLog):
        log.read_now(3, 1)
    bench.shard.close()


def test_two_waiters_for_the_same_bytes_share_one_load(bench: Bench, disk: ColdDisk) -> None:
    log = filled(bench, disk)
    log.read(3, 1)  # the index is in memory now
    disk.warm.clear()
    disk.waits.clear()
    woken: list[int] = []
    for client in (1, 2):
        with pytest.raises(ReadWaits) as caught:
            log.read_now(3, 1)
        caught.value.then(partial(woken.append, client))
    bench.shard.pump()
    assert woken == [1, 2] and len(disk.waits) == 1
    bench.shard.close()


def test_the_retry_reports_a_disk_that_cannot_be_read(bench: Bench, disk: ColdDisk) -> None:
    log = filled(bench, disk)
    disk.error = OSError(errno.EIO, "broken")
    with pytest.raises(StorageError, match="broken"):
        eventually(bench, log, 3)
    bench.shard.kill() if hasattr(bench.shard, "kill") else bench.shard.join()


def test_records_removed_by_retention_during_the_load_are_out_of_range(bench: Bench, disk: ColdDisk) -> None:
    log = filled(bench, disk)
    with pytest.raises(ReadWaits) as caught:
        log.read_now(0, 1)
    bench.shard.maintenance.starts.delete_before(log, 30)
    bench.shard.pump()
    caught.value.then(lambda: None)  # the file is gone by now
    bench.shard.pump()
    with pytest.raises(OffsetOutOfRange):
        log.read_now(0, 1)
    assert eventually(bench, log, 30) == b"30" * 100
    bench.shard.close()


def test_a_missing_index_is_rebuilt_off_the_owner_thread(bench: Bench, disk: ColdDisk) -> None:
    filled(bench, disk)
    bench.shard.close()
    disk.is_cold = False
    for folder, _, names in os.walk(bench.root):
        for name in names:
            if name.endswith(".index"):
                os.unlink(os.path.join(folder, name))
    log = bench.open(stream=ROLLING).log(1)
    disk.waits.clear()
    with pytest.raises(ReadWaits):
        log.read_now(3, 1)
    assert disk.waits == []
    assert eventually(bench, log, 3) == b"03" * 100
    bench.shard.close()


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EMFILE])
def test_a_segment_is_readable_when_its_missing_index_cannot_be_written(
    bench: Bench, disk: ColdDisk, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    """Indexes are not synced and may be lost in a power cut; a full disk must be readable to free space."""
    filled(bench, disk)
    bench.shard.close()
    disk.is_cold = False
    for path in Path(bench.root).rglob("*.index"):
        path.unlink()
    log = bench.open(stream=ROLLING).log(1)
    real = disk.open

    def full(path: str, **how: bool) -> int:
        if how.get("create"):
            raise OSError(reason, "no room", path)
        return real(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "open", full)
        assert eventually(bench, log, 3) == b"03" * 100
    bench.shard.close()


def test_an_index_cached_while_its_segment_grew_is_reloaded_after_the_seal(bench: Bench, disk: ColdDisk) -> None:
    """Otherwise every lookup would walk from the last entry of the early copy."""
    stream = StreamSettings(segment_size=600_000, index_interval=1000)
    log = bench.open(stream=stream).log(1)
    bench.append(1, [b"x" * 500])
    log.read(0, 1)
    for _ in range(70):
        bench.append(1, [b"x" * 10_000])
    assert log.segments[0].is_sealed
    offset = log.segments[0].next_offset - 1
    log.read(offset, 1)  # may have to load the index
    log.forget_positions()
    disk.bytes_read = 0
    log.read(offset, 1)
    assert disk.bytes_read < 50_000
    bench.shard.close()


def test_closing_waits_only_for_loads_that_have_started() -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()
    done: list[int] = []

    def read(number: int) -> None:
        begun.release()
        assert go_on.wait(60)
        done.append(number)

    loader = Loader(lambda told: told())
    for number in range(100):
        loader.submit(partial(read, number), lambda _result, _error: None)
    for _ in range(THREADS):
        assert begun.acquire(timeout=60)
    closing = threading.Thread(target=loader.close)
    closing.start()
    while not loader._threads._jobs.qsize() <= THREADS:  # type: ignore[union-attr]
        time.sleep(0.001)
    go_on.set()
    closing.join(60)
    assert not closing.is_alive() and sorted(done) == list(range(THREADS))


def test_a_first_load_during_close_leaves_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: close, on another thread, saw no threads yet, and those started right after it were never stopped."""
    loader = Loader(lambda told: told())
    made: list[ThreadWorker] = []

    def make_while_it_is_closed(*args: Any) -> ThreadWorker:
        loader.close()
        made.append(ThreadWorker(*args))
        return made[0]

    monkeypatch.setattr(cold_reads, "ThreadWorker", make_while_it_is_closed)
    told: list[BaseException | None] = []
    loader.submit(lambda: None, lambda _, error: told.append(error))
    assert not any(thread.is_alive() for thread in made[0]._threads)
    [error] = told
    assert isinstance(error, LogClosed)


def test_the_compiled_pread_handles_short_reads_and_closed_files(tmp_path: object) -> None:
    """The compiled pread: bytes, a short read at the end of the file, an error for a closed descriptor."""
    disk = RealDisk()
    path = f"{tmp_path}/file"
    file = disk.open(path, create=True)
    data = bytes(batch([b"v"]))
    disk.pwrite(file, [data], 0)
    assert disk.pread_cached(file, len(data), 0) == data
    assert disk.pread_cached(file, 1000, len(data) - 3) == data[-3:]
    assert disk.pread_cached(file, 1000, len(data)) == b""
    disk.close(file)
    with pytest.raises(OSError):
        disk.pread_cached(file, 1, 0)


def test_a_reader_that_meets_damage_finds_the_next_readable_offset(bench: Bench, disk: ColdDisk) -> None:
    log = filled(bench, disk)
    segments = log.tail.segments
    last_of_first = segments[0].next_offset - 1
    for offset in (3, 4, last_of_first, log.visible_end - 1):
        damage(log, offset, b"%02d" % offset * 100)
    disk.warm.clear()
    for offset, behind in ((3, 5), (4, 5), (last_of_first, segments[1].base), (log.visible_end - 1, log.visible_end)):
        with pytest.raises(CorruptLog):
            log.read(offset)
        assert log._waiting(lambda offset=offset: log.next_readable_now(offset)) == behind  # type: ignore[misc]
    assert eventually(bench, log, 5) == b"05" * 100
    with pytest.raises(CorruptLog) as met:
        log._waiting(lambda: log.offset_for_timestamp_now(1000, 3))
    assert met.value.offset == 3
    assert log._waiting(lambda: log.offset_for_timestamp_now(1000, 5)) == (5, 1000)
    bench.shard.close()
