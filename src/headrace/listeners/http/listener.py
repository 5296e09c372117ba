"""Starts and stops the HTTP listener in the running event loop."""

import asyncio
from collections.abc import Collection
from email.utils import formatdate
from typing import cast

from uvicorn.server import ServerState

from headrace.broker.broker import Broker
from headrace.config import Address, Config
from headrace.listeners.common.backpressure import Buffered, Buffers
from headrace.listeners.common.per_source_limit import PerSourceLimit
from headrace.listeners.common.sockets import ListeningSockets, listen
from headrace.listeners.common.tls.accept import TlsAcceptor
from headrace.listeners.common.tls.certificate import Tls
from headrace.listeners.http.server.app import App
from headrace.listeners.http.server.bounded_protocol import (
    RESERVED,
    SWEEP_INTERVAL_S,
    BoundedHttp,
    ConnectionLimits,
    Timeouts,
    refusal,
    serve_config,
)
from headrace.listeners.http.server.context import HttpContext

FLAG = "--http"
NOT_TLS = "this port requires TLS: use https:// instead of http://"
HEADERS = [(b"x-content-type-options", b"nosniff"), (b"server", b"headrace")]


class HttpListener:
    """The running HTTP listener of a broker."""

    def __init__(
        self, context: HttpContext, sockets: ListeningSockets, state: ServerState, stop_timeout_s: float
    ) -> None:
        self.context = context
        self._sockets = sockets
        self._state = state
        self._stop_timeout_s = stop_timeout_s
        self._last_sweep = asyncio.get_running_loop().time()
        self._was_delayed = False
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="http sweeper")

    @property
    def addresses(self) -> list[str]:
        return self._sockets.addresses

    @property
    def port(self) -> int:
        return self._sockets.port

    def describe(self, addresses: dict[str, list[str]]) -> None:
        """Sets the addresses of all listeners, for GET /status."""
        self.context.addresses = addresses

    async def _sweep(self) -> None:
        """Once a second: enforces the timeouts of all connections and sets the Date header."""
        loop = asyncio.get_running_loop()
        while True:
            self._check_timeouts(loop.time())
            self.context.stats.connections = len(self._state.connections)
            self._state.default_headers = [(b"date", formatdate(usegmt=True).encode()), *HEADERS]
            await asyncio.sleep(SWEEP_INTERVAL_S)

    def _check_timeouts(self, now: float) -> None:
        """Skips one sweep after the broker itself was delayed (the process stopped, the machine suspended), since data
        that arrived meanwhile is still unread. Only one, so that a broker that is always late enforces timeouts."""
        was_delayed, self._was_delayed = self._was_delayed, now - self._last_sweep > 2 * SWEEP_INTERVAL_S
        self._last_sweep = now
        if self._was_delayed and not was_delayed:
            return
        for connection in list(self._state.connections):
            if isinstance(connection, BoundedHttp):
                connection.check(now)

    async def close(self) -> None:
        """Stops accepting, ends long polls and streams, gives other requests time to finish, then disconnects."""
        self._sockets.close()
        self.context.stop()
        for connection in list(self._state.connections):
            connection.shutdown()  # at once, or after the current response
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=self._stop_timeout_s)
        for connection in list(self._state.connections):
            if isinstance(connection, BoundedHttp) and connection.cycle is not None:
                connection.cycle.disconnected = True
        for task in list(self._state.tasks):
            task.cancel()
        await asyncio.sleep(0)  # lets the transports write what they have
        for connection in list(self._state.connections):
            connection.transport.close()
        self._sweeper.cancel()


async def start(
    broker: Broker, bind: Address, config: Config, *, tls: Tls | None = None, timeouts: Timeouts | None = None
) -> HttpListener:
    context = HttpContext(broker)
    uvicorn_config = serve_config(App(context))
    state = ServerState()
    stats, connections_max = context.stats, min(config.connections_max, broker.pressure.connections_max)
    limits = ConnectionLimits(connections_max, stats, {}, timeouts or Timeouts())
    sources: PerSourceLimit[BoundedHttp] = PerSourceLimit(lambda: connections_max)
    broker.pressure.add_holder(Buffers("http", cast(Collection[Buffered], state.connections)))

    def accept() -> BoundedHttp:
        stats.connections_total += 1
        return BoundedHttp(uvicorn_config, state, limits, sources)

    def connections_left() -> int:
        making_room = sum(one.is_silent for one in limits.reserve)
        return limits.connections_max + RESERVED + making_room - len(state.connections)

    acceptor = (
        None if tls is None else TlsAcceptor("HTTP", tls, stats, connections_left, refusal(400, "not_tls", NOT_TLS))
    )
    sockets = await listen(bind, accept, flag=FLAG, acceptor=acceptor)
    return HttpListener(context, sockets, state, config.stop_timeout_ms / 1000)
