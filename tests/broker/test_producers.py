"""Sequences, epochs and transactions of producers in one log: pure, and against a real shard that restarts."""

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.streams.partition import Partition
from headrace.broker.transactions.markers import control_batch
from headrace.broker.transactions.producer_state import IDLE_MS_MAX, PRODUCERS_MAX, PartitionProducers, Snapshot
from headrace.broker.transactions.producers import Producers
from headrace.broker.types.aborted_ranges import Aborted, Aborts
from headrace.errors import Conflict, CorruptLog, InvalidInput, InvalidProducerEpoch, OutOfOrderSequence
from headrace.log.commit.round import Ticket
from headrace.log.settings import StreamSettings
from headrace.record import codec
from headrace.record.types import BatchInfo
from tests.broker.producer_world import append, batch, opened
from tests.log.helpers import Bench, values

LAST = 0x7FFFFFFF


def info(sequence: int, count: int = 1, *, producer: int = 1, epoch: int = 0, transactional: bool = False) -> BatchInfo:
    return BatchInfo(0, 100, 0, count - 1, count, 0, 0, 0x10 if transactional else 0, producer, epoch, sequence, 0)


class Log:
    """Appends what is allowed, as the registry does."""

    def __init__(self) -> None:
        self.state = PartitionProducers()
        self.end = 0

    def append(self, batch: BatchInfo) -> int:
        repeated = self.state.check(batch)
        if repeated is not None:
            return repeated.base_offset
        staged = self.state.staged(batch, Ticket(), self.end, 0)
        base, self.end = self.end, self.end + batch.count
        self.state.stored(batch, staged, base)
        return base


def test_a_transactional_batch_examines_only_producers_with_a_transaction() -> None:
    """There may be ten thousand of them, of a week, and it is asked with every batch."""
    log = Log()
    for producer in range(100):
        log.append(info(0, producer=producer))
    log.append(info(0, producer=1000, transactional=True))
    idle = [log.state.producers[producer] for producer in range(100)]
    for one in idle:
        del one.open_since
    assert log.state.stable_limit == 100
    for one in idle:
        one.open_since = None
    restored = PartitionProducers()
    restored.restore(log.state.snapshot(101, 0, 0))
    assert restored.stable_limit == 100
    for state in (log.state, restored):
        state.ended(1000, 0, 101, commit=True)
        assert state.stable_limit is None


def test_a_repeated_batch_is_found_among_the_last_five() -> None:
    log = Log()
    offsets = [log.append(info(number * 3, 3)) for number in range(8)]
    assert [log.append(info(number * 3, 3)) for number in range(3, 8)] == offsets[3:]
    with pytest.raises(OutOfOrderSequence):
        log.append(info(0, 3))


def test_a_sequence_gap_is_refused_and_the_missing_batch_is_still_accepted() -> None:
    log = Log()
    log.append(info(0))
    with pytest.raises(OutOfOrderSequence):
        log.append(info(2))
    log.append(info(1))
    log.append(info(2))


def test_sequences_wrap_around() -> None:
    log = Log()
    log.append(info(LAST - 1, 2))  # LAST - 1 and LAST
    assert log.append(info(0, 2)) == 2
    assert log.append(info(LAST - 1, 2)) == 0, "still known as a repetition"
    log.append(info(2))


def test_a_batch_may_wrap_in_its_middle() -> None:
    log = Log()
    log.append(info(LAST, 3))  # LAST, 0, 1
    log.append(info(2))


def test_an_old_epoch_is_fenced_and_a_new_one_starts_at_zero() -> None:
    log = Log()
    log.append(info(0, epoch=1))
    with pytest.raises(InvalidProducerEpoch):
        log.append(info(1, epoch=0))
    with pytest.raises(OutOfOrderSequence):
        log.append(info(1, epoch=2))
    log.append(info(0, epoch=2))


def test_a_batch_that_the_disk_refused_may_come_again() -> None:
    state = PartitionProducers()
    first = info(0)
    batch = state.staged(first, Ticket(), 0, 0)
    assert state.check(info(1)) is None, "what follows is judged as if it were there"
    state.refused(first, batch)
    assert state.check(info(0)) is None


def test_an_open_transaction_holds_the_stable_end_until_its_marker() -> None:
    log = Log()
    log.append(info(0, producer=9))
    log.append(info(0, 2, transactional=True))
    log.append(info(0, 2, producer=2, transactional=True))
    assert log.state.stable_limit == 1
    log.state.ended(1, 0, 5, commit=True)
    assert log.state.stable_limit == 3
    log.state.ended(2, 0, 6, commit=False)
    assert log.state.stable_limit is None
    assert log.state.aborted_between(0, 3) == []
    assert log.state.aborted_between(0, 4) == [(2, 3)]
    assert log.state.aborted_between(7, 9) == [], "its marker has passed"


class Compared(int):
    """An offset that counts how often it is looked at."""

    looks = 0

    def __lt__(self, other: int) -> bool:
        Compared.looks += 1
        return int(self) < other

    def __gt__(self, other: int) -> bool:
        Compared.looks += 1
        return int(self) > other


def test_a_read_examines_few_of_many_aborted_transactions() -> None:
    """Every fetch of committed records calls this, as does every other reader of a log from its start."""
    state = PartitionProducers()
    state.restore(Snapshot(20_000, [], [(10 * i + 9, i % 7, Compared(10 * i)) for i in range(2_000)]))
    for start in (0, 10_000, 19_900):
        Compared.looks = 0
        assert [first for _, first in state.aborted_between(start, start + 50)] == [start + 10 * i for i in range(5)]
        assert Compared.looks < 100


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), max_size=30), st.integers(0, 60), st.integers(0, 60))
def test_aborted_transactions_are_found_by_any_range(lives: list[tuple[int, int]], start: int, end: int) -> None:
    """However they overlap, in whatever order they are met, and after those before some offset are forgotten."""
    all_of_them = [Aborted(first + length, number, first) for number, (first, length) in enumerate(lives)]
    met = Aborts()
    for one in all_of_them:
        met.add(one)
    for aborts in (met, Aborts(sorted(all_of_them))):
        aborts.forget_before(start // 2)
        assert aborts.between(start, end) == sorted(
            one for one in all_of_them if one.last_offset >= start and one.first_offset < end
        )


def test_the_longest_idle_producers_are_forgotten_first() -> None:
    state = PartitionProducers()
    for number in range(PRODUCERS_MAX + 10):
        state.staged(info(0, producer=number), Ticket(), 0, number)
    state.snapshot(0, 0, PRODUCERS_MAX)
    assert len(state.producers) == PRODUCERS_MAX
    assert 0 not in state.producers
    state.snapshot(0, 0, PRODUCERS_MAX + IDLE_MS_MAX + 100)
    assert state.producers == {}


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.booleans()), max_size=30), st.integers(0, 30))
def test_a_snapshot_and_a_replay_are_the_same_as_having_been_there(work: list[tuple[int, int, bool]], cut: int) -> None:
    log = Log()
    history: list[BatchInfo] = []
    next_sequence: dict[int, int] = {}
    opened: set[int] = set()
    for producer, count, opens in work:
        opened |= {producer} if opens else set()
        transactional = producer in opened  # no other batch is taken while a transaction is open
        sequence = next_sequence.get(producer, 0)
        batch = info(sequence, count, producer=producer, transactional=transactional)
        base = log.append(batch)
        next_sequence[producer] = sequence + count
        history.append(
            BatchInfo(0, 100, base, base + count - 1, count, 0, 0, batch.attributes, producer, 0, sequence, 0)
        )
    partial = Log()
    for batch in history[:cut]:
        partial.append(batch)
    restored = PartitionProducers()
    restored.restore(partial.state.snapshot(partial.end, 0, 0))
    for batch in history[cut:]:
        restored.replay(batch, 0)
    assert restored.snapshot(log.end, 0, 0) == log.state.snapshot(log.end, 0, 0)


# With a real shard.


async def test_a_repeated_batch_is_recognized_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        await broker.streams.create("t")
        pid = await broker.coordination.producers.new_id()
        numbered: Callable[[int], bytearray] = lambda n: batch(  # noqa: E731
            b"x", producer_id=pid, producer_epoch=0, base_sequence=n
        )
        for number in range(3):
            assert await append(broker, numbered(number)) == number
    async with opened(tmp_path) as broker:
        assert await append(broker, numbered(2)) == 2
        assert broker.streams.get("t").partitions[0].end_offset == 3
        assert await append(broker, numbered(3)) == 3
        with pytest.raises(OutOfOrderSequence):
            await append(broker, numbered(9))


def producers_of(bench: Bench, **options: Any) -> Producers:
    """As a broker opens them."""
    producers = Producers(bench.open(**options), bench.clock)
    producers.load()
    return producers


def send(
    bench: Bench,
    producers: Producers,
    sequence: int,
    *,
    producer: int = 5,
    value: bytes = b"x",
    key: bytes | None = None,
) -> Ticket:
    data = batch(value, key, producer_id=producer, producer_epoch=0, base_sequence=sequence)
    return producers.append(Partition(0, bench.shard.log(1)), data, codec.validate(data))


def fill_disk(bench: Bench, patches: pytest.MonkeyPatch) -> None:
    """The journal needs another file, and there is no room for it."""

    def no_room(_size: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    patches.setattr(bench.shard.journal, "step", lambda _buffers: None)
    patches.setattr(bench.shard.journal, "reserve", no_room)


def test_all_batches_of_one_round_are_recognized_after_a_kill(tmp_path: Path) -> None:
    """The first of them has a snapshot taken; it must not say that it knows those behind it."""
    bench = Bench(tmp_path)
    producers = producers_of(bench)
    for number in range(3):
        send(bench, producers, number)
    bench.shard.pump()
    assert bench.shard.log(1).visible_end == 3
    bench.kill()
    producers = producers_of(bench)
    for number in range(3):
        assert send(bench, producers, number).base_offset == number
    bench.shard.pump()
    assert bench.shard.log(1).visible_end == 3
    bench.shard.close()


def test_after_a_restart_retention_keeps_batches_that_no_producer_snapshot_covers(tmp_path: Path) -> None:
    """It was before one: a kill, retention and another kill before the next snapshot, and a retry was stored twice."""
    bench = Bench(tmp_path)
    stream = StreamSettings(segment_size=1024, retention_bytes=2048)
    producers = producers_of(bench, stream=stream)
    for number in range(20):
        send(bench, producers, number // 2, producer=number % 2, value=b"x" * 300)
        bench.shard.pump()
    for number in range(20):  # of another producer, so that those above are old
        send(bench, producers, number, producer=7, value=b"x" * 300)
        bench.shard.pump()
    for _ in range(2):
        bench.kill()
        producers = producers_of(bench, stream=stream)
        bench.shard.maintenance.starts.apply_retention(bench.shard.log(1), bench.clock.now_ms())
        bench.shard.pump()
    assert send(bench, producers, 9, producer=1, value=b"x" * 300).base_offset == 19
    bench.shard.close()


def test_compaction_keeps_batches_whose_producer_snapshot_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for stored: the batches went, and after a kill a retry of the last one was stored twice."""
    bench = Bench(tmp_path)
    stream = StreamSettings(segment_size=1024, cleanup_policy="compact")
    producers = producers_of(bench, stream=stream)
    log = bench.shard.log(1)
    for number in range(40):
        send(bench, producers, number % 20, producer=number // 20, value=b"x" * 300, key=b"k")
        bench.shard.pump()
    with monkeypatch.context() as patches:
        fill_disk(bench, patches)
        producers.snapshot_all()
        bench.shard.pump()
    bench.shard.maintenance.compact(log, lambda _gain, _error: None)
    bench.shard.pump()
    bench.kill()
    producers = producers_of(bench, stream=stream)
    assert send(bench, producers, 19, producer=0, value=b"x" * 300, key=b"k").base_offset == 19
    producers.snapshot_all()
    bench.shard.pump()
    assert bench.shard.log(1).compaction_pin == 40, "and is not needed once a snapshot is stored"
    bench.shard.close()


def test_a_damaged_batch_after_the_snapshot_stops_its_log_and_no_other(tmp_path: Path) -> None:
    """The broker did not start."""
    bench = Bench(tmp_path)
    producers = producers_of(bench)
    for number in range(20):
        send(bench, producers, number, value=b"%02d" % number * 100)
        bench.shard.pump()
    bench.shard.checkpoint()
    bench.shard.pump()
    bench.kill()
    [file] = Path(bench.root).glob("logs/*/*.log")
    file.write_bytes(file.read_bytes().replace(b"07" * 100, b"70" * 100))
    producers = producers_of(bench)
    log = bench.shard.log(1)
    assert values(log) == [b"%02d" % number * 100 for number in range(7)]
    for refused in (lambda: log.read(7), lambda: send(bench, producers, 7)):
        with pytest.raises(CorruptLog):
            refused()
    producers.snapshot_all()
    bench.shard.close()
    file.write_bytes(file.read_bytes().replace(b"70" * 100, b"07" * 100))
    producers = producers_of(bench)
    assert send(bench, producers, 19, value=b"19" * 100).base_offset == 19, "all of it is known once it is restored"
    bench.shard.close()


def test_an_aborted_transaction_is_forgotten_before_its_marker_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told of it without its marker, a client would take all that its producer sends for aborted."""
    bench = Bench(tmp_path)
    stream = StreamSettings(segment_size=512, cleanup_policy="compact", tombstone_retention_ms=0)
    producers = producers_of(bench, stream=stream)
    log = bench.shard.log(1)

    def fill() -> None:
        for _ in range(10):
            log.append(batch(b"x" * 100, b"k"))
            bench.shard.pump()
        producers.snapshot_all()
        bench.shard.pump()

    def compact() -> BaseException | None:
        ended: list[BaseException | None] = []
        bench.shard.maintenance.compact(log, lambda _gain, error: ended.append(error))
        bench.shard.pump()
        return ended[0]

    data = batch(b"x" * 100, b"k", producer_id=5, producer_epoch=0, base_sequence=0, transactional=True)
    producers.append(Partition(0, log), data, codec.validate(data))
    log.append(control_batch(5, 0, commit=False, now_ms=1))
    bench.shard.pump()
    producers.ended(log, 5, 0, 1, commit=False)
    fill()
    assert compact() is None
    of_log = producers.of(log.id)
    assert of_log is not None and of_log.aborted_between(0, 2) == [(5, 0)]
    fill()
    with monkeypatch.context() as patches:
        fill_disk(bench, patches)
        assert isinstance(compact(), Conflict)
    assert codec.scan(log.read(1).data)[0].is_control, "as long as that is not stored, it stays"
    assert compact() is None
    assert not codec.scan(log.read(1).data)[0].is_control
    bench.kill()
    producers = producers_of(bench, stream=stream)
    assert not producers.aborted(1)
    bench.shard.close()


def test_producers_of_deleted_records_are_still_known_after_a_kill(tmp_path: Path) -> None:
    """DeleteRecords moved the beginning of the log past what no snapshot knew yet."""
    bench = Bench(tmp_path)
    producers = producers_of(bench)
    for number in range(3):
        send(bench, producers, number)
        bench.shard.pump()
    producers.snapshot_of(bench.shard.log(1))
    bench.shard.maintenance.starts.delete_before(bench.shard.log(1), 3)
    bench.shard.pump()
    bench.kill()
    producers = producers_of(bench)
    assert send(bench, producers, 2).base_offset == 2
    assert bench.shard.log(1).start_offset == bench.shard.log(1).visible_end == 3
    bench.shard.close()


async def test_producer_state_outlives_the_records(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        await broker.streams.create("t")
        first = batch(b"x", producer_id=5, producer_epoch=0, base_sequence=0)
        await append(broker, first)
        partition = broker.streams.get("t").partitions[0]
        await broker.segments.delete_before(partition, 1)
    async with opened(tmp_path) as broker:
        again = batch(b"x", producer_id=5, producer_epoch=0, base_sequence=0)
        assert await append(broker, again) == 0
        assert broker.streams.get("t").partitions[0].end_offset == 1


async def test_producer_ids_are_never_given_twice(tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        async with opened(tmp_path) as broker:
            seen += [await broker.coordination.producers.new_id() for _ in range(1200)]
    assert len(seen) == len(set(seen))


async def test_producer_ids_are_given_to_many_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        ids = await asyncio.gather(*(broker.coordination.producers.new_id() for _ in range(2500)))
        assert len(set(ids)) == 2500


async def test_two_batches_of_a_producer_in_one_append_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        await broker.streams.create("t")
        one = batch(b"x", producer_id=5, producer_epoch=0, base_sequence=0)
        two = batch(b"x", producer_id=5, producer_epoch=0, base_sequence=1)
        with pytest.raises(InvalidInput):
            await append(broker, one + two)


async def test_between_the_snapshots_of_two_logs_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot of ten thousand producers takes 30 ms; those of a hundred logs blocked all clients for 3 s."""
    async with opened(tmp_path) as broker:
        stream, coordination = await broker.streams.create("t", 3), broker.coordination
        taken: list[int] = []

        def take(log: Any) -> None:
            taken.append(log.id)

        for partition in stream.partitions:
            data = batch(b"x", producer_id=7, producer_epoch=0, base_sequence=0)
            await coordination.producers.append(partition, data, codec.validate(data))
        with monkeypatch.context() as watched:
            watched.setattr(coordination.producers, "snapshot_of", take)
            coordination._snapshot()
            turns = 0
            while len(taken) < 3:
                seen = len(taken)
                await asyncio.sleep(0)
                assert len(taken) <= seen + 1
                turns += 1
            assert turns >= 3
