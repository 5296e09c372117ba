"""AMQP and HTTP on the same queue: messages published by one are readable by the other."""

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pika
import pytest

from headrace.config import Address
from tests.listeners.amqp.running import PATIENCE_S, Running, bodies, eventually


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    broker = Running(tmp_path_factory.mktemp("data"), http=Address("localhost", 0))
    yield broker
    broker.stop()


def call(running: Running, method: str, path: str, body: object = None) -> Any:
    host, _, port = running.server.listeners["http"].addresses[0].removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=PATIENCE_S)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request(method, path, sent, {"content-type": "application/json"} if sent else {})
        answer = connection.getresponse()
        found = json.loads(answer.read() or b"null")
        assert answer.status < 300, found
        return found
    finally:
        connection.close()


def test_messages_published_over_http_reach_amqp_consumers_with_their_headers(running: Running) -> None:
    channel = running.channel()
    channel.queue_declare("orders", durable=True)
    got: list[tuple[bytes, str, Any, bool]] = []

    def take(taker: Any, method: Any, properties: Any, body: bytes) -> None:
        got.append((body, method.routing_key, properties.headers, method.redelivered))
        taker.basic_ack(method.delivery_tag)

    channel.basic_consume("orders", take)
    messages = [
        {"key": "k1", "value": "first", "headers": {"colour": "blue"}},
        {"key": "k2", "value": {"id": 7}},
        {"value": "AAE=", "encoding": "base64"},
    ]
    call(running, "POST", "/topics/orders/messages", messages)
    channel.basic_publish("", "orders", b"by amqp")
    eventually(lambda: channel.connection.process_data_events(0.05) or len(got) == 4)
    bodies = [body for body, *_ in got]
    assert (bodies[0], json.loads(bodies[1]), bodies[2], bodies[3]) == (b"first", {"id": 7}, b"\0\1", b"by amqp")
    assert [key for _, key, *_ in got] == ["k1", "k2", "", "orders"]
    assert got[0][2] == {"colour": "blue"}
    assert not any(redelivered for *_, redelivered in got)
    eventually(lambda: running.call(lambda: running.queue("orders").unacked + running.queue("orders").ready) == 0)


def test_messages_published_over_amqp_are_readable_over_http_with_their_headers(running: Running) -> None:
    channel = running.channel()
    channel.confirm_delivery()
    channel.queue_declare("invoices", durable=True)
    channel.queue_bind("invoices", "amq.topic", "eu.#")
    properties = pika.BasicProperties(headers={"n": 1, "who": "me", "deep": {"a": [1, 2]}}, content_type="text/plain",
                                      correlation_id="c-1")  # fmt: skip
    channel.basic_publish("amq.topic", "eu.de", b"body", properties)
    page = call(running, "GET", "/topics/invoices/messages?offset=0")
    (record,) = page["messages"] if isinstance(page, dict) else page
    assert (record["key"], record["value"], record["offset"]) == ("eu.de", "body", 0)
    assert record["amqp"] == {
        "exchange": "amq.topic",
        "properties": {
            "content_type": "text/plain",
            "correlation_id": "c-1",
            "headers": {"n": 1, "who": "me", "deep": {"a": [1, 2]}},
        },
    }
    call(running, "POST", "/topics/invoices/messages", record)  # unchanged
    got = [channel.basic_get("invoices", auto_ack=True) for _ in range(2)]
    assert [(method.exchange, method.routing_key) for method, _, _ in got] == [("amq.topic", "eu.de")] * 2
    assert got[0][1].headers == got[1][1].headers == properties.headers
    assert got[1][1].correlation_id == "c-1" and got[0][2] == got[1][2] == b"body"


def test_hash_property_applies_to_messages_of_every_origin(running: Running) -> None:
    """Messages from HTTP, delayed messages and dead letters all went to the same queue."""
    channel = running.channel()
    channel.exchange_declare("hash", "x-consistent-hash", arguments={"hash-property": "message_id"})
    channel.exchange_declare("wait", "x-delayed-message", arguments={"x-delayed-type": "fanout"})
    channel.exchange_bind("hash", "wait")
    channel.queue_declare("dying", arguments={"x-dead-letter-exchange": "hash", "x-message-ttl": 1})
    for n in range(4):
        channel.queue_declare(f"hashed{n}")
        channel.queue_bind(f"hashed{n}", "hash", "1")
    for n in range(20):
        for way, exchange, key in (("amqp", "hash", ""), ("delayed", "wait", ""), ("dead", "", "dying")):
            headers = {"x-delay": 1} if way == "delayed" else None
            properties = pika.BasicProperties(message_id=f"id{n}", headers=headers)
            channel.basic_publish(exchange, key, f"{way} {n}".encode(), properties)
        body = {
            "properties": {"message_id": f"id{n}"}, "routing_key": "", "payload": f"http {n}",
            "payload_encoding": "string",
        }  # fmt: skip
        call(running, "POST", "/api/exchanges/%2F/hash/publish", body)
    found: list[set[bytes]] = [set() for _ in range(4)]

    def all_arrived() -> bool:
        for n in range(4):
            found[n].update(bodies(channel, f"hashed{n}"))
        return sum(map(len, found)) == 80

    eventually(all_arrived)
    for n in range(20):
        queues = [queue for queue in range(4) if f"amqp {n}".encode() in found[queue]]
        assert {f"{way} {n}".encode() for way in ("amqp", "delayed", "dead", "http")} <= found[queues[0]]
    assert all(found)
