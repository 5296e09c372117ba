"""A broker in its own process, and the requests that tests send to it."""

import http.client
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from headrace.pipelines.run import START_ATTEMPTS, START_TIMEOUTS
from tests.broker_process import BrokerProcess
from tests.java import QUICK_JAVA
from tests.killable import STOP_SECONDS_MAX

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
    from pyspark.sql.streaming import StreamingQuery

WAIT_S_MAX = 120
LOOK_EVERY_S = 0.02
JAVA_OPTIONS = " ".join(QUICK_JAVA)
# The default port of Spark Connect is 15002, which another test run or server may use.
ANY_PORT = {"SPARK_TESTING": "1"}
QUICK = f"spark.driver.extraJavaOptions={JAVA_OPTIONS}"


class RunningBroker(BrokerProcess):
    def __init__(self, folder: Path, *options: str, listeners: tuple[str, ...] = ("http",)) -> None:
        # The default, because it determines how much a sink can commit at once.
        super().__init__(folder, "--journal-file-size", "64MB", *options, listeners=listeners)

    @property
    def port(self) -> int:
        return self.ports["http"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def path(self) -> str:
        return str(self.data)

    def stop(self, patience_s: float = STOP_SECONDS_MAX) -> int:
        code = super().stop(patience_s)
        assert code == 0, self.said()
        return code

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    # Requests.

    def call(self, method: str, path: str, body: object = None, *, media: str = "application/json") -> tuple[int, Any]:
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
    """Distinguishable messages: the value is the number, the key is one of a few."""
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


def batches_of(reader: "DataSourceReader | DataSourceStreamReader", pieces: "Iterable[InputPartition]") -> list[Any]:
    """The Arrow record batches of some partitions. In general a reader may also return tuples."""
    return [batch for piece in pieces for batch in reader.read(piece)]


def wait_until(true: Any, sentence: str, seconds: float = WAIT_S_MAX, *, every: float = LOOK_EVERY_S) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(sentence)
        time.sleep(every)


def started(start: "Callable[[], StreamingQuery]") -> "StreamingQuery":
    """Starts a query, again if the Python process that plans its source does not connect within Spark's ten seconds.
    Nothing has been read by then."""
    for _ in range(START_ATTEMPTS):
        query = start()
        while query.isActive and query.status["message"].startswith("Initializing"):
            time.sleep(LOOK_EVERY_S)
        error = query.exception()
        if error is None or not any(words in str(error) for words in START_TIMEOUTS):
            break
    return query


def run_patiently(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Runs a program with its own session, again after a timeout as in `started`; it continues from its checkpoint."""
    for _ in range(START_ATTEMPTS):
        answer = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, **options)
        if answer.returncode == 0 or not any(words in answer.stdout + answer.stderr for words in START_TIMEOUTS):
            break
    return answer
