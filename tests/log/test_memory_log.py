"""Memory logs: batches beyond the limit are spilled to unsynced files and read back unchanged."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.log.counters import Counters
from headrace.log.disk.disk import RealDisk
from headrace.log.disk.file_cache import FileCache
from headrace.log.disk.workers import InlineWorker
from headrace.log.memory.memory_log import MemoryLog
from headrace.log.memory.spill import LARGE_BYTES, LOG_BYTES_MAX, Spill
from headrace.log.read.cold_reads import Loader, ReadWaits
from headrace.record import codec

KB, MB = 1 << 10, 1 << 20


class FullDisk(RealDisk):
    is_full = False

    def pwrite(self, file: int, buffers: object, position: int) -> int:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().pwrite(file, buffers, position)  # type: ignore[arg-type]


def make(folder: Path, disk: RealDisk | None = None) -> tuple[MemoryLog, Spill]:
    disk = disk or RealDisk()
    spill = Spill(FileCache(disk, 16), disk, str(folder), Loader(None, InlineWorker()), Counters())
    return MemoryLog(spill), spill


def batch(number: int, size: int) -> bytearray:
    return codec.build([(None, number.to_bytes(4, "big") + bytes(size), (), 0)])


def numbers(log: MemoryLog, start: int = 0) -> list[int]:
    found, offset = [], start
    while offset < log.visible_end:
        chunk = log.read(offset, 256 * KB)
        records = codec.records(chunk.data, from_offset=offset)
        found += [int.from_bytes((record.value or b"")[:4], "big") for record in records]
        offset = chunk.next_offset
    return found


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("spill/*"))


def test_a_large_log_keeps_little_in_memory_and_returns_everything(tmp_path: Path) -> None:
    log, spill = make(tmp_path)
    for number in range(1000):
        log.append(batch(number, 32 * KB))
        assert log.memory_bytes <= LOG_BYTES_MAX + 64 * KB
    assert log.size_bytes > 30 * MB
    assert spill.spilled_bytes > 25 * MB
    assert numbers(log) == list(range(1000))
    assert numbers(log, 777) == list(range(777, 1000))


def test_a_small_log_touches_no_disk(tmp_path: Path) -> None:
    log, spill = make(tmp_path)
    for number in range(10):
        log.append(batch(number, 1000))
    assert not (tmp_path / "spill").exists()
    assert list(spill.large) == []


def test_a_spill_file_is_removed_when_its_batches_are_dropped(tmp_path: Path) -> None:
    log, _ = make(tmp_path)
    for number in range(1000):
        log.append(batch(number, 32 * KB))
    before = len(files_in(tmp_path))
    assert before >= 3
    log.drop_below(500)
    assert len(files_in(tmp_path)) < before
    log.drop_below(1000)
    assert files_in(tmp_path) == []
    assert log.size_bytes == log.memory_bytes == 0
    log.append(batch(7, 10))
    assert numbers(log, 1000) == [7]


def test_the_files_of_a_deleted_queue_are_removed(tmp_path: Path) -> None:
    log, spill = make(tmp_path)
    for number in range(300):
        log.append(batch(number, 32 * KB))
    assert files_in(tmp_path)
    log.close()
    assert files_in(tmp_path) == []
    assert spill.held_bytes() == 0


def test_a_start_removes_the_spill_files_of_the_last_run(tmp_path: Path) -> None:
    log, _ = make(tmp_path)
    for number in range(300):
        log.append(batch(number, 32 * KB))
    make(tmp_path)
    assert files_in(tmp_path) == []


def test_under_pressure_the_largest_logs_are_spilled_first(tmp_path: Path) -> None:
    first, spill = make(tmp_path)
    logs = [first, *(MemoryLog(spill) for _ in range(3))]
    for log, count in zip(logs, (4, 40, 20, 1), strict=True):
        for number in range(count):
            log.append(batch(number, 32 * KB))
    assert spill.held_bytes() > LARGE_BYTES
    assert spill.shed(1 * MB) >= 1 * MB
    assert [log.memory_bytes == 0 for log in logs] == [False, True, False, False]
    spill.shed(100 * MB)
    assert [log.memory_bytes == 0 for log in logs] == [True, True, True, False], "small logs stay in memory"
    assert [numbers(log) for log in logs] == [list(range(count)) for count in (4, 40, 20, 1)]


def test_a_full_disk_leaves_everything_in_memory_and_loses_nothing(tmp_path: Path) -> None:
    disk = FullDisk()
    log, _ = make(tmp_path, disk)
    disk.is_full = True
    for number in range(300):
        log.append(batch(number, 32 * KB))
    assert log.memory_bytes == log.size_bytes
    disk.is_full = False
    for number in range(300, 600):
        log.append(batch(number, 32 * KB))
    assert log.memory_bytes <= LOG_BYTES_MAX + 64 * KB
    assert numbers(log) == list(range(600))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 200_000), st.sampled_from(["spill", "drop"])), max_size=40))
def test_a_log_that_spills_reads_like_one_that_does_not(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int | str]
) -> None:
    log, _ = make(tmp_path_factory.mktemp("spill"))
    plain = MemoryLog()
    for number, step in enumerate(steps):
        if step == "spill":
            log.spill(0)
        elif step == "drop":
            offset = (log.start_offset + log.visible_end) // 2
            log.drop_below(offset)
            plain.drop_below(offset)
        else:
            assert isinstance(step, int)
            log.append(batch(number, step))
            plain.append(batch(number, step))
        assert numbers(log, log.start_offset) == numbers(plain, plain.start_offset)
        assert (log.size_bytes, log.start_offset, log.visible_end) == (
            plain.size_bytes, plain.start_offset, plain.visible_end,
        )  # fmt: skip
    log.close()


def test_only_its_reader_waits_for_a_spilled_batch_that_left_the_page_cache(tmp_path: Path) -> None:
    class Cold(RealDisk):
        def pread_cached(self, file: int, size: int, position: int) -> bytes | None:
            return None

    log, _ = make(tmp_path, Cold())
    for i in range(3):
        log.append(batch(i, LARGE_BYTES))
    assert log.spill(0) > 0
    with pytest.raises(ReadWaits) as caught:
        log.read_now(0, 1)
    caught.value.load()
    assert log.read_now(0, 1).data == log.read(0, 1).data
