"""What to plan with: bytes on disk for a message through each listener, memory and disk for a queue and a connection.

    python -m bench.capacity

Starts a broker, publishes to it as usual clients do, and looks at its folder and its memory. Sizes do not depend on how
busy the machine is. What messages cost in time is in the other benchmarks.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import pika
from confluent_kafka import Producer

from bench.broker import Broker
from bench.listing import connect


def disk_bytes(*folders: Path) -> int:
    return sum(file.stat().st_blocks * 512 for folder in folders for file in folder.rglob("*"))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--messages", type=int, default=20_000)
    options.add_argument("--queues", type=int, default=2_000)
    options.add_argument("--connections", type=int, default=1_000)
    given = options.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Broker(folder) as broker,
        httpx.Client(base_url=broker.url, timeout=60) as client,
    ):
        print(f"an empty broker: {broker.rss_bytes / 1e6:.0f} MB of memory")
        for size in (100, 1000, 10_000):
            messages(client, broker, size, max(100, given.messages * 100 // max(100, size)))
        objects(broker, Path(folder), given.queues, given.connections)


def messages(client: httpx.Client, broker: Broker, size: int, count: int) -> None:
    body = os.urandom(size)
    channel = amqp(broker)
    channel.queue_declare(f"amqp-{size}", durable=True)
    for _ in range(count):
        channel.basic_publish("", f"amqp-{size}", body)
    channel.connection.close()
    channel = amqp(broker)
    channel.confirm_delivery()
    channel.queue_declare(f"amqp-one-{size}", durable=True)
    for _ in range(count // 20):
        channel.basic_publish("", f"amqp-one-{size}", body)
    channel.connection.close()
    producer = Producer({"bootstrap.servers": broker.addresses["kafka"]})
    for _ in range(count):
        producer.produce(f"kafka-{size}", body)
        producer.poll(0)
    producer.flush(60)
    for name, how in (
        ("amqp", "AMQP, published without waiting"),
        ("amqp-one", "AMQP, each confirmed before the next"),
        ("kafka", "Kafka, librdkafka as it is"),
    ):
        topic = client.get(f"/topics/{name}-{size}").json()["logs"][0]
        stored = (topic["size_bytes"]) / (topic["end"] - topic["start"])
        print(f"{size:>6} B  {stored:8.1f} B on disk, {stored - size:5.1f} more than the body  {how}")


def amqp(broker: Broker) -> Any:
    parameters = pika.ConnectionParameters("127.0.0.1", broker.port("amqp"), heartbeat=0)
    return pika.BlockingConnection(parameters).channel()


def objects(broker: Broker, folder: Path, queues: int, connections: int) -> None:
    def state() -> tuple[int, int]:
        time.sleep(2.0)
        return broker.rss_bytes, disk_bytes(folder / "catalog", folder / "logs", folder / "state")

    memory, disk = state()
    channel = amqp(broker)
    for number in range(queues):
        channel.queue_declare(f"queue-{number}", durable=True)
    with_queues, disk_with = state()
    each = (with_queues - memory) / queues, (disk_with - disk) / queues
    print(f"{queues:,} empty durable queues: {each[0]:,.0f} B of memory and {each[1]:,.0f} B of disk each")
    for number in range(queues):
        channel.basic_publish("", f"queue-{number}", b"x" * 100)
    with_messages, disk_full = state()
    each = (with_messages - with_queues) / queues, (disk_full - disk_with) / queues
    print(f"the first message of each: {each[0]:,.0f} B of memory and {each[1]:,.0f} B of disk more")
    opened = [connect(broker.port("amqp")) for _ in range(connections)]
    after, _ = state()
    each_client = (after - with_messages) / connections
    print(f"{connections:,} AMQP connections with a channel: {each_client:,.0f} B of memory each")
    for sock in opened:
        sock.close()


if __name__ == "__main__":
    main()
