"""Consuming a queue over plain HTTP, beside AMQP clients: receive, ack, nack, extend."""

import base64
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from headrace.broker.access.permissions import Permission
from headrace.broker.queues import receipts
from headrace.config import Address
from tests.listeners.http.live import Live, StartLive

Json = dict[str, Any]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    server = Live(tmp_path_factory.mktemp("data"), amqp=Address("localhost", 0))
    yield server
    server.stop()


def connect(live: Live) -> pika.BlockingConnection:
    port = int(live.server.listeners["amqp"].addresses[0].rpartition(":")[2])
    return pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port, heartbeat=0))


@pytest.fixture
def channel(live: Live) -> Iterator[BlockingChannel]:
    with connect(live) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel


@pytest.fixture
def queue(channel: BlockingChannel, topic: str) -> str:
    channel.queue_declare(topic, durable=True, arguments={"x-queue-type": "quorum"})
    return topic


def fill(channel: BlockingChannel, queue: str, *bodies: bytes) -> None:
    for body in bodies:
        channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2, message_id=body.decode("latin-1")))


def post(live: Live, queue: str, action: str, **fields: Any) -> Json:
    answer = live.client.post(f"/queues/{queue}/{action}", json=fields)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def receive(live: Live, queue: str, **fields: Any) -> list[Json]:
    found: list[Json] = post(live, queue, "receive", **fields)["messages"]
    return found


def depths(live: Live, queue: str) -> tuple[int, int]:
    """(ready, in flight)"""

    async def read() -> tuple[int, int]:
        found = live.broker.vhosts.get("/").queues[queue]
        return found.ready, found.unacked

    return live.call(read())


def test_a_received_message_is_in_flight_until_it_is_acked(live: Live, channel: BlockingChannel, queue: str) -> None:
    fill(channel, queue, b"a", b"b", b"c")
    first, second = receive(live, queue, count=2)
    assert [first["value"], second["value"]] == ["a", "b"]
    assert (first["routing_key"], first["exchange"], first["properties"]["message_id"]) == (queue, "", "a")
    assert not first["redelivered"] and depths(live, queue) == (1, 2)
    assert post(live, queue, "ack", receipts=[first["receipt"], second["receipt"]]) == {"done": 2, "unknown": []}
    assert depths(live, queue) == (1, 0)
    again = post(live, queue, "ack", receipts=[first["receipt"], "nonsense"])
    assert again == {"done": 0, "unknown": [first["receipt"], "nonsense"]}
    assert channel.basic_get(queue)[2] == b"c"


def test_an_ack_is_durable_and_other_messages_return_after_a_restart(own: StartLive, topic: str) -> None:
    live = own(amqp=Address("localhost", 0))
    with connect(live) as connection:
        connection.channel().queue_declare(topic, durable=True)
        confirming = connection.channel()
        confirming.confirm_delivery()
        fill(confirming, topic, b"acked", b"lost")
    messages = receive(live, topic, count=2)
    post(live, topic, "ack", receipts=[messages[0]["receipt"]])
    live.stop()
    again = own(amqp=Address("localhost", 0))
    [back] = receive(again, topic, count=2)
    assert (back["value"], back["redelivered"]) == ("lost", True)


def test_a_message_returns_when_its_visibility_timeout_has_passed(
    live: Live, channel: BlockingChannel, queue: str
) -> None:
    fill(channel, queue, b"a")
    [late] = receive(live, queue, visibility_timeout_ms=50)
    [again] = receive(live, queue, wait_ms=60_000)
    assert (again["value"], again["redelivered"]) == ("a", True)
    assert again["properties"]["headers"]["x-delivery-count"] == 1, "it counts as a return"
    assert post(live, queue, "ack", receipts=[late["receipt"]])["unknown"] == [late["receipt"]]
    assert post(live, queue, "ack", receipts=[again["receipt"]])["done"] == 1


def test_an_extended_message_outlives_its_first_timeout(live: Live, channel: BlockingChannel, queue: str) -> None:
    fill(channel, queue, b"extended", b"forgotten")
    kept, _ = receive(live, queue, count=2, visibility_timeout_ms=300)
    assert post(live, queue, "extend", receipts=[kept["receipt"]], visibility_timeout_ms=600_000)["done"] == 1
    [back] = receive(live, queue, count=2, wait_ms=60_000)
    assert back["value"] == "forgotten", "the other one has timed out"
    assert post(live, queue, "ack", receipts=[kept["receipt"], back["receipt"]])["done"] == 2


def test_a_nack_returns_a_message_or_dead_letters_it(live: Live, channel: BlockingChannel, topic: str) -> None:
    dead = topic + ".dead"
    channel.queue_declare(dead, durable=True)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    channel.queue_declare(topic, durable=True, arguments=arguments)
    fill(channel, topic, b"a")
    [first] = receive(live, topic)
    post(live, topic, "nack", receipts=[first["receipt"]])
    [second] = receive(live, topic)
    assert second["redelivered"]
    post(live, topic, "nack", receipts=[second["receipt"]], requeue=False)
    [letter] = receive(live, dead)
    assert letter["properties"]["headers"]["x-death"][0]["reason"] == "rejected"


def test_receive_waits_for_the_first_message_of_an_amqp_publisher(
    live: Live, channel: BlockingChannel, queue: str
) -> None:
    assert receive(live, queue) == []
    answers: list[list[Json]] = []
    waiting = threading.Thread(target=lambda: answers.append(receive(live, queue, wait_ms=60_000)))
    waiting.start()
    while depth_of_consumers(live, queue) == 0:
        channel.connection.process_data_events(0)
    fill(channel, queue, b"a")
    waiting.join(60)
    assert [message["value"] for message in answers[0]] == ["a"]
    assert depth_of_consumers(live, queue) == 0


def depth_of_consumers(live: Live, queue: str) -> int:
    async def read() -> int:
        return len(live.broker.vhosts.get("/").queues[queue].consumers)

    return live.call(read())


def test_a_client_that_disconnects_while_it_waits_takes_no_message(
    live: Live, channel: BlockingChannel, queue: str
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{live.base}/queues/{queue}/receive", json={"wait_ms": 60_000}, timeout=0.2)
    while depth_of_consumers(live, queue):
        pass
    fill(channel, queue, b"a")
    assert depths(live, queue) == (1, 0)


def test_receiving_does_not_delete_an_auto_delete_queue(live: Live, channel: BlockingChannel, topic: str) -> None:
    channel.queue_declare(topic, auto_delete=True)
    channel.basic_publish("", topic, b"\xff\x00")
    [message] = receive(live, topic)
    assert base64.b64decode(message["value"]) == b"\xff\x00" and message["encoding"] == {"value": "base64"}
    post(live, topic, "ack", receipts=[message["receipt"]])
    assert receive(live, topic) == [] and channel.queue_declare(topic, passive=True).method.message_count == 0


def test_receipts_are_bounded_and_belong_to_their_queue(
    live: Live, channel: BlockingChannel, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel.queue_declare(queue + ".other", durable=True)
    fill(channel, queue, b"a", b"b", b"c")
    monkeypatch.setattr(receipts, "RECEIPTS_MAX", len(live.listener.context.receipts) + 2)
    first, _ = receive(live, queue, count=2)
    answer = live.client.post(f"/queues/{queue}/receive", json={"count": 1})
    assert answer.status_code == 429 and "not settled" in answer.json()["detail"]
    assert post(live, queue + ".other", "ack", receipts=[first["receipt"]])["unknown"] == [first["receipt"]]
    assert post(live, queue, "ack", receipts=[first["receipt"]])["done"] == 1
    assert [message["value"] for message in receive(live, queue)] == ["c"]


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("nowhere/receive", {}, 404),
        ("QUEUE/receive", {"count": 0}, 400),
        ("QUEUE/receive", {"count": 1_001}, 400),
        ("QUEUE/receive", {"visibility": 1}, 400),
        ("QUEUE/ack", {}, 400),
        ("QUEUE/ack", {"receipts": []}, 400),
        ("QUEUE/extend", {"receipts": ["x"]}, 400),
        ("QUEUE/receive?vhost=nowhere", {}, 404),
    ],
)
def test_bad_requests_are_refused(live: Live, queue: str, path: str, fields: Json, status: int) -> None:
    assert live.client.post(f"/queues/{path.replace('QUEUE', queue)}", json=fields).status_code == status


def test_a_stream_is_not_consumed_like_a_queue(live: Live, channel: BlockingChannel, topic: str) -> None:
    channel.queue_declare(topic, durable=True, arguments={"x-queue-type": "stream"})
    answer = live.client.post(f"/queues/{topic}/receive", json={})
    assert answer.status_code == 400 and f"GET /topics/{topic}/messages" in answer.json()["detail"]


def test_consuming_needs_the_permission_to_read_the_queue(own: StartLive) -> None:
    live = own(amqp=Address("localhost", 0))
    with connect(live) as connection:
        connection.channel().queue_declare("mine", durable=True)
        connection.channel().queue_declare("yours", durable=True)
    live.call(live.broker.users.put_user("ann", password="secret"))
    live.call(live.broker.users.set_permission("/", "ann", Permission(configure="", write="", read="^mine$")))
    for action, fields in (("receive", {}), ("ack", {"receipts": ["x"]}), ("nack", {"receipts": ["x"]})):
        answers = [
            live.client.post(f"/queues/{queue}/{action}", json=fields, auth=("ann", "secret")).status_code
            for queue in ("mine", "yours")
        ]
        assert answers == [200, 403], action
