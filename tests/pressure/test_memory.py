"""Memory runs short in a real process: publishers are blocked, readers continue, no process is killed."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from pamqp import commands

from tests.pressure.raw import RawClient, content, method, publish
from tests.pressure.running import (
    MB,
    PATIENCE_S,
    BrokerProcess,
    broker,
    eventually,
    memory_group,
    oom_kills,
)

GROUP_BYTES = 512 * MB
HALF_MESSAGE = 14 * MB


class Hog:
    """Begins to send large messages and finishes none, until the broker's memory is short."""

    def __init__(self, running: BrokerProcess, connections: int = 12) -> None:
        self.clients = [RawClient(running.amqp) for _ in range(connections)]
        self.clients[0].declare("hogged")
        piece = content(b"h" * (HALF_MESSAGE + 10_000))[:HALF_MESSAGE]
        begin = method(1, commands.Basic.Publish(exchange="", routing_key="hogged"))
        self._threads = [threading.Thread(target=self._send, args=(c, begin + piece)) for c in self.clients]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _send(client: RawClient, data: bytes) -> None:
        client.socket.settimeout(None)
        try:
            client.send(data)
        except OSError:
            return  # closed by the broker, or by us

    def stop(self) -> None:
        for client in self.clients:
            try:
                client.socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for client in self.clients:
            client.close()


class PerSourceLimit:
    """Fills many transient queues, each too small to be spilled: memory that cannot be taken back by force."""

    def __init__(self, running: BrokerProcess, queues: int = 2500) -> None:
        self._admin = RawClient(running.amqp)
        self._names = [f"crowd-{number}" for number in range(queues)]
        for name in self._names:
            self._admin.declare(name, durable=False)
        self._filler = RawClient(running.amqp)
        self._thread = threading.Thread(target=self._fill)
        self._thread.start()

    def _fill(self) -> None:
        self._filler.socket.settimeout(None)
        try:
            for name in self._names:
                self._filler.send(publish(name, b"c" * 60_000))
        except OSError:
            return

    def stop(self) -> None:
        """The filler is paused, and hangs up as a crashed client would; the queues go by another connection."""
        with contextlib.suppress(OSError):  # or the broker did: the alarm lasted, and it held a piece of a message
            self._filler.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_S)
        self._filler.close()
        for name in self._names:
            self._admin.call(commands.Queue.Delete(queue=name), commands.Queue.DeleteOk)
        self._admin.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[BrokerProcess]:
    with broker(tmp_path / "data", "--memory-limit", "160MB") as running:
        yield running


class Publisher:
    """pika in a thread that publishes until stopped and records blocked notices. If polite, it waits while blocked."""

    def __init__(self, running: BrokerProcess, queue: str) -> None:
        self.connection = running.connect()
        self.told: list[tuple[str, Any]] = []
        self.connection.add_on_connection_blocked_callback(lambda _, frame: self.told.append(("blocked", frame)))
        self.connection.add_on_connection_unblocked_callback(lambda _, frame: self.told.append(("unblocked", frame)))
        self.channel = self.connection.channel()
        self.channel.queue_declare(queue, durable=True)
        self.sent = 0
        self.stored = 0
        self._queue = queue
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self.told or self.told[-1][0] == "unblocked":
                self.channel.basic_publish("", self._queue, b"m" * 1000)
                self.sent += 1
            self.connection.process_data_events(0.001)
        self.stored = self.channel.queue_declare(self._queue, passive=True).method.message_count
        self.connection.close()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def test_pika_gets_blocked_and_unblocked_while_consumers_drain(small: BrokerProcess) -> None:
    filler = RawClient(small.amqp)
    filler.declare("backlog")
    filler.send(publish("backlog", b"b" * 1000) * 5000)
    assert filler.depth("backlog") == 5000
    publisher = Publisher(small, "mine")
    eventually(lambda: publisher.sent > 10, "publishing")
    crowd = PerSourceLimit(small)
    try:
        eventually(lambda: small.metric('headrace_publishers_paused{reason="memory"}') == 1, "the alarm")
        eventually(lambda: publisher.told, "pika is blocked")
        assert publisher.told[0][0] == "blocked"
        assert "memory" in publisher.told[0][1].method.reason
        assert small.get("/health")[0] == 503
        status, headers, problem = small.post("other", b"not now")
        assert status == 429 and int(headers["retry-after"]) >= 1 and "memory" in problem["detail"]
        # Connections that only consume are not blocked. With many unacked messages it would be closed later.
        with RawClient(small.amqp) as reader:
            reader.call(commands.Basic.Qos(prefetch_count=20), commands.Basic.QosOk)
            reader.send(method(1, commands.Basic.Consume(queue="backlog")))
            for number in range(1, 5001):
                reader.expect(commands.Basic.Deliver)
                if number % 10 == 0:
                    reader.send(method(1, commands.Basic.Ack(number, multiple=True)))
        assert small.get("/topics/backlog/messages?limit=10")[0] == 200
    finally:
        crowd.stop()
    eventually(lambda: len(publisher.told) == 2, "pika is unblocked")
    assert publisher.told[1][0] == "unblocked"
    before = publisher.sent
    eventually(lambda: publisher.sent > before + 10, "publishing goes on")
    publisher.stop()
    assert small.post("other", b"now")[0] == 200
    assert small.metric('headrace_pressure_events_total{event="memory_paused"}') == 1, "no flapping"
    assert publisher.stored == publisher.sent
    filler.close()


def test_clients_that_only_hold_memory_are_closed_when_it_stays_short(small: BrokerProcess) -> None:
    """The hogs never go away by themselves: everybody else would be paused for ever."""
    publisher = Publisher(small, "mine")
    hog = Hog(small, 40)
    try:
        eventually(lambda: small.metric('headrace_pressure_events_total{event="memory_paused"}') > 0, "the alarm")
        eventually(lambda: small.metric('headrace_publishers_paused{reason="memory"}') == 0, "its end")
        assert small.metric('headrace_shed_bytes_total{holder="amqp_connections"}') > 0
        before = publisher.sent
        eventually(lambda: publisher.sent > before, "publishing goes on")
        # They want to send 560 MB: connections are blocked even in the middle of a message.
        assert small.peak_bytes < 220 * MB
    finally:
        hog.stop()
        publisher.stop()


def test_kafka_producers_wait_and_lose_nothing(small: BrokerProcess) -> None:
    failed: list[Any] = []
    throttled: list[float] = []
    producer = Producer(
        {
            "bootstrap.servers": f"127.0.0.1:{small.kafka}",
            "linger.ms": 5,
            "throttle_cb": lambda event: throttled.append(event.throttle_time),
        }
    )

    def report(error: Any, _: Any) -> None:
        if error is not None:
            failed.append(error)

    producer.produce("kept", b"first", on_delivery=report)
    assert producer.flush(PATIENCE_S) == 0
    crowd = PerSourceLimit(small)
    try:
        eventually(lambda: small.metric('headrace_publishers_paused{reason="memory"}') == 1, "the alarm")
        for number in range(200):
            producer.produce("kept", b"%d" % number, on_delivery=report)
        producer.poll(1.0)
    finally:
        crowd.stop()
    assert producer.flush(PATIENCE_S) == 0
    assert failed == []
    assert small.get("/topics/kept/messages?limit=1000")[1].count(b'"offset"') == 201


def test_a_socket_that_never_reads_costs_bounded_memory(tmp_path: Path) -> None:
    with broker(tmp_path / "data") as running, RawClient(running.amqp) as filler:
        for queue in ("deep", "shallow"):
            filler.declare(queue)
            for _ in range(50):
                filler.send(publish(queue, b"d" * 10_000) * 100)
            assert filler.depth(queue) == 5000
        before = running.rss_bytes
        stuck = [RawClient(running.amqp, receive_bytes=4096) for _ in range(20)]
        for client in stuck:  # deliveries: fifty megabytes are there to be sent
            client.send(method(1, commands.Basic.Consume(queue="deep", no_ack=False)))
        # Answers to what it asks for: it may ask as much as it likes.
        rude = RawClient(running.amqp, receive_bytes=4096)
        rude.socket.settimeout(2)
        ask = method(1, commands.Basic.Get(queue="shallow", no_ack=False)) * 1000
        with pytest.raises(TimeoutError):
            for _ in range(1000):
                rude.send(ask)
        held = running.metric('headrace_held_bytes{holder="amqp_connections"}')
        assert held < 50 * MB
        assert running.rss_bytes - before < 100 * MB
        # And the others do not notice.
        assert filler.depth("deep") <= 5000
        for client in (*stuck, rude):
            client.close()
        eventually(lambda: running.metric('headrace_held_bytes{holder="amqp_connections"}') < MB, "it is given back")
        eventually(lambda: filler.depth("deep") == filler.depth("shallow") == 5000, "what they had is ready again")


def test_one_read_full_of_questions_does_not_get_all_its_answers_at_once(tmp_path: Path) -> None:
    """Fifty times forty bytes that ask for ten megabytes each; then the client reads, and gets them all."""
    with broker(tmp_path / "data", "--durability", "os") as running, RawClient(running.amqp) as client:
        client.declare("large")
        message = publish("large", b"l" * (10 * MB))
        for _ in range(50):
            client.send(message)
        assert client.depth("large") == 50
        before = running.peak_bytes
        client.send(method(1, commands.Basic.Get(queue="large", no_ack=True)) * 50)
        held = eventually(lambda: running.metric('headrace_held_bytes{holder="amqp_connections"}'), "answers wait")
        assert held < 40 * MB
        for _ in range(50):
            client.expect(commands.Basic.GetOk)
        assert running.peak_bytes - before < 100 * MB
        assert client.depth("large") == 0


def test_a_kafka_client_that_asks_without_reading_costs_bounded_memory(tmp_path: Path) -> None:
    with broker(tmp_path / "data") as running, RawClient(running.amqp) as filler:
        filler.declare("deep")
        filler.send(publish("deep", b"d" * 10_000) * 2000)
        assert filler.depth("deep") == 2000
        before = running.rss_bytes
        fetch = _fetch_request("deep", 16 * MB)
        clients = []
        for _ in range(50):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", running.kafka))
            client.sendall(fetch * 500)  # for answers of 8 GB each
            clients.append(client)
        held = 'headrace_held_bytes{holder="kafka_connections"}'
        eventually(lambda: running.metric(held) > 10 * MB, "they are served")
        seen = [0.0]

        def has_settled() -> bool:
            seen.append(running.metric(held))
            return seen[-1] == seen[-2]

        eventually(has_settled, "no connection buffers more than its limit")
        assert filler.depth("deep") == 2000
        assert seen[-1] < 128 * MB
        assert running.peak_bytes - before < 256 * MB
        for client in clients:
            client.close()
        eventually(lambda: running.metric(held) == 0, "it is given back")


def _fetch_request(topic: str, size: int) -> bytes:
    """Fetch version 4, by hand."""
    name = topic.encode()
    body = (1).to_bytes(2, "big") + (4).to_bytes(2, "big") + (7).to_bytes(4, "big") + b"\xff\xff"
    body += b"\xff\xff\xff\xff" + (0).to_bytes(4, "big") + (1).to_bytes(4, "big") + size.to_bytes(4, "big") + b"\0"
    body += (1).to_bytes(4, "big") + len(name).to_bytes(2, "big") + name
    body += (1).to_bytes(4, "big") + (0).to_bytes(4, "big") + (0).to_bytes(8, "big") + size.to_bytes(4, "big")
    return len(body).to_bytes(4, "big") + body


def backlog_in_a_small_group(folder: Path, backlog_bytes: int) -> None:
    """Publishes more than the group has memory for, hangs a hundred consumers on it that never read, and publishes
    and consumes beside them."""
    with memory_group(GROUP_BYTES) as group:
        if group is None:
            pytest.skip("NO CGROUP: /sys/fs/cgroup/memory is not writable here, so 512 MB cannot be enforced")
        with broker(folder, group=group) as running:
            assert running.metric("headrace_memory_limit_bytes") < GROUP_BYTES / 2
            with RawClient(running.amqp) as filler:
                filler.declare("backlog")
                block = publish("backlog", b"b" * 10_000) * 100
                count = backlog_bytes // MB
                for _ in range(count):
                    filler.send(block)
                assert filler.depth("backlog") == count * 100
            stuck = [RawClient(running.amqp) for _ in range(100)]
            for client in stuck:
                client.send(method(1, commands.Basic.Consume(queue="backlog")))
            connection = running.connect()
            channel = connection.channel()
            channel.queue_declare("beside", durable=True)
            channel.confirm_delivery()
            for number in range(500):
                channel.basic_publish("", "beside", b"%d" % number)
            got = 0
            for frame, _, _ in channel.consume("beside", auto_ack=True):
                got += frame is not None
                if got == 500:
                    break
            connection.close()
            assert running.process.poll() is None and oom_kills(group) == 0
            assert running.peak_bytes < GROUP_BYTES / 2
            for client in stuck:
                client.close()
        assert running.process.returncode == 0


def test_a_broker_with_512_mb_survives_a_larger_backlog_and_stuck_consumers(tmp_path: Path) -> None:
    backlog_in_a_small_group(tmp_path / "data", 1536 * MB)


def test_transient_queues_larger_than_memory_spill_to_disk_and_lose_nothing(tmp_path: Path) -> None:
    spilled = tmp_path / "data" / "spill"
    with broker(tmp_path / "data", "--memory-limit", "160MB") as running, RawClient(running.amqp) as client:
        client.declare("passing", durable=False)
        for first in range(0, 20_000, 100):
            numbers = range(first, first + 100)
            client.send(b"".join(publish("passing", b"%07d" % number + b"p" * 9993) for number in numbers))
        assert client.depth("passing") == 20_000
        assert running.peak_bytes < 160 * MB
        assert list(spilled.iterdir())
        channel = running.connect().channel()
        seen = []
        for _, _, body in channel.consume("passing", auto_ack=True):
            seen.append(int(body[:7]))
            if len(seen) == 20_000:
                break
        assert seen == list(range(20_000))
        channel.connection.close()
        eventually(lambda: not list(spilled.iterdir()), "the files go")
