"""Rounds: appends that arrive together become durable together, with one sync."""

import errno
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.errors import BatchTooLarge, DiskFull, LogClosed, OffsetOutOfRange, StorageFailed
from headrace.log.commit.journal import JournalFull
from headrace.log.commit.round import Ticket
from headrace.log.disk.disk import RealDisk
from headrace.log.disk.workers import Done, Job
from headrace.log.settings import StreamSettings
from tests.log.helpers import SMALL, Bench, batch, values


def test_one_sync_covers_a_round_whatever_the_number_of_logs(bench: Bench) -> None:
    shard = bench.open(*range(1, 51))
    bench.append(1, [b"first"])  # the epoch of log 1, and the journal's first file
    before = shard.counters.syncs
    tickets = [shard.log(i).append(batch([b"x"])) for i in range(1, 51)]
    shard.pump()
    assert all(ticket.done and ticket.error is None for ticket in tickets)
    assert shard.counters.syncs == before + 1
    shard.close()


def test_a_large_part_is_written_directly_to_its_segment_with_one_sync(bench: Bench) -> None:
    shard = bench.open()
    bench.append(1, [b"x" * 10_000])
    written, syncs = shard.journal.bytes_written, shard.counters.syncs
    bench.append(1, [b"y" * 10_000])
    assert shard.journal.bytes_written == written
    assert shard.counters.syncs == syncs + 1
    shard.close()


def test_a_round_of_one_log_is_written_directly_at_a_lower_limit(bench: Bench) -> None:
    """It takes one sync either way; several logs take one only through the journal."""
    shard = bench.open(1, 2)
    for number in (1, 2):
        bench.append(number, [b"first"])
    bench.append(1, [b"n" * 1200])  # its names are synced with this one
    written, syncs = shard.journal.bytes_written, shard.counters.syncs
    for value in (b"a", b"b"):
        shard.log(1).append(batch([value * 600]))
    shard.pump()
    assert shard.journal.bytes_written == written and shard.counters.syncs == syncs + 1
    for number in (1, 2):
        shard.log(number).append(batch([b"c" * 600]))
    shard.pump()
    assert shard.journal.bytes_written > written and shard.counters.syncs == syncs + 2
    written = shard.journal.bytes_written
    group = shard.group()
    group.append(shard.log(1), batch([b"d" * 1200]))
    group.put("table", b"key", b"value")
    group.commit()
    shard.pump()
    assert shard.journal.bytes_written > written and shard.counters.syncs == syncs + 3
    bench.kill()
    again = bench.open(1, 2)
    assert [(value or b"")[:1] for value in values(again.log(1))] == [b"f", b"n", b"a", b"b", b"c", b"d"]
    again.close()


def test_offsets_are_dense_in_the_order_of_arrival(bench: Bench) -> None:
    shard = bench.open()
    log = shard.log(1)
    tickets = [log.append(batch([b"a"] * n)) for n in (3, 1, 5)]
    assert [ticket.done for ticket in tickets] == [False] * 3
    assert log.visible_end == 0, "records that are not durable are not visible"
    shard.pump()
    assert [(ticket.base_offset, ticket.next_offset) for ticket in tickets] == [(0, 3), (3, 4), (4, 9)]
    shard.close()


def test_a_group_reaches_every_log_and_the_state_together(bench: Bench) -> None:
    shard = bench.open(1, 2, 3)
    data = batch([b"shared"])
    group = shard.group()
    parts = [group.append(shard.log(i), data) for i in (1, 2, 3)]
    group.put("table", b"key", b"value")
    ticket = group.commit()
    assert shard.state.get("table", b"key") is None
    shard.pump()
    assert ticket.error is None and [part.base_offset for part in parts] == [0, 0, 0]
    assert [values(shard.log(i)) for i in (1, 2, 3)] == [[b"shared"]] * 3
    assert shard.state.get("table", b"key") == b"value"
    shard.close()


def test_equal_bytes_for_many_logs_are_in_the_journal_once(bench: Bench) -> None:
    shard = bench.open(*range(1, 21))
    for i in range(1, 21):
        bench.append(i, [b"warm"] * i)  # different next offsets: the shared bytes are numbered for each log
    before = shard.journal.bytes_written
    data = batch([b"x" * 3000])
    group = shard.group()
    for i in range(1, 21):
        group.append(shard.log(i), data)
    group.commit()
    shard.pump()
    assert shard.journal.bytes_written - before < 2 * len(data)
    bench.kill()
    again = Bench(bench.root).open(*range(1, 21))
    assert [values(again.log(i), i) for i in range(1, 21)] == [[b"x" * 3000]] * 20
    again.close()


def test_sync_immediate_gets_its_own_round(bench: Bench) -> None:
    shard = bench.open(stream=StreamSettings(write_mode="sync-immediate"))
    for _ in range(5):
        shard.log(1).append(batch([b"x"]))
    shard.pump()
    assert shard.counters.rounds == 5
    shard.close()


def test_async_is_visible_at_once_and_durable_after_the_flush_interval(bench: Bench) -> None:
    shard = bench.open(stream=StreamSettings(write_mode="async", flush_interval_ms=500))
    log = shard.log(1)
    bench.append(1, [b"first"])
    syncs = shard.counters.syncs
    bench.append(1, [b"a"], [b"b"])
    assert (log.visible_end, log.durable_end) == (3, 0)
    assert shard.counters.syncs == syncs
    shard.tick()
    bench.clock.advance(0.6)
    shard.tick()
    shard.pump()
    assert log.durable_end == 3
    shard.close()


def test_settles_are_journaled_at_once_and_synced_later(bench: Bench) -> None:
    shard = bench.open()
    bench.append(1, [b"x"])
    syncs, entries = shard.counters.syncs, shard.journal.sequence
    group = shard.group()
    group.put("settles", b"q", b"1")
    ticket = group.commit(lazy=True)
    shard.pump()
    assert ticket.done and shard.journal.sequence == entries + 1
    assert shard.counters.syncs == syncs and shard.journal.is_unsynced
    bench.clock.advance(6)
    shard.tick()
    shard.pump()
    assert not shard.journal.is_unsynced
    shard.close()


@pytest.mark.parametrize("interval_s", [1, 5, 30, 0])
def test_the_settle_interval_can_be_set_and_zero_means_only_on_stop(bench: Bench, interval_s: int) -> None:
    shard = bench.open(settings=msgspec.structs.replace(SMALL, settle_sync_interval_ms=interval_s * 1000))
    group = shard.group()
    group.put("settles", b"q", b"1")
    group.commit(lazy=True)
    shard.pump()
    for seconds, is_synced in ((0.9 * (interval_s or 3600), False), (0.2 * (interval_s or 3600), interval_s > 0)):
        bench.clock.advance(seconds)
        shard.tick()
        shard.pump()
        assert shard.journal.is_unsynced is not is_synced
    shard.close()
    assert bench.open().state.get("settles", b"q") == b"1"
    bench.shard.close()


def test_an_async_flush_delays_no_round_and_covers_the_records_from_before_it(bench: Bench) -> None:
    shard = bench.open(stream=StreamSettings(write_mode="async", flush_interval_ms=500))
    log = shard.log(1)
    bench.append(1, [b"a"])
    shard.tick()
    bench.clock.advance(0.6)
    shard.tick()
    assert shard._inline[0].pump()  # lists the files to sync; the keeper has not begun
    ticket = log.append(batch([b"b"]))
    shard._deferred.popleft()()
    assert shard._inline[0].pump() and ticket.done, "an append waits for no flush"
    shard.pump()
    assert (log.visible_end, log.durable_end) == (2, 1)
    assert log.tail.is_unsynced, "what was written meanwhile is still to be synced"
    bench.clock.advance(0.6)
    shard.tick()
    shard.pump()
    assert log.durable_end == 2 and not log.tail.is_unsynced
    shard.close()


class NoRoomForJournals(RealDisk):
    """Has no room for new journal files once `is_full` is set, and records which worker made them."""

    is_full = False
    at_work = ""

    def __init__(self) -> None:
        self.made_by: list[str] = []

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, readonly: bool = False) -> int:
        if create and "/journal/" in path:
            self.made_by.append(self.at_work)
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
        return super().open(path, create=create, exclusive=exclusive, readonly=readonly)


def test_the_next_journal_file_is_made_before_a_round_needs_it(tmp_path: Path) -> None:
    """64 MB of zeros take a tenth of a second, for which the clients of the round would wait."""
    disk = NoRoomForJournals()
    bench = Bench(tmp_path, disk)
    shard = bench.open()
    worker, keeper = shard._inline
    for inline, name in ((worker, "worker"), (keeper, "keeper")):
        submit = inline.submit

        def recorded(job: Job, done: Done, submit: Any = submit, name: str = name) -> None:
            def run() -> Any:
                disk.at_work = name
                return job()

            submit(run, done)

        inline.submit = recorded  # type: ignore[method-assign]
    disk.made_by.clear()
    for _ in range(2 * SMALL.journal_file_bytes // 1024):  # a sector of 512 bytes more for each: on into the second
        bench.append(1, [bytes(900)])
    assert disk.made_by == ["keeper"]
    shard.close()


def test_preallocating_a_journal_file_on_a_full_disk_is_not_a_failure(tmp_path: Path) -> None:
    disk = NoRoomForJournals()
    bench = Bench(tmp_path, disk)
    shard = bench.open()
    disk.is_full = True
    tickets: list[Ticket] = []
    while not tickets or tickets[-1].error is None:
        tickets.append(shard.log(1).append(batch([bytes(900)])))
        shard.pump()
        assert len(tickets) < 100
    assert isinstance(tickets[-1].error, DiskFull) and shard.failure is None
    assert len(tickets) > SMALL.journal_file_bytes // 1536 - 3, "not before the first file was full"
    disk.is_full = False
    bench.clock.advance(60)
    shard.tick()
    shard.pump()
    bench.append(1, [b"room again"])
    shard.close()


def test_an_idle_shard_checks_the_free_disk_space_once_a_second(tmp_path: Path) -> None:
    disk = RealDisk()
    looks: list[str] = []
    disk.free_bytes = lambda path: looks.append(path) or (1 << 40)  # type: ignore[method-assign, func-returns-value]
    bench = Bench(tmp_path, disk)
    shard = bench.open()

    def looked(ticks: int) -> int:
        before = len(looks)
        for _ in range(ticks):
            bench.clock.advance(0.0625)
            shard.tick()
        return len(looks) - before

    looked(1)
    assert looked(160) == 10, "ten seconds"
    bench.append(1, [b"something"])
    assert looked(1) == 1, "something was written"
    shard.close()


def test_a_full_disk_and_its_end_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = RealDisk()
    bench = Bench(tmp_path, disk)
    shard = bench.open(settings=msgspec.structs.replace(SMALL, disk_reserve=64 << 20))
    bench.append(1, [b"room"])
    free_bytes = 1 << 20
    disk.free_bytes = lambda path: free_bytes  # type: ignore[method-assign]

    def told(seconds: float) -> list[str]:
        caplog.clear()
        bench.clock.advance(seconds)
        for _ in range(3):
            shard.tick()
        return caplog.messages

    full = f"the disk is full: {tmp_path} has 1.0 MB free, disk_reserve is 64.0 MB; publishes are refused"
    assert told(1) == [full] and told(1) == []
    with pytest.raises(DiskFull):
        shard.log(1).append(batch([b"no room"]))
    free_bytes = 65 << 20
    assert told(1) == []
    free_bytes = 1 << 20
    assert told(1) == [], "full again at once is still full"
    free_bytes = 65 << 20
    assert told(1) == []
    room = "the disk has room again: 65.0 MB are free; it was full for 4.0 s, refused: 1"
    assert told(10) == [room] and told(10) == []
    bench.append(1, [b"room again"])
    shard.close()


def test_a_full_journal_makes_rounds_wait_for_a_checkpoint_and_does_not_grow(bench: Bench) -> None:
    shard = bench.open()
    for i in range(400):
        bench.append(1, [b"%03d" % i + b"x" * 900])
    assert len(values(shard.log(1))) == 400
    assert shard.counters.checkpoints > 0
    assert shard.journal.files_live <= SMALL.journal_files
    shard.close()


def test_a_group_too_large_for_the_journal_is_refused_before_anything_happens(bench: Bench) -> None:
    shard = bench.open(1, 2)
    group = shard.group()
    group.append(shard.log(1), batch([b"x" * 40_000]))
    group.append(shard.log(2), batch([b"x" * 40_000]))
    with pytest.raises(BatchTooLarge):
        group.commit()
    assert not shard.pump() and shard.log(1).visible_end == 0
    shard.close()


def test_a_batch_over_the_streams_limit_is_refused(bench: Bench) -> None:
    shard = bench.open(stream=StreamSettings(batch_bytes_max=1000))
    with pytest.raises(BatchTooLarge, match="1,000"):
        shard.log(1).append(batch([b"x" * 2000]))
    shard.close()


def test_a_closed_shard_refuses_appends(bench: Bench) -> None:
    shard = bench.open()
    log = shard.log(1)
    shard.close()
    with pytest.raises(LogClosed):
        log.append(batch([b"x"]))


def test_waiting_readers_are_woken_once_the_record_is_durable(bench: Bench) -> None:
    shard = bench.open()
    log = shard.log(1)
    woken: list[int] = []
    log.wait(0, lambda: woken.append(log.visible_end))
    log.wait(1, lambda: woken.append(-1))
    cancelled = log.wait(0, lambda: woken.append(-2))
    cancelled.cancel()
    log.append(batch([b"x"]))
    assert woken == []
    shard.pump()
    assert woken == [1]
    log.wait(0, lambda: woken.append(99))
    shard.pump()
    assert woken == [1, 99]
    shard.close()


def test_reading_outside_the_log_names_its_bounds(bench: Bench) -> None:
    shard = bench.open()
    bench.append(1, [b"x"])
    with pytest.raises(OffsetOutOfRange, match="offset 2 is outside 0 to 1"):
        shard.log(1).read(2)
    assert shard.log(1).read(1).data == b""
    shard.close()


def test_a_reader_of_committed_records_waits_for_the_open_transaction(bench: Bench) -> None:
    shard = bench.open()
    log = shard.log(1)
    log.set_stable_limit(0)
    woken: list[int] = []
    log.wait(0, lambda: woken.append(log.stable_end))
    bench.append(1, [b"x"])
    assert woken == [] and log.stable_end == 0
    log.set_stable_limit(None)
    assert woken == [1]
    shard.close()


def test_units_of_a_deleted_log_are_subtracted_once_even_if_the_round_fails_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = bench.open(1, 2)
    bench.append(2, [b"its file is there: what follows is a chain"])
    plan = shard.committer.plan
    with monkeypatch.context() as held:
        held.setattr(shard.committer, "plan", raises(JournalFull()))
        held.setattr(shard.checkpoints, "run", lambda **_: None)
        first = shard.log(2).append(batch([b"waits for the journal"]))
        shard.pump()
    gone, failed = shard.log(1).append(batch([b"gone"])), shard.log(2).append(batch([b"failed"]))
    shard.delete_log(1)
    shard.pump()
    broken = raises(OSError(errno.EIO, "input/output error"))
    monkeypatch.setattr(shard.committer, "plan", lambda round_: (plan if first in tickets(round_) else broken)(round_))
    shard.scheduler.on_journal_freed()
    shard.pump()
    assert first.error is None and isinstance(gone.error, LogClosed) and isinstance(failed.error, StorageFailed)
    assert shard.pending_bytes == 0
    drained: list[bool] = []
    shard.on_drain(lambda: drained.append(True))
    shard.pump()
    assert drained == [True], "no caller waits for a cancelled request"


@pytest.mark.parametrize("refused", [False, True])
def test_a_callback_that_raises_does_not_stop_the_others(
    bench: Bench, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = bench.open()
    bench.append(1, [b"before"])
    if refused:
        monkeypatch.setattr(shard.committer, "plan", raises(DiskFull("no room")))
    bad, good = (shard.log(1).append(batch([value])) for value in (b"bad", b"good"))
    bad.add_callback(raises(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        shard.pump()
    assert good.done and (good.error is None) != refused
    assert shard.pending_bytes == 0
    monkeypatch.undo()
    shard.is_full = False
    bench.append(1, [b"after"])
    assert values(shard.log(1))[-1] == b"after"
    shard.close()


def test_every_waiter_of_a_ticket_is_notified(bench: Bench) -> None:
    shard = bench.open()
    ticket = shard.log(1).append(batch([b"x"]))
    told: list[int] = []
    ticket.add_callback(raises(ZeroDivisionError()))
    ticket.add_callback(lambda done: told.append(done.base_offset))
    ticket.add_callback(raises(KeyError()))
    ticket.add_callback(lambda done: told.append(done.next_offset))
    with pytest.raises(ZeroDivisionError):
        shard.pump()
    assert told == [0, 1]
    shard.close()


def test_the_part_of_a_deleted_log_gets_an_error_when_its_group_commits(bench: Bench) -> None:
    shard = bench.open(1, 2)
    group = shard.group()
    kept, gone = (group.append(shard.log(number), batch([b"x"])) for number in (1, 2))
    kept.add_callback(raises(ZeroDivisionError()))
    whole = group.commit()
    shard.delete_log(2)
    with pytest.raises(ZeroDivisionError):
        shard.pump()
    assert whole.done and whole.error is None and whole.next_offset == kept.next_offset == 1
    assert gone.done and isinstance(gone.error, LogClosed)
    shard.close()


def test_a_waiting_reader_that_raises_does_not_stop_the_others(bench: Bench) -> None:
    shard = bench.open(1, 2)
    woken: list[int] = []
    for number in (1, 2):
        shard.log(number).wait(0, raises(ZeroDivisionError()))
        shard.log(number).wait(0, partial(woken.append, number))
        shard.log(number).append(batch([b"x"]))
    with pytest.raises(ZeroDivisionError):
        shard.pump()
    assert woken == [1, 2]
    bench.append(1, [b"after"])
    shard.close()


def raises(error: Exception) -> Any:
    def broken(*_: object) -> None:
        raise error

    return broken


def tickets(round_: Any) -> list[Any]:
    return [unit.ticket for unit in round_.units]


def test_a_failure_during_the_last_checkpoint_is_reported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files may be open, and take all that is written, when their folder is gone already."""
    shard = bench.open()
    bench.append(1, [b"x"])
    really = shard.state.write

    def write(*args: Any, **options: Any) -> None:
        really(*args, **options)
        shard.fail(StorageFailed("the data folder is out of reach"))

    monkeypatch.setattr(shard.state, "write", write)
    with pytest.raises(StorageFailed, match="out of reach"):
        shard.close()


def test_a_round_being_applied_is_not_waiting_for_disk_space(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker stops while the worker is at it: the round was refused, and the stop no clean one."""
    shard = bench.open(1, 2)
    tail, data, group = shard.log(1).tail, batch([b"a"]), shard.group()
    append = tail.append

    def stop_first(*args: Any, **kwargs: Any) -> Any:
        shard.stop_waiting_for_room()
        return append(*args, **kwargs)

    monkeypatch.setattr(tail, "append", stop_first)
    group.append(shard.log(1), data)
    group.append(shard.log(2), data)  # the same bytes: a job for the worker
    ticket = group.commit()
    shard.pump()
    assert ticket.done and ticket.error is None
    shard.close()
    bench.open(1, 2)
    assert bench.report.clean
    bench.shard.close()
