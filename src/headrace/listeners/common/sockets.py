"""Opens the listening sockets of a listener. `localhost` means both loopback addresses, with the same port."""

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from headrace.config import Address
from headrace.errors import CannotListen
from headrace.listeners.common.tls.accept import TlsAcceptor

BACKLOG = 1024
FREE_PORT_TRIES = 20
LOOPBACKS = ("127.0.0.1", "::1")
ABSENT = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.EINVAL}


class Listener(Protocol):
    """A started listener, as server.py sees it."""

    @property
    def addresses(self) -> Sequence[str]:
        """HOST:PORT of every socket, with the port that was assigned."""

    async def close(self) -> None:
        """Stops accepting, waits for work in progress and closes every connection."""


class Accepting(Protocol):
    """An asyncio.Server, or a TlsAcceptor."""

    def close(self) -> None: ...


class ListeningSockets:
    """The listening sockets of one listener."""

    def __init__(self, sockets: Sequence[socket.socket], servers: Sequence[Accepting]) -> None:
        self._servers = servers
        self.addresses: list[str] = [_address_text(*sock.getsockname()[:2]) for sock in sockets]
        self.port: int = sockets[0].getsockname()[1]

    def close(self) -> None:
        """Stops accepting. Accepted connections stay open."""
        for server in self._servers:
            server.close()


async def listen(
    address: Address,
    protocol_factory: Callable[[], asyncio.BaseProtocol],
    *,
    flag: str,
    backlog: int = BACKLOG,
    acceptor: TlsAcceptor | None = None,
) -> ListeningSockets:
    """Listens on all addresses of `address`. Raises CannotListen with a reason that names the flag.

    With a TLS acceptor, protocols are created when the handshake is done.
    """
    loop = asyncio.get_running_loop()
    sockets = bind(address, flag=flag)
    if acceptor is not None:
        listening = ListeningSockets(sockets, [acceptor])
        acceptor.open(sockets, protocol_factory)
        return listening
    servers = [await loop.create_server(protocol_factory, sock=sock, backlog=backlog) for sock in sockets]
    return ListeningSockets(sockets, servers)


def bind(address: Address, *, flag: str) -> list[socket.socket]:
    try:
        if address.host.lower() == "localhost":
            return _bind_loopbacks(address.port)
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return [_bind_one(found[0][0], found[0][4][:2])]
    except socket.gaierror:
        raise CannotListen(f"{address.host!r} is not a host name or address of this machine ({flag})") from None
    except OSError as error:
        raise CannotListen(_reason(address, error, flag)) from None


def _bind_loopbacks(port: int) -> list[socket.socket]:
    for attempt in range(FREE_PORT_TRIES):
        first = _bind_one(socket.AF_INET, (LOOPBACKS[0], port))
        try:
            return [first, _bind_one(socket.AF_INET6, (LOOPBACKS[1], first.getsockname()[1]))]
        except OSError as error:
            if error.errno in ABSENT:  # a machine without IPv6
                return [first]
            first.close()
            # A port that is free for IPv4 may be in use for IPv6: try another one.
            if port != 0 or error.errno != errno.EADDRINUSE or attempt == FREE_PORT_TRIES - 1:
                raise
    raise AssertionError("unreachable")


def _bind_one(family: int, name: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by accepted connections: detects peers that disappeared without closing.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if name[0] == "::" else 1)
        if ipaddress.ip_address(str(name[0])).is_loopback:
            _disable_pacing(sock)
        sock.bind(name)
        # With SO_REUSEADDR, Linux refuses a second listening socket at listen(), not at bind().
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _disable_pacing(sock: socket.socket) -> None:
    """Uses reno for connections within this machine; accepted connections inherit it. BBR, the default of many systems,
    paces its packets with a timer, which is a third of the cost of a large response, and there is no network to
    protect. All other connections use the system's choice.
    """
    if hasattr(socket, "TCP_CONGESTION"):
        with suppress(OSError):  # Linux may not allow it, and other systems have another name for it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _reason(address: Address, error: OSError, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {address.port} on {address.host} is in use by another program; choose another with {flag}"
    if error.errno == errno.EACCES:
        return f"no permission to listen on port {address.port}; choose a port above 1023 with {flag}"
    if error.errno in ABSENT:
        return f"{address.host} is not an address of this machine; choose another with {flag}"
    return f"cannot listen on {address}: {os.strerror(error.errno or 0)} ({flag})"


def _address_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
