"""The virtual hosts of a broker, opened and closed with it."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec import convert, field, to_builtins

from headrace.broker.catalog.catalog import shaped
from headrace.broker.cooperative.changes import to_the_end
from headrace.broker.queues.delays import STREAM_PREFIX
from headrace.broker.queues.flush import SETTLE_TABLE, FlushCoordinator
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.queue_arguments import QueueArguments
from headrace.broker.queues.stream_queue import StreamQueue
from headrace.broker.queues.view import View
from headrace.broker.streams.streams import Stream
from headrace.broker.vhosts.declarations import PREDECLARED
from headrace.broker.vhosts.limits import Limits, parse_limits
from headrace.broker.vhosts.metadata import Metadata
from headrace.broker.vhosts.store import QueueStore
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import Conflict, HeadraceError, StorageError, VirtualHostNotFound

if TYPE_CHECKING:
    from headrace.broker.broker import Broker

logger = logging.getLogger("headrace.broker")

CATALOG_KIND = "vhosts"
DEFAULT = "/"


class _Stored(Metadata, frozen=True, kw_only=True):
    identity: tuple[str]
    limits: Limits = field(default_factory=dict)


class VirtualHosts:
    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self.flushes = FlushCoordinator(broker.shard)
        producers = broker.coordination.producers
        self.store = QueueStore(broker.catalog, broker.streams, broker.shard, self.flushes, producers)
        self._hosts: dict[str, VirtualHost] = {}
        self._watchers: list[Callable[[str], None]] = []
        self._changing = asyncio.Lock()
        self._vhost_of(DEFAULT)
        for document in broker.catalog.load(CATALOG_KIND):
            stored = shaped(CATALOG_KIND, document, _Stored)
            host = self._vhost_of(stored.identity[0])
            host.metadata, host.limits = convert(document, Metadata), stored.limits
        self.store.load(self._vhost_of, self._hosts)
        broker.streams.before_delete(self._check_deletion)
        broker.streams.before_growth(self._check_growth)
        broker.streams.on_delete(self._stream_deleted)
        for host in self:
            for queue in host.queues.values():
                try:
                    if queue.ready:
                        queue.drop_expired()
                except HeadraceError as error:  # damage to one log is no reason to keep everybody from all others
                    logger.error("queue %r in vhost %r cannot drop what is too old: %s", queue.name, host.name, error)

    async def finish_deletions(self) -> None:
        """What a crash cut off: of queues, of exchanges that delay, and queues that were only half made. A stream that
        is a topic stays, and so does whatever holds a message and was not being deleted."""
        try:
            await self.store.finish_deletions()
            for stream in self.store.streams:
                host = self._hosts.get(stream.vhost)
                if stream.kind == "queue" and host is not None and stream.name not in host.queues:
                    is_delay = stream.name.startswith(STREAM_PREFIX)
                    is_used = is_delay and host.delays.exchange_of(stream.name) is not None
                    if not is_used and (is_delay or not any(part.end_offset for part in stream.partitions)):
                        await self.store.streams.delete(stream.name, stream.vhost, only=stream)
            await self.store.forget_gone()
        except HeadraceError as error:  # no reason not to start: the next one tries again
            logger.error("what is left of deleted queues stays for now: %s", error)

    def _vhost_of(self, name: str) -> VirtualHost:
        if name not in self._hosts:
            self._hosts[name] = VirtualHost(self._broker, name, self.store)
        return self._hosts[name]

    def get(self, name: str) -> VirtualHost:
        found = self._hosts.get(name)
        if found is None or found.is_leaving:
            raise VirtualHostNotFound(name)
        return found

    def __iter__(self) -> Iterator[VirtualHost]:
        return iter(list(self._hosts.values()))

    def views(self) -> Iterator[tuple[QueueArguments, View]]:
        """Every durable view that settles, with the policy of its queue."""
        for host in self:
            for queue in list(host.queues.values()):
                if queue.durable and not queue.exclusive and not queue.is_stream:
                    for view in queue.views:
                        yield queue.policy, view
            for view in host.delays.views():
                yield QueueArguments(), view

    def _check_deletion(self, stream: Stream) -> None:
        host = self._hosts.get(stream.vhost)
        exchange = host.delays.exchange_of(stream.name) if host is not None else None
        if exchange is not None:
            raise Conflict(f"{stream.name!r} holds what exchange {exchange!r} delays: it goes with the exchange")

    def _check_growth(self, stream: Stream) -> None:
        """What is published to a partition that its queue does not read would reach nobody there."""
        self._check_deletion(stream)
        queue = self._queue_on(stream)
        if queue is not None and not (isinstance(queue, StreamQueue) and queue.is_topic):
            raise Conflict(f"{stream.name!r} is a queue: it has a partition for each priority, and no more")

    def _queue_on(self, stream: Stream) -> Queue | None:
        host = self._hosts.get(stream.vhost)
        queue = host.queues.get(stream.name) if host is not None else None
        return queue if queue is not None and queue.view.log is stream.partitions[0].log else None

    async def _stream_deleted(self, stream: Stream) -> None:
        """As a topic, through another listener: a queue without its log would confirm messages and lose them."""
        queue = self._queue_on(stream)
        if queue is not None:
            queue.vhost.forget_queue(queue)
            await self.store.stream_deleted(stream.vhost, queue)

    def own_views(self) -> Iterator[tuple[QueueArguments, View]]:
        """Those of views whose log is the queue's own. What a queue on a topic has settled is still the topic's: others
        read it, and its retention says how long it stays."""
        for policy, view in self.views():
            found = self.store.streams.of_log(view.log.id)
            if found is not None and found[0].kind != "topic":
                yield policy, view

    @to_the_end
    async def create(self, name: str, maker: str | None = None, metadata: Metadata | None = None) -> VirtualHost:
        """The user who makes it may do everything there. One that is being deleted is made anew after that. Of one that
        is there only the metadata changes, if there are any."""
        async with self._changing:
            found = self._hosts.get(name)
            if found is None or metadata not in (None, found.metadata):
                await self._store(name, metadata or Metadata(), {} if found is None else found.limits)
            if found is None:
                await self._broker.users.vhost_made(name, maker)
            host = self._vhost_of(name)
            host.metadata = metadata or host.metadata
            return host

    @to_the_end
    async def set_limits(self, name: str, changes: Mapping[str, int | None]) -> None:
        """Those that are named change; None takes one away. Whoever is over a limit already stays."""
        async with self._changing:
            host = self.get(name)
            limits = {limit: value for limit, value in {**host.limits, **changes}.items() if value is not None}
            parse_limits(limits)
            if limits != host.limits:
                await self._store(name, host.metadata, limits)
                host.limits = limits

    async def _store(self, name: str, metadata: Metadata, limits: Limits) -> None:
        document = to_builtins(metadata) | ({"limits": limits} if limits else {})
        await self._in_thread(lambda: self._broker.catalog.put(CATALOG_KIND, (name,), document))

    def on_removal(self, watcher: Callable[[str], None]) -> None:
        """Called with the name of each vhost that is about to be removed."""
        self._watchers.append(watcher)

    @to_the_end
    async def delete(self, name: str) -> None:
        async with self._changing:
            host = self.get(name)
            await host.leave()
            try:
                await self._delete(host)
            except BaseException:
                host.is_leaving = False  # what could not be deleted is there for another try
                raise

    async def _delete(self, host: VirtualHost) -> None:
        name = host.name
        for watcher in self._watchers:
            watcher(name)  # whoever is inside
        for queue in list(host.queues.values()):
            await host.remove_queue(queue)
        for exchange in list(host.routing.exchanges):
            if exchange not in PREDECLARED:  # its document would bring the vhost back with the next start
                await host.delete_exchange(exchange)
        await self._broker.users.vhost_removed(name)
        await self._broker.policies.vhost_removed(name)
        await self._in_thread(lambda: self._broker.catalog.remove(CATALOG_KIND, (name,)))
        del self._hosts[name]

    @staticmethod
    async def _in_thread(work: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, work)
        except OSError as error:
            raise StorageError(f"the catalog cannot be written: {error.strerror}") from error

    async def close(self) -> None:
        """Everything said so far is stored, and how far deliveries really went: a clean stop flags nothing else."""
        for host in self:
            await host.close()
        try:
            await self.flushes.over()
            group = self._broker.shard.group()
            for _, view in self.views():
                group.merge(SETTLE_TABLE, view.key, view.take_unsaved(exact=True).encode())
            await group.commit()
        except HeadraceError:
            pass  # the disk has failed: the next start flags what may have been delivered
        self.flushes.close()
        self.store.close()
