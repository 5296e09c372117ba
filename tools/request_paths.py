"""Counts the Python functions and files that a request passes, for the table in docs/architecture.md.

    PYTHONPATH=src:. python tools/request_paths.py

Starts a broker in a thread, sends each kind of request until routes and caches are warm, and then traces the event-loop
thread with sys.setprofile while REQUESTS more are handled one at a time. A function counts if it runs in nearly every
one of them; leaf helpers that only read a clock or update a counter do not count, nor do compiled functions, which the
profiler cannot see. Spark's reader is traced in the thread that calls it, from planning to the last row.
"""

import http.client
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import confluent_kafka
import pika
from pyspark.sql.types import StructType
from tests.listeners.amqp.running import Running

from headrace.config import Address
from headrace.spark.source import HeadraceSource

REQUESTS = 20
SOURCE = str(Path(__file__).parent.parent / "src" / "headrace") + os.sep
LEAVES = ("clock.py", "counters.py", "log/counters.py", "broker/metrics/counters.py")
Functions = set[tuple[str, str]]


class Tracer:
    """Counts in how many requests each function of the project runs, in the thread that calls `start`."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()
        self._now: Functions = set()

    def start(self) -> None:
        sys.setprofile(self._event)

    def stop(self) -> None:
        sys.setprofile(None)
        self.seen.update(self._now)
        self._now = set()

    def _event(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and not code.co_name.startswith("<"):
            file = code.co_filename.removeprefix(SOURCE)
            if file not in LEAVES:
                self._now.add((file, code.co_qualname))

    def functions(self, requests: int) -> Functions:
        return {function for function, count in self.seen.items() if count >= requests * 0.9}


def on_loop(running: Running, function: Callable[[], None]) -> None:
    done = threading.Event()

    def run() -> None:
        function()
        done.set()

    running.loop.call_soon_threadsafe(run)
    done.wait()


def traced(running: Running, request: Callable[[], object]) -> Functions:
    for _ in range(REQUESTS):
        request()
    tracer = Tracer()
    for _ in range(REQUESTS):
        on_loop(running, tracer.start)
        request()
        on_loop(running, tracer.stop)
    return tracer.functions(REQUESTS)


def amqp_requests(port: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """(a publish with confirm, a delivery with its ack)."""
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port, heartbeat=0))
    publisher, consumer = connection.channel(), connection.channel()
    for queue in ("stored", "consumed"):
        publisher.queue_declare(queue, durable=True)
    publisher.confirm_delivery()
    for _ in range(3 * REQUESTS):
        publisher.basic_publish("", "consumed", b"x" * 100)
    consumer.basic_qos(prefetch_count=1)
    deliveries = consumer.consume("consumed")
    method = next(deliveries)[0]
    tag = [method.delivery_tag]

    def ack_and_receive() -> None:
        consumer.basic_ack(tag[0])
        tag[0] = next(deliveries)[0].delivery_tag

    return lambda: publisher.basic_publish("", "stored", b"x" * 100), ack_and_receive


def kafka_requests(port: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """(a Produce, a Fetch that returns records)."""
    address = {"bootstrap.servers": f"127.0.0.1:{port}"}
    producer = confluent_kafka.Producer({**address, "linger.ms": 0, "enable.idempotence": False})
    for topic in ("produced", "fetched"):
        producer.produce(topic, b"x" * 100)
        producer.flush()
    consumer = confluent_kafka.Consumer({**address, "group.id": "paths", "enable.auto.commit": False})
    consumer.assign([confluent_kafka.TopicPartition("fetched", 0, 0)])
    assert consumer.poll(10) is not None

    def produce() -> None:
        producer.produce("produced", b"x" * 100, partition=0)
        producer.flush()

    def fetch() -> None:
        consumer.seek(confluent_kafka.TopicPartition("fetched", 0, 0))
        assert consumer.poll(10) is not None

    return produce, fetch


def http_request(port: int) -> Callable[[], object]:
    connection = http.client.HTTPConnection("127.0.0.1", port)

    def publish() -> None:
        connection.request("POST", "/topics/published/messages", b"x" * 100, {"Content-Type": "text/plain"})
        response = connection.getresponse()
        body = response.read()
        assert response.status < 300, body

    return publish


def spark_read(folder: Path) -> Functions:
    tracer = Tracer()
    for _ in range(2):
        tracer = Tracer()
        tracer.start()
        source = HeadraceSource({"path": str(folder), "topic": "produced"})
        reader: Any = source.reader(StructType().add("offset", "long").add("value", "binary"))
        rows = sum(batch.num_rows for piece in reader.partitions() for batch in reader.read(piece))
        tracer.stop()
        assert rows
    return tracer.functions(1)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        running = Running(Path(name), http=Address("localhost", 0), kafka=Address("localhost", 0))
        try:
            listeners = running.server.listeners
            port = {kind: int(listeners[kind].addresses[0].rpartition(":")[2]) for kind in ("http", "kafka")}
            publish, receive = amqp_requests(running.port)
            produce, fetch = kafka_requests(port["kafka"])
            paths = {
                "AMQP publish with confirm": traced(running, publish),
                "AMQP ack and next delivery": traced(running, receive),
                "Kafka Produce": traced(running, produce),
                "Kafka Fetch": traced(running, fetch),
                "HTTP publish": traced(running, http_request(port["http"])),
                "Spark batch read": spark_read(Path(name)),
            }
        finally:
            running.stop()
    for path, functions in paths.items():
        print(f"{path}: {len(functions)} functions in {len({file for file, _ in functions})} files")
        if "-v" in sys.argv:
            print(*(f"    {file} {function}" for file, function in sorted(functions)), sep="\n")


if __name__ == "__main__":
    main()
