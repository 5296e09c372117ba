"""Arguments of AMQP's tables are after a restart what they were before."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from headrace.broker.catalog.arguments_json import from_plain, to_plain
from headrace.broker.types.message import Message
from headrace.record.amqp.properties import Timestamp
from tests.broker.queue_world import declare, declare_exchange, opened

VALUES = (b"\xff", Timestamp(1_600_000_000), Decimal("1.50"), 1.5, float("inf"), None, [1, b"\xff", {"a": b""}], "text",
          2**40, True, {"$bytes": "no"}, {"$table": {"$timestamp": "no"}}, {"$bytes": 1, "b": 2})  # fmt: skip
leaves = some.none() | some.booleans() | some.integers(-(2**63), 2**63 - 1) | some.text() | some.binary()
names = some.sampled_from(("$bytes", "$timestamp", "$table", "a", ""))
tables = some.recursive(leaves, lambda inner: some.lists(inner) | some.dictionaries(names, inner))


@given(tables)
def test_decoding_encoded_arguments_returns_the_same_value(value: Any) -> None:
    assert from_plain(to_plain(value)) == value


@pytest.mark.parametrize("value", VALUES, ids=repr)
async def test_a_binding_on_any_value_holds_after_a_restart_and_can_be_removed(tmp_path: Path, value: Any) -> None:
    arguments = {"x-match": "all", "header": value}
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        await declare_exchange(host, "e", "headers", arguments={"x-own": value})
        await host.bind("e", await declare(host, "q", **{"x-own": value}), "", arguments)
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        exchange, queue = host.routing.exchange("e"), host.queue("q")
        assert exchange.arguments == queue.arguments == {"x-own": value}
        message = Message("e", "", b"\0\0", b"")
        assert host.routing.route_message(exchange, [""], message, host.queues, {"header": value}).queues == [queue]
        await host.unbind("e", queue, "", arguments)
        assert not exchange.bindings
    async with opened(tmp_path) as broker:
        assert not broker.vhosts.get("/").routing.exchange("e").bindings
