"""What looking costs: 10,000 queues and 1,000 connections, listed while somebody publishes.

    python -m bench.listing

Prints the broker's CPU seconds for each listing, and the latency of confirms of a publisher while it runs.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import pika

PATHS = (
    "/api/queues?page=1&page_size=100&sort=name",
    "/api/queues?page=50&page_size=100&sort=messages&sort_reverse=true",
    "/api/queues?page=1&page_size=100&name=77&use_regex=true",
    "/api/headrace/streams?page=1&page_size=50&sort=ready&sort_reverse=true",
    "/api/queues?columns=name,messages",
    "/api/queues",
    "/api/connections?page=1&page_size=100",
    "/api/connections",
    "/api/channels",
    "/api/overview",
    "/metrics",
    "/metrics/detailed",
)


def cpu_s(pid: int) -> float:
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--queues", type=int, default=10_000)
    options.add_argument("--connections", type=int, default=1_000)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "headrace", "serve", "--data-dir", folder]
        command += ["--http", "localhost:0", "--amqp", "localhost:0", "--kafka", "off"]
        broker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            measure(broker, given.queues, given.connections)
        finally:
            broker.terminate()
            broker.wait(60)


def measure(broker: "subprocess.Popen[str]", queues: int, connections: int) -> None:
    assert broker.stdout is not None
    said = ""
    for line in broker.stdout:
        said += line
        if line.startswith("ready"):
            break
    base = re.search(r"^http\s+(\S+)", said, re.M)[1]  # type: ignore[index]
    port = int(re.search(r"^amqp\s+amqp://127.0.0.1:(\d+)", said, re.M)[1])  # type: ignore[index]
    url = pika.URLParameters(f"amqp://guest:guest@127.0.0.1:{port}/%2F?heartbeat=0")
    channel = pika.BlockingConnection(url).channel()
    began = time.monotonic()
    for number in range(queues):
        channel.queue_declare(f"queue-{number:05d}", durable=number % 2 == 0)
    print(f"{queues:,} queues, half of them durable, declared in {time.monotonic() - began:.1f} s")
    opened = [connect(port) for _ in range(connections)]
    print(f"{len(opened):,} connections")
    latencies: list[float] = []
    stop = threading.Event()
    publisher = threading.Thread(target=publish, args=(url, latencies, stop))
    publisher.start()
    time.sleep(3)
    quiet = sorted(latencies)
    with httpx.Client(base_url=base, timeout=120) as client:
        for path in PATHS:
            client.get(path)
            latencies.clear()
            before, began = cpu_s(broker.pid), time.monotonic()
            answer = client.get(path)
            took, cpu = time.monotonic() - began, cpu_s(broker.pid) - before
            assert answer.status_code == 200, answer.text
            worst = max(latencies, default=0.0) * 1000
            size = len(answer.content)
            print(f"{cpu:6.3f} CPU-s  {took:6.3f} s  {size:>10,} bytes  worst confirm {worst:6.1f} ms  {path}")
    stop.set()
    publisher.join()
    print(f"confirms before: median {quiet[len(quiet) // 2] * 1000:.1f} ms, worst {quiet[-1] * 1000:.1f} ms")
    for sock in opened:
        sock.close()


def publish(url: pika.URLParameters, latencies: list[float], stop: threading.Event) -> None:
    channel = pika.BlockingConnection(url).channel()
    channel.confirm_delivery()
    while not stop.is_set():
        began = time.monotonic()
        channel.basic_publish("", "queue-00000", b"x" * 100)
        latencies.append(time.monotonic() - began)


def connect(port: int) -> socket.socket:
    """An AMQP connection with one open channel, in as few bytes as possible."""
    from pamqp import commands

    from headrace.wire.amqp.methods import frame

    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(b"AMQP\0\0\x09\x01")
    parts = [
        frame(0, commands.Connection.StartOk, client_properties={}, mechanism="PLAIN", response="\0guest\0guest",
              locale="en_US"),
        frame(0, commands.Connection.TuneOk, channel_max=10, frame_max=131072, heartbeat=0)
        + frame(0, commands.Connection.Open, virtual_host="/"),
        frame(1, commands.Channel.Open),
    ]  # fmt: skip
    for part in parts:
        sock.recv(4096)
        sock.sendall(part)
    sock.recv(4096)
    return sock


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
