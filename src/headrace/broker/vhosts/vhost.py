"""A virtual host: its exchanges and queues, declared, bound and deleted; durable ones survive in the catalog.

What need not last changes at once. What must last is changed by one at a time, and whoever asked is
answered when the disk has it; the file calls run in a thread, so the loop never waits for them.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from headrace.broker.queues.dead_lettering import DeadLettering
from headrace.broker.queues.delays import Delays
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.queue_arguments import CLASSIC, STREAM
from headrace.broker.queues.stream_queue import StreamQueue
from headrace.broker.routing.exchanges import Binding, Exchange, make_exchange
from headrace.broker.routing.router import Routing
from headrace.broker.vhosts.declarations import (
    PREDECLARED,
    ExchangeDeclared,
    QueueDeclared,
    check_length,
    check_not_reserved,
    place,
    server_name,
)
from headrace.broker.vhosts.limits import QUEUES, Limits, bound
from headrace.broker.vhosts.metadata import Metadata
from headrace.broker.vhosts.store import QueueStore
from headrace.errors import (
    AccessRefused,
    HeadraceError,
    InUse,
    LimitReached,
    QueueLimitReached,
    QueueNotFound,
    ResourceLocked,
    VirtualHostNotFound,
)

if TYPE_CHECKING:
    from headrace.broker.broker import Broker

logger = logging.getLogger("headrace.broker")


class VirtualHost:
    def __init__(self, broker: "Broker", name: str, store: QueueStore) -> None:
        self.name = name
        self.metadata = Metadata()
        self.limits: Limits = {}
        self.is_leaving = False  # being deleted: what would be declared now, nobody would remove
        self.clock = broker.clock
        self.policies = broker.policies
        self.loop = asyncio.get_running_loop()
        self.flushes = store.flushes
        self.spill = broker.spill
        self.pressure = broker.pressure
        self.store = store
        self._gone = broker.stats.gone
        self.routing = Routing(name)
        self._bindings_max = broker.config.amqp_bindings_max
        self.queues: dict[str, Queue] = {}
        self._owned: dict[object, dict[Queue, None]] = {}  # exclusive queues, by connection
        self.dead_letters = DeadLettering(self)
        self.delays = Delays(self)
        self._changing = asyncio.Lock()
        self._storing: set[tuple[type, str]] = set()  # what is on its way to the catalog, and not here yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        for exchange, kind in PREDECLARED.items():
            self.routing.exchanges[exchange] = make_exchange(exchange, kind, durable=True)

    def _check_stays(self) -> None:
        if self.is_leaving:
            raise VirtualHostNotFound(self.name)

    # Exchanges.

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
        found = self.routing.exchanges.get(name)
        exchange = declared.exchange(name, self.name, found)
        if exchange is found:
            return found
        if not durable and (Exchange, name) not in self._storing:
            await self._make_exchange(exchange)
            return exchange
        async with self._changing:
            self._check_stays()
            found = self.routing.exchanges.get(name)  # somebody may have declared it while we waited
            if found is not None:
                return declared.exchange(name, self.name, found)
            self._storing.add((Exchange, name))
            try:
                await self._make_exchange(exchange)
            finally:
                self._storing.discard((Exchange, name))
        return exchange

    async def _make_exchange(self, exchange: Exchange) -> None:
        if exchange.delayed:
            await self.delays.prepare(exchange)
        if exchange.durable:
            await self.store.put_exchange(self.name, exchange)
        self._add_exchange(exchange)

    def _add_exchange(self, exchange: Exchange) -> None:
        self.routing.exchanges[exchange.name] = exchange
        self.policies.apply_to_exchange(self.name, exchange)
        self.routing.changed()

    async def delete_exchange(self, name: str, *, if_unused: bool = False) -> None:
        """Deleting what is not there is no error, as in RabbitMQ."""
        if name in PREDECLARED:
            raise AccessRefused(f"operation not permitted on the {'default ' if not name else ''}exchange '{name}'")
        found = self.routing.exchanges.get(name)
        if found is None:
            return

        def check() -> None:
            if if_unused and found.bindings:
                raise InUse(f"exchange '{name}' in vhost '{self.name}' in use")

        check()
        if not found.durable:
            self._forget_exchange(found)
            await self.delays.forget(found)
            return
        async with self._changing:
            if self.routing.exchanges.get(name) is not found:
                return  # one of that name that was made meanwhile is another one
            check()
            await self.store.remove_exchange(self.name, found)
            try:
                check()  # it may have been bound while the catalog was written
            except InUse:
                await self.store.put_exchange(self.name, found)
                raise
            self._forget_exchange(found)
            await self.delays.forget(found)  # before anybody makes one of that name: the log is found by it

    async def _delete_unused_exchange(self, name: str) -> None:
        try:
            await self.delete_exchange(name, if_unused=True)
        except InUse:
            pass  # bound again in time
        except HeadraceError as error:
            logger.error("exchange %r in vhost %r is not used any more and stays: %s", name, self.name, error)

    def _forget_exchange(self, exchange: Exchange) -> None:
        if self.routing.exchanges.pop(exchange.name, None) is None:
            return
        gone = list(exchange.bindings.values())
        for binding in gone:
            self.routing.unbind(exchange, binding)
        to_it = self.routing.drop_destination(exchange)
        self._after_unbind(to_it)
        self._remove_bindings_soon([*gone, *to_it])
        self.routing.changed()

    # Queues.

    def queue(self, name: str, owner: object | None = None) -> Queue:
        """The queue, if it is there and not somebody else's. A topic of one partition is a stream queue."""
        found = self.queues.get(name) or self._topic(name)
        if found is None or found.is_deleted:
            raise QueueNotFound(self.name, name)
        self._check_owner(found, owner)
        return found

    def find_topic(self, name: str) -> bool:
        """Whether a topic of that name can be published to as a queue; from then on it is among the queues."""
        return name in self.queues or self._topic(name) is not None

    def _topic(self, name: str) -> Queue | None:
        stream = self.store.streams.find(name, self.name)
        if stream is None or stream.kind != "topic" or len(stream.partitions) != 1:
            return None
        return self._add_queue(self.store.make_stream_queue(self, name, stream))

    def _check_owner(self, queue: Queue, owner: object | None) -> None:
        if queue.owner is not None and queue.owner is not owner:
            raise self._locked(queue)

    def _locked(self, queue: Queue) -> ResourceLocked:
        return ResourceLocked(
            f"cannot obtain exclusive access to locked queue '{queue.name}' in vhost '{self.name}'. It could be "
            "originally declared on another connection or the exclusive property value does not match that of "
            "the original declaration."
        )

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
        found = self.met_by(name, declared.arguments)
        if found is not None:
            return self._met(found, declared, owner)
        if not is_server_named:
            check_not_reserved("queue", name)
        name = name or server_name()
        policy = declared.check(place("queue", name, self.name))
        if not declared.is_stored and (Queue, name) not in self._storing:
            self._check_room(name)
            return self._add_queue(self.store.make_memory_queue(self, name, policy, declared, owner))
        async with self._changing:
            self._check_stays()
            found = self.met_by(name, declared.arguments)
            if found is not None:
                return self._met(found, declared, owner)
            self._check_room(name)
            if not declared.is_stored:  # the one that was being stored could not be
                return self._add_queue(self.store.make_memory_queue(self, name, policy, declared, owner))
            topic = self.queues.get(name)
            self._storing.add((Queue, name))
            try:
                queue = await self.store.create_queue(self, name, policy, auto_delete, dict(declared.arguments))
            finally:
                self._storing.discard((Queue, name))
            if topic is not None:
                self.forget_queue(topic)
            return self._add_queue(queue)

    def _check_room(self, name: str) -> None:
        """For one more queue, where the vhost has a limit."""
        limit = bound(self.limits, QUEUES)
        on_their_way = sum(kind is Queue for kind, _ in self._storing)
        if limit is None or len(self.queues) + on_their_way < limit:
            return
        if sum(map(self.has_queue, self.queues)) + on_their_way >= limit:
            raise QueueLimitReached(self.name, name, limit)

    def has_queue(self, name: str) -> bool:
        """Not so for a topic that was only asked for: it is among the queues, and nobody declared it."""
        found = self.queues.get(name)
        return found is not None and not _is_topic(found)

    def is_new_queue(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Whether a declaration would make a queue, not meet one."""
        return self.met_by(name, arguments) is None

    def kind_of(self, name: str) -> str | None:
        """The type of a queue, if there is one."""
        found = self.queues.get(name)
        return None if found is None else found.policy.kind

    def met_by(self, name: str, arguments: Mapping[str, Any]) -> Queue | None:
        """What a declaration meets. A topic is met as the stream it is, and gives way to any other kind of queue."""
        found = self.queues.get(name) or self._topic(name)
        if found is None or found.is_deleted:
            return None
        return None if _is_topic(found) and arguments.get("x-queue-type", CLASSIC) != STREAM else found

    def _add_queue(self, queue: Queue) -> Queue:
        self.queues[queue.name] = queue
        if queue.owner is not None:
            self._owned.setdefault(queue.owner, {})[queue] = None
        self.policies.apply_to_queue(queue)
        self.routing.changed()
        return queue

    def _met(self, found: Queue, declared: QueueDeclared, owner: object) -> Queue:
        """Declared again, by somebody who must mean the same."""
        self.check_met(found, declared, owner)
        found.used()
        return found

    def check_met(self, found: Queue, declared: QueueDeclared, owner: object) -> None:
        if found.owner is not (owner if declared.exclusive else None):
            raise self._locked(found)
        declared.check_same(place("queue", found.name, self.name), found)

    async def delete_queue(
        self, name: str, owner: object | None = None, *, if_unused: bool = False, if_empty: bool = False
    ) -> int:
        """How many messages went with it. Deleting what is not there is no error, as in RabbitMQ."""
        found = self.queues.get(name) or self._topic(name)
        if found is None or found.is_deleted:
            return 0
        self._check_owner(found, owner)

        def check() -> None:
            if if_unused and len(found.consumers):
                raise InUse(f"queue '{name}' in vhost '{self.name}' in use")
            if if_empty and found.ready:
                raise InUse(f"queue '{name}' in vhost '{self.name}' not empty")

        return await self.remove_queue(found, check)

    async def remove_queue(self, queue: Queue, check: Callable[[], None] = lambda: None) -> int:
        """`check` raises when the queue is to stay after all: asked again whenever others had a turn."""
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
        """The queue's end as others see it: no routes to it, no consumers, no deliveries."""
        if self.queues.get(queue.name) is queue:
            del self.queues[queue.name]
            self._gone.add(queue)
        owned = self._owned.get(queue.owner)
        if owned is not None:
            owned.pop(queue, None)
            if not owned:
                del self._owned[queue.owner]
        gone = self.routing.drop_destination(queue)
        queue.close()
        self._remove_bindings_soon(gone)
        self.routing.changed()
        self._after_unbind(gone)

    def delete_soon(self, queue: Queue) -> asyncio.Task[None] | None:
        """For timers and last consumers, which cannot wait for the disk. While the broker stops, nobody would: what is
        stored is left to the next start."""
        if not self.store.is_stored(queue):
            self.forget_queue(queue)
            return None
        if self._is_closing:
            return None
        return self._spawn(self._delete_quietly(queue))

    async def _delete_quietly(self, queue: Queue) -> None:
        def check() -> None:
            if not queue.is_abandoned:  # somebody may have come while the deletion waited for its turn
                raise InUse(f"queue '{queue.name}' in vhost '{self.name}' in use")

        try:
            await self.remove_queue(queue, check)
        except InUse:
            queue.stays()
        except HeadraceError as error:
            logger.error("queue %r in vhost %r is not used any more and stays: %s", queue.name, self.name, error)
            queue.stays()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Bindings.

    async def bind(self, source: str, destination: Queue | Exchange, key: str, arguments: Mapping[str, Any]) -> None:
        exchange = self._bindable(source)
        check_length("a routing key", key)
        binding = Binding(source, destination, key, arguments)
        if not self.routing.has(exchange, binding):
            self.check_binding_room(1)
        is_new = self.routing.bind(exchange, binding)
        if (
            exchange.durable
            and destination.durable
            and not (isinstance(destination, Queue) and destination.exclusive)
            # Bound already is not stored already: it may be on its way, or the disk may have refused it.
            and (is_new or not self.store.has_binding(self.name, binding))
        ):
            await self.store.put_binding(self.name, binding)

    def check_binding_room(self, more: int) -> None:
        if self.routing.bindings_count + more > self._bindings_max:
            raise LimitReached(f"vhost '{self.name}' has at most {self._bindings_max:,} bindings")

    async def unbind(self, source: str, destination: Queue | Exchange, key: str, arguments: Mapping[str, Any]) -> None:
        exchange = self._bindable(source)
        binding = Binding(source, destination, key, arguments)
        gone = self.routing.unbind(exchange, binding)
        if gone is None and not self.store.has_binding(self.name, binding):
            return  # as RabbitMQ since 3.2: unbinding what is not bound is no error
        removed = self.store.remove_bindings(self.name, [binding])
        if removed is not None:
            await removed
        self._after_unbind([binding])

    def _bindable(self, name: str) -> Exchange:
        if name == "":
            raise AccessRefused("operation not permitted on the default exchange")
        return self.routing.exchange(name)

    def _remove_bindings_soon(self, gone: list[Binding]) -> None:
        """Goes with the next round; after a crash before that, bindings to nothing are dropped on loading."""
        try:
            self.store.remove_bindings(self.name, gone)
        except HeadraceError as error:  # stopping, or the disk has failed: see above
            logger.info("bindings in vhost %r are dropped by the next start: %s", self.name, error)

    def _after_unbind(self, gone: list[Binding]) -> None:
        for source in {binding.source for binding in gone}:
            exchange = self.routing.exchanges.get(source)
            if exchange is not None and exchange.auto_delete and not exchange.bindings:
                self._spawn(self._delete_unused_exchange(source))

    # Going away.

    def connection_closed(self, owner: object) -> None:
        for queue in list(self._owned.get(owner, ())):
            self.forget_queue(queue)

    async def leave(self) -> None:
        """Before it is deleted. On return whatever is declared is known, and nothing more will be."""
        async with self._changing:
            self.is_leaving = True

    async def close(self) -> None:
        self._is_closing = True
        while self._tasks:  # one may begin another
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self.delays.close()


def _is_topic(queue: Queue) -> bool:
    return isinstance(queue, StreamQueue) and queue.is_topic
