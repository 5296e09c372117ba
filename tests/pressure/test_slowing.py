"""What clients see of each step, from a whole server whose memory the test decides."""

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
from confluent_kafka import Producer
from pamqp import commands, heartbeat

from headrace.broker.broker import Broker
from headrace.broker.pressure.process_memory import ProcessMemory
from headrace.config import Address, Config
from tests.listeners.amqp.running import Running, eventually
from tests.pressure.raw import RawClient, method, publish

MB = 1 << 20
LIMIT = 1000 * MB


class Told(ProcessMemory):
    """Says what the test says."""

    share = 0.1

    def __init__(self) -> None: ...

    def rss_bytes(self) -> int:
        return int(self.share * LIMIT)

    def close(self) -> None: ...


class World(Running):
    def __init__(self, folder: Path) -> None:
        free = Address("127.0.0.1", 0)
        super().__init__(folder, http=free, kafka=free, memory_limit=LIMIT)
        self.memory = Told()
        self.call(self._replace_memory)
        self.use(self.memory.share)  # until then it goes by the memory of this process, which may be large

    def _replace_memory(self) -> None:
        pressure = self.pressure
        pressure._memory.close()
        pressure._memory = self.memory

    @property
    def pressure(self) -> Any:
        return self.server.broker.pressure

    def address(self, listener: str) -> str:
        return self.server.listeners[listener].addresses[0]

    def use(self, share: float) -> None:
        self.memory.share = share
        eventually(lambda: abs(self.pressure.memory_share - share) < 0.001, "the manager has looked")
        self.call(lambda: None)  # and has told everybody

    @property
    def clients(self) -> list[Any]:
        return self.call(lambda: list(self.listener.connections))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    running = World(tmp_path)
    yield running
    running.memory.share = 0.1
    running.stop()


def test_kafka_producers_are_throttled_before_they_are_paused(world: World) -> None:
    waits: list[float] = []
    producer = Producer(
        {"bootstrap.servers": world.address("kafka"), "throttle_cb": lambda event: waits.append(event.throttle_time)}
    )
    producer.produce("t", b"x" * 500_000)
    assert producer.flush(60) == 0 and waits == []
    slowed = world.pressure.events["memory_slowed"]  # what this process holds may have counted before we said so
    world.use(0.85)
    for _ in range(20):
        producer.produce("t", b"x" * 500_000)
    assert producer.flush(60) == 0
    eventually(lambda: producer.poll(0.01) or waits, "throttle_time_ms")
    assert max(waits) > 0
    assert world.pressure.delays > 0 and world.pressure.events["memory_slowed"] == slowed + 1


def test_amqp_publishers_are_read_later_when_slowed_and_lose_nothing(world: World) -> None:
    with RawClient(world.port) as client:
        client.declare("q")
        world.use(0.85)
        client.send(publish("q", b"s" * 100_000) * 100)
        assert client.depth("q") == 100
    assert world.pressure.delays > 0
    world.use(0.1)
    assert world.pressure.verdict.rate_bytes_s is None


def test_http_publishers_are_refused_before_their_body_is_read(world: World) -> None:
    world.use(0.95)
    url = f"http://{world.address('http')}/topics/t/messages"
    request = urllib.request.Request(url, b"x" * 100_000, {"content-type": "text/plain"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    with refused.value as answer:
        assert answer.code == 429 and int(answer.headers["retry-after"]) > 0
    world.use(0.79)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


def test_connection_blocked_is_sent_only_to_clients_that_support_it(world: World) -> None:
    """The other one would not know what to do with the method; it is held all the same."""
    silent = RawClient(world.port)
    silent.declare("q")
    silent.send(publish("q", b"1"))
    knowing = world.connect()
    told: list[str] = []
    knowing.add_on_connection_blocked_callback(lambda *_: told.append("blocked"))
    knowing.add_on_connection_unblocked_callback(lambda *_: told.append("unblocked"))
    knowing.channel().basic_publish("", "q", b"2")
    eventually(lambda: world.queue("q").ready == 2, "both are publishers")
    world.use(0.95)
    eventually(lambda: knowing.process_data_events(0.01) or told, "blocked")
    assert sum(client.transport.is_held for client in world.clients) == 2
    world.use(0.5)
    eventually(lambda: knowing.process_data_events(0.01) or len(told) == 2, "unblocked")
    assert told == ["blocked", "unblocked"]
    # The next thing the silent one hears is the answer to its own question.
    silent.send(method(1, commands.Queue.Declare(queue="q", passive=True)))
    assert isinstance(silent.next_frame(), commands.Queue.DeclareOk)
    silent.close()


def test_a_connection_that_only_consumes_is_not_blocked(world: World) -> None:
    publisher, consumer = world.channel(), world.channel()
    publisher.queue_declare("q")
    for number in range(10):
        publisher.basic_publish("", "q", b"%d" % number)
    eventually(lambda: world.queue("q").ready == 10, "they are there")
    world.use(0.99)
    got = []
    for frame, _, body in consumer.consume("q"):
        got.append(body)
        consumer.basic_ack(frame.delivery_tag)
        if len(got) == 10:
            break
    eventually(lambda: world.queue("q").unacked == 0, "acks are read, too")
    assert got == [b"%d" % number for number in range(10)]
    world.use(0.1)


def test_a_paused_publisher_is_not_hung_up_on_for_its_silence(world: World) -> None:
    client = RawClient(world.port, heartbeat=60)
    client.declare("q")
    client.send(publish("q", b"1"))
    eventually(lambda: world.queue("q").ready == 1, "it is a publisher")
    world.use(0.95)
    [connection] = world.clients
    assert connection.transport.is_held
    for _ in range(3):
        world.call(lambda: silent_for_an_hour(connection))
        assert isinstance(client.next_frame(), heartbeat.Heartbeat), "of ours: the connection is there"
    world.use(0.1)
    assert client.depth("q") == 1
    client.close()


def silent_for_an_hour(connection: Any) -> None:
    """On the broker's loop, when the timer of its heartbeats fires: both sides have said nothing."""
    connection.transport.last_read -= 3600
    connection.transport._last_write -= 3600
    connection.transport.check_heartbeat()


def test_a_client_is_not_hung_up_on_because_the_broker_stood_still(world: World) -> None:
    """Stopped, or moved to another machine: when it goes on its timers are due before it has read a byte."""
    client = RawClient(world.port, heartbeat=60)
    client.declare("q")
    [connection] = world.clients

    def stand_still() -> None:
        client.send(heartbeat.Heartbeat().marshal())
        silent_for_an_hour(connection)

    world.call(stand_still)
    assert client.depth("q") == 0
    for _ in range(3):  # and now it is the client
        world.call(lambda: silent_for_an_hour(connection))
    eventually(lambda: not world.clients, "it is hung up on")
    client.close()


def test_the_disconnect_of_a_paused_publisher_is_noticed(world: World) -> None:
    """Its exclusive queue goes with it: it might be what fills the memory."""
    client = RawClient(world.port)
    client.declare("own", durable=False, exclusive=True)
    client.send(publish("own", b"1"))
    eventually(lambda: world.queue("own").ready == 1, "it is a publisher")
    world.use(0.95)
    assert len(world.clients) == 1
    client.close()
    eventually(lambda: not world.clients, "it is gone")
    assert "own" not in world.server.broker.vhosts.get("/").queues
    assert world.pressure.verdict.paused_by == "memory"


def test_a_publisher_that_connects_during_an_alarm_gets_blocked_at_its_first_message(world: World) -> None:
    world.use(0.95)
    connection = world.connect()
    told = threading.Event()
    connection.add_on_connection_blocked_callback(lambda *_: told.set())
    channel = connection.channel()
    channel.queue_declare("q")  # not a publisher yet: declaring is answered
    channel.basic_publish("", "q", b"1")
    eventually(lambda: connection.process_data_events(0.01) or told.is_set(), "blocked")
    world.use(0.1)
    eventually(lambda: world.queue("q").ready == 1, "its message was taken")


def test_more_connections_than_files_are_refused_at_every_listener_together(tmp_path: Path) -> None:
    running = Running(tmp_path)
    running.call(lambda: setattr(running.server.broker, "_connections_max", 3))
    try:
        kept = [RawClient(running.port) for _ in range(3)]
        with pytest.raises((ConnectionError, pika.exceptions.AMQPConnectionError)):
            RawClient(running.port)
        kept.pop().close()
        eventually(lambda: len(running.call(lambda: list(running.listener.connections))) == 2, "one is gone")
        kept.append(RawClient(running.port))
        for client in kept:
            client.close()
    finally:
        running.stop()


async def test_the_connection_limit_leaves_file_descriptors_for_the_log(tmp_path: Path) -> None:
    broker = await Broker.open(Config(data_dir=str(tmp_path)))
    files = broker.disk.open_files_max()
    assert broker.pressure.connections_max <= files - files // 4 - 100 or files < 400
    await broker.close()


@pytest.mark.parametrize("files", [1024, 65536])
async def test_the_connection_limit_leaves_file_descriptors_for_pending_replies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    """Each may take two: one of its segment, and a copy of the socket of a client that does not read on."""
    monkeypatch.setattr("headrace.log.disk.disk.RealDisk.open_files_max", lambda _: files)
    broker = await Broker.open(Config(data_dir=str(tmp_path)))
    parts = broker.shard.file_ranges.limit
    assert 0 < 2 * parts <= files // 16
    assert broker.pressure.connections_max <= files - files // 4 - 100 - 2 * parts
    await broker.close()
