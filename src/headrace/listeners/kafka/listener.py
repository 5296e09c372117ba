"""The Kafka listener: listens, and hands each request to who answers it."""

import asyncio
import base64
import contextlib
import logging
import secrets
import uuid
from collections.abc import Collection, Coroutine, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.broker.broker import Broker
from headrace.broker.pressure.pressure import Verdict
from headrace.config import Address, Config
from headrace.errors import HeadraceError, MalformedRequest
from headrace.listeners.common.backpressure import Flow
from headrace.listeners.common.per_source_limit import PerSourceLimit
from headrace.listeners.common.sockets import ListeningSockets, listen
from headrace.listeners.common.tls.accept import TlsAcceptor
from headrace.listeners.common.tls.certificate import Tls
from headrace.listeners.kafka.admin.metadata import MetadataCache
from headrace.listeners.kafka.admin.topic_index import TopicIndex
from headrace.listeners.kafka.auth import access
from headrace.listeners.kafka.auth.login import LoginGate
from headrace.listeners.kafka.connection import Connection
from headrace.listeners.kafka.connection_info import clients
from headrace.listeners.kafka.dispatch import ASYNC_HANDLERS, HANDLERS
from headrace.listeners.kafka.request_pipeline import Request, RequestPipelines
from headrace.wire.kafka.apis import VERSIONS
from headrace.wire.kafka.codec import decode
from headrace.wire.kafka.frames import SCRATCH_BYTES, BufferPool
from headrace.wire.kafka.schema import request_struct

logger = logging.getLogger("headrace.kafka")

IDENTITY = "kafka"
CLUSTER_ID = b"cluster"
PAUSED_WAIT_MS = 1000  # told to producers while nothing of theirs is read
TRIM_INTERVAL_S = 5.0
CHECKING_BYTES_MAX = 64 << 20  # of requests that wait for the thread: with more, no others that are large are read
ELEMENTS_MAX, ELEMENTS_PER_LOG = 20_000, 4
FULL_SPEED = Verdict()


class SpareBuffers:
    """The pool as a holder of memory, see pressure.Holder: nobody misses what is free."""

    name = "kafka_buffers"
    patience_s = 0.0

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def held_bytes(self) -> int:
        return self._pool.free_bytes

    def shed(self, wanted_bytes: int) -> int:
        return self._pool.release(wanted_bytes)


class KafkaListener:
    """Owned by the server. Everything here runs on the broker's loop."""

    def __init__(self, broker: Broker, config: Config, cluster: uuid.UUID) -> None:
        self.broker = broker
        self.config = config
        self.coordination = broker.coordination
        self.cluster = cluster
        self.cluster_id = cluster_name(cluster)
        self.node_id = config.kafka_node_id
        self.loop = asyncio.get_running_loop()
        self.pool = BufferPool()
        broker.pressure.add_holder(SpareBuffers(self.pool))
        self.scratch = bytearray(SCRATCH_BYTES)
        self.topics = TopicIndex(broker.streams, cluster)
        self.metadata = MetadataCache()
        self._users = broker.users
        self.gate = LoginGate(broker.users, self.topics)
        self.connections: set[Connection] = set()
        self._strangers: PerSourceLimit[Connection] = PerSourceLimit(lambda: self._room() + len(self._strangers))
        self.heavy = 0  # connections with large requests that wait for the disk
        self.stats = broker.stats.listener("kafka")
        self.flow = Flow("kafka", broker.pressure, self.connections, slows=False)
        self.pipes = RequestPipelines(self.loop, self.flow, broker.users, self.gate, HANDLERS)
        broker.clients.add_listener("kafka", lambda: clients(self.connections))
        broker.users.on_removed(self._user_removed)
        self.sessions: dict[int, Any] = {}  # fetch sessions, see sessions.py
        self.session_partitions = 0
        self.share_sessions: dict[tuple[str, str], Any] = {}  # by group and member, see share_sessions.py
        self.share_session_partitions = 0
        # One thread: what it unfolds is many times what came, and the sum must stay bounded. See produce.pyx.
        self.checking = ThreadPoolExecutor(1, "kafka-checking")
        self._checking_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
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
        acceptor = None if tls is None else TlsAcceptor("Kafka", tls, self.stats, self._room)
        self._sockets = await listen(bind, lambda: Connection(self), flag="--kafka", acceptor=acceptor)
        self._trim()

    def _room(self) -> int:
        return max(0, min(self.broker.connections_left, self.config.connections_max - len(self.connections)))

    def _trim(self) -> None:
        self.pool.trim()
        self._trimming = self.loop.call_later(TRIM_INTERVAL_S, self._trim)

    async def close(self) -> None:
        if self._sockets is not None:
            self._sockets.close()
        if self._trimming is not None:
            self._trimming.cancel()
        for connection in list(self.connections):
            await connection.close()
        deadline = self.loop.time() + 1.0
        while self.connections and self.loop.time() < deadline:
            await asyncio.sleep(0)
            for connection in list(self.connections):
                if self.loop.time() > deadline - 0.5:
                    connection.abort(HeadraceError("the broker stops"))
            await asyncio.sleep(0.005)
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self.loop.run_in_executor(None, self.checking.shutdown)

    def admit(self, connection: Connection) -> bool:
        self.stats.connections_total += 1
        if not self._room():
            self.stats.count("connections_refused")
            return False
        self.connections.add(connection)
        self.stats.connections = len(self.connections)
        return True

    def expect_login(self, connection: Connection) -> None:
        first = self._strangers.enter(connection.source, connection)
        if first is not None:
            self.stats.count("connections_refused")
            self.forget(first)  # at once: its place is taken
            first.abort(HeadraceError("others of its address wait, too, and it has not said who it is"))

    def logged_in(self, connection: Connection) -> None:
        self._strangers.leave(connection.source, connection)

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._strangers.leave(connection.source, connection)
        self.flow.forget(connection)
        self.stats.connections = len(self.connections)

    def _user_removed(self, name: str) -> None:
        for connection in list(self.connections):
            if connection.user == name:
                connection.refuse(f"user {name!r} is deleted")

    def throttle_ms(self, size: int) -> int:
        """How long a producer that sent this much is asked to wait, and is not read."""
        verdict = self.broker.pressure.verdict
        if verdict == FULL_SPEED:
            return 0
        if verdict.paused_by is not None:
            return PAUSED_WAIT_MS
        return int(self.broker.pressure.delay_s(size) * 1000)

    def checks(self, more_bytes: int) -> None:
        """So much more waits for the thread that checks, or less."""
        self._checking_bytes += more_bytes
        if self._checking_bytes > CHECKING_BYTES_MAX:
            self.flow.hold_large(True)
        elif self._checking_bytes <= CHECKING_BYTES_MAX // 2:
            self.flow.hold_large(False)

    def address_for(self, connection: Connection) -> tuple[str, int]:
        """What clients are told to connect to: what was set, or what they did connect to."""
        advertised = self.config.kafka_advertised
        if advertised is not None:
            return advertised.host, advertised.port
        host, port = connection.local_address
        return host.removeprefix("::ffff:"), port

    @property
    def elements_max(self) -> int:
        """In one request: nobody has reason to name much more than there is."""
        return ELEMENTS_MAX + ELEMENTS_PER_LOG * self.broker.storage.log_count

    def check_named(self, topics: Collection[tuple[object, Sized]]) -> None:
        """With the partitions that a large request names of each."""
        if len(topics) + sum(len(parts) for _, parts in topics) > self.elements_max:
            raise MalformedRequest("more partitions than there are")

    # Requests.

    def admits(self, request: Request) -> bool:
        """Whether its sender is known, or nobody need be. Asked again by what waits and then goes on."""
        return request.connection.admitted_at == self._users.version or self.gate.admits(request)

    def answer_in_task(self, request: Request) -> None:
        """For those APIs that may have to wait; the others have handlers that are called at once, see pipe.pyx."""
        self.spawn(self._answer(request), request)

    def spawn(self, work: Coroutine[Any, Any, None], request: Request) -> None:
        """Not cancelled when the client goes: what it began is finished, as it would be had it stayed."""
        task = self.loop.create_task(self._guarded(work, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None], request: Request) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - one bad request must not stop the others
            request.fail(error)

    async def _answer(self, request: Request) -> None:
        api, version = request.api, request.version
        fields = decode(request_struct(api, version), request.body, request.position, self.elements_max)
        request.buffer = bytearray()
        known = request.connection.access
        refused = access.refusal(known, api, fields) if known is not None else None
        if refused is not None:
            request.reply({"error_code": refused})
            return
        values = await ASYNC_HANDLERS[api](self, request, fields)
        if values is not None:  # else it has answered by itself
            request.reply(values)


def cluster_name(cluster: uuid.UUID) -> str:
    """As Kafka prints them: 22 characters of URL-safe base64."""
    return base64.urlsafe_b64encode(cluster.bytes).rstrip(b"=").decode()


async def cluster_of(broker: Broker) -> uuid.UUID:
    """Drawn once for a data folder, kept with its state."""
    known = broker.storage.get_state(IDENTITY, CLUSTER_ID)
    if known is not None:
        return uuid.UUID(bytes=known)
    cluster = uuid.UUID(bytes=secrets.token_bytes(16), version=4)
    await broker.storage.put_state(IDENTITY, CLUSTER_ID, cluster.bytes)
    return cluster


async def start(broker: Broker, bind: Address, config: Config, *, tls: Tls | None = None) -> KafkaListener:
    missing = [api for api in VERSIONS if api not in HANDLERS and api not in ASYNC_HANDLERS]
    assert not missing, f"offered, and nobody answers: {missing}"
    assert access.RULES.keys() == VERSIONS.keys(), "every API says who may use it"
    listener = KafkaListener(broker, config, await cluster_of(broker))
    await listener.listen(bind, tls)
    return listener
