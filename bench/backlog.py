"""A backlog far larger than memory, in a control group of 512 MB, with consumers that never read.

    python -m bench.backlog [--gb 10] [--stuck 100]

Needs root and a writable /sys/fs/cgroup/memory. Prints the broker's memory, whether the group's OOM killer was at
work, and the confirm latency of another client before and after the stuck consumers came.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pika
from pamqp import commands
from tests.pressure.raw import RawClient, method, publish
from tests.pressure.running import MB, BrokerProcess, broker, memory_group, oom_kills

from bench.result import Result

GROUP_BYTES = 512 * MB
BODY = b"b" * 10_000
BLOCK = 100
SAMPLES = 2000


def latencies_ms(running: BrokerProcess) -> list[float]:
    """Of confirms, one message at a time, sorted."""
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", running.amqp))
    channel = connection.channel()
    channel.queue_declare("beside", durable=True)
    channel.confirm_delivery()
    found = []
    for _ in range(SAMPLES):
        began = time.perf_counter()
        channel.basic_publish("", "beside", b"x" * 100, pika.BasicProperties(delivery_mode=2))
        found.append((time.perf_counter() - began) * 1000)
    connection.close()
    return sorted(found)


def fill(running: BrokerProcess, size_bytes: int) -> float:
    block = publish("backlog", BODY) * BLOCK
    count = size_bytes // (len(BODY) * BLOCK)
    with RawClient(running.amqp) as client:
        client.declare("backlog")
        began = time.perf_counter()
        for _ in range(count):
            client.send(block)
        client.socket.settimeout(600)
        assert client.depth("backlog") == count * BLOCK
        return time.perf_counter() - began


def run(backlog_bytes: int, stuck_count: int, folder: Path) -> list[Result]:
    with memory_group(GROUP_BYTES) as group:
        if group is None:
            sys.exit("no control group can be made here: root and a writable /sys/fs/cgroup/memory are needed")
        with broker(folder, group=group) as running:
            fill(running, 256 * MB)  # warm: files, page cache and memory have been touched
            before = latencies_ms(running)
            took = fill_rest(running, backlog_bytes)
            filled_mb = running.peak_bytes / MB
            stuck = [RawClient(running.amqp) for _ in range(stuck_count)]
            for client in stuck:
                client.send(method(1, commands.Basic.Consume(queue="backlog")))
            time.sleep(2)
            after = latencies_ms(running)
            peak_mb, kills = running.peak_bytes / MB, oom_kills(group)
            for client in stuck:
                client.close()
    at = SAMPLES * 99 // 100
    gb = backlog_bytes / 1e9
    return [
        Result(f"backlog of {gb:g} GB published in a group of 512 MB", gb * 1000 / took, "MB/s"),
        Result("peak memory of the broker with the backlog", filled_mb, "MB"),
        Result(f"and with {stuck_count} consumers that never read", peak_mb, "MB", "", "<= 205 MB", peak_mb <= 205),
        Result("killed by the OOM killer", kills, "", "", "0", kills == 0),
        Result("confirm latency of another client before, p50", before[SAMPLES // 2], "ms"),
        Result("confirm latency of another client before, p99", before[at], "ms"),
        Result("confirm latency of another client after, p50", after[SAMPLES // 2], "ms"),
        Result(
            "confirm latency of another client after, p99", after[at], "ms", f"{after[at] / before[at]:.2f}x", "<= 2x",
            after[at] <= 2 * before[at],
        ),
    ]  # fmt: skip


def fill_rest(running: BrokerProcess, backlog_bytes: int) -> float:
    with RawClient(running.amqp) as client:
        client.call(commands.Queue.Purge(queue="backlog"), commands.Queue.PurgeOk)
    return fill(running, backlog_bytes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.backlog")
    parser.add_argument("--gb", type=float, default=10.0)
    parser.add_argument("--stuck", type=int, default=100)
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="headrace-backlog-"))
    try:
        for result in run(int(options.gb * 1e9), options.stuck, place / "data"):
            print(result.line())
    finally:
        shutil.rmtree(place)
