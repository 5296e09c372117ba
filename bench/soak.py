"""All listeners and a pipeline for an hour: how often messages were taken, whether all came out, and what grew.

    python -m bench.soak                      # an hour
    python -m bench.soak --minutes 5 --no-spark

Starts a broker whose retention is a few minutes, so that an hour is many times as long as anything is kept. Every
listener
has a publisher that waits for each confirm and a reader that counts what comes: AMQP with acknowledgements (pika),
Kafka in a consumer group (confluent-kafka), HTTP by offset. A Spark pipeline sums up what is published over HTTP.
Prints a line a minute, then availability per listener, messages that were confirmed and never came, and memory, files,
threads and disk over time. Nothing here is a test: read it. Needs the packages of the extras `dev` and `spark`.
"""

import argparse
import base64
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from bench.broker import Broker

CONFIRM_S_MAX = 1.0
SETTLE_S = 420.0  # before growth is judged: caches fill, Spark starts, retention removes its first segments
BODY_BYTES = 2000
DRAIN_S = 15.0
KEPT = ["--retention-ms", "3m", "--retention-interval", "10s", "--segment-size", "256KB", "--segment-age", "1m"]
PIPELINE = """
from pyspark.sql import functions as f
from headrace.pipelines import Pipeline, Sink, Source, blocks

pipeline = Pipeline("soak", sources={"http": Source("soak.http")}, sinks={"sums": Sink("soak.sums")},
                    trigger="20s", dead_letter="soak.bad")

@pipeline.flow(to="sums")
def sums(http):
    good, bad = blocks.decode_json(http, "number long, padding string")
    return blocks.encode_json(good.select(f.length("padding").alias("bytes"), "number")), bad
"""


class Listener:
    """What one listener's publisher and reader saw."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked = self.in_time = self.confirmed = 0
        self.took: list[float] = []
        self.seen: set[int] = set()
        self.again = 0  # duplicates
        self.errors: list[str] = []

    def body(self) -> bytes:
        return json.dumps({"number": self.asked, "padding": "x" * BODY_BYTES}).encode()

    def arrived(self, body: bytes) -> None:
        number = json.loads(body)["number"]
        self.again += number in self.seen
        self.seen.add(number)

    def summary(self) -> str:
        took = sorted(self.took) or [0.0]
        share = self.in_time / max(1, self.asked)
        p50, p99 = (1e3 * took[int(len(took) * share_below)] for share_below in (0.5, 0.99))
        times = f"p50 {p50:.1f} p99 {p99:.1f} worst {1e3 * took[-1]:.0f} ms"
        lost = self.confirmed - len(self.seen)
        return (
            f"{self.name:6} availability {share:.4%} of {self.asked:,} (confirmed within {CONFIRM_S_MAX:g} s)  {times}"
            f"  read {len(self.seen):,}  lost {max(0, lost):,}  twice {self.again:,}  errors {len(self.errors)}"
        )


class Traffic:
    """A publisher and a reader per listener, each in its thread, until stopped."""

    def __init__(self, addresses: dict[str, str], rate: float) -> None:
        self._addresses = addresses
        self._rate = rate
        self._publishing, self._reading = threading.Event(), threading.Event()
        self.listeners = {name: Listener(name) for name in ("amqp", "kafka", "http")}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._publishing.set()
        self._reading.set()
        for part in (self._read_amqp, self._read_kafka, self._read_http):
            self._begin(part)
        time.sleep(2.0)
        for part in (self._publish_amqp, self._publish_kafka, self._publish_http):
            self._begin(part)

    def stop(self) -> None:
        self._publishing.clear()
        time.sleep(DRAIN_S)
        self._reading.clear()
        for thread in self._threads:
            thread.join(30)

    def _begin(self, part: Callable[[Listener], None]) -> None:
        listener = self.listeners[part.__name__.rpartition("_")[2]]
        working = self._publishing if part.__name__.startswith("_publish") else self._reading

        def again() -> None:
            while working.is_set():
                try:
                    part(listener)
                except Exception as error:  # noqa: BLE001 - whatever it is, it is counted, printed and tried again
                    listener.errors.append(repr(error))
                    print(f"{listener.name}: {error!r}", flush=True)
                    time.sleep(1.0)

        thread = threading.Thread(target=again, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _paced(self, listener: Listener, publish: Callable[[bytes], object]) -> None:
        while self._publishing.is_set():
            at = time.monotonic()
            listener.asked += 1
            publish(listener.body())
            took = time.monotonic() - at
            listener.took.append(took)
            listener.confirmed += 1
            listener.in_time += took <= CONFIRM_S_MAX
            time.sleep(max(0.0, 1.0 / self._rate - took))

    def _amqp(self) -> Any:
        import pika

        host, _, port = self._addresses["amqp"].rpartition(":")
        return pika.BlockingConnection(pika.ConnectionParameters(host, int(port)))

    def _publish_amqp(self, listener: Listener) -> None:
        connection = self._amqp()
        channel = connection.channel()
        channel.confirm_delivery()
        self._paced(listener, lambda body: channel.basic_publish("", "soak.amqp", body))
        connection.close()

    def _read_amqp(self, listener: Listener) -> None:
        connection = self._amqp()
        channel = connection.channel()
        channel.queue_declare("soak.amqp", durable=True, arguments={"x-retain-ms": 120_000})
        channel.basic_qos(prefetch_count=50)

        def take(channel: Any, method: Any, _: Any, body: bytes) -> None:
            listener.arrived(body)
            channel.basic_ack(method.delivery_tag)

        channel.basic_consume("soak.amqp", take)
        while self._reading.is_set():
            connection.process_data_events(time_limit=0.5)
        connection.close()

    def _publish_kafka(self, listener: Listener) -> None:
        from confluent_kafka import KafkaError, Producer

        producer = Producer({"bootstrap.servers": self._addresses["kafka"], "linger.ms": 0, "acks": "all"})
        failed: list[object] = []

        def delivered(error: KafkaError | None, _: object) -> None:
            if error is not None:
                failed.append(error)

        def publish(body: bytes) -> None:
            producer.produce("soak.kafka", body, on_delivery=delivered)
            if producer.flush(30) or failed:
                raise RuntimeError(f"not taken: {failed[:1]}")

        self._paced(listener, publish)

    def _read_kafka(self, listener: Listener) -> None:
        from confluent_kafka import Consumer

        named = {"bootstrap.servers": self._addresses["kafka"], "group.id": "soak"}
        consumer = Consumer({**named, "auto.offset.reset": "earliest", "auto.commit.interval.ms": 1000})
        consumer.subscribe(["soak.kafka"])
        while self._reading.is_set():
            message = consumer.poll(0.5)
            if message is not None and message.error() is None and (body := message.value()) is not None:
                listener.arrived(body)
        consumer.close()

    def _publish_http(self, listener: Listener) -> None:
        with httpx.Client(base_url=self._addresses["http"], timeout=30) as client:

            def publish(body: bytes) -> None:
                headers = {"content-type": "text/plain"}  # as it is: one message
                client.post("/topics/soak.http/messages", content=body, headers=headers).raise_for_status()

            self._paced(listener, publish)

    def _read_http(self, listener: Listener) -> None:
        offset = len(listener.seen)
        with httpx.Client(base_url=self._addresses["http"], timeout=30) as client:
            while self._reading.is_set():
                answer = client.get(f"/topics/soak.http/messages?offset={offset}&wait=1s&limit=100&encoding=base64")
                answer.raise_for_status()
                for message in answer.json()["messages"]:
                    listener.arrived(base64.b64decode(message["value"]))
                offset = answer.json()["next_offset"]


def disk_bytes(folder: Path) -> int:
    found = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found += file.stat().st_blocks * 512
    return found


def state(broker: Broker, client: httpx.Client, folder: Path) -> dict[str, Any]:
    now = client.get("/api/headrace/overview?step=60").json()
    pipelines = client.get("/pipelines").json()["pipelines"]
    return {
        "memory_mb": round(now["memory_bytes"] / 1e6, 1),
        "files": len(os.listdir(f"/proc/{broker.pid}/fd")),
        "threads": len(os.listdir(f"/proc/{broker.pid}/task")),
        "log_mb": round(now["log_size_bytes"] / 1e6, 1),
        "disk_mb": round(disk_bytes(folder) / 1e6, 1),
        "cpu_s": round(broker.cpu_s, 1),
        "stalls": now["stalls"],
        "sync_p99_ms": now["sync_ms"]["p99"],
        "ready": now["ready"],
        "pipeline": [
            (p["name"], p["state"], p["details"].get("rows_total"), p["details"].get("lag")) for p in pipelines
        ],
    }


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--minutes", type=float, default=60.0)
    options.add_argument("--rate", type=float, default=5.0, help="messages a second at each listener")
    options.add_argument("--no-spark", action="store_true")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        with Broker(data, *KEPT) as broker, httpx.Client(base_url=broker.url, timeout=10) as client:
            client.post("/topics", json={"name": "soak.http"}).raise_for_status()
            client.post("/topics", json={"name": "soak.kafka"}).raise_for_status()
            pipeline = None if given.no_spark else start_pipeline(broker.url, Path(folder))
            try:
                watch(broker, given.minutes * 60, given.rate, client, data)
            finally:
                if pipeline is not None:
                    pipeline.terminate()
                    pipeline.wait(90)


def start_pipeline(url: str, folder: Path) -> "subprocess.Popen[bytes]":
    file = folder / "soak_pipeline.py"
    file.write_text(PIPELINE)
    command = [sys.executable, "-m", "headrace", "pipeline", "run", str(file), "--url", url, "--master", "local[1]"]
    command += ["--checkpoint", str(folder / "checkpoints"), "-c", "spark.ui.enabled=false"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def watch(broker: Broker, seconds: float, rate: float, client: httpx.Client, folder: Path) -> None:
    traffic = Traffic({**broker.addresses, "http": broker.url}, rate)
    traffic.start()
    began = time.monotonic()
    states: list[dict[str, Any]] = []
    settled = 0
    while (left := began + seconds - time.monotonic()) > 0:
        time.sleep(min(60.0, left))
        states.append(state(broker, client, folder))
        if time.monotonic() - began <= min(SETTLE_S, seconds / 2):
            settled = len(states)
        asked = " ".join(
            f"{listener.name} {listener.in_time}/{listener.asked}" for listener in traffic.listeners.values()
        )
        print(f"{(time.monotonic() - began) / 60:4.0f} min  {asked}  {states[-1]}", flush=True)
    traffic.stop()
    for listener in traffic.listeners.values():
        print(listener.summary())
    last, first = states[-1], states[min(settled, len(states) - 1)]
    print(f"broker CPU {last['cpu_s'] / seconds:.1%} of a core; pipeline {last['pipeline']}")
    for name in ("memory_mb", "files", "threads", "log_mb", "disk_mb", "stalls"):
        values = [one[name] for one in states[min(settled, len(states) - 1) :]]
        print(f"{name:10} {first[name]:>10} -> {last[name]:>10}   (least {min(values)}, most {max(values)})")


if __name__ == "__main__":
    main()
