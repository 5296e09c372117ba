"""kafka-python, aiokafka, kcat and KafkaJS: each writes, reads in a group, and finds its offsets again."""

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import aiokafka
import kafka
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.interop.kafka.broker import KafkaBroker
from tests.interop.kafka.jars import kafkajs

Name = Callable[[str], str]
SECONDS = 60  # a busy machine is slow, not wrong


@pytest.mark.parametrize("codec", [None, "gzip", "snappy", "lz4", "zstd"])
def test_kafka_python_writes_and_reads_with_every_codec(broker: KafkaBroker, name: Name, codec: str | None) -> None:
    if codec is not None and not getattr(kafka.codec, f"has_{codec}")():
        pytest.skip(f"SKIPPED FOR WANT OF the package that kafka-python needs for {codec}")
    topic, group = name("t"), name("g")
    producer = kafka.KafkaProducer(bootstrap_servers=broker.address, compression_type=codec, acks="all", linger_ms=20)
    places = [producer.send(topic, b"%d" % number, key=b"k", headers=[("h", b"v")]) for number in range(50)]
    assert [place.get(SECONDS).offset for place in places] == list(range(50))
    producer.close()
    settings = {
        "bootstrap_servers": broker.address,
        "group_id": group,
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "consumer_timeout_ms": SECONDS * 1000,
    }
    reader = kafka.KafkaConsumer(topic, **settings)
    messages = [next(reader) for _ in range(50)]
    assert [message.value for message in messages] == [b"%d" % number for number in range(50)]
    assert messages[0].headers == [("h", b"v")] or messages[0].headers == (("h", b"v"),)
    reader.commit()
    reader.close()
    second = kafka.KafkaConsumer(topic, **settings)
    second.poll(timeout_ms=2000)
    assert second.committed(kafka.TopicPartition(topic, 0)) == 50
    second.close()


async def test_aiokafka_writes_reads_and_commits(broker: KafkaBroker, name: Name) -> None:
    topic, group = name("t"), name("g")
    async with aiokafka.AIOKafkaProducer(bootstrap_servers=broker.address, enable_idempotence=True) as producer:
        places = await asyncio.gather(*[await producer.send(topic, b"%d" % number) for number in range(100)])
    assert [place.offset for place in places] == list(range(100))

    def reader() -> aiokafka.AIOKafkaConsumer:
        return aiokafka.AIOKafkaConsumer(
            topic,
            bootstrap_servers=broker.address,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=30_000,
        )

    async with asyncio.timeout(SECONDS):
        async with reader() as first:
            values = [(await first.getone()).value for _ in range(60)]
            await first.commit({aiokafka.TopicPartition(topic, 0): 60})
        async with reader() as second:
            values += [(await second.getone()).value for _ in range(40)]
    assert values == [b"%d" % number for number in range(100)]


async def test_aiokafka_transactions(broker: KafkaBroker, name: Name) -> None:
    topic = name("t")
    async with aiokafka.AIOKafkaProducer(bootstrap_servers=broker.address, transactional_id=name("x")) as producer:
        async with producer.transaction():
            await producer.send_and_wait(topic, b"kept")
        with pytest.raises(ZeroDivisionError):
            async with producer.transaction():
                await producer.send_and_wait(topic, b"lost")
                raise ZeroDivisionError
        async with producer.transaction():
            await producer.send_and_wait(topic, b"kept too")
    async with asyncio.timeout(SECONDS):
        async with aiokafka.AIOKafkaConsumer(
            topic,
            bootstrap_servers=broker.address,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
        ) as reader:
            values = [(await reader.getone()).value for _ in range(2)]
    assert values == [b"kept", b"kept too"]


@pytest.mark.peer
def test_kcat_writes_reads_and_lists(broker: KafkaBroker, name: Name) -> None:
    if shutil.which("kcat") is None:
        pytest.skip("SKIPPED FOR WANT OF kcat")
    topic = name("t")

    def kcat(*arguments: str, stdin: str = "") -> str:
        command = ["kcat", "-b", broker.address, *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=SECONDS, check=True).stdout

    kcat("-P", "-t", topic, "-K:", "-z", "snappy", stdin="k1:v1\nk2:v2\nk3:v3\n")
    assert kcat("-C", "-t", topic, "-e", "-q", "-f", "%o %k %s\n") == "0 k1 v1\n1 k2 v2\n2 k3 v3\n"
    assert kcat("-C", "-t", topic, "-o", "-1", "-e", "-q") == "v3\n"
    assert kcat("-G", name("g"), "-X", "auto.offset.reset=earliest", "-c", "3", "-q", topic) == "v1\nv2\nv3\n"
    assert f'topic "{topic}" with 1 partitions' in kcat("-L", "-t", topic)


KAFKAJS = """
const { Kafka, logLevel, CompressionTypes } = require('kafkajs');
const [address, topic, group] = process.argv.slice(2);
(async () => {
  const kafka = new Kafka({ clientId: 'js', brokers: [address], connectionTimeout: 60000, logLevel: logLevel.ERROR });
  const admin = kafka.admin();
  await admin.connect();
  await admin.createTopics({ topics: [{ topic, numPartitions: 2 }], waitForLeaders: true });
  const producer = kafka.producer({ idempotent: true });
  await producer.connect();
  for (let i = 0; i < 20; i++)
    await producer.send({ topic, compression: CompressionTypes.GZIP,
      messages: [{ key: 'k' + i, value: 'v' + i, headers: { h: 'x' } }] });
  const consumer = kafka.consumer({ groupId: group });
  await consumer.connect();
  await consumer.subscribe({ topic, fromBeginning: true });
  const seen = [];
  await new Promise((done) => consumer.run({ eachMessage: async ({ message }) => {
    seen.push(message.value.toString());
    if (seen.length === 20) done();
  } }));
  await consumer.disconnect();
  const offsets = await admin.fetchOffsets({ groupId: group, topic, topics: [topic] });
  const transaction = await kafka.producer({ transactionalId: group + '-x', idempotent: true,
    maxInFlightRequests: 1 });
  await transaction.connect();
  const one = await transaction.transaction();
  await one.send({ topic, messages: [{ value: 'in a transaction' }] });
  await one.commit();
  await transaction.disconnect();
  await producer.disconnect();
  await admin.disconnect();
  const partitions = offsets[0].partitions || offsets; // 1.x asks for one topic
  const committed = partitions.reduce((sum, p) => sum + Math.max(0, Number(p.offset)), 0);
  console.log(JSON.stringify({ seen: seen.sort(), committed }));
})().catch((error) => { console.error(error); process.exit(1); });
"""


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.2.4", "1.15.0"])  # the second one is of 2020
def test_kafkajs_writes_reads_commits_and_transacts(
    broker: KafkaBroker, name: Name, tmp_path: Path, version: str
) -> None:
    modules = kafkajs(version)
    script = tmp_path / "client.js"
    script.write_text(KAFKAJS)
    done = subprocess.run(
        ["node", str(script), broker.address, name("t"), name("g")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "NODE_PATH": str(modules), "KAFKAJS_NO_PARTITIONER_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["seen"] == sorted(f"v{number}" for number in range(20))
    assert answer["committed"] == 20


def test_offsets_and_the_group_survive_a_kill(own_broker: KafkaBroker, name: Name) -> None:
    topic, group = name("t"), name("g")
    producer = Producer({"bootstrap.servers": own_broker.address})
    for number in range(10):
        producer.produce(topic, b"%d" % number)
    assert producer.flush(SECONDS) == 0
    reader = Consumer(
        {
            "bootstrap.servers": own_broker.address,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    reader.subscribe([topic])
    assert [message.value() for message in read(reader, 5)] == [b"%d" % number for number in range(5)]
    reader.commit(offsets=[TopicPartition(topic, 0, 5)], asynchronous=False)
    own_broker.kill()
    own_broker.start()
    commit_when_it_is_back(reader, TopicPartition(topic, 0, 6))  # still a member, same generation
    [committed] = reader.committed([TopicPartition(topic, 0)], SECONDS)
    assert committed.offset == 6
    assert [message.value() for message in read(reader, 5)] == [b"%d" % number for number in range(5, 10)]
    reader.close()


def commit_when_it_is_back(reader: Consumer, place: TopicPartition) -> None:
    """A connection may break under the commit; of anything but that the client hears at once."""
    away = {KafkaError._TRANSPORT, KafkaError._WAIT_COORD, KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN}
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            reader.commit(offsets=[place], asynchronous=False)
            return
        except KafkaException as error:
            if error.args[0].code() not in away or time.monotonic() > deadline:
                raise


def read(reader: Consumer, count: int) -> list[Message]:
    messages: list[Message] = []
    deadline = time.monotonic() + SECONDS
    while len(messages) < count and time.monotonic() < deadline:
        message = reader.poll(0.2)
        if message is not None and not message.error():
            messages.append(message)
    return messages
