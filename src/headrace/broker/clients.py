"""The connected clients of all listeners, for operators. Each listener registers a function that lists its own."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from headrace.errors import NotFound


class Client(Protocol):
    """One connection, as operators see it. Described on request only, so an unwatched connection costs nothing."""

    def describe(self) -> dict[str, Any]:
        """At least name, protocol, user, vhost, peer_host, peer_port, connected_at, state, channels."""

    def describe_channels(self) -> list[dict[str, Any]]: ...

    def describe_consumers(self) -> list[dict[str, Any]]: ...

    def close_for(self, reason: str) -> None:
        """Close the connection on an operator's request."""


class Clients:
    def __init__(self) -> None:
        self._listeners: dict[str, Callable[[], Iterable[Client]]] = {}

    def add_listener(self, name: str, clients: Callable[[], Iterable[Client]]) -> None:
        self._listeners[name] = clients

    def all(self) -> list[Client]:
        return [client for clients in list(self._listeners.values()) for client in list(clients())]

    def get(self, name: str) -> Client:
        for client in self.all():
            if client.describe()["name"] == name:
                return client
        raise NotFound(f"no connection {name!r}")
