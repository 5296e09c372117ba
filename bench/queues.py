"""Many durable queues: how fast they are declared, what each costs in memory, how long a restart takes, and how long
the confirms of another client take while all of them are declared or receive their first message.

    python -m bench.queues [--count 20000] [--first 5000] [--window 1000]

The broker runs in a process of its own with default settings: a declaration is answered, and a message confirmed, when
it is on stable storage. One connection pipelines the declarations, `--window` at a time, and later publishes one
message to each of the first `--first` queues without waiting. A second connection publishes one message after another
to a queue of its own; each confirm is timed.
"""

import argparse
import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable

from pamqp import base, commands, frame, header

from bench import machine
from bench.broker import Broker
from bench.result import Result

PROBE = "probe"


class Client:
    """One connection with one channel in confirm mode. Counts the answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._buffer = b""

    @classmethod
    async def open(cls, port: int) -> "Client":
        client = cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 20))
        client._writer.write(b"AMQP\x00\x00\x09\x01")
        await client._answer()
        client.send(commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US"), channel=0)
        await client._answer()
        client.send(commands.Connection.TuneOk(2047, 131072, 0), channel=0)
        client.send(commands.Connection.Open("/"), channel=0)
        await client._answer()
        client.send(commands.Channel.Open())
        await client._answer()
        client.send(commands.Confirm.Select())
        await client._answer()
        return client

    def send(self, method: base.Frame, channel: int = 1) -> None:
        self._writer.write(frame.marshal(method, channel))

    def publish(self, queue: str) -> None:
        self.send(commands.Basic.Publish(0, "", queue))
        properties = commands.Basic.Properties(delivery_mode=2)
        self._writer.write(frame.marshal(header.ContentHeader(0, 100, properties), 1))
        self._writer.write(b"\x03\x00\x01" + (100).to_bytes(4, "big") + bytes(100) + b"\xce")

    async def _answer(self) -> object:
        while True:
            if len(self._buffer) >= 7 and len(self._buffer) >= int.from_bytes(self._buffer[3:7], "big") + 8:
                size, _, answer = frame.unmarshal(self._buffer)
                self._buffer = self._buffer[size:]
                if isinstance(answer, commands.Connection.Close | commands.Channel.Close):
                    raise SystemExit(f"the broker closed the channel: {answer.reply_text}")
                return answer
            more = await self._reader.read(1 << 16)
            if not more:
                raise SystemExit("the broker closed the connection")
            self._buffer += more

    async def declare(self, names: list[str], window: int) -> None:
        for at in range(0, len(names), window):
            chosen = names[at : at + window]
            for name in chosen:
                self.send(commands.Queue.Declare(queue=name, durable=True))
            for _ in chosen:
                await self._answer()

    async def publish_to(self, names: list[str]) -> None:
        """One message to each; returns when all are confirmed."""
        for name in names:
            self.publish(name)
        await self._confirmed(len(names))

    async def _confirmed(self, count: int) -> None:
        tag = 0
        while tag < count:
            answer = await self._answer()
            if not isinstance(answer, commands.Basic.Ack):
                raise SystemExit(f"not confirmed: {answer}")
            tag = count if answer.delivery_tag == 0 else tag + 1 if not answer.multiple else answer.delivery_tag

    async def time_confirms(self, until: asyncio.Event) -> list[float]:
        """In milliseconds."""
        took = []
        while not until.is_set():
            began = time.perf_counter()
            self.publish(PROBE)
            await self._answer()
            took.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(0.002)
        return took

    def close(self) -> None:
        self._writer.close()


async def beside(work: Awaitable[None], probe: Client) -> tuple[float, list[float]]:
    """How long the work takes, and the probe's confirms meanwhile."""
    done = asyncio.Event()
    probing = asyncio.create_task(probe.time_confirms(done))
    began = time.perf_counter()
    await work
    took = time.perf_counter() - began
    done.set()
    return took, await probing


async def measure(broker: Broker, count: int, first: int, window: int) -> list[Result]:
    names = [f"queue-{number:06}" for number in range(count)]
    many, probe = await Client.open(broker.port("amqp")), await Client.open(broker.port("amqp"))
    await probe.declare([PROBE], 1)
    await many.declare([f"warm-{number}" for number in range(200)], window)
    before = broker.rss_bytes
    declared_s, beside_declares = await beside(many.declare(names, window), probe)
    await asyncio.sleep(1)
    each_kb = (broker.rss_bytes - before) / count / 1024
    chosen = names[:first]
    publish_s, beside_publishes = await beside(many.publish_to(chosen), probe)
    many.close()
    probe.close()
    worst_declare, worst_publish = max(beside_declares), max(beside_publishes)
    return [
        Result(
            f"{count:,} durable queues declared, {window:,} pipelined",
            count / declared_s,
            "/s",
            "",
            ">= 2,000 /s",
            count / declared_s >= 2000,
        ),
        Result(
            "  another client's slowest confirm meanwhile", worst_declare, "ms", "", "<= 50 ms", worst_declare <= 50
        ),
        Result("memory of an empty queue", each_kb, "KB", "", "<= 6 KB", each_kb <= 6),
        Result(f"first message to {len(chosen):,} queues at once", publish_s, "s"),
        Result(
            "  another client's slowest confirm meanwhile", worst_publish, "ms", "", "<= 50 ms", worst_publish <= 50
        ),
    ]


def run(count: int, first: int, window: int) -> list[Result]:
    folder = tempfile.mkdtemp(prefix="headrace-queues-")
    try:
        with Broker(folder, listeners=("amqp",)) as broker:
            results = asyncio.run(measure(broker, count, first, window))
        began = time.perf_counter()
        with Broker(folder, listeners=("amqp",)):
            restart_s = time.perf_counter() - began
        bar = "<= 2 s" if count >= 20_000 else ""
        held = restart_s <= 2 if bar else None
        return [*results, Result(f"restart with {count:,} queues, until ready", restart_s, "s", "", bar, held)]
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.queues")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=5_000)
    parser.add_argument("--window", type=int, default=1_000)
    options = parser.parse_args()
    print(f"machine    {machine.describe()}")
    print(f"settings   defaults; {options.count:,} queues, {options.window:,} declarations at once\n")
    for result in run(options.count, options.first, options.window):
        print(result.line())
