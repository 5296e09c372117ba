"""Kafka Streams, from Maven Central: stores with changelogs, a repartition topic, exactly once over a kill."""

import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from tests.interop.kafka.broker import KafkaBroker, present
from tests.interop.kafka.jars import JAVA, JAVA_SECONDS_MAX, KAFKA_VERSION, classpath
from tests.interop.kafka.test_confluent import make_topic

Name = Callable[[str], str]
HERE = Path(__file__).parent
PARTITIONS = 2
WORDS = ["the", "listener", "of", "the", "house", "is", "the", "listener", "of", "the", "barn"]
WINDOW_MS = 10_000


@pytest.fixture(scope="module")
def jars() -> str:
    return classpath(f"kafka-streams-{KAFKA_VERSION}", f"org.apache.kafka:kafka-streams:{KAFKA_VERSION}")


@contextmanager
def word_count(jars: str, broker: KafkaBroker, app: str, folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [*JAVA, "-cp", jars, str(HERE / "WordCount.java"), broker.address, app, str(folder / "state"), *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def counts(broker: KafkaBroker, topic: str, enough: int, app: subprocess.Popen[str]) -> dict[str, list[int]]:
    """By key, what was committed, in its order: at least so many, and all there is at the moment they are there."""
    reader = Consumer(
        {"bootstrap.servers": broker.address, "group.id": "counts", "isolation.level": "read_committed",
         "enable.auto.commit": False, "enable.partition.eof": True}
    )  # fmt: skip
    reader.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    found: defaultdict[str, list[int]] = defaultdict(list)
    at_end: set[int | None] = set()
    deadline = time.monotonic() + JAVA_SECONDS_MAX
    while len(at_end) < PARTITIONS or sum(map(len, found.values())) < enough:
        message = reader.poll(0.2)
        if message is None:
            assert app.poll() is None, app.communicate()
            assert time.monotonic() < deadline, (enough, found)
        elif message.error():
            at_end.add(message.partition())
        else:
            at_end.discard(message.partition())
            found[present(message.key()).decode()].append(int(present(message.value())))
    reader.close()
    return found


def make_topics(broker: KafkaBroker, app: str) -> None:
    for what in ("lines", "all", "windows"):
        make_topic(broker, f"{app}-{what}", PARTITIONS)


@pytest.mark.timeout(900)  # several waits, each of them as long as a JVM may take
def test_words_are_counted_exactly_once_though_the_application_is_killed(
    broker: KafkaBroker, jars: str, name: Name, tmp_path: Path
) -> None:
    app = name("words")
    make_topics(broker, app)
    producer = Producer({"bootstrap.servers": broker.address})
    start_ms = int(time.time()) * 1000
    expected: Counter[str] = Counter()
    by_window: Counter[str] = Counter()

    def feed(first: int, last: int) -> None:
        for number in range(first, last):
            line = WORDS[: 1 + number % len(WORDS)]
            at_ms = start_ms + number * 50
            producer.produce(f"{app}-lines", " ".join(line), key=str(number), timestamp=at_ms)
            expected.update(line)
            by_window.update(f"{word}@{at_ms // WINDOW_MS * WINDOW_MS}" for word in line)
        producer.flush()

    feed(0, 300)
    with word_count(jars, broker, app, tmp_path) as running:
        counts(broker, f"{app}-all", 200, running)
        feed(300, 600)
    with word_count(jars, broker, app, tmp_path) as running:
        feed(600, 900)
        for topic, truth in ((f"{app}-all", expected), (f"{app}-windows", by_window)):
            found = counts(broker, topic, truth.total(), running)
            assert found == {key: list(range(1, count + 1)) for key, count in truth.items()}
        running.terminate()
        assert running.wait(JAVA_SECONDS_MAX) == 143, "it closed, and ended by the signal"
    admin = AdminClient({"bootstrap.servers": broker.address})
    changelog = ConfigResource(ResourceType.TOPIC, f"{app}-all-changelog")
    [described] = admin.describe_configs([changelog]).values()
    assert described.result()["cleanup.policy"].value == "compact"
    assert f"{app}-word-repartition" in admin.list_topics(timeout=60).topics


def test_an_application_with_the_streams_protocol_gets_a_clear_error(
    broker: KafkaBroker, jars: str, name: Name, tmp_path: Path
) -> None:
    """KIP-1071, which is not what Streams asks for by itself."""
    app = name("words")
    make_topics(broker, app)
    with word_count(jars, broker, app, tmp_path, "group.protocol", "streams") as running:
        said, _ = running.communicate(timeout=JAVA_SECONDS_MAX)
    assert "The cluster does not support the STREAMS group protocol" in said
