"""Declarations tried out before any of them is made: what would be refused is, by those who will refuse it then.

Each is checked against what is there and against what was tried out before it. Nothing is changed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.broker.queues.queue import Queue
from headrace.broker.routing.exchanges import Binding, Exchange, canonical
from headrace.broker.streams.streams import DEFAULT_VHOST
from headrace.broker.vhosts.declarations import (
    TOPIC,
    ExchangeDeclared,
    QueueDeclared,
    check_length,
    check_not_reserved,
    place,
    server_name,
)
from headrace.broker.vhosts.metadata import Metadata
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import HeadraceError, InvalidInput

if TYPE_CHECKING:
    from headrace.broker.broker import Broker

PLACE_CHARACTERS_MAX = 400


class DraftBinding(NamedTuple):
    source: str
    destination: str
    to_queue: bool
    key: str
    arguments: Mapping[str, Any]


@contextmanager
def _refusing(where: str) -> Iterator[None]:
    """InvalidInput for whatever is raised inside: of a document of thousands of things it says which one it is."""
    try:
        yield
    except HeadraceError as error:
        said = str(error)
        raise InvalidInput(said if where in said else f"{where[:PLACE_CHARACTERS_MAX]}: {said}") from None


class _Host:
    """A vhost as it would be; one that is not there yet is as a new one is."""

    def __init__(self, broker: "Broker", name: str) -> None:
        there = (host for host in broker.vhosts if host.name == name and not host.is_leaving)
        self.known = next(there, None) or VirtualHost(broker, name, broker.vhosts.store)
        self.default_kind = self.known.metadata.default_queue_type
        self.exchanges: dict[str, Exchange] = {}
        self.queues: dict[str, QueueDeclared] = {}
        self.bindings: set[tuple[str, str, bool, str, str]] = set()


class DryRun:
    """InvalidInput from each of its methods for what could not be declared, in the words of who refuses it."""

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self._hosts: dict[str, _Host] = {}
        self._topics: dict[str, int] = {}  # and their partitions; those that there are not yet

    def _host(self, name: str) -> _Host:
        if name not in self._hosts:
            self._hosts[name] = _Host(self._broker, name)
        return self._hosts[name]

    def vhost(self, name: str, metadata: Metadata | None) -> None:
        if metadata is not None:
            self._host(name).default_kind = metadata.default_queue_type

    def topic(self, name: str, partitions: int, config: Mapping[str, Any]) -> None:
        if name in self._topics or self._broker.streams.find(name) is not None:
            return
        with _refusing(f"topic '{name}'"):
            self._broker.streams.check(name, partitions, config)
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
            met = host.known.met_by(name, declared.arguments)
            if met is not None:
                host.known.check_met(met, declared, None)
                return
            check_not_reserved("queue", name)
            policy = declared.check(where)
            if declared.is_stored:
                stream = self._broker.streams.find(name, vhost)
                partitions = partitions if stream is None else len(stream.partitions)
                host.known.store.check_stream(vhost, name or server_name(), policy, partitions)
            if name:  # without one, each is another queue
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
            host.known.check_binding_room(len(host.bindings))

    def _is_drafted_queue(self, host: _Host, vhost: str, name: str) -> bool:
        return name in host.queues or (vhost == DEFAULT_VHOST and self._topics.get(name) == 1)
