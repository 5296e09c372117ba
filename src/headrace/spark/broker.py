"""BrokerLink: the HTTP requests that the Spark source, sink and pipelines send to a broker."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.client.connection import Connection
from headrace.client.exchange import Response, parse_url, path_of
from headrace.client.shapes import encode, parse_json, raise_for
from headrace.errors import AlreadyExists, BrokerUnreachable, HeadraceError, NotFound, Unconfirmed
from headrace.spark.options import BadOption

JSON = {"content-type": "application/json"}
TIMEOUT_S = 120.0
RETRY_S = 60.0
READ_BYTES = 8 << 20
COMMIT_BYTES_PER_S = 8 << 20  # lower bound for a slow disk; a large commit may take longer than TIMEOUT_S


class BrokerLink:
    """A keep-alive connection for one thread at a time. Connects on first use, so that it can be pickled before."""

    def __init__(self, url: str, *, retry_s: float = RETRY_S) -> None:
        self.url = url
        self._retry_s = retry_s
        self._connection: Connection | None = None
        self._read_bytes: int | None = READ_BYTES
        try:
            parse_url(url)
        except HeadraceError as error:
            raise BadOption("bootstrap", str(error)) from None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None}

    def _request(self, method: str, path: str, **more: Any) -> Response:
        if self._connection is None:
            self._connection = Connection(parse_url(self.url), timeout_s=TIMEOUT_S, retry_s=self._retry_s)
        return self._connection.request(method, path, **more)

    def get(self, *path: str, **query: str | int | None) -> dict[str, Any]:
        return parse_json(self._request("GET", path_of(*path), query=query))

    def send(self, method: str, *path: str, body: object) -> dict[str, Any]:
        return parse_json(self._request(method, path_of(*path), headers=JSON, body=encode(body)))

    def post_idempotent(self, *path: str, body: object) -> dict[str, Any]:
        """POSTs a request that may be repeated: sent once more if the connection is lost before the response."""
        try:
            return self.send("POST", *path, body=body)
        except Unconfirmed:
            return self.send("POST", *path, body=body)

    def delete(self, *path: str) -> None:
        raise_for(self._request("DELETE", path_of(*path)))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # Topics.

    def topics(self) -> list[str]:
        return [topic["name"] for topic in self.get("topics")["topics"]]

    def logs(self, topic: str) -> list[dict[str, Any]] | None:
        """The logs of a topic, one per partition; None if the topic does not exist."""
        try:
            found: list[dict[str, Any]] = self.get("topics", topic, "log")["partitions"]
        except NotFound:
            return None
        return found

    def partitions(self, topic: str, *, create: bool) -> int:
        """Number of partitions of a topic. With `create`, a missing topic is created with the broker's defaults."""
        try:
            return int(self.get("topics", topic)["partitions"])
        except NotFound:
            if not create:
                raise
        try:
            return int(self.post_idempotent("topics", body={"name": topic})["partitions"])
        except AlreadyExists:  # created by another task, or by our request whose response was lost
            return int(self.get("topics", topic)["partitions"])

    # Reading.

    def batches(
        self,
        topic: str,
        partition: int,
        offset: int,
        size: int | None = None,
        *,
        log: int | None = None,
        segment: tuple[int, int] | None = None,
    ) -> tuple[bytes, int]:
        """Whole batches, starting with the one that contains the offset, and the offset to continue at.

        `log` and `segment` (base offset, generation) restrict the read to them; raises NotFound if they are gone.
        """
        path = path_of("topics", topic, "partitions", str(partition), "batches")
        wanted = size or self._read_bytes
        base, generation = segment or (None, None)
        query = {"offset": offset, "max_bytes": wanted, "log": log, "segment": base, "generation": generation}
        response = self._request("GET", path, query=query)
        if response.status == 400 and size is None and self._read_bytes is not None:
            self._read_bytes = None  # above the broker's read_bytes_max: let the broker choose
            return self.batches(topic, partition, offset, log=log, segment=segment)
        raise_for(response)
        return response.body, int(response.headers["headrace-next-offset"])

    def first_at(self, topic: str, partition: int, timestamp_ms: int) -> int | None:
        query: Mapping[str, str | int | None] = {
            "partition": partition, "timestamp": timestamp_ms, "limit": 1, "encoding": "base64"
        }  # fmt: skip
        found = parse_json(self._request("GET", path_of("topics", topic, "messages"), query=query))["messages"]
        return int(found[0]["offset"]) if found else None

    def lease(self, slices: Iterable[tuple[int, int, int]], for_ms: int, holder: str) -> list[dict[str, int]]:
        """Replaces the leases of the holder; no slices releases them. Returns the slices that no longer exist."""
        wanted = [{"log": log, "segment": base, "generation": generation} for log, base, generation in slices]
        answer = self.post_idempotent("leases", body={"slices": wanted, "for_ms": for_ms, "holder": holder})
        gone: list[dict[str, int]] = answer["gone"]
        return gone

    def lease_ranges(
        self, ranges: Iterable[tuple[tuple[str, int], int, int]], for_ms: int, holder: str
    ) -> list[list[dict[str, int]]]:
        """Replaces the leases of the holder by the segments that contain the ranges, and returns them per range."""
        wanted = [
            {"topic": topic, "partition": number, "start": start, "end": end} for (topic, number), start, end in ranges
        ]
        answer = self.post_idempotent("leases", body={"ranges": wanted, "for_ms": for_ms, "holder": holder})
        return [entry["segments"] for entry in answer["ranges"]]

    def put_cursor(self, name: str, topic: str, offsets: Mapping[int, int], *, pin: bool, max_age_ms: int) -> None:
        partitions = [{"partition": number, "offset": offset} for number, offset in sorted(offsets.items())]
        body: dict[str, object] = {"topic": topic, "partitions": partitions, "pin": pin, "max_age_ms": max_age_ms}
        self.send("PUT", "cursors", name, body=body)

    # Writing.

    def stage(self, name: str, batches: bytes | bytearray) -> None:
        raise_for(self._request("PUT", path_of("staging", name), body=bytes(batches)))

    def discard(self, name: str) -> None:
        self.delete("staging", name)

    def commit(self, writer: str, batch: int, parts: Sequence[Mapping[str, object]]) -> dict[str, Any]:
        """Commits a batch of uploads. Idempotent, and repeated if the response is lost."""
        path, size = path_of("sinks", writer, "batches", str(batch)), sum(int(str(part["length"])) for part in parts)
        body, wait_s = encode({"parts": list(parts)}), size / COMMIT_BYTES_PER_S
        try:
            return parse_json(self._request("PUT", path, headers=JSON, body=body, wait_s=wait_s))
        except BrokerUnreachable:
            if wait_s < self._retry_s:
                raise
        # The broker stopped when the connection's own retries were used up. If it had decided, its next start finishes.
        return parse_json(self._request("PUT", path, headers=JSON, body=body, wait_s=wait_s))

    # Pipelines.

    def report(self, pipeline: str, state: str, details: Mapping[str, object]) -> dict[str, Any]:
        return self.send("PUT", "pipelines", pipeline, body={"state": state, "details": dict(details)})
