"""What kafka-python's admin client asks besides topics and groups, answered as Apache Kafka 4.3.1 answers it."""

from collections.abc import Iterator

import pytest
from kafka import KafkaAdminClient
from kafka.errors import InvalidUpdateVersionError

from tests.interop.kafka.broker import KafkaBroker

FEATURE = "transaction.version"


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
