"""confluent-kafka (librdkafka): what most people outside of Java use."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import (
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from tests.interop.kafka.broker import KafkaBroker

Name = Callable[[str], str]
SECONDS = 60  # a busy machine is slow, not wrong


@pytest.fixture
def admin(broker: KafkaBroker) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.address})


def make_topic(broker: KafkaBroker, topic: str, partitions: int = 1, **config: str) -> str:
    admin = AdminClient({"bootstrap.servers": broker.address})
    dotted = {key.replace("_", "."): value for key, value in config.items()}
    for future in admin.create_topics([NewTopic(topic, partitions, 1, config=dotted)]).values():
        future.result(SECONDS)
    return topic


def produce(broker: KafkaBroker, topic: str, values: list[bytes], **config: Any) -> list[tuple[int, int]]:
    """(partition, offset) of each."""
    places: list[tuple[int, int]] = []
    failures: list[KafkaError] = []

    def delivered(error: KafkaError | None, message: Any) -> None:
        if error is not None:
            failures.append(error)
        else:
            places.append((message.partition(), message.offset()))

    producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 5, **config})
    for value in values:
        producer.produce(topic, value, on_delivery=delivered)
    assert producer.flush(SECONDS) == 0
    assert failures == []
    return places


def consumer(broker: KafkaBroker, group: str, **config: Any) -> Consumer:
    settings = {
        "bootstrap.servers": broker.address,
        "group.id": group,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        **config,
    }
    return Consumer(settings)


def read(reader: Consumer, count: int, seconds: float = SECONDS) -> list[Any]:
    messages: list[Any] = []
    deadline = time.monotonic() + seconds
    while len(messages) < count and time.monotonic() < deadline:
        message = reader.poll(0.2)
        if message is None:
            continue
        if message.error():
            raise KafkaException(message.error())
        messages.append(message)
    return messages


@pytest.fixture
def closing() -> Iterator[list[Consumer]]:
    consumers: list[Consumer] = []
    yield consumers
    for one in consumers:
        one.close()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_produced_records_are_read_in_order_and_offsets_are_committed(
    broker: KafkaBroker, name: Name, protocol: str
) -> None:
    topic, group = name("t"), name("g")
    values = [str(number).encode() for number in range(500)]
    assert produce(broker, topic, values) == [(0, number) for number in range(500)]
    first = consumer(broker, group, **{"group.protocol": protocol})
    first.subscribe([topic])
    assert [message.value() for message in read(first, 500)] == values
    [committed] = first.commit(asynchronous=False)
    assert committed.offset == 500
    first.close()
    produce(broker, topic, [b"later"])
    second = consumer(broker, group, **{"group.protocol": protocol})
    second.subscribe([topic])
    assert [message.value() for message in read(second, 1)] == [b"later"]
    second.close()


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_codec_passes_through(broker: KafkaBroker, name: Name, codec: str) -> None:
    topic = name("t")
    values = [b"value %d " % number * 20 for number in range(300)]
    produce(broker, topic, values, **{"compression.type": codec})
    reader = consumer(broker, name("g"))
    reader.assign([TopicPartition(topic, 0, 0)])
    assert [message.value() for message in read(reader, 300)] == values
    reader.close()


def test_keys_headers_and_timestamps_survive_a_round_trip(broker: KafkaBroker, name: Name) -> None:
    topic = name("t")
    producer = Producer({"bootstrap.servers": broker.address})
    producer.produce(topic, b"value", key=b"key", headers=[("h", b"1"), ("h", None)], timestamp=1_600_000_000_123)
    producer.produce(topic, None, key=b"tombstone")
    assert producer.flush(SECONDS) == 0
    reader = consumer(broker, name("g"))
    reader.assign([TopicPartition(topic, 0, 0)])
    one, tombstone = read(reader, 2)
    assert (one.key(), one.value(), one.headers()) == (b"key", b"value", [("h", b"1"), ("h", None)])
    assert one.timestamp()[1] == 1_600_000_000_123
    assert tombstone.value() is None
    reader.close()


@pytest.mark.parametrize("acks", [0, 1, "all"])
def test_all_kinds_of_acks_deliver(broker: KafkaBroker, name: Name, acks: Any) -> None:
    topic = name("t")
    produce(broker, topic, [b"a", b"b"], acks=acks)
    reader = consumer(broker, name("g"))
    reader.assign([TopicPartition(topic, 0, 0)])
    assert [message.value() for message in read(reader, 2)] == [b"a", b"b"]
    reader.close()


def test_an_idempotent_producer_delivers_once_and_in_order(broker: KafkaBroker, name: Name) -> None:
    topic = make_topic(broker, name("t"), 3)
    values = [str(number).encode() for number in range(2000)]
    produce(broker, topic, values, **{"enable.idempotence": True, "linger.ms": 0})
    reader = consumer(broker, name("g"))
    reader.assign([TopicPartition(topic, number, 0) for number in range(3)])
    messages = read(reader, 2000)
    assert sorted(int(message.value()) for message in messages) == list(range(2000))
    for number in range(3):
        own = [int(message.value()) for message in messages if message.partition() == number]
        assert own == sorted(own)
    reader.close()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_two_consumers_share_the_partitions_and_one_takes_over_when_the_other_leaves(
    broker: KafkaBroker, name: Name, closing: list[Consumer], protocol: str
) -> None:
    topic, group = make_topic(broker, name("t"), 4), name("g")
    one = consumer(broker, group, **{"group.protocol": protocol})
    two = consumer(broker, group, **{"group.protocol": protocol})
    closing.append(one)
    for each in (one, two):
        each.subscribe([topic])

    def each_has_its_own() -> bool:
        first, second = ({part.partition for part in each.assignment()} for each in (one, two))
        return len(first) == len(second) == 2 and first | second == set(range(4))

    wait_for(each_has_its_own, one, two)
    two.close()
    wait_for(lambda: len(one.assignment()) == 4, one)


@pytest.mark.parametrize("static", [False, True])
def test_partitions_that_a_topic_grows_by_are_read(
    broker: KafkaBroker, name: Name, admin: AdminClient, closing: list[Consumer], static: bool
) -> None:
    topic = make_topic(broker, name("t"))
    settings = {"topic.metadata.refresh.interval.ms": 200, "partition.assignment.strategy": "range"}
    reader = consumer(broker, name("g"), **settings, **({"group.instance.id": "one"} if static else {}))
    closing.append(reader)
    reader.subscribe([topic])
    wait_for(lambda: len(reader.assignment()) == 1, reader)
    for future in admin.create_partitions([NewPartitions(topic, 3)]).values():
        future.result(SECONDS)
    wait_for(lambda: len(reader.assignment()) == 3, reader)


def wait_for(true: Callable[[], bool], *consumers: Consumer, seconds: float = 2 * SECONDS) -> list[Any]:
    """Polls until it is true; what was read meanwhile."""
    messages = []
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, [one.assignment() for one in consumers]
        if not consumers:
            time.sleep(0.02)  # leaves the core to the consumers that are waited for
        for one in consumers:
            message = one.poll(0.05)
            if message is not None and not message.error():
                messages.append(message)
    return messages


def test_offsets_are_found_by_time(broker: KafkaBroker, name: Name, admin: AdminClient) -> None:
    topic = make_topic(broker, name("t"))
    producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 0})
    for number in range(10):
        producer.produce(topic, str(number), timestamp=1_600_000_000_000 + number * 1000)
        assert producer.flush(SECONDS) == 0
    reader = consumer(broker, name("g"))
    [found] = reader.offsets_for_times([TopicPartition(topic, 0, 1_600_000_004_500)], SECONDS)
    assert found.offset == 5
    [late] = reader.offsets_for_times([TopicPartition(topic, 0, 1_700_000_000_000)], SECONDS)
    assert late.offset == -1
    assert reader.get_watermark_offsets(TopicPartition(topic, 0), SECONDS) == (0, 10)
    which = TopicPartition(topic, 0)
    for spec, offset in (
        (OffsetSpec.max_timestamp(), 9),
        (OffsetSpec.earliest(), 0),
        (OffsetSpec.latest(), 10),
    ):
        assert admin.list_offsets({which: spec})[which].result(SECONDS).offset == offset
    reader.close()


def test_a_transaction_is_visible_completely_or_not_at_all(broker: KafkaBroker, name: Name) -> None:
    topic = make_topic(broker, name("t"), 2)
    producer = Producer({"bootstrap.servers": broker.address, "transactional.id": name("x")})
    producer.init_transactions(SECONDS)

    def run(values: list[str], *, commit: bool) -> None:
        producer.begin_transaction()
        for number, value in enumerate(values):
            producer.produce(topic, value, partition=number % 2)
        producer.flush(SECONDS)
        (producer.commit_transaction if commit else producer.abort_transaction)(SECONDS)

    run(["a", "b"], commit=True)
    run(["lost", "lost too"], commit=False)
    run(["c", "d"], commit=True)
    both = [TopicPartition(topic, number, 0) for number in range(2)]
    committed = consumer(broker, name("g"), **{"isolation.level": "read_committed"})
    committed.assign(both)
    assert sorted(message.value() for message in read(committed, 4)) == [b"a", b"b", b"c", b"d"]
    assert read(committed, 1, 0.5) == []
    everything = consumer(broker, name("g"), **{"isolation.level": "read_uncommitted"})
    everything.assign(both)
    assert len(read(everything, 6)) == 6
    committed.close()
    everything.close()


def test_an_open_transaction_holds_back_committed_readers_only(broker: KafkaBroker, name: Name) -> None:
    topic = make_topic(broker, name("t"))
    producer = Producer({"bootstrap.servers": broker.address, "transactional.id": name("x")})
    producer.init_transactions(SECONDS)
    producer.begin_transaction()
    producer.produce(topic, b"open")
    producer.flush(SECONDS)
    produce(broker, topic, [b"plain"])
    committed = consumer(broker, name("g"), **{"isolation.level": "read_committed"})
    committed.assign([TopicPartition(topic, 0, 0)])
    assert read(committed, 1, 0.5) == []
    producer.commit_transaction(SECONDS)
    assert [message.value() for message in read(committed, 2)] == [b"open", b"plain"]
    committed.close()


def test_a_second_producer_of_the_same_name_fences_the_first(broker: KafkaBroker, name: Name) -> None:
    topic, transactional_id = make_topic(broker, name("t")), name("x")
    first = Producer({"bootstrap.servers": broker.address, "transactional.id": transactional_id})
    first.init_transactions(SECONDS)
    first.begin_transaction()
    first.produce(topic, b"zombie")
    first.flush(SECONDS)
    second = Producer({"bootstrap.servers": broker.address, "transactional.id": transactional_id})
    second.init_transactions(SECONDS)
    with pytest.raises(KafkaException) as caught:
        first.commit_transaction(SECONDS)
    assert caught.value.args[0].code() in (KafkaError._FENCED, KafkaError.PRODUCER_FENCED)
    second.begin_transaction()
    second.produce(topic, b"alive")
    second.commit_transaction(SECONDS)
    reader = consumer(broker, name("g"), **{"isolation.level": "read_committed"})
    reader.assign([TopicPartition(topic, 0, 0)])
    assert [message.value() for message in read(reader, 1)] == [b"alive"]
    reader.close()


def test_offsets_are_committed_with_the_transaction(broker: KafkaBroker, name: Name) -> None:
    source, target, group = make_topic(broker, name("t")), make_topic(broker, name("t")), name("g")
    produce(broker, source, [b"1", b"2", b"3"])
    reader = consumer(broker, group)
    reader.subscribe([source])
    producer = Producer({"bootstrap.servers": broker.address, "transactional.id": name("x")})
    producer.init_transactions(SECONDS)
    for commit in (False, True):
        producer.begin_transaction()
        for message in read(reader, 3):
            producer.produce(target, message.value() + b"!")
        producer.send_offsets_to_transaction(
            reader.position(reader.assignment()), reader.consumer_group_metadata(), SECONDS
        )
        if commit:
            producer.commit_transaction(SECONDS)
        else:
            producer.abort_transaction(SECONDS)
            [position] = reader.committed([TopicPartition(source, 0)], SECONDS)
            assert position.offset < 0, "an aborted transaction commits no offset"
            reader.seek(TopicPartition(source, 0, 0))
    [position] = reader.committed([TopicPartition(source, 0)], SECONDS)
    assert position.offset == 3
    checker = consumer(broker, name("g"), **{"isolation.level": "read_committed"})
    checker.assign([TopicPartition(target, 0, 0)])
    assert [message.value() for message in read(checker, 3)] == [b"1!", b"2!", b"3!"]
    checker.close()
    reader.close()


def test_a_topic_may_ask_for_another_codec_and_for_the_brokers_time(broker: KafkaBroker, name: Name) -> None:
    topic = make_topic(broker, name("t"), compression_type="zstd", message_timestamp_type="LogAppendTime")
    producer = Producer({"bootstrap.servers": broker.address, "compression.type": "gzip", "linger.ms": 20})
    values = [b"value %d " % number * 30 for number in range(200)]
    stamps: list[tuple[int, int]] = []
    for value in values:
        producer.produce(topic, value, timestamp=1, on_delivery=lambda _, sent: stamps.append(sent.timestamp()))
    assert producer.flush(SECONDS) == 0
    reader = consumer(broker, name("g"))
    reader.assign([TopicPartition(topic, 0, 0)])
    messages = read(reader, 200)
    assert [message.value() for message in messages] == values
    assert {message.timestamp()[0] for message in messages} == {TIMESTAMP_LOG_APPEND_TIME}
    assert min(message.timestamp()[1] for message in messages) > 1_700_000_000_000
    assert {kind for kind, _ in stamps} == {TIMESTAMP_LOG_APPEND_TIME}
    config = AdminClient({"bootstrap.servers": broker.address})
    resource = ConfigResource(ResourceType.TOPIC, topic)
    described = config.describe_configs([resource])[resource].result(SECONDS)
    assert described["compression.type"].value == "zstd"
    assert described["message.timestamp.type"].value == "LogAppendTime"
    reader.close()


def test_a_batch_over_the_limit_is_refused_and_the_connection_lives(broker: KafkaBroker, name: Name) -> None:
    topic = make_topic(broker, name("t"), max_message_bytes="10000")
    errors: list[Any] = []
    producer = Producer({"bootstrap.servers": broker.address, "message.max.bytes": 2_000_000})
    producer.produce(topic, b"x" * 20_000, on_delivery=lambda error, message: errors.append(error))
    assert producer.flush(SECONDS) == 0
    assert errors[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
    producer.produce(topic, b"small", on_delivery=lambda error, message: errors.append(error))
    assert producer.flush(SECONDS) == 0
    assert errors[1] is None


def test_topics_are_made_grown_configured_and_deleted(broker: KafkaBroker, name: Name, admin: AdminClient) -> None:
    topic = make_topic(broker, name("t"), 2, retention_ms="3600000", cleanup_policy="compact,delete")
    with pytest.raises(KafkaException) as caught:
        make_topic(broker, topic)
    assert caught.value.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS
    admin.create_partitions([NewPartitions(topic, 5)])[topic].result(SECONDS)
    assert len(admin.list_topics(topic, SECONDS).topics[topic].partitions) == 5
    resource = ConfigResource(ResourceType.TOPIC, topic)
    config = admin.describe_configs([resource])[resource].result(SECONDS)
    assert config["retention.ms"].value == "3600000"
    assert config["cleanup.policy"].value == "compact,delete"
    assert config["compression.type"].value == "producer"
    change = ConfigResource(
        ResourceType.TOPIC,
        topic,
        incremental_configs=[
            ConfigEntry("retention.ms", None, incremental_operation=AlterConfigOpType.DELETE),
            ConfigEntry("segment.bytes", "1048576", incremental_operation=AlterConfigOpType.SET),
            ConfigEntry("min.cleanable.dirty.ratio", "0.01", incremental_operation=AlterConfigOpType.SET),
            ConfigEntry("max.compaction.lag.ms", "3600000", incremental_operation=AlterConfigOpType.SET),
        ],
    )
    for future in admin.incremental_alter_configs([change]).values():
        future.result(SECONDS)
    config = admin.describe_configs([resource])[resource].result(SECONDS)
    assert (config["segment.bytes"].value, config["retention.ms"].value) == (
        "1048576",
        str(7 * 24 * 3600 * 1000),
    )
    assert (config["min.cleanable.dirty.ratio"].value, config["max.compaction.lag.ms"].value) == ("0.01", "3600000")
    admin.delete_topics([topic])[topic].result(SECONDS)
    assert topic not in admin.list_topics(timeout=SECONDS).topics


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"no_such_config": "1"}, KafkaError.INVALID_CONFIG),
        ({"retention_ms": "soon"}, KafkaError.INVALID_CONFIG),
        ({"cleanup_policy": "burn"}, KafkaError.INVALID_CONFIG),
        ({"min_cleanable_dirty_ratio": "1.1"}, KafkaError.INVALID_CONFIG),
        ({"min_cleanable_dirty_ratio": "half"}, KafkaError.INVALID_CONFIG),
        ({"max_compaction_lag_ms": "0"}, KafkaError.INVALID_CONFIG),
        ({"max_compaction_lag_ms": "1", "min_compaction_lag_ms": "2"}, KafkaError.INVALID_CONFIG),
        ({"message_timestamp_type": "Yesterday"}, KafkaError.INVALID_CONFIG),
    ],
)
def test_unknown_configs_are_refused(broker: KafkaBroker, name: Name, config: dict[str, Any], code: int) -> None:
    with pytest.raises(KafkaException) as caught:
        make_topic(broker, name("t"), **config)
    assert caught.value.args[0].code() == code


@pytest.mark.parametrize(
    ("topic", "partitions", "replicas", "code"),
    [
        ("a/b", 1, 1, KafkaError.TOPIC_EXCEPTION),
        ("x" * 250, 1, 1, KafkaError.TOPIC_EXCEPTION),
        ("..", 1, 1, KafkaError.TOPIC_EXCEPTION),
        ("fine", 1, 3, KafkaError.INVALID_REPLICATION_FACTOR),
        ("fine", 100_000, 1, KafkaError.INVALID_PARTITIONS),
    ],
)
def test_topics_that_can_not_be_are_refused_with_kafkas_code(
    admin: AdminClient, topic: str, partitions: int, replicas: int, code: int
) -> None:
    with pytest.raises(KafkaException) as caught:
        admin.create_topics([NewTopic(topic, partitions, replicas)])[topic].result(SECONDS)
    assert caught.value.args[0].code() == code


def test_groups_are_listed_described_and_deleted(broker: KafkaBroker, name: Name, admin: AdminClient) -> None:
    topic, group = make_topic(broker, name("t")), name("g")
    produce(broker, topic, [b"a"])
    reader = consumer(broker, group)
    reader.subscribe([topic])
    read(reader, 1)
    reader.commit(asynchronous=False)
    [described] = [future.result(SECONDS) for future in admin.describe_consumer_groups([group]).values()]
    assert described.state.name == "STABLE"
    assert [part.topic for part in described.members[0].assignment.topic_partitions] == [topic]
    listed = admin.list_consumer_groups().result(SECONDS).valid
    assert group in {one.group_id for one in listed}
    with pytest.raises(KafkaException) as caught:
        admin.delete_consumer_groups([group])[group].result(SECONDS)
    assert caught.value.args[0].code() == KafkaError.NON_EMPTY_GROUP
    reader.close()
    admin.delete_consumer_groups([group])[group].result(SECONDS)
    assert group not in {one.group_id for one in admin.list_consumer_groups().result(SECONDS).valid}


def test_records_are_deleted_up_to_an_offset(broker: KafkaBroker, name: Name, admin: AdminClient) -> None:
    topic = make_topic(broker, name("t"))
    produce(broker, topic, [b"a", b"b", b"c"])
    which = TopicPartition(topic, 0, 2)
    assert admin.delete_records([which])[which].result(SECONDS).low_watermark == 2
    reader = consumer(broker, name("g"))
    assert reader.get_watermark_offsets(TopicPartition(topic, 0), SECONDS) == (2, 3)
    reader.assign([TopicPartition(topic, 0, 2)])
    assert [message.value() for message in read(reader, 1)] == [b"c"]
    reader.close()


def test_a_waiting_consumer_is_woken_by_the_message_not_by_its_timeout(broker: KafkaBroker, name: Name) -> None:
    topic = make_topic(broker, name("t"))
    reader = consumer(broker, name("g"), **{"fetch.wait.max.ms": 60_000, "socket.timeout.ms": 120_000})
    reader.assign([TopicPartition(topic, 0, 0)])
    assert reader.poll(0.5) is None
    timer = threading.Timer(0.2, lambda: produce(broker, topic, [b"wake"]))
    timer.start()
    assert [message.value() for message in read(reader, 1, 45)] == [b"wake"], "before the minute is over"
    timer.join()
    reader.close()
