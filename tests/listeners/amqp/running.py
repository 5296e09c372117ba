"""A broker with an AMQP listener in a thread of this process, for blocking clients."""

import asyncio
import gc
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pika
import uvloop
from pika.adapters.blocking_connection import BlockingChannel

from headrace.broker.queues.queue import Queue
from headrace.config import Address, Config
from headrace.log.settings import LogSettings
from headrace.server import Server

T = TypeVar("T")
PATIENCE_S = 60.0


class Running:
    """A broker in a thread, with an AMQP listener on a free port unless settings say otherwise."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self._settings = settings
        self._connections: list[pika.BlockingConnection] = []
        self.start()

    def start(self, port: int = 0) -> None:
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(port,), name="broker")
        self._thread.start()
        assert self._started.wait(PATIENCE_S), "the broker does not start"
        if self._failure is not None:
            raise self._failure

    def _run(self, port: int) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                runner.run(self._serve(port))
            except BaseException as error:
                self._failure = error
                self._started.set()
                raise

    async def _serve(self, port: int) -> None:
        # A small journal is created faster.
        usual = {"http": None, "kafka": None, "log": LogSettings(journal_file_bytes=8 << 20)}
        options = {**usual, "amqp": Address("localhost", port), **self._settings}
        config = Config(data_dir=str(self.folder), **options)
        self.server = await Server.start(config)
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.port = int(self.server.listeners["amqp"].addresses[0].rpartition(":")[2])
        self._started.set()
        await self._stop.wait()
        await self.server.close()

    @property
    def listener(self) -> Any:
        return self.server.listeners["amqp"]

    def stop(self) -> None:
        for connection in self._connections:
            if connection.is_open:
                connection.close()
        self._connections.clear()
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(PATIENCE_S)
            assert not self._thread.is_alive()

    def restart(self) -> None:
        self.stop()
        self.start()

    def call(self, work: Callable[[], T]) -> T:
        """Run work in the broker's event loop and return its result."""

        async def wrapped() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(wrapped(), self.loop).result(PATIENCE_S)

    def queue(self, name: str) -> Queue:
        return self.server.broker.vhosts.get("/").queues[name]

    def link_of(self, client: socket.socket) -> Any:
        """The broker's connection of a client's socket. Connections of earlier tests may still be registered."""
        name = client.getsockname()
        return self.call(lambda: next(found for found in self.listener.connections if found.transport.peer == name))

    def connect(self, **options: Any) -> pika.BlockingConnection:
        connection = patient_connection(self.port, **options)
        self._connections.append(connection)
        return connection

    def channel(self, **options: Any) -> BlockingChannel:
        return self.connect(**options).channel()


def patient_connection(port: int, **options: Any) -> pika.BlockingConnection:
    """Connect with longer timeouts than pika's ten seconds, for busy machines."""
    # No heartbeats: pika answers them only on the connection that a test is using at the moment.
    usual = {"host": "127.0.0.1", "heartbeat": 0, "socket_timeout": PATIENCE_S, "stack_timeout": PATIENCE_S}
    return pika.BlockingConnection(pika.ConnectionParameters(port=port, **{**usual, **options}))


class Traced:
    """Measures the memory that Python allocates inside the block. Unlike resident memory, it is the same everywhere."""

    kept_bytes = peak_bytes = 0

    def __enter__(self) -> "Traced":
        tracemalloc.start()
        return self

    def __exit__(self, *_: object) -> None:
        gc.collect()
        self.kept_bytes, self.peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()


def eventually(condition: Callable[[], Any], what: str = "") -> Any:
    """Wait until a condition is true and return its value. Fails after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.01)
    return found


def take(channel: BlockingChannel, queue: str, **options: Any) -> tuple[Any, Any, bytes]:
    """Get one message with basic.get, waiting until there is one: dead-lettering and timers take a moment."""
    found: list[Any] = []

    def look() -> bool:
        method, properties, body = channel.basic_get(queue, **options)
        found[:] = [method, properties, body]
        return method is not None

    eventually(look, f"a message in {queue}")
    return found[0], found[1], found[2]


def bodies(channel: BlockingChannel, queue: str) -> list[bytes]:
    """Get and acknowledge all ready messages."""
    out: list[bytes] = []
    while True:
        method, _, body = channel.basic_get(queue, auto_ack=True)
        if method is None:
            return out
        out.append(body or b"")


def depth(channel: BlockingChannel, queue: str) -> int:
    return int(channel.queue_declare(queue, passive=True).method.message_count)
