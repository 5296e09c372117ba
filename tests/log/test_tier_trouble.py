"""Archiving when something goes wrong: bit rot, kills, full and missing disks. No record is lost or changed."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import CorruptLog, HeadraceError, NotFound, StorageError
from headrace.log.disk.disk import RealDisk
from headrace.log.disk.paths import UNFINISHED
from headrace.log.read.external import LogFiles
from headrace.log.recovery.inspect import Inspector
from headrace.log.segments.segment import Segment
from headrace.log.tier import archive as tiering
from headrace.log.tier import parquet
from headrace.record import codec
from tests.log.helpers import Bench, values
from tests.log.tiers import ROLLING, Stop, archive, fill, restore, sealed, take, write


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several row groups per segment, as a large one would have."""
    monkeypatch.setattr(parquet, "GROUP_BYTES", 600)


@pytest.mark.parametrize("byte", [6, 0.4, 0.7, -5])
def test_rot_in_a_parquet_file_is_reported_and_never_served(bench: Bench, byte: float) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    archive(shard)
    log = shard.log(1)
    segment = next(s for s in log.segments if s.is_archived)
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


def test_the_progress_of_verify_counts_archived_batches_uncompressed(bench: Bench) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    archive(shard)
    shard.close()
    inspector, moved = Inspector(bench.root), list[int]()
    (facts,) = inspector.logs()
    assert facts.archived and inspector.verify(None, moved.append).is_sound
    assert sum(moved) == facts.batch_bytes != facts.size_bytes
    moved.clear()
    inspector.reindex(None, moved.append)
    assert sum(moved) == sum(segment.size for _, segment in inspector.indexed(None))
    inspector.close()


def test_a_missing_parquet_file_is_reported_as_damage_and_nothing_is_deleted(bench: Bench) -> None:
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


def test_a_parquet_file_with_other_records_is_not_adopted(bench: Bench) -> None:
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


def test_the_compared_file_is_the_one_that_is_adopted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run of the command writes under the same name while the broker compares the first one's file."""
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


def steps() -> Iterator[tuple[str, str]]:
    """The disk calls of archiving a segment; a kill comes right before each."""
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
    known = {s.data_path for s in log.segments if s.is_archived}
    assert {str(path) for path in Path(shard.tier_root).rglob("*") if path.is_file()} == known, "strays are gone"
    archive(shard)
    assert all(s.is_archived for s in log.segments if s.is_sealed)
    assert values(log) == [b"%03d" % i * 50 for i in range(30)]
    restore(shard)
    shard.close()
    shard = bench.open(stream=ROLLING)
    assert values(shard.log(1)) == [b"%03d" % i * 50 for i in range(30)]
    shard.close()


def test_retention_may_drop_a_segment_while_it_is_being_archived(bench: Bench) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    log = shard.log(1)
    first = sealed(log)[0]
    write(shard, first)
    found: list[BaseException | None] = []
    shard.maintenance.archive(log, first, lambda _made, error: found.append(error))
    shard.maintenance.starts.delete_before(log, first.next_offset)
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


def test_a_temporarily_read_only_tier_does_not_stop_the_broker(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
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
        shard.maintenance.starts.delete_before(log, first.next_offset)
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
        assert list(Path(shard.tier_root).rglob("*.parquet")), "the broker starts nevertheless"
        bench.kill()
    shard = bench.open(2, stream=ROLLING)
    assert not list(Path(shard.tier_root).rglob("*.parquet")) and not list(Path(bench.root, "logs").glob("*.deleted"))
    shard.close()


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Makes every tier folder read-only, or writable again."""
    is_on = False

    def unless_on(name: str) -> None:
        real = getattr(RealDisk, name)

        def change(disk: RealDisk, path: str) -> None:
            if is_on and "/tier/" in path:
                raise OSError(errno.EROFS, "Read-only file system", path)
            real(disk, path)

        monkeypatch.setattr(RealDisk, name, change)

    def turn(on: bool) -> None:
        nonlocal is_on
        is_on = on

    for name in ("unlink", "rmdir"):
        unless_on(name)
    yield turn
    turn(False)


def test_an_empty_folder_in_a_read_only_tier_does_not_stop_the_broker(
    bench: Bench, read_only: Callable[[bool], None]
) -> None:
    shard = bench.open(1, 2, stream=ROLLING)
    fill(bench)
    archive(shard)
    shard.maintenance.starts.delete_before(shard.log(1), shard.log(1).visible_end)
    shard.pump()
    folder = Path(shard.tier_root, "1-t")
    assert not list(folder.iterdir())
    read_only(True)
    shard.delete_log(1)
    shard.pump()
    assert shard.failure is None
    bench.append(2, [b"another log"])
    bench.kill()
    shard = bench.open(2, stream=ROLLING)
    assert folder.exists() and values(shard.log(2)) == [b"another log"]
    bench.kill()
    read_only(False)
    shard = bench.open(2, stream=ROLLING)
    assert not folder.exists() and not list(Path(bench.root, "logs").glob("*.deleted"))
    shard.close()


def test_files_left_in_a_read_only_tier_do_not_prevent_a_start(bench: Bench, read_only: Callable[[bool], None]) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    archive(shard)
    first = shard.log(1).segments[0]
    shard.maintenance.leases.take({(1, first.base, first.generation): first}, bench.clock.now_ms() + 1000)
    shard.maintenance.starts.delete_before(shard.log(1), first.next_offset)
    shard.pump()
    bench.kill()
    read_only(True)
    shard = bench.open(stream=ROLLING)
    assert shard.log(1).start_offset == first.next_offset and Path(first.data_path).exists()
    bench.kill()
    read_only(False)
    shard = bench.open(stream=ROLLING)
    assert not Path(first.data_path).exists()
    shard.close()


def test_a_parquet_file_that_cannot_be_written_gives_a_clear_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_without_pyarrow_the_error_says_what_to_install(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = bench.open(stream=ROLLING)
    fill(bench)
    archive(shard)
    shard.archives.cache.clear()
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(parquet.PyArrowMissing, match="pip install"):
        shard.log(1).read(0)
    shard.close()
