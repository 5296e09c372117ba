"""Routing: from an exchange and routing keys to queues, through exchange bindings and alternate exchanges."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from headrace.broker.routing.exchanges import Arguments, Binding, Destination, Exchange
from headrace.broker.types.message import Message
from headrace.errors import ExchangeNotFound
from headrace.publish_counts import PublishCounts

ROUTES_CACHED_MAX = 10_000
Q = TypeVar("Q", bound=Destination)  # the vhost's type of queues


class Route(NamedTuple, Generic[Q]):
    queues: tuple[Q, ...]
    needs_headers: bool  # depends on the message: must be computed for each
    waits_in: tuple[Exchange, ...] = ()


class Routed(NamedTuple, Generic[Q]):
    queues: list[Q]
    waits_in: list[Exchange]  # delaying exchanges: the message continues from there when it is due


class Routing(Generic[Q]):
    """Exchanges and bindings of one vhost. `version` grows with every change that can affect a route."""

    def __init__(self, vhost: str) -> None:
        self.vhost = vhost
        self.version = 0
        self.exchanges: dict[str, Exchange] = {}
        self.bindings_count = 0
        self.counts = PublishCounts()  # confirms, and publishes to exchanges that were deleted
        self._to: dict[int, dict[tuple[str, str, str], Binding]] = {}
        self._cache: dict[tuple[str, str], Route[Q]] = {}

    def changed(self) -> None:
        self.version += 1
        self._cache.clear()

    def exchange(self, name: str) -> Exchange:
        found = self.exchanges.get(name)
        if found is None:
            raise ExchangeNotFound(self.vhost, name)
        return found

    def count_into(self, total: PublishCounts) -> None:
        """Add what was published to all exchanges."""
        total.add(self.counts)
        for exchange in self.exchanges.values():
            total.add(exchange.counts)

    # Bindings.

    def bind(self, exchange: Exchange, binding: Binding) -> bool:
        if not exchange.bind(binding):
            return False
        self.bindings_count += 1
        _, key, arguments = binding.identity
        self._to.setdefault(id(binding.destination), {})[exchange.name, key, arguments] = binding
        self.changed()
        return True

    def has(self, exchange: Exchange, binding: Binding) -> bool:
        _, key, arguments = binding.identity
        return (exchange.name, key, arguments) in self._to.get(id(binding.destination), {})

    def unbind(self, exchange: Exchange, binding: Binding) -> Binding | None:
        found = exchange.unbind(binding.identity)
        if found is not None:
            self.bindings_count -= 1
            there = self._to[id(found.destination)]
            _, key, arguments = found.identity
            del there[exchange.name, key, arguments]
            if not there:
                del self._to[id(found.destination)]
            self.changed()
        return found

    def bindings_to(self, destination: Destination) -> list[Binding]:
        return list(self._to.get(id(destination), {}).values())

    def drop_destination(self, destination: Destination) -> list[Binding]:
        """Remove all bindings to a destination that is being deleted; returns them."""
        gone = self.bindings_to(destination)
        for binding in gone:
            self.unbind(self.exchanges[binding.source], binding)
        return gone

    # Routes.

    def route(self, exchange: Exchange, key: str, queues: Mapping[str, Q]) -> Route[Q]:
        """The route of a routing key, cached. If it needs the headers, use route_message."""
        where = exchange.name, key
        found = self._cache.get(where)
        if found is None:
            found = self._walk(exchange, (key,), None, queues)
            if len(self._cache) >= ROUTES_CACHED_MAX:
                self._cache.clear()
            self._cache[where] = found
        return found

    def route_message(
        self,
        exchange: Exchange,
        keys: Sequence[str],
        message: Message,
        queues: Mapping[str, Q],
        headers: Arguments | None = None,
        *,
        delays: bool = False,
    ) -> Routed[Q]:
        """The queues of one message with all its routing keys, each once. `headers`: those of the message, if they are
        decoded already. `delays`: stop at exchanges that delay it; see queues/delays.py."""
        headers = message.headers() if headers is None else headers
        route = self._walk(exchange, keys, headers, queues, message, delays=delays)
        return Routed(list(route.queues), list(route.waits_in))

    def _walk(
        self,
        first: Exchange,
        keys: Sequence[str],
        headers: Arguments | None,
        queues: Mapping[str, Q],
        message: Message | None = None,
        *,
        delays: bool = False,
    ) -> Route[Q]:
        """Follow all keys together: an alternate exchange is used only if none of them matches."""
        found: dict[int, Q] = {}
        waits_in: list[Exchange] = []
        seen = {first.name}
        waiting = [first]
        needs_headers = False
        while waiting:
            exchange = waiting.pop()
            needs_headers = needs_headers or exchange.needs_message
            if delays and exchange.delayed:
                waits_in.append(exchange)
                continue
            matched = False
            for destination in self._matches(exchange, keys, headers, queues, message):
                matched = True
                if not isinstance(destination, Exchange):
                    found[id(destination)] = destination  # type: ignore[assignment]
                elif destination.name not in seen:  # bindings may form a cycle
                    seen.add(destination.name)
                    waiting.append(destination)
            if not matched and exchange.alternate is not None and exchange.alternate not in seen:
                seen.add(exchange.alternate)
                alternate = self.exchanges.get(exchange.alternate)
                if alternate is not None:
                    waiting.append(alternate)
        return Route(tuple(found.values()), needs_headers, tuple(waits_in))

    @staticmethod
    def _matches(
        exchange: Exchange,
        keys: Sequence[str],
        headers: Arguments | None,
        queues: Mapping[str, Q],
        message: Message | None,
    ) -> Iterable[Destination]:
        if exchange.name == "":  # every queue is bound to the default exchange by its name
            return [queues[key] for key in keys if key in queues]
        return exchange.match_all(keys, headers, message)
