"""A real broker with a real standby: each of them is killed under load, and no confirmed message is lost."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from pika.exceptions import AMQPError

from headrace.client.admin import Client
from headrace.pipelines.maintenance import TopicMaintenance
from tests.broker_process import BrokerProcess
from tests.listeners.amqp.running import patient_connection
from tests.listing import listed
from tests.standby_process import StandbyProcess, differences

SMALL = ("--segment-size", "64KB", "--journal-file-size", "1MB")
FREQUENT = ("--retention-interval", "200ms", "--checkpoint-interval", "200ms")  # retention waits for a checkpoint
PATIENCE_S = 120.0
QUIET = {"log_level": 0}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[BrokerProcess, StandbyProcess]]:
    """A leader that waits for one standby before it confirms, and a standby that is not started yet."""
    folder = tmp_path / "leader"
    folder.mkdir()
    leader = BrokerProcess(
        folder, *SMALL, *FREQUENT, "--standby-confirms", "1", listeners=("http", "amqp", "kafka")
    ).start()
    standby = StandbyProcess(tmp_path / "standby", url_of(leader))
    try:
        yield leader, standby
    finally:
        standby.close()
        leader.close()


def url_of(leader: BrokerProcess) -> str:
    return f"http://127.0.0.1:{leader.ports['http']}"


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


class AmqpLoad:
    """Publishes with confirms; a second connection acknowledges every other message."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.confirmed: list[bytes] = []
        self.acked: list[bytes] = []
        self.stopping = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._publish, self._consume)]

    def connect(self) -> pika.BlockingConnection:
        return patient_connection(self._port)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self.stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _publish(self) -> None:
        try:
            channel = self.connect().channel()
            channel.queue_declare("q", durable=True)
            channel.confirm_delivery()
            number = 0
            while not self.stopping.is_set():
                body = b"%d" % number
                channel.basic_publish("", "q", body, pika.BasicProperties(delivery_mode=2))
                self.confirmed.append(body)
                number += 1
        except (AMQPError, OSError):
            pass

    def _consume(self) -> None:
        try:
            channel = self.connect().channel()
            channel.queue_declare("q", durable=True)
            channel.basic_qos(prefetch_count=10)
            for method, _, body in channel.consume("q", inactivity_timeout=0.2):
                if self.stopping.is_set():
                    return
                if method is not None and int(body) % 2:
                    channel.basic_ack(method.delivery_tag)
                    self.acked.append(body)
                elif method is not None:
                    channel.basic_nack(method.delivery_tag, requeue=False)  # settled too, but by a rejection
                    self.acked.append(body)
        except (AMQPError, OSError):
            pass


class KafkaLoad:
    """An idempotent producer that keeps producing during kills, and a group that commits offsets."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.confirmed: dict[bytes, int] = {}
        self.committed = 0
        self.errors: list[str] = []
        self.stopping = threading.Event()
        self._producer = Producer(
            {
                "bootstrap.servers": self.address,
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 1,
                "message.timeout.ms": 0,
                "queue.buffering.max.messages": 500,
                "reconnect.backoff.max.ms": 200,
                **QUIET,
            }
        )
        self._threads = [threading.Thread(target=work) for work in (self._produce, self._commit)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self.stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert self._producer.flush(PATIENCE_S) == 0
        assert not self.errors

    def _produce(self) -> None:
        number = 0
        while not self.stopping.is_set():
            try:
                self._producer.produce("t", b"%d" % number + b"." * 200, partition=0, on_delivery=self._delivered)
                number += 1
            except BufferError:
                pass
            self._producer.poll(0.002)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.errors.append(str(error))
        else:
            self.confirmed[message.value()] = message.offset()

    def _commit(self) -> None:
        reader = self.reader()
        while not self.stopping.is_set():
            wanted = max(self.confirmed.values(), default=0)
            if wanted > self.committed:
                try:
                    done = reader.commit(offsets=[TopicPartition("t", 0, wanted)], asynchronous=False)
                    self.committed = done[0].offset
                except Exception:  # noqa: BLE001 - the leader is dead; only commits with a reply count
                    time.sleep(0.1)
            time.sleep(0.01)
        reader.close()

    def reader(self) -> Consumer:
        return Consumer({"bootstrap.servers": self.address, "group.id": "g", "enable.auto.commit": False, **QUIET})

    def read_all(self) -> list[bytes]:
        reader = self.reader()
        reader.assign([TopicPartition("t", 0, 0)])
        _, end = reader.get_watermark_offsets(TopicPartition("t", 0), timeout=PATIENCE_S)
        found: list[bytes] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < end:
            message = reader.poll(1)
            assert time.monotonic() < deadline
            if message is not None and not message.error():
                found.append(message.value() or b"")
        reader.close()
        return found


@pytest.mark.timeout(600)
def test_a_promoted_standby_has_everything_that_was_confirmed(
    pair: tuple[BrokerProcess, StandbyProcess], tmp_path: Path
) -> None:
    leader, standby = pair
    amqp, kafka = AmqpLoad(leader.ports["amqp"]), KafkaLoad(leader.ports["kafka"])
    amqp.start()
    kafka.start()  # before the standby starts, so that it copies files that are being written
    standby.start().wait_in_step()
    wait_until(lambda: len(amqp.confirmed) > 100 and len(kafka.confirmed) > 1000 and kafka.committed, "no progress")
    wait_until(lambda: len(amqp.acked) > 20, "no acknowledgement")
    leader.kill()
    confirmed_by_the_leader = dict(kafka.confirmed)
    amqp.stop()
    assert standby.stop() == 0
    promoted = BrokerProcess(tmp_path, "--segment-size", "64KB", listeners=("http", "amqp", "kafka"))
    promoted.data, promoted.ports = standby.data, leader.ports
    promoted.start()
    try:
        wait_until(lambda: len(kafka.confirmed) > len(confirmed_by_the_leader) + 100, "the producer makes no progress")
        kafka.stop()
        found = kafka.read_all()
        assert len(set(found)) == len(found), "a record is stored twice"
        assert {value: offset for offset, value in enumerate(found)}.items() >= kafka.confirmed.items()
        reader = kafka.reader()
        assert reader.committed([TopicPartition("t", 0)], timeout=PATIENCE_S)[0].offset >= kafka.committed > 0
        reader.close()
        left = _drained(amqp)
        assert len(set(left)) == len(left)
        assert set(amqp.confirmed) <= set(left) | set(amqp.acked)
        # Acks have no reply, so the last ones may not have reached the leader.
        assert set(left) & set(amqp.acked) <= set(amqp.acked[-50:])
    finally:
        promoted.close()


def _drained(amqp: AmqpLoad) -> list[bytes]:
    connection = amqp.connect()
    channel = connection.channel()
    found = []
    while (got := channel.basic_get("q", auto_ack=True))[0] is not None:
        found.append(got[2])
    connection.close()
    return found


@pytest.mark.timeout(600)
def test_a_standby_that_was_killed_catches_up_while_publishers_wait(
    pair: tuple[BrokerProcess, StandbyProcess],
) -> None:
    leader, standby = pair
    standby.start().wait_in_step()
    with Client(url_of(leader)) as client:
        _catch_up_and_change(client, leader, standby)
        _wait_until_equal(client, leader, standby)
    leader.kill()
    assert standby.stop() == 0


def _catch_up_and_change(client: Client, leader: BrokerProcess, standby: StandbyProcess) -> None:
    client.create_topic("old", config={"segment_size": "64KB"})
    kafka = KafkaLoad(leader.ports["kafka"])
    kafka.start()
    wait_until(lambda: len(kafka.confirmed) > 3000, "no progress")
    standby.kill()
    wait_until(lambda: not client.get("/status")["ready"], "the leader does not notice that the standby is gone")
    assert "0 of 1 are in step" in client.get("/status")["reason"]
    sealed = sum(path.with_suffix(".log").stat().st_size for path in listed(standby.data, "**/*.seal"))
    waiting = len(kafka.confirmed)
    again = standby.start().wait_in_step()
    wait_until(lambda: len(kafka.confirmed) > waiting + 500, "the publisher makes no progress")
    whole = client.get("/standby")["standbys"][0]["copy_bytes"]
    assert again["copied_bytes"] < whole - sealed // 2, "sealed segments were sent again"

    # Segments rewritten and archived by another process, retention, and a deleted topic.
    maintenance = TopicMaintenance(url_of(leader), on="local")
    maintenance.recompress("t", "zstd")
    assert maintenance.tier("t").written
    maintenance.link.close()
    client.configure_topic("t", {"retention_bytes": 100_000})
    client.delete_topic("old")
    kafka.stop()
    wait_until(lambda: client.get("/topics/t/offsets")["partitions"][0]["start"] > 0, "retention removes nothing")


def _wait_until_equal(client: Client, leader: BrokerProcess, standby: StandbyProcess) -> None:
    """Wait while the leader runs, because a kill could come between a removal by retention and its replication."""
    deadline, found = time.monotonic() + PATIENCE_S, ["the standby does not catch up"]
    while not _has_caught_up(client) or (found := differences(leader.data, standby.data)):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


def _has_caught_up(client: Client) -> bool:
    found = client.get("/standby")
    return bool(found["standbys"]) and found["standbys"][0]["bytes_behind"] == 0 and not found["waiting"]
