"""A slow disk delays only the clients that read from it, at every listener."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer as KafkaConsumer

from headrace.broker import broker as broker_module
from headrace.config import Address
from headrace.log.disk.disk import RealDisk
from tests.listeners.amqp.running import depth, eventually, patient_connection, take
from tests.listeners.http.live import SECONDS_MAX, Live


class SlowDisk(RealDisk):
    """What belongs to a log called cold is not in the page cache, and comes when the test says so."""

    def __init__(self) -> None:
        self.is_cold = False
        self.asked = threading.Event()
        self.answers = threading.Event()

    def _is_cold(self, file: int) -> bool:
        return self.is_cold and not self.answers.is_set() and "-cold/" in os.readlink(f"/proc/self/fd/{file}")

    def pread_cached(self, file: int, size: int, position: int) -> bytes | None:
        return None if self._is_cold(file) else super().pread_cached(file, size, position)

    def pread(self, file: int, size: int, position: int) -> bytes:
        if self._is_cold(file):
            self.asked.set()
            assert self.answers.wait(SECONDS_MAX)
        return super().pread(file, size, position)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    slow = SlowDisk()
    monkeypatch.setattr(broker_module, "RealDisk", lambda: slow)
    return slow


@pytest.fixture
def live(tmp_path: Path, disk: SlowDisk) -> Iterator[Live]:
    server = Live(tmp_path / "data", amqp=Address("localhost", 0), kafka=Address("localhost", 0))
    yield server
    disk.answers.set()
    server.stop()


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def others_are_served(live: Live, disk: SlowDisk) -> None:
    assert disk.asked.wait(SECONDS_MAX), "no disk read was requested"
    assert live.get("/health").status_code == 200
    live.publish("warm", {"value": "confirmed meanwhile"})
    assert live.values("warm")[-1] == "confirmed meanwhile"


def port(live: Live, listener: str) -> int:
    return int(live.server.listeners[listener].addresses[0].rpartition(":")[2])


@pytest.mark.parametrize("path", ["/topics/cold/messages", "/topics/cold/messages?timestamp=0"])
def test_http_readers_wait_for_the_disk_alone(live: Live, disk: SlowDisk, aside: ThreadPoolExecutor, path: str) -> None:
    live.publish("cold", {"value": "from disk"})
    disk.is_cold = True
    waiting = aside.submit(live.get, path)
    others_are_served(live, disk)
    assert not waiting.done()
    disk.answers.set()
    assert [message["value"] for message in waiting.result(SECONDS_MAX).json()["messages"]] == ["from disk"]


def test_browsing_a_stream_as_a_queue_waits_for_the_disk_alone(
    live: Live, disk: SlowDisk, aside: ThreadPoolExecutor
) -> None:
    live.publish("cold", {"value": "from disk"})
    disk.is_cold = True
    waiting = aside.submit(live.request, "POST", "/api/queues/%2F/cold/get", json={"count": 1})
    others_are_served(live, disk)
    assert not waiting.done()
    disk.answers.set()
    assert [message["payload"] for message in waiting.result(SECONDS_MAX).json()] == ["from disk"]


def test_a_kafka_fetch_waits_for_the_disk_alone(live: Live, disk: SlowDisk, aside: ThreadPoolExecutor) -> None:
    live.publish("cold", {"value": "from disk"})
    disk.is_cold = True
    consumer = KafkaConsumer(
        {
            "bootstrap.servers": f"127.0.0.1:{port(live, 'kafka')}",
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 10,  # shorter than the disk takes: nothing is no answer where there is something
        }
    )
    consumer.subscribe(["cold"])
    waiting: Future[object] = aside.submit(consumer.poll, SECONDS_MAX)
    others_are_served(live, disk)
    assert not waiting.done()
    disk.answers.set()
    message = waiting.result(SECONDS_MAX)
    assert message is not None and message.value() == b"from disk"  # type: ignore[attr-defined]
    consumer.close()


@pytest.mark.parametrize("how", ["summary", "messages", "plan", "replay"])
def test_browsing_dead_letters_waits_for_the_disk_alone(
    live: Live, disk: SlowDisk, aside: ThreadPoolExecutor, how: str
) -> None:
    connection = patient_connection(port(live, "amqp"))
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("cold", durable=True)
    channel.queue_declare("back", durable=True)
    channel.basic_publish("", "cold", b"from disk")
    disk.is_cold = True
    dead = "/api/headrace/dead-letters/%2F/cold"

    def looked() -> object:
        if how == "summary":
            return live.get(dead).json()["groups"][0]["messages"]
        if how == "messages":
            return len(live.get(f"{dead}/messages").json()["messages"])
        asked = {"to": "back", "dry_run": how == "plan"}
        return live.request("POST", f"{dead}/replay", json=asked).json()["matched"]

    waiting = aside.submit(looked)
    others_are_served(live, disk)
    assert not waiting.done()
    disk.answers.set()
    assert waiting.result(SECONDS_MAX) == 1
    connection.close()


@pytest.mark.parametrize("how", ["consume", "get"])
def test_an_amqp_queue_waits_for_the_disk_alone(
    live: Live, disk: SlowDisk, aside: ThreadPoolExecutor, how: str
) -> None:
    connection = patient_connection(port(live, "amqp"))
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("cold", durable=True)
    channel.basic_publish("", "cold", b"from disk")
    disk.is_cold = True

    def taken() -> Any:
        if how == "get":
            return channel.basic_get("cold", auto_ack=True)[2]
        return next(channel.consume("cold", auto_ack=True))[2]

    waiting = aside.submit(taken)
    others_are_served(live, disk)
    assert not waiting.done()
    disk.answers.set()
    assert waiting.result(SECONDS_MAX) == b"from disk"
    connection.close()


@pytest.mark.parametrize("requeue", [False, True])
def test_only_the_queue_of_a_requeued_message_waits_for_its_disk_read(
    live: Live, disk: SlowDisk, requeue: bool
) -> None:
    """For dead-lettering, or for its size in a queue with max-length-bytes. All clients waited for the disk read."""
    connection = patient_connection(port(live, "amqp"))
    channel = connection.channel()
    channel.confirm_delivery()
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead", "x-max-length-bytes": 1000}
    channel.queue_declare("dead")
    channel.queue_declare("cold", durable=True, arguments=arguments)
    channel.basic_publish("", "cold", b"from disk")
    found = take(channel, "cold")[0]
    disk.is_cold = True
    channel.basic_nack(found.delivery_tag, requeue=requeue)
    channel.connection.process_data_events()
    others_are_served(live, disk)
    assert depth(channel, "dead") == 0
    disk.answers.set()
    assert take(channel, "cold" if requeue else "dead")[2] == b"from disk"
    queue = live.server.broker.vhosts.get("/").queues["cold"]
    eventually(
        lambda: queue.limits.bytes is not None and (queue.limits.bytes.total, queue.limits.bytes._returned) == (0, {})
    )
    connection.close()


@pytest.mark.parametrize("offset", ["last", datetime.fromtimestamp(0, UTC)])
def test_only_the_consumer_that_searches_its_start_offset_waits_for_the_disk(
    live: Live, disk: SlowDisk, aside: ThreadPoolExecutor, offset: object
) -> None:
    connection = patient_connection(port(live, "amqp"))
    channel = connection.channel()
    channel.confirm_delivery()
    channel.basic_qos(prefetch_count=1)
    channel.queue_declare("cold", durable=True, arguments={"x-queue-type": "stream"})
    channel.basic_publish("", "cold", b"from disk")
    disk.is_cold = True
    waiting = aside.submit(lambda: next(channel.consume("cold", arguments={"x-stream-offset": offset}))[2])
    others_are_served(live, disk)
    assert not waiting.done()
    disk.answers.set()
    assert waiting.result(SECONDS_MAX) == b"from disk"
    connection.close()
