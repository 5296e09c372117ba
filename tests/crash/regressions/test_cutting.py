"""Bugs that the crash tests found in truncation, retention and compaction, each in a few lines that show it."""

import errno
from random import Random

import pytest

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
    shard.maintenance.delete_before(shard.logs[1], 4)
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
        shard.maintenance.delete_before(shard.logs[1], offset)
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


@pytest.mark.parametrize("nth", range(1, 12))
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
    shard.maintenance.delete_before(shard.logs[1], 2)
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
