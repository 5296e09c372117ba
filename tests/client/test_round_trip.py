"""Producers and consumers, blocking and asyncio, against a real broker."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import headrace
from headrace import AsyncConsumer, AsyncProducer, Client, Consumer, Message, Producer, Published
from headrace.errors import AlreadyExists, InvalidInput, LogClosed, NotFound, OffsetOutOfRange
from tests.cli.running import Broker, serving
from tests.client.test_producer_faults import Gate
from tests.ports import free_port


def test_all_fields_of_a_message_survive_a_round_trip(broker: Broker) -> None:
    with Producer("all", broker.url) as producer:
        assert producer.publish("text") == Published(0, 0)
        producer.publish(b"\x00\xff", key=b"\xfe", headers={"a": "1", "b": b"\x80", "c": None}, timestamp=5)
        producer.publish(None, key="gone", headers=[("x", "1"), ("x", "2")])
        producer.publish("", key="")
    with Consumer("all", broker.url) as consumer:
        messages = list(consumer.until_end())
    assert [(m.key, m.value) for m in messages] == [
        (None, b"text"),
        (b"\xfe", b"\x00\xff"),
        (b"gone", None),
        (b"", b""),
    ]
    assert messages[1].headers == (("a", b"1"), ("b", b"\x80"), ("c", None))
    assert messages[1].timestamp == 5
    assert messages[2].headers == (("x", b"1"), ("x", b"2"))
    assert messages[1].header("b") == b"\x80"
    assert messages[0].text() == "text"


def test_many_sends_become_few_requests_and_keep_their_order(broker: Broker) -> None:
    with Client(broker.url) as client, Producer("many", broker.url) as producer:
        before = requests(client)
        gate = Gate()
        gate.inner = producer._connection
        producer._connection = gate  # type: ignore[assignment]
        futures = [producer.send(str(n)) for n in range(5_000)]
        gate.opened.set()  # only now: however slow we were, what was sent meanwhile waited together
        producer.flush()
        assert [future.result().offset for future in futures] == list(range(5_000))
        assert requests(client) - before < 500
    with Consumer("many", broker.url, batch_messages=700) as consumer:
        assert [m.value for m in consumer.until_end()] == [str(n).encode() for n in range(5_000)]


def requests(client: Client) -> int:
    lines = client.request("GET", "/metrics").body.decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("headrace_listener_events_total{"))


def test_a_consumer_waits_for_new_messages(broker: Broker) -> None:
    with Producer("wait", broker.url) as producer, Consumer("wait", broker.url, start="latest") as consumer:
        producer.publish("before")
        assert consumer.poll(0) == []
        late = threading.Timer(0.05, producer.publish, ["after"])
        late.start()
        assert [m.value for m in consumer.poll(30)] == [b"after"]
        late.join()


def test_reading_is_resumed_from_positions(broker: Broker) -> None:
    with Producer("resume", broker.url) as producer:
        for n in range(10):
            producer.publish(str(n))
    with Consumer("resume", broker.url) as consumer:
        for message in consumer:
            if message.offset == 3:
                break
        positions = dict(consumer.positions)
    assert positions == {0: 4}
    with Consumer("resume", broker.url, start=positions) as consumer:
        assert [m.offset for m in consumer.until_end()] == [4, 5, 6, 7, 8, 9]
        consumer.seek(-2)
        assert [m.offset for m in consumer.until_end()] == [8, 9]


def test_reading_outlives_a_restart_of_the_broker(tmp_path: Path) -> None:
    flags = ["--http", f"127.0.0.1:{free_port()}"]
    got: list[Message] = []
    with serving(tmp_path / "data", *flags) as broker:
        with Producer("t", broker.url) as producer:
            producer.publish("before")
        consumer = Consumer("t", broker.url, retry_s=120)
        got += consumer.poll(30)
    waiting = threading.Thread(target=lambda: got.extend(consumer.poll(120)))
    waiting.start()
    with serving(tmp_path / "data", *flags) as broker:
        with Producer("t", broker.url) as producer:
            producer.publish("after")
        waiting.join()
    consumer.close()
    assert [m.value for m in got] == [b"before", b"after"]


def test_several_partitions_are_read_as_one(broker: Broker) -> None:
    with Client(broker.url) as client:
        client.create_topic("parts", partitions=3)
    with Producer("parts", broker.url) as producer, Consumer("parts", broker.url) as consumer:
        for n in range(30):
            producer.send(str(n), partition=n % 3)
        producer.flush()
        got: list[Message] = []
        while len(got) < 30:
            got += consumer.poll(30)
        assert sorted(int(m.value or b"") for m in got) == list(range(30))
        for partition in range(3):
            offsets = [m.offset for m in got if m.partition == partition]
            assert offsets == list(range(10))
        producer.publish("live", partition=1)
        producer.publish("more", partition=2)
        live: list[Message] = []
        while len(live) < 2:
            live += consumer.poll(30)
        assert {(m.partition, m.value) for m in live} == {(1, b"live"), (2, b"more")}
        assert consumer.positions == {0: 10, 1: 11, 2: 11}
        assert consumer.poll(0.01) == []


def test_an_offset_that_is_not_there_is_an_error(broker: Broker) -> None:
    with Producer("range", broker.url) as producer:
        producer.publish("x")
    with Consumer("range", broker.url, start=5) as consumer, pytest.raises(OffsetOutOfRange):
        consumer.poll(0)
    with Consumer("range", broker.url, start=5, on_lost="earliest") as consumer, pytest.raises(OffsetOutOfRange):
        consumer.poll(0)  # ahead of the end: nothing was lost that could be skipped
    with Consumer("nowhere", broker.url) as consumer, pytest.raises(NotFound, match="topic 'nowhere' does not exist"):
        consumer.poll(0)


def test_records_removed_by_retention_are_skipped_only_on_request(broker: Broker) -> None:
    with Client(broker.url) as client, Producer("kept", broker.url) as producer:
        client.create_topic("kept", config={"segment_size": "1KB", "retention_bytes": "2KB"})
        for _ in range(40):
            producer.publish("x" * 300)
        wait_for_retention(client, "kept")
        with Consumer("kept", broker.url, start=0) as consumer, pytest.raises(OffsetOutOfRange):
            consumer.poll(0)
        start = client.offsets("kept")[0].start
        with Consumer("kept", broker.url, start=0, on_lost="earliest") as consumer:
            first = next(consumer.until_end()).offset
        # Retention goes on meanwhile, and takes more.
        assert start <= first <= client.offsets("kept")[0].start


def wait_for_retention(client: Client, topic: str) -> None:
    """The broker of this file keeps house every 100 ms."""
    pause = threading.Event()
    for _ in range(600):
        if client.offsets(topic)[0].start > 0:
            return
        pause.wait(0.05)
    raise AssertionError("retention removed nothing")


def test_a_message_too_large_fails_alone(broker: Broker) -> None:
    with Client(broker.url) as client:
        client.create_topic("small", config={"batch_bytes_max": "2KB"})
    producer = Producer("small", broker.url)
    futures = [producer.send(value) for value in ("a", "x" * 5_000, "b")]
    with pytest.raises(InvalidInput):
        producer.close()
    assert isinstance(futures[1].exception(), InvalidInput)
    assert [futures[0].result().offset, futures[2].result().offset] == [0, 1]
    with pytest.raises(LogClosed):
        producer.send("late")


def test_a_message_for_a_partition_that_is_not_there_fails_alone(broker: Broker) -> None:
    producer = Producer("one-partition", broker.url)
    producer.publish("first")
    futures = [producer.send(str(n), partition=99 if n == 50 else None) for n in range(100)]
    with pytest.raises(NotFound):
        producer.close()
    assert [n for n, future in enumerate(futures) if future.exception() is not None] == [50]


def test_a_program_that_exits_without_close_has_sent_its_messages(broker: Broker) -> None:
    program = f"import headrace; p = headrace.Producer('ending', {broker.url!r}); [p.send(str(n)) for n in range(500)]"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    with Consumer("ending", broker.url) as consumer:
        assert len(list(consumer.until_end())) == 500


def test_topics_are_managed(broker: Broker) -> None:
    with Client(broker.url) as client:
        assert client.create_topic("managed", partitions=2, config={"retention.ms": "1h"})["partitions"] == 2
        with pytest.raises(AlreadyExists):
            client.create_topic("managed")
        assert client.configure_topic("managed", {"retention_ms": None}, partitions=3)["overrides"] == {}
        assert [r.partition for r in client.offsets("managed")] == [0, 1, 2]
        assert "managed" in [topic["name"] for topic in client.topics()]
        client.delete_topic("managed")
        with pytest.raises(NotFound):
            client.topic("managed")
        assert client.get("/health")["ready"] is True


async def test_the_same_with_asyncio(broker: Broker) -> None:
    async with AsyncProducer("async", broker.url) as producer:
        assert await producer.publish("first", key="k") == Published(0, 0)
        futures = [await producer.send(str(n)) for n in range(1_000)]
        assert [(await future).offset for future in futures] == list(range(1, 1_001))
        many = await asyncio.gather(*(producer.publish(f"g{n}") for n in range(100)))
        assert sorted(p.offset for p in many) == list(range(1_001, 1_101))
    async with AsyncConsumer("async", broker.url) as consumer:
        got = [m async for m in consumer.until_end()]
        assert [m.offset for m in got] == list(range(1_101))
        async with AsyncProducer("async", broker.url) as producer:
            waiting = asyncio.create_task(consumer.poll(30))
            await producer.publish("late")
            assert [m.value for m in await waiting] == [b"late"]


async def test_several_partitions_with_asyncio(broker: Broker) -> None:
    with Client(broker.url) as client:
        client.create_topic("aparts", partitions=2)
    async with AsyncProducer("aparts", broker.url) as producer, AsyncConsumer("aparts", broker.url) as consumer:
        waiting = asyncio.create_task(consumer.poll(30))
        await producer.publish("x", partition=1)
        assert [(m.partition, m.value) for m in await waiting] == [(1, b"x")]
        got: list[Message] = []
        await producer.publish("y", partition=0)
        await producer.publish("z", partition=1)
        async for message in consumer:
            got.append(message)
            if len(got) == 2:
                break
        assert {m.value for m in got} == {b"y", b"z"}
    async with AsyncConsumer("nope", broker.url) as consumer:
        with pytest.raises(NotFound):
            await consumer.poll(0)


async def test_a_cancelled_read_leaves_a_usable_consumer(broker: Broker) -> None:
    async with AsyncProducer("cancel", broker.url) as producer, AsyncConsumer("cancel", broker.url) as consumer:
        await producer.publish("a")
        assert len(await consumer.poll(30)) == 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(consumer.poll(30), 0.05)
        await producer.publish("b")
        assert [m.value for m in await consumer.poll(30)] == [b"b"]


def test_names_are_loaded_when_they_are_used() -> None:
    assert set(headrace.__all__) <= set(dir(headrace))
    for name in headrace.__all__:
        assert getattr(headrace, name) is not None
    with pytest.raises(AttributeError):
        headrace.nonsense  # noqa: B018
