"""From exchange and routing key to queues: through exchanges bound to exchanges, and alternate ones."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from headrace.broker.routing.exchanges import Arguments, Binding, ConsistentHash, Destination, Exchange
from headrace.broker.types.message import Message
from headrace.errors import ExchangeNotFound

if TYPE_CHECKING:
    from headrace.broker.queues.queue import Queue

ROUTES_CACHED_MAX = 10_000


class Route(NamedTuple):
    queues: tuple["Queue", ...]
    needs_headers: bool  # asks the message, so the route holds for this one only
    waits_in: tuple[Exchange, ...] = ()


class Routed(NamedTuple):
    queues: list["Queue"]
    waits_in: list[Exchange]  # exchanges that it came to and that delay it: it goes on from there later


class Routing:
    """Exchanges and bindings of one vhost. `version` grows with every change that can move a message."""

    def __init__(self, vhost: str) -> None:
        self.vhost = vhost
        self.version = 0
        self.exchanges: dict[str, Exchange] = {}
        self.bindings_count = 0
        self._to: dict[int, dict[tuple[str, str, str], Binding]] = {}
        self._cache: dict[tuple[str, str], Route] = {}

    def changed(self) -> None:
        self.version += 1
        self._cache.clear()

    def exchange(self, name: str) -> Exchange:
        found = self.exchanges.get(name)
        if found is None:
            raise ExchangeNotFound(self.vhost, name)
        return found

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
        """Removes every binding to something that is going away; returns them."""
        gone = self.bindings_to(destination)
        for binding in gone:
            self.unbind(self.exchanges[binding.source], binding)
        return gone

    # Routes.

    def route(self, exchange: Exchange, key: str, queues: dict[str, "Queue"]) -> Route:
        """Where a key leads, remembered until something changes. Without headers: see route_message."""
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
        queues: dict[str, "Queue"],
        headers: Arguments | None = None,
        *,
        delays: bool = False,
    ) -> Routed:
        """Where one message goes, to each once, whatever its number of keys (CC, BCC). `headers`: its own, where they
        are known. `delays`: it waits where it comes to an exchange that delays; see delays.py."""
        headers = message.headers() if headers is None else headers
        route = self._walk(exchange, keys, headers, queues, message, delays=delays)
        return Routed(list(route.queues), list(route.waits_in))

    def _walk(
        self,
        first: Exchange,
        keys: Sequence[str],
        headers: Arguments | None,
        queues: dict[str, "Queue"],
        message: Message | None = None,
        *,
        delays: bool = False,
    ) -> Route:
        """All keys together: an alternate exchange is for what none of them leads anywhere."""
        found: dict[int, Queue] = {}
        waits_in: list[Exchange] = []
        seen = {first.name}
        waiting = [first]
        needs_headers = False
        while waiting:
            exchange = waiting.pop()
            needs_headers = (
                needs_headers
                or exchange.needs_headers
                or exchange.delayed
                or (isinstance(exchange, ConsistentHash) and exchange.hashes_headers)
            )
            if delays and exchange.delayed:
                waits_in.append(exchange)
                continue
            matched = False
            for destination in self._matches(exchange, keys, headers, queues, message):
                matched = True
                if not isinstance(destination, Exchange):
                    found[id(destination)] = destination  # type: ignore[assignment]
                elif destination.name not in seen:  # bindings may go in a circle
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
        queues: dict[str, "Queue"],
        message: Message | None,
    ) -> Iterable[Destination]:
        if exchange.name == "":  # every queue is bound to the default exchange by its name
            return [queues[key] for key in keys if key in queues]
        if exchange.hash_property:
            keys = (message.hashable(str(exchange.hash_property)) if message is not None else "",)
        elif isinstance(exchange, ConsistentHash):
            keys = keys[:1]  # one message has one place on the ring
        return chain.from_iterable(exchange.match(key, headers) for key in keys)
