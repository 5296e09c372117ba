"""Records with properties that cannot be decoded: Kafka clients send them, and AMQP tables may have too many fields.

None of them keeps its queue from doing what it does with all others."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.broker import Broker
from headrace.broker.queues.dead_letter_browser import Selection, death_of
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.view import stored_log
from headrace.broker.types.message import Message, from_record
from headrace.record import codec
from headrace.record.amqp.properties import OBJECTS_MAX, Value, encode_properties
from headrace.record.types import Record
from tests.broker.queue_world import bodies, declare, opened, pass_time, say, until

Headers = tuple[tuple[str, bytes | None], ...]


def sized(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


LONG_NAME = b"\xff" + b"\xff" * 255 + b"V"  # as text it would not fit any more
DEATHS = b"\x07x-deathA" + sized(b"F" + sized(LONG_NAME))
STRANGE: dict[str, Headers] = {
    "cut short": (("amqp.properties", b"\x21\x00garbage"), ("amqp.exchange", b"")),
    "empty": (("amqp.properties", b""), ("amqp.exchange", b"")),
    "flags alone": (("amqp.properties", b"\x29\x00"), ("amqp.exchange", b"")),
    "unknown flags": (("amqp.properties", b"\xff\xff\xff"), ("other", b"")),
    "null": (("amqp.properties", None), ("amqp.exchange", None)),
    "too many fields": (
        ("amqp.properties", encode_properties({"headers": {str(n): None for n in range(OBJECTS_MAX + 1)}})),
        ("amqp.exchange", b""),
    ),
    "names that do not fit": (("amqp.properties", b"\x20\x00" + sized(DEATHS)), ("amqp.exchange", b"")),
}
every_kind = pytest.mark.parametrize("headers", STRANGE.values(), ids=STRANGE.keys())


def test_a_message_is_routed_by_its_cc_keys_despite_malformed_properties() -> None:
    headers: dict[str, Value] = {"CC": [5, "caf\udce9", "plain"]}
    message = Message("", "own", encode_properties({"headers": headers}), b"")
    assert message.take_receivers() == ["own", "caf\udce9", "plain"]


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with opened(tmp_path) as made:
        yield made


async def fill(queue: Queue, headers: Headers) -> None:
    """Something strange, and something usual behind it."""
    now_ms = queue.vhost.clock.now_ms()
    writer = codec.BatchWriter(now_ms, 4096)
    writer.append(b"k", b"strange", headers, now_ms)
    await stored_log(queue.view).append(writer.finish(0))
    say(queue, b"usual")
    await queue.vhost.flushes.wait_all_durable()


async def mortal(broker: Broker, **arguments: Any) -> tuple[Queue, Queue]:
    host = broker.vhosts.get("/")
    dead = await declare(host, "dead")
    options: dict[str, Any] = {"x_dead_letter_exchange": "", "x_dead_letter_routing_key": "dead"}
    return await declare(host, "q", **options, **arguments), dead


@every_kind
async def test_malformed_properties_do_not_prevent_expiration(broker: Broker, headers: Headers) -> None:
    queue, dead = await mortal(broker, x_message_ttl=500)
    await fill(queue, headers)
    pass_time(broker)
    queue.drop_expired()
    await until(lambda: dead.ready == 2)
    assert bodies(dead) == [b"strange", b"usual"]


@every_kind
async def test_malformed_properties_do_not_prevent_max_length_from_dropping_messages(
    broker: Broker, headers: Headers
) -> None:
    queue, dead = await mortal(broker, x_max_length=0)
    await fill(queue, headers)
    await until(lambda: dead.ready == 2)
    assert bodies(dead) == [b"strange", b"usual"]


@every_kind
async def test_malformed_properties_do_not_prevent_dead_lettering_with_x_death(
    broker: Broker, headers: Headers
) -> None:
    queue, dead = await mortal(broker)
    await fill(queue, headers)
    for _ in range(2):
        taken = queue.get()
        assert taken is not None
        queue.reject(taken[0], taken[1])
    await until(lambda: dead.ready == 2)
    while (found := dead.get()) is not None:
        death = death_of(found[2])
        assert death is not None and (death.queue, death.reason) == ("q", "rejected")


@every_kind
async def test_malformed_properties_do_not_prevent_a_requeue_with_its_delivery_count(
    broker: Broker, headers: Headers
) -> None:
    queue = await declare(broker.vhosts.get("/"), "q", x_queue_type="quorum")
    await fill(queue, headers)
    for count in range(3):
        taken = queue.get()
        assert taken is not None
        assert taken[2].headers().get("x-delivery-count", 0) == count
        queue.give_back(taken[0], taken[1])


@every_kind
async def test_malformed_properties_do_not_prevent_a_replay(broker: Broker, headers: Headers) -> None:
    queue, dead = await mortal(broker)
    await fill(dead, headers)
    assert (await broker.dead_letters.summary(dead))[1] == 2
    await broker.dead_letters.replay(dead, Selection(), replay_id="r", to="q")
    ended = await broker.dead_letters.wait("r")
    assert (ended.state, ended.moved, bodies(queue)) == ("done", 2, [b"strange", b"usual"])


def test_valid_properties_are_decoded() -> None:
    record = Record(0, 0, b"k", b"", (("amqp.properties", encode_properties({"priority": 3})), ("amqp.exchange", b"")))
    assert from_record(record).priority() == 3
