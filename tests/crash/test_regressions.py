"""Every bug the crash tests found, by name, in as few lines as it takes to see it."""

import errno
from random import Random

import pytest

from headrace.clock import ManualClock
from headrace.errors import DiskFull, StorageError
from headrace.log.log import LogSpec
from headrace.log.settings import LogSettings, StreamSettings
from headrace.log.shard import Shard
from headrace.record import codec
from tests.crash.simdisk import Fault, SimulatedDisk

ROOT = "/srv/data"
SETTINGS = LogSettings(journal_file_bytes=8192, journal_files=3, inline_bytes_max=600, disk_reserve=0)
STREAM = StreamSettings(segment_size=4000, index_interval=256, retention_ms=-1)


def new_disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.mkdir("/srv")
    disk.sync_dir("/")
    return disk


def spec(log_id: int = 1, **settings: object) -> LogSpec:
    return LogSpec(log_id, f"log{log_id}", StreamSettings(**{**_fields(STREAM), **settings}))  # type: ignore[arg-type]


def _fields(settings: StreamSettings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


def reopen(disk: SimulatedDisk, *specs: LogSpec, settings: LogSettings = SETTINGS) -> Shard:
    shard, _ = Shard.open(ROOT, settings, logs=specs, clock=ManualClock(), disk=disk)
    return shard


def batch(text: str, size: int = 0) -> bytearray:
    return codec.build([(b"key", text.encode().ljust(size, b"."), (), 1)])


def values(shard: Shard, log_id: int = 1) -> list[str]:
    log = shard.logs[log_id]
    assert log.damage is None
    found, offset = [], log.start_offset
    while offset < log.visible_end:
        chunk = log.read(offset)
        found += [bytes(r.value or b"").rstrip(b".").decode() for r in codec.records(chunk.data)]
        offset = chunk.next_offset
    return found


def lost(disk: SimulatedDisk) -> SimulatedDisk:
    """The worst power cut: nothing unsynced is left. There is room on it again."""
    image = disk.power_cut(Random(0), "lost")
    image.capacity = 1 << 50
    return image


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


def write(shard: Shard, text: str, log_id: int = 1, size: int = 0) -> None:
    ticket = shard.logs[log_id].append(batch(text, size))
    shard.pump()
    assert ticket.done and ticket.error is None


def checkpoint(shard: Shard) -> None:
    shard.checkpoint(lambda error: None)
    shard.pump()


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


def test_a_direct_append_does_not_take_a_folder_for_synced_that_a_checkpoint_is_about_to_sync() -> None:
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    shard.checkpoint(lambda error: None)
    assert shard.worker.pump(), "the checkpoint has taken the list of what to sync, and synced nothing yet"
    ticket = shard.logs[1].append(batch("b", 1000))
    while not ticket.done:
        assert shard._deferred or shard.worker.pump()
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


def every_cut(disk: SimulatedDisk, variants: int = 3) -> list[SimulatedDisk]:
    """The list fills with disks a crash could leave before each call that changes this one."""
    images: list[SimulatedDisk] = []

    def before(kind: str, path: str) -> None:
        images.append(disk.kill())
        images.append(lost(disk))
        images.extend(disk.power_cut(Random(len(images) + n)) for n in range(variants))

    disk.before = before
    return images


def truncate(shard: Shard, offset: int) -> None:
    errors: list[BaseException | None] = []
    shard.maintenance.truncate(shard.logs[1], offset, errors.append)
    shard.pump()
    assert errors == [None]


def finished(disk: SimulatedDisk, *specs: LogSpec) -> Shard:
    shard = reopen(disk, *specs)
    shard.pump()  # truncations that were interrupted
    return shard


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


def test_a_checkpoint_does_not_forget_a_round_that_found_no_room_in_its_segment() -> None:
    """The marker included the entry, the journal's file was used again, and the record was nowhere."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    disk.capacity = disk.used
    ticket = shard.logs[1].append(batch("b", 300))
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
    first = shard.logs[1].append(batch("b", 300))
    shard.pump()
    second = shard.logs[1].append(batch("c", 300)) if not shard.is_full else None
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
    shard.maintenance.delete_before(shard.logs[1], 1)
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


@pytest.mark.parametrize("nth", range(1, 12))
def test_a_truncation_that_meets_a_full_disk_is_done_or_undone_before_anything_is_appended(nth: int) -> None:
    """The intention stayed in force, the log took appends, and the next start cut them off."""
    disk = new_disk()
    shard = reopen(disk, spec())
    for text in "abc":
        write(shard, text)
    disk.arm(Fault("pwrite", nth, errno.ENOSPC))
    errors: list[BaseException | None] = []
    shard.maintenance.truncate(shard.logs[1], 2, errors.append)
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


def test_an_async_log_that_lost_a_segment_before_its_sync_does_not_stop_the_shard() -> None:
    """The list of files to sync still named it: no such file was taken for a failing disk."""
    disk = new_disk()
    specs = spec(1, write_mode="async", segment_size=100), spec(2)
    shard = reopen(disk, *specs)
    for text in "abc":
        write(shard, text, size=60)
    shard.maintenance.delete_before(shard.logs[1], 2)
    shard.pump()
    group = shard.group()
    group.append(shard.logs[1], batch("d", 60))
    group.append(shard.logs[2], batch("d", 60))
    ticket = group.commit()
    shard.pump()
    assert ticket.error is None and shard.failure is None
    assert values(shard) == ["c", "d"]


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


def test_the_seal_of_an_unfinished_recovery_does_not_hide_what_lies_behind_it() -> None:
    """Retention had moved the start past the seal, so the segment was dropped with all that followed."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    checkpoint(shard)
    for text in "bcd":
        write(shard, text, size=1000)  # past the journal
    shard.maintenance.delete_before(shard.logs[1], 2)
    shard.pump()
    images = every_cut(disk := disk.kill())
    reopen(disk, spec())
    for image in images:
        assert values(reopen(image, spec()))[-2:] == ["c", "d"]


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
