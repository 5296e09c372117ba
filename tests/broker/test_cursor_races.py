"""Cursors that are moved while others are dropped."""

import asyncio
from pathlib import Path

from headrace.broker.broker import Broker
from headrace.clock import ManualClock
from headrace.config import Config


async def _open(folder: Path, clock: ManualClock) -> Broker:
    return await Broker.open(Config(data_dir=str(folder), http=None, amqp=None, kafka=None), clock=clock)


async def test_a_cursor_that_is_moved_while_others_expire_stays(tmp_path: Path) -> None:
    """The list of cursors to drop was made before the job renewed its cursor in time."""
    clock = ManualClock()
    broker = await _open(tmp_path, clock)
    stream = await broker.streams.create("t")
    await broker.publish(stream, [(None, b"x", (), None, -1)] * 5)
    for name in ("a", "back"):
        await broker.cursors.commit(name, stream, {0: 1}, pin=True, max_age_ms=1000)
    clock.advance(2.0)
    expiring = asyncio.create_task(broker.cursors.expire())
    await asyncio.sleep(0)  # the first is being dropped
    await broker.cursors.commit("back", stream, {0: 3})
    assert await expiring == ["a"]
    assert broker.cursors.names() == ["back"]
    assert [p.offset for p in broker.cursors.positions("back")] == [3]
    await broker.close()


async def test_a_cursor_that_is_moved_while_a_topic_is_deleted_does_not_go_back(tmp_path: Path) -> None:
    broker = await _open(tmp_path, ManualClock())
    doomed, other = await broker.streams.create("doomed"), await broker.streams.create("other")
    for stream in (doomed, other):
        await broker.publish(stream, [(None, b"x", (), None, -1)] * 5)
    for name in ("a", "b", "c"):
        await broker.cursors.commit(name, doomed, {0: 1})
    await broker.cursors.commit("b", other, {0: 1})
    deleting = asyncio.create_task(broker.streams.delete("doomed"))
    while "a" in broker.cursors.names():
        await asyncio.sleep(0)  # the first cursor is being dropped
    await broker.cursors.commit("b", other, {0: 4}, pin=True)
    await broker.cursors.commit("c", other, {0: 2})
    await deleting
    assert {name: [p.offset for p in broker.cursors.positions(name)] for name in broker.cursors.names()} == {
        "b": [4], "c": [2],
    }  # fmt: skip
    assert broker.cursors.get("b").pin
    await broker.close()


async def test_a_cursor_pinned_during_retention_keeps_its_records(tmp_path: Path) -> None:
    clock = ManualClock()
    broker = await _open(tmp_path, clock)
    stream = await broker.streams.create("t", config={"segment_size": 1024, "retention_bytes": 0})
    for _ in range(10):
        await broker.publish(stream, [(None, bytes(1000), (), None, -1)])
    log = stream.partitions[0].log
    retention = broker.shard.maintenance.starts.apply_retention(log, clock.now_ms())
    assert retention is not None
    await broker.cursors.commit("late", stream, {0: 2}, pin=True)
    await retention
    assert log.start_offset == 2 and log.read(2).data
    await broker.close()
    broker = await _open(tmp_path, clock)
    assert broker.streams.get("t").partitions[0].log.start_offset == 2
    await broker.close()
