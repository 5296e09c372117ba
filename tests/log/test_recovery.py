"""Recovery after clean and unclean stops. The crash explorer covers all states; these tests name the rules."""

import errno
import struct
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest
from crc32c import crc32c

from headrace.errors import CorruptLog, DataFolderLocked, StorageError
from headrace.log.commit.journal import FILE_HEADER, FILE_MAGIC
from headrace.log.disk.disk import RealDisk
from headrace.log.recovery.journal_repair import accept_loss
from headrace.log.settings import StreamSettings
from tests.crash.simdisk import SimulatedDisk
from tests.log.helpers import SMALL, Bench, batch, records, values

ROLLING = StreamSettings(segment_size=3000)


def test_a_clean_stop_reads_no_data_at_the_next_start(bench: Bench) -> None:
    bench.open(stream=ROLLING)
    for i in range(20):
        bench.append(1, [b"%d" % i * 100])
    bench.shard.close()
    shard = bench.open(stream=ROLLING)
    assert bench.report.clean and bench.report.bytes_kept == 0
    assert len(values(shard.log(1))) == 20
    assert shard.epoch == 0
    shard.close()


def test_every_confirmed_record_survives_a_kill(bench: Bench) -> None:
    bench.open(1, 2, stream=ROLLING)
    for i in range(30):
        bench.append(1 + i % 2, [b"%02d" % i * 50])
        if i == 15:
            bench.shard.checkpoint()
            bench.shard.pump()
    bench.kill()
    shard = bench.open(1, 2, stream=ROLLING)
    assert not bench.report.clean
    assert values(shard.log(1)) == [b"%02d" % i * 50 for i in range(0, 30, 2)]
    assert values(shard.log(2)) == [b"%02d" % i * 50 for i in range(1, 30, 2)]
    shard.close()


def test_the_epoch_grows_at_every_unclean_start_and_marks_where(bench: Bench) -> None:
    bench.open()
    bench.append(1, [b"a"] * 3)
    bench.kill()
    shard = bench.open()
    assert shard.epoch == 1
    bench.append(1, [b"b"])
    assert shard.log(1).epochs == [(0, 0), (1, 3)]
    assert shard.log(1).epoch_end(0) == (0, 3)
    assert shard.log(1).epoch_end(5) == (1, 4)
    shard.close()
    assert bench.open().epoch == 1
    bench.shard.close()


def test_a_torn_tail_is_cut_kept_aside_and_reported(bench: Bench) -> None:
    bench.open()
    bench.append(1, [b"whole"])
    bench.shard.checkpoint()
    bench.shard.pump()
    bench.kill()
    data = next(Path(bench.root).glob("logs/1-t/*.log"))
    torn = bytes(batch([b"torn"]))[:-3]
    with data.open("ab") as file:
        file.write(torn)
    shard = bench.open()
    assert bench.report.bytes_cut == len(torn)
    assert values(shard.log(1)) == [b"whole"]
    assert [path.read_bytes() for path in data.parent.glob("*.cut")] == [torn]
    bench.append(1, [b"next"])
    assert values(shard.log(1)) == [b"whole", b"next"]
    shard.close()


def test_damage_below_the_durable_end_is_reported_and_nothing_is_truncated(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.open()
    for value in (b"one", b"two", b"three"):
        bench.append(1, [value])
    bench.shard.checkpoint()
    bench.shard.pump()
    bench.kill()
    data = next(Path(bench.root).glob("logs/1-t/*.log"))
    content = bytearray(data.read_bytes())
    content[content.index(b"two")] ^= 1
    data.write_bytes(content)
    shard = bench.open()
    log = shard.log(1)
    assert log.visible_end == 3
    first = log.read(0, 10)
    assert first.next_offset == 1
    assert not log.has_damage
    for _ in range(2):
        with pytest.raises(CorruptLog, match=rf"{data.name} is damaged at byte \d+: the CRC32C does not match"):
            log.read(1)
    assert shard.counters.crc_failures == 2
    assert log.has_damage
    assert [record.levelname for record in caplog.records] == ["ERROR"], "the damage is logged once"
    assert data.read_bytes() == content
    shard.close()


def test_a_log_that_lost_confirmed_records_serves_the_rest_and_refuses_appends(bench: Bench) -> None:
    bench.open()
    for value in (b"one", b"two", b"three"):
        bench.append(1, [value])
    bench.shard.checkpoint()
    bench.shard.pump()
    bench.kill()
    data = next(Path(bench.root).glob("logs/1-t/*.log"))
    data.write_bytes(data.read_bytes()[:-5])
    shard = bench.open()
    assert bench.report.damaged and data.name in bench.report.damaged[0]
    with pytest.raises(CorruptLog):
        shard.log(1).append(batch([b"more"]))
    shard.close()
    assert bench.open().log(1).damage is not None, "it stays damaged until it is repaired"
    bench.shard.close()


def test_damage_to_a_direct_append_is_detected_after_consecutive_large_rounds(bench: Bench) -> None:
    """Regression: the second round has no entry that could hold the end of the first, which was then lost."""
    bench.open(1, 2)
    for log_id in (1, 2, 1, 2):
        bench.append(log_id, [bytes(10_000)])
    bench.append(2, [b"small"])
    bench.kill()
    Path(bench.root, "slots").unlink()  # the other witness
    data = next(Path(bench.root).glob("logs/1-t/*.log"))
    data.write_bytes(data.read_bytes()[:-5])
    bench.open(1, 2)
    assert bench.report.damaged and data.name in bench.report.damaged[0]
    bench.shard.close()


def test_an_end_journaled_by_a_stuck_round_is_not_journaled_again_after_a_truncation(tmp_path: Path) -> None:
    """After the truncation it would prove records that were dropped, and the log would seem damaged."""

    class Full(RealDisk):
        full_folder = ""

        def open(self, path: str, *, create: bool = False, exclusive: bool = False, readonly: bool = False) -> int:
            file = super().open(path, create=create, exclusive=exclusive, readonly=readonly)
            names[file] = path
            return file

        def pwrite(self, file: int, buffers: Sequence[bytes | bytearray | memoryview], position: int) -> int:
            if self.full_folder and self.full_folder in names.get(file, ""):
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().pwrite(file, buffers, position)

    names: dict[int, str] = {}
    disk = Full()
    bench = Bench(tmp_path, disk)
    shard = bench.open(1, 2)
    for log_id, value in ((1, b"a"), (2, b"a"), *((1, bytes(10_000)) for _ in range(4))):
        bench.append(log_id, [value])
    done: list[object] = []
    shard.checkpoint()
    shard.checkpoint(lambda _: shard.log(2).append(batch([b"in one round with the intention"])))
    shard.maintenance.truncations.truncate(shard.log(1), 2, done.append)
    disk.full_folder = "/2-t/"
    shard.pump()
    assert shard.committer.is_stuck
    disk.full_folder = ""
    for _ in range(6):
        bench.clock.advance(0.1)
        shard.tick()
        shard.pump()
    assert done == [None] and shard.log(1).visible_end == 2
    bench.append(2, [b"more"])
    bench.kill()
    bench.open(1, 2)
    assert bench.report.damaged == []
    bench.shard.close()


def test_pending_ends_fit_one_entry_and_are_cleared_by_a_checkpoint(bench: Bench) -> None:
    """An entry with the ends of all logs would not fit into a small journal, and the broker would stop."""
    logs = range(1, 202)
    small = msgspec.structs.replace(SMALL, journal_file_bytes=4096, inline_bytes_max=256)
    shard = bench.open(*logs, settings=small)
    for size in (1, 3000):
        for log_id in logs:
            bench.append(log_id, [bytes(size)])
    bench.append(1, [b"an entry"])
    assert shard.failure is None
    shard.checkpoint()
    shard.pump()
    assert not shard.scheduler._direct_ends, "the checkpoint covers them"
    shard.close()


def test_deleting_all_indexes_and_slots_changes_no_result(bench: Bench) -> None:
    bench.open(stream=ROLLING)
    for i in range(40):
        bench.append(1, [b"%02d" % i * 100])
    before = [bench.shard.log(1).read(offset, 1) for offset in range(40)]
    bench.shard.close()
    for pattern in ("logs/*/*.index", "logs/*/*.timeindex", "slots"):
        for path in Path(bench.root).glob(pattern):
            path.unlink()
    shard = bench.open(stream=ROLLING)
    assert [shard.log(1).read(offset, 1) for offset in range(40)] == before
    shard.close()


def test_a_wrong_index_is_rebuilt_and_the_answer_is_right(bench: Bench) -> None:
    stream = StreamSettings(segment_size=3000, index_interval=100)
    bench.open(stream=stream)
    for i in range(40):
        bench.append(1, [b"%02d" % i * 100])
    bench.shard.close()
    for path in Path(bench.root).glob("logs/*/*.index"):
        path.write_bytes(b"\0\0\0\1\0\0\0\7" * (path.stat().st_size // 8))
    shard = bench.open(stream=stream)
    assert [v for i in range(40) for v in values(shard.log(1), i)[:1]] == [b"%02d" % i * 100 for i in range(40)]
    shard.pump()
    assert shard.counters.indexes_rebuilt > 0
    shard.close()


def test_a_second_broker_learns_who_holds_the_folder(bench: Bench) -> None:
    bench.open()
    with pytest.raises(DataFolderLocked, match="in use by another broker"):
        Bench(bench.root).open()
    bench.shard.close()


def test_log_ids_are_never_assigned_twice(bench: Bench) -> None:
    seen = [bench.open().next_log_id() for _ in range(1)]
    bench.kill()
    seen.append(bench.open().next_log_id())
    bench.shard.close()
    seen.append(bench.open().next_log_id())
    bench.shard.close()
    assert len(set(seen)) == 3 and min(seen) > 1


def test_a_recycled_journal_resurrects_nothing(bench: Bench) -> None:
    bench.open(1, 2)
    for i in range(120):
        bench.append(1, [b"old %d" % i + b"x" * 1500])
    bench.shard.close()
    shard = bench.open(1, 2)
    bench.append(2, [b"new"])
    bench.kill()
    shard = bench.open(1, 2)
    assert values(shard.log(2)) == [b"new"]
    assert len(values(shard.log(1))) == 120
    shard.close()


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_any_number_of_missing_sealed_segments_is_reported_as_damage(bench: Bench, count: int, is_killed: bool) -> None:
    """Regression: if all of them were missing, there was no gap, and the rest was taken for the whole log."""
    stream = StreamSettings(segment_size=1000)
    shard = bench.open(stream=stream)
    for number in range(30):
        bench.append(1, [b"%02d" % number * 50])
    shard.checkpoint()
    shard.pump()
    *sealed, _active = shard.log(1).segments
    assert len(sealed) == 5
    bench.kill() if is_killed else shard.close()
    for segment in sealed[:count]:
        Path(segment.path()).unlink()
    shard = bench.open(stream=stream)
    assert "the segment at offset 0 is missing" in bench.report.damaged[0]
    with pytest.raises(CorruptLog):
        shard.log(1).read(0)
    shard.close()


def test_a_missing_sealed_segment_before_an_empty_one_is_reported_as_damage(bench: Bench) -> None:
    stream = StreamSettings(segment_size=1000)
    shard = bench.open(stream=stream)
    for number in range(30):
        bench.append(1, [b"%02d" % number * 50])
    shard.maintenance.truncations.truncate(shard.log(1), 12, lambda _error: None)
    shard.pump()
    *_, last, active = shard.log(1).segments
    assert (last.next_offset, active.base, active.size) == (12, 12, 0)
    shard.close()
    Path(last.path()).unlink()
    bench.open(stream=stream).close()
    assert f"the segment at offset {last.base} is missing" in bench.report.damaged[0]


def test_a_folder_without_a_log_is_left_alone_and_reported(bench: Bench) -> None:
    bench.open(1, 2)
    bench.append(2, [b"x"])
    bench.shard.close()
    shard = bench.open(1)
    assert bench.report.strays == ["2-t"] and "STRAY: of no topic or queue in logs/: 2-t" in bench.report.summary()
    assert list(Path(bench.root).glob("logs/2-t/*.log"))
    shard.close()


def test_merges_are_folded_and_survive(bench: Bench) -> None:
    folds = {"sum": lambda value, deltas: b"%d" % (int(value or b"0") + sum(map(int, deltas)))}
    shard = bench.open(folds=folds)
    for round_ in range(3):
        for i in range(4):
            group = shard.group()
            group.merge("sum", b"k", b"%d" % i)
            group.commit()
        shard.pump()
        if round_ == 1:
            shard.checkpoint()
            shard.pump()
    assert shard.state.get("sum", b"k") == b"18"
    bench.kill()
    assert bench.open(folds=folds).state.get("sum", b"k") == b"18"
    bench.shard.close()


def test_a_journal_of_a_newer_version_is_refused_and_kept(bench: Bench) -> None:
    bench.open()
    bench.append(1, [b"confirmed"])
    bench.kill()
    newer: dict[Path, bytes] = {}
    for path in Path(bench.root).glob("journal/*.wal"):
        raw = path.read_bytes()
        if not raw.startswith(FILE_MAGIC):
            continue
        _, number, first, _ = FILE_HEADER.unpack_from(raw)
        header = FILE_HEADER.pack(b"HRJOURN2", number, first, 0)[:-4]
        newer[path] = header + struct.pack("<I", crc32c(header)) + raw[FILE_HEADER.size :]
        path.write_bytes(newer[path])
    assert newer
    with pytest.raises(StorageError, match="is of a newer version of Headrace"):
        bench.open()
    with pytest.raises(StorageError, match="is of a newer version of Headrace"):
        accept_loss(bench.root)
    assert {path: path.read_bytes() for path in newer} == newer


def test_a_smaller_journal_setting_replaces_the_old_files(bench: Bench) -> None:
    bench.open()
    bench.append(1, [b"x"])
    bench.shard.close()
    shard = bench.open(settings=msgspec.structs.replace(SMALL, journal_file_bytes=32 * 1024))
    bench.append(1, [b"y"])
    assert {path.stat().st_size for path in Path(bench.root).glob("journal/*.wal")} == {32 * 1024}
    shard.close()


def test_a_compacted_segment_without_its_seal_reaches_to_the_next_one(bench: Bench) -> None:
    """Regression: compaction may drop its last records, and the log was reported as damaged."""
    stream = StreamSettings(segment_size=400, cleanup_policy="compact")
    shard = bench.open(stream=stream)
    for key in (b"x", b"y", b"y", b"z", b"y", b"y", b"w"):
        ticket = shard.log(1).append(batch([b"." * 100], keys=[key]))
        shard.pump()
        assert ticket.error is None
    shard.maintenance.compact(shard.log(1), lambda _made, error: None)
    shard.pump()
    assert [(s.records, s.next_offset) for s in shard.log(1).segments] == [(1, 2), (1, 4), (1, 6), (1, 7)]
    offsets = [record.offset for record in records(shard.log(1))]
    shard.close()
    seals = sorted(Path(bench.root).glob("logs/*/*.seal"))
    assert len(seals) == 3
    for seal in seals:
        seal.unlink()
    shard = bench.open(stream=stream)
    assert not bench.report.damaged
    assert [record.offset for record in records(shard.log(1))] == offsets
    assert [s.next_offset for s in shard.log(1).segments] == [2, 4, 6, 7]
    shard.close()
    shard = bench.open(stream=stream)
    assert not bench.report.damaged
    shard.close()


def test_a_folder_created_by_a_killed_broker_survives_a_power_cut() -> None:
    """Regression: the folder was empty, so recovery wrote no file in it and did not sync its name."""
    disk = SimulatedDisk()
    killed = Bench("/data", disk)
    killed.open()
    disk.mkdir("/data/logs/1-t")
    bench = Bench("/data", disk.kill())
    bench.open()
    bench.append(1, [b"x" * 5000])  # past the journal
    found = Bench("/data", bench.simulated.power_cut(Random(1), "lost"))
    assert values(found.open().log(1)) == [b"x" * 5000]
