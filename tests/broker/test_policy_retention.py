"""Retention by policy: it bounds streams and topics whatever else is done to them, and is gone with the policy."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.broker.broker import Broker
from headrace.broker.vhosts.policies import Policy
from headrace.config import Config

DAY_MS = 86_400_000


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    made = await Broker.open(Config(data_dir=str(tmp_path), http=None, amqp=None, kafka=None))
    yield made
    await made.close()


def in_force(broker: Broker, name: str) -> set[tuple[int, int]]:
    stream = broker.streams.get(name)
    return {(p.log.settings.retention_ms, p.log.settings.retention_bytes) for p in stream.partitions}


async def bound(broker: Broker, **definition: object) -> None:
    named = {name.replace("_", "-"): value for name, value in definition.items()}
    await broker.policies.put(Policy(vhost="/", name="bound", pattern="^bounded", definition=named))


async def declare(broker: Broker, name: str, **arguments: object) -> None:
    await broker.vhosts.get("/").declare_queue(
        name, durable=True, exclusive=False, auto_delete=False, owner=None,
        arguments={"x-queue-type": "stream"} | {k.replace("_", "-"): v for k, v in arguments.items()},
    )  # fmt: skip


async def test_a_reconfigured_stream_keeps_the_limit_of_its_policy(broker: Broker) -> None:
    await declare(broker, "bounded")
    await bound(broker, max_age="1D", max_length_bytes=1000)
    assert in_force(broker, "bounded") == {(DAY_MS, 1000)}
    await broker.streams.configure("bounded", {"segment_size": "1MB", "retention_bytes": 400})
    assert in_force(broker, "bounded") == {(DAY_MS, 400)}, "the tighter of both holds"
    await broker.policies.delete("/", "bound")
    assert in_force(broker, "bounded") == {(-1, 400)}


async def test_a_policy_limits_a_topic_that_no_amqp_client_uses(broker: Broker) -> None:
    await broker.streams.create("bounded.before", 2)
    await bound(broker, max_age="1D")
    await broker.streams.create("bounded.after", 2)
    await broker.streams.create("free", 1)
    assert in_force(broker, "bounded.before") == in_force(broker, "bounded.after") == {(DAY_MS, -1)}
    assert in_force(broker, "free") == {(7 * DAY_MS, -1)}
    await broker.streams.configure("bounded.before", {}, partitions=4)
    assert len(broker.streams.get("bounded.before").partitions) == 4
    assert in_force(broker, "bounded.before") == {(DAY_MS, -1)}
    await broker.policies.delete("/", "bound")
    assert in_force(broker, "bounded.before") == {(7 * DAY_MS, -1)}


async def test_the_limit_of_a_policy_survives_a_restart(tmp_path: Path) -> None:
    broker = await Broker.open(Config(data_dir=str(tmp_path), http=None, amqp=None, kafka=None))
    await broker.streams.create("bounded.topic", 1)
    await declare(broker, "bounded.stream")
    await bound(broker, max_age="1D")
    await broker.close()
    again = await Broker.open(broker.config)
    assert in_force(again, "bounded.topic") == in_force(again, "bounded.stream") == {(DAY_MS, -1)}
    await again.close()
