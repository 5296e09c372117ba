"""The wall clock jumps: nothing expires early, because what has expired is gone for good."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.broker.broker import Broker
from headrace.broker.sinks import ledger as ledgers
from headrace.broker.transactions.coordinator import ID_EXPIRATION_MS
from headrace.clock import START_GRACE_S, ExpiryClock, ManualClock
from headrace.config import Config
from headrace.log.settings import LogSettings
from tests.broker.group_world import World
from tests.broker.test_groups_offsets import committed

HOUR = 3600.0
MONTH = 30 * 24 * HOUR


@asynccontextmanager
async def opened(folder: Path, clock: ManualClock) -> AsyncIterator[Broker]:
    log = LogSettings(journal_file_bytes=1 << 20)
    broker = await Broker.open(Config(data_dir=str(folder), http=None, amqp=None, kafka=None, log=log), clock=clock)
    try:
        yield broker
    finally:
        await broker.close()


async def with_cursor(broker: Broker, max_age_s: float) -> None:
    stream = await broker.streams.create("t")
    await broker.publish(stream, [(None, b"one", (), None, -1)])
    await broker.cursors.commit("job", stream, {0: 1}, pin=True, max_age_ms=int(max_age_s * 1000))


async def test_a_jump_forward_drops_no_cursor(tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(tmp_path, clock) as broker:
        await with_cursor(broker, HOUR / 2)
        clock.jump(HOUR)
        assert await broker.cursors.expire() == []
        assert "job" in broker.cursors
        clock.advance(HOUR / 2 + 1)
        assert await broker.cursors.expire() == ["job"], "that time has really passed"


async def test_a_cursor_that_moved_before_a_jump_back_is_kept(tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(tmp_path, clock) as broker:
        clock.jump(HOUR)
        await with_cursor(broker, HOUR / 2)
        clock.jump(-HOUR)
        clock.advance(HOUR / 2 + 1)
        assert await broker.cursors.expire() == []


async def test_a_start_with_a_clock_that_is_ahead_drops_no_cursor_if_it_is_corrected(tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(tmp_path, clock) as broker:
        await with_cursor(broker, 24 * HOUR)
    clock.jump(MONTH)
    async with opened(tmp_path, clock) as broker:
        assert await broker.cursors.expire() == []
        clock.advance(HOUR / 2)
        assert await broker.cursors.expire() == []
        clock.jump(-MONTH)  # by NTP, say
        clock.advance(HOUR)
        assert await broker.cursors.expire() == []


async def test_a_cursor_that_expired_while_the_broker_was_down_is_dropped_an_hour_after_the_start(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    async with opened(tmp_path, clock) as broker:
        await with_cursor(broker, 24 * HOUR)
    clock.advance(MONTH)
    async with opened(tmp_path, clock) as broker:
        assert await broker.cursors.expire() == []
        clock.advance(START_GRACE_S + 1)
        assert await broker.cursors.expire() == ["job"]


async def test_a_jump_forward_forgets_no_transactional_id_and_no_sink_writer(tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(tmp_path, clock) as broker:
        transactions = broker.coordination.transactions
        await transactions.begin_producer("mine", 1000)
        await broker.ledger.commit("writer", 0, [])
        clock.jump(max(ID_EXPIRATION_MS, ledgers.MAX_AGE_MS) / 1000 + HOUR)
        await transactions.expire()
        assert [one.transactional_id for one in transactions.every()] == ["mine"]
        assert await broker.ledger.expire() == []


def test_a_jump_forward_deletes_no_committed_offset() -> None:
    world = World(offsets_retention_ms=int(HOUR * 1000))
    world.groups.commit([committed(5, commit_ms=world.clock.now_ms())], lambda error: None)
    world.clock.jump(2 * HOUR)
    world.timers.advance(HOUR / 2)
    assert world.groups.exists("g")
    world.restart()
    world.timers.advance(HOUR / 2)
    assert world.groups.exists("g"), "the clock may have been wrong at the start"
    world.timers.advance(HOUR)
    assert not world.groups.exists("g")


async def test_a_jump_forward_ends_no_lease_of_a_reader(tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(tmp_path, clock) as broker:
        stream = await broker.streams.create("t")
        await broker.publish(stream, [(None, b"one", (), None, -1)])
        broker.read_leases.hold_ranges([(stream.partitions[0], 0, 1)], 60_000, "reader")
        clock.jump(HOUR)
        leases = broker.shard.maintenance.leases
        assert leases.held(clock.monotonic())
        clock.advance(61)
        assert not leases.held(clock.monotonic())


@pytest.mark.parametrize("jump", [-MONTH, -1.0, 1.0, MONTH])
def test_the_time_of_expiry_is_never_ahead(jump: float) -> None:
    clock = ManualClock()
    ages = ExpiryClock(clock)
    before = clock.now_ms()
    clock.jump(jump)
    clock.advance(10)
    assert ages.now_ms() == before + 10_000 + min(0, int(jump * 1000))
