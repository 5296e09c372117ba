"""Retention, truncation, deletion, compaction."""

import os
from pathlib import Path

import pytest

from headrace.errors import LogClosed, OffsetOutOfRange, Overloaded, StorageFailed
from headrace.log.commit.journal import JournalFull
from headrace.log.maintenance.compactor import runs_of
from headrace.log.maintenance.retention import RetentionLimits, new_start
from headrace.log.read.leases import Key, Leases
from headrace.log.recovery.inspect import Inspector
from headrace.log.segments.segment import Segment
from headrace.log.settings import StreamSettings
from headrace.record import codec
from tests.crash.simdisk import SimulatedDisk
from tests.log.helpers import Bench, batch, records, values

ROLLING = StreamSettings(segment_size=1000)
DAY_MS = 24 * 3600 * 1000


def segment(base: int, end: int, size: int, last_ms: int) -> Segment:
    made = Segment("f", base)
    made.next_offset, made.size, made.max_timestamp, made.records = end, size, last_ms, end - base
    return made


THREE = [segment(0, 10, 100, 1000), segment(10, 20, 100, 2000), segment(20, 30, 100, 3000)]


@pytest.mark.parametrize(
    ("limits", "now_ms", "start"),
    [
        (RetentionLimits(-1, -1, None), 10**9, 0),
        (RetentionLimits(500, -1, None), 2600, 20),
        (RetentionLimits(500, -1, None), 9000, 30),
        (RetentionLimits(-1, 150, None), 0, 20),
        (RetentionLimits(-1, 0, None), 0, 20),
        (RetentionLimits(500, -1, 15), 9000, 10),
        (RetentionLimits(500, -1, 0), 9000, 0),
    ],
)
def test_retention_drops_whole_segments_oldest_first_and_never_a_pinned_one(
    limits: RetentionLimits, now_ms: int, start: int
) -> None:
    assert new_start(THREE, limits, 0, 30, now_ms) == start


def fill(bench: Bench, count: int = 30) -> None:
    for i in range(count):
        bench.append(1, [b"%02d" % i * 50])


def test_retention_by_size_removes_files_and_survives_a_restart(bench: Bench) -> None:
    stream = StreamSettings(segment_size=1000, retention_bytes=2000)
    shard = bench.open(stream=stream)
    fill(bench)
    shard.maintenance.starts.apply_retention(shard.log(1), bench.clock.now_ms())
    shard.pump()
    start = shard.log(1).start_offset
    assert start > 0 and shard.log(1).size_bytes <= 3000
    bench.kill()
    shard = bench.open(stream=stream)
    assert shard.log(1).start_offset == start
    assert values(shard.log(1)) == [b"%02d" % i * 50 for i in range(start, 30)]
    with pytest.raises(OffsetOutOfRange):
        shard.log(1).read(start - 1)
    shard.close()


def test_retention_by_age_drops_even_the_last_segment_and_keeps_the_next_offset(bench: Bench) -> None:
    stream = StreamSettings(segment_size=1000, retention_ms=1000)
    shard = bench.open(stream=stream)
    fill(bench)
    shard.maintenance.starts.apply_retention(shard.log(1), bench.clock.now_ms())
    shard.pump()
    assert (shard.log(1).start_offset, shard.log(1).visible_end) == (30, 30)
    shard.close()
    shard = bench.open(stream=stream)
    bench.append(1, [b"after"])
    assert [record.offset for record in records(shard.log(1))] == [30]
    shard.close()


def test_records_without_a_timestamp_are_as_old_as_their_file(bench: Bench) -> None:
    """Regression: they counted as older than any retention, and were deleted minutes after they were confirmed."""
    shard = bench.open(stream=StreamSettings(segment_size=200, retention_ms=7 * DAY_MS))
    log, now_ms = shard.log(1), bench.clock.now_ms()
    for _ in range(3):
        log.append(codec.build([(None, b"x" * 150, (), -1)], timestamp_ms=-1))
        shard.pump()
    for age_days, segment in zip((8, 6, 8), log.segments, strict=True):
        assert segment.max_timestamp == -1
        os.utime(segment.path(), ns=(0, (now_ms - age_days * DAY_MS) * 1_000_000))
    shard.maintenance.starts.apply_retention(log, now_ms)
    shard.pump()
    assert log.start_offset == 1
    shard.close()


def test_a_segment_ages_however_often_the_broker_is_restarted(bench: Bench) -> None:
    stream = StreamSettings(segment_age_ms=7 * DAY_MS, retention_ms=7 * DAY_MS)
    for day in range(16):
        shard = bench.open(stream=stream)
        ticket = shard.log(1).append(batch([b"day %d" % day], timestamp=bench.clock.now_ms()))
        shard.pump()
        assert ticket.error is None
        shard.maintenance.starts.apply_retention(shard.log(1), bench.clock.now_ms())
        shard.close()
        bench.clock.advance(DAY_MS / 1000)
    shard = bench.open(stream=stream)
    assert [segment.base for segment in shard.log(1).segments] == [8]
    assert values(shard.log(1)) == [b"day %d" % day for day in range(8, 16)]
    shard.close()


@pytest.mark.parametrize("first_ms", [-1, 0, 10**15])
def test_a_segment_without_a_usable_first_timestamp_ages_from_the_start(bench: Bench, first_ms: int) -> None:
    shard = bench.open()
    shard.log(1).append(batch([b"first"], timestamp=first_ms))
    shard.close()
    shard = bench.open()
    bench.append(1, [b"second"])
    assert [segment.base for segment in shard.log(1).segments] == [0]
    shard.close()


def test_a_pin_prevents_retention(bench: Bench) -> None:
    shard = bench.open(stream=StreamSettings(segment_size=1000, retention_bytes=0))
    fill(bench)
    shard.log(1).set_pin("job", 12)
    shard.maintenance.starts.apply_retention(shard.log(1), bench.clock.now_ms())
    shard.pump()
    assert shard.log(1).start_offset <= 12
    assert shard.log(1).read(12).data
    shard.log(1).set_pin("job", None)
    shard.maintenance.starts.apply_retention(shard.log(1), bench.clock.now_ms())
    shard.pump()
    assert shard.log(1).start_offset > 12
    shard.close()


def test_a_leased_segment_keeps_its_file_until_it_is_released(bench: Bench) -> None:
    shard = bench.open(stream=StreamSettings(segment_size=1000, retention_bytes=0))
    fill(bench)
    first = shard.log(1).segments[0]
    assert first.state == "sealed"
    key = (1, first.base, first.generation)
    holder = shard.maintenance.leases.take({key: first}, bench.clock.monotonic() + 60)
    shard.maintenance.starts.apply_retention(shard.log(1), bench.clock.now_ms())
    shard.pump()
    assert shard.log(1).start_offset > 0 and Path(first.path()).exists()
    assert first.state == "retired" and shard.log(1).segments[-1].state == "active"
    shard.maintenance.leases.give_back(holder)
    shard.maintenance.sweep()
    shard.pump()
    assert not Path(first.path()).exists() and first.state == "deleted"
    shard.close()


def test_confirms_do_not_wait_for_the_removal_of_files(bench: Bench) -> None:
    """Regression: removing 256 MB takes a tenth of a second, so a topic of a hundred gigabytes stopped all others for
    half a minute."""
    shard = bench.open(1, 2, 3, stream=StreamSettings(segment_size=1000, retention_bytes=0))
    fill(bench)
    doomed = Path(shard.log(1).tail.folder + ".deleted")
    for number in range(20):
        bench.append(3, [b"%02d" % number * 50])
    first = shard.log(3).segments[0]
    shard.delete_log(1)
    shard.maintenance.starts.apply_retention(shard.log(3), bench.clock.now_ms())
    ticket = shard.log(2).append(batch([b"confirmed"]))
    lane, _keeper = shard._inline
    while shard._deferred or lane.pump():
        while shard._deferred:
            shard._deferred.popleft()()
    assert ticket.done and ticket.error is None and shard.log(3).start_offset > 0
    assert list(doomed.iterdir()) and Path(first.path()).exists()
    shard.pump()
    assert not doomed.exists() and not Path(first.path()).exists()
    shard.close()


def test_retiring_many_segments_takes_linear_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter retention may drop most of a hundred thousand segments: comparing each pair would stop the broker."""
    shard = bench.open(stream=StreamSettings(segment_size=100, retention_bytes=0))
    fill(bench)
    compared: list[Segment] = []

    def is_same(one: Segment, other: object) -> bool:
        compared.append(one)
        return one is other

    monkeypatch.setattr(Segment, "__eq__", is_same)
    shard.maintenance.starts.apply_retention(shard.log(1), bench.clock.now_ms())
    shard.pump()
    assert shard.log(1).start_offset == 30 and not compared
    shard.close()


def test_a_new_lease_of_a_holder_replaces_its_previous_one() -> None:
    """A stream that plans batch after batch must not keep an hour of files that it has already read."""
    leases = Leases()
    one, two, three = (1, 0, 0), (1, 100, 0), (1, 200, 0)
    segments = {key: Segment("logs", key[1], key[2]) for key in (one, two, three)}

    def some(*keys: Key) -> dict[Key, Segment]:
        return {key: segments[key] for key in keys}

    leases.take(some(one, two), 1000, "stream")
    leases.take(some(two), 500, "another")
    leases.take(some(two), 700)
    assert leases.held(0) == {one, two}
    assert leases.segment(one, 999) is segments[one] and leases.segment(one, 1000) is None
    leases.take(some(three), 1100, "stream")
    assert leases.held(0) == {two, three}, "another holder has leased the second one"
    assert leases.held(600) == {two, three} and leases.held(800) == {three}
    leases.take({}, 2000, "stream")
    assert leases.held(800) == set(), "an empty lease gives everything back"
    leases.take(some(one), 1000, "stream")
    assert leases.held(1000) == set(), "the lease has expired"


@pytest.mark.parametrize("offset", [0, 1, 7, 8, 29, 30])
def test_truncation_drops_records_from_the_offset_on_durably(bench: Bench, offset: int) -> None:
    shard = bench.open(stream=ROLLING)
    for i in range(0, 30, 3):
        bench.append(1, [b"%02d" % n * 50 for n in (i, i + 1, i + 2)])  # so that most offsets lie inside a batch
    done: list[BaseException | None] = []
    shard.maintenance.truncations.truncate(shard.log(1), offset, done.append)
    with pytest.raises(Overloaded):
        shard.log(1).append(batch([b"meanwhile"]))
    shard.pump()
    assert done == [None]
    bench.append(1, [b"next"])
    bench.kill()
    shard = bench.open(stream=ROLLING)
    assert values(shard.log(1)) == [*(b"%02d" % i * 50 for i in range(offset)), b"next"]
    assert not bench.report.damaged
    shard.close()


def test_compaction_keeps_the_last_value_of_each_key_at_its_offset(bench: Bench) -> None:
    stream = StreamSettings(segment_size=600, tombstone_retention_ms=0)
    shard = bench.open(stream=stream)
    log = shard.log(1)
    for i in range(30):
        value = b"" if i % 7 == 0 else b"v%02d" % i * 10
        shard.log(1).append(batch([value], keys=[b"k%d" % (i % 4)]))
        shard.pump()
    sealed_end = log.segments[-1].base
    latest = {record.key: record for record in records(log) if record.offset < sealed_end}
    behind = [record for record in records(log) if record.offset >= sealed_end]
    shard.maintenance.compact(log, lambda result, error: None)
    shard.pump()
    kept = records(log)
    assert [r for r in kept if r.offset < sealed_end] == sorted(latest.values(), key=lambda r: r.offset)
    assert kept[-len(behind) :] == behind
    bench.kill()
    assert records(bench.open(stream=stream).log(1)) == kept
    bench.shard.close()


def test_a_reader_inside_a_segment_continues_after_its_compaction(bench: Bench) -> None:
    shard = bench.open(stream=StreamSettings(segment_size=2000))
    log = shard.log(1)
    for i in range(40):
        log.append(batch([b"%02d" % i * 30], keys=[b"k%d" % (i % 3)]))
        shard.pump()
    chunk = log.read(0, 1)
    shard.maintenance.compact(log, lambda result, error: None)
    shard.pump()
    rest = records(log, chunk.next_offset)
    assert rest and rest[-1].offset == 39
    shard.close()


def test_a_deleted_log_leaves_no_file_and_its_appends_are_refused(bench: Bench) -> None:
    shard = bench.open(1, 2)
    fill(bench, 3)
    folder = Path(shard.log(1).tail.folder)
    assert folder.exists()
    shard.delete_log(1)
    shard.pump()
    assert not folder.exists()
    bench.kill()
    shard = bench.open(2)
    assert bench.report.strays == []
    shard.close()


def test_verify_finds_a_flipped_bit_that_no_batch_checksum_covers(bench: Bench) -> None:
    """The CRC of a batch does not cover its base offset; only the seal does."""
    bench.open(stream=ROLLING)
    fill(bench)
    bench.shard.close()
    inspector = Inspector(bench.root)
    assert inspector.verify().is_sound
    assert inspector.verify().records == 30
    data = Path(inspector.logs()[0].segments[0].path())
    content = bytearray(data.read_bytes())
    second = 12 + int.from_bytes(content[8:12], "big")
    content[second + 7] ^= 0x40
    data.write_bytes(content)
    report = inspector.verify()
    assert not report.is_sound and data.stem in report.problems[0]
    inspector.close()


def test_reindex_rebuilds_the_indexes(bench: Bench) -> None:
    bench.open(stream=StreamSettings(segment_size=50_000, index_interval=4096))
    for i in range(100):
        bench.append(1, [b"%02d" % i * 700])
    bench.shard.close()
    indexes = {p: p.read_bytes() for p in Path(bench.root).glob("logs/*/*.*index") if p.with_suffix(".seal").exists()}
    assert indexes
    for path in indexes:
        path.write_bytes(b"")
    inspector = Inspector(bench.root)
    assert inspector.reindex() == len(indexes) // 2
    assert {path: path.read_bytes() for path in indexes} == indexes
    inspector.close()


def test_appends_staged_for_a_deleted_log_fail_alone(bench: Bench) -> None:
    shard = bench.open(1, 2)
    fill(bench, 1)
    doomed = shard.log(1).append(batch([b"too late"]))
    group = shard.group()
    group.append(shard.log(1), batch([b"both"]))
    group.append(shard.log(2), batch([b"both"]))
    both = group.commit()
    shard.delete_log(1)
    shard.pump()
    assert isinstance(doomed.error, LogClosed) and both.error is None
    assert values(shard.log(2)) == [b"both"]
    assert shard.failure is None and shard.pending_bytes == 0
    shard.close()


def test_compaction_never_makes_a_segment_larger_than_a_full_one() -> None:
    """Positions in an index have 32 bits, and one segment with all records would overflow them."""
    sizes = [40, 50, 20, 100, 130, 10]
    runs = runs_of([segment(i, i + 1, size, 0) for i, size in enumerate(sizes)], 100)
    assert [[s.size for s in run] for run in runs] == [[40, 50], [20], [100], [130], [10]]


@pytest.fixture
def stuck() -> Bench:
    """A full disk, a log that exceeds its retention, and a round that is only in the journal."""
    disk = SimulatedDisk()
    bench = Bench("/data", disk)
    bench.open(stream=StreamSettings(segment_size=3000, retention_bytes=4000, retention_ms=-1))
    for i in range(12):
        bench.append(1, [b"%d" % i * 1000])
    bench.shard.checkpoint()
    bench.shard.pump()
    disk.capacity = disk.used
    ticket = bench.shard.log(1).append(batch([b"late" * 200]))
    bench.shard.pump()
    assert not ticket.done and bench.shard.committer.is_stuck
    return bench


def test_retention_frees_the_space_that_a_round_waits_for(stuck: Bench) -> None:
    """Regression: retention waited for the round, and the round for retention."""
    log = stuck.shard.log(1)
    ticket = stuck.shard.maintenance.starts.apply_retention(log, stuck.clock.now_ms())
    assert ticket is not None
    stuck.shard.tick()
    stuck.shard.pump()
    assert ticket.done and ticket.error is None and log.start_offset > 0
    stuck.shard.tick()
    stuck.shard.pump()
    assert not stuck.shard.committer.is_stuck and values(log)[-1] == b"late" * 200


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_start_offset_that_overtook_a_stuck_round_survives(stuck: Bench, checkpointed: bool) -> None:
    log = stuck.shard.log(1)
    stuck.shard.maintenance.starts.apply_retention(log, stuck.clock.now_ms())
    stuck.shard.tick()
    stuck.shard.pump()
    if checkpointed:
        stuck.shard.checkpoint()
        stuck.shard.pump()
        assert stuck.shard.journal.sequence - stuck.shard.state.marker.sequence == 2
    assert stuck.shard.committer.is_stuck
    start, expected = log.start_offset, [b"%d" % i * 1000 for i in range(log.start_offset, 12)]
    assert start > 0
    disk = stuck.simulated.kill()
    disk.capacity = 1 << 50
    found = Bench("/data", disk)
    log = found.open(stream=StreamSettings(segment_size=3000)).log(1)
    assert log.damage is None and log.start_offset == start and values(log) == [*expected, b"late" * 200]


def test_more_start_offsets_than_fit_one_entry_overtake_a_round_in_parts(stuck: Bench) -> None:
    """Regression: all at once exceeded a journal file, which was taken for a disk failure."""
    shard, log = stuck.shard, stuck.shard.log(1)
    tickets = [shard.maintenance.starts._move(log, 9) for _ in range(3000)]
    shard.tick()
    shard.pump()
    assert tickets[0].done and not tickets[-1].done
    stuck.simulated.capacity = 1 << 50
    for _ in range(10):
        shard.tick()
        shard.pump()
    assert shard.failure is None
    assert all(ticket.done and ticket.error is None for ticket in tickets) and log.start_offset == 9


@pytest.fixture
def unpassable(stuck: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """In addition, the journal has no space for changes that would overtake the round."""

    def refuse(_changes: object) -> None:
        raise JournalFull

    monkeypatch.setattr(stuck.shard.committer, "commit_changes", refuse)
    return stuck


def test_a_start_offset_that_cannot_overtake_is_staged_once(unpassable: Bench) -> None:
    """Housekeeping repeats the request as long as the disk is full."""
    shard, log = unpassable.shard, unpassable.shard.log(1)
    tickets = set()
    for _ in range(3):
        tickets.add(shard.maintenance.starts.apply_retention(log, unpassable.clock.now_ms()))
        shard.tick()
        shard.pump()
    assert len(shard.staging.pending) == 1
    unpassable.simulated.capacity = 1 << 50
    shard.tick()
    shard.pump()
    [ticket] = tickets
    assert ticket is not None and ticket.done and ticket.error is None and log.start_offset > 0


def test_a_change_that_cannot_overtake_a_round_fails_when_the_broker_stops(unpassable: Bench) -> None:
    """Regression: at that moment it was neither part of the round nor queued behind it."""
    shard = unpassable.shard
    ticket = shard.maintenance.starts.retire_before(shard.log(1), 9)
    shard.tick()
    shard.stop_waiting_for_room()
    shard.pump()
    assert ticket.done and isinstance(ticket.error, StorageFailed)


def test_a_start_offset_that_could_not_overtake_a_round_is_stored_after_it(unpassable: Bench) -> None:
    """The round may have finished by then, with no other change to begin a new one."""
    shard = unpassable.shard
    ticket = shard.maintenance.starts.retire_before(shard.log(1), 9)
    unpassable.simulated.capacity = 1 << 50
    shard.tick()
    shard.pump()
    assert ticket.done and ticket.error is None and shard.scheduler.is_idle


def test_a_start_offset_that_could_not_overtake_is_stored_before_one_for_a_pin(unpassable: Bench) -> None:
    """Regression: it was stored last, and dropped records that the pin needs."""
    shard, log = unpassable.shard, unpassable.shard.log(1)
    shard.maintenance.starts.retire_before(log, 9)
    unpassable.simulated.capacity = 1 << 50
    shard.tick()
    log.set_pin("pin", 0)
    shard.pump()
    shard.tick()
    unpassable.append(1, [b"another round"])
    bench = Bench("/data", unpassable.simulated.kill())
    assert log.start_offset == 0 and bench.open().log(1).start_offset == 0
