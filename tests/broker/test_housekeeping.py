"""Housekeeping: retention, compaction and expiry of cursors."""

import asyncio
from pathlib import Path

import pytest

from headrace.broker.broker import Broker
from headrace.broker.queues.view import ViewEvents, stored_log
from headrace.broker.types.message import Message
from headrace.clock import ManualClock
from headrace.config import Config
from headrace.log.commit.scheduler import RoundScheduler
from headrace.log.disk.paths import HELD, held_name
from headrace.log.log import Log
from headrace.log.settings import LogSettings, StreamSettings
from tests.broker.queue_world import declare, refuse, until


async def opened(folder: Path, stream: StreamSettings, clock: ManualClock | None = None) -> Broker:
    log = LogSettings(journal_file_bytes=1 << 20)
    config = Config(data_dir=str(folder), http=None, amqp=None, kafka=None, log=log, stream=stream)
    return await Broker.open(config, clock=clock or ManualClock())


async def test_a_damaged_topic_does_not_keep_retention_from_the_others(tmp_path: Path) -> None:
    stream = StreamSettings(segment_size=2048, retention_bytes=4096)
    broker = await opened(tmp_path, stream)
    damaged = await broker.streams.create("a", 1, {"cleanup_policy": "compact"})
    healthy = await broker.streams.create("b")
    for topic in (damaged, healthy):
        for i in range(30):
            await broker.publish(topic, [(b"k%d" % i, b"x" * 300, (), None, -1)])
    file = Path(damaged.partitions[0].log.segments[0].path())
    data = bytearray(file.read_bytes())
    data[200] ^= 1
    file.write_bytes(data)
    await broker.housekeeping.once()
    assert broker.stats.maintenance_errors == 1
    assert healthy.partitions[0].start_offset > 0
    await broker.close()


async def test_a_compaction_that_takes_long_does_not_keep_retention_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = StreamSettings(segment_size=2048, retention_bytes=4096)
    broker = await opened(tmp_path, stream)
    compacted = await broker.streams.create("a", 1, {"cleanup_policy": "compact"})
    other = await broker.streams.create("b")
    for topic in (compacted, other):
        for i in range(30):
            await broker.publish(topic, [(b"k%d" % i, b"x" * 300, (), None, -1)])
    begun: list[Log] = []
    monkeypatch.setattr(broker.shard.maintenance, "compact", lambda log, _done: begun.append(log))
    running = asyncio.create_task(broker.housekeeping.run(0.001))
    await until(lambda: other.partitions[0].start_offset > 0 and begun)
    for i in range(30):
        await broker.publish(other, [(b"k%d" % i, b"x" * 300, (), None, -1)])
    await until(lambda: other.partitions[0].start_offset > 30)
    assert begun == [compacted.partitions[0].log], "one at a time"
    running.cancel()
    await broker.close()


async def test_a_cursor_that_cannot_be_dropped_does_not_prevent_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = StreamSettings(segment_size=2048, retention_bytes=4096)
    clock = ManualClock()
    broker = await opened(tmp_path, stream, clock)
    topic = await broker.streams.create("t")
    await broker.cursors.commit("old", topic, {0: 0}, max_age_ms=1)
    for _ in range(30):
        await broker.publish(topic, [(None, b"x" * 300, (), None, -1)])
    clock.advance(1)
    with monkeypatch.context() as patched:
        patched.setattr(broker.cursors, "_store", refuse)
        await broker.housekeeping.once()
    assert broker.stats.maintenance_errors == 1
    assert topic.partitions[0].start_offset > 0
    await broker.close()


async def test_compaction_keeps_messages_that_a_queue_on_the_topic_has_not_settled(tmp_path: Path) -> None:
    stream = StreamSettings(segment_size=2048, cleanup_policy="compact")
    broker = await opened(tmp_path, stream)
    topic = await broker.streams.create("t")
    host = broker.vhosts.get("/")
    queue = await declare(host, "t")
    sent = [b"%02d" % i + b"x" * 300 for i in range(30)]
    for body in sent:
        await broker.publish(topic, [(b"key", body, (), None, -1)])
    await broker.housekeeping.once()
    taken = list(iter(queue.get, None))
    assert [one[2].body for one in taken] == sent
    for view, offset, *_ in taken:
        queue.settle(view, offset, offset + 1)
    await host.flushes.wait_settles_stored()
    log = topic.partitions[0].log
    await broker.housekeeping.once()
    assert sum(segment.records for segment in log.segments) < 30
    await host.delete_queue("t")
    assert log.compaction_pin is None
    await broker.close()


TAKES_MESSAGES = [
    StreamSettings(segment_size=2048, retention_bytes=4096),
    StreamSettings(segment_size=2048, cleanup_policy="compact"),
    StreamSettings(segment_size=2048, cleanup_policy="compact,delete", retention_bytes=4096, retention_ms=1),
]


@pytest.mark.parametrize("stream", TAKES_MESSAGES)
async def test_topic_defaults_delete_no_unsettled_messages_of_queues(tmp_path: Path, stream: StreamSettings) -> None:
    clock = ManualClock()
    broker = await opened(tmp_path, stream, clock)
    host = broker.vhosts.get("/")
    queue = await host.declare_queue("q", durable=True, exclusive=False, auto_delete=False, arguments={}, owner=None)
    sent = [b"%d" % i + b"x" * 300 for i in range(30)]
    for body in sent:
        queue.publish(Message("", "q", b"\0\0", body), clock.now_ms())
        await host.flushes.wait_all_durable()
    clock.advance(60)
    await broker.housekeeping.once()
    assert [taken[2].body for taken in iter(queue.get, None)] == sent
    await host.store.create_delay_stream("/", "delayed")
    delays = host.store.open_delay_view("/", "delayed", ViewEvents())
    bounds = stored_log(delays).settings
    assert (bounds.retention_ms, bounds.retention_bytes, bounds.cleanup_policy) == (-1, -1, "delete")
    await broker.close()


async def test_a_log_that_is_being_compacted_is_skipped(tmp_path: Path) -> None:
    stream = StreamSettings(segment_size=2048, cleanup_policy="compact")
    broker = await opened(tmp_path, stream)
    topic = await broker.streams.create("a")
    for _ in range(10):
        await broker.publish(topic, [(b"k", b"x" * 900, (), None, -1)])
    log = topic.partitions[0].log
    done = asyncio.get_running_loop().create_future()
    broker.shard.maintenance.compact(log, lambda _made, error: done.set_result(error))
    await broker.housekeeping._compact(log)  # while that one is under way
    assert await done is None
    assert 0 < log.compacted_until <= log.segments[-1].base
    await broker.close()


async def test_records_are_compacted_once_they_are_old_enough(tmp_path: Path) -> None:
    """A segment counted as compacted after the first check, although nothing was rewritten while it was too young."""
    clock = ManualClock()
    stream = StreamSettings(segment_size=2048, cleanup_policy="compact", compaction_lag_ms=60_000)
    broker = await opened(tmp_path, stream, clock)
    topic = await broker.streams.create("a")
    log = topic.partitions[0].log
    for _ in range(10):
        await broker.publish(topic, [(b"k", b"x" * 900, (), None, -1)])
    before = log.segments
    await broker.housekeeping.once()
    assert log.segments == before, "rewritten for nothing"
    clock.advance(61)
    await broker.housekeeping.once()
    assert sum(segment.records for segment in log.segments if segment.is_sealed) == 1
    await broker.close()


@pytest.mark.parametrize("percent", [90, 5])
async def test_compaction_starts_when_enough_data_is_new(tmp_path: Path, percent: int) -> None:
    stream = StreamSettings(segment_size=2048, cleanup_policy="compact", compaction_dirty_percent=percent)
    broker = await opened(tmp_path, stream)
    topic = await broker.streams.create("a")
    log = topic.partitions[0].log
    for key in range(17):
        await broker.publish(topic, [(b"%d" % key, b"x" * 900, (), None, -1)])
    await broker.housekeeping.once()  # the first time all of it is new
    for _ in range(2):
        await broker.publish(topic, [(b"0", b"x" * 900, (), None, -1)])
    new = [segment for segment in log.segments if segment.is_sealed and segment.base >= log.compacted_until]
    assert new
    before = sum(segment.records for segment in log.segments if segment.is_sealed)
    await broker.housekeeping.once()
    after = sum(segment.records for segment in log.segments if segment.is_sealed)
    assert (after < before) == (percent == 5)
    await broker.close()


async def test_a_record_that_waits_too_long_starts_a_compaction(tmp_path: Path) -> None:
    """The topic's max.compaction.lag.ms was taken and had no effect."""
    clock = ManualClock()
    stream = StreamSettings(
        segment_size=2048, cleanup_policy="compact", compaction_dirty_percent=90, compaction_lag_max_ms=60_000
    )
    broker = await opened(tmp_path, stream, clock)
    topic = await broker.streams.create("a")
    log = topic.partitions[0].log

    async def publish(key: bytes, size: int) -> None:
        await broker.publish(topic, [(key, b"x" * size, (), None, -1)])

    for key in range(17):
        await publish(b"%d" % key, 900)
    await broker.housekeeping.once()  # the first time all of it is new
    await publish(b"0", 10)
    clock.advance(61)
    await publish(b"1", 10)  # closes the segment: it would have had room
    before = log.segments
    assert [segment.next_offset for segment in before][-2:] == [18, 19]
    clock.advance(-1)
    await broker.housekeeping.once()
    assert log.segments == before, "nothing is old enough"
    clock.advance(1)
    await broker.housekeeping.once()
    assert log.segments != before and log.compacted_until == 18
    assert sum(segment.records for segment in log.segments if segment.is_sealed) == 17
    before = log.segments
    await broker.housekeeping.once()
    assert log.segments == before, "there is nothing new"
    await broker.close()


async def test_segments_held_by_a_pin_are_not_rewritten_repeatedly(tmp_path: Path) -> None:
    stream = StreamSettings(segment_size=2048, cleanup_policy="compact")
    broker = await opened(tmp_path, stream)
    topic = await broker.streams.create("a")
    log = topic.partitions[0].log
    for _ in range(10):
        await broker.publish(topic, [(b"k", b"x" * 900, (), None, -1)])
    log.pins["pin"] = 3
    await broker.housekeeping.once()
    pinned = log.segments
    await broker.housekeeping.once()
    assert log.segments == pinned and log.compacted_until <= 3
    del log.pins["pin"]
    await broker.housekeeping.once()
    assert sum(segment.records for segment in log.segments if segment.is_sealed) == 1
    await broker.close()


async def test_a_failed_sweep_does_not_stop_housekeeping(tmp_path: Path) -> None:
    """A reader of another user holds files in a folder that the broker may not even list: retention goes on."""
    stream = StreamSettings(segment_size=2048, retention_bytes=4096)
    log = LogSettings(journal_file_bytes=1 << 20)
    config = Config(
        data_dir=str(tmp_path), http=None, amqp=None, kafka=None, log=log, stream=stream, retention_interval_ms=10
    )
    broker = await Broker.open(config)
    barred = tmp_path / HELD / held_name(1_000_000_000_001, "0" * 32)
    (barred / "folder").mkdir(parents=True)  # which unlink refuses, as it does what is another user's
    free = tmp_path / HELD / held_name(1_000_000_000_002, "0" * 32)
    free.mkdir()
    topic = await broker.streams.create("t")
    runs, maintenance = broker.stats.maintenance_runs, broker._maintenance
    assert maintenance is not None
    while broker.stats.maintenance_runs < runs + 3:
        assert not maintenance.done(), maintenance
        await asyncio.sleep(0.01)
    for i in range(30):
        await broker.publish(topic, [(b"k%d" % i, b"x" * 300, (), None, -1)])
    while topic.partitions[0].start_offset == 0:
        assert not maintenance.done(), maintenance
        await asyncio.sleep(0.01)
    assert broker.stats.maintenance_errors > 0
    assert barred.exists() and not free.exists()
    await broker.close()


async def test_a_task_that_waits_for_disk_space_does_not_block_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = StreamSettings(segment_size=2048, retention_bytes=4096)
    broker = await opened(tmp_path, stream)
    topic = await broker.streams.create("t")
    waiting = asyncio.Event()

    async def wait_for_room() -> None:
        waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(broker.cursors, "expire", wait_for_room)
    running = asyncio.create_task(broker.housekeeping.run(0.001))
    await waiting.wait()
    for _ in range(30):
        await broker.publish(topic, [(None, b"x" * 300, (), None, -1)])
    monkeypatch.setattr(RoundScheduler, "waits_for_room", True)
    await until(lambda: topic.partitions[0].start_offset > 0)
    running.cancel()
    monkeypatch.undo()
    await broker.close()
