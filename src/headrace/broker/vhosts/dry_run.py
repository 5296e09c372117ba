"""Dry run of an import: every declaration goes through the same checks as the real one, and nothing is changed.

Each is checked against what exists and against the declarations before it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from headrace.broker.queues.queue import Queue
from headrace.broker.routing.exchanges import Binding, Exchange, canonical
from headrace.broker.streams.defaults import Change
from headrace.broker.streams.streams import DEFAULT_VHOST, Streams
from headrace.broker.vhosts.declarations import (
    TOPIC,
    ExchangeDeclared,
    QueueDeclared,
    check_length,
    check_not_reserved,
    place,
    server_name,
)
from headrace.broker.vhosts.settings import VhostMetadata
from headrace.broker.vhosts.vhosts import VirtualHosts
from headrace.errors import HeadraceError, InvalidInput

PLACE_CHARACTERS_MAX = 400


class DraftBinding(NamedTuple):
    source: str
    destination: str
    to_queue: bool
    key: str
    arguments: Mapping[str, Any]


@contextmanager
def _refusing(where: str) -> Iterator[None]:
    """Turns errors into InvalidInput with the place: a document may contain thousands of declarations."""
    try:
        yield
    except HeadraceError as error:
        text = str(error)
        raise InvalidInput(text if where in text else f"{where[:PLACE_CHARACTERS_MAX]}: {text}") from None


class _Host:
    """A vhost as it would be after the import."""

    def __init__(self, vhosts: VirtualHosts, name: str) -> None:
        existing = (host for host in vhosts if host.name == name and not host.is_leaving)
        self.known = next(existing, None) or vhosts.make(name)
        self.default_kind = self.known.metadata.default_queue_type
        self.exchanges: dict[str, Exchange] = {}
        self.queues: dict[str, QueueDeclared] = {}
        self.bindings: set[tuple[str, str, bool, str, str]] = set()


class DryRun:
    """Each method raises InvalidInput if the declaration would be refused, with the text of that refusal."""

    def __init__(self, vhosts: VirtualHosts, streams: Streams) -> None:
        self._vhosts = vhosts
        self._streams = streams
        self._hosts: dict[str, _Host] = {}
        self._topics: dict[str, int] = {}  # new topics, with their number of partitions

    def _host(self, name: str) -> _Host:
        if name not in self._hosts:
            self._hosts[name] = _Host(self._vhosts, name)
        return self._hosts[name]

    def vhost(self, name: str, metadata: VhostMetadata | None) -> None:
        if metadata is not None:
            self._host(name).default_kind = metadata.default_queue_type

    def topic(self, name: str, partitions: int, config: Change) -> None:
        if name in self._topics or self._streams.find(name) is not None:
            return
        with _refusing(f"topic '{name}'"):
            self._streams.check(name, partitions, config)
        self._topics[name] = partitions

    def exchange(self, vhost: str, name: str, declared: ExchangeDeclared) -> None:
        host = self._host(vhost)
        known = host.known.routing.exchanges.get(name)
        with _refusing(place("exchange", name, vhost)):
            exchange = declared.exchange(name, vhost, known or host.exchanges.get(name))
            if exchange is not known:
                host.known.delays.check(exchange)
                host.exchanges[name] = exchange

    def queue(self, vhost: str, name: str, declared: QueueDeclared) -> None:
        host = self._host(vhost)
        drafted = host.queues.get(name)
        declared = declared.typed(host.default_kind, drafted.kind if drafted is not None else host.known.kind_of(name))
        partitions = self._topics.get(name) if vhost == DEFAULT_VHOST else None
        if drafted is None and partitions == 1 and declared.kind == TOPIC.kind:
            drafted = TOPIC
        where = place("queue", name, vhost)
        with _refusing(where):
            if drafted is not None:
                declared.check_same(where, drafted)
                return
            existing = host.known.find_declared(name, declared.arguments)
            if existing is not None:
                host.known.check_declared(existing, declared, None)
                return
            check_not_reserved("queue", name)
            policy = declared.check(where)
            if declared.is_stored:
                stream = self._streams.find(name, vhost)
                partitions = partitions if stream is None else len(stream.partitions)
                host.known.store.check_stream(vhost, name or server_name(), policy, partitions)
            if name:  # a declaration without a name creates a queue of its own
                host.queues[name] = declared

    def binding(self, vhost: str, binding: DraftBinding) -> None:
        host = self._host(vhost)
        source, name, to_queue, key, arguments = binding
        with _refusing(f"binding of '{name}' to {place('exchange', source, vhost)}"):
            exchange = host.exchanges.get(source) or host.known.routing.exchange(source)
            destination: Queue | Exchange | None = None
            if to_queue and not self._is_drafted_queue(host, vhost, name):
                destination = host.known.queue(name)
            elif not to_queue and name not in host.exchanges:
                destination = host.known.routing.exchange(name)
            check_length("a routing key", key)
            exchange.check(key, arguments)
            if destination is not None and host.known.routing.has(
                exchange, Binding(source, destination, key, arguments)
            ):
                return
            host.bindings.add((source, name, to_queue, key, canonical(arguments)))
            host.known.topology.check_binding_room(len(host.bindings))

    def _is_drafted_queue(self, host: _Host, vhost: str, name: str) -> bool:
        return name in host.queues or (vhost == DEFAULT_VHOST and self._topics.get(name) == 1)
