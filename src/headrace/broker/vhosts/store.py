"""Where durable exchanges, queues and bindings are kept: the catalog for things, the state for bindings.

A queue is a stream (its logs) and a queue document (what was declared). The stream is made first, so that a crash
never leaves a queue without its logs. A queue that is deleted has that in its document until nothing else is left of
it: a deletion that a crash cuts off is finished by the next start.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from headrace.broker.catalog.arguments_json import loaded, stored
from headrace.broker.catalog.catalog import Catalog, shaped
from headrace.broker.queues.flush import SETTLE_TABLE, FlushCoordinator
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.queue_arguments import STREAM, QueueArguments, parse_arguments
from headrace.broker.queues.stream_queue import StreamQueue
from headrace.broker.queues.view import Delta, View
from headrace.broker.routing.exchanges import Binding, Exchange, canonical, is_kind, make_exchange
from headrace.broker.streams.streams import Stream, Streams
from headrace.broker.transactions.producers import Producers
from headrace.broker.types.range_set import RangeSet
from headrace.broker.vhosts.declarations import TOPIC, QueueDeclared, place
from headrace.config.setting import NUMBER_MOST
from headrace.errors import ArgumentMismatch, StorageError
from headrace.log.commit.round import Ticket
from headrace.log.memory.memory_log import MemoryLog
from headrace.log.shard import Shard

if TYPE_CHECKING:
    from headrace.broker.vhosts.vhost import VirtualHost

logger = logging.getLogger("headrace.broker")

EXCHANGES = "exchanges"
QUEUES = "queues"
BINDINGS_TABLE = "bindings"
FORGOTTEN_AT_ONCE = 1000  # an entry of the journal has a largest size
T = TypeVar("T")


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


class QueueStore:
    def __init__(
        self, catalog: Catalog, streams: Streams, shard: Shard, flushes: FlushCoordinator, producers: Producers
    ) -> None:
        self._catalog = catalog
        self._shard = shard
        self._producers = producers
        self.streams = streams
        self.flushes = flushes
        self._thread = ThreadPoolExecutor(1, "queues")
        self._documents: dict[tuple[str, str], dict[str, Any]] = {}
        self._unfinished: list[_QueueDocument] = []  # of queues that were being deleted

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
        vhost: "VirtualHost",
        name: str,
        policy: QueueArguments,
        auto_delete: bool,
        arguments: dict[str, Any],
    ) -> Queue:
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

    def check_stream(self, vhost: str, name: str, policy: QueueArguments, partitions: int | None) -> None:
        """Whether the queue can be on the stream of its name, which has so many partitions; None: there is none yet."""
        levels = policy.priority_max + 1
        if partitions is None:
            self.streams.check(name, levels, _settings(policy), "queue", vhost)
        elif partitions != levels:
            raise ArgumentMismatch(
                f"{place('queue', name, vhost)} cannot be declared on a stream with {partitions} partitions"
            )

    def make_memory_queue(
        self, vhost: "VirtualHost", name: str, policy: QueueArguments, declared: QueueDeclared, owner: object
    ) -> Queue:
        """One that need not last: nothing is stored."""
        levels = reversed(range(policy.priority_max + 1))
        views = [View(MemoryLog(vhost.spill), self.flushes, durable=False, level=level) for level in levels]
        return Queue(
            vhost,
            name,
            policy,
            views,
            durable=declared.durable,
            auto_delete=declared.auto_delete,
            owner=owner if declared.exclusive else None,
            arguments=dict(declared.arguments),
        )

    async def _start_at_end(self, stream: Stream) -> None:
        """A queue declared on a topic gets what is published from now on."""
        group = self._shard.group()
        for partition in stream.partitions:
            end = partition.end_offset
            group.merge(SETTLE_TABLE, _key(partition.log.id), Delta(RangeSet([(0, end)]), RangeSet(), 0).encode())
        await group.commit()

    def make_stream_queue(self, vhost: "VirtualHost", name: str, stream: Stream) -> Queue:
        """A topic as the AMQP listener sees it: nothing is stored, the topic itself is the record of it."""
        queue = self._make(vhost, name, QueueArguments(kind=STREAM), stream, TOPIC.auto_delete, dict(TOPIC.arguments))
        assert isinstance(queue, StreamQueue)
        queue.is_topic = True
        return queue

    def _make(
        self,
        vhost: "VirtualHost",
        name: str,
        policy: QueueArguments,
        stream: Stream,
        auto_delete: bool,
        arguments: dict[str, Any],
    ) -> Queue:
        views = [
            View(
                partition.log,
                self.flushes,
                key=_key(partition.log.id),
                durable=True,
                level=partition.number,
                saved=self._shard.state.get(SETTLE_TABLE, _key(partition.log.id)) if policy.kind != STREAM else None,
                aborted=partial(self._producers.aborted, partition.log_id),
            )
            for partition in reversed(stream.partitions)
        ]
        if policy.kind != STREAM:
            for view in views:
                view.log.unsettled_from = view.unsettled_from
        kind = StreamQueue if policy.kind == STREAM else Queue
        queue = kind(vhost, name, policy, views, durable=True, auto_delete=auto_delete, arguments=arguments)
        if not queue.is_stream:
            for view in views:
                self._producers.watch(view.log, partial(queue.voided, view))
        return queue

    async def remove_queue(self, vhost: str, queue: Queue) -> None:
        """After this the next start does not bring it back."""
        document = self._documents.get((vhost, queue.name))
        if document is not None:  # a topic that nobody declared has none
            await self._in_thread(partial(self._mark, (vhost, queue.name), document))

    def _mark(self, identity: tuple[str, str], document: dict[str, Any]) -> None:
        try:
            self._catalog.put(QUEUES, identity, document | {"leaving": True})
        except OSError:  # the disk may be full: what is deleted makes room
            self._catalog.remove(QUEUES, identity)

    async def keep_queue(self, vhost: str, queue: Queue) -> None:
        """After remove_queue, when the queue is to stay after all."""
        document = self._documents.get((vhost, queue.name))
        if document is not None:
            await self._in_thread(lambda: self._catalog.put(QUEUES, (vhost, queue.name), document))

    async def remove_stream(self, vhost: str, queue: Queue) -> None:
        owns = not isinstance(queue, StreamQueue) or not queue.is_topic
        document = self._documents.pop((vhost, queue.name), {"owns_stream": owns})
        # The stream first: as long as its messages are there, so is what was settled of them. And a disk that is full
        # must not keep it: it may be deleted to make room.
        if document["owns_stream"] and self.streams.find(queue.name, vhost) is not None:
            await self.streams.delete(queue.name, vhost)
        for view in queue.views:
            view.log.unsettled_from = None
        await self._forget_settles(queue.views)
        await self._remove_document(vhost, queue.name)

    async def _remove_document(self, vhost: str, name: str) -> None:
        """Of a queue of which nothing else is left: what cannot be removed now is with the next start."""
        try:
            await self._in_thread(lambda: self._catalog.remove(QUEUES, (vhost, name)))
        except StorageError as error:
            logger.info("that queue %r in vhost %r is deleted stays in the catalog: %s", name, vhost, error)

    async def stream_deleted(self, vhost: str, queue: Queue) -> None:
        """What is left of a queue whose stream somebody else deletes."""
        self._documents.pop((vhost, queue.name), None)
        await self._in_thread(lambda: self._catalog.remove(QUEUES, (vhost, queue.name)))
        group = self._shard.group()
        for view in queue.views:
            group.delete(SETTLE_TABLE, view.key)
        group.commit(lazy=True)

    # Delayed messages.

    async def delay_view(self, vhost: str, name: str) -> View:
        if self.streams.find(name, vhost) is None:
            await self.streams.create(name, 1, {}, "queue", vhost)
        found = self.find_delay_view(vhost, name)
        assert found is not None
        return found

    def find_delay_view(self, vhost: str, name: str) -> View | None:
        stream = self.streams.find(name, vhost)
        if stream is None:
            return None
        log = stream.partitions[0].log
        saved = self._shard.state.get(SETTLE_TABLE, _key(log.id))
        return View(log, self.flushes, key=_key(log.id), durable=True, saved=saved)

    async def remove_delay_view(self, vhost: str, name: str, view: View) -> None:
        if self.streams.find(name, vhost) is not None:
            await self.streams.delete(name, vhost)
        await self._forget_settles([view])

    async def _forget_settles(self, views: Sequence[View]) -> None:
        try:
            await self._forget_keys([view.key for view in views])
        except StorageError as error:
            if any(not view.log.is_deleted for view in views):
                raise  # of a topic: a queue that is declared on it again would begin where this one was
            logger.info("what was settled of a queue that is gone stays on the disk: %s", error)
        for view in views:
            self._producers.unwatch(view.log)

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
        """Whether the disk has it."""
        return self._shard.state.get(BINDINGS_TABLE, _binding_key(vhost, binding)) is not None

    def remove_bindings(self, vhost: str, bindings: Iterable[Binding]) -> Ticket | None:
        """The ticket of the round it goes with; None when none of them can be stored. What the disk has now is not
        asked: a binding may be on its way there."""
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

    def load(self, vhost_of: Callable[[str], "VirtualHost"], hosts: Mapping[str, "VirtualHost"]) -> None:
        """Blocking: everything that was declared durable, in the order that lets bindings find both ends. `vhost_of`
        makes a vhost that is not among `hosts`."""
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
        """After loading, and before anybody declares anything: the end of what a crash cut off."""
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
            logger.info("the deletion of queue %r in vhost %r is finished", name, vhost)

    async def forget_gone(self) -> None:
        """What was settled of logs that are not there any more."""
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
        self, document: _QueueDocument, content: dict[str, Any], vhost_of: Callable[[str], "VirtualHost"]
    ) -> None:
        vhost, name = document.identity
        stream = self.streams.find(name, vhost)
        # Whoever deletes its stream as a topic may make another topic of that name: that is not the queue's.
        if document.leaving or stream is None or (document.owns_stream and stream.kind != "queue"):
            self._unfinished.append(document)
            return
        self._documents[vhost, name] = content
        host = vhost_of(vhost)
        arguments = loaded(document.arguments)
        policy = parse_arguments(f"queue '{name}'", arguments)
        host.queues[name] = self._make(host, name, policy, stream, document.auto_delete, arguments)


def _key(log_id: int) -> bytes:
    return log_id.to_bytes(8, "big")


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


def _load_binding(document: dict[str, Any], hosts: Mapping[str, "VirtualHost"]) -> None:
    host = hosts.get(document["vhost"])
    if host is None:
        return  # deleted: its bindings were to go with the next round
    found = host.queues if document["to"] == "queue" else host.routing.exchanges
    destination = found.get(document["destination"])
    exchange = host.routing.exchanges.get(document["source"])
    if destination is not None and exchange is not None:
        binding = Binding(exchange.name, destination, document["key"], loaded(document["arguments"]))
        host.routing.bind(exchange, binding)
