"""Consumers of a group are restarted one by one with the other group protocol, and the group goes on."""

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupState, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.interop.kafka.broker import KafkaBroker, present
from tests.interop.kafka.jars import JAVA, kafka_tools
from tests.interop.kafka.test_confluent import SECONDS, closing, consumer, make_topic, produce, wait_for
from tests.interop.kafka.test_java import CONSUME

__all__ = ["closing"]  # a fixture

Name = Callable[[str], str]
PARTITIONS = 6


class Source:
    """Produces numbers, to each partition in turn, until it is stopped."""

    def __init__(self, broker: KafkaBroker, topic: str) -> None:
        self.produced = 0
        self._topic = topic
        self._producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 5})
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            for partition in range(PARTITIONS):
                self._producer.produce(self._topic, b"%d" % self.produced, partition=partition)
                self.produced += 1
            self._producer.flush(SECONDS)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


class Members:
    """The consumers of one group, and what they have read."""

    def __init__(self, broker: KafkaBroker, group: str, topic: str, closing: list[Consumer]) -> None:
        self.seen: set[int] = set()
        self.readers: dict[int, set[str]] = {partition: set() for partition in range(PARTITIONS)}
        self.consumers: dict[str, Consumer] = {}
        self._broker, self._group, self._topic = broker, group, topic
        self._closing = closing
        self._admin = AdminClient({"bootstrap.servers": broker.address})

    def start(self, name: str, **config: Any) -> None:
        commits = {"enable.auto.commit": True, "auto.commit.interval.ms": 200}
        one = consumer(self._broker, self._group, **commits, log_level=0, **config)
        one.subscribe([self._topic])
        self.consumers[name] = one
        self._closing.append(one)

    def stop(self, name: str) -> None:
        one = self.consumers.pop(name)
        self._closing.remove(one)
        one.close()

    def read(self) -> None:
        for name, one in self.consumers.items():
            for message in one.consume(100, 0.02):
                assert message.error() is None, message.error()
                self.seen.add(int(present(message.value())))
                self.readers[present(message.partition())].add(name)

    def read_until(self, true: Callable[[], bool]) -> None:
        def look() -> bool:
            self.read()
            return true()

        wait_for(look)

    def is_stable(self) -> bool:
        """Every partition has one reader, each reader as many, and the broker sees it so."""
        self.read()
        held = [one.partition for member in self.consumers.values() for one in member.assignment()]
        each = {len(one.assignment()) for one in self.consumers.values()}
        if sorted(held) != list(range(PARTITIONS)) or len(each) != 1:
            return False
        state = self._admin.describe_consumer_groups([self._group])[self._group].result(SECONDS).state
        return bool(state == ConsumerGroupState.STABLE)

    def committed(self) -> list[int]:
        places = [TopicPartition(self._topic, number) for number in range(PARTITIONS)]
        return [max(0, one.offset) for one in next(iter(self.consumers.values())).committed(places, SECONDS)]


@pytest.fixture
def started(broker: KafkaBroker, name: Name, closing: list[Consumer]) -> Iterator[tuple[Source, Members]]:
    topic, group = make_topic(broker, name("t"), PARTITIONS), name("g")
    source = Source(broker, topic)
    yield source, Members(broker, group, topic, closing)
    source.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_a_group_is_upgraded_and_downgraded_member_by_member(
    started: tuple[Source, Members], strategy: str, static: bool
) -> None:
    source, members = started
    old = {"group.protocol": "classic", "partition.assignment.strategy": strategy, "heartbeat.interval.ms": 300}
    new = {"group.protocol": "consumer"}

    def start(name: str, config: dict[str, Any]) -> None:
        members.start(name, **config, **({"group.instance.id": name} if static else {}))

    for name in "abc":
        start(name, old)
    wait_for(members.is_stable)
    committed = members.committed()
    for config in (new, old):
        for name in "abc":
            members.stop(name)
            start(name, config)
            wait_for(members.is_stable)
            check_readers(source, members)
            before, committed = committed, members.committed()
            assert all(was <= now for was, now in zip(before, committed, strict=True))
    source.stop()
    members.read_until(lambda: len(members.seen) == source.produced)
    members.read_until(lambda: sum(members.committed()) == source.produced)


def check_readers(source: Source, members: Members) -> None:
    """Of a stable group: what is produced from now on is read by one member for each partition."""
    before = source.produced
    members.read_until(lambda: members.seen >= set(range(before)))
    for readers in members.readers.values():
        readers.clear()
    members.read_until(lambda: all(members.readers.values()))
    assert [len(readers) for readers in members.readers.values()] == [1] * PARTITIONS


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_a_kill_of_the_broker_moves_no_partition_in_a_group_of_both_protocols(
    own_broker: KafkaBroker, name: Name, closing: list[Consumer], strategy: str
) -> None:
    topic = make_topic(own_broker, name("t"), PARTITIONS)
    members = Members(own_broker, name("g"), topic, closing)
    quick = {"reconnect.backoff.max.ms": 100, "retry.backoff.max.ms": 100}
    members.start("old", **{"group.protocol": "classic", "partition.assignment.strategy": strategy}, **quick)
    members.start("new", **{"group.protocol": "consumer"}, **quick)
    wait_for(members.is_stable)
    before = {who: one.assignment() for who, one in members.consumers.items()}
    own_broker.kill()
    own_broker.start()
    produce(own_broker, topic, [b"%d" % number for number in range(100)])
    members.read_until(lambda: len(members.seen) == 100)
    members.read_until(lambda: sum(members.committed()) == 100)
    assert {who: one.assignment() for who, one in members.consumers.items()} == before


@pytest.fixture
def broker_without_changes(tmp_path: Path) -> Iterator[KafkaBroker]:
    started = KafkaBroker(tmp_path, "--kafka-migration-policy", "disabled").start()
    yield started
    started.stop()


@pytest.mark.timeout(360)
def test_a_classic_group_is_not_upgraded_if_the_broker_forbids_it(
    broker_without_changes: KafkaBroker, name: Name, closing: list[Consumer]
) -> None:
    broker = broker_without_changes
    members = Members(broker, name("g"), make_topic(broker, name("t"), PARTITIONS), closing)
    members.start("old", **{"group.protocol": "classic"})
    wait_for(members.is_stable)
    members.start("new", **{"group.protocol": "consumer"})
    refused: list[KafkaError | None] = []

    def is_refused() -> bool:
        message = members.consumers["new"].poll(0.1)
        if message is not None and message.error() is not None:
            refused.append(message.error())
        return bool(refused)

    wait_for(is_refused)
    assert "group id does not exist" in str(refused[0]), refused
    members.stop("new")
    assert members.is_stable()


class JavaReader:
    """Kafka's console consumer. It commits and leaves when it is asked to end."""

    def __init__(self, broker: KafkaBroker, group: str, topic: str, out: Path, *properties: str) -> None:
        self._out = out
        more = [word for one in properties for word in ("--command-property", one)]
        which = ("--bootstrap-server", broker.address, "--topic", topic, "--group", group, "--from-beginning")
        with out.open("wb") as stdout, out.with_suffix(".log").open("wb") as stderr:
            command = [*JAVA, "-cp", kafka_tools(), CONSUME, *which, *more]
            self.process = subprocess.Popen(command, stdout=stdout, stderr=stderr)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(SECONDS)

    @property
    def seen(self) -> set[int]:
        return {int(line) for line in self._out.read_bytes().split(b"\n")[:-1]}


@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.timeout(600)
@pytest.mark.parametrize("assignor", ["RangeAssignor", "CooperativeStickyAssignor"])
def test_java_consumers_go_to_the_new_protocol_and_back_member_by_member(
    broker: KafkaBroker, name: Name, tmp_path: Path, assignor: str
) -> None:
    topic, group = make_topic(broker, name("t"), PARTITIONS), name("g")
    old = (f"partition.assignment.strategy=org.apache.kafka.clients.consumer.{assignor}", "heartbeat.interval.ms=300")
    new = ("group.protocol=consumer",)
    source, readers, seen = Source(broker, topic), list[JavaReader](), set[int]()

    def start(*properties: str) -> JavaReader:
        return JavaReader(broker, group, topic, tmp_path / name("out"), *properties)

    def is_shared() -> bool:
        """Both read what is produced now, and nothing is read by both."""
        before = source.produced
        wait_for(lambda: seen.union(*(one.seen for one in readers)) >= set(range(before)))
        latest = [{number for number in one.seen if number >= before - 2 * PARTITIONS} for one in readers]
        return all(latest) and not set.intersection(*latest)

    try:
        readers += [start(*old), start(*old)]
        wait_for(is_shared)
        for properties in (new, old):
            for index in range(2):
                readers[index].stop()
                seen |= readers[index].seen
                readers[index] = start(*properties)
                wait_for(is_shared)
        source.stop()
        wait_for(lambda: len(seen.union(*(one.seen for one in readers))) == source.produced)
    finally:
        source.stop()
        for one in readers:
            one.stop()
