"""Storage of durable exchanges, queues and bindings: documents in the catalog, bindings in the state table.

A queue is a stream (its logs) and a queue document (its declaration). The stream is created first, so that a crash
never leaves a queue without its logs. The document of a queue that is being deleted is marked and removed last: the
next start finishes a deletion that a crash interrupted.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, Protocol, TypeVar

import msgspec

from headrace.broker.catalog.arguments_json import loaded, stored
from headrace.broker.catalog.catalog import Catalog, Identity, shaped
from headrace.broker.cooperative import YieldEvery
from headrace.broker.queues.delays import Delays
from headrace.broker.queues.flush import FlushCoordinator
from headrace.broker.queues.queue import Queue, QueueServices
from headrace.broker.queues.queue_arguments import STREAM, QueueArguments, parse_arguments
from headrace.broker.queues.stream_queue import StreamQueue
from headrace.broker.queues.view import View, ViewEvents, stored_log
from headrace.broker.queues.view_state import SETTLE_TABLE, Delta
from headrace.broker.routing.exchanges import Binding, Exchange, canonical, is_kind, make_exchange
from headrace.broker.routing.router import Routing
from headrace.broker.streams.streams import Stream, Streams
from headrace.broker.transactions.producers import Producers
from headrace.broker.types.range_set import RangeSet
from headrace.broker.vhosts.declarations import TOPIC, NewQueue, QueueDeclared, place
from headrace.config.setting import NUMBER_MOST
from headrace.errors import ArgumentMismatch, StorageError
from headrace.log.commit.round import Ticket
from headrace.log.memory.memory_log import MemoryLog
from headrace.log.memory.spill import Spill
from headrace.log.shard import Shard

logger = logging.getLogger("headrace.broker")

EXCHANGES = "exchanges"
QUEUES = "queues"
BINDINGS_TABLE = "bindings"
FORGOTTEN_AT_ONCE = 1000  # a journal entry has a maximum size
T = TypeVar("T")
_memory_views = count()


class _ExchangeDocument(msgspec.Struct, frozen=True, kw_only=True):
    identity: tuple[str, str]
    type: str
    auto_delete: bool
    internal: bool
    arguments: dict[str, Any]


class _QueueDocument(msgspec.Struct, frozen=True, kw_only=True):
    identity: tuple[str, str]
    auto_delete: bool
    arguments: dict[str, Any]
    owns_stream: bool
    leaving: bool = False


class LoadedHost(Protocol):
    """A vhost, as far as `load` fills it."""

    @property
    def services(self) -> QueueServices: ...
    @property
    def routing(self) -> Routing[Queue]: ...
    @property
    def queues(self) -> dict[str, Queue]: ...
    @property
    def delays(self) -> Delays[Queue]: ...


class QueueStore:
    """Shared by all vhosts. File operations of the catalog run in a thread of their own, in order."""

    def __init__(
        self,
        catalog: Catalog,
        streams: Streams,
        shard: Shard,
        flushes: FlushCoordinator,
        producers: Producers,
        spill: Spill,
    ) -> None:
        self._catalog = catalog
        self._shard = shard
        self._spill = spill
        self._producers = producers
        self.streams = streams
        self.flushes = flushes
        self._thread = ThreadPoolExecutor(1, "queues")
        self._documents: dict[tuple[str, str], dict[str, Any]] = {}
        self._unfinished: list[_QueueDocument] = []  # queues whose deletion a crash interrupted

    def close(self) -> None:
        self._thread.shutdown()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as error:
            raise StorageError(f"the catalog cannot be written: {error.strerror}") from error

    # Exchanges.

    async def put_exchange(self, vhost: str, exchange: Exchange) -> None:
        document = {
            "type": exchange.declared_kind,
            "auto_delete": exchange.auto_delete,
            "internal": exchange.internal,
            "arguments": stored(exchange.arguments),
        }
        await self._in_thread(lambda: self._catalog.put(EXCHANGES, (vhost, exchange.name), document))

    async def remove_exchange(self, vhost: str, exchange: Exchange) -> None:
        await self._in_thread(lambda: self._catalog.remove(EXCHANGES, (vhost, exchange.name)))

    # Queues.

    def is_stored(self, queue: Queue) -> bool:
        return queue.durable and not queue.exclusive

    async def create_queue(
        self,
        vhost: QueueServices,
        name: str,
        policy: QueueArguments,
        auto_delete: bool,
        arguments: dict[str, Any],
    ) -> Queue:
        """A durable queue, stored when this returns. Uses the stream of its name if there is one."""
        levels = policy.priority_max + 1
        stream = self.streams.find(name, vhost.name)
        created = stream is None
        self.check_stream(vhost.name, name, policy, None if stream is None else len(stream.partitions))
        if stream is None:
            stream = await self.streams.create(name, levels, _settings(policy), "queue", vhost.name)
        elif stream.kind == "topic" and policy.kind != STREAM:
            await self._start_at_end(stream)
        document = {
            "auto_delete": auto_delete,
            "arguments": stored(arguments),
            "owns_stream": created or stream.kind == "queue",
        }
        await self._in_thread(lambda: self._catalog.put(QUEUES, (vhost.name, name), document))
        self._documents[vhost.name, name] = document
        return self._make(vhost, name, policy, stream, auto_delete, arguments)

    async def create_queues(self, vhost: QueueServices, wanted: Mapping[str, NewQueue]) -> AsyncIterator[Queue]:
        """Durable queues, all stored before the first is returned. Leaves out those whose stream exists."""
        streams = await self.streams.create_for_queues(
            {name: (new.policy.priority_max + 1, _settings(new.policy)) for name, new in wanted.items()}, vhost.name
        )
        documents: dict[Identity, dict[str, Any]] = {}
        for name in streams:
            declared = wanted[name].declared
            documents[vhost.name, name] = {
                "auto_delete": declared.auto_delete,
                "arguments": stored(declared.arguments),
                "owns_stream": True,
            }
        await self._in_thread(lambda: self._catalog.put_all(QUEUES, documents))
        async for name, stream in YieldEvery().each(streams.items()):
            declared, policy = wanted[name]
            self._documents[vhost.name, name] = documents[vhost.name, name]
            yield self._make(vhost, name, policy, stream, declared.auto_delete, dict(declared.arguments))

    def check_stream(self, vhost: str, name: str, policy: QueueArguments, partitions: int | None) -> None:
        """Raises if the queue cannot use the stream of its name with this number of partitions, or cannot create it if
        `partitions` is None."""
        levels = policy.priority_max + 1
        if partitions is None:
            self.streams.check(name, levels, _settings(policy), "queue", vhost)
        elif partitions != levels:
            raise ArgumentMismatch(
                f"{place('queue', name, vhost)} cannot be declared on a stream with {partitions} partitions"
            )

    def make_memory_queue(
        self, vhost: QueueServices, name: str, policy: QueueArguments, declared: QueueDeclared, owner: object
    ) -> Queue:
        """A queue in memory: transient or exclusive. Nothing is stored."""
        levels = list(reversed(range(policy.priority_max + 1)))

        def open_views(events: ViewEvents) -> list[View]:
            return [self.open_memory_view(events, level) for level in levels]

        return Queue(
            vhost,
            name,
            policy,
            open_views,
            durable=declared.durable,
            auto_delete=declared.auto_delete,
            owner=owner if declared.exclusive else None,
            arguments=dict(declared.arguments),
        )

    def open_memory_view(self, events: ViewEvents, level: int = 0) -> View:
        key = b"memory-%d" % next(_memory_views)  # not in the state table: tells queues of the same name apart
        return View(MemoryLog(self._spill), self.flushes, events, key=key, durable=False, level=level)

    async def _start_at_end(self, stream: Stream) -> None:
        """A queue declared on a topic receives only messages published from now on."""
        group = self._shard.group()
        for partition in stream.partitions:
            end = partition.end_offset
            group.merge(SETTLE_TABLE, _key(partition.log.id), Delta(RangeSet([(0, end)]), RangeSet(), 0).encode())
        await group.commit()

    def make_topic_queue(self, vhost: QueueServices, name: str, stream: Stream) -> Queue:
        """A topic as a stream queue. Nothing is stored: the topic exists."""
        policy = QueueArguments(kind=STREAM)
        return self._make(vhost, name, policy, stream, TOPIC.auto_delete, dict(TOPIC.arguments), is_topic=True)

    def _make(
        self,
        vhost: QueueServices,
        name: str,
        policy: QueueArguments,
        stream: Stream,
        auto_delete: bool,
        arguments: dict[str, Any],
        *,
        is_topic: bool = False,
    ) -> Queue:
        open_views = partial(self._open_views, stream, is_settled=policy.kind != STREAM)
        if policy.kind == STREAM:
            return StreamQueue(
                vhost,
                name,
                policy,
                open_views,
                durable=True,
                auto_delete=auto_delete,
                arguments=arguments,
                set_retention=partial(self._set_retention, vhost.name, name),
                is_topic=is_topic,
            )
        queue = Queue(vhost, name, policy, open_views, durable=True, auto_delete=auto_delete, arguments=arguments)
        for view in queue.views:
            self._producers.watch(stored_log(view), partial(queue.settle_void, view))
        return queue

    def _open_views(self, stream: Stream, events: ViewEvents, *, is_settled: bool) -> list[View]:
        views = []
        for partition in reversed(stream.partitions):
            log, key = partition.log, _key(partition.log.id)
            view = View(
                log,
                self.flushes,
                events,
                key=key,
                durable=True,
                level=partition.number,
                saved=self._shard.state.get(SETTLE_TABLE, key) if is_settled else None,
                aborted=partial(self._producers.aborted, partition.log_id),
            )
            if is_settled:
                log.unsettled_from = partial(getattr, view, "low")  # asked before segments are deleted
            views.append(view)
        return views

    def _set_retention(self, vhost: str, name: str, age_ms: int | None, size_bytes: int | None) -> None:
        stream = self.streams.find(name, vhost)
        if stream is not None:
            stream.bound(age_ms, size_bytes)

    async def remove_queue(self, vhost: str, queue: Queue) -> None:
        """Mark the queue as deleted: the next start finishes the deletion instead of loading the queue."""
        document = self._documents.get((vhost, queue.name))
        if document is not None:  # a topic that was not declared as a queue has none
            await self._in_thread(partial(_mark, self._catalog, (vhost, queue.name), document))

    async def keep_queue(self, vhost: str, queue: Queue) -> None:
        """Undo remove_queue."""
        document = self._documents.get((vhost, queue.name))
        if document is not None:
            await self._in_thread(lambda: self._catalog.put(QUEUES, (vhost, queue.name), document))

    async def remove_stream(self, vhost: str, queue: Queue) -> None:
        owns = not isinstance(queue, StreamQueue) or not queue.is_topic
        document = self._documents.pop((vhost, queue.name), {"owns_stream": owns})
        # The stream first: settles must not be deleted before the messages. A full disk does not prevent this, as the
        # queue may be deleted to free space.
        if document["owns_stream"] and self.streams.find(queue.name, vhost) is not None:
            await self.streams.delete(queue.name, vhost)
        for view in queue.views:
            stored_log(view).unsettled_from = None
        await self._forget_settles(queue.views)
        await self._remove_document(vhost, queue.name)

    async def _remove_document(self, vhost: str, name: str) -> None:
        """The last step of a deletion. If it fails, the next start repeats it."""
        try:
            await self._in_thread(lambda: self._catalog.remove(QUEUES, (vhost, name)))
        except StorageError as error:
            text = "the document of the deleted queue %r in vhost %r stays in the catalog until the next start: %s"
            logger.info(text, name, vhost, error)

    async def stream_deleted(self, vhost: str, queue: Queue) -> None:
        """Remove the rest of a queue whose stream has been deleted as a topic."""
        self._documents.pop((vhost, queue.name), None)
        await self._in_thread(lambda: self._catalog.remove(QUEUES, (vhost, queue.name)))
        group = self._shard.group()
        for view in queue.views:
            group.delete(SETTLE_TABLE, view.key)
        group.commit(lazy=True)

    # Delayed messages.

    def check_delay_stream(self, vhost: str, name: str) -> None:
        self.streams.check(name, kind="queue", vhost=vhost)

    async def create_delay_stream(self, vhost: str, name: str) -> None:
        if not self.has_delay_stream(vhost, name):
            await self.streams.create(name, 1, {}, "queue", vhost)

    def has_delay_stream(self, vhost: str, name: str) -> bool:
        return self.streams.find(name, vhost) is not None

    def open_delay_view(self, vhost: str, name: str, events: ViewEvents) -> View:
        stream = self.streams.find(name, vhost)
        assert stream is not None
        log = stream.partitions[0].log
        saved = self._shard.state.get(SETTLE_TABLE, _key(log.id))
        return View(log, self.flushes, events, key=_key(log.id), durable=True, saved=saved)

    async def remove_delay_stream(self, vhost: str, name: str, view: View) -> None:
        if self.has_delay_stream(vhost, name):
            await self.streams.delete(name, vhost)
        await self._forget_settles([view])

    async def _forget_settles(self, views: Sequence[View]) -> None:
        try:
            await self._forget_keys([view.key for view in views])
        except StorageError as error:
            if any(not view.log.is_deleted for view in views):
                raise  # the topic stays: a queue declared on it again would start where this one was
            logger.info("settles of a deleted queue stay on the disk: %s", error)
        for view in views:
            self._producers.unwatch(stored_log(view))

    # Bindings.

    async def put_binding(self, vhost: str, binding: Binding) -> None:
        group = self._shard.group()
        group.put(
            BINDINGS_TABLE,
            _binding_key(vhost, binding),
            msgspec.json.encode(_binding_document(vhost, binding)),
        )
        await group.commit()

    def has_binding(self, vhost: str, binding: Binding) -> bool:
        """Whether the binding is durable."""
        return self._shard.state.get(BINDINGS_TABLE, _binding_key(vhost, binding)) is not None

    def remove_bindings(self, vhost: str, bindings: Iterable[Binding]) -> Ticket | None:
        """The ticket of the removal; None if none of the bindings can be stored. Does not check which are stored: a
        binding may be in a round that is running."""
        keys = [
            _binding_key(vhost, binding)
            for binding in bindings
            if binding.destination.durable and not getattr(binding.destination, "exclusive", False)
        ]
        if not keys:
            return None
        group = self._shard.group()
        for key in keys:
            group.delete(BINDINGS_TABLE, key)
        return group.commit()

    # Opening.

    def load(self, vhost_of: Callable[[str], LoadedHost], hosts: Mapping[str, LoadedHost]) -> None:
        """Load everything durable; bindings last, so that they find both ends. Blocks. `vhost_of` creates a vhost that
        is not in `hosts`."""
        for content in self._catalog.load(EXCHANGES):
            document = shaped(EXCHANGES, content, _ExchangeDocument)
            vhost, name = document.identity
            if is_kind(document.type):
                host = vhost_of(vhost)
                exchange = host.routing.exchanges[name] = make_exchange(
                    name,
                    document.type,
                    durable=True,
                    auto_delete=document.auto_delete,
                    internal=document.internal,
                    arguments=loaded(document.arguments),
                )
                if exchange.delayed:
                    host.delays.load(exchange)
        for content in self._catalog.load(QUEUES):
            self._load_queue(shaped(QUEUES, content, _QueueDocument), content, vhost_of)
        for _, value in self._shard.state.items(BINDINGS_TABLE):
            _load_binding(msgspec.json.decode(value), hosts)

    async def finish_deletions(self) -> None:
        """Finish deletions that a crash interrupted. Called after loading and before clients can declare."""
        unfinished, self._unfinished = self._unfinished, []
        for document in unfinished:
            vhost, name = document.identity
            stream = self.streams.find(name, vhost)
            if document.leaving and stream is not None:
                if document.owns_stream and stream.kind == "queue":
                    await self.streams.delete(name, vhost, only=stream)
                else:
                    await self._forget_keys([_key(partition.log.id) for partition in stream.partitions])
            await self._remove_document(vhost, name)
            logger.info("finished the interrupted deletion of queue %r in vhost %r", name, vhost)

    async def forget_gone(self) -> None:
        """Delete settles of logs that no longer exist."""
        settled = (key for key, _ in self._shard.state.items(SETTLE_TABLE))
        gone = [key for key in settled if self.streams.of_log(int.from_bytes(key, "big")) is None]
        for at in range(0, len(gone), FORGOTTEN_AT_ONCE):
            await self._forget_keys(gone[at : at + FORGOTTEN_AT_ONCE])

    async def _forget_keys(self, keys: Sequence[bytes]) -> None:
        group = self._shard.group()
        for key in keys:
            group.delete(SETTLE_TABLE, key)
        await group.commit()

    def _load_queue(
        self, document: _QueueDocument, content: dict[str, Any], vhost_of: Callable[[str], LoadedHost]
    ) -> None:
        vhost, name = document.identity
        stream = self.streams.find(name, vhost)
        # If the stream was deleted as a topic, a later topic of that name does not belong to the queue.
        if document.leaving or stream is None or (document.owns_stream and stream.kind != "queue"):
            self._unfinished.append(document)
            return
        self._documents[vhost, name] = content
        host = vhost_of(vhost)
        arguments = loaded(document.arguments)
        policy = _stored_policy(name, arguments)
        host.queues[name] = self._make(host.services, name, policy, stream, document.auto_delete, arguments)


def _mark(catalog: Catalog, identity: Identity, document: dict[str, Any]) -> None:
    try:
        catalog.put(QUEUES, identity, document | {"leaving": True})
    except OSError:  # the disk may be full, and the deletion frees space
        catalog.remove(QUEUES, identity)


def _key(log_id: int) -> bytes:
    return log_id.to_bytes(8, "big")


def _stored_policy(name: str, arguments: dict[str, Any]) -> QueueArguments:
    where = f"queue '{name}'"
    try:
        return parse_arguments(where, arguments)
    except ArgumentMismatch:
        # Earlier versions stored these without checking them.
        known = {key: value for key, value in arguments.items() if not key.startswith("x-retry-")}
        return parse_arguments(where, known)


def _settings(policy: QueueArguments) -> dict[str, object]:
    if policy.kind == STREAM:
        age, size = policy.max_age_ms, policy.bytes_max
        return {
            "retention_ms": f"{age}ms" if age is not None else "forever",
            "retention_bytes": size if size is not None and size <= NUMBER_MOST else "unlimited",
        }
    return {}


def _binding_document(vhost: str, binding: Binding) -> dict[str, Any]:
    return {
        "vhost": vhost,
        "source": binding.source,
        "to": "queue" if binding.to_queue else "exchange",
        "destination": binding.destination.name,
        "key": binding.key,
        "arguments": stored(binding.arguments),
    }


def _binding_key(vhost: str, binding: Binding) -> bytes:
    parts = (vhost, binding.source, str(binding.to_queue), binding.destination.name, binding.key)
    digest = hashlib.blake2b(digest_size=16)
    for part in (*parts, canonical(binding.arguments)):
        data = part.encode("utf-8", "surrogateescape")
        digest.update(len(data).to_bytes(4, "big") + data)
    return digest.digest()


def _load_binding(document: dict[str, Any], hosts: Mapping[str, LoadedHost]) -> None:
    host = hosts.get(document["vhost"])
    if host is None:
        return  # the vhost was deleted, and a crash prevented the removal of its bindings
    found: Mapping[str, Queue | Exchange] = host.queues if document["to"] == "queue" else host.routing.exchanges
    destination = found.get(document["destination"])
    exchange = host.routing.exchanges.get(document["source"])
    if destination is not None and exchange is not None:
        binding = Binding(exchange.name, destination, document["key"], loaded(document["arguments"]))
        host.routing.bind(exchange, binding)
