"""Share consumers over a kill of the broker: they go on, and no record that they accepted comes back."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, ShareConsumer

from tests.interop.kafka.broker import KafkaBroker
from tests.interop.kafka.jars import JAVA, kafka_tools
from tests.interop.kafka.test_confluent import SECONDS, make_topic, produce, wait_for
from tests.interop.kafka.test_share import begin_at_start, java, read

Name = Callable[[str], str]


def values(prefix: str, count: int) -> list[bytes]:
    return [b"%s-%d" % (prefix.encode(), number) for number in range(count)]


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_share_consumer_continues_after_the_broker_was_killed(own_broker: KafkaBroker, name: Name) -> None:
    topic, group = make_topic(own_broker, name("t")), begin_at_start(own_broker, name("g"))
    errors: list[KafkaError] = []
    quick = {"reconnect.backoff.max.ms": 100, "error_cb": errors.append}
    consumer = ShareConsumer({"bootstrap.servers": own_broker.address, "group.id": group, **quick})
    consumer.subscribe([topic])
    for round_number in range(3):
        new = values(f"r{round_number}", 50)
        produce(own_broker, topic, new)
        assert read([consumer], 50) == {0: new}
        consumer.commit_sync()
        own_broker.kill()
        own_broker.start()
    assert not any(error.fatal() for error in errors), errors
    consumer.close()


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.timeout(360)
def test_kafkas_share_consumer_continues_after_the_broker_was_killed(
    own_broker: KafkaBroker, name: Name, tmp_path: Path
) -> None:
    topic, group = make_topic(own_broker, name("t")), begin_at_start(own_broker, name("g"))
    out = tmp_path / "out"
    which = ("--bootstrap-server", own_broker.address, "--topic", topic, "--group", group)
    with out.open("wb") as stdout:
        tool = "org.apache.kafka.tools.consumer.ConsoleShareConsumer"
        reader = subprocess.Popen([*JAVA, "-cp", kafka_tools(), tool, *which], stdout=stdout)
    seen: list[bytes] = []

    def has_all() -> bool:
        return len(out.read_bytes().splitlines()) >= len(seen) and lag_of(own_broker, group, topic) == "0"

    try:
        for round_number in range(3):
            new = values(f"r{round_number}", 50)
            produce(own_broker, topic, new)
            seen.extend(new)
            wait_for(has_all)
            own_broker.kill()
            own_broker.start()
            shown = java(own_broker, "group.ShareGroupCommand", "--describe", "--members", "--group", group)
            assert "console-share-consumer" in shown, "it is still a member, heard of or not"
        assert reader.poll() is None
    finally:
        reader.terminate()
        reader.wait(SECONDS)
    assert out.read_bytes().splitlines()[: len(seen)] == seen, "and none came twice"


def lag_of(broker: KafkaBroker, group: str, topic: str) -> str:
    shown = java(broker, "group.ShareGroupCommand", "--describe", "--group", group)
    return next((line.split()[-1] for line in shown.splitlines() if topic in line), "")
