"""Idle AMQP connections: what each costs the broker in memory, and whether heartbeats are kept.

    python -m bench.connections [--count 10000] [--heartbeat 10] [--seconds 30]

The broker runs in a process of its own; the connections are opened and kept by this one, from several loopback
addresses, with client properties as pika sends them. Memory is resident memory after minus before.
"""

import argparse
import asyncio
import resource
import shutil
import tempfile
import time
from typing import cast

import uvloop
from pamqp import commands, frame
from pamqp.common import FieldTable

from bench.broker import Broker
from bench.result import Result

BAR_KB = 8.0
AT_ONCE = 200
HEARTBEAT = b"\x08\x00\x00\x00\x00\x00\x00\xce"
PROPERTIES: FieldTable = {
    "product": "Pika Python Client Library",
    "platform": "Python 3.11.7",
    "capabilities": {
        "authentication_failure_close": True,
        "basic.nack": True,
        "connection.blocked": True,
        "consumer_cancel_notify": True,
        "publisher_confirms": True,
    },
    "information": "See http://pika.rtfd.org",
    "version": "1.3.2",
}


class Idle(asyncio.Protocol):
    """Shakes hands, opens a channel, then only beats and listens."""

    def __init__(self, heartbeat_s: int) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_lost = False
        self.heard = 0
        self._heartbeat_s = heartbeat_s
        self._stage = 0
        self._answers = [
            frame.marshal(commands.Connection.StartOk(PROPERTIES, "PLAIN", "\0guest\0guest", "en_US"), 0),
            frame.marshal(commands.Connection.TuneOk(2047, 131072, heartbeat_s), 0)
            + frame.marshal(commands.Connection.Open("/"), 0),
            frame.marshal(commands.Channel.Open(), 1),
        ]
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it
        self.transport.write(b"AMQP\x00\x00\x09\x01")

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 7:
            size = int.from_bytes(self._buffer[3:7], "big") + 8
            if len(self._buffer) < size:
                return
            self._frame(self._buffer[0])
            self._buffer = self._buffer[size:]

    def _frame(self, kind: int) -> None:
        if kind == 8:
            self.heard += 1
        elif self._stage < len(self._answers):
            self.transport.write(self._answers[self._stage])
            self._stage += 1
        elif not self.opened.done():
            self._answers = []
            self.opened.set_result(None)

    def beat(self) -> None:
        if not self.is_lost:
            self.transport.write(HEARTBEAT)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        if not self.opened.done():
            self.opened.set_exception(error or ConnectionError("hung up on during the handshake"))


async def measure(broker: Broker, count: int, heartbeat_s: int, seconds: float) -> list[Result]:
    loop = asyncio.get_running_loop()
    for client in await _open(broker, 200, heartbeat_s, 0):  # what is made once is made before
        client.transport.close()
    await asyncio.sleep(1)
    before, began = broker.rss_bytes, time.perf_counter()
    clients: list[Idle] = []
    for first in range(0, count, AT_ONCE):
        clients += await _open(broker, min(AT_ONCE, count - first), heartbeat_s, first)
    took = time.perf_counter() - began
    await asyncio.sleep(1)
    each_kb = (broker.rss_bytes - before) / count / 1024
    cpu, until = broker.cpu_s, loop.time() + seconds
    while loop.time() < until:
        for at in range(0, len(clients), 500):
            for client in clients[at : at + 500]:
                client.beat()
            await asyncio.sleep(heartbeat_s / 2 / (len(clients) / 500 + 1))
    cpu = broker.cpu_s - cpu
    lost = sum(client.is_lost for client in clients)
    silent = sum(client.heard == 0 for client in clients)
    after_kb = (broker.rss_bytes - before) / count / 1024
    return [
        Result(f"{count:,} idle AMQP connections, memory each", each_kb, "KB", "", "<= 8 KB", each_kb <= BAR_KB),
        Result(f"the same after {seconds:g} s of heartbeats every {heartbeat_s / 2:g} s", after_kb, "KB"),
        Result("opened per second, handshake and a channel", count / took, "/s"),
        Result("connections lost meanwhile", lost, "", "", "0", lost == 0),
        Result("connections that heard no heartbeat of the broker", silent, "", "", "0", silent == 0),
        Result("broker CPU while they idle", 100 * cpu / seconds, "% of a core"),
    ]


async def _open(broker: Broker, count: int, heartbeat_s: int, first: int) -> list[Idle]:
    loop = asyncio.get_running_loop()
    source = (f"127.0.{1 + first // 5000}.1", 0)  # 28,000 ports each

    async def one() -> Idle:
        _, client = await loop.create_connection(
            lambda: Idle(heartbeat_s), "127.0.0.1", broker.port("amqp"), local_addr=source
        )
        await client.opened
        return client

    return await asyncio.gather(*(one() for _ in range(count)))


def run(count: int = 10_000, heartbeat_s: int = 10, seconds: float = 30.0) -> list[Result]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < count + 500:
        raise SystemExit(f"{count:,} connections need as many open files; the limit here is {hard:,}")
    folder = tempfile.mkdtemp(prefix="headrace-connections-")
    broker = Broker(folder, listeners=("amqp",))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(measure(broker, count, heartbeat_s, seconds))
    finally:
        broker.stop()
        shutil.rmtree(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.connections")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--heartbeat", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    for result in run(options.count, options.heartbeat, options.seconds):
        print(result.line())
