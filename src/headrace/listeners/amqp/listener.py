"""The AMQP listener: accepts connections and closes them all when it stops."""

import asyncio
from collections.abc import Sequence

from headrace.broker.broker import Broker
from headrace.config import Address, Config
from headrace.listeners.amqp.connection import Connection
from headrace.listeners.amqp.connection_info import clients
from headrace.listeners.amqp.context import ListenerContext
from headrace.listeners.amqp.registry import ConnectionRegistry
from headrace.listeners.common.sockets import ListeningSockets, listen
from headrace.listeners.common.tls.accept import TlsAcceptor
from headrace.listeners.common.tls.certificate import Tls
from headrace.wire.amqp.protocol import CONNECTION_FORCED

CLOSE_GRACE_S = 2.0
SHUTDOWN_TEXT = "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'"


class AmqpListener:
    def __init__(self, broker: Broker, config: Config) -> None:
        self.stats = broker.stats.listener("amqp")
        self.context = ListenerContext(broker, config, self.stats)
        self.registry: ConnectionRegistry[Connection] = ConnectionRegistry(broker, config, self.stats)
        self.connections = self.registry.connections
        broker.clients.add_listener("amqp", lambda: clients(self.connections))
        broker.users.on_removed(self._user_removed)
        broker.vhosts.on_removal(self._vhost_removed)
        self._sockets: ListeningSockets

    async def start(self, address: Address, tls: Tls | None) -> None:
        acceptor = None if tls is None else TlsAcceptor("AMQP", tls, self.stats, self.registry.connections_left)
        self._sockets = await listen(
            address, lambda: Connection(self.context, self.registry), flag="--amqp", acceptor=acceptor
        )

    @property
    def addresses(self) -> Sequence[str]:
        return self._sockets.addresses

    def _user_removed(self, name: str) -> None:
        for connection in list(self.connections):
            if connection.user == name:
                connection.close(CONNECTION_FORCED, f"CONNECTION_FORCED - user '{name}' is deleted"[:255])

    def _vhost_removed(self, name: str) -> None:
        for connection in self.registry.of_vhost(name):
            connection.close(CONNECTION_FORCED, f"CONNECTION_FORCED - vhost '{name}' is deleted"[:255])

    async def close(self) -> None:
        """Stops accepting connections, sends connection.close to all clients and waits CLOSE_GRACE_S for them."""
        self.registry.is_closing = True
        self._sockets.close()
        for connection in list(self.connections):
            connection.close(CONNECTION_FORCED, SHUTDOWN_TEXT)
        deadline = asyncio.get_running_loop().time() + CLOSE_GRACE_S
        while self.connections and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        self.registry.flow.close()
        self.context.timeouts.close()


async def start(broker: Broker, bind: Address, config: Config, *, tls: Tls | None = None) -> AmqpListener:
    listener = AmqpListener(broker, config)
    await listener.start(bind, tls)
    return listener
