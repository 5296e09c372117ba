"""Bugs in opening a data folder that the crash tests found, each reduced to a few lines."""

from collections.abc import Iterator
from random import Random

import pytest

from headrace.clock import ManualClock
from headrace.errors import DataFolderLocked
from headrace.log.commit.slots import read_all
from headrace.log.log import LogSpec
from headrace.log.shard import Shard
from headrace.record import codec
from headrace.record.layout import LEADER_EPOCH_AT
from tests.crash.shards import (
    ROOT,
    SETTINGS,
    batch,
    checkpoint,
    every_cut,
    lost,
    new_disk,
    reopen,
    reopen_and_finish,
    spec,
    truncate,
    values,
    write,
)
from tests.crash.simdisk import SimulatedDisk


def test_the_top_level_folders_are_durable_before_the_first_confirm() -> None:
    """The name of the state folder was never synced, so a power cut removed the epoch and the marker."""
    disk = new_disk()
    shard = reopen(disk, spec())
    epoch = shard.epoch
    ticket = shard.logs[1].append(batch("a"))
    shard.pump()
    assert ticket.done and ticket.error is None
    again = reopen(lost(disk), spec())
    assert values(again) == ["a"]
    assert again.epoch > epoch


def test_a_segment_sealed_by_recovery_keeps_its_end_after_a_power_cut() -> None:
    """Recovery wrote the seal without a sync, so the next start read bytes beyond it that had been moved."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    checkpoint(shard)
    write(shard, "b", size=1000)
    disk = disk.kill()
    assert values(reopen(disk, spec())) == ["a", "b"]
    assert values(reopen(lost(disk), spec())) == ["a", "b"]


def test_a_partly_written_append_of_several_batches_is_completed_from_the_journal() -> None:
    """The parts in the journal were only looked up by their first offset."""
    disk = new_disk()
    shard = reopen(disk, spec())
    ticket = shard.logs[1].append(batch("a") + batch("b"))
    shard.pump()
    assert ticket.done and ticket.error is None
    path = next(path for path in disk.files() if path.endswith(".log"))
    image = disk.kill()
    image.replace(path, disk.files()[path][: len(batch("a"))])
    assert values(reopen(image, spec())) == ["a", "b"]


def test_segments_that_lost_their_names_are_restored_from_the_journal() -> None:
    """The first segment that was found was treated as the start of the log."""
    disk = new_disk()
    shard = reopen(disk, spec(segment_size=100))
    for text in "abc":
        write(shard, text, size=60)
    names = [path for path in disk.files() if path.endswith(".log")]
    assert len(names) == 3
    for missing in ([0], [1], [0, 1], [0, 2], [2]):
        image = disk.kill()
        for at in missing:
            image.remove(names[at])
        assert values(reopen(image, spec())) == ["a", "b", "c"]


def test_an_unsynced_group_stays_atomic_after_a_power_cut_during_recovery() -> None:
    """A kill leaves an entry unsynced. Recovery wrote the group to one log, and then a power cut removed the entry."""
    disk = new_disk()
    specs = spec(1), spec(2)
    shard = reopen(disk, *specs)
    for log_id in (1, 2):
        write(shard, "x", log_id)
    checkpoint(shard)
    group = shard.group()
    for log in shard.logs.values():
        group.append(log, batch("a"))
    group.commit()
    killed: list[SimulatedDisk] = []
    disk.before = lambda kind, path: killed.append(disk.kill()) if kind == "sync" else None
    shard.pump()
    first = killed[0]
    cuts: list[SimulatedDisk] = []
    first.before = lambda kind, path: cuts.append(lost(first))
    reopen(first, *specs)
    for cut in cuts:
        again = reopen(cut, *specs)
        assert values(again, 1) == values(again, 2)


def test_a_torn_journal_header_does_not_restore_entries_of_an_earlier_run() -> None:
    """The number of a new file was derived from the readable headers, so the same number was used twice."""
    disk = new_disk()
    shard = reopen(disk, spec())
    for number in range(3):  # lazy, so neither the entries nor the header are synced
        group = shard.group()
        group.put("t", b"k%d" % number, b"former")
        group.commit(lazy=True)
        shard.pump()
    path = next(path for path in disk.files() if path.endswith(".wal"))
    image = disk.power_cut(Random(0), "kept")
    image.flip(path, 9)
    shard = reopen(image, spec())
    assert dict(shard.state.items("t")) == {}
    group = shard.group()
    group.put("t", b"k0", b"later.")  # same length as the entry that it overwrites
    group.commit()
    shard.pump()
    assert dict(reopen(lost(image), spec()).state.items("t")) == {b"k0": b"later."}


def test_an_unsynced_checkpoint_is_not_appended_to_after_a_kill() -> None:
    """A kill left a checkpoint unsynced, the next start appended to it, and a power cut tore the first part."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    group = shard.group()
    group.put("t", b"k", Random(0).randbytes(2000))
    group.commit()
    shard.pump()
    killed: list[SimulatedDisk] = []
    disk.before = lambda kind, path: killed.append(disk.kill()) if kind == "sync" and "state" in path else None
    checkpoint(shard)
    image = killed[0]
    cuts: list[SimulatedDisk] = []
    image.before = lambda kind, path: cuts.extend(image.power_cut(Random(n)) for n in range(20))
    shard = reopen(image, spec())
    write(shard, "b")
    checkpoint(shard)
    for cut in cuts:
        assert values(reopen(cut, spec()))[:1] == ["a"]


def test_the_old_state_log_is_removed_only_after_the_new_one_has_a_durable_name() -> None:
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    assigned = shard.next_log_id()
    image = disk.kill()
    killed: list[SimulatedDisk] = []
    image.before = lambda kind, path: killed.append(image.kill()) if path == f"{ROOT}/state" else None
    reopen(image, spec())
    assert len(killed) == 1, "renamed, but its folder is not synced yet"
    cuts = every_cut(killed[0])
    reopen(killed[0], spec())
    for cut in cuts:
        again = reopen(cut, spec())
        assert values(again) == ["a"]
        assert again.next_log_id() > assigned, "an id is never assigned twice"


def test_an_async_segment_removed_before_its_sync_does_not_stop_the_shard() -> None:
    """The list of files to sync still contained the segment, and ENOENT was treated as a disk failure."""
    disk = new_disk()
    specs = spec(1, write_mode="async", segment_size=100), spec(2)
    shard = reopen(disk, *specs)
    for text in "abc":
        write(shard, text, size=60)
    shard.maintenance.starts.delete_before(shard.logs[1], 2)
    shard.pump()
    group = shard.group()
    group.append(shard.logs[1], batch("d", 60))
    group.append(shard.logs[2], batch("d", 60))
    ticket = group.commit()
    shard.pump()
    assert ticket.error is None and shard.failure is None
    assert values(shard) == ["c", "d"]


def test_the_seal_of_an_interrupted_recovery_does_not_hide_later_records() -> None:
    """Retention had moved the start past the seal, so the segment and all later records were dropped."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    checkpoint(shard)
    for text in "bcd":
        write(shard, text, size=1000)  # too large for the journal
    shard.maintenance.starts.delete_before(shard.logs[1], 2)
    shard.pump()
    images = every_cut(disk := disk.kill())
    reopen(disk, spec())
    for image in images:
        assert values(reopen(image, spec()))[-2:] == ["c", "d"]


def test_an_unsynced_active_segment_may_lose_its_name() -> None:
    """A truncation to a segment boundary left an empty segment; without it, there is a gap after the sealed ones."""
    disk = new_disk()
    shard = reopen(disk, spec(segment_size=100))
    for text in "ab":
        write(shard, text, size=60)
    truncate(shard, 1)
    checkpoint(shard)
    for text in "cd":
        write(shard, text, size=60)
    names = sorted(path for path in disk.files() if path.endswith(".log"))
    image = disk.kill()
    image.remove(names[1])
    assert values(reopen_and_finish(image, spec(segment_size=100))) == ["a", "c", "d"]


def test_the_catalog_is_not_read_before_the_folder_is_locked() -> None:
    disk = new_disk()
    reopen(disk, spec())
    catalog_reads = []

    def specs() -> Iterator[LogSpec]:
        catalog_reads.append(True)
        yield spec()

    with pytest.raises(DataFolderLocked):
        Shard.open(ROOT, SETTINGS, logs=specs(), clock=ManualClock(), disk=disk)
    assert not catalog_reads


@pytest.mark.parametrize("torn", [0, 1 << 24])
def test_a_torn_leader_epoch_is_corrected_by_recovery(torn: int) -> None:
    """The checksum does not cover the epoch: a batch of epoch 1 was read as one of epoch 0."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    disk = disk.kill()
    shard = reopen(disk, spec())
    write(shard, "b")
    write(shard, "c")
    image = disk.kill()
    path = shard.logs[1].segments[-1].path()
    position = codec.scan(image.files()[path])[-1].position
    image.pwrite(image.open(path), [torn.to_bytes(4, "big")], position + LEADER_EPOCH_AT)
    again = reopen(image, spec())
    assert values(again) == ["a", "b", "c"]
    assert [info.leader_epoch for at in range(3) for info in codec.scan(again.logs[1].read(at, 1).data)] == [0, 1, 1]


def test_after_a_start_the_slot_of_a_log_ends_before_the_open_transaction() -> None:
    """Until the next append, the slot claimed that all records are stable, so other processes read uncommitted ones."""
    disk = new_disk()
    shard = reopen(disk, spec())
    shard.logs[1].set_stable_limit(0)
    write(shard, "in a transaction")
    shard.close()
    shard = reopen(disk, spec())
    shard.logs[1].set_stable_limit(0)  # as loading the producer state does
    shard.pump()
    assert read_all(disk, f"{ROOT}/slots")[1].stable_end == 0
