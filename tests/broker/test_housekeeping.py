"""The chores that nobody asks for."""

import asyncio
from pathlib import Path

from headrace.broker.broker import Broker
from headrace.clock import ManualClock
from headrace.config import Config
from headrace.log.settings import LogSettings, StreamSettings


async def test_a_damaged_topic_does_not_keep_retention_from_the_others(tmp_path: Path) -> None:
    stream = StreamSettings(segment_size=2048, retention_bytes=4096)
    log = LogSettings(journal_file_bytes=1 << 20)
    config = Config(data_dir=str(tmp_path), http=None, amqp=None, kafka=None, log=log, stream=stream)
    broker = await Broker.open(config, clock=ManualClock())
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


async def test_a_log_that_somebody_else_compacts_is_not_taken_for_compacted(tmp_path: Path) -> None:
    stream = StreamSettings(segment_size=2048, cleanup_policy="compact")
    config = Config(data_dir=str(tmp_path), http=None, amqp=None, kafka=None, stream=stream)
    broker = await Broker.open(config, clock=ManualClock())
    topic = await broker.streams.create("a")
    for _ in range(10):
        await broker.publish(topic, [(b"k", b"x" * 900, (), None, -1)])
    log = topic.partitions[0].log
    done = asyncio.get_running_loop().create_future()
    broker.shard.maintenance.compact(log, lambda _made, error: done.set_result(error))
    await broker.housekeeping._compact(log)  # while that one is under way
    assert log.id not in broker.housekeeping._compacted
    assert await done is None
    await broker.close()
