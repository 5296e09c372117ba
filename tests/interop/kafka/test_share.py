"""Share groups (KIP-932) with the clients that have them: librdkafka's ShareConsumer and Kafka's own tool."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Message, Producer, ShareConsumer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from tests.interop.kafka.broker import KafkaBroker
from tests.interop.kafka.jars import kafka_tools, run_java
from tests.interop.kafka.test_confluent import SECONDS, make_topic, produce

Name = Callable[[str], str]


def begin_at_start(broker: KafkaBroker, group: str) -> str:
    """A new share group begins at the end otherwise."""
    return tell(broker, group, "share.auto.offset.reset", "earliest")


def tell(broker: KafkaBroker, group: str, setting: str, value: str) -> str:
    """As kafka-configs --entity-type groups does."""
    entry = ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": broker.address})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(SECONDS)
    return group


def read(consumers: list[Any], count: int) -> dict[int, list[bytes]]:
    """Values by the consumer that got them."""
    found: dict[int, list[bytes]] = {number: [] for number in range(len(consumers))}
    deadline = time.monotonic() + SECONDS
    while sum(map(len, found.values())) < count and time.monotonic() < deadline:
        for number, consumer in enumerate(consumers):
            for message in consumer.poll(0.2) or ():
                assert message.error() is None, message.error()
                found[number].append(message.value())
    return found


def test_two_members_share_one_partition_and_each_record_goes_to_one(broker: KafkaBroker, name: Name) -> None:
    topic, group = make_topic(broker, name("t")), begin_at_start(broker, name("g"))
    consumers = [ShareConsumer({"bootstrap.servers": broker.address, "group.id": group}) for _ in range(2)]
    for consumer in consumers:
        consumer.subscribe([topic])
    values = [b"%d" % number for number in range(300)]
    produce(broker, topic, values)
    found = read(consumers, 300)
    assert sorted(value for own in found.values() for value in own) == sorted(values)
    for consumer in consumers:
        consumer.commit_sync()
        consumer.close()
    again = ShareConsumer({"bootstrap.servers": broker.address, "group.id": group})
    again.subscribe([topic])
    produce(broker, topic, [b"later"])
    assert read([again], 1) == {0: [b"later"]}, "what was accepted does not come back"
    again.close()


def test_records_not_accepted_before_close_are_delivered_again(broker: KafkaBroker, name: Name) -> None:
    topic, group = make_topic(broker, name("t")), begin_at_start(broker, name("g"))
    produce(broker, topic, [b"a", b"b", b"c"])
    explicit = {"share.acknowledgement.mode": "explicit"}
    first = ShareConsumer({"bootstrap.servers": broker.address, "group.id": group, **explicit})
    first.subscribe([topic])
    messages: list[Message[bytes, bytes]] = []
    deadline = time.monotonic() + SECONDS
    while len(messages) < 3 and time.monotonic() < deadline:
        messages += list(first.poll(0.5) or ())
    assert [message.value() for message in messages] == [b"a", b"b", b"c"]
    first.acknowledge(messages[0])
    first.commit_sync()
    first.close()
    second = ShareConsumer({"bootstrap.servers": broker.address, "group.id": group})
    second.subscribe([topic])
    assert read([second], 2) == {0: [b"b", b"c"]}
    second.close()


def transactional(broker: KafkaBroker, name: str) -> Producer:
    producer = Producer({"bootstrap.servers": broker.address, "transactional.id": name})
    producer.init_transactions(SECONDS)
    return producer


def test_a_read_committed_share_group_gets_only_committed_records(broker: KafkaBroker, name: Name) -> None:
    topic, group = make_topic(broker, name("t")), begin_at_start(broker, name("g"))
    tell(broker, group, "share.isolation.level", "read_committed")
    one, two = transactional(broker, name("x")), transactional(broker, name("y"))
    one.begin_transaction()
    one.produce(topic, b"aborted")
    one.flush(SECONDS)
    produce(broker, topic, [b"plain"])
    two.begin_transaction()
    two.produce(topic, b"committed")
    two.flush(SECONDS)
    two.commit_transaction(SECONDS)
    consumer = ShareConsumer({"bootstrap.servers": broker.address, "group.id": group})
    consumer.subscribe([topic])
    assert not consumer.poll(1.0), "before it is known what becomes of the first"
    one.abort_transaction(SECONDS)
    two.begin_transaction()
    two.produce(topic, b"aborted, too")
    two.flush(SECONDS)
    two.abort_transaction(SECONDS)
    produce(broker, topic, [b"last"])
    assert read([consumer], 3) == {0: [b"plain", b"committed", b"last"]}
    consumer.close()


@pytest.mark.peer
@pytest.mark.slow
def test_the_share_consumer_of_kafka_gets_nothing_of_aborted_transactions(broker: KafkaBroker, name: Name) -> None:
    topic, group = make_topic(broker, name("t")), begin_at_start(broker, name("g"))
    where = ("--entity-type", "groups", "--entity-name", group)
    kafka_configs(broker, *where, "--alter", "--add-config", "share.isolation.level=read_committed")
    assert "share.isolation.level=read_committed" in kafka_configs(broker, *where, "--describe")
    producer = transactional(broker, name("x"))
    for value in (b"one", b"two", b"three", b"four"):
        producer.begin_transaction()
        producer.produce(topic, value)
        producer.flush(SECONDS)
        if value in (b"one", b"three"):
            producer.abort_transaction(SECONDS)
        else:
            producer.commit_transaction(SECONDS)
    read_two = ("--topic", topic, "--group", group, "--max-messages", "2", "--timeout-ms", "90000")
    assert java(broker, "ConsoleShareConsumer", *read_two).splitlines()[:2] == ["two", "four"]


def kafka_configs(broker: KafkaBroker, *arguments: str) -> str:
    return run_java(kafka_tools(), "kafka.admin.ConfigCommand", "--bootstrap-server", broker.address, *arguments)


@pytest.mark.peer
@pytest.mark.slow
def test_the_share_consumer_and_the_share_group_tool_of_kafka(broker: KafkaBroker, name: Name) -> None:
    topic, group = make_topic(broker, name("t")), begin_at_start(broker, name("g"))
    produce(broker, topic, [b"one", b"two", b"three"])
    read_three = ("--topic", topic, "--group", group, "--max-messages", "3", "--timeout-ms", "90000")
    assert java(broker, "ConsoleShareConsumer", *read_three).splitlines()[:3] == ["one", "two", "three"]
    which = ("--group", group, "--topic", topic)
    reset = java(broker, "group.ShareGroupCommand", "--reset-offsets", "--to-earliest", *which, "--execute")
    assert [line.split()[-3:] for line in reset.splitlines() if topic in line] == [[topic, "0", "0"]], reset
    shown = java(broker, "group.ShareGroupCommand", "--describe", "--group", group)
    [line] = [line for line in shown.splitlines() if topic in line]
    assert line.split()[:4] == [group, topic, "0", "0"], shown


def java(broker: KafkaBroker, tool: str, *arguments: str) -> str:
    name = f"org.apache.kafka.tools.consumer.{tool}"
    return run_java(kafka_tools(), name, "--bootstrap-server", broker.address, *arguments)
