"""Bugs in rounds, checkpoints and full disks that the crash tests found, each reduced to a few lines."""

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


def test_a_direct_append_syncs_a_folder_that_a_checkpoint_has_not_synced_yet() -> None:
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    shard.checkpoint(lambda error: None)
    assert shard._inline[0].pump(), "the checkpoint has collected the files to sync but synced none yet"
    ticket = shard.logs[1].append(batch("b", 1000))
    while not ticket.done:
        assert shard._deferred or shard._inline[0].pump()
        while shard._deferred:
            shard._deferred.popleft()()
    assert values(reopen(lost(disk), spec())) == ["a", "b"]


def test_a_group_on_an_async_log_makes_earlier_records_durable() -> None:
    """The group was in the synced journal, earlier records were lost, and the log was reported as damaged."""
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


def test_a_round_never_exceeds_a_journal_file() -> None:
    """Many small changes, or a journal smaller than a round, failed an assertion, and confirms stopped for good."""
    shard = reopen(new_disk(), spec())
    tickets = []
    for number in range(2000):
        group = shard.group()
        group.put("a-table", b"%d" % number, b"x")
        tickets.append(group.commit())
    tickets += [shard.logs[1].append(batch("a", 500)) for _ in range(40)]
    shard.pump()
    assert all(ticket.done and ticket.error is None for ticket in tickets)


def test_a_checkpoint_keeps_a_round_that_could_not_be_written_to_its_segment() -> None:
    """The marker included the entry, the journal file was recycled, and the record was lost."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    disk.capacity = disk.used
    ticket = shard.logs[1].append(batch("b", 40))
    shard.pump()
    assert not ticket.done, "durable in the journal but not readable yet"
    checkpoint(shard)
    assert values(reopen(lost(disk), spec())) == ["a", "b"]
    disk.capacity = 1 << 50
    checkpoint(shard)
    assert values(reopen(lost(disk), spec())) == ["a", "b"]
    shard.tick()
    shard.pump()
    assert ticket.done and ticket.error is None and values(shard) == ["a", "b"]


def test_no_checkpoint_follows_a_failed_sync() -> None:
    """A later sync succeeds and writes nothing, so the marker covered bytes that never reached the device."""
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


def test_a_journal_file_without_a_header_is_not_used() -> None:
    """The disk was full for the header, the file was used anyway, and records confirmed in it were lost."""
    disk = new_disk()
    shard = reopen(disk, spec())
    disk.arm(Fault("pwrite", 1, errno.ENOSPC, within=".wal"))
    refused = shard.logs[1].append(batch("a"))
    shard.pump()
    assert isinstance(refused.error, DiskFull)
    shard.tick()
    write(shard, "b")
    assert values(reopen(lost(disk), spec())) == ["b"]


def test_a_round_that_does_not_fit_on_a_full_disk_is_refused_and_leaves_no_trace() -> None:
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    disk.arm(Fault("pwrite", 1, errno.ENOSPC, share=0.01, within=".wal"))
    refused = shard.logs[1].append(batch("b"))
    shard.pump()
    assert isinstance(refused.error, DiskFull) and shard.failure is None
    shard.tick()
    write(shard, "c")
    assert values(reopen(lost(disk), spec())) == ["a", "c"]


def test_a_failed_read_raises_storage_error() -> None:
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    disk.arm(Fault("pread", 1, within=".log"))
    with pytest.raises(StorageError):
        shard.logs[1].read(0)
    assert values(shard) == ["a"]


def test_two_retries_on_a_full_disk_do_not_confirm_the_next_round() -> None:
    """The result of the second retry was used for the next round, which had not been written."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    disk.capacity = disk.used
    first = shard.logs[1].append(batch("b", 40))
    shard.pump()
    second = shard.logs[1].append(batch("c", 40)) if not shard.is_full else None
    group = shard.group()
    group.put("t", b"k", b"v")
    next_round = group.commit()
    assert not first.done and second is None
    disk.capacity = 1 << 50
    shard.tick()
    shard.tick()
    was_synced: list[bool] = []
    next_round.add_callback(lambda ticket: was_synced.append(disk.unsynced(b"tkv") is None))
    shard.pump()
    assert first.done and first.error is None
    assert was_synced == [True]
    assert dict(reopen(lost(disk), spec()).state.items("t")) == {b"k": b"v"}


def test_the_name_of_a_segment_rolled_by_retention_is_synced_after_its_file_is_created() -> None:
    """Retention rolls without writing, so the folder was synced before the file existed, and not again."""
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
def test_a_record_refused_on_a_full_disk_never_appears(path: str, size: int, share: float) -> None:
    """Half an entry may be complete, because the rest is padding; and truncated bytes may return."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a", size=size)
    disk.arm(Fault("pwrite", 1, errno.ENOSPC, share=share, within=path))
    refused = shard.logs[1].append(batch("b", size))
    shard.pump()
    if isinstance(refused.error, DiskFull):
        for image in [disk.kill(), lost(disk), *(disk.power_cut(Random(n)) for n in range(30))]:
            assert values(reopen(image, spec())) == ["a"]


def test_a_checkpoint_requested_during_a_stop_keeps_the_stop_clean() -> None:
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    results: list[BaseException | None] = []
    disk.before = lambda kind, path: shard.checkpoint(results.append) if "state" in path and not results else None
    shard.close()
    disk.before = None
    _, report = Shard.open(ROOT, SETTINGS, logs=[spec()], clock=ManualClock(), disk=lost(disk))
    assert report.clean


def test_a_failed_sync_of_the_journal_is_not_retried() -> None:
    """A job queued before the failure was known synced with success, and lazy changes were reported as durable."""
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


def test_the_slot_of_a_deleted_log_is_cleared_after_its_last_round() -> None:
    """The slot was cleared at once, but the round in flight wrote it again, for a log that no longer existed."""
    disk = new_disk()
    shard = reopen(disk, spec(1), spec(2))
    write(shard, "a", 1)
    write(shard, "b", 2)
    shard.logs[1].append(batch("c"))
    while shard._deferred:
        shard._deferred.popleft()()  # planned but not written yet
    shard.delete_log(1)
    shard.pump()
    assert set(read_all(disk, f"{ROOT}/{paths.SLOTS}")) == {2}


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_an_error_while_clearing_a_slot_stops_the_shard_or_is_a_full_disk(error: int) -> None:
    """Deleting a log raised OSError at the caller after the log was deleted, and the shard did not stop."""
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


def test_async_records_are_durable_before_later_sync_records_are_confirmed() -> None:
    """The next round was in the synced journal, earlier records were lost, and the log was reported as damaged."""
    disk = new_disk()
    shard = reopen(disk, spec(write_mode="async"))
    log = shard.logs[1]
    for text in "ab":
        write(shard, text)
    log.settings = log.tail.settings = spec().settings
    write(shard, "c")
    assert not log.tail.is_unsynced
    assert values(reopen(lost(disk), spec())) == ["a", "b", "c"]


def test_async_records_are_still_flushed_after_a_change_to_sync() -> None:
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
    for _ in range(2):  # the first tick records when unsynced data was found
        shard.tick()
        shard.clock.advance(0.6)
    shard.tick()
    shard.pump()


def test_the_flush_of_an_async_log_syncs_records_written_by_groups() -> None:
    """The flush found nothing to sync but reported the records as durable; a power cut lost them."""
    disk = new_disk()
    specs = tuple(spec(number, write_mode="async", flush_interval_ms=500) for number in (1, 2))
    shard = reopen(disk, *specs)
    group = shard.group()  # like a request to several partitions
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
    """Settle on a full disk until the journal needs a checkpoint, which fails. Return the ticket that waits for it."""

    def settle(number: int) -> Ticket:
        group = shard.group()
        group.put("settles", b"%d" % number, bytes(300))
        return group.commit(lazy=True)

    number = 0
    # Without checkpoints, until all files are in use.
    while len(disk.listdir(f"{ROOT}/journal")) < SETTINGS.journal_files:
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


def test_a_round_that_waits_for_the_journal_on_a_full_disk_continues_when_space_is_free() -> None:
    """The last checkpoint failed with a full disk, and no other was tried because nothing had changed since."""
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
def test_a_stop_does_not_wait_for_disk_space(waits_for: str) -> None:
    """The stop never completed, because a stopping shard retries nothing."""
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
    results: list[BaseException | None] = []
    shard.close(results.append)
    shard.pump()
    assert results == [None]
    shard.join()
    assert values(reopen(lost(disk), spec())) == ["a", "b"][: 1 + (waits_for == "its segment")]
