"""A broker in its own process, to be killed, and HTTP clients that record what they sent and read."""

import http.client
import json
import random
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.broker_process import BrokerProcess
from tests.crash.checker import History

ANSWER_SECONDS_MAX = 120.0  # generous: a client that gives up on a stalled broker too early may reorder its messages
HANG_SECONDS_MAX = ANSWER_SECONDS_MAX + 60


class HttpBroker(BrokerProcess):
    def __init__(self, folder: Path, *options: str, amqp: bool = False) -> None:
        super().__init__(folder, *options, listeners=("http", *["amqp"] * amqp))

    @property
    def port(self) -> int:
        return self.ports["http"]

    @property
    def amqp_port(self) -> int:
        return self.ports["amqp"]


def connect(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS_MAX)


def request(
    port: int, method: str, path: str, body: object = None, *, connection: http.client.HTTPConnection | None = None
) -> tuple[int, dict[str, Any]]:
    used = connection or connect(port)
    try:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        used.request(method, path, None if body is None else json.dumps(body), headers)
        answer = used.getresponse()
        data = answer.read()
        return answer.status, json.loads(data) if data[:1] in (b"{", b"[") else {}
    finally:
        if connection is None:
            used.close()


def body_of(producer: str, sequence: int, rng: random.Random) -> str:
    """Mostly small, sometimes too large to be stored inline in the journal."""
    size = rng.choice((0, 10, 100, 100, 1000, 1000, 5000)) if rng.random() < 0.98 else 100_000
    return f"{producer}:{sequence}:" + "x" * size


def crc_of(body: str) -> int:
    return zlib.crc32(body.encode())


class Load:
    """Producers and readers in threads. After a lost connection, the outcome of a request counts as unknown."""

    def __init__(self, port: int, history: History, seed: int, topics: dict[str, int]) -> None:
        self._port = port
        self._history = history
        self._topics = topics
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.confirmed = 0
        self.read = 0
        self.failures: list[str] = []
        work: list[tuple[Callable[[str, random.Random], None], str, int]]
        work = [(self._produce, f"p{i}", seed * 100 + i) for i in range(4)]
        work += [(self._consume, f"c{i}", seed * 100 + 50 + i) for i in range(2)]
        self._threads = [threading.Thread(target=self._guard, args=args, daemon=True) for args in work]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(HANG_SECONDS_MAX)
            assert not thread.is_alive(), "a client does not stop"

    def _guard(self, work: Callable[[str, random.Random], None], name: str, seed: int) -> None:
        try:
            work(name, random.Random(seed))
        except Exception as error:  # noqa: BLE001 - a thread's failure must reach the test
            self.failures.append(f"{name}: {error!r}")

    def _produce(self, producer: str, rng: random.Random) -> None:
        sequence = 0
        connection = connect(self._port)
        while not self._stopping.is_set():
            topic = rng.choice(list(self._topics))
            messages = []
            first = sequence
            for _ in range(rng.choice((1, 1, 2, 10, 50))):
                body = body_of(producer, sequence, rng)
                partition = rng.randrange(self._topics[topic])
                messages.append({"value": body, "key": f"k{sequence % 7}", "partition": partition})
                self._history.send(producer, sequence, crc_of(body))
                sequence += 1
            try:
                status, answer = request(
                    self._port, "POST", f"/topics/{topic}/messages", messages, connection=connection
                )
            except (OSError, http.client.HTTPException, ValueError):
                connection.close()  # unknown outcome: the messages may be stored or not
                self._stopping.wait(0.02)
                continue
            if status not in (200, 201):
                self.failures.append(f"{producer}: {status} {answer}")
                return
            for i, place in enumerate(answer["messages"]):
                self._history.confirmed(producer, first + i, topic, place["partition"], place["offset"])
            with self._lock:
                self.confirmed += len(messages)
        connection.close()

    def _consume(self, name: str, rng: random.Random) -> None:
        """Read random partitions, each from the offset where the previous read ended."""
        positions: dict[tuple[str, int], int] = {}
        session = 0
        connection = connect(self._port)
        while not self._stopping.is_set():
            topic = rng.choice(list(self._topics))
            partition = rng.randrange(self._topics[topic])
            position = positions.get((topic, partition), 0)
            path = f"/topics/{topic}/messages?partition={partition}&offset={position}&limit=500&wait=0"
            try:
                status, answer = request(self._port, "GET", path, connection=connection)
                path = f"/topics/{topic}/offsets"
                ends_status, ends = request(self._port, "GET", path, connection=connection)
            except (OSError, http.client.HTTPException, ValueError):
                connection.close()
                session += 1
                self._stopping.wait(0.02)
                continue
            if status == 404 or ends_status == 404:  # nothing was published to it yet
                continue
            if status != 200 or ends_status != 200:
                self.failures.append(f"{name}: {status} {answer} {ends_status} {ends}")
                return
            for message in answer["messages"]:
                record_message(self._history.read, f"{name}.{session}", topic, partition, message)
            if name == "c0":  # one observer, because two would record their observations in any order
                for entry in ends["partitions"]:
                    self._history.ends(topic, entry["partition"], entry["start"], entry["end"])
            positions[topic, partition] = answer["next_offset"]
            with self._lock:
                self.read += len(answer["messages"])
        connection.close()


def record_message(record: Callable[..., None], *where: object) -> None:
    *before, message = where
    assert isinstance(message, dict)
    producer, sequence, _ = message["value"].split(":", 2)
    record(*before, message["offset"], producer, int(sequence), crc_of(message["value"]))


def drain(port: int, history: History, topics: dict[str, int]) -> int:
    """Read every partition from start to end. The checker decides about loss by these records alone."""
    total = 0
    for topic in topics:
        status, answer = request(port, "GET", f"/topics/{topic}/offsets")
        assert status == 200, answer
        for entry in answer["partitions"]:
            partition, position = entry["partition"], entry["start"]
            while position < entry["end"]:
                path = f"/topics/{topic}/messages?partition={partition}&offset={position}&limit=1000&wait=0"
                status, page = request(port, "GET", path)
                assert status == 200 and page["messages"], (path, status, page, entry)
                for message in page["messages"]:
                    record_message(history.drained, topic, partition, message)
                total += len(page["messages"])
                position = page["next_offset"]
            history.drained_ends(topic, partition, entry["start"], entry["end"])
    return total
