"""The connections of an AMQP listener: how many it accepts, and which of them belong to a user or a vhost."""

from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from headrace.broker.broker import Broker
from headrace.broker.metrics.counters import ListenerStats
from headrace.config import Config
from headrace.listeners.common.backpressure import Flow, FlowClient
from headrace.listeners.common.per_source_limit import PerSourceLimit


class Registered(FlowClient, Protocol):
    """A connection as the registry sees it."""

    user: str

    @property
    def source(self) -> str:
        """The client's address or network, see addresses.source_of."""

    @property
    def vhost_name(self) -> str | None:
        """The vhost it is open in; None before connection.open and after connection.close."""

    @property
    def channels(self) -> Mapping[int, object]: ...

    def abort(self) -> None: ...


C = TypeVar("C", bound=Registered)


class ConnectionRegistry(Generic[C]):
    def __init__(self, broker: Broker, config: Config, stats: ListenerStats) -> None:
        self.connections: set[C] = set()
        self.flow = Flow("amqp", broker.pressure, self.connections)
        self.config = config
        self.is_closing = False
        self._broker = broker
        self._stats = stats
        self._unauthenticated: PerSourceLimit[C] = PerSourceLimit(
            lambda: self.connections_left() + len(self._unauthenticated)
        )

    def connections_left(self) -> int:
        """How many more connections the listener accepts."""
        return max(0, min(self._broker.connections_left, self.config.connections_max - len(self.connections)))

    def admit(self, connection: C) -> bool:
        """Registers a connection, or returns False if there are too many."""
        self._stats.connections_total += 1
        if self.is_closing or not self.connections_left():
            self._stats.count("connections_refused")
            return False
        self.connections.add(connection)
        self._stats.connections = len(self.connections)
        oldest = self._unauthenticated.enter(connection.source, connection)
        if oldest is not None:
            self._stats.count("connections_refused")
            self.forget(oldest)  # now and not when its socket is closed: its place is taken
            oldest.abort()
        return True

    def logged_in(self, connection: C) -> None:
        self._unauthenticated.leave(connection.source, connection)

    def forget(self, connection: C) -> None:
        self.connections.discard(connection)
        self._unauthenticated.leave(connection.source, connection)
        self.flow.forget(connection)
        self._stats.connections = len(self.connections)

    def of_user(self, user: str) -> list[C]:
        """The open connections of a user."""
        return [found for found in self.connections if found.user == user and found.vhost_name is not None]

    def of_vhost(self, vhost: str) -> list[C]:
        return [found for found in self.connections if found.vhost_name == vhost]
