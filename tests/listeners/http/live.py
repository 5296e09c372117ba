"""A real server on free ports, in a thread of the test process, with helpers for requests."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx

from headrace.broker.broker import Broker
from headrace.config import Address, Config
from headrace.errors import HeadraceError
from headrace.listeners.http import listener as http_listener
from headrace.listeners.http.server.bounded_protocol import Timeouts
from headrace.log.settings import LogSettings
from headrace.server import Server, _loop_factory

T = TypeVar("T")
SECONDS_MAX = 60.0


class Live:
    """Server and client. Tests access `broker` only through `call`."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        usual: dict[str, Any] = {"amqp": None, "kafka": None, "http": Address("localhost", 0)}
        usual["log"] = LogSettings(journal_file_bytes=8 << 20)  # quick to make
        usual["retention_interval_ms"] = 3_600_000  # some tests write records that are years old and read them later
        self.config = Config(data_dir=str(folder), **{**usual, **settings})
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self.stop_error: HeadraceError | None = None  # why the server did not stop cleanly
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(SECONDS_MAX)
        if self._failure is not None:
            raise self._failure
        self.base = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.base, timeout=SECONDS_MAX)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            self.server = await Server.start(self.config)
            listener = self.server.listeners["http"]
            assert isinstance(listener, http_listener.HttpListener)
            self.listener = listener
            self.port = listener.port
        except BaseException as error:  # noqa: BLE001 - told to the test
            self._failure = error
            self._ready.set()
            return
        self._ready.set()
        await self._stop.wait()
        try:
            await self.server.close()
        except HeadraceError as error:
            self.stop_error = error

    @property
    def broker(self) -> Broker:
        return self.server.broker

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(SECONDS_MAX)

    def stop(self) -> None:
        self.client.close()
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(SECONDS_MAX)
            assert not self._thread.is_alive(), "the server does not stop"

    # Requests

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.client.request(method, path, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def create(self, name: str, partitions: int = 1, **config: Any) -> None:
        body = {"name": name, "partitions": partitions, "config": config}
        answer = self.client.post("/topics", json=body)
        assert answer.status_code == 201, answer.text

    def publish(self, topic: str, *messages: Any) -> list[tuple[int, int]]:
        answer = self.client.post(f"/topics/{topic}/messages", json=list(messages))
        assert answer.status_code == 200, answer.text
        return [(place["partition"], place["offset"]) for place in answer.json()["messages"]]

    def read(self, topic: str, **query: Any) -> list[dict[str, Any]]:
        answer = self.client.get(f"/topics/{topic}/messages", params=query)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["messages"])

    def values(self, topic: str, **query: Any) -> list[Any]:
        return [message["value"] for message in self.read(topic, **query)]

    @contextlib.contextmanager
    def events(self, path: str, **options: Any) -> Iterator[Iterator[tuple[str, str, dict[str, Any]]]]:
        """(name, id, data) of server-sent events, as they come."""
        with self.client.stream("GET", path, **options) as answer:
            assert answer.status_code == 200, answer.read()
            yield parse_events(answer.iter_lines())

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS_MAX)

    def raw(self, data: bytes) -> bytes:
        """Everything the server sends in response to these bytes until it closes the connection."""
        with self.connect() as sock:
            sock.sendall(data)
            return read_all(sock)


class StartLive(Protocol):
    """The `own` fixture: starts a server, by default on the test's own data folder."""

    def __call__(self, folder: Path = ..., **settings: Any) -> Live: ...


def parse_events(lines: Iterator[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    fields: dict[str, str] = {}
    for line in lines:
        if not line:
            if "data" in fields:
                yield fields.get("event", "message"), fields.get("id", ""), json.loads(fields["data"])
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value


def read_all(sock: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def code_of(answer: httpx.Response) -> str:
    """The code of a problem response, after checking its form."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    problem = answer.json()
    assert problem["status"] == answer.status_code
    assert problem["detail"] and problem["title"] and problem["type"]
    assert "Traceback" not in answer.text
    return str(problem["code"])


def patient(seconds: float) -> Timeouts:
    return Timeouts(head=seconds, body=seconds, write=seconds, linger=seconds)


def status_of(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:200]
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"problem+json" in head:
        assert json.loads(body)["status"] == int(head[9:12])
    return int(answer[9:12])
