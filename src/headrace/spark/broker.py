"""What Spark says to a broker over HTTP. Connects when first used, so that it can be pickled before."""

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
COMMIT_BYTES_PER_S = 8 << 20  # what a slow disk stores, at the least: a large commit takes longer than TIMEOUT_S


class BrokerLink:
    """One keep-alive connection, used by one thread at a time."""

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

    def post_again(self, *path: str, body: object) -> dict[str, Any]:
        """Of what does no harm twice: asked once more when the broker went before it answered, and came back."""
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
        """None when there is no such topic."""
        try:
            found: list[dict[str, Any]] = self.get("topics", topic, "log")["partitions"]
        except NotFound:
            return None
        return found

    def partitions(self, topic: str, *, create: bool) -> int:
        """How many the topic has; made with the broker's defaults if it may be and is not there."""
        try:
            return int(self.get("topics", topic)["partitions"])
        except NotFound:
            if not create:
                raise
        try:
            return int(self.post_again("topics", body={"name": topic})["partitions"])
        except AlreadyExists:  # another task was faster, or the first answer got lost
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
        of: tuple[int, int] | None = None,
    ) -> tuple[bytes, int]:
        """Whole batches from the one that holds offset, and where to go on.

        Of a log, or of a segment and its generation, if they are given: SegmentGone when that is not there any more."""
        path = path_of("topics", topic, "partitions", str(partition), "batches")
        wanted = size or self._read_bytes
        segment, generation = of or (None, None)
        query = {"offset": offset, "max_bytes": wanted, "log": log, "segment": segment, "generation": generation}
        response = self._request("GET", path, query=query)
        if response.status == 400 and size is None and self._read_bytes is not None:
            self._read_bytes = None  # this broker answers with less: it knows how much
            return self.batches(topic, partition, offset, log=log, of=of)
        raise_for(response)
        return response.body, int(response.headers["headrace-next-offset"])

    def first_at(self, topic: str, partition: int, timestamp_ms: int) -> int | None:
        query: Mapping[str, str | int | None] = {
            "partition": partition, "timestamp": timestamp_ms, "limit": 1, "encoding": "base64"
        }  # fmt: skip
        found = parse_json(self._request("GET", path_of("topics", topic, "messages"), query=query))["messages"]
        return int(found[0]["offset"]) if found else None

    def lease(self, slices: Iterable[tuple[int, int, int]], for_ms: int, holder: str) -> list[dict[str, int]]:
        """In place of what the holder had before; none gives it back. Those that are gone are answered."""
        wanted = [{"log": log, "segment": base, "generation": generation} for log, base, generation in slices]
        answer = self.post_again("leases", body={"slices": wanted, "for_ms": for_ms, "holder": holder})
        gone: list[dict[str, int]] = answer["gone"]
        return gone

    def lease_ranges(
        self, ranges: Iterable[tuple[tuple[str, int], int, int]], for_ms: int, holder: str
    ) -> list[list[dict[str, int]]]:
        """The segments that the offsets of each range lie in, which the holder has from now on."""
        wanted = [
            {"topic": topic, "partition": number, "start": start, "end": end} for (topic, number), start, end in ranges
        ]
        answer = self.post_again("leases", body={"ranges": wanted, "for_ms": for_ms, "holder": holder})
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
        """Safe to repeat, and repeated by itself when the answer got lost."""
        path, size = path_of("sinks", writer, "batches", str(batch)), sum(int(str(part["length"])) for part in parts)
        body, wait_s = encode({"parts": list(parts)}), size / COMMIT_BYTES_PER_S
        try:
            return parse_json(self._request("PUT", path, headers=JSON, body=body, wait_s=wait_s))
        except BrokerUnreachable:
            if wait_s < self._retry_s:
                raise
        # It went after the time in which a request is repeated by itself: its next start finishes what is decided.
        return parse_json(self._request("PUT", path, headers=JSON, body=body, wait_s=wait_s))

    # Pipelines.

    def report(self, pipeline: str, state: str, details: Mapping[str, object]) -> dict[str, Any]:
        return self.send("PUT", "pipelines", pipeline, body={"state": state, "details": dict(details)})
