"""Key compaction in passes, for logs with more keys than one pass holds in memory."""

import errno
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import Conflict, LogClosed
from headrace.log.disk.disk import RealDisk
from headrace.log.log import Log
from headrace.log.read.external import aborted_ranges
from headrace.log.segments.replacement import Rewritten
from headrace.log.segments.source import LocalFile
from headrace.log.settings import StreamSettings
from headrace.log.shard import Shard
from headrace.record import codec
from headrace.record.codec import is_commit as is_commit_marker
from headrace.record.types import BatchInfo, Buffer
from tests.crash.simdisk import Fault, SimulatedDisk
from tests.log.helpers import Bench, batch, records

DAY_MS = 24 * 3600 * 1000


class Hasty(RealDisk):
    """No crash is simulated here, so the thousands of small appends need no syncs."""

    no_room_for: str | None = None  # suffix of file names

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, readonly: bool = False) -> int:
        if create and self.no_room_for is not None and path.endswith(self.no_room_for):
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return super().open(path, create=create, exclusive=exclusive, readonly=readonly)

    def sync(self, file: int) -> None:
        pass


class SmallPasses(Bench):
    def open(self, *logs: int, **options: Any) -> Shard:
        shard = super().open(*logs, **options)
        shard.maintenance.compactor.keys_max = 10
        return shard


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return SmallPasses(tmp_path, Hasty())


def append(bench: Bench, data: bytearray) -> int:
    """Its first offset."""
    ticket = bench.shard.log(1).append(data)
    bench.shard.pump()
    assert ticket.error is None
    return bench.shard.log(1).next_offset - codec.scan(data)[0].count


def compact(bench: Bench) -> Rewritten | None:
    ended: list[tuple[Rewritten | None, BaseException | None]] = []
    bench.shard.maintenance.compact(bench.shard.log(1), lambda gained, error: ended.append((gained, error)))
    bench.shard.pump()
    [(gained, error)] = ended
    if error is not None:
        raise error
    return gained


def keyed(bench: Bench, keys: Callable[[int], int], count: int) -> None:
    for number in range(count):
        append(bench, batch([b"v%05d" % number * 10], keys=[b"k%d" % keys(number)]))


def batches_of(log: Log) -> list[tuple[Buffer, BatchInfo]]:
    found: list[tuple[Buffer, BatchInfo]] = []
    offset = log.start_offset
    while offset < log.visible_end:
        chunk = log.read(offset, 1 << 20)
        found += [(chunk.data, info) for info in codec.scan(chunk.data)]
        offset = chunk.next_offset
    return found


def sealed_keys(log: Log) -> list[bytes | None]:
    end = log.segments[-1].base
    return [record.key for record in records(log) if record.offset < end]


def test_keys_beyond_the_limit_of_one_pass_are_compacted_too(bench: Bench) -> None:
    """Regression: every pass began with the first segment, so segments beyond the key limit were never compacted."""
    bench.open(stream=StreamSettings(segment_size=600))
    keyed(bench, lambda number: number, 40)
    keyed(bench, lambda number: 100 + number % 25, 100)
    sealed = bench.shard.log(1).segments[:-1]
    before = sum(s.records for s in sealed), sum(s.size for s in sealed)
    gained = compact(bench)
    found = sealed_keys(bench.shard.log(1))
    assert len(found) == len(set(found)) >= 60
    assert gained is not None and (gained.records_before, gained.bytes_before) == before
    assert gained.records_after == len(found)
    assert gained.bytes_after == sum(s.size for s in bench.shard.log(1).segments[:-1])
    bench.shard.close()


@pytest.mark.parametrize("share", [0.5, 1.5], ids=["while it learns", "while it rewrites"])
def test_a_shard_that_stops_does_not_wait_for_the_end_of_a_compaction(
    bench: Bench, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.open(stream=StreamSettings(segment_size=600))
    keyed(bench, lambda number: number % 3, 100)
    files, log = bench.shard.files, bench.shard.log(1)
    segments, reads, last = log.segments, 0, int(share * len(log.segments))

    def read(*given: Any) -> Buffer:
        nonlocal reads
        reads += 1
        files.is_ending = reads == last  # as Shard.join sets it
        return really(*given)

    really = LocalFile.read
    monkeypatch.setattr(LocalFile, "read", read)
    with pytest.raises(LogClosed):
        compact(bench)
    assert reads == last and log.segments[-1] is segments[-1]
    bench.shard.close()
    assert files.is_ending


def test_a_pass_does_not_learn_compacted_segments_again(bench: Bench) -> None:
    """The next pass begins where the last one ended; a restart forgets that position."""
    bench.open(stream=StreamSettings(segment_size=600))
    log = bench.shard.log(1)
    keyed(bench, lambda number: number % 30, 60)
    compact(bench)
    first = log.compacted_until
    assert log.segments[-1].base >= first > 0
    compact(bench)
    assert log.compacted_until == first
    keyed(bench, lambda number: number % 30, 60)
    compact(bench)
    assert log.compacted_until > first
    found = sealed_keys(log)
    assert len(found) == len(set(found)) == 30
    bench.shard.close()
    bench.open(stream=StreamSettings(segment_size=600))
    assert bench.shard.log(1).compacted_until == 0
    bench.shard.close()


def test_records_rewritten_after_a_truncation_are_compacted(bench: Bench) -> None:
    bench.open(stream=StreamSettings(segment_size=600))
    log = bench.shard.log(1)
    keyed(bench, lambda number: number % 30, 60)
    compact(bench)
    bench.shard.maintenance.truncations.truncate(log, 20, lambda error: None)
    bench.shard.pump()
    assert log.next_offset == log.compacted_until == 20
    keyed(bench, lambda number: number % 5, 60)
    compact(bench)
    found = sealed_keys(log)
    assert len(found) == len(set(found))
    bench.shard.close()


def test_an_interrupted_pass_does_not_advance_compaction(bench: Bench) -> None:
    bench.open(stream=StreamSettings(segment_size=600))
    log = bench.shard.log(1)
    keyed(bench, lambda number: number % 30, 60)
    bench.shard.maintenance.busy.add(log.id)
    with pytest.raises(Conflict):
        compact(bench)
    assert log.compacted_until == 0
    bench.shard.maintenance.busy.discard(log.id)
    compact(bench)
    assert log.compacted_until > 0
    bench.shard.close()


def shown(log: Log, aborted: Sequence[tuple[int, int, int]]) -> set[int]:
    """The offsets that a Kafka client considers committed, given the aborted transactions: marker, producer, first."""
    coming = sorted((first, producer) for _, producer, first in aborted)
    given_up: set[int] = set()
    offsets: set[int] = set()
    for data, info in batches_of(log):
        while coming and coming[0][0] <= info.last_offset:
            given_up.add(coming.pop(0)[1])
        if info.is_control:
            given_up -= set() if is_commit_marker(data, info) else {info.producer_id}
        elif info.base_offset < log.stable_end and not (info.is_transactional and info.producer_id in given_up):
            offsets |= {record.offset for record in codec.records(data, info.position, info.end)}
    return offsets


@pytest.mark.parametrize("suffix", [".seal.tmp", ".index", ".timeindex"])
def test_a_compaction_that_finds_no_space_leaves_no_files(bench: Bench, suffix: str) -> None:
    """Regression: a file as large as the segments stayed on a disk that was full."""
    disk = bench.disk
    assert isinstance(disk, Hasty)
    bench.open(stream=StreamSettings(segment_size=600))
    keyed(bench, lambda number: number % 5, 30)
    disk.no_room_for = f"-000001{suffix}"
    with pytest.raises(OSError, match="No space"):
        compact(bench)
    assert not list(Path(bench.root, "logs").rglob("*-000001*"))
    disk.no_room_for = None
    compact(bench)
    bench.shard.close()


class Told:
    """The aborted transactions that a broker lists: marker, producer, first offset."""

    def __init__(self, shard: Shard) -> None:
        self.known: list[tuple[int, int, int]] = []
        self.given_up: set[int] = set()  # offsets
        shard.maintenance.aborts.forget = self.forget

    def aborted(self, marker: int, producer: int, offsets: list[int]) -> None:
        self.known.append((marker, producer, offsets[0]))
        self.given_up.update(offsets)

    def forget(self, log: Log, markers: Sequence[int]) -> None:
        self.known = [one for one in self.known if one[0] not in markers]
        assert not shown(log, self.known) & self.given_up, "a forgotten transaction must have no records"


@pytest.mark.parametrize("seed", range(20))
def test_each_key_keeps_its_last_value_despite_writes_between_passes(bench: Bench, seed: int) -> None:
    """With committed, aborted and open transactions, tombstones, and pins."""
    rng = random.Random(seed)
    bench.open(stream=StreamSettings(segment_size=500, tombstone_retention_ms=DAY_MS))
    log = bench.shard.log(1)
    told = Told(bench.shard)
    now = bench.clock.now_ms()
    seen: dict[bytes, tuple[int, bytes | None]] = {}  # the last committed record of each key
    written_by: dict[int, int] = {}
    open_: dict[int, list[tuple[int, bytes, bytes | None]]] = {}
    for _ in range(150):
        what = rng.random()
        producer = rng.choice([-1, -1, 7, 8])
        if what < 0.8:
            rows = []
            for _ in range(rng.randint(1, 4)):
                is_old = rng.random() < 0.5
                value = None if rng.random() < 0.2 else rng.randbytes(20)
                rows.append((b"k%d" % rng.randrange(40), value, (), now - (2 * DAY_MS if is_old else 0)))
            in_transaction: dict[str, Any] = {
                "producer_id": producer,
                "producer_epoch": 0,
                "transactional": producer >= 0,
            }
            first = append(bench, codec.build(rows, **in_transaction))
            written = [(first + at, key, value) for at, (key, value, _, _) in enumerate(rows)]
            written_by |= {offset: producer for offset, _, _ in written}
            if producer < 0:
                seen |= {key: (offset, value) for offset, key, value in written}
            else:
                open_.setdefault(producer, []).extend(written)
                log.set_stable_limit(min(min(rows)[0] for rows in open_.values()))
        elif what < 0.9 and producer in open_:
            is_commit = rng.random() < 0.6
            marker = (b"\0\0" + is_commit.to_bytes(2, "big"), b"\0" * 6, (), now)
            of_it: dict[str, Any] = {"producer_id": producer, "producer_epoch": 0, "transactional": True}
            ended = append(bench, codec.build([marker], control=True, **of_it))
            written = open_.pop(producer)
            if not is_commit:
                told.aborted(ended, producer, [offset for offset, _, _ in written])
            for offset, key, value in written if is_commit else ():
                if offset > seen.get(key, (-1, None))[0]:
                    seen[key] = offset, value
            log.set_stable_limit(min((min(rows)[0] for rows in open_.values()), default=None))
        elif what < 0.95:
            log.pins = {"pin": rng.randrange(log.next_offset + 1)} if rng.random() < 0.5 else {}
        else:
            bench.clock.advance(rng.choice([1, DAY_MS // 1000]))
            compact(bench)
            undecided = {offset for rows in open_.values() for offset, _, _ in rows}
            left = [r for r in records(log) if r.offset not in told.given_up | undecided]
            found = {record.key: (record.offset, record.value) for record in left}
            # Only tombstones may be missing; the values that they deleted must not come back.
            for key, (offset, value) in seen.items():
                assert found.get(key, (offset, None)) == (offset, value), key
            assert set(found) <= set(seen)
            # A read_committed reader sees the same with the remaining markers.
            aborted = aborted_ranges(batches_of(log), log.stable_end)
            for record in left:
                assert not any(
                    producer == written_by.get(record.offset) and first <= record.offset <= last
                    for producer, first, last in aborted
                )
            assert shown(log, told.known) == {record.offset for record in left if record.offset < log.stable_end}
            until = log.compacted_until
            once = [record.key for record in records(log) if record.offset < until]
            assert len(once) == len(set(once)), "a key occurs twice before compacted_until"
    bench.shard.close()


def test_a_transaction_with_more_keys_than_a_pass_holds_is_compacted(bench: Bench) -> None:
    bench.open(stream=StreamSettings(segment_size=600))
    log = bench.shard.log(1)
    for number in range(30):
        rows = [(b"k%d" % (number % 15), b"x" * 50, (), 1000)]
        append(bench, codec.build(rows, producer_id=7, producer_epoch=0, transactional=True))
    marker = [(b"\0\0\0\1", b"\0" * 6, (), 1000)]
    append(bench, codec.build(marker, producer_id=7, producer_epoch=0, transactional=True, control=True))
    keyed(bench, lambda number: number % 20, 60)
    compact(bench)
    found = sealed_keys(log)
    assert len(found) == len(set(found))
    bench.shard.close()


def transactions(bench: Bench, count: int, *, is_commit: bool) -> None:
    """Transactions that each write the same key and end."""
    now = bench.clock.now_ms()
    of_it: dict[str, Any] = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
    for _ in range(count):
        append(bench, codec.build([(b"k", b"x" * 50, (), now)], **of_it))
        marker = (b"\0\0" + is_commit.to_bytes(2, "big"), b"\0" * 6, (), now)
        append(bench, codec.build([marker], control=True, **of_it))


def markers(log: Log) -> list[int]:
    """The offsets of the markers in sealed segments."""
    end = log.segments[-1].base
    return [info.base_offset for _, info in batches_of(log) if info.is_control and info.base_offset < end]


def later(bench: Bench) -> None:
    """Let tombstone_retention pass, and append more to compact."""
    bench.clock.advance(DAY_MS // 1000 + 1)
    keyed(bench, lambda number: 0, 20)
    compact(bench)


IN_TIME = StreamSettings(segment_size=600, tombstone_retention_ms=DAY_MS)


@pytest.mark.parametrize("is_commit", [True, False])
def test_commit_markers_of_empty_transactions_expire_and_abort_markers_wait_for_the_registry(
    bench: Bench, is_commit: bool
) -> None:
    """A stream processor writes ten commit markers per second to a log: it would hold nothing else."""
    bench.open(stream=IN_TIME)
    log = bench.shard.log(1)
    transactions(bench, 30, is_commit=is_commit)
    compact(bench)
    young = sum(info.is_control for _, info in batches_of(log))
    assert young == 30, "every reader must have time to see them"
    later(bench)
    assert len(markers(log)) > 1, "compaction saw those of the last segment for the first time"
    later(bench)
    assert len(markers(log)) == (1 if is_commit else 30)
    if is_commit:
        assert batches_of(log)[0][1].base_offset == markers(log)[0] - 1, "a marker stays with its records"
    bench.shard.close()


def test_an_abort_marker_is_dropped_tombstone_retention_after_its_records(bench: Bench) -> None:
    told: list[list[int]] = []

    def forget(log: Log, gone: Sequence[int]) -> None:
        assert set(gone) <= set(markers(log)), "markers stay until the registry has forgotten their transactions"
        told.append(list(gone))

    bench.open(stream=IN_TIME)
    bench.shard.maintenance.aborts.forget = forget
    transactions(bench, 30, is_commit=False)
    bench.clock.advance(2 * DAY_MS // 1000)
    compact(bench)
    [*sealed] = markers(bench.shard.log(1))
    assert len(sealed) > 20 and not told, "readers of the replaced segments still need them"
    compact(bench)
    assert not told
    bench.kill()
    bench.open(stream=IN_TIME)
    bench.shard.maintenance.aborts.forget = forget
    later(bench)
    assert sorted(marker for some in told for marker in some) == sealed
    assert not set(sealed) & set(markers(bench.shard.log(1)))
    bench.shard.close()


def test_an_abort_marker_stays_while_its_transaction_has_a_record_without_a_key(bench: Bench) -> None:
    bench.open(stream=IN_TIME)
    bench.shard.maintenance.aborts.forget = lambda _log, _gone: None
    of_it: dict[str, Any] = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
    append(bench, codec.build([(None, b"stays", (), 1)], **of_it))
    append(bench, codec.build([(b"\0\0\0\0", b"\0" * 6, (), 1)], control=True, **of_it))
    for _ in range(3):
        later(bench)
    assert markers(bench.shard.log(1)) == [1]
    bench.shard.close()


@pytest.mark.parametrize("suffix", [".log.tmp", ".seal"])
def test_a_compaction_whose_files_cannot_be_synced_fails_alone(suffix: str) -> None:
    """Regression: the failed sync of a seal was remembered like that of a log's file, and the next round, perhaps
    minutes later, stopped the broker."""
    disk = SimulatedDisk()
    bench = Bench("/data", disk)
    bench.open(stream=StreamSettings(segment_size=400, cleanup_policy="compact"))
    keyed(bench, lambda number: 1, 10)
    shard = bench.shard
    shard.checkpoint()
    shard.pump()
    before = disk.listdir("/data/logs/1-t")
    disk.arm(Fault("sync", 1, errno.EIO, within=suffix))
    with pytest.raises(OSError, match="Input/output error"):
        compact(bench)
    assert disk.listdir("/data/logs/1-t") == before
    append(bench, batch([b"later"], keys=[b"k"]))
    assert shard.failure is None
    compact(bench)
    assert disk.listdir("/data/logs/1-t") != before
    shard.close()
