"""A million scheduled messages: what they cost in memory, and how late they fire after a restart.

    python -m bench.delays [--count 1000000] [--over 20]

They are published to an exchange of type x-delayed-message, all due in a stretch of --over seconds that begins once
the last is published and the broker was stopped and started again. How late a message is, is seen by the consumer:
each carries the time at which it is due.
"""

import argparse
import socket
import struct
import tempfile
import time

import pika
from pamqp import commands

from bench.amqp_peers import Load, Peer, headrace
from bench.machine import describe
from bench.result import Result
from headrace.record.amqp.properties import encode_properties
from headrace.wire.amqp.methods import content_frames, frame
from headrace.wire.amqp.protocol import PROTOCOL_HEADER

BLOCK = 1000
SIZE = 100
FRAME_MAX = 131_072
MEMORY_BAR_MB = 100
RESTART_S = 15.0  # left for the stop and the start, before the first is due


class Publisher:
    """Frames made by the block and confirmed by the block: a client library would be the limit."""

    def __init__(self, peer: Peer) -> None:
        self._socket = socket.create_connection(("127.0.0.1", peer.port))
        self._input = self._socket.makefile("rb")
        self._socket.sendall(PROTOCOL_HEADER)
        self._say(0, commands.Connection.StartOk, mechanism="PLAIN", response=b"\0guest\0guest", locale="en_US")
        self._say(0, commands.Connection.TuneOk, channel_max=2047, frame_max=FRAME_MAX, heartbeat=0)
        self._socket.sendall(frame(0, commands.Connection.Open, virtual_host="/"))
        self._wait()
        self._say(1, commands.Channel.Open)
        self._say(1, commands.Confirm.Select)

    def _say(self, channel: int, method: type, **values: object) -> None:
        if channel == 0:
            self._wait()
        self._socket.sendall(frame(channel, method, **values))
        if channel:
            self._wait()

    def _wait(self) -> bytes:
        head = self._input.read(7)
        payload = self._input.read(int.from_bytes(head[3:7], "big") + 1)
        return payload[:-1]

    def publish(self, dues: list[float], tag: int) -> None:
        """Due in seconds of the monotonic clock; returns when all are confirmed. `tag` is that of the last."""
        now = time.monotonic()
        messages = []
        for due in dues:
            delay_ms = max(0, round((due - now) * 1000))
            properties = encode_properties({"headers": {"x-delay": delay_ms}, "delivery_mode": 2})
            body = struct.pack("=d", now + delay_ms / 1000).ljust(SIZE, b"x")
            messages.append(
                content_frames(
                    1, commands.Basic.Publish, properties, body, FRAME_MAX, exchange="later", routing_key="bench"
                )
            )
        self._socket.sendall(b"".join(messages))
        while True:
            payload = self._wait()
            if payload[:4] == b"\x00\x3c\x00\x50" and int.from_bytes(payload[4:12], "big") >= tag:
                return

    def close(self) -> None:
        self._socket.close()


def run(folder: str, count: int, over_s: float) -> list[Result]:
    load = Load(folder)
    with headrace(folder) as peer:
        connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", peer.port))
        channel = connection.channel()
        channel.queue_declare("bench", durable=True)
        channel.exchange_declare("later", "x-delayed-message", durable=True, arguments={"x-delayed-type": "direct"})
        channel.queue_bind("bench", "later", "bench")
        connection.close()
        publisher = Publisher(peer)
        warm = [time.monotonic() + 1.0] * BLOCK
        began = time.monotonic()
        publisher.publish(warm, BLOCK)
        # As long as the first block says it will take, and half as long again.
        first = began + (time.monotonic() - began) * count / BLOCK * 2 + RESTART_S + 10
        before, cpu = peer.rss_mb(), peer.cpu_s()
        for at in range(0, count, BLOCK):
            publisher.publish([first + (at + n) * over_s / count for n in range(BLOCK)], BLOCK + at + BLOCK)
        took = time.monotonic() - began
        grown, cpu = peer.rss_mb() - before, peer.cpu_s() - cpu
        publisher.close()
        with peer.channel() as channel:
            channel.queue_purge("bench")  # the block that warmed up: due before the restart
    late = max(0.0, time.monotonic() - first)
    began = time.monotonic()
    with headrace(folder) as peer:
        opened = time.monotonic() - began
        again = peer.rss_mb()
        consumer = load.start(peer, "consume", count=count, size=SIZE, connections=4, window=2000)
        seen = load.wait(consumer)
    if late:
        raise SystemExit(f"publishing took {took:.0f} s: the first was due {late:.0f} s before the restart")
    return [
        Result(f"{count:,} scheduled messages of {SIZE} B", grown, "MB more", f"{again:.0f} MB after a restart",
               f"<= {MEMORY_BAR_MB}", grown <= MEMORY_BAR_MB),
        Result("  scheduling them", cpu * 1e6 / count, "CPU-s/M", f"{count / took:,.0f} confirmed a second"),
        Result("  start with them", opened, "s", "process start included"),
        Result("  too early, the worst", max(0.0, -seen.least_ms), "ms", "", "<= 1", seen.least_ms >= -1),
        Result("  too late, p50", seen.p50_ms, "ms", f"p99 {seen.p99_ms:.1f} ms, {count / over_s:,.0f} due a second"),
        Result("  received", seen.count, "messages", f"of {count:,}", "all", seen.count == count),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.delays", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--over", type=float, default=20.0, help="seconds in which all of them are due")
    options = parser.parse_args()
    print(f"machine    {describe()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="headrace-delays-") as folder:
        for result in run(folder, options.count // BLOCK * BLOCK, options.over):
            print(result.line())


if __name__ == "__main__":
    main()
