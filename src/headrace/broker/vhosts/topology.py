"""The exchanges and bindings of a vhost: declared, deleted, bound and unbound."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from headrace.broker.queues.delays import Delays
from headrace.broker.queues.queue import Queue
from headrace.broker.routing.exchanges import Binding, Exchange, make_exchange
from headrace.broker.routing.router import Routing
from headrace.broker.vhosts.declarations import PREDECLARED, ExchangeDeclared, check_length
from headrace.broker.vhosts.store import QueueStore
from headrace.errors import AccessRefused, HeadraceError, InUse, LimitReached, VirtualHostNotFound

logger = logging.getLogger("headrace.broker")

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class ExchangePolicies(Protocol):
    def apply_to_exchange(self, vhost: str, exchange: Exchange) -> None: ...


class Topology:
    """Owned by one VirtualHost, which shares its lock: durable changes are made one at a time.

    `spawn` runs a deletion that the broker decided on by itself in the background.
    """

    def __init__(
        self,
        routing: Routing[Queue],
        store: QueueStore,
        delays: Delays[Queue],
        policies: ExchangePolicies,
        lock: asyncio.Lock,
        spawn: Spawn,
        *,
        bindings_max: int,
    ) -> None:
        self.vhost = routing.vhost
        self.is_leaving = False  # the vhost is being deleted: a new exchange would be left behind
        self._routing = routing
        self._store = store
        self._delays = delays
        self._policies = policies
        self._lock = lock
        self._spawn = spawn
        self._bindings_max = bindings_max
        self._storing: set[str] = set()  # exchanges being stored, and not in `routing` yet
        for name, kind in PREDECLARED.items():
            routing.exchanges[name] = make_exchange(name, kind, durable=True)

    # Exchanges.

    async def declare_exchange(self, name: str, declared: ExchangeDeclared) -> Exchange:
        exchanges = self._routing.exchanges
        found = exchanges.get(name)
        exchange = declared.exchange(name, self.vhost, found)
        if exchange is found:
            return found
        if not declared.durable and name not in self._storing:
            await self._create_exchange(exchange)
            return exchange
        async with self._lock:
            if self.is_leaving:
                raise VirtualHostNotFound(self.vhost)
            found = exchanges.get(name)  # may have been declared while this waited for the lock
            if found is not None:
                return declared.exchange(name, self.vhost, found)
            self._storing.add(name)
            try:
                await self._create_exchange(exchange)
            finally:
                self._storing.discard(name)
        return exchange

    async def _create_exchange(self, exchange: Exchange) -> None:
        if exchange.delayed:
            await self._delays.prepare(exchange)
        if exchange.durable:
            await self._store.put_exchange(self.vhost, exchange)
        self._routing.exchanges[exchange.name] = exchange
        self._policies.apply_to_exchange(self.vhost, exchange)
        self._routing.changed()

    async def delete_exchange(self, name: str, *, if_unused: bool = False) -> None:
        """Deleting an exchange that does not exist is not an error, as in RabbitMQ."""
        if name in PREDECLARED:
            raise AccessRefused(f"operation not permitted on the {'default ' if not name else ''}exchange '{name}'")
        exchanges = self._routing.exchanges
        found = exchanges.get(name)
        if found is None:
            return

        def check() -> None:
            if if_unused and found.bindings:
                raise InUse(f"exchange '{name}' in vhost '{self.vhost}' in use")

        check()
        if not found.durable:
            self._forget_exchange(found)
            await self._delays.forget(found)
            return
        async with self._lock:
            if exchanges.get(name) is not found:
                return  # deleted meanwhile, and perhaps declared again
            check()
            await self._store.remove_exchange(self.vhost, found)
            try:
                check()  # it may have been bound while the catalog was written
            except InUse:
                await self._store.put_exchange(self.vhost, found)
                raise
            self._forget_exchange(found)
            await self._delays.forget(found)  # within the lock: a new exchange of that name would use the same log

    async def _delete_unused_exchange(self, name: str) -> None:
        try:
            await self.delete_exchange(name, if_unused=True)
        except InUse:
            pass  # bound again in time
        except HeadraceError as error:
            logger.error("unused exchange %r in vhost %r cannot be deleted: %s", name, self.vhost, error)

    def _forget_exchange(self, exchange: Exchange) -> None:
        if self._routing.exchanges.pop(exchange.name, None) is None:
            return
        self._routing.counts.add(exchange.counts)
        gone = list(exchange.bindings.values())
        for binding in gone:
            self._routing.unbind(exchange, binding)
        to_it = self._routing.drop_destination(exchange)
        self._delete_unbound_sources(to_it)
        self._remove_bindings_soon([*gone, *to_it])
        self._routing.changed()

    # Bindings.

    async def bind(self, source: str, destination: Queue | Exchange, key: str, arguments: Mapping[str, Any]) -> None:
        exchange = self._bindable(source)
        check_length("a routing key", key)
        binding = Binding(source, destination, key, arguments)
        if not self._routing.has(exchange, binding):
            self.check_binding_room(1)
        is_new = self._routing.bind(exchange, binding)
        if (
            exchange.durable
            and destination.durable
            and not (isinstance(destination, Queue) and destination.exclusive)
            # An existing binding may not be stored: its write may be running, or may have failed.
            and (is_new or not self._store.has_binding(self.vhost, binding))
        ):
            await self._store.put_binding(self.vhost, binding)

    def check_binding_room(self, more: int) -> None:
        if self._routing.bindings_count + more > self._bindings_max:
            raise LimitReached(f"vhost '{self.vhost}' has at most {self._bindings_max:,} bindings")

    async def unbind(self, source: str, destination: Queue | Exchange, key: str, arguments: Mapping[str, Any]) -> None:
        exchange = self._bindable(source)
        binding = Binding(source, destination, key, arguments)
        gone = self._routing.unbind(exchange, binding)
        if gone is None and not self._store.has_binding(self.vhost, binding):
            return  # not an error, as in RabbitMQ since 3.2
        removed = self._store.remove_bindings(self.vhost, [binding])
        if removed is not None:
            await removed
        self._delete_unbound_sources([binding])

    def _bindable(self, name: str) -> Exchange:
        if name == "":
            raise AccessRefused("operation not permitted on the default exchange")
        return self._routing.exchange(name)

    def bindings_removed(self, gone: list[Binding]) -> None:
        """The destination of these bindings has been deleted."""
        self._remove_bindings_soon(gone)
        self._routing.changed()
        self._delete_unbound_sources(gone)

    def _remove_bindings_soon(self, gone: list[Binding]) -> None:
        """Removed with the next round. After a crash before that, loading drops bindings without a destination."""
        try:
            self._store.remove_bindings(self.vhost, gone)
        except HeadraceError as error:  # the broker is stopping, or the disk has failed
            logger.info("bindings in vhost %r will be removed by the next start: %s", self.vhost, error)

    def _delete_unbound_sources(self, gone: list[Binding]) -> None:
        """Delete auto-delete exchanges that these were the last bindings of."""
        for source in {binding.source for binding in gone}:
            exchange = self._routing.exchanges.get(source)
            if exchange is not None and exchange.auto_delete and not exchange.bindings:
                self._spawn(self._delete_unused_exchange(source))
