"""KafkaContext: the collaborators that request handlers share.

Handlers take a context instead of the KafkaListener, so they know neither sockets nor the life of connections.
"""

import asyncio
import base64
import contextlib
import uuid
from collections.abc import Collection, Coroutine, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.broker.access.protected_mode import ProtectedMode
from headrace.broker.broker import Broker
from headrace.broker.pressure.pressure import Verdict
from headrace.config import Config
from headrace.errors import MalformedRequest
from headrace.listeners.common.backpressure import Flow
from headrace.listeners.kafka.admin.metadata_cache import MetadataCache
from headrace.listeners.kafka.admin.topic_index import TopicIndex
from headrace.listeners.kafka.auth.access import AnyUser
from headrace.listeners.kafka.auth.gate import LoginGate
from headrace.listeners.kafka.data.fetch_sessions import FetchSessions
from headrace.listeners.kafka.groups.share_sessions import ShareSessions
from headrace.listeners.kafka.request_pipeline import Request
from headrace.wire.kafka.frames import BufferPool

PAUSED_WAIT_MS = 1000  # throttle time sent to producers while the broker reads nothing from them
CHECKING_BYTES_MAX = 64 << 20  # requests queued for the checker thread; above this, no large requests are read
ELEMENTS_MAX, ELEMENTS_PER_LOG = 20_000, 4
FULL_SPEED = Verdict()


class KafkaContext:
    """Made by the KafkaListener, one per listener. Everything here runs on the broker's event loop."""

    def __init__(self, broker: Broker, config: Config, cluster: uuid.UUID, flow: Flow) -> None:
        self.broker = broker
        self.config = config
        self.coordination = broker.coordination
        self.cluster_id = cluster_name(cluster)
        self.node_id = config.kafka_node_id
        self.loop = asyncio.get_running_loop()
        self.pool = BufferPool()
        self.topics = TopicIndex(broker.streams, cluster)
        self.metadata = MetadataCache(self.topics, self.node_id)
        protected_mode = ProtectedMode(broker.users, is_enabled=config.protected_mode)
        self.gate = LoginGate(broker.users, self.topics, protected_mode)
        self.stats = broker.stats.listener("kafka")
        self.flow = flow
        self.fetch_sessions = FetchSessions(broker.clock, lambda: self.elements_max)
        self.share_sessions = ShareSessions(broker.coordination.shares, lambda: self.elements_max)
        # One thread, so that the memory for decompressed batches stays bounded. See produce.pyx.
        self.checking = ThreadPoolExecutor(1, "kafka-checking")
        self._checking_bytes = 0
        self._users = broker.users
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self.loop.run_in_executor(None, self.checking.shutdown)

    # Authentication, authorization and addresses.

    def admits(self, request: Request) -> bool:
        """Whether the connection is authenticated, or need not be. Asked again after each wait."""
        return request.connection.admitted_at == self._users.version or self.gate.admits(request)

    def access_of(self, request: Request) -> AnyUser:
        """The permissions of the request's user."""
        return request.connection.access or self.gate.anybody

    def address_of(self, request: Request) -> tuple[str, int]:
        """The address that clients should connect to: the advertised one, or the one that this client connected to."""
        advertised = self.config.kafka_advertised
        if advertised is not None:
            return advertised.host, advertised.port
        host, port = request.connection.local_address
        return host.removeprefix("::ffff:"), port

    # Limits.

    @property
    def elements_max(self) -> int:
        """Array elements in one request: no client needs many more than there are logs."""
        return ELEMENTS_MAX + ELEMENTS_PER_LOG * self.broker.storage.log_count

    def check_named(self, topics: Collection[tuple[object, Sized]]) -> None:
        """Raise if a request names more topics and partitions than elements_max. topics: [(topic, partitions)]."""
        if len(topics) + sum(len(parts) for _, parts in topics) > self.elements_max:
            raise MalformedRequest("the request names more partitions than there are")

    def throttle_ms(self, size: int) -> int:
        """How long a producer that sent this many bytes has to wait, and is not read."""
        verdict = self.broker.pressure.verdict
        if verdict == FULL_SPEED:
            return 0
        if verdict.paused_by is not None:
            return PAUSED_WAIT_MS
        return int(self.broker.pressure.delay_s(size) * 1000)

    def count_checking(self, more_bytes: int) -> None:
        """Count request bytes queued for the checker thread; negative when it is done with them."""
        self._checking_bytes += more_bytes
        if self._checking_bytes > CHECKING_BYTES_MAX:
            self.flow.hold_large(True)
        elif self._checking_bytes <= CHECKING_BYTES_MAX // 2:
            self.flow.hold_large(False)

    # Handlers that wait.

    def spawn(self, work: Coroutine[Any, Any, None], request: Request) -> None:
        """Run a coroutine to its end, even if the client disconnects meanwhile."""
        task = self.loop.create_task(self._guarded(work, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None], request: Request) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - one bad request must not stop the others
            request.fail(error)


def cluster_name(cluster: uuid.UUID) -> str:
    """Kafka's spelling of a cluster id: 22 characters of URL-safe base64."""
    return base64.urlsafe_b64encode(cluster.bytes).rstrip(b"=").decode()
