"""All virtual hosts of a broker: created, deleted, loaded and closed."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from msgspec import convert, field, to_builtins

from headrace.broker.catalog.catalog import Catalog, shaped
from headrace.broker.cooperative import uncancellable
from headrace.broker.queues.delays import STREAM_PREFIX
from headrace.broker.queues.flush import FlushCoordinator
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.queue_arguments import QueueArguments
from headrace.broker.queues.stream_queue import StreamQueue
from headrace.broker.queues.view import View, stored_log
from headrace.broker.queues.view_state import SETTLE_TABLE
from headrace.broker.streams.append import Appender
from headrace.broker.streams.streams import Stream, Streams
from headrace.broker.transactions.producers import Producers
from headrace.broker.types.vhost_names import CATALOG_KIND, DEFAULT
from headrace.broker.vhosts.declarations import PREDECLARED
from headrace.broker.vhosts.settings import Limits, VhostMetadata, parse_limits
from headrace.broker.vhosts.store import QueueStore
from headrace.broker.vhosts.vhost import DeletedQueues, QueuePolicies, VirtualHost
from headrace.clock import Clock
from headrace.errors import Conflict, HeadraceError, StorageError, VirtualHostNotFound
from headrace.log.memory.spill import Spill
from headrace.log.shard import Shard

logger = logging.getLogger("headrace.broker")


class _Stored(VhostMetadata, frozen=True, kw_only=True):
    identity: tuple[str]
    limits: Limits = field(default_factory=dict)


class VhostPolicies(QueuePolicies, Protocol):
    async def vhost_removed(self, vhost: str) -> None: ...


class VhostUsers(Protocol):
    async def vhost_made(self, vhost: str, maker: str | None) -> None: ...

    async def vhost_removed(self, vhost: str) -> None: ...


class VirtualHosts:
    """Owned by the broker. Loads everything durable when it is constructed, which blocks."""

    def __init__(
        self,
        catalog: Catalog,
        streams: Streams,
        shard: Shard,
        appender: Appender,
        spill: Spill,
        producers: Producers,
        users: VhostUsers,
        policies: VhostPolicies,
        deleted_queues: DeletedQueues,
        clock: Clock,
        *,
        bindings_max: int,
    ) -> None:
        self._catalog = catalog
        self._shard = shard
        self._users = users
        self._policies = policies
        self._deleted_queues = deleted_queues
        self._clock = clock
        self._bindings_max = bindings_max
        self.flushes = FlushCoordinator(shard, appender)
        self.store = QueueStore(catalog, streams, shard, self.flushes, producers, spill)
        self._hosts: dict[str, VirtualHost] = {}
        self._watchers: list[Callable[[str], None]] = []
        self._changing = asyncio.Lock()
        self._vhost_of(DEFAULT)
        for document in catalog.load(CATALOG_KIND):
            stored = shaped(CATALOG_KIND, document, _Stored)
            host = self._vhost_of(stored.identity[0])
            host.metadata, host.limits = convert(document, VhostMetadata), stored.limits
        self.store.load(self._vhost_of, self._hosts)
        for host in self:
            host.dead_letters.retries.load()
        streams.before_delete(self._check_deletion)
        streams.before_growth(self._check_growth)
        streams.on_delete(self._stream_deleted)
        for host in self:
            for queue in host.queues.values():
                try:
                    if queue.ready:
                        queue.drop_expired()
                except HeadraceError as error:  # damage to one log must not prevent the start
                    text = "expired messages of queue %r in vhost %r cannot be dropped: %s"
                    logger.error(text, queue.name, host.name, error)

    async def finish_deletions(self) -> None:
        """Finish what a crash interrupted: deletions of queues and delayed exchanges, and creations of queues. Topics
        stay, and so do streams with messages that were not being deleted."""
        try:
            await self.store.finish_deletions()
            for stream in self.store.streams:
                host = self._hosts.get(stream.vhost)
                if stream.kind == "queue" and host is not None and stream.name not in host.queues:
                    is_delay = stream.name.startswith(STREAM_PREFIX)
                    is_used = is_delay and host.delays.owner_of(stream.name) is not None
                    if not is_used and (is_delay or not any(part.end_offset for part in stream.partitions)):
                        await self.store.streams.delete(stream.name, stream.vhost, only=stream)
            await self.store.forget_gone()
            for host in self:
                await host.dead_letters.retries.prepare_if_used()
        except HeadraceError as error:  # not a reason to fail: the next start tries again
            logger.error("the remains of deleted queues cannot be removed: %s", error)

    def _vhost_of(self, name: str) -> VirtualHost:
        if name not in self._hosts:
            self._hosts[name] = self.make(name)
        return self._hosts[name]

    def make(self, name: str) -> VirtualHost:
        """A new vhost that is not one of the broker's; see dry_run.py."""
        return VirtualHost(
            name, self.store, self._policies, self._deleted_queues, self._clock, bindings_max=self._bindings_max
        )

    def get(self, name: str) -> VirtualHost:
        found = self._hosts.get(name)
        if found is None or found.is_leaving:
            raise VirtualHostNotFound(name)
        return found

    def __iter__(self) -> Iterator[VirtualHost]:
        return iter(list(self._hosts.values()))

    def views(self) -> Iterator[tuple[QueueArguments, View]]:
        """Every durable view with settles, with the policy of its queue."""
        for host in self:
            for queue in list(host.queues.values()):
                if queue.durable and not queue.exclusive and not queue.is_stream:
                    for view in queue.views:
                        yield queue.policy, view
            for view in host.delays.views():
                yield QueueArguments(), view

    def _check_deletion(self, stream: Stream) -> None:
        host = self._hosts.get(stream.vhost)
        owner = host.delays.owner_of(stream.name) if host is not None else None
        if owner is not None:
            raise Conflict(f"{stream.name!r} holds the delayed messages of {owner}: delete that")

    def _check_growth(self, stream: Stream) -> None:
        """A queue would never read messages in an additional partition."""
        self._check_deletion(stream)
        queue = self._queue_on(stream)
        if queue is not None and not (isinstance(queue, StreamQueue) and queue.is_topic):
            raise Conflict(f"{stream.name!r} is a queue: it has exactly one partition for each priority")

    def _queue_on(self, stream: Stream) -> Queue | None:
        host = self._hosts.get(stream.vhost)
        queue = host.queues.get(stream.name) if host is not None else None
        return queue if queue is not None and queue.view.log is stream.partitions[0].log else None

    async def _stream_deleted(self, stream: Stream) -> None:
        """Another listener deleted the stream as a topic. A queue without a log would confirm and lose messages."""
        queue = self._queue_on(stream)
        if queue is not None:
            self._hosts[stream.vhost].forget_queue(queue)
            await self.store.stream_deleted(stream.vhost, queue)

    def own_views(self) -> Iterator[tuple[QueueArguments, View]]:
        """The `views` whose log belongs to the queue. Messages settled by a queue on a topic are still the topic's:
        others read them, and the topic's retention deletes them."""
        for policy, view in self.views():
            found = self.store.streams.of_log(stored_log(view).id)
            if found is not None and found[0].kind != "topic":
                yield policy, view

    @uncancellable
    async def create(self, name: str, maker: str | None = None, metadata: VhostMetadata | None = None) -> VirtualHost:
        """Create the vhost; `maker` gets all permissions in it. If it is being deleted, it is created again after that.
        If it exists, only its metadata is replaced, if given."""
        async with self._changing:
            found = self._hosts.get(name)
            if found is None or metadata not in (None, found.metadata):
                await self._store(name, metadata or VhostMetadata(), {} if found is None else found.limits)
            if found is None:
                await self._users.vhost_made(name, maker)
            host = self._vhost_of(name)
            host.metadata = metadata or host.metadata
            return host

    @uncancellable
    async def set_limits(self, name: str, changes: Mapping[str, int | None]) -> None:
        """Change the given limits; None removes one. Connections and queues beyond a limit stay."""
        async with self._changing:
            host = self.get(name)
            limits = {limit: value for limit, value in {**host.limits, **changes}.items() if value is not None}
            parse_limits(limits)
            if limits != host.limits:
                await self._store(name, host.metadata, limits)
                host.limits = limits

    async def _store(self, name: str, metadata: VhostMetadata, limits: Limits) -> None:
        document = to_builtins(metadata) | ({"limits": limits} if limits else {})
        await self._in_thread(lambda: self._catalog.put(CATALOG_KIND, (name,), document))

    def on_removal(self, watcher: Callable[[str], None]) -> None:
        """Call the watcher with the name of each vhost before it is removed."""
        self._watchers.append(watcher)

    @uncancellable
    async def delete(self, name: str) -> None:
        async with self._changing:
            host = self.get(name)
            await host.begin_deletion()
            try:
                await self._delete(host)
            except BaseException:
                host.cancel_deletion()  # the deletion can be tried again
                raise

    async def _delete(self, host: VirtualHost) -> None:
        name = host.name
        for watcher in self._watchers:
            watcher(name)
        for queue in list(host.queues.values()):
            await host.remove_queue(queue)
        for exchange in list(host.routing.exchanges):
            if exchange not in PREDECLARED:  # otherwise its document would bring the vhost back at the next start
                await host.delete_exchange(exchange)
        await host.dead_letters.retries.remove()
        await self._users.vhost_removed(name)
        await self._policies.vhost_removed(name)
        await self._in_thread(lambda: self._catalog.remove(CATALOG_KIND, (name,)))
        del self._hosts[name]

    @staticmethod
    async def _in_thread(work: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, work)
        except OSError as error:
            raise StorageError(f"the catalog cannot be written: {error.strerror}") from error

    async def close(self) -> None:
        """Store everything published so far, and the exact end of deliveries: after a clean stop, only messages that
        were delivered get the redelivered flag."""
        for host in self:
            await host.close()
        try:
            await self.flushes.wait_flushed()
            group = self._shard.group()
            for _, view in self.views():
                group.merge(SETTLE_TABLE, view.key, view.take_unsaved(exact=True).encode())
            await group.commit()
        except HeadraceError:
            pass  # the disk has failed: after the next start, all messages that may have been delivered are flagged
        self.flushes.close()
        self.store.close()
