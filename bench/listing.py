"""The cost of listings: 10,000 queues and 1,000 connections, listed while a client publishes.

    python -m bench.listing              # CPU of each listing, and a paced publisher's confirms beside it
    python -m bench.listing --turns      # the longest event-loop iteration during each request

The first starts a broker as usual. A publisher sends a message every few milliseconds and waits for its confirm: p50,
p99 and worst without listings, and while each path is requested four times a second. The second runs the broker inside
this process on Python's own event loop and measures the CPU time of every iteration: a long iteration blocks every
client, and CPU time shows this on a busy machine too.
"""

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pika

from bench.broker import Broker

PATHS = (
    "/api/queues?page=1&page_size=100&sort=name",
    "/api/queues?page=50&page_size=100&sort=messages&sort_reverse=true",
    "/api/queues?page=1&page_size=100&sort=message_stats.publish",
    "/api/queues?page=1&page_size=100&name=77&use_regex=true",
    "/api/headrace/streams?page=1&page_size=50&sort=ready&sort_reverse=true",
    "/api/headrace/streams?page=1&page_size=50&sort=size_bytes",
    "/api/queues?columns=name,messages",
    "/api/queues",
    "/api/bindings",
    "/api/exchanges",
    "/api/vhosts",
    "/api/definitions",
    "/api/connections?page=1&page_size=100",
    "/api/connections",
    "/api/channels",
    "/api/consumers",
    "/api/overview",
    "/api/nodes",
    "/api/headrace/overview",
    "/api/headrace/readers",
    "/api/headrace/dead-letters",
    "/topics",
    "/metrics",
    "/metrics/detailed",
)
FILLERS = 16
PACE_S = 0.004
SETTLE_S = 45.0  # thousands of new files are synced by the checkpoint: that is not what is measured here
QUIET_S = 20.0
LISTED_S = 3.0
ASKED_EVERY_S = 0.25


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--queues", type=int, default=10_000)
    options.add_argument("--connections", type=int, default=1_000)
    options.add_argument("--turns", action="store_true", help="the longest turn of the loop for each path")
    options.add_argument("--publish", type=int, metavar="PORT", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.publish:
        publish(given.publish)
    with tempfile.TemporaryDirectory() as folder:
        if given.turns:
            asyncio.run(turns(folder, given.queues, given.connections))
            return
        with Broker(folder, listeners=("http", "amqp")) as broker:
            measure(broker, given.queues, given.connections)


def fill(url: pika.URLParameters, port: int, queues: int, connections: int) -> list[socket.socket]:
    pika.BlockingConnection(url).channel().exchange_declare("listed", "topic", durable=True)
    began = time.monotonic()

    def declare(part: range) -> None:
        channel = pika.BlockingConnection(url).channel()
        for number in part:
            name = f"queue-{number:05d}"
            channel.queue_declare(name, durable=number % 2 == 0)
            channel.queue_bind(name, "listed", f"key.{number}")
            channel.basic_publish("", name, b"x")

    with ThreadPoolExecutor(FILLERS) as fillers:
        list(fillers.map(declare, (range(first, queues, FILLERS) for first in range(FILLERS))))
    print(f"{queues:,} queues, half durable, each with a binding and a message: {time.monotonic() - began:.1f} s")
    opened = [connect(port) for _ in range(connections)]
    print(f"{len(opened):,} connections", flush=True)
    return opened


# From outside: CPU and confirms.


def measure(broker: Broker, queues: int, connections: int) -> None:
    port = broker.port("amqp")
    url = pika.URLParameters(f"amqp://guest:guest@127.0.0.1:{port}/%2F?heartbeat=0")
    opened = fill(url, port, queues, connections)
    noted = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with this process
    publisher = subprocess.Popen([sys.executable, "-m", "bench.listing", "--publish", str(port)], stdout=noted)
    time.sleep(SETTLE_S)
    spans = [("no listings", time.monotonic(), time.monotonic() + QUIET_S, "")]
    time.sleep(QUIET_S)
    with httpx.Client(base_url=broker.url, timeout=120) as client:
        for path in PATHS:
            client.get(path)
            before, began, asked, size = broker.cpu_s, time.monotonic(), 0, 0
            while time.monotonic() - began < LISTED_S:
                at = time.monotonic()
                answer = client.get(path)
                assert answer.status_code == 200, answer.text
                asked, size = asked + 1, len(answer.content)
                time.sleep(max(0.0, ASKED_EVERY_S - (time.monotonic() - at)))
            cpu = (broker.cpu_s - before) / asked
            spans.append((path, began, time.monotonic(), f"{cpu:6.3f} CPU-s each  {size:>10,} bytes"))
    publisher.terminate()
    publisher.wait()
    noted.seek(0)
    lines = [line.split() for line in noted if line.endswith("\n")]
    confirms = [(float(at), float(took)) for at, took in lines]

    def within(since: float, until: float) -> list[float]:
        return [took for at, took in confirms if since <= at <= until]

    for path, since, until, cost in spans[1:]:
        print(f"{cost}  confirms {spread(within(since, until))}  {path}")
    print(f"confirms, no listings       {spread(within(*spans[0][1:3]))}")
    print(f"confirms, with listings     {spread(within(spans[1][1], spans[-1][2]))}")
    for sock in opened:
        sock.close()


def spread(latencies: list[float]) -> str:
    ordered = sorted(latencies) or [0.0]
    p50, p99, worst = (1000 * ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99, 1.0))
    return f"p50 {p50:5.1f}  p99 {p99:6.1f}  worst {worst:6.1f} ms"


def publish(port: int) -> None:
    """Publish in a separate process, so that only the broker delays it. Prints a line per confirm: time and latency."""
    channel = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port, heartbeat=0)).channel()
    channel.confirm_delivery()
    while True:
        began = time.monotonic()
        channel.basic_publish("", "queue-00000", b"x" * 100)
        now = time.monotonic()
        print(now, now - began, flush=True)
        time.sleep(max(0.0, PACE_S - (now - began)))


# From inside: turns of the loop.


async def turns(folder: str, queues: int, connections: int) -> None:
    from headrace.config import Address, Config
    from headrace.server import Server, _tune_garbage_collection

    _tune_garbage_collection()
    longest = [0.0]
    run = asyncio.Handle._run

    def timed(self: asyncio.Handle) -> None:
        before = time.thread_time()
        run(self)
        longest[0] = max(longest[0], time.thread_time() - before)

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    here = Address("localhost", 0)
    server = await Server.start(Config(data_dir=folder, http=here, amqp=here, kafka=None, durability="os"))
    base = server.listeners["http"].addresses[0]
    port = int(server.listeners["amqp"].addresses[0].rpartition(":")[2])
    url = pika.URLParameters(f"amqp://guest:guest@127.0.0.1:{port}/%2F?heartbeat=0")
    opened = await asyncio.to_thread(fill, url, port, queues, connections)
    base = base if base.startswith("http") else f"http://{base}"
    with httpx.Client(base_url=base, timeout=120) as client:
        longest[0] = 0.0
        await asyncio.sleep(25)
        print(f"{1000 * longest[0]:6.1f} ms  in 25 s without a request")
        for path in PATHS:
            await asyncio.to_thread(client.get, path)
            longest[0] = 0.0
            answer = await asyncio.to_thread(client.get, path)
            held = longest[0]
            assert answer.status_code == 200, answer.text
            print(f"{1000 * held:6.1f} ms  {len(answer.content):>10,} bytes  {path}", flush=True)
    for sock in opened:
        sock.close()
    await server.close()


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
