"""The cache of open files: which threads wait for the disk, syncs before a close, and filesystem syncs."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from headrace.errors import StorageFailed
from headrace.log.disk.disk import RealDisk, read_whole
from headrace.log.disk.file_cache import FileCache
from headrace.log.settings import StreamSettings
from tests.log.helpers import SMALL, Bench, batch, values

FEW_FILES = msgspec.structs.replace(SMALL, open_files_max=8)
LOGS = range(1, 41)


class Watched(RealDisk):
    """Records every call that may wait for the disk, and the number of syncs."""

    def __init__(self, sync_each_max: int) -> None:
        self.sync_each_max = sync_each_max
        self.told: Callable[[str], object] = lambda what: None
        self.unsynced: set[int] = set()
        self.lost: list[int] = []  # files that were closed with something unsynced in them

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, readonly: bool = False) -> int:
        self.told("open")
        return super().open(path, create=create, exclusive=exclusive, readonly=readonly)

    def pwrite(self, file: int, buffers: Sequence[bytes | bytearray | memoryview], position: int) -> int:
        self.told("pwrite")
        self.unsynced.add(file)
        return super().pwrite(file, buffers, position)

    def sync(self, file: int) -> None:
        self.told("sync")
        super().sync(file)
        self.unsynced.discard(file)

    def sync_filesystem(self, file: int) -> None:
        self.told("sync_filesystem")
        super().sync_filesystem(file)
        self.unsynced.clear()

    def sync_dir(self, path: str, folder: int | None = None) -> None:
        self.told("sync_dir")
        super().sync_dir(path, folder)

    def close(self, file: int) -> None:
        if file in self.unsynced:
            self.lost.append(file)
        super().close(file)


def test_a_checkpoint_does_not_rely_on_another_threads_unfinished_sync(tmp_path: Path) -> None:
    """Compaction made room in the cache: the files it had taken to sync were no longer dirty, and not synced yet."""
    began, may_end = threading.Event(), threading.Event()
    synced: list[int] = []

    class Slow(RealDisk):
        sync_each_max = 1000

        def sync(self, file: int) -> None:
            if threading.current_thread().name == "cleaner":
                began.set()
                assert may_end.wait(30)
            super().sync(file)
            synced.append(file)

    files = FileCache(Slow(), 8)
    for number in range(8):
        files.write(str(tmp_path / f"{number}.log"), [b"in the journal"], 0, create=True)
    seal = str(tmp_path / "new.seal")
    cleaner = threading.Thread(target=lambda: files.write(seal, [b"seal"], 0, create=True), name="cleaner")
    cleaner.start()
    assert began.wait(30)
    dirty = files.take_dirty()
    files.sync_all(dirty)
    assert len(synced) == 8, "the checkpoint may say that they are on disk"
    may_end.set()
    cleaner.join()
    assert files.take_dirty().files and not files._being_synced.keys() - files._open.keys()
    files.close()


@pytest.mark.parametrize("sync_each_max", [1, 1000])
def test_no_thread_waits_for_the_disk_while_it_holds_the_file_lock(tmp_path: Path, sync_each_max: int) -> None:
    """The owner needs them for every read: a worker that synced thousands of files to make room for others, one by one
    and with the lock, once stopped every connection for 15 seconds."""
    disk = Watched(sync_each_max)
    bench = Bench(tmp_path, disk)
    shard = bench.open(*LOGS, settings=FEW_FILES)
    held: list[str] = []
    disk.told = lambda what: held.append(what) if shard.files._lock.locked() else None
    for number in LOGS:
        shard.log(number).append(batch([b"x"]))
    shard.pump()
    shard.checkpoint()
    shard.pump()
    assert shard.counters.checkpoints == 1
    assert [values(shard.log(number)) for number in LOGS] == [[b"x"]] * len(LOGS)
    assert held == []
    shard.close()


@pytest.mark.parametrize("sync_each_max", [1, 1000])
def test_rounds_and_reads_continue_while_a_checkpoint_waits_for_the_disk(tmp_path: Path, sync_each_max: int) -> None:
    disk = Watched(sync_each_max)
    bench = Bench(tmp_path, disk)
    shard = bench.open(*LOGS, settings=FEW_FILES)
    for number in LOGS:
        bench.append(number, [b"before"])
    confirmed: list[bytes | None] = []

    def meanwhile(what: str) -> None:
        if what in ("sync", "sync_filesystem") and shard.checkpoints.is_running and not confirmed:
            disk.told = lambda _: None
            ticket = shard.log(1).append(batch([b"meanwhile"]))
            worker = shard._inline[0]
            while shard._deferred or worker.pump():  # everything but the keeper, which is in this sync
                while shard._deferred:
                    shard._deferred.popleft()()
            assert ticket.done and ticket.error is None
            confirmed.extend(values(shard.log(1)))

    shard.checkpoint()
    disk.told = meanwhile
    shard.pump()
    assert confirmed == [b"before", b"meanwhile"]
    assert shard.counters.checkpoints == 1
    shard.close()


@pytest.mark.parametrize("sync_each_max", [1, 1000])
def test_a_dirty_file_is_not_closed_before_it_is_synced(tmp_path: Path, sync_each_max: int) -> None:
    """Not even when a checkpoint is about to sync it."""
    disk = Watched(sync_each_max)
    file = disk.lock(f"{tmp_path}/lock")
    files = FileCache(disk, 8)
    files.sync_filesystem = lambda: disk.sync_filesystem(file)
    for number in range(20):
        files.write(f"{tmp_path}/{number}", [b"x"], 0, create=True)
    taken = files.take_dirty()
    for number in range(20, 60):
        files.write(f"{tmp_path}/{number}", [b"x"], 0, create=True)
        Path(tmp_path, f"read {number}").write_bytes(b"x")
        files.read(f"{tmp_path}/read {number}", 1, 0)
    assert disk.lost == []
    files.sync_all(taken)
    files.sync_all(files.take_dirty())
    assert disk.unsynced == set()
    files.read(f"{tmp_path}/read 20", 1, 0)
    assert len(files) <= 8
    files.close()
    disk.close(file)


def test_a_failed_filesystem_sync_raises(tmp_path: Path) -> None:
    """os.sync(), for the whole machine, reports no errors."""
    file = RealDisk().lock(f"{tmp_path}/lock")
    RealDisk().sync_filesystem(file)
    RealDisk().close(file)
    with pytest.raises(OSError, match="descriptor"):
        RealDisk().sync_filesystem(file)


def test_nothing_is_confirmed_after_a_failed_sync_of_the_file_system(tmp_path: Path) -> None:
    disk = Watched(sync_each_max=1)
    bench = Bench(tmp_path, disk)
    shard = bench.open(*LOGS, settings=FEW_FILES, stream=StreamSettings())
    bench.append(1, [b"before"])

    def fail(what: str) -> None:
        if what == "sync_filesystem":
            raise OSError(5, "Input/output error")

    disk.told = fail
    for number in LOGS:
        shard.log(number).append(batch([b"x"]))
    shard.checkpoint()
    shard.pump()
    assert isinstance(shard.failure, StorageFailed)
    assert shard.files.sync_failure.errno == 5, "a chain that runs beside it has nothing else to look at"
    assert shard.files.failure is not None


def test_a_whole_file_is_read_even_in_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a journal file of 2 GB the last entries were not found, and all that they held was lost."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)))
    disk = RealDisk()
    really = disk.pread
    monkeypatch.setattr(disk, "pread", lambda file, size, position: really(file, min(size, 100), position))
    assert read_whole(disk, str(path)) == bytes(range(256))
