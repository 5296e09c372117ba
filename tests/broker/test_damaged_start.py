"""A broker that starts with a damaged log: that log is read-only, and all others work."""

from pathlib import Path

import pytest

from headrace.broker.broker import Broker
from headrace.broker.routing.exchanges import DELAYED
from headrace.broker.types.message import Message
from headrace.record.amqp.properties import edit
from tests.broker.queue_world import bodies, declare, declare_exchange, opened, say


async def sound_queue(broker: Broker) -> None:
    queue = await declare(broker.vhosts.get("/"), "sound")
    say(queue, b"fine")
    await queue.vhost.flushes.wait_all_durable()


def damage(folder: Path, log: str) -> None:
    (path,) = folder.glob(f"logs/*-{log}/*.log")
    data = bytearray(path.read_bytes())
    data[100] ^= 0xFF
    path.write_bytes(data)


async def test_a_queue_whose_first_message_is_damaged_does_not_prevent_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path) as broker:
        queue = await declare(broker.vhosts.get("/"), "broken", x_message_ttl=1000)
        say(queue, b"x" * 1000)
        await sound_queue(broker)
    damage(tmp_path, "broken")
    async with opened(tmp_path) as broker:
        assert bodies(broker.vhosts.get("/").queue("sound")) == [b"fine"]
    assert "is damaged at byte" in caplog.text


async def test_delayed_messages_that_are_damaged_stop_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        exchange = await declare_exchange(host, "x", DELAYED, arguments={"x-delayed-type": "fanout"})
        later = Message("x", "", edit(b"\0\0", headers={"x-delay": 3_600_000}), b"x" * 1000)
        assert host.delays.route(exchange, later, host.clock.now_ms(), [""]).waits_in
        await sound_queue(broker)
    damage(tmp_path, "amq-delayed-x")
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        assert bodies(host.queue("sound")) == [b"fine"]
        assert host.routing.exchange("x").delayed
    assert "is damaged at byte" in caplog.text
