"""kill -9 under idempotent and transactional Kafka clients: every confirmed record is stored once, at its offset, in
order. HEADRACE_CRASH_ROUNDS sets the number of kills (default 6; the full run is 30).
"""

import os
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.interop.kafka.broker import KafkaBroker
from tests.interop.kafka.jars import JAVA, kafka_tools

pytestmark = pytest.mark.slow
ROUNDS = int(os.environ.get("HEADRACE_CRASH_ROUNDS", "6"))
PRODUCERS = 10
PARTITIONS = 3
WAITING_MAX = 2000  # records queued in a producer, so that a slow restart does not cause a large backlog
SECONDS = 120
QUIET = {"log_level": 0}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KafkaBroker]:
    started = KafkaBroker(tmp_path).start()
    yield started
    started.close()
    assert started.errors() == [], started.said()


def make_topic(broker: KafkaBroker, name: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": broker.address, **QUIET})
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result(SECONDS)


def read_all(broker: KafkaBroker, topic: str, partitions: int, **config: Any) -> dict[int, list[tuple[int, bytes]]]:
    """Return (offset, value) of every record in order, by partition."""
    reader = Consumer(
        {
            "bootstrap.servers": broker.address,
            "group.id": "checker",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            **QUIET,
            **config,
        }
    )
    reader.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
    found: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    ended: set[int] = set()
    deadline = time.monotonic() + SECONDS
    while len(ended) < partitions:
        message = reader.poll(1)
        if message is None:
            assert time.monotonic() < deadline, "the topic cannot be read to its end"
            continue
        deadline = time.monotonic() + SECONDS  # per record, because the total time depends on the machine
        error, partition, offset = message.error(), message.partition(), message.offset()
        assert error is None or error.code() == KafkaError._PARTITION_EOF, error
        assert partition is not None and offset is not None
        if error is not None:
            ended.add(partition)
        else:
            found[partition].append((offset, message.value() or b""))
    reader.close()
    return found


class Worker:
    """An idempotent producer that keeps producing during kills."""

    def __init__(self, broker: KafkaBroker, name: str) -> None:
        self.name = name
        self.confirmed: dict[bytes, tuple[int, int]] = {}
        self.errors: list[str] = []
        self._producer = Producer(
            {
                "bootstrap.servers": broker.address,
                "enable.idempotence": True,
                "linger.ms": 1,
                "message.timeout.ms": 0,
                "queue.buffering.max.messages": WAITING_MAX,
                "reconnect.backoff.ms": 20,
                "reconnect.backoff.max.ms": 100,
                "retry.backoff.ms": 20,
                "retry.backoff.max.ms": 100,
                **QUIET,
            }
        )
        self.sent = 0
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rng = random.Random(self.name)
        while not self.stopping.is_set():
            for _ in range(rng.choice((1, 5, 50))):
                value = f"{self.name}:{self.sent}".encode()
                partition = self.sent % PARTITIONS
                try:
                    self._producer.produce("t", value, partition=partition, on_delivery=self._delivered)
                except BufferError:  # the broker is down and the queue is full
                    break
                self.sent += 1
            self._producer.poll(0.005)
        assert self._producer.flush(SECONDS) == 0, "some records got no reply"

    def _delivered(self, error: KafkaError | None, message: Any) -> None:
        if error is not None:
            self.errors.append(str(error))
        else:
            self.confirmed[message.value()] = (message.partition(), message.offset())

    def finish(self) -> None:
        self._thread.join(SECONDS * 2)
        assert not self._thread.is_alive(), "a producer does not stop"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.timeout(900)
def test_idempotent_producers_store_every_record_once_despite_kills(broker: KafkaBroker) -> None:
    make_topic(broker, "t", PARTITIONS)
    rng = random.Random(7)
    workers = [Worker(broker, f"p{number}") for number in range(PRODUCERS)]
    wait_until(lambda: all(worker.confirmed for worker in workers))  # librdkafka needs a second to get its producer id
    for _ in range(ROUNDS):
        time.sleep(rng.uniform(0.2, 0.8))
        broker.kill()
        broker.start()
    time.sleep(0.3)
    for worker in workers:
        worker.stopping.set()
    for worker in workers:
        worker.finish()
        assert worker.errors == []
        assert len(worker.confirmed) == worker.sent
    found = read_all(broker, "t", PARTITIONS)
    positions = {value: (number, offset) for number, records in found.items() for offset, value in records}
    total = sum(worker.sent for worker in workers)
    print(f"{ROUNDS} kills, {total} records")
    assert sum(len(records) for records in found.values()) == total, "D6: no record may be stored twice"
    for worker in workers:
        assert {value: positions[value] for value in worker.confirmed} == worker.confirmed, "L1, L4"
    for records in found.values():
        assert [offset for offset, _ in records] == list(range(len(records))), "L3"
        for worker in workers:
            prefix = worker.name.encode() + b":"
            numbers = [int(value.split(b":")[1]) for _, value in records if value.startswith(prefix)]
            assert numbers == sorted(numbers), "D4"
    broker.kill()
    broker.start()
    assert read_all(broker, "t", PARTITIONS) == found, "records must keep their offsets after another kill"


LOOP = """
import sys, time
from confluent_kafka import Consumer, KafkaException, Producer
address, = sys.argv[1:]
common = {"bootstrap.servers": address, "log_level": 0, "reconnect.backoff.max.ms": 100, "retry.backoff.max.ms": 100}
while True:  # after a fatal error, an application starts again with new clients
    consumer = producer = None
    try:
        producer = Producer({**common, "transactional.id": "loop", "transaction.timeout.ms": 10000})
        producer.init_transactions(30)
        consumer = Consumer({**common, "group.id": "loop", "auto.offset.reset": "earliest",
                             "enable.auto.commit": False, "session.timeout.ms": 6000,
                             "isolation.level": "read_committed"})
        consumer.subscribe(["in"])
        while True:
            messages = [m for m in consumer.consume(20, 0.2) if not m.error()]
            if not messages:
                continue
            producer.begin_transaction()
            for message in messages:
                producer.produce("out", message.value() + b"!", partition=message.partition())
            producer.send_offsets_to_transaction(
                consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), 30)
            producer.commit_transaction(30)
    except KafkaException as error:
        if producer is not None and error.args[0].txn_requires_abort():
            try:
                producer.abort_transaction(10)
            except KafkaException:
                pass
        if consumer is not None:
            consumer.close()
        time.sleep(0.05)
"""
INPUTS = 3000


def librdkafka(folder: Path) -> list[str]:
    """A client with transactions of version 1."""
    script = folder / "loop.py"
    script.write_text(LOOP)
    return [sys.executable, str(script)]


def java(folder: Path) -> list[str]:
    """A client with transactions of version 2, which adds partitions implicitly and uses an epoch per transaction."""
    return [*JAVA, "-cp", kafka_tools(), str(Path(__file__).parent / "Loop.java")]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("client", "kills"), [(librdkafka, 10), pytest.param(java, 3, marks=pytest.mark.peer)])
def test_a_transactional_read_write_loop_is_exactly_once_despite_kills(
    broker: KafkaBroker, tmp_path: Path, client: Callable[[Path], list[str]], kills: int
) -> None:
    make_topic(broker, "in", 2)
    make_topic(broker, "out", 2)
    command = client(tmp_path)

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen([*command, broker.address], stderr=subprocess.DEVNULL)

    loop = start()
    try:
        feeder = Producer({"bootstrap.servers": broker.address, "enable.idempotence": True, **QUIET})
        rng = random.Random(11)
        for kill in range(kills):
            for number in range(kill * INPUTS // kills, (kill + 1) * INPUTS // kills):
                feeder.produce("in", str(number), partition=number % 2)
            assert feeder.flush(SECONDS) == 0
            time.sleep(rng.uniform(0.2, 1.0))
            if kill % 2:
                loop.kill()
                loop.wait()
                loop = start()
            else:
                broker.kill()
                broker.start()
        expected = sorted(f"{number}!".encode() for number in range(INPUTS))
        deadline = time.monotonic() + 300
        while True:
            found = read_all(broker, "out", 2, **{"isolation.level": "read_committed"})
            values = sorted(value for records in found.values() for _, value in records)
            assert len(values) == len(set(values)), "D9: no record may appear twice"
            if values == expected:
                break
            assert loop.poll() is None, "the client ended unexpectedly"
            assert time.monotonic() < deadline, f"{len(values)} of {INPUTS} records were copied"
            time.sleep(0.5)
    finally:
        loop.kill()
        loop.wait()
