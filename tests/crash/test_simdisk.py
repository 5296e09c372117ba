"""Tests of the simulated disk itself: what it must keep and what it must be able to lose."""

import errno
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from headrace.errors import DataFolderLocked
from headrace.log.disk.disk import Disk, RealDisk, read_whole, write_atomically
from tests.crash.inodes import SECTOR
from tests.crash.simdisk import Fault, SimulatedDisk

MODES = ("lost", "kept", "prefix", "mixed")


def make(content: bytes = b"", path: str = "/d/f", disk: SimulatedDisk | None = None) -> tuple[SimulatedDisk, int]:
    """A durable file with a durable name."""
    disk = disk or SimulatedDisk()
    disk.mkdir("/d")
    file = disk.open(path, create=True)
    disk.pwrite(file, [content], 0)
    disk.sync(file)
    disk.sync_dir("/d")
    disk.sync_dir("/")
    return disk, file


def cuts(disk: SimulatedDisk, count: int = 300) -> list[SimulatedDisk]:
    return [disk.power_cut(Random(seed), MODES[seed % len(MODES)]) for seed in range(count)]


def contents(disk: SimulatedDisk, path: str = "/d/f", count: int = 300) -> set[bytes]:
    return {image.files().get(path, b"<no file>") for image in cuts(disk, count)}


class DiskContract:
    """The behaviour that the real and the simulated disk share."""

    def disk(self, tmp_path: Path) -> tuple[Disk, str]:
        raise NotImplementedError

    def test_reading_returns_what_was_written(self, tmp_path: Path) -> None:
        disk, root = self.disk(tmp_path)
        file = disk.open(f"{root}/a", create=True)
        assert disk.pwrite(file, [b"hello ", bytearray(b"wor"), memoryview(b"ld")], 3) == 11
        assert disk.pread(file, 100, 0) == b"\0\0\0hello world"
        assert disk.pread(file, 5, 12) == b"ld"
        assert disk.pread(file, 5, 100) == b""
        buffer = bytearray(4)
        assert disk.pread_into(file, memoryview(buffer), 3) == 4
        assert buffer == b"hell"
        assert disk.pread_cached(file, 5, 3) == b"hello"
        assert disk.size(file) == disk.file_size(f"{root}/a") == 14
        disk.truncate(file, 5)
        disk.truncate(file, 7)
        assert read_whole(disk, f"{root}/a") == b"\0\0\0he\0\0"
        disk.sync(file)
        disk.sync_filesystem(file)
        disk.close(file)
        with pytest.raises(OSError):
            disk.pread(file, 1, 0)

    def test_names_can_be_created_renamed_listed_and_removed(self, tmp_path: Path) -> None:
        disk, root = self.disk(tmp_path)
        disk.mkdir(f"{root}/x/y")
        disk.mkdir(f"{root}/x/y")
        write_atomically(disk, f"{root}/x/y/b", b"one")
        write_atomically(disk, f"{root}/x/y/b", b"two")
        write_atomically(disk, f"{root}/x/y/a", b"three")
        assert disk.listdir(f"{root}/x/y") == ["a", "b"]
        disk.rename(f"{root}/x/y/a", f"{root}/x/y/b")
        assert disk.listdir(f"{root}/x/y") == ["b"]
        assert read_whole(disk, f"{root}/x/y/b") == b"three"
        with pytest.raises(FileExistsError):
            disk.open(f"{root}/x/y/b", create=True, exclusive=True)
        with pytest.raises(FileNotFoundError):
            disk.open(f"{root}/x/y/c")
        with pytest.raises(FileNotFoundError):
            disk.open(f"{root}/none/c", create=True)
        with pytest.raises(FileNotFoundError):
            disk.unlink(f"{root}/x/y/c")
        with pytest.raises(FileNotFoundError):
            disk.rename(f"{root}/x/y/c", f"{root}/x/y/d")
        with pytest.raises(OSError) as full:
            disk.rmdir(f"{root}/x/y")
        assert full.value.errno == errno.ENOTEMPTY
        assert disk.exists(f"{root}/x/y") and not disk.exists(f"{root}/x/z")
        disk.unlink(f"{root}/x/y/b")
        disk.rmdir(f"{root}/x/y")
        assert disk.listdir(f"{root}/x") == []

    def test_an_unlinked_file_stays_readable_while_open(self, tmp_path: Path) -> None:
        disk, root = self.disk(tmp_path)
        file = disk.open(f"{root}/a", create=True)
        disk.pwrite(file, [b"old"], 0)
        disk.unlink(f"{root}/a")
        assert disk.pread(file, 3, 0) == b"old"
        disk.pwrite(file, [b"new"], 0)
        disk.sync(file)
        assert disk.pread(file, 3, 0) == b"new"
        disk.close(file)

    def test_writing_through_a_file_opened_for_reading_fails(self, tmp_path: Path) -> None:
        disk, root = self.disk(tmp_path)
        disk.close(disk.open(f"{root}/a", create=True))
        file = disk.open(f"{root}/a", readonly=True)
        with pytest.raises(OSError) as error:
            disk.pwrite(file, [b"x"], 0)
        assert error.value.errno == errno.EBADF
        disk.close(file)

    def test_a_lock_is_held_until_closed(self, tmp_path: Path) -> None:
        disk, root = self.disk(tmp_path)
        file = disk.lock(f"{root}/lock")
        with pytest.raises(DataFolderLocked):
            disk.lock(f"{root}/lock")
        disk.close(file)
        disk.close(disk.lock(f"{root}/lock"))


class TestRealDisk(DiskContract):
    def disk(self, tmp_path: Path) -> tuple[Disk, str]:
        return RealDisk(), str(tmp_path)


class TestSimulatedDisk(DiskContract):
    def disk(self, tmp_path: Path) -> tuple[Disk, str]:
        disk = SimulatedDisk()
        disk.mkdir("/data")
        return disk, "/data"


def test_synced_bytes_with_a_synced_name_survive_every_cut() -> None:
    disk, _ = make(b"x" * 2000)
    assert contents(disk) == {b"x" * 2000}
    assert disk.unsynced_count == 0


def test_unsynced_bytes_may_be_kept_lost_or_torn_at_sectors_and_bytes() -> None:
    disk, file = make(b"a" * 4 * SECTOR)
    disk.pwrite(file, [b"b" * 4 * SECTOR], 0)
    found = contents(disk, count=2000)
    assert {b"a" * 4 * SECTOR, b"b" * 4 * SECTOR} <= found
    by_sector = [c for c in found if all(len(set(c[i : i + SECTOR])) == 1 for i in range(0, len(c), SECTOR))]
    assert len(by_sector) == 2**4, "every combination of old and new sectors must occur"
    assert any(sum(len(set(c[i : i + SECTOR])) == 2 for i in range(0, len(c), SECTOR)) == 1 for c in found), (
        "a sector torn inside must occur"
    )
    assert not any(sum(len(set(c[i : i + SECTOR])) == 2 for i in range(0, len(c), SECTOR)) > 1 for c in found), (
        "at most one sector may be torn inside"
    )


def test_a_later_write_may_be_kept_without_the_earlier_one() -> None:
    disk, file = make(b"\0" * 2 * SECTOR)
    disk.pwrite(file, [b"1" * SECTOR], 0)
    disk.pwrite(file, [b"2" * SECTOR], SECTOR)
    assert b"\0" * SECTOR + b"2" * SECTOR in contents(disk)


def test_a_sector_has_its_content_of_some_moment_and_never_skips_a_write() -> None:
    """Two small writes into one sector go through the page cache, so the second cannot be kept alone."""
    disk, file = make(b"........")
    disk.pwrite(file, [b"11"], 0)
    disk.pwrite(file, [b"22"], 4)
    whole = {b"........", b"11......", b"11..22.."}
    torn = {b"1.......", b"11..2..."}
    assert whole <= contents(disk, count=3000) <= whole | torn


def test_an_appended_file_may_have_its_new_size_without_its_bytes() -> None:
    disk, file = make(b"a" * SECTOR)
    disk.pwrite(file, [b"b" * SECTOR], SECTOR)
    found = contents(disk, count=2000)
    assert b"a" * SECTOR + bytes(SECTOR) in found, "zeros"
    assert any(len(c) == 2 * SECTOR and len(set(c[SECTOR:])) > 100 for c in found), "noise"
    assert all(c[:SECTOR] == b"a" * SECTOR for c in found), "synced bytes must not change"


def test_stale_blocks_appear_only_if_enabled() -> None:
    for stale in (False, True):
        disk = SimulatedDisk(stale=stale)
        make(b"s" * 4 * SECTOR, "/d/other", disk)
        _, file = make(b"a" * SECTOR, "/d/f", disk)
        disk.pwrite(file, [b"b" * SECTOR], SECTOR)
        assert (b"a" * SECTOR + b"s" * SECTOR in contents(disk, count=2000)) is stale


def test_a_truncation_is_unsynced_too() -> None:
    disk, file = make(b"a" * 2 * SECTOR)
    disk.truncate(file, 10)
    assert contents(disk) == {b"a" * 2 * SECTOR, b"a" * 10}
    disk.sync(file)
    assert contents(disk) == {b"a" * 10}


def test_syncing_a_file_does_not_make_its_name_durable() -> None:
    disk, _ = make()
    file = disk.open("/d/new", create=True)
    disk.pwrite(file, [b"x"], 0)
    disk.sync(file)
    assert contents(disk, "/d/new") == {b"<no file>", b"x"}
    disk.sync_dir("/d")
    assert contents(disk, "/d/new") == {b"x"}


def test_syncing_a_folder_does_not_make_its_own_name_or_file_contents_durable() -> None:
    disk, _ = make()
    disk.mkdir("/d/sub")
    file = disk.open("/d/sub/new", create=True)
    disk.pwrite(file, [b"x"], 0)
    disk.sync_dir("/d/sub")
    assert contents(disk, "/d/sub/new") == {b"<no file>", b"x", b"", b"\0"} | {
        c for c in contents(disk, "/d/sub/new") if len(c) == 1
    }
    assert any(not image.exists("/d/sub") for image in cuts(disk))
    disk.sync_dir("/d")
    assert all(image.exists("/d/sub/new") for image in cuts(disk))


def test_a_rename_is_atomic() -> None:
    disk, _ = make(b"old")
    other = disk.open("/d/tmp", create=True)
    disk.pwrite(other, [b"new"], 0)
    disk.sync(other)
    disk.sync_dir("/d")
    disk.rename("/d/tmp", "/d/f")
    seen = {tuple(sorted(image.files().items())) for image in cuts(disk)}
    assert seen == {(("/d/f", b"old"), ("/d/tmp", b"new")), (("/d/f", b"new"),)}
    disk.sync_dir("/d")
    assert {tuple(sorted(image.files().items())) for image in cuts(disk)} == {(("/d/f", b"new"),)}


def test_unsynced_names_are_kept_or_lost_independently() -> None:
    disk, _ = make()
    for name in "ab":
        disk.close(disk.open(f"/d/{name}", create=True))
    disk.unlink("/d/f")
    assert {tuple(sorted(image.files())) for image in cuts(disk)} == {
        tuple(sorted(f"/d/{n}" for n in names)) for names in ("f", "", "a", "b", "ab", "af", "bf", "abf")
    }


def test_write_atomically_is_atomic_at_every_operation() -> None:
    disk, _ = make(b"old", "/d/f")
    images = []
    disk.before = lambda kind, path: images.extend(cuts(disk, 40))
    write_atomically(disk, "/d/f", b"n" * 3000)
    assert len(images) >= 160
    assert {image.files()["/d/f"] for image in images} == {b"old", b"n" * 3000}
    assert contents(disk) == {b"n" * 3000}


def test_write_atomically_without_its_syncs_is_detected() -> None:
    """Positive control: the simulated disk detects missing syncs."""

    class DiskWithoutSync(SimulatedDisk):
        def sync(self, file: int) -> None:
            pass

    disk = DiskWithoutSync()
    disk.mkdir("/d")
    disk.sync_dir("/")
    write_atomically(disk, "/d/f", b"n" * 3000)
    assert contents(disk) > {b"n" * 3000}


def test_a_kill_loses_nothing_and_syncs_nothing() -> None:
    disk, file = make(b"a" * SECTOR)
    disk.pwrite(file, [b"b" * SECTOR], SECTOR)
    disk.close(disk.open("/d/new", create=True))
    after = disk.kill()
    assert after.files() == disk.files()
    assert after.open_paths() == []
    assert contents(after) > {b"a" * SECTOR, b"a" * SECTOR + b"b" * SECTOR}
    assert contents(after, "/d/new") == {b"", b"<no file>"}
    file = after.open("/d/f")
    after.sync(file)
    assert contents(after) == {b"a" * SECTOR + b"b" * SECTOR}
    assert len(contents(disk)) > 1, "an image is independent of its disk"


def test_images_share_no_mutable_state() -> None:
    disk, file = make(b"abc")
    image, killed = disk.power_cut(Random(1)), disk.kill()
    for other in (image, killed):
        handle = other.open("/d/f")
        other.pwrite(handle, [b"XXX"], 0)
        other.unlink("/d/f")
    assert disk.files() == {"/d/f": b"abc"}
    disk.pwrite(file, [b"new"], 0)
    assert image.files() == {} == killed.files()


def test_equal_images_have_equal_keys() -> None:
    disk, file = make(b"abc")
    disk.pwrite(file, [b"xyz"], 0)
    assert disk.power_cut(Random(1), "lost").key() == disk.power_cut(Random(2), "lost").key()
    assert disk.power_cut(Random(1), "lost").key() != disk.power_cut(Random(1), "kept").key()
    assert disk.kill().key() != disk.power_cut(Random(1), "kept").key(), "after a kill the bytes are still unsynced"


def test_the_same_seed_gives_the_same_disk() -> None:
    disk, file = make(b"a" * 5000)
    disk.pwrite(file, [b"b" * 5000], 100)
    for seed in range(50):
        assert disk.power_cut(Random(seed)).files() == disk.power_cut(Random(seed)).files()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_nth_write_fails_and_may_have_written_a_part(share: float) -> None:
    disk, file = make(b"")
    disk.arm(Fault("pwrite", 2, errno.EIO, share=share))
    disk.pwrite(file, [b"one"], 0)
    with pytest.raises(OSError) as error:
        disk.pwrite(file, [b"twotwo"], 3)
    assert error.value.errno == errno.EIO
    assert disk.pread(file, 100, 0) == (b"onetwo" if share else b"one")
    disk.pwrite(file, [b"three"], 3)


@pytest.mark.parametrize("kind", ["create", "pwrite", "sync", "truncate", "rename", "unlink", "mkdir", "sync_dir"])
def test_every_kind_of_call_can_fail_permanently(kind: str) -> None:
    disk, file = make(b"x")
    disk.arm(Fault(kind, 1, errno.EIO, forever=True))
    calls: dict[str, Callable[[], object]] = {
        "create": lambda: disk.open("/d/new", create=True),
        "pwrite": lambda: disk.pwrite(file, [b"y"], 0),
        "sync": lambda: disk.sync(file),
        "truncate": lambda: disk.truncate(file, 0),
        "rename": lambda: disk.rename("/d/f", "/d/g"),
        "unlink": lambda: disk.unlink("/d/f"),
        "mkdir": lambda: disk.mkdir("/d/e"),
        "sync_dir": lambda: disk.sync_dir("/d"),
    }
    before = disk.files()
    for _ in range(2):
        with pytest.raises(OSError):
            calls[kind]()
    assert disk.files() == before
    disk.disarm()
    calls[kind]()


@pytest.mark.parametrize("outcome", ["cached", "dropped", "partial", "written"])
def test_after_a_failed_sync_later_syncs_succeed_and_write_nothing(outcome: str) -> None:
    disk, file = make(b"AAAA")
    disk.pwrite(file, [b"BB"], 0)
    disk.pwrite(file, [b"BB"], 2)
    disk.arm(Fault("sync", 1, outcome=outcome))
    with pytest.raises(OSError):
        disk.sync(file)
    disk.sync(file)
    visible = b"AAAA" if outcome == "dropped" else b"BBBB"
    device = {"cached": b"AAAA", "dropped": b"AAAA", "partial": b"BBAA", "written": b"BBBB"}[outcome]
    assert disk.pread(file, 10, 0) == visible
    assert contents(disk) == {device}
    disk.pwrite(file, [b"C"], 3)
    disk.sync(file)
    assert contents(disk) == {device[:3] + b"C"}, "new writes are synced, the earlier ones are not"
    assert disk.kill().files()["/d/f"] == visible[:3] + b"C", "a new process reads the page cache"


def test_a_full_disk_writes_what_fits_and_recovers() -> None:
    disk, file = make(b"")
    disk.capacity = 10
    with pytest.raises(OSError) as error:
        disk.pwrite(file, [b"x" * 16], 0)
    assert error.value.errno == errno.ENOSPC
    assert disk.pread(file, 100, 0) == b"x" * 10
    assert disk.free_bytes("/d") == 0
    disk.pwrite(file, [b"y" * 10], 0)  # overwriting needs no space
    with pytest.raises(OSError):
        disk.pwrite(file, [b"x"], 10)
    disk.capacity = 100
    disk.pwrite(file, [b"x" * 16], 0)
    disk.unlink("/d/f")
    assert disk.free_bytes("/d") == 84, "an open file keeps its space"
    disk.close(file)
    assert disk.free_bytes("/d") == 100


def test_a_read_only_disk_can_be_read() -> None:
    disk, file = make(b"x")
    disk.read_only = True
    assert disk.pread(file, 1, 0) == b"x"
    with pytest.raises(OSError) as error:
        disk.pwrite(file, [b"y"], 0)
    assert error.value.errno == errno.EROFS
    with pytest.raises(OSError):
        disk.sync(file)


def test_opening_more_files_than_the_limit_is_emfile() -> None:
    disk, file = make(b"x")
    disk.files_limit = 1
    with pytest.raises(OSError) as error:
        disk.open("/d/f")
    assert error.value.errno == errno.EMFILE
    disk.close(file)
    disk.open("/d/f")


def test_an_open_folder_uses_a_descriptor_and_needs_no_other_to_be_synced() -> None:
    disk, file = make(b"x")
    disk.close(file)
    disk.files_limit = 1
    folder = disk.open_dir("/d")
    with pytest.raises(OSError) as error:
        disk.open("/d/f")
    assert error.value.errno == errno.EMFILE and disk.open_paths() == ["/d"]
    disk.unlink("/d/f")
    with pytest.raises(OSError):
        disk.sync_dir("/d")
    disk.sync_dir("/d", folder)
    assert disk.power_cut(Random(1), "lost").files() == {}
    disk.close(folder)
    assert not disk.open_paths()


def test_unsynced_tells_why_a_payload_is_not_durable() -> None:
    disk, file = make(b"")
    disk.pwrite(file, [b"....payload...."], 0)
    assert "/d/f is not synced" in (disk.unsynced(b"payload") or "")
    disk.sync(file)
    assert disk.unsynced(b"payload") is None
    assert disk.unsynced(b"nowhere") == "it is in no file"
    other = disk.open("/d/new", create=True)
    disk.pwrite(other, [b"second"], 0)
    disk.sync(other)
    assert disk.unsynced(b"second") == "/d/new is synced, but its name is not"
    disk.sync_dir("/d")
    assert disk.unsynced(b"second") is None
    disk.mkdir("/d/e")
    third = disk.open("/d/e/f", create=True)
    disk.pwrite(third, [b"third"], 0)
    disk.sync(third)
    disk.sync_dir("/d/e")
    assert disk.unsynced(b"third") == "/d/e/f is synced, but its name is not", "the name of its folder is not durable"


def test_deliberate_damage_is_durable() -> None:
    disk, _ = make(b"abc")
    disk.flip("/d/f", 1, 0x20)
    assert contents(disk) == {b"aBc"}
    disk.remove("/d/f")
    assert contents(disk) == {b"<no file>"}
