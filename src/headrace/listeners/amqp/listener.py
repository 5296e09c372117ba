"""The AMQP listener: accepts connections and knows them all."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from headrace.broker.broker import Broker
from headrace.config import Address, Config
from headrace.listeners.amqp.connection import Connection
from headrace.listeners.amqp.connection_info import clients
from headrace.listeners.amqp.consumer_timeouts import ConsumerTimeouts
from headrace.listeners.amqp.direct_reply import DirectReplies
from headrace.listeners.amqp.methods.handshake import Stage
from headrace.listeners.common.backpressure import Flow
from headrace.listeners.common.per_source_limit import PerSourceLimit
from headrace.listeners.common.sockets import ListeningSockets, listen
from headrace.listeners.common.tls.accept import TlsAcceptor
from headrace.listeners.common.tls.certificate import Tls
from headrace.wire.amqp.protocol import CONNECTION_FORCED

logger = logging.getLogger("headrace.amqp")

CLOSE_GRACE_S = 2.0
SHUTDOWN_TEXT = "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'"


class AmqpListener:
    def __init__(self, broker: Broker, config: Config) -> None:
        self.broker = broker
        self.config = config
        self.stats = broker.stats.listener("amqp")
        self.replies = DirectReplies()
        self.timeouts = ConsumerTimeouts()
        self.connections: set[Connection] = set()
        self._strangers: PerSourceLimit[Connection] = PerSourceLimit(lambda: self._room() + len(self._strangers))
        self.consumers_count = 0
        self.flow = Flow("amqp", broker.pressure, self.connections)
        broker.clients.add_listener("amqp", lambda: clients(self.connections))
        broker.users.on_removed(self._user_removed)
        broker.vhosts.on_removal(self._vhost_removed)
        self._sockets: ListeningSockets
        self._closing = False

    async def start(self, address: Address, tls: Tls | None) -> None:
        acceptor = None if tls is None else TlsAcceptor("AMQP", tls, self.stats, self._room)
        self._sockets = await listen(address, lambda: Connection(self), flag="--amqp", acceptor=acceptor)

    def _room(self) -> int:
        return max(0, min(self.broker.connections_left, self.config.connections_max - len(self.connections)))

    @property
    def addresses(self) -> Sequence[str]:
        return self._sockets.addresses

    def admit(self, connection: Connection) -> bool:
        """False: there are too many already."""
        self.stats.connections_total += 1
        if self._closing or not self._room():
            self.stats.count("connections_refused")
            return False
        self.connections.add(connection)
        self.stats.connections = len(self.connections)
        first = self._strangers.enter(connection.source, connection)
        if first is not None:
            self.stats.count("connections_refused")
            self.forget(first)  # at once: its place is taken
            first.abort()
        return True

    def logged_in(self, connection: Connection) -> None:
        self._strangers.leave(connection.source, connection)

    def opened(self, connection: Connection) -> None:
        logger.debug("AMQP connection from %s as %s", connection.peer, connection.user)

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._strangers.leave(connection.source, connection)
        self.flow.forget(connection)
        self.stats.connections = len(self.connections)

    def running_of(self, user: str) -> list[Connection]:
        return [found for found in self.connections if found.user == user and found.stage is Stage.RUNNING]

    def running_in(self, vhost: str) -> list[Connection]:
        return [found for found in self.connections if found.stage is Stage.RUNNING and found.vhost.name == vhost]

    def _user_removed(self, name: str) -> None:
        for connection in list(self.connections):
            if connection.user == name:
                connection.close(CONNECTION_FORCED, f"CONNECTION_FORCED - user '{name}' is deleted"[:255])

    def _vhost_removed(self, name: str) -> None:
        for connection in self.running_in(name):
            connection.close(CONNECTION_FORCED, f"CONNECTION_FORCED - vhost '{name}' is deleted"[:255])

    async def close(self) -> None:
        """Stops accepting; clients hear that the broker goes away, and may answer."""
        self._closing = True
        self._sockets.close()
        for connection in list(self.connections):
            connection.close(CONNECTION_FORCED, SHUTDOWN_TEXT)
        deadline = asyncio.get_running_loop().time() + CLOSE_GRACE_S
        while self.connections and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        self.flow.close()
        self.timeouts.close()


async def start(broker: Broker, bind: Address, config: Config, *, tls: Tls | None = None) -> Any:
    listener = AmqpListener(broker, config)
    await listener.start(bind, tls)
    return listener
