"""Statistics in RabbitMQ's API: what was published, routed, confirmed, delivered and acknowledged, and what a socket
has carried. Each count is compared with what the clients did."""

import socket
import struct
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.listeners.amqp.running import eventually, patient_connection
from tests.listeners.api.conftest import Served
from tests.listeners.api.test_api import post, put_queue, take


@pytest.fixture
def channel(live: Served) -> Iterator[BlockingChannel]:
    connection = patient_connection(live.amqp_port)
    yield connection.channel()
    if connection.is_open:
        connection.close()


def stats(live: Served, path: str) -> dict[str, int]:
    """The counts of an object that are not zero."""
    found = live.get(f"/api/{path}").json()["message_stats"]
    counts = {name: value for name, value in found.items() if not name.endswith("_details")}
    assert all(type(value) is int and found[f"{name}_details"]["rate"] >= 0 for name, value in counts.items())
    return {name: value for name, value in counts.items() if value}


def own_channel(live: Served, channel: BlockingChannel) -> str:
    """The path of the channel: no other test has one open."""
    eventually(lambda: len(live.get("/api/channels").json()) == 1, "the connections of other tests are gone")
    (shape,) = live.get("/api/channels").json()
    return f"channels/{shape['name'].replace(' ', '%20')}"


def consume(channel: BlockingChannel, queue: str, count: int, *, no_ack: bool = False) -> None:
    for method, _, _ in islice(channel.consume(queue, auto_ack=no_ack), count):
        if not no_ack:
            channel.basic_ack(method.delivery_tag)


def test_deliveries_are_counted_by_kind(live: Served, channel: BlockingChannel) -> None:
    channel.basic_qos(prefetch_count=5)
    channel.queue_declare("kinds", durable=True)
    channel.confirm_delivery()
    for number in range(10):
        channel.basic_publish("", "kinds", str(number).encode())
    consume(channel, "kinds", 5)
    channel.cancel()  # pika returns the ones that it has read ahead
    eventually(lambda: live.get("/api/queues/%2F/kinds").json()["messages_ready"] == 5, "they are ready again")
    method, _, _ = channel.basic_get("kinds")
    channel.basic_nack(method.delivery_tag, requeue=True)
    channel.basic_get("kinds", auto_ack=True)
    method, _, _ = channel.basic_get("kinds")
    channel.basic_ack(method.delivery_tag)
    consume(channel, "kinds", 3, no_ack=True)
    channel.cancel()
    assert channel.basic_get("kinds") == (None, None, None)
    found = stats(live, "queues/%2F/kinds")
    returned = found["deliver"] - 5  # how many pika had read ahead
    assert found == {
        "publish": 10,
        "deliver": 5 + returned,
        "deliver_no_ack": 3,
        "get": 2,
        "get_no_ack": 1,
        "get_empty": 1,
        "deliver_get": 11 + returned,
        "redeliver": found["redeliver"],
        "ack": 6,
    }
    assert found["redeliver"] >= 1
    assert stats(live, own_channel(live, channel)) == {**found, "confirm": 10}


def test_unroutable_messages_are_counted_as_returned_or_dropped(live: Served, channel: BlockingChannel) -> None:
    channel.exchange_declare("lost", "topic")
    channel.queue_declare("found", exclusive=True)
    channel.queue_bind("found", "lost", "a.#")
    for key, mandatory in (("a.1", False), ("a.2", True), ("b", False), ("b", False), ("b", True)):
        channel.basic_publish("lost", key, b"x", mandatory=mandatory)
    # Headers exchanges decide about each message in Python: they must count the same.
    channel.exchange_declare("lost-headers", "headers")
    channel.basic_publish("lost-headers", "", b"x")
    channel.basic_publish("lost-headers", "", b"x", mandatory=True)
    channel.queue_declare("found", passive=True)
    assert stats(live, "exchanges/%2F/lost") == {
        "publish_in": 5,
        "publish_out": 2,
        "return_unroutable": 1,
        "drop_unroutable": 2,
    }
    assert stats(live, "exchanges/%2F/lost-headers") == {
        "publish_in": 2,
        "return_unroutable": 1,
        "drop_unroutable": 1,
    }
    assert stats(live, own_channel(live, channel)) == {"publish": 7, "return_unroutable": 2, "drop_unroutable": 3}


def test_one_message_to_two_queues_goes_out_twice(live: Served, channel: BlockingChannel) -> None:
    channel.exchange_declare("twice", "fanout")
    for name in ("first", "second"):
        channel.queue_declare(name, exclusive=True)
        channel.queue_bind(name, "twice")
    channel.basic_publish("twice", "", b"x")
    channel.queue_declare("first", passive=True)
    assert stats(live, "exchanges/%2F/twice") == {"publish_in": 1, "publish_out": 2}
    assert stats(live, "queues/%2F/first") == {"publish": 1}


def test_the_counts_of_a_vhost_include_deleted_queues_and_exchanges(live: Served) -> None:
    assert live.request("PUT", "/api/vhosts/counted", json={}).status_code == 201
    connection = patient_connection(live.amqp_port, virtual_host="counted")
    channel = connection.channel()
    channel.confirm_delivery()
    channel.exchange_declare("gone", "fanout", durable=True)
    channel.queue_declare("gone", durable=True)
    channel.queue_bind("gone", "gone")
    for _ in range(3):
        channel.basic_publish("gone", "", b"x")
    channel.basic_publish("", "nowhere", b"x")
    consume(channel, "gone", 2)
    channel.cancel()
    channel.basic_get("gone", auto_ack=True)
    before = stats(live, "vhosts/counted")
    assert (before["publish"], before["confirm"], before["drop_unroutable"]) == (4, 4, 1)
    assert (before["ack"], before["get_no_ack"]) == (2, 1)
    channel.queue_delete("gone")
    channel.exchange_delete("gone")
    assert stats(live, "vhosts/counted") == before
    eventually(lambda: stats(live, "overview").get("drop_unroutable", 0) >= 1, "the overview has all of them")
    connection.close()


def test_publishing_over_http_counts_for_the_exchange(live: Served) -> None:
    put_queue(live, "posted")
    assert live.request("PUT", "/api/exchanges/%2F/posted", json={"type": "fanout"}).status_code == 201
    assert not post(live, "", "x", exchange="posted")
    live.request("POST", "/api/bindings/%2F/e/posted/q/posted", json={})
    assert post(live, "", "x", exchange="posted")
    assert stats(live, "exchanges/%2F/posted") == {"publish_in": 2, "publish_out": 1, "drop_unroutable": 1}
    take(live, "posted")
    assert stats(live, "queues/%2F/posted") == {"publish": 1, "get": 1, "deliver_get": 1, "ack": 1, "get_empty": 1}


# Connections


def test_a_connection_counts_the_bytes_of_its_socket(live: Served, channel: BlockingChannel) -> None:
    channel.queue_declare("carried", exclusive=True)
    before = own_connection(live)
    body = bytes(100_000)
    channel.basic_publish("", "carried", body)
    channel.queue_declare("carried", passive=True)
    sent = own_connection(live)
    assert len(body) < sent["recv_oct"] - before["recv_oct"] < len(body) + 1000, "frames as well as the body"
    assert sent["recv_cnt"] > before["recv_cnt"]
    channel.basic_get("carried")
    received = own_connection(live)
    assert len(body) < received["send_oct"] - sent["send_oct"] < len(body) + 1000
    assert received["send_cnt"] > sent["send_cnt"]
    for name in ("recv_oct", "send_oct"):
        assert received[f"{name}_details"]["rate"] >= 0


def test_a_kafka_connection_counts_the_bytes_of_its_socket(live: Served) -> None:
    host, _, port = live.kafka.rpartition(":")
    api_versions = struct.pack(">hhih", 18, 0, 1, -1)  # version 0, without a client id
    with socket.create_connection((host.strip("[]"), int(port)), timeout=60) as raw:
        raw.sendall(struct.pack(">i", len(api_versions)) + api_versions)
        stream = raw.makefile("rb")
        (size,) = struct.unpack(">i", stream.read(4))
        assert len(stream.read(size)) == size
        (shape,) = (one for one in live.get("/api/connections").json() if one["protocol"] == "Kafka")
    assert (shape["recv_oct"], shape["send_oct"], shape["send_cnt"]) == (4 + len(api_versions), 4 + size, 1)
    assert shape["recv_oct_details"] == {"rate": 0.0}


def own_connection(live: Served) -> dict[str, Any]:
    eventually(lambda: len(live.get("/api/connections").json()) == 1, "the connections of other tests are gone")
    (shape,) = live.get("/api/connections").json()
    return dict(shape)


# Queues


def test_an_idle_queue_says_since_when(live: Served, channel: BlockingChannel) -> None:
    channel.queue_declare("idle", durable=True)
    eventually(lambda: "idle_since" in live.get("/api/queues/%2F/idle").json(), "it was looked at")
    first = live.get("/api/queues/%2F/idle").json()["idle_since"]
    channel.basic_publish("", "idle", b"x")
    channel.basic_get("idle", auto_ack=True)

    def moved() -> bool:
        return bool(live.get("/api/queues/%2F/idle").json().get("idle_since", first) > first)

    eventually(moved, "it was used since")


def test_the_timestamp_of_the_oldest_message_is_shown(live: Served, channel: BlockingChannel) -> None:
    def head() -> Any:
        return live.get("/api/queues/%2F/stamped").json()["head_message_timestamp"]

    put_queue(live, "stamped")
    assert head() is None
    channel.confirm_delivery()
    for timestamp in (1_700_000_000, None, 1_700_000_002):
        channel.basic_publish("", "stamped", b"x", pika.BasicProperties(timestamp=timestamp))
    assert head() == 1_700_000_000
    (listed,) = (one for one in live.get("/api/queues").json() if one["name"] == "stamped")
    assert listed["head_message_timestamp"] == 1_700_000_000
    for expected in (None, 1_700_000_002, None):
        channel.basic_get("stamped", auto_ack=True)
        assert head() == expected


@pytest.mark.parametrize("kind", ["classic", "quorum", "stream"])
def test_quorum_queues_and_streams_name_their_leader_and_members(live: Served, kind: str) -> None:
    put_queue(live, f"led-{kind}", **{"x-queue-type": kind})
    found = live.get(f"/api/queues/%2F/led-{kind}").json()
    node = live.get("/api/overview").json()["node"]
    led = {name: found[name] for name in ("leader", "members", "online") if name in found}
    assert led == ({} if kind == "classic" else {"leader": node, "members": [node], "online": [node]})


def test_lengths_have_samples_when_asked_for(live: Served) -> None:
    put_queue(live, "sampled")
    post(live, "sampled", "x")
    asked = live.get("/api/queues/%2F/sampled?lengths_age=60&lengths_incr=5").json()
    assert asked["messages_details"]["samples"][0]["sample"] == 1
    assert "samples" not in live.get("/api/queues/%2F/sampled").json()["messages_details"]


def test_acks_of_stream_consumers_are_counted(live: Served, channel: BlockingChannel) -> None:
    channel.queue_declare("flows", durable=True, arguments={"x-queue-type": "stream"})
    channel.confirm_delivery()
    channel.basic_publish("", "flows", b"x")
    channel.basic_qos(prefetch_count=10)
    consume_stream(channel)
    eventually(lambda: stats(live, "queues/%2F/flows").get("ack") == 1, "the ack arrives")
    assert stats(live, "queues/%2F/flows") == {"publish": 1, "deliver": 1, "deliver_get": 1, "ack": 1}


def consume_stream(channel: BlockingChannel) -> None:
    for method, _, _ in channel.consume("flows", arguments={"x-stream-offset": "first"}):
        channel.basic_ack(method.delivery_tag)
        break
