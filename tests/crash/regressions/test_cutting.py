"""Bugs in truncation, retention and compaction that the crash tests found, each reduced to a few lines."""

import errno
from random import Random
from typing import Any

import pytest

from headrace.log.shard import Shard
from headrace.record import codec
from tests.crash.shards import (
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
from tests.crash.simdisk import Fault, SimulatedDisk


def test_an_old_slot_neither_damages_nor_restores_a_truncated_log() -> None:
    """The slot still had the former end, and file names unlinked before a kill returned after a later power cut."""
    disk = new_disk()
    shard = reopen(disk, spec(segment_size=100))
    for text in "abcd":
        write(shard, text, size=60)
    images = every_cut(disk)
    truncate(shard, 2)
    disk.before = None
    for image in [*images, disk.kill(), lost(disk)]:
        again = reopen_and_finish(image, spec(segment_size=100))
        found = values(again)
        assert found in (["a", "b"], ["a", "b", "c", "d"])
        assert values(reopen_and_finish(lost(image), spec(segment_size=100))) == found


def test_a_log_truncated_to_a_segment_boundary_keeps_its_sealed_segments() -> None:
    """Without an active segment, all segments were scanned as if unsynced, and compacted ones were reported as torn."""
    disk = new_disk()
    settings: dict[str, Any] = {"segment_size": 100, "cleanup_policy": "compact"}
    shard = reopen(disk, spec(**settings))
    for text in "abcd":
        write(shard, text, size=60)
    results: list[object] = []
    shard.maintenance.compact(shard.logs[1], lambda result, error: results.append(error))
    shard.pump()
    assert results == [None] and values(shard) == ["c", "d"]
    images = every_cut(disk)
    truncate(shard, 3)
    assert values(reopen_and_finish(disk.kill(), spec(**settings))) == ["c"]
    for image in images:
        again = reopen_and_finish(image, spec(**settings))
        assert values(again) in (["c"], ["c", "d"])
        assert values(reopen_and_finish(lost(image), spec(**settings))) == values(again)


def test_a_removed_segment_that_reappears_alone_is_ignored() -> None:
    """A segment before the start returned without those after it, and was treated as the torn end of the log."""
    disk = new_disk()
    shard = reopen(disk, spec(segment_size=100))
    for text in "abcd":
        write(shard, text, size=60)
    checkpoint(shard)
    first = next(path for path in sorted(disk.files()) if path.endswith(".log"))
    content = disk.files()[first]
    shard.maintenance.starts.delete_before(shard.logs[1], 4)
    shard.pump()
    image = disk.kill()
    file = image.open(first, create=True)
    image.pwrite(file, [content], 0)
    shard = reopen(image, spec(segment_size=100))
    assert values(shard) == [] and shard.logs[1].visible_end == 4


def test_two_concurrent_moves_of_the_start_of_a_log_never_move_it_back() -> None:
    disk = new_disk()
    shard = reopen(disk, spec(segment_size=100))
    for text in "abcd":
        write(shard, text, size=60)
    for offset in (3, 1):
        shard.maintenance.starts.delete_before(shard.logs[1], offset)
    shard.pump()
    assert values(shard) == ["d"]
    assert values(reopen(lost(disk), spec(segment_size=100))) == ["d"]


def test_journal_entries_before_a_truncation_do_not_restore_truncated_records() -> None:
    """The journal entry with the intent to truncate also held the end of an earlier direct append."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    write(shard, "b", size=1000)
    truncate(shard, 1)
    assert values(reopen_and_finish(lost(disk), spec())) == ["a"]


@pytest.mark.parametrize("nth", range(1, 16))
def test_a_truncation_on_a_full_disk_is_completed_or_undone_before_further_appends(nth: int) -> None:
    """The intent to truncate stayed in force, the log accepted appends, and the next start truncated them."""
    disk = new_disk()
    shard = reopen(disk, spec())
    for text in "abc":
        write(shard, text)
    disk.arm(Fault("pwrite", nth, errno.ENOSPC))
    errors: list[BaseException | None] = []
    shard.maintenance.truncations.truncate(shard.logs[1], 2, errors.append)
    for _ in range(3):
        shard.pump()
        shard.tick()
    shard.pump()
    disk.disarm()
    assert len(errors) == 1 and shard.failure is None
    write(shard, "d")
    wanted = ["a", "b", "d"] if errors == [None] else ["a", "b", "c", "d"]
    assert values(shard) == wanted
    for image in (lost(disk), disk.kill()):
        assert values(reopen_and_finish(image, spec())) == wanted


def test_a_segment_replaced_by_a_truncation_does_not_return_when_its_copy_expires() -> None:
    disk = new_disk()
    shard = reopen(disk, spec())
    for text in "abcd":
        write(shard, text)
    truncate(shard, 2)
    shard.maintenance.starts.delete_before(shard.logs[1], 2)
    shard.pump()
    write(shard, "e")
    for image in [lost(disk), *(disk.power_cut(Random(n)) for n in range(200))]:
        assert values(reopen_and_finish(image, spec())) == ["e"]


def test_a_compacted_log_truncated_into_a_gap_keeps_its_end_after_a_crash() -> None:
    """No record was left before the truncation, and the log was reported as damaged or started again at 0."""
    disk = new_disk()
    settings: dict[str, Any] = {"segment_size": 100, "cleanup_policy": "compact"}
    shard = reopen(disk, spec(**settings))
    for text in "abcd":
        write(shard, text, size=60)
    shard.maintenance.compact(shard.logs[1], lambda result, error: None)
    shard.pump()
    assert values(shard) == ["c", "d"]
    images = every_cut(disk)
    truncate(shard, 2)
    disk.before = None
    for image in [*images, disk.kill(), lost(disk)]:
        again = reopen_and_finish(image, spec(**settings))
        assert values(again) in ([], ["c", "d"])
        ends = again.logs[1].visible_end
        assert ends == (4 if values(again) else 2)
        assert reopen_and_finish(lost(image), spec(**settings)).logs[1].visible_end == ends


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("segment_size", [100, 300, 4000])
def test_a_log_truncated_into_a_gap_accepts_appends_after_a_crash_and_reopens(offset: int, segment_size: int) -> None:
    """Only the intent to truncate held the end of the log. The last segment ended at its last record, or at 0, so once
    the intent was withdrawn, the next start with a later segment found a gap between the two."""
    settings: dict[str, Any] = {"segment_size": segment_size, "cleanup_policy": "compact"}
    disk = new_disk()
    shard = reopen(disk, spec(**settings))
    for text in "abcd":
        write(shard, text, size=60)
    shard.logs[1].tail.roll(4)
    shard.maintenance.compact(shard.logs[1], lambda result, error: None)
    shard.pump()
    write(shard, "e", size=60)
    checkpoint(shard)
    images = every_cut(disk)
    truncate(shard, offset)
    disk.before = None
    for image in [*images, disk.kill(), lost(disk)]:
        again = reopen_and_finish(image, spec(**settings))
        assert again.logs[1].visible_end in (offset, 5)
        assert_appends_continue(again, settings)


@pytest.mark.parametrize("second", [2, 3, 4])
def test_a_log_truncated_into_a_gap_can_be_truncated_again(second: int) -> None:
    """The copy that the second truncation writes has the gap inside or at its end."""
    settings: dict[str, Any] = {"segment_size": 4000, "cleanup_policy": "compact"}
    disk = new_disk()
    shard = reopen(disk, spec(**settings))
    for key, text in (("x", "a"), ("y", "b"), ("y", "c"), ("y", "d")):
        append(shard, key, text)
    shard.logs[1].tail.roll(4)
    shard.maintenance.compact(shard.logs[1], lambda result, error: None)
    shard.pump()
    assert values(shard) == ["a", "d"]
    truncate(shard, 2)
    for text in "efg":
        append(shard, text, text)
    assert values(shard) == ["a", "e", "f", "g"]
    images = every_cut(disk)
    truncate(shard, second)
    disk.before = None
    for image in [*images, disk.kill(), lost(disk)]:
        again = reopen_and_finish(image, spec(**settings))
        found = (again.logs[1].visible_end, values(again))
        assert found in ((second, ["a", *"efg"[: second - 2]]), (5, ["a", "e", "f", "g"]))
        assert_appends_continue(again, settings)


def assert_appends_continue(shard: Shard, settings: dict[str, Any]) -> None:
    """Appends continue at the end of the log, also after power cuts and a clean stop."""
    end, before = shard.logs[1].visible_end, values(shard)
    write(shard, "x")
    for stops_cleanly in (False, True):
        if stops_cleanly:
            shard.close()
        for _ in range(2):
            assert isinstance(shard.disk, SimulatedDisk)
            shard = reopen_and_finish(lost(shard.disk), spec(**settings))
            assert values(shard) == [*before, "x"] and shard.logs[1].visible_end == end + 1


def append(shard: Shard, key: str, text: str) -> None:
    ticket = shard.logs[1].append(codec.build([(key.encode(), text.encode(), (), 1)]))
    shard.pump()
    assert ticket.done and ticket.error is None


@pytest.mark.parametrize("offset", [2, 3])
def test_a_leased_segment_does_not_return_after_a_truncation(offset: int) -> None:
    """Compaction had replaced the segment but kept its file, and the truncated log reused the name for its next one."""
    settings: dict[str, Any] = {"segment_size": 100, "cleanup_policy": "compact"}
    disk = new_disk()
    shard = reopen(disk, spec(**settings))
    for text in "abcd":
        append(shard, text, text.ljust(60, "."))
    log, maintenance = shard.logs[1], shard.maintenance
    maintenance.leases.take({(1, s.base, s.generation): s for s in log.segments}, 1 << 60, "reader")
    log.settings = spec(cleanup_policy="compact").settings  # four segments fit into one now
    maintenance.compact(log, lambda result, error: None)
    shard.pump()
    assert len(log.segments) == 2
    truncate(shard, offset)
    append(shard, "e", "e")
    wanted = [*"abcd"[:offset], "e"]
    assert values(shard) == wanted
    for image in (disk.kill(), lost(disk)):
        assert values(reopen_and_finish(image, spec(**settings))) == wanted
    maintenance.leases.give_back("reader")
    maintenance.sweep()
    shard.pump()
    assert values(shard) == wanted
    assert values(reopen_and_finish(lost(disk), spec(**settings))) == wanted


def test_a_pin_set_during_retention_holds_once_it_is_confirmed() -> None:
    """The pin was set before the new start was durable, and retention still moved the start past it."""
    disk = new_disk()
    settings: dict[str, Any] = {"segment_size": 100, "retention_bytes": 0}
    shard = reopen(disk, spec(**settings))
    for text in "abcd":
        write(shard, text, size=60)
    log = shard.logs[1]
    images = every_cut(disk)
    shard.maintenance.starts.apply_retention(log, 0)
    log.set_pin("job", 1)
    pin = shard.group()
    pin.put("pins", b"job", b"1")
    pin.commit()
    shard.pump()
    disk.before = None
    assert log.start_offset == 1 and values(shard) == ["b", "c", "d"]
    for image in [*images, disk.kill(), lost(disk)]:
        again = reopen(image, spec(**settings))
        if again.state.get("pins", b"job") is not None:
            assert values(again)[-3:] == ["b", "c", "d"]
    log.set_pin("job", None)
    shard.maintenance.starts.apply_retention(log, 0)
    shard.maintenance.starts.delete_before(log, 2)
    log.set_pin("late", 1)
    shard.pump()
    assert values(shard) == ["c", "d"], "a pin does not prevent a deletion on request"
    assert values(reopen(lost(disk), spec(**settings))) == ["c", "d"]


@pytest.mark.parametrize("nth", range(1, 8))
def test_on_a_full_disk_retention_removes_pinned_records_only_if_the_pin_was_refused(nth: int) -> None:
    disk = new_disk()
    settings: dict[str, Any] = {"segment_size": 100, "retention_bytes": 0}
    shard = reopen(disk, spec(**settings))
    for text in "abcd":
        write(shard, text, size=60)
    log = shard.logs[1]
    shard.maintenance.starts.apply_retention(log, 0)
    shard._deferred.popleft()()  # its round is in flight, so later changes are in another round
    log.set_pin("job", 1)
    pin = shard.group()
    pin.put("pins", b"job", b"1")
    ticket = pin.commit()
    disk.arm(Fault("pwrite", nth, errno.ENOSPC))
    for _ in range(3):
        shard.pump()
        shard.tick()
    shard.pump()
    disk.disarm()
    assert shard.failure is None
    if ticket.error is None:
        assert values(shard)[-3:] == ["b", "c", "d"]
    start = log.start_offset
    for image in (disk.kill(), lost(disk)):
        again = reopen(image, spec(**settings))
        assert again.logs[1].start_offset == start and values(again) == values(shard)
