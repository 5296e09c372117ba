"""A virtual host: its queues, and its exchanges and bindings (topology.py).

Changes to transient objects take effect at once. Changes to durable ones are made one at a time and return when they
are durable; file operations run in a thread, so that the event loop never waits for them.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from headrace.broker.queues.dead_lettering import DeadLettering
from headrace.broker.queues.delays import Delays
from headrace.broker.queues.queue import Queue, QueueServices
from headrace.broker.queues.queue_arguments import CLASSIC, STREAM
from headrace.broker.queues.queue_counts import QueueCounts
from headrace.broker.queues.stream_queue import StreamQueue
from headrace.broker.routing.exchanges import Exchange
from headrace.broker.routing.router import Routing
from headrace.broker.vhosts.declarations import (
    ExchangeDeclared,
    NewQueue,
    QueueDeclared,
    check_not_reserved,
    place,
    server_name,
)
from headrace.broker.vhosts.settings import QUEUES, Limits, VhostMetadata, limit_of
from headrace.broker.vhosts.store import QueueStore
from headrace.broker.vhosts.topology import ExchangePolicies, Topology
from headrace.clock import Clock
from headrace.errors import (
    HeadraceError,
    InUse,
    QueueLimitReached,
    QueueNotFound,
    ResourceLocked,
    VirtualHostNotFound,
)

logger = logging.getLogger("headrace.broker")


class QueuePolicies(ExchangePolicies, Protocol):
    def apply_to_queue(self, queue: Queue) -> bool: ...


class DeletedQueues(Protocol):
    """Keeps the counters of deleted queues."""

    def add(self, queue: Queue) -> None: ...


class VirtualHost:
    """Owned by VirtualHosts; used on the event-loop thread."""

    def __init__(
        self,
        name: str,
        store: QueueStore,
        policies: QueuePolicies,
        deleted_queues: DeletedQueues,
        clock: Clock,
        *,
        bindings_max: int,
    ) -> None:
        self.name = name
        self.metadata = VhostMetadata()
        self.limits: Limits = {}
        self.clock = clock
        self.store = store
        self.flushes = store.flushes
        self.routing: Routing[Queue] = Routing(name)
        self.queues: dict[str, Queue] = {}
        self.delays: Delays[Queue] = Delays(name, store, self.routing, self.queues, clock)
        self.dead_letters = DeadLettering(self.routing, self.queues, self.delays, self.flushes, clock)
        loop = asyncio.get_running_loop()
        self.services = QueueServices(
            name, loop, clock, self.flushes, self.dead_letters, QueueCounts(), self._delete_unused
        )
        self._policies = policies
        self._deleted_queues = deleted_queues
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.topology = Topology(
            self.routing, store, self.delays, policies, self._changing, self._spawn, bindings_max=bindings_max
        )
        self._owned: dict[object, dict[Queue, None]] = {}  # exclusive queues, by connection
        self._storing: set[str] = set()  # queues being stored, and not in `queues` yet
        self._is_closing = False

    # Exchanges and bindings.

    async def declare_exchange(
        self,
        name: str,
        kind: str,
        *,
        durable: bool,
        auto_delete: bool,
        internal: bool,
        arguments: Mapping[str, Any],
    ) -> Exchange:
        declared = ExchangeDeclared(kind, durable, auto_delete, internal, arguments)
        return await self.topology.declare_exchange(name, declared)

    async def delete_exchange(self, name: str, *, if_unused: bool = False) -> None:
        await self.topology.delete_exchange(name, if_unused=if_unused)

    async def bind(self, source: str, destination: Queue | Exchange, key: str, arguments: Mapping[str, Any]) -> None:
        await self.topology.bind(source, destination, key, arguments)

    async def unbind(self, source: str, destination: Queue | Exchange, key: str, arguments: Mapping[str, Any]) -> None:
        await self.topology.unbind(source, destination, key, arguments)

    # Finding queues.

    def queue(self, name: str, owner: object | None = None) -> Queue:
        """The queue, unless it is exclusive to another connection. A topic with one partition is a stream queue."""
        found = self.find(name)
        if found is None:
            raise QueueNotFound(self.name, name)
        _check_owner(self.name, found, owner)
        return found

    def find(self, name: str) -> Queue | None:
        found = self.queues.get(name) or self._topic(name)
        return None if found is None or found.is_deleted else found

    def find_topic(self, name: str) -> bool:
        """Whether a topic of that name can be published to as a queue; from then on it is among the queues."""
        return name in self.queues or self._topic(name) is not None

    def _topic(self, name: str) -> Queue | None:
        stream = self.store.streams.find(name, self.name)
        if stream is None or stream.kind != "topic" or len(stream.partitions) != 1:
            return None
        return self._add_queue(self.store.make_topic_queue(self.services, name, stream))

    def has_queue(self, name: str) -> bool:
        """False for a topic that was never declared as a queue, although it is among the queues."""
        found = self.queues.get(name)
        return found is not None and not _is_topic(found)

    def kind_of(self, name: str) -> str | None:
        """The type of the queue, if it exists."""
        found = self.queues.get(name)
        return None if found is None else found.policy.kind

    def is_new_queue(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Whether a declaration would create a queue."""
        return self.find_declared(name, arguments) is None

    def find_declared(self, name: str, arguments: Mapping[str, Any]) -> Queue | None:
        """The existing queue that a declaration refers to. A topic counts only for a declaration of a stream: any other
        queue type takes its place."""
        found = self.find(name)
        if found is None:
            return None
        return None if _is_topic(found) and arguments.get("x-queue-type", CLASSIC) != STREAM else found

    def check_declared(self, found: Queue, declared: QueueDeclared, owner: object) -> None:
        """Raises unless the declaration matches the existing queue."""
        if found.owner is not (owner if declared.exclusive else None):
            raise _locked(self.name, found)
        declared.check_same(place("queue", found.name, self.name), found)

    # Declaring queues.

    async def declare_queue(
        self,
        name: str,
        *,
        durable: bool,
        exclusive: bool,
        auto_delete: bool,
        arguments: Mapping[str, Any],
        owner: object,
        is_server_named: bool = False,
    ) -> Queue:
        declared = QueueDeclared(durable, exclusive, auto_delete, arguments)
        declared = declared.typed(self.metadata.default_queue_type, self.kind_of(name))
        found = self._redeclared(name, declared, owner)
        if found is not None:
            return found
        if not is_server_named:
            check_not_reserved("queue", name)
        name = name or server_name()
        policy = declared.check(place("queue", name, self.name))
        if not declared.is_stored and name not in self._storing:
            self._check_room(name)
            return self._add_queue(self.store.make_memory_queue(self.services, name, policy, declared, owner))
        async with self._changing:
            if self.is_leaving:
                raise VirtualHostNotFound(self.name)
            found = self._redeclared(name, declared, owner)
            if found is not None:
                return found
            self._check_room(name)
            if not declared.is_stored:  # a durable queue of that name could not be stored
                return self._add_queue(self.store.make_memory_queue(self.services, name, policy, declared, owner))
            if policy.retry_limit:
                await self.dead_letters.retries.prepare()
            topic = self.queues.get(name)
            self._storing.add(name)
            try:
                queue = await self.store.create_queue(
                    self.services, name, policy, auto_delete, dict(declared.arguments)
                )
            finally:
                self._storing.discard(name)
            if topic is not None:
                self.forget_queue(topic)
            return self._add_queue(queue)

    def check_new(self, name: str, declared: QueueDeclared) -> NewQueue | None:
        """For `declare_new`; None if it cannot be used for this declaration. Raises if the declaration is refused."""
        is_limited = limit_of(self.limits, QUEUES) is not None
        if is_limited or name in self.queues or self.store.streams.find(name, self.name) is not None:
            return None
        declared = declared.typed(self.metadata.default_queue_type, None)
        if not declared.is_stored:
            return None
        check_not_reserved("queue", name)
        policy = declared.check(place("queue", name, self.name))
        self.store.check_stream(self.name, name, policy, None)
        return NewQueue(declared, policy)

    async def declare_new(self, wanted: Mapping[str, NewQueue]) -> None:
        """Create many durable queues with few syncs; stored on return. Leaves out those that exist by now."""
        async with self._changing:
            new = {name: one for name, one in wanted.items() if name not in self.queues}
            if self.is_leaving or not new:
                return
            self._storing.update(new)
            try:
                async for queue in self.store.create_queues(self.services, new):
                    self._add_queue(queue)
            finally:
                self._storing.difference_update(new)

    def _redeclared(self, name: str, declared: QueueDeclared, owner: object) -> Queue | None:
        found = self.find_declared(name, declared.arguments)
        if found is not None:
            self.check_declared(found, declared, owner)
            found.used()
        return found

    def _check_room(self, name: str) -> None:
        """Raises if one more queue would exceed the limit of the vhost."""
        limit = limit_of(self.limits, QUEUES)
        storing = len(self._storing)
        if limit is None or len(self.queues) + storing < limit:
            return
        if sum(map(self.has_queue, self.queues)) + storing >= limit:
            raise QueueLimitReached(self.name, name, limit)

    def _add_queue(self, queue: Queue) -> Queue:
        self.queues[queue.name] = queue
        if queue.owner is not None:
            self._owned.setdefault(queue.owner, {})[queue] = None
        self._policies.apply_to_queue(queue)
        self.routing.changed()
        return queue

    # Deleting queues.

    async def delete_queue(
        self, name: str, owner: object | None = None, *, if_unused: bool = False, if_empty: bool = False
    ) -> int:
        """The number of messages deleted with it. Deleting a queue that does not exist is not an error, as in
        RabbitMQ."""
        found = self.find(name)
        if found is None:
            return 0
        _check_owner(self.name, found, owner)

        def check() -> None:
            if if_unused and len(found.consumers):
                raise InUse(f"queue '{name}' in vhost '{self.name}' in use")
            if if_empty and found.ready:
                raise InUse(f"queue '{name}' in vhost '{self.name}' not empty")

        return await self.remove_queue(found, check)

    async def remove_queue(self, queue: Queue, check: Callable[[], None] = lambda: None) -> int:
        """`check` raises InUse if the queue must stay. It is repeated after every wait, as clients may have used the
        queue meanwhile."""
        if queue.is_deleted:
            return 0
        check()
        count = queue.ready
        if self.store.is_stored(queue):
            async with self._changing:
                if queue.is_deleted:
                    return 0
                check()
                await self.store.remove_queue(self.name, queue)
                try:
                    check()
                except InUse:
                    await self.store.keep_queue(self.name, queue)
                    raise
                count = queue.ready
                self.forget_queue(queue)
                await self.store.remove_stream(self.name, queue)
        else:
            self.forget_queue(queue)
        return count

    def forget_queue(self, queue: Queue) -> None:
        """Delete the queue in memory: its routes, consumers and deliveries end."""
        if self.queues.get(queue.name) is queue:
            del self.queues[queue.name]
            self._deleted_queues.add(queue)
        owned = self._owned.get(queue.owner)
        if owned is not None:
            owned.pop(queue, None)
            if not owned:
                del self._owned[queue.owner]
        gone = self.routing.drop_destination(queue)
        queue.close()
        self.topology.bindings_removed(gone)

    def _delete_unused(self, queue: Queue) -> asyncio.Task[None] | None:
        """Delete a queue that is no longer used: at once if it is in memory, else in the returned task. While the
        broker stops, a stored queue is left to the next start."""
        if not self.store.is_stored(queue):
            self.forget_queue(queue)
            return None
        if self._is_closing:
            return None
        return self._spawn(self._delete_abandoned(queue))

    async def _delete_abandoned(self, queue: Queue) -> None:
        def check() -> None:
            if not queue.lifetime.is_abandoned:  # it may have been used again while the deletion waited
                raise InUse(f"queue '{queue.name}' in vhost '{self.name}' in use")

        try:
            await self.remove_queue(queue, check)
        except InUse:
            queue.lifetime.deletion_cancelled()
        except HeadraceError as error:
            logger.error("unused queue %r in vhost %r cannot be deleted: %s", queue.name, self.name, error)
            queue.lifetime.deletion_cancelled()

    def connection_closed(self, owner: object) -> None:
        """Delete the exclusive queues of the connection."""
        for queue in list(self._owned.get(owner, ())):
            self.forget_queue(queue)

    # Ending.

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self.services.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def is_leaving(self) -> bool:
        """Whether the vhost is being deleted: new queues and exchanges would be left behind, and are refused."""
        return self.topology.is_leaving

    async def begin_deletion(self) -> None:
        """When this returns, all declarations have ended, and new ones are refused."""
        async with self._changing:
            self.topology.is_leaving = True

    def cancel_deletion(self) -> None:
        self.topology.is_leaving = False

    async def close(self) -> None:
        self._is_closing = True
        while self._tasks:  # a task may start another
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self.delays.close()


def _is_topic(queue: Queue) -> bool:
    return isinstance(queue, StreamQueue) and queue.is_topic


def _check_owner(vhost: str, queue: Queue, owner: object | None) -> None:
    if queue.owner is not None and queue.owner is not owner:
        raise _locked(vhost, queue)


def _locked(vhost: str, queue: Queue) -> ResourceLocked:
    return ResourceLocked(
        f"cannot obtain exclusive access to locked queue '{queue.name}' in vhost '{vhost}'. It could be "
        "originally declared on another connection or the exclusive property value does not match that of "
        "the original declaration."
    )
