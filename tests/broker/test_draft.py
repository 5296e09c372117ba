"""Definitions of which something could not be declared: refused with its name, and with nothing done."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.broker import Broker
from headrace.broker.vhosts import definitions
from headrace.errors import InvalidInput
from tests.broker.test_broker import config

Document = dict[str, list[dict[str, Any]]]
BINDINGS_MAX = 3
LONG = "n" * 250


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    """A broker with a topic of one partition, an exchange, a queue and an exclusive queue."""
    opened = await Broker.open(config(tmp_path / "data", amqp_bindings_max=BINDINGS_MAX))
    await opened.streams.create("there-topic")
    host = opened.vhosts.get("/")
    as_is: dict[str, Any] = {"auto_delete": False, "arguments": {}}
    await host.declare_exchange("there", "direct", durable=True, internal=False, **as_is)
    await host.declare_queue("there", durable=True, exclusive=False, owner=None, **as_is)
    await host.declare_queue("mine", durable=False, exclusive=True, owner=object(), **as_is)
    await host.bind("there", host.queue("there"), "k", {})
    yield opened
    await opened.close()


def exchange(kind: str = "direct", name: str = "x", **facts: Any) -> Document:
    return {"exchanges": [{"name": name, "type": kind, **facts}]}


def queue(name: str = "q", **facts: Any) -> Document:
    return {"queues": [{"name": name, **facts}]}


def topic(name: str = "t", **facts: Any) -> Document:
    return {"topics": [{"name": name, **facts}]}


def binding(source: str = "amq.direct", destination: str = "there", **facts: Any) -> Document:
    return {"bindings": [{"source": source, "destination": destination, **facts}]}


def arguments(**named: Any) -> dict[str, Any]:
    return {"arguments": {name.replace("_", "-"): value for name, value in named.items()}}


TOO_MANY = {"bindings": [one for n in range(BINDINGS_MAX) for one in binding(routing_key=f"{n}")["bindings"]]}
HASH, DELAYED = "x-consistent-hash", "x-delayed-message"
REFUSED: list[tuple[Document, str]] = [
    # Exchanges.
    (exchange(HASH, **arguments(hash_property="colour")), "exchange 'x' in vhost '/': Unsupported property: colour"),
    (exchange(HASH, **arguments(hash_header=5)), "invalid arg 'hash-header' for exchange 'x'"),
    (exchange(HASH, **arguments(hash_header="h", hash_property="message_id")), "exchange 'x'.*mutually exclusive"),
    (exchange(**arguments(alternate_exchange=5)), "invalid arg 'alternate-exchange' for exchange 'x'"),
    (exchange(DELAYED), "exchange 'x'.*'x-delayed-type'"),
    (exchange(DELAYED, LONG, **arguments(x_delayed_type="direct")), f"exchange '{LONG}'.*255 bytes"),
    (exchange(name="amq.mine"), "exchange 'amq.mine'.*reserved prefix"),
    (exchange(name="n" * 256), "exchange 'nnn.*at most 255 bytes"),
    (exchange("fanout", "there"), "inequivalent arg 'type' for exchange 'there'"),
    ({"exchanges": [*exchange()["exchanges"], *exchange(internal=True)["exchanges"]]}, "'internal' for exchange 'x'"),
    # Queues.
    (queue("amq.mine"), "queue 'amq.mine'.*reserved prefix"),
    (queue("n" * 256), "queue 'nnn.*at most 255 bytes"),
    (queue(durable=False, **arguments(x_queue_type="quorum")), "'non-durable' for queue 'q'"),
    (queue(auto_delete=True, **arguments(x_queue_type="stream")), "'auto-delete' for queue 'q'"),
    (queue(**arguments(x_queue_type="stream", x_max_age="999999999999999Y")), "queue 'q'.*is more than"),
    (queue("there", durable=False), "inequivalent arg 'durable' for queue 'there'"),
    (queue("there", **arguments(x_max_length=3)), "inequivalent arg 'x-max-length' for queue 'there'"),
    (queue("mine", durable=False), "exclusive access to locked queue 'mine'"),
    (queue("there-topic", **arguments(x_max_priority=3)), "queue 'there-topic'.*with 1 partitions"),
    (queue("there-topic", durable=False, **arguments(x_queue_type="stream")), "'durable' for queue 'there-topic'"),
    ({"queues": [*queue()["queues"], *queue(auto_delete=True)["queues"]]}, "inequivalent arg 'auto_delete' .*'q'"),
    (
        {
            "vhosts": [{"name": "made", "default_queue_type": "stream"}],
            **queue(vhost="made", **arguments(x_message_ttl=5)),
        },
        "invalid arg 'x-message-ttl' for queue 'q' in vhost 'made'",
    ),
    # Topics, and queues on them.
    (topic("not a name"), "topic 'not a name'"),
    (topic(partitions=0), "topic 't'.*not 0"),
    (topic(config={"colour": "red"}), "topic 't': colour.*no such setting"),
    (topic(config={"retention_ms": "soon"}), "topic 't': retention_ms"),
    (topic(partitions=2) | queue("t"), "queue 't'.*with 2 partitions"),
    (topic() | queue("t", durable=False, **arguments(x_queue_type="stream")), "'durable' for queue 't'"),
    # Bindings.
    (binding(destination="nothing"), "binding of 'nothing'.*no queue 'nothing'"),
    (binding(destination="nothing", destination_type="exchange"), "no exchange 'nothing'"),
    (binding("nothing"), "no exchange 'nothing'"),
    (queue(vhost="made") | binding(destination="q"), "no queue 'q' in vhost '/'"),
    (topic(partitions=2) | binding(destination="t"), "no queue 't'"),
    (binding(destination="mine"), "binding of 'mine'.*exclusive access"),
    (binding(routing_key="k" * 256), "binding of 'there'.*a routing key has at most 255 bytes"),
    (binding("amq.headers", **arguments(x_match="some")), "binding of 'there' to exchange 'amq.headers'.*x-match"),
    (exchange(HASH) | binding("x", routing_key="many"), "binding of 'there' to exchange 'x'.*a weight"),
    (TOO_MANY, "binding of 'there'.*vhost '/' has at most 3 bindings"),
]


@pytest.mark.parametrize(("document", "words"), REFUSED)
async def test_a_document_with_an_invalid_declaration_is_refused_as_a_whole(
    broker: Broker, document: Document, words: str
) -> None:
    before = await definitions.export(broker)
    policy = {"name": "p", "pattern": "x", "definition": {"max-length": 1}}
    others: Document = {"vhosts": [{"name": "made"}], "users": [{"name": "ann", "tags": ""}], "policies": [policy]}
    with pytest.raises(InvalidInput, match=words):
        await definitions.import_(broker, {**others, **document})
    assert await definitions.export(broker) == before


@pytest.mark.parametrize(
    "document",
    [
        exchange(HASH, **arguments(hash_property="message_id")) | binding("x", routing_key="7"),
        exchange(DELAYED, **arguments(x_delayed_type=HASH)) | binding("x", routing_key="7"),
        exchange("fanout", "there", vhost="made") | queue("there", vhost="made", durable=False),
        {"exchanges": exchange("topic")["exchanges"] * 2, "queues": queue()["queues"] * 2, **binding("x", "q")},
        {"queues": [{"name": ""}, {"name": "there"}]} | exchange(name="there") | binding("there", routing_key="k"),
        topic() | queue("t", **arguments(x_queue_type="stream")) | binding(destination="t"),
        topic() | queue("t") | binding(destination="t"),
        topic(partitions=3) | queue("t", **arguments(x_max_priority=2)),
        binding(destination="there-topic") | queue("there-topic", **arguments(x_max_length=5)),
        {"vhosts": [{"name": "made", "default_queue_type": "quorum"}], **queue(vhost="made")},
        binding("amq.topic", "there", destination_type="exchange") | topic("there-topic", partitions=0),
        {"bindings": binding(routing_key="a")["bindings"] * 9 + binding("there", routing_key="k")["bindings"]},
    ],
)
async def test_a_valid_document_can_be_applied_repeatedly(broker: Broker, document: Document) -> None:
    await definitions.import_(broker, document)
    done = await definitions.export(broker)
    await definitions.import_(broker, document)
    again = await definitions.export(broker)
    unnamed = [one for one in again["queues"] if one not in done["queues"]]
    assert all(one["name"].startswith("amq.gen-") for one in unnamed)
    assert {**again, "queues": done["queues"]} == done
    await definitions.import_(broker, done)
