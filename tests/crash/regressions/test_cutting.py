"""Bugs that the crash tests found in truncation, retention and compaction, each in a few lines that show it."""

import errno
from random import Random
from typing import Any

import pytest

from headrace.log.shard import Shard
from headrace.record import codec
from tests.crash.shards import checkpoint, every_cut, finished, lost, new_disk, reopen, spec, truncate, values, write
from tests.crash.simdisk import Fault


def test_a_truncated_log_is_not_called_damaged_by_an_old_slot_nor_comes_back() -> None:
    """The slot still told the former end; and names unlinked before a kill came back with a later cut."""
    disk = new_disk()
    shard = reopen(disk, spec(segment_size=100))
    for text in "abcd":
        write(shard, text, size=60)
    images = every_cut(disk)
    truncate(shard, 2)
    disk.before = None
    for image in [*images, disk.kill(), lost(disk)]:
        again = finished(image, spec(segment_size=100))
        found = values(again)
        assert found in (["a", "b"], ["a", "b", "c", "d"])
        assert values(finished(lost(image), spec(segment_size=100))) == found


def test_a_log_cut_back_to_a_segments_edge_keeps_its_sealed_segments_known() -> None:
    """Without an active segment all of them were scanned as if never synced, and compacted ones called torn."""
    disk = new_disk()
    settings = {"segment_size": 100, "cleanup_policy": "compact"}
    shard = reopen(disk, spec(**settings))
    for text in "abcd":
        write(shard, text, size=60)
    results: list[object] = []
    shard.maintenance.compact(shard.logs[1], lambda result, error: results.append(error))
    shard.pump()
    assert results == [None] and values(shard) == ["c", "d"]
    images = every_cut(disk)
    truncate(shard, 3)
    assert values(finished(disk.kill(), spec(**settings))) == ["c"]
    for image in images:
        again = finished(image, spec(**settings))
        assert values(again) in (["c"], ["c", "d"])
        assert values(finished(lost(image), spec(**settings))) == values(again)


def test_a_segment_that_retention_removed_may_come_back_alone() -> None:
    """One before the start, those between it and the start gone: it was taken for the log's torn end."""
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


def test_two_moves_of_a_logs_start_that_are_under_way_together_never_move_it_back() -> None:
    disk = new_disk()
    shard = reopen(disk, spec(segment_size=100))
    for text in "abcd":
        write(shard, text, size=60)
    for offset in (3, 1):
        shard.maintenance.starts.delete_before(shard.logs[1], offset)
    shard.pump()
    assert values(shard) == ["d"]
    assert values(reopen(lost(disk), spec(segment_size=100))) == ["d"]


def test_what_the_journal_proved_before_a_truncation_is_no_evidence_after_it() -> None:
    """The end of a direct append rode in the entry of the truncation's own intention."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    write(shard, "b", size=1000)
    truncate(shard, 1)
    assert values(finished(lost(disk), spec())) == ["a"]


@pytest.mark.parametrize("nth", range(1, 16))
def test_a_truncation_that_meets_a_full_disk_is_done_or_undone_before_anything_is_appended(nth: int) -> None:
    """The intention stayed in force, the log took appends, and the next start cut them off."""
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
        assert values(finished(image, spec())) == wanted


def test_a_segment_that_a_truncation_replaced_does_not_come_back_when_its_copy_expires() -> None:
    disk = new_disk()
    shard = reopen(disk, spec())
    for text in "abcd":
        write(shard, text)
    truncate(shard, 2)
    shard.maintenance.starts.delete_before(shard.logs[1], 2)
    shard.pump()
    write(shard, "e")
    for image in [lost(disk), *(disk.power_cut(Random(n)) for n in range(200))]:
        assert values(finished(image, spec())) == ["e"]


def test_cutting_a_compacted_log_back_into_a_gap_keeps_its_end_through_a_crash() -> None:
    """Nothing was left before the cut, and the log was called damaged, or began again at 0."""
    disk = new_disk()
    settings = {"segment_size": 100, "cleanup_policy": "compact"}
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
        again = finished(image, spec(**settings))
        assert values(again) in ([], ["c", "d"])
        ends = again.logs[1].visible_end
        assert ends == (4 if values(again) else 2)
        assert finished(lost(image), spec(**settings)).logs[1].visible_end == ends


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("segment_size", [100, 300, 4000])
def test_a_log_cut_back_into_a_gap_takes_appends_after_a_crash_and_is_whole_after_further_starts(
    offset: int, segment_size: int
) -> None:
    """The end was known to the intention alone: the segment before it ended at its own last record, or at 0 without
    one, and when the intention was withdrawn the first start with a segment behind it found a gap between the two."""
    settings = {"segment_size": segment_size, "cleanup_policy": "compact"}
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
        again = finished(image, spec(**settings))
        assert again.logs[1].visible_end in (offset, 5)
        assert_it_goes_on(again, settings)


@pytest.mark.parametrize("second", [2, 3, 4])
def test_a_log_that_was_cut_back_into_a_gap_can_be_cut_back_again(second: int) -> None:
    """The copy that the second cut makes has the gap inside it, or at its end."""
    settings = {"segment_size": 4000, "cleanup_policy": "compact"}
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
        again = finished(image, spec(**settings))
        found = (again.logs[1].visible_end, values(again))
        assert found in ((second, ["a", *"efg"[: second - 2]]), (5, ["a", "e", "f", "g"]))
        assert_it_goes_on(again, settings)


def assert_it_goes_on(shard: Shard, settings: dict[str, Any]) -> None:
    """What is written next is behind what is there, after power cuts and a clean stop, too."""
    end, there = shard.logs[1].visible_end, values(shard)
    write(shard, "x")
    for stop in (lambda shard: None, lambda shard: shard.close()):
        stop(shard)
        for _ in range(2):
            shard = finished(lost(shard.disk), spec(**settings))
            assert values(shard) == [*there, "x"] and shard.logs[1].visible_end == end + 1


def append(shard: Shard, key: str, text: str) -> None:
    ticket = shard.logs[1].append(codec.build([(key.encode(), text.encode(), (), 1)]))
    shard.pump()
    assert ticket.done and ticket.error is None


@pytest.mark.parametrize("offset", [2, 3])
def test_a_segment_that_a_reader_holds_does_not_come_back_behind_a_cut(offset: int) -> None:
    """Compaction had replaced it, and its file was kept: the cut log began its next segment under the same name."""
    settings = {"segment_size": 100, "cleanup_policy": "compact"}
    disk = new_disk()
    shard = reopen(disk, spec(**settings))
    for text in "abcd":
        append(shard, text, text.ljust(60, "."))
    log, maintenance = shard.logs[1], shard.maintenance
    maintenance.leases.take({(1, s.base, s.generation): s for s in log.segments}, 1 << 60, "reader")
    log.settings = spec(cleanup_policy="compact").settings  # what is four segments now fits one
    maintenance.compact(log, lambda result, error: None)
    shard.pump()
    assert len(log.segments) == 2
    truncate(shard, offset)
    append(shard, "e", "e")
    wanted = [*"abcd"[:offset], "e"]
    assert values(shard) == wanted
    for image in (disk.kill(), lost(disk)):
        assert values(finished(image, spec(**settings))) == wanted
    maintenance.leases.give_back("reader")
    maintenance.sweep()
    shard.pump()
    assert values(shard) == wanted
    assert values(finished(lost(disk), spec(**settings))) == wanted


def test_a_pin_set_while_retention_is_under_way_holds_from_when_it_is_confirmed() -> None:
    """The start that retention had asked for went past the pin, which was set before that was durable."""
    disk = new_disk()
    settings = {"segment_size": 100, "retention_bytes": 0}
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
    assert values(shard) == ["c", "d"], "what somebody deletes is not retention's"
    assert values(reopen(lost(disk), spec(**settings))) == ["c", "d"]


@pytest.mark.parametrize("nth", range(1, 8))
def test_retention_that_meets_a_pin_and_a_full_disk_takes_what_is_pinned_only_if_the_pin_was_refused(nth: int) -> None:
    disk = new_disk()
    settings = {"segment_size": 100, "retention_bytes": 0}
    shard = reopen(disk, spec(**settings))
    for text in "abcd":
        write(shard, text, size=60)
    log = shard.logs[1]
    shard.maintenance.starts.apply_retention(log, 0)
    shard._deferred.popleft()()  # its round is under way, so that what comes now is in another
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
