"""Administration over HTTP: topics, offsets and the status of a broker."""

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from headrace.client.connection import Connection
from headrace.client.exchange import DEFAULT_URL, Response, parse_url, path_of
from headrace.client.positions import Query
from headrace.client.shapes import (
    JSON,
    Message,
    Range,
    encode,
    parse_found,
    parse_json,
    parse_keys,
    parse_offsets,
    raise_for,
)
from headrace.errors import BrokerRefused, NotFound

KEYS_PER_PAGE = 1_000


class Client:
    """Topics and status of a broker. For one thread at a time.

    Results are the JSON objects of the HTTP API (docs/http.md), as dictionaries.
    """

    def __init__(self, url: str = DEFAULT_URL, *, timeout_s: float = 30.0, retry_s: float = 2.0) -> None:
        self._connection = Connection(parse_url(url), timeout_s=timeout_s, retry_s=retry_s)

    @property
    def url(self) -> str:
        return str(self._connection.endpoint)

    def topics(self) -> list[dict[str, Any]]:
        topics = self.get("/topics")["topics"]
        assert isinstance(topics, list)
        return topics

    def topic(self, name: str) -> dict[str, Any]:
        return self.get(path_of("topics", name))

    def offsets(self, topic: str) -> list[Range]:
        return parse_offsets(self._connection.request("GET", path_of("topics", topic, "offsets")))

    def last(self, topic: str, key: str | bytes) -> Message | None:
        """The last message with a key, or None. The topic needs a key index (`key_index`)."""
        response = self._connection.request("GET", path_of("topics", topic, "keys", key))
        try:
            return parse_found(response)
        except NotFound as error:
            if isinstance(error.__cause__, BrokerRefused) and error.__cause__.code == "key_not_found":
                return None
            raise

    def scan(
        self,
        topic: str,
        *,
        prefix: str | bytes = b"",
        start: str | bytes = b"",
        stop: str | bytes | None = None,
        page: int = KEYS_PER_PAGE,
    ) -> Iterator[Message]:
        """The last message of each key in a range, in the order of the keys' bytes. The topic needs a key index."""
        fields = {"prefix": prefix, "from": start, "to": stop}
        query = {name: quote(value, safe="") for name, value in fields.items() if value}
        while True:
            text = "&".join(f"{name}={value}" for name, value in query.items())
            path = f"{path_of('topics', topic, 'keys')}?limit={page}&{text}"
            found, after = parse_keys(self._connection.request("GET", path))
            yield from found
            if after is None:
                return
            query["from"] = after

    def create_topic(
        self, name: str, *, partitions: int | None = None, config: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        body: dict[str, object] = {"name": name, "config": dict(config or {})}
        if partitions is not None:
            body["partitions"] = partitions
        return self._send("POST", "/topics", body)

    def configure_topic(
        self, name: str, config: Mapping[str, object], *, partitions: int | None = None
    ) -> dict[str, Any]:
        """Change settings; None resets one to its default. `partitions` can only grow."""
        body: dict[str, object] = {"config": dict(config)}
        if partitions is not None:
            body["partitions"] = partitions
        return self._send("PATCH", path_of("topics", name), body)

    def delete_topic(self, name: str) -> None:
        raise_for(self._connection.request("DELETE", path_of("topics", name)))

    def get(self, path: str, query: Query | None = None) -> dict[str, Any]:
        """GET a path and return its JSON object."""
        return parse_json(self._connection.request("GET", path, query=query))

    def request(self, method: str, path: str, query: Query | None = None) -> Response:
        """Make a request and return the response, even an error."""
        return self._connection.request(method, path, query=query)

    def _send(self, method: str, path: str, body: object) -> dict[str, Any]:
        headers = {"Content-Type": JSON}
        return parse_json(self._connection.request(method, path, headers=headers, body=encode(body)))

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
