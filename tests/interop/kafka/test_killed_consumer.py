"""Two consumers in a group, one killed in the middle: the other reads on from what was committed."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from tests.interop.kafka.broker import KafkaBroker
from tests.interop.kafka.test_confluent import make_topic, produce

Name = Callable[[str], str]
PARTITIONS = 4

READER = """
import sys
from confluent_kafka import Consumer, KafkaException
address, group, topic, protocol, path = sys.argv[1:]
settings = {"bootstrap.servers": address, "group.id": group, "auto.offset.reset": "earliest",
            "enable.auto.commit": False, "group.protocol": protocol, "log_level": 0}
if protocol == "classic":
    settings |= {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500}
consumer = Consumer(settings)
consumer.subscribe([topic])
committed = True
with open(path, "ab", buffering=0) as seen:
    while True:
        messages = [m for m in consumer.consume(20, 0.5) if not m.error()]
        for m in messages:
            seen.write(m.value() + b"\\n")
        try:
            if messages or not committed:
                committed = False
                consumer.commit(asynchronous=False)
                committed = True
        except KafkaException:
            pass  # rebalance: the new owner reads from the committed offset
"""


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.parametrize("protocol", ["classic"])  # the new one has a session of 45 s: see the unit tests
def test_all_records_are_read_when_one_of_two_consumers_is_killed(
    broker: KafkaBroker, name: Name, tmp_path: Path, protocol: str
) -> None:
    topic, group = make_topic(broker, name("t"), PARTITIONS), name("g")
    script = tmp_path / "reader.py"
    script.write_text(READER)
    files = [tmp_path / "one.txt", tmp_path / "two.txt"]
    readers = [
        subprocess.Popen([sys.executable, str(script), broker.address, group, topic, protocol, str(file)])
        for file in files
    ]
    try:
        values: list[bytes] = []

        def send(count: int) -> None:
            more = [b"%d" % number for number in range(len(values), len(values) + count)]
            produce(broker, topic, more)
            values.extend(more)

        def both_read() -> bool:
            send(100)
            return all(file.exists() and file.stat().st_size for file in files)

        wait_for(both_read)
        readers[0].send_signal(signal.SIGKILL)
        send(1000)
        wait_for(lambda: seen(files) >= set(values))
        checker = Consumer({"bootstrap.servers": broker.address, "group.id": group, "log_level": 0})
        wait_for(
            lambda: (
                sum(
                    max(0, one.offset)
                    for one in checker.committed([TopicPartition(topic, n) for n in range(PARTITIONS)], 60)
                )
                == len(values)
            )
        )
        checker.close()
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()


def seen(files: list[Path]) -> set[bytes]:
    return {line for file in files for line in file.read_bytes().split(b"\n")}


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)
