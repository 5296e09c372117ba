"""A real broker in a process of its own, and what tests say to it."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.ports import free_port

WAIT_S_MAX = 60.0


class RunningBroker:
    def __init__(self, folder: Path, *options: str) -> None:
        self.data = folder / "data"
        self._said = folder / "broker.txt"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._was_up = False
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def path(self) -> str:
        return str(self.data)

    def start(self) -> "RunningBroker":
        for _ in range(5):
            self._launch()
            try:
                wait_until(self._is_healthy, "the broker did not start")
                self._was_up = True
                return self
            except AssertionError:
                # Somebody took the port between the asking and the listening; a restart must keep its own.
                if "is in use by another program" not in self.said() or self._was_up:
                    raise
                self.port = free_port()
        raise AssertionError(self.said())

    def _launch(self) -> None:
        command = [
            sys.executable, "-c", "from headrace.cli import main; main()", "serve", "--data-dir", str(self.data),
            "--http", f"127.0.0.1:{self.port}", "--amqp", "off", "--kafka", "off", *self._options,
        ]  # fmt: skip
        with self._said.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    def _is_healthy(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.said()
        try:
            return self.call("GET", "/health")[0] == 200
        except OSError:
            return False

    def said(self) -> str:
        return self._said.read_text(errors="replace")[-4000:]

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        assert self._process.wait(30) == 0, self.said()
        self._process = None

    def kill(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._process = None

    def close(self) -> None:
        if self._process is not None:
            self.kill()

    def cpu_seconds(self) -> float:
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    # What tests say to it.

    def call(
        self, method: str, path: str, body: object = None, *, media: str = "application/json"
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": media} if data is not None else {})
            answer = connection.getresponse()
            raw = answer.read()
            return answer.status, json.loads(raw) if raw[:1] in (b"{", b"[") else raw
        finally:
            connection.close()

    def ok(self, method: str, path: str, body: object = None) -> Any:
        status, answer = self.call(method, path, body)
        assert status < 300, (status, answer)
        return answer

    def create(self, topic: str, partitions: int = 1, **config: str) -> None:
        self.ok("POST", "/topics", {"name": topic, "partitions": partitions, "config": config})

    def publish(self, topic: str, messages: Iterable[dict[str, Any]]) -> None:
        for lines in _chunked(messages, 20_000):
            status, answer = self.call(
                "POST", f"/topics/{quote(topic, safe='')}/messages", lines, media="application/x-ndjson"
            )
            assert status == 200, answer

    def ends(self, topic: str) -> dict[int, tuple[int, int]]:
        answer = self.ok("GET", f"/topics/{topic}/offsets")
        return {p["partition"]: (p["start"], p["end"]) for p in answer["partitions"]}

    def count(self, topic: str) -> int:
        return sum(end - start for start, end in self.ends(topic).values())

    def messages(self, topic: str, partition: int = 0) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        offset, end = self.ends(topic)[partition]
        while offset < end:
            path = f"/topics/{topic}/messages?partition={partition}&offset={offset}&limit=10000"
            answer = self.ok("GET", path)
            found += answer["messages"]
            offset = answer["next_offset"]
        return found


def numbered(count: int, first: int = 0, keys: int = 10, size: int = 0) -> Iterator[dict[str, Any]]:
    """Messages that can be told apart: the value is the number, the key is one of a few."""
    for number in range(first, first + count):
        yield {"key": f"k{number % keys}", "value": str(number) + "x" * size}


def _chunked(messages: Iterable[dict[str, Any]], most: int) -> Iterator[bytes]:
    lines: list[str] = []
    for message in messages:
        lines.append(json.dumps(message))
        if len(lines) == most:
            yield "\n".join(lines).encode()
            lines = []
    if lines:
        yield "\n".join(lines).encode()


def wait_until(true: Any, sentence: str, seconds: float = WAIT_S_MAX) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(sentence)
        time.sleep(0.02)
