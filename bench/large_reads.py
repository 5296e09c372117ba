"""How much one client's read of a large record delays another client, and how much memory it takes.

    python -m bench.large_reads                        # every way to read, one after the other
    python -m bench.large_reads --mb 30 --memory-limit 512MB --only json,stream

A Kafka client stores one record of NUL bytes, gzip-compressed to a thousandth. Then each way to read it is used, while
a publisher sends a message every few milliseconds and waits for its confirm. Printed are the worst confirm, the peak of
the resident memory above what it was before, and what the reader received.
"""

import argparse
import gzip
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pika

from bench.broker import Broker
from headrace.record import codec

GZIP = 1
PACE_S = 0.004
QUIET_S = 2.0
READ_S_MAX = 60.0
GUEST = ("guest", "guest")
AT_ONCE = 8
BOMB_BYTES = 512 << 20


class Watch:
    """The worst confirm of a paced publisher, and the peak of the broker's memory, since the last `reset`."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._ends = threading.Event()
        self.reset()
        self._threads = [threading.Thread(target=self._publish), threading.Thread(target=self._measure)]
        for thread in self._threads:
            thread.start()

    def reset(self) -> None:
        self.worst_s, self.base = 0.0, self._broker.rss_bytes
        self.peak = self.base

    def _publish(self) -> None:
        connection = pika.BlockingConnection(pika.ConnectionParameters("localhost", self._broker.port("amqp")))
        channel = connection.channel()
        channel.queue_declare("paced", durable=True)
        channel.confirm_delivery()
        while not self._ends.is_set():
            began = time.monotonic()
            channel.basic_publish("", "paced", b"x")
            self.worst_s = max(self.worst_s, time.monotonic() - began)
            time.sleep(PACE_S)
        connection.close()

    def _measure(self) -> None:
        while not self._ends.wait(0.002):
            self.peak = max(self.peak, self._broker.rss_bytes)

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


def produce(port: int, topic: str, batch: bytes) -> int:
    """Send one batch with Produce version 8; returns the error code."""
    name = topic.encode()
    body = struct.pack(">hhiih", -1, -1, 30_000, 1, len(name)) + name + struct.pack(">iii", 1, 0, len(batch)) + batch
    head = struct.pack(">hhih", 0, 8, 1, 5) + b"bench"
    with socket.create_connection(("localhost", port), 60) as sock:
        sock.sendall(struct.pack(">i", len(head) + len(body)) + head + body)
        stream = sock.makefile("rb")
        answer = stream.read(struct.unpack(">i", stream.read(4))[0])
    return int(struct.unpack_from(">h", answer, 4 + 4 + 2 + len(name) + 4 + 4)[0])


def http_read(broker: Broker, path: str, *, times: int = 1, auth: Any = GUEST, **asked: Any) -> str:
    def once(_: int) -> str:
        with httpx.stream(asked.get("method", "GET"), broker.url + path, auth=auth, timeout=READ_S_MAX,
                          json=asked.get("json")) as answer:  # fmt: skip
            size, start = 0, b""
            for piece in answer.iter_raw():
                size += len(piece)
                start = (start + piece)[:400]
        return f"{answer.status_code}, {size:,} bytes" + (f", {start!r}" if answer.status_code >= 400 else "")

    with ThreadPoolExecutor(times) as threads:
        return " | ".join(sorted(set(threads.map(once, range(times)))))


def consume(broker: Broker, queue: str, count: int, arguments: dict[str, Any] | None = None) -> str:
    """`count` consumers of a queue or stream, each on a connection of its own, until each has one message."""

    def once(_: int) -> str:
        parameters = pika.ConnectionParameters("localhost", broker.port("amqp"))
        connection = pika.BlockingConnection(parameters)
        got: list[int] = []
        try:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=1)
            channel.basic_consume(queue, lambda *received: got.append(len(received[3])), arguments=arguments or {})
            deadline = time.monotonic() + READ_S_MAX
            while not got and time.monotonic() < deadline:
                connection.process_data_events(0.05)
        except pika.exceptions.AMQPError as error:
            return f"{error!r}"[:300]
        finally:
            if connection.is_open:
                connection.close()
        return f"a message of {got[0]:,} bytes" if got else "nothing"

    with ThreadPoolExecutor(count) as threads:
        return " | ".join(sorted(set(threads.map(once, range(count)))))


def get(broker: Broker, queue: str) -> str:
    connection = pika.BlockingConnection(pika.ConnectionParameters("localhost", broker.port("amqp")))
    try:
        _, _, body = connection.channel().basic_get(queue)
        return "nothing" if body is None else f"a message of {len(body):,} bytes"
    except pika.exceptions.AMQPError as error:
        return f"{error!r}"[:300]
    finally:
        if connection.is_open:
            connection.close()


def server_sent(broker: Broker, path: str) -> str:
    with httpx.stream("GET", broker.url + path, auth=GUEST, timeout=READ_S_MAX) as answer:
        size, start = 0, b""
        for piece in answer.iter_raw():
            size += len(piece)
            start = (start + piece)[:300]
            if b"\ndata:" in start and piece.endswith(b"\n\n"):
                return f"{answer.status_code}, {size:,} bytes, {start[:200]!r}"
    return "nothing"


def bomb(broker: Broker) -> str:
    packed = gzip.compress(bytes(BOMB_BYTES), 6)
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    answer = httpx.post(
        f"{broker.url}/topics/other/messages", content=packed, headers=headers, auth=GUEST, timeout=READ_S_MAX
    )
    return f"{answer.status_code}, sent {len(packed):,} bytes that expand to {BOMB_BYTES:,}"


WAYS: dict[str, Callable[[Broker], str]] = {
    "json": lambda broker: http_read(broker, "/topics/t/messages?limit=1"),
    "json-8": lambda broker: http_read(broker, "/topics/t/messages?limit=1", times=AT_ONCE),
    "ndjson": lambda broker: http_read(broker, "/topics/t/messages?limit=1&format=ndjson"),
    "base64": lambda broker: http_read(broker, "/topics/t/messages?limit=1&encoding=base64"),
    "raw": lambda broker: http_read(broker, "/topics/t/messages?format=raw"),
    "batches": lambda broker: http_read(broker, "/topics/t/partitions/0/batches"),
    "events": lambda broker: server_sent(broker, "/topics/t/stream?offset=earliest"),
    "key": lambda broker: http_read(broker, "/topics/t/keys/k"),
    "dashboard": lambda broker: http_read(broker, "/api/headrace/streams/%2F/t/messages?offset=0"),
    "search": lambda broker: http_read(broker, "/api/headrace/streams/%2F/t/messages?contains=needle"),
    "dead-letters": lambda broker: http_read(broker, "/api/headrace/dead-letters/%2F/q/messages"),
    "management-get": lambda broker: http_read(
        broker,
        "/api/queues/%2F/q/get",
        method="POST",
        json={"count": 1, "ackmode": "ack_requeue_true", "encoding": "auto"},
    ),
    "stream": lambda broker: consume(broker, "t", 1, {"x-stream-offset": "first"}),
    "stream-4": lambda broker: consume(broker, "t", 4, {"x-stream-offset": "first"}),
    "get": lambda broker: get(broker, "q"),
    "queue": lambda broker: consume(broker, "q", 1),
    "gzip-body": bomb,
}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--mb", type=int, default=120, help="size of the record")
    options.add_argument("--memory-limit", default="auto")
    options.add_argument("--only", help="names of the ways to read, separated by commas")
    given = options.parse_args()
    size = given.mb << 20
    settings = ["--memory-limit", given.memory_limit]
    if given.mb > 31:  # the broker refuses such a batch by default, but older ones may be stored
        settings += ["--decompressed-bytes-max", f"{given.mb + 1}MB"]
    batch = bytes(codec.build([(b"k", bytes(size), (), 1)], codec=GZIP, timestamp_ms=1))
    print(f"a record of {size:,} bytes in a batch of {len(batch):,} bytes; memory limit {given.memory_limit}")
    for name in given.only.split(",") if given.only else WAYS:
        # A broker for each, so that memory that the last one left behind is not counted for the next.
        with tempfile.TemporaryDirectory() as folder, Broker(
            folder, *settings
        ) as broker:  # fmt: skip
            prepare(broker, batch)
            watch = Watch(broker)
            try:
                time.sleep(QUIET_S)
                watch.reset()
                time.sleep(QUIET_S)
                quiet_s = watch.worst_s
                watch.reset()
                began = time.monotonic()
                try:
                    found = WAYS[name](broker)
                except httpx.HTTPError as error:
                    found = repr(error)
                took_s = time.monotonic() - began
            finally:
                watch.stop()
            print(
                f"{name:15} worst confirm {watch.worst_s * 1e3:6.0f} ms (quiet {quiet_s * 1e3:.0f}), memory "
                f"+{(watch.peak - watch.base) >> 20:,} MB to {watch.peak >> 20:,} MB, took {took_s:.2f} s: {found}",
                flush=True,
            )


def prepare(broker: Broker, batch: bytes) -> None:
    """Topic t with a key index, and queue q, each with the large record; and a topic for bodies."""
    for name, settings in (("t", {"key_index": "true"}), ("other", {})):
        httpx.post(
            f"{broker.url}/topics", json={"name": name, "config": settings}, auth=GUEST, timeout=60
        ).raise_for_status()
    connection = pika.BlockingConnection(pika.ConnectionParameters("localhost", broker.port("amqp")))
    connection.channel().queue_declare("q", durable=True)
    connection.close()
    for topic in ("t", "q"):
        code = produce(broker.port("kafka"), topic, batch)
        if code:
            raise SystemExit(f"the broker refused the batch with error code {code}")


if __name__ == "__main__":
    main()
