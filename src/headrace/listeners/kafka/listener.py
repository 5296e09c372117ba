"""The Kafka listener: listening sockets, its connections, and the start and end of both."""

import asyncio
import secrets
import uuid
from collections.abc import Callable, Sequence

from headrace.broker.broker import Broker
from headrace.config import Address, Config
from headrace.errors import HeadraceError
from headrace.listeners.common.sockets import ListeningSockets, listen
from headrace.listeners.common.tls.accept import TlsAcceptor
from headrace.listeners.common.tls.certificate import Tls
from headrace.listeners.kafka.auth import access, login
from headrace.listeners.kafka.connection import Connection, Connections
from headrace.listeners.kafka.connection_info import clients
from headrace.listeners.kafka.context import KafkaContext, cluster_name
from headrace.listeners.kafka.dispatch import ASYNC_HANDLERS, HANDLERS, answer_in_task
from headrace.listeners.kafka.request_pipeline import PipelineGroup
from headrace.wire.kafka.apis import VERSIONS
from headrace.wire.kafka.frames import BufferPool

IDENTITY = "kafka"
CLUSTER_ID = b"cluster"
TRIM_INTERVAL_S = 5.0


class SpareBuffers:
    """The buffer pool as a pressure.Holder: free buffers can be released at any time."""

    name = "kafka_buffers"
    patience_s = 0.0

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def held_bytes(self) -> int:
        return self._pool.free_bytes

    def shed(self, wanted_bytes: int) -> int:
        return self._pool.release(wanted_bytes)


class KafkaListener:
    """Owned by the server. Everything here runs on the broker's event loop."""

    def __init__(self, broker: Broker, config: Config, cluster: uuid.UUID) -> None:
        self.connections = Connections(broker, config)
        self.context = KafkaContext(broker, config, cluster, self.connections.flow)
        self.pipelines = PipelineGroup(self.context, broker.users, HANDLERS, answer_in_task, login.take_raw_token)
        self._loop = self.context.loop
        broker.pressure.add_holder(SpareBuffers(self.context.pool))
        broker.clients.add_listener("kafka", lambda: clients(self.connections))
        self._sockets: ListeningSockets | None = None
        self._trimming: asyncio.TimerHandle | None = None

    @property
    def addresses(self) -> Sequence[str]:
        assert self._sockets is not None
        return self._sockets.addresses

    @property
    def port(self) -> int:
        assert self._sockets is not None
        return self._sockets.port

    async def listen(self, bind: Address, tls: Tls | None) -> None:
        acceptor = (
            None if tls is None else TlsAcceptor("Kafka", tls, self.context.stats, self.connections.connections_left)
        )
        self._sockets = await listen(bind, self.new_connection, flag="--kafka", acceptor=acceptor)
        self._trim()

    def new_connection(self) -> Connection:
        return Connection(self.pipelines, self.context, self.connections)

    def _trim(self) -> None:
        self.context.pool.trim()
        self._trimming = self._loop.call_later(TRIM_INTERVAL_S, self._trim)

    async def close(self) -> None:
        if self._sockets is not None:
            self._sockets.close()
        if self._trimming is not None:
            self._trimming.cancel()
        for connection in list(self.connections):
            await connection.close()
        deadline = self._loop.time() + 1.0
        while self.connections and self._loop.time() < deadline:
            await asyncio.sleep(0)
            for connection in list(self.connections):
                if self._loop.time() > deadline - 0.5:
                    connection.abort(HeadraceError("the broker is shutting down"))
            await asyncio.sleep(0.005)
        await self.context.close()


async def cluster_of(broker: Broker) -> uuid.UUID:
    """The cluster id of the data folder: made when first asked for, then kept in its state."""
    known = broker.storage.get_state(IDENTITY, CLUSTER_ID)
    if known is not None:
        return uuid.UUID(bytes=known)
    cluster = new_cluster_id(secrets.token_bytes)
    await broker.storage.put_state(IDENTITY, CLUSTER_ID, cluster.bytes)
    return cluster


def new_cluster_id(random_bytes: Callable[[int], bytes]) -> uuid.UUID:
    """A random id that does not start with a dash in Kafka's spelling, as in Kafka: command-line tools would take such
    an argument for an option. Topic ids start with the same bytes."""
    while True:
        cluster = uuid.UUID(bytes=random_bytes(16), version=4)
        if not cluster_name(cluster).startswith("-"):
            return cluster


async def start(broker: Broker, bind: Address, config: Config, *, tls: Tls | None = None) -> KafkaListener:
    missing = [api for api in VERSIONS if api not in HANDLERS and api not in ASYNC_HANDLERS]
    assert not missing, f"APIs without a handler: {missing}"
    assert access.RULES.keys() == VERSIONS.keys(), "every API needs an access rule"
    listener = KafkaListener(broker, config, await cluster_of(broker))
    await listener.listen(bind, tls)
    return listener
