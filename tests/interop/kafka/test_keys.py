"""The index of keys over what Kafka clients write: compressed, in transactions, and through a kill."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from confluent_kafka import Producer

from tests.interop.kafka.broker import KafkaBroker

SECONDS = 60


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KafkaBroker]:
    broker = KafkaBroker(tmp_path, http=True).start()
    yield broker
    broker.stop()


def make(broker: KafkaBroker, topic: str, partitions: int = 1) -> None:
    body = {"name": topic, "partitions": partitions, "config": {"key_index": "true"}}
    httpx.post(f"http://127.0.0.1:{broker.http_port}/topics", json=body, timeout=SECONDS).raise_for_status()


def value(broker: KafkaBroker, topic: str, key: str) -> str | None:
    """Asked for again where the index is behind, as the answer says: thousands of keys take a busy machine its time."""
    deadline = time.monotonic() + SECONDS
    while True:
        answer = httpx.get(f"http://127.0.0.1:{broker.http_port}/topics/{topic}/keys/{key}", timeout=SECONDS)
        found: dict[str, str] = answer.json()
        if found.get("code") != "index_behind" or time.monotonic() > deadline:
            break
    assert answer.status_code in (200, 404), found
    return found.get("value")


def test_keys_of_compressed_batches_are_found_after_a_kill_too(broker: KafkaBroker) -> None:
    make(broker, "t", partitions=3)
    for life in range(3):
        producer = Producer({"bootstrap.servers": broker.address, "compression.type": "zstd", "linger.ms": 20})
        for number in range(5_000):
            producer.produce("t", f"{life}-{number}", key=f"k{number}")
        assert producer.flush(SECONDS) == 0
        for number in (0, 1, 2500, 4999):
            assert value(broker, "t", f"k{number}") == f"{life}-{number}"
        assert value(broker, "t", "k5000") is None
        broker.kill()
        broker.start()
        assert value(broker, "t", "k4999") == f"{life}-4999"


def test_an_aborted_record_is_not_the_last_of_its_key(broker: KafkaBroker) -> None:
    make(broker, "t")
    producer = Producer({"bootstrap.servers": broker.address, "transactional.id": "x"})
    producer.init_transactions(SECONDS)
    for text, ends in (("kept", producer.commit_transaction), ("taken back", producer.abort_transaction)):
        producer.begin_transaction()
        producer.produce("t", text, key="a")
        producer.produce("t", text, key=text.replace(" ", "-"))
        assert producer.flush(SECONDS) == 0
        ends(SECONDS)
    assert value(broker, "t", "a") == value(broker, "t", "kept") == "kept"
    assert value(broker, "t", "taken-back") is None
    producer.begin_transaction()
    producer.produce("t", "still open", key="a")
    assert producer.flush(SECONDS) == 0
    assert value(broker, "t", "a") == "kept"
    producer.commit_transaction(SECONDS)
    assert value(broker, "t", "a") == "still open"
