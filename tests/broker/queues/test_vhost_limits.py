"""The queue limit of a vhost: which queues count, and where the limit is stored."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.broker import Broker
from headrace.broker.vhosts.definitions import export, import_
from headrace.broker.vhosts.settings import VhostMetadata
from headrace.errors import InvalidInput, NotFound, QueueLimitReached
from tests.broker.queue_world import declare, opened


async def test_a_vhost_cannot_exceed_its_queue_limit(broker: Broker) -> None:
    host = await broker.vhosts.create("team")
    await declare(host, "one")
    await broker.vhosts.set_limits("team", {"max-queues": 2})
    await declare(host, "two", durable=False)
    for durable in (True, False):
        with pytest.raises(QueueLimitReached) as refused:
            await declare(host, "three", durable=durable)
        assert str(refused.value) == "cannot declare queue 'three': queue limit in vhost 'team' (2) is reached"
    await declare(host, "one")
    await declare(host, "two", durable=False)
    await host.delete_queue("one")
    await declare(host, "three")
    await declare(broker.vhosts.get("/"), "elsewhere")
    await broker.vhosts.set_limits("team", {"max-queues": -1})
    await declare(host, "four")


async def test_queues_declared_concurrently_count_towards_the_limit(broker: Broker) -> None:
    host = broker.vhosts.get("/")
    await broker.vhosts.set_limits("/", {"max-queues": 2})
    tries = [declare(host, f"q{number}", durable=number % 2 == 0) for number in range(6)]
    found = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(one, QueueLimitReached) for one in found) == 4
    assert len(host.queues) == 2


async def test_the_last_queue_within_the_limit_may_be_declared_by_many_clients_at_once(broker: Broker) -> None:
    """As consumers that start together do."""
    host = broker.vhosts.get("/")
    await broker.vhosts.set_limits("/", {"max-queues": 1})

    async def a_moment_later() -> object:
        await asyncio.sleep(0)  # the first is being stored
        return await declare(host, "jobs")

    assert len(set(await asyncio.gather(declare(host, "jobs"), a_moment_later(), a_moment_later()))) == 1


async def test_topics_do_not_count_towards_the_queue_limit(broker: Broker) -> None:
    host = broker.vhosts.get("/")
    await broker.streams.create("clicks", 1, {})
    assert host.find_topic("clicks")
    await broker.vhosts.set_limits("/", {"max-queues": 1})
    await declare(host, "one")
    with pytest.raises(QueueLimitReached):
        await declare(host, "clicks")


async def test_the_limits_of_a_vhost_outlive_a_restart_and_new_metadata_and_go_with_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        await broker.vhosts.create("team")
        await broker.vhosts.set_limits("team", {"max-connections": 3, "max-queues": 0})
        await broker.vhosts.set_limits("team", {"max-connections": None})
        await broker.vhosts.create("team", metadata=VhostMetadata(description="ours"))
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("team")
        assert (host.limits, host.metadata.description) == ({"max-queues": 0}, "ours")
        with pytest.raises(QueueLimitReached):
            await declare(host, "q")
        await broker.vhosts.delete("team")
        assert (await broker.vhosts.create("team")).limits == {}


@pytest.mark.parametrize("wrong", [{"max-fun": 1}, {"max-queues": "1"}, {"max-queues": True}, {"max-queues": 1 << 40}])
async def test_an_invalid_limit_is_refused_and_nothing_changes(broker: Broker, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        await broker.vhosts.set_limits("/", wrong)
    assert broker.vhosts.get("/").limits == {}
    with pytest.raises(NotFound):
        await broker.vhosts.set_limits("never-was", {"max-queues": 1})


async def test_the_limits_of_vhosts_are_part_of_definitions_as_in_rabbitmq(broker: Broker) -> None:
    await broker.vhosts.create("team")
    await broker.vhosts.set_limits("team", {"max-queues": 2})
    whole, alone = await export(broker), await export(broker, "team")
    parameter = {"component": "vhost-limits", "name": "limits", "value": {"max-queues": 2}}
    assert whole["parameters"] == [parameter | {"vhost": "team"}] and alone["parameters"] == [parameter]
    await broker.vhosts.delete("team")
    await import_(broker, whole)
    assert broker.vhosts.get("team").limits == {"max-queues": 2}
    await import_(broker, {"parameters": [parameter | {"value": {"max-connections": 7}}]}, "team")
    assert broker.vhosts.get("team").limits == {"max-connections": 7}


async def test_definitions_with_more_queues_than_the_limit_are_refused_before_anything_is_done(broker: Broker) -> None:
    limited: dict[str, Any] = {"component": "vhost-limits", "vhost": "/", "name": "limits", "value": {"max-queues": 1}}
    queues = [{"name": "one"}, {"name": "two"}]
    with pytest.raises(InvalidInput, match="would exceed its limit of 1 queues"):
        await import_(broker, {"parameters": [limited], "queues": queues})
    assert not broker.vhosts.get("/").queues and not broker.vhosts.get("/").limits
    await import_(broker, {"queues": queues})
    await import_(broker, {"parameters": [limited], "queues": queues})  # they are there already
    with pytest.raises(InvalidInput):
        await import_(broker, {"parameters": [limited | {"value": ["max-queues"]}]})
    with pytest.raises(InvalidInput):
        await import_(broker, {"parameters": [limited | {"vhost": 5}]})
