"""The management API (queues, exchanges, policies, groups, dead letters) and the schema registry. Results are
dictionaries."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from headrace.client.admin import Client
from headrace.client.exchange import path_of
from headrace.client.shapes import JSON, encode, raise_for

PAGE = 500


class Management(Client):
    """A Client that can also call everything under /api and /registry."""

    def call(
        self, method: str, *path: str, body: object = None, query: Mapping[str, str | int | None] | None = None
    ) -> Any:
        """Call the management API; returns the decoded body, or None if it is empty."""
        return self._ask(method, path_of("api", *path), body, query)

    def registry(
        self, method: str, *path: str, body: object = None, query: Mapping[str, str | int | None] | None = None
    ) -> Any:
        """Call the schema registry; returns the decoded body, or None if it is empty."""
        return self._ask(method, path_of("registry", *path), body, query)

    def _ask(self, method: str, path: str, body: object, query: Mapping[str, str | int | None] | None) -> Any:
        headers = {"Content-Type": JSON} if body is not None else {}
        response = self._connection.request(
            method,
            path,
            query=query,
            headers=headers,
            body=encode(body) if body is not None else b"",
        )
        raise_for(response)
        return msgspec.json.decode(response.body) if response.body else None

    def pages(self, *path: str, **query: str | int | None) -> Iterator[dict[str, Any]]:
        """Every item of a list, fetched page by page, so that a long list does not block the broker."""
        page = 1
        while True:
            answer = self.call("GET", *path, query={"page": page, "page_size": PAGE, **query})
            yield from answer["items"]
            if page >= answer["page_count"]:
                return
            page += 1
