"""Bugs that the crash tests found in opening a folder, each in a few lines that show it."""

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
    finished,
    lost,
    new_disk,
    reopen,
    spec,
    truncate,
    values,
    write,
)
from tests.crash.simdisk import SimulatedDisk


def test_the_names_of_the_top_folders_are_durable_before_the_first_confirm() -> None:
    """The state folder's own name was never synced: a cut took the epoch and the marker with it."""
    disk = new_disk()
    shard = reopen(disk, spec())
    epoch = shard.epoch
    ticket = shard.logs[1].append(batch("a"))
    shard.pump()
    assert ticket.done and ticket.error is None
    again = reopen(lost(disk), spec())
    assert values(again) == ["a"]
    assert again.epoch > epoch


def test_a_segment_that_recovery_closed_keeps_its_end_through_a_cut() -> None:
    """Recovery wrote the seal without a sync, so the next start read on into bytes that had been moved."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    checkpoint(shard)
    write(shard, "b", size=1000)
    disk = disk.kill()
    assert values(reopen(disk, spec())) == ["a", "b"]
    assert values(reopen(lost(disk), spec())) == ["a", "b"]


def test_an_append_of_several_batches_is_completed_from_the_journal_when_its_segment_has_some_of_them() -> None:
    """The journal's parts were looked up by their first offset only."""
    disk = new_disk()
    shard = reopen(disk, spec())
    ticket = shard.logs[1].append(batch("a") + batch("b"))
    shard.pump()
    assert ticket.done and ticket.error is None
    path = next(path for path in disk.files() if path.endswith(".log"))
    image = disk.kill()
    image.replace(path, disk.files()[path][: len(batch("a"))])
    assert values(reopen(image, spec())) == ["a", "b"]


def test_a_log_whose_first_segment_lost_its_name_is_filled_up_from_the_journal() -> None:
    """The log was taken to start at the first segment that was found."""
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


def test_l2_a_group_read_from_the_page_cache_is_whole_after_a_cut_inside_recovery() -> None:
    """A kill leaves an entry unsynced; recovery put the group into one log, and the cut took the entry."""
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


def test_a_torn_journal_header_does_not_bring_entries_of_a_former_life_back() -> None:
    """The number of the file was taken from the headers that could be read, so it was used twice."""
    disk = new_disk()
    shard = reopen(disk, spec())
    for number in range(3):  # never synced, so the header is not, either
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
    group.put("t", b"k0", b"later.")  # just as long as what it overwrites
    group.commit()
    shard.pump()
    assert dict(reopen(lost(image), spec()).state.items("t")) == {b"k0": b"later."}


def test_state_read_from_the_page_cache_is_not_built_upon() -> None:
    """A kill left a checkpoint unsynced; the next life appended to it, and a cut tore the first of the two."""
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


def test_the_only_state_log_is_never_removed_before_the_next_has_a_durable_name() -> None:
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    given = shard.next_log_id()
    image = disk.kill()
    killed: list[SimulatedDisk] = []
    image.before = lambda kind, path: killed.append(image.kill()) if path == f"{ROOT}/state" else None
    reopen(image, spec())
    assert len(killed) == 1, "renamed, and its folder not synced"
    cuts = every_cut(killed[0])
    reopen(killed[0], spec())
    for cut in cuts:
        again = reopen(cut, spec())
        assert values(again) == ["a"]
        assert again.next_log_id() > given, "an id is never given out twice"


def test_an_async_log_that_lost_a_segment_before_its_sync_does_not_stop_the_shard() -> None:
    """The list of files to sync still named it: no such file was taken for a failing disk."""
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


def test_the_seal_of_an_unfinished_recovery_does_not_hide_what_lies_behind_it() -> None:
    """Retention had moved the start past the seal, so the segment was dropped with all that followed."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    checkpoint(shard)
    for text in "bcd":
        write(shard, text, size=1000)  # past the journal
    shard.maintenance.starts.delete_before(shard.logs[1], 2)
    shard.pump()
    images = every_cut(disk := disk.kill())
    reopen(disk, spec())
    for image in images:
        assert values(reopen(image, spec()))[-2:] == ["c", "d"]


def test_an_active_segment_of_which_nothing_was_synced_may_lose_its_name() -> None:
    """A truncation to a segment's edge left an empty one; a later segment was found behind the sealed ones."""
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
    assert values(finished(image, spec(segment_size=100))) == ["a", "c", "d"]


def test_the_catalog_is_not_read_before_the_folder_is_locked() -> None:
    disk = new_disk()
    reopen(disk, spec())
    asked = []

    def specs() -> Iterator[LogSpec]:
        asked.append(True)
        yield spec()

    with pytest.raises(DataFolderLocked):
        Shard.open(ROOT, SETTINGS, logs=specs(), clock=ManualClock(), disk=disk)
    assert not asked


@pytest.mark.parametrize("torn", [0, 1 << 24])
def test_an_epoch_that_a_crash_tore_is_not_taken_for_the_batchs_own(torn: int) -> None:
    """It lies before what the batch's checksum covers: a batch of epoch 1 came out as one of epoch 0."""
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


def test_the_slot_of_a_log_says_after_a_start_where_the_open_transaction_begins() -> None:
    """It said that all is stable until somebody wrote: who reads the files took the transaction for committed."""
    disk = new_disk()
    shard = reopen(disk, spec())
    shard.logs[1].set_stable_limit(0)
    write(shard, "in a transaction")
    shard.close()
    shard = reopen(disk, spec())
    shard.logs[1].set_stable_limit(0)  # as producers do when they are loaded
    shard.pump()
    assert read_all(disk, f"{ROOT}/slots")[1].stable_end == 0
