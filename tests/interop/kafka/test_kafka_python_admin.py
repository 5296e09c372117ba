"""What kafka-python's admin client asks besides topics and groups, answered as Apache Kafka 4.3.1 answers it."""

from collections.abc import Iterator

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.errors import InvalidReplicationAssignmentError, InvalidUpdateVersionError

from tests.interop.kafka.broker import KafkaBroker

FEATURE = "transaction.version"
SECONDS = 60  # a busy machine is slow, not wrong


@pytest.fixture
def admin(broker: KafkaBroker) -> Iterator[KafkaAdminClient]:
    client = KafkaAdminClient(bootstrap_servers=broker.address)
    yield client
    client.close()


def test_a_feature_can_be_set_to_the_level_it_has(admin: KafkaAdminClient) -> None:
    """There was no UpdateFeatures: a script that sets features after an upgrade ended with UNSUPPORTED_VERSION."""
    assert admin.describe_features()[FEATURE]["finalized"] == (2, 2)
    assert admin.update_features({FEATURE: 2}) == {FEATURE: "OK"}
    assert admin.update_features({FEATURE: ("SAFE_DOWNGRADE", 2)}) == {FEATURE: "OK"}
    assert admin.update_features({FEATURE: 2}, validate_only=True) == {FEATURE: "OK"}


@pytest.mark.parametrize(
    "asked",
    [
        {"no.such.feature": 1},
        {FEATURE: 2, "no.such.feature": 1},
        {FEATURE: 3},
        {FEATURE: ("UNSAFE_DOWNGRADE", 3)},
        {FEATURE: -1},
        {FEATURE: 1},
        {FEATURE: ("SAFE_DOWNGRADE", 1)},
        {FEATURE: ("UNKNOWN", 2)},
    ],
    ids=str,
)
def test_a_level_that_a_feature_can_not_have_is_refused_and_named(
    admin: KafkaAdminClient, asked: dict[str, object]
) -> None:
    with pytest.raises(InvalidUpdateVersionError, match="Invalid update version"):
        admin.update_features(asked)
    assert admin.describe_features()[FEATURE]["finalized"] == (2, 2)


@pytest.fixture
def broker_zero(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """Known to clients by the number that a Kafka of one node often has."""
    started = KafkaBroker(tmp_path_factory.mktemp("zero"), "--kafka-node-id", "0").start()
    yield started
    started.close()
    assert started.errors() == [], started.said()


def test_a_script_that_places_partitions_on_broker_0_works_where_the_broker_has_that_number(
    broker_zero: KafkaBroker,
) -> None:
    """Ours was always 1, so that scripts written for another Kafka, and tests of its clients, were refused."""
    admin = KafkaAdminClient(bootstrap_servers=broker_zero.address)
    assert [one["broker_id"] for one in admin.describe_cluster()["brokers"]] == [0]
    admin.create_topics({"t": {"assignments": {0: [0]}}})
    admin.create_partitions({"t": {"count": 3, "assignments": [[0], [0]]}})
    with pytest.raises(InvalidReplicationAssignmentError):
        admin.create_partitions({"t": {"count": 4, "assignments": [[1]]}})
    [topic] = admin.describe_topics(["t"])
    assert [(part["leader_id"], part["replica_nodes"]) for part in topic["partitions"]] == [(0, [0])] * 3
    admin.close()
    producer = KafkaProducer(bootstrap_servers=broker_zero.address)
    places = [producer.send("t", b"%d" % number, partition=number) for number in range(3)]
    assert [place.get(SECONDS).offset for place in places] == [0, 0, 0]
    producer.close()
    # Through a group, whose coordinator has the same node id.
    settings = {"group_id": "g", "auto_offset_reset": "earliest", "consumer_timeout_ms": SECONDS * 1000}
    reader = KafkaConsumer("t", bootstrap_servers=broker_zero.address, **settings)
    assert sorted(next(reader).value for _ in range(3)) == [b"0", b"1", b"2"]
    reader.close()


def test_a_cleanup_policy_is_shown_in_the_order_in_which_it_was_given(admin: KafkaAdminClient) -> None:
    """`delete,compact` came back as `compact,delete`: tools that compare what they find with what they want, such as
    those that keep topics as code, changed it again and again."""
    topic = ConfigResource(ConfigResourceType.TOPIC, "ordered")

    def shown() -> str:
        found = admin.describe_configs([topic], config_filter="all")
        return str(found["topic"]["ordered"]["cleanup.policy"]["value"])

    admin.create_topics({"ordered": {"configs": {"cleanup.policy": "delete,compact"}}})
    assert shown() == "delete,compact"
    for change, then in (
        ({"cleanup.policy": "compact,delete"}, "compact,delete"),
        ({"cleanup.policy": "delete"}, "delete"),
        ({"cleanup.policy": ("APPEND", "compact")}, "delete,compact"),
        ({"cleanup.policy": ("SUBTRACT", "delete")}, "compact"),
        ({"cleanup.policy": ("APPEND", "delete")}, "compact,delete"),
        ({"cleanup.policy": ("APPEND", "compact")}, "compact,delete"),
    ):
        admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, "ordered", configs=change)])
        assert shown() == then


def test_config_synonyms_show_the_default_below_a_topic_setting(admin: KafkaAdminClient) -> None:
    """Consoles show it as the default. It was missing for every setting that the topic overrides."""
    admin.create_topics({"own": {"configs": {"max.message.bytes": "2000", "cleanup.policy": "compact"}}})
    topic = ConfigResource(ConfigResourceType.TOPIC, "own")
    found = admin.describe_configs([topic], include_synonyms=True, config_filter="all")["topic"]["own"]
    own, broker = "DYNAMIC_TOPIC_CONFIG", "DEFAULT_CONFIG"
    said = {
        name: [(one["name"], one["value"], one["source"]) for one in found[name]["synonyms"]]
        for name in ("max.message.bytes", "cleanup.policy", "segment.bytes", "min.insync.replicas")
    }
    assert said == {
        "max.message.bytes": [("max.message.bytes", "2000", own), ("message.max.bytes", "16777216", broker)],
        "cleanup.policy": [("cleanup.policy", "compact", own), ("log.cleanup.policy", "delete", broker)],
        "segment.bytes": [("log.segment.bytes", found["segment.bytes"]["value"], broker)],
        "min.insync.replicas": [("min.insync.replicas", "1", broker)],
    }
