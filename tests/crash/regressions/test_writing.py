"""Bugs that the crash tests found in rounds, checkpoints and full disks, each in a few lines that show it."""

import errno
from random import Random

import pytest

from headrace.clock import ManualClock
from headrace.errors import DiskFull, StorageError
from headrace.log.commit.round import Ticket
from headrace.log.commit.slots import read_all
from headrace.log.disk import paths
from headrace.log.shard import Shard
from tests.crash.shards import ROOT, SETTINGS, batch, checkpoint, lost, new_disk, reopen, spec, values, write
from tests.crash.simdisk import Fault, SimulatedDisk


def test_a_direct_append_does_not_take_a_folder_for_synced_that_a_checkpoint_is_about_to_sync() -> None:
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    shard.checkpoint(lambda error: None)
    assert shard._inline[0].pump(), "the checkpoint has taken the list of what to sync, and synced nothing yet"
    ticket = shard.logs[1].append(batch("b", 1000))
    while not ticket.done:
        assert shard._deferred or shard._inline[0].pump()
        while shard._deferred:
            shard._deferred.popleft()()
    assert values(reopen(lost(disk), spec())) == ["a", "b"]


def test_a_group_on_an_async_log_makes_what_lies_before_it_durable() -> None:
    """The group's records were in the synced journal, those before them nowhere: the log was called damaged."""
    disk = new_disk()
    specs = spec(1, write_mode="async"), spec(2)
    shard = reopen(disk, *specs)
    write(shard, "a")
    group = shard.group()
    group.append(shard.logs[1], batch("b"))
    group.append(shard.logs[2], batch("b"))
    ticket = group.commit()
    shard.pump()
    assert ticket.done and ticket.error is None
    again = reopen(lost(disk), *specs)
    assert values(again, 1) == ["a", "b"] and values(again, 2) == ["b"]


def test_a_round_never_outgrows_a_journal_file() -> None:
    """Many small changes, or a journal smaller than a round, ran into an assertion: nothing was confirmed again."""
    shard = reopen(new_disk(), spec())
    tickets = []
    for number in range(2000):
        group = shard.group()
        group.put("a-table", b"%d" % number, b"x")
        tickets.append(group.commit())
    tickets += [shard.logs[1].append(batch("a", 500)) for _ in range(40)]
    shard.pump()
    assert all(ticket.done and ticket.error is None for ticket in tickets)


def test_a_checkpoint_does_not_forget_a_round_that_found_no_room_in_its_segment() -> None:
    """The marker included the entry, the journal's file was used again, and the record was nowhere."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    disk.capacity = disk.used
    ticket = shard.logs[1].append(batch("b", 40))
    shard.pump()
    assert not ticket.done, "durable in the journal, but not readable yet"
    checkpoint(shard)
    assert values(reopen(lost(disk), spec())) == ["a", "b"]
    disk.capacity = 1 << 50
    checkpoint(shard)
    assert values(reopen(lost(disk), spec())) == ["a", "b"]
    shard.tick()
    shard.pump()
    assert ticket.done and ticket.error is None and values(shard) == ["a", "b"]


def test_l8_no_checkpoint_follows_a_failed_sync() -> None:
    """A later sync answers OK and writes nothing: the marker then named bytes the device never had."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    disk.arm(Fault("sync", 1, within=".log"))
    ticket = shard.logs[1].append(batch("b", 1000))
    shard.checkpoint(lambda error: None)
    shard.pump()
    assert ticket.done and ticket.error is not None
    checkpoint(shard)
    again = reopen(lost(disk), spec())
    assert values(again) == ["a"]
    killed = disk.kill()
    found = values(reopen(killed, spec()))
    assert values(reopen(lost(killed), spec())) == found


def test_a_journal_file_without_its_header_is_not_written_to() -> None:
    """The header found no room, the file was kept, and what was confirmed into it was gone."""
    disk = new_disk()
    shard = reopen(disk, spec())
    disk.arm(Fault("pwrite", 1, errno.ENOSPC, within=".wal"))
    refused = shard.logs[1].append(batch("a"))
    shard.pump()
    assert isinstance(refused.error, DiskFull)
    shard.tick()
    write(shard, "b")
    assert values(reopen(lost(disk), spec())) == ["b"]


def test_a_round_that_the_journal_has_no_room_for_is_refused_and_leaves_nothing() -> None:
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    disk.arm(Fault("pwrite", 1, errno.ENOSPC, share=0.5, within=".wal"))
    refused = shard.logs[1].append(batch("b"))
    shard.pump()
    assert isinstance(refused.error, DiskFull) and shard.failure is None
    shard.tick()
    write(shard, "c")
    assert values(reopen(lost(disk), spec())) == ["a", "c"]


def test_a_read_that_fails_says_so_with_an_error_of_ours() -> None:
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    disk.arm(Fault("pread", 1, within=".log"))
    with pytest.raises(StorageError):
        shard.logs[1].read(0)
    assert values(shard) == ["a"]


def test_two_retries_on_a_full_disk_do_not_confirm_the_round_behind() -> None:
    """The answer to the second retry was taken for that of the next round, which had not been written."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    disk.capacity = disk.used
    first = shard.logs[1].append(batch("b", 40))
    shard.pump()
    second = shard.logs[1].append(batch("c", 40)) if not shard.is_full else None
    group = shard.group()
    group.put("t", b"k", b"v")
    behind = group.commit()
    assert not first.done and second is None
    disk.capacity = 1 << 50
    shard.tick()
    shard.tick()
    told: list[bool] = []
    behind.add_callback(lambda ticket: told.append(disk.unsynced(b"tkv") is None))
    shard.pump()
    assert first.done and first.error is None
    assert told == [True]
    assert dict(reopen(lost(disk), spec()).state.items("t")) == {b"k": b"v"}


def test_the_name_of_a_segment_that_was_begun_early_is_synced_when_its_file_is_made() -> None:
    """Retention rolls without writing: the folder was synced before the file was there, and not after."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    shard.maintenance.starts.delete_before(shard.logs[1], 1)
    shard.pump()
    checkpoint(shard)
    write(shard, "b")
    checkpoint(shard)
    assert values(reopen(lost(disk), spec())) == ["b"]


@pytest.mark.parametrize("path", [".wal", ".log"])
@pytest.mark.parametrize("size", [0, 1000])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_d5_what_a_full_disk_refused_never_appears(path: str, size: int, share: float) -> None:
    """Half an entry may be a whole one, its rest being padding; and what was cut off may come back."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a", size=size)
    disk.arm(Fault("pwrite", 1, errno.ENOSPC, share=share, within=path))
    refused = shard.logs[1].append(batch("b", size))
    shard.pump()
    if isinstance(refused.error, DiskFull):
        for image in [disk.kill(), lost(disk), *(disk.power_cut(Random(n)) for n in range(30))]:
            assert values(reopen(image, spec())) == ["a"]


def test_a_checkpoint_asked_for_while_stopping_does_not_spoil_the_clean_stop() -> None:
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    asked: list[BaseException | None] = []
    disk.before = lambda kind, path: shard.checkpoint(asked.append) if "state" in path and not asked else None
    shard.close()
    disk.before = None
    _, report = Shard.open(ROOT, SETTINGS, logs=[spec()], clock=ManualClock(), disk=lost(disk))
    assert report.clean


def test_l8_a_sync_of_the_journal_that_failed_is_not_tried_again() -> None:
    """The job was queued before the failure was known; its sync answered OK, and lazy changes were called safe."""
    disk = new_disk()
    shard = reopen(disk, spec())
    group = shard.group()
    group.put("t", b"k", b"v")
    group.commit(lazy=True)
    shard.pump()
    disk.arm(Fault("sync", 1, within=".wal"))
    with pytest.raises(OSError):
        shard.committer.sync_journal()
    with pytest.raises(OSError):
        shard.committer.sync_journal()
    assert dict(reopen(lost(disk), spec()).state.items("t")) == {}


def test_the_slot_of_a_deleted_log_goes_after_the_round_that_still_writes_it() -> None:
    """It was cleared at once, and the round that was under way wrote it again: a log that nobody has, for ever."""
    disk = new_disk()
    shard = reopen(disk, spec(1), spec(2))
    write(shard, "a", 1)
    write(shard, "b", 2)
    shard.logs[1].append(batch("c"))
    while shard._deferred:
        shard._deferred.popleft()()  # planned, and not written yet
    shard.delete_log(1)
    shard.pump()
    assert set(read_all(disk, f"{ROOT}/{paths.SLOTS}")) == {2}


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_l8_a_slot_that_cannot_be_cleared_is_no_bare_error_of_the_system(error: int) -> None:
    """Deleting a log raised it at whoever asked, after the log was gone: nobody stopped, nobody was told."""
    disk = new_disk()
    shard = reopen(disk, spec(1), spec(2))
    write(shard, "a", 1)
    write(shard, "b", 2)
    disk.arm(Fault("pwrite", 1, error=error, within="/slots"))
    shard.delete_log(1)
    shard.pump()
    disk.disarm()
    if error == errno.EIO:
        assert isinstance(shard.failure, StorageError)
    else:
        write(shard, "c", 2)
        assert values(reopen(lost(disk), spec(2)), 2) == ["b", "c"]


def test_what_was_confirmed_under_async_is_durable_before_anything_that_is_confirmed_under_sync() -> None:
    """The next round was in the synced journal, what lay before it nowhere: the log was called damaged."""
    disk = new_disk()
    shard = reopen(disk, spec(write_mode="async"))
    log = shard.logs[1]
    for text in "ab":
        write(shard, text)
    log.settings = log.tail.settings = spec().settings
    write(shard, "c")
    assert not log.tail.is_unsynced
    assert values(reopen(lost(disk), spec())) == ["a", "b", "c"]


def test_what_was_confirmed_under_async_is_synced_in_time_though_the_log_is_so_no_longer() -> None:
    disk = new_disk()
    shard = reopen(disk, spec(write_mode="async", flush_interval_ms=500))
    log = shard.logs[1]
    write(shard, "a")
    log.settings = log.tail.settings = spec(flush_interval_ms=500).settings
    assert log.durable_end == 0
    flush(shard)
    assert log.durable_end == 1 and not log.tail.is_unsynced
    assert values(reopen(lost(disk), spec())) == ["a"]


def flush(shard: Shard) -> None:
    assert isinstance(shard.clock, ManualClock)
    for _ in range(2):  # the first look says since when there is something
        shard.tick()
        shard.clock.advance(0.6)
    shard.tick()
    shard.pump()


def test_the_flush_of_an_async_log_syncs_what_groups_wrote_to_it() -> None:
    """It found nothing to sync, and called it durable: gone after a power cut, or called damaged."""
    disk = new_disk()
    specs = tuple(spec(number, write_mode="async", flush_interval_ms=500) for number in (1, 2))
    shard = reopen(disk, *specs)
    group = shard.group()  # as a request to several partitions is one
    for log in shard.logs.values():
        group.append(log, batch("a"))
    ticket = group.commit()
    shard.pump()
    assert ticket.done and ticket.error is None
    flush(shard)
    assert [log.durable_end for log in shard.logs.values()] == [1, 1]
    again = reopen(lost(disk), *specs)
    assert values(again, 1) == values(again, 2) == ["a"]


def settle_until_the_journal_is_full(shard: Shard, disk: SimulatedDisk) -> Ticket:
    """On a full disk, on which checkpoints find no room. The settle that waits for one."""

    def settle(number: int) -> Ticket:
        group = shard.group()
        group.put("settles", b"%d" % number, bytes(300))
        return group.commit(lazy=True)

    number = 0
    while len(disk.listdir(f"{ROOT}/journal")) < SETTINGS.journal_files:  # the keeper is slow: all files are in use
        number += 1
        settle(number)
        while shard._deferred or shard._inline[0].pump():
            while shard._deferred:
                shard._deferred.popleft()()
    shard.pump()
    disk.capacity = disk.used
    while True:
        number += 1
        assert number < 1000, "the journal is never full"
        ticket = settle(number)
        shard.pump()
        if not ticket.done:
            return ticket


def test_a_round_that_waits_for_the_journal_on_a_full_disk_goes_on_when_there_is_room() -> None:
    """The last checkpoint found none, and nothing had changed since: there was never another one."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    ticket = settle_until_the_journal_is_full(shard, disk)
    disk.capacity = 1 << 50
    assert isinstance(shard.clock, ManualClock)
    for _ in range(3):
        shard.clock.advance(60)
        shard.tick()
        shard.pump()
    assert ticket.done and ticket.error is None
    write(shard, "b")
    assert values(shard) == ["a", "b"]


@pytest.mark.parametrize("waits_for", ["the journal", "its segment"])
def test_a_stop_does_not_wait_for_room_on_the_disk(waits_for: str) -> None:
    """It hung for ever: nothing is tried again while a shard stops."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    if waits_for == "the journal":
        settle_until_the_journal_is_full(shard, disk)
    else:
        disk.capacity = disk.used
        ticket = shard.logs[1].append(batch("b"))
        shard.pump()
        assert shard.committer.is_stuck and not ticket.done
    told: list[BaseException | None] = []
    shard.close(told.append)
    shard.pump()
    assert told == [None]
    shard.join()
    assert values(reopen(lost(disk), spec())) == ["a", "b"][: 1 + (waits_for == "its segment")]
