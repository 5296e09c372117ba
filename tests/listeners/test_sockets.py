"""Listening: both loopback addresses on one port, and one sentence when it cannot be."""

import asyncio
import errno
import socket

import pytest

from headrace.config import Address
from headrace.errors import CannotListen
from headrace.listeners.common import sockets as sockets_module
from headrace.listeners.common.sockets import bind, listen


def close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_localhost_is_both_loopback_addresses_on_one_port() -> None:
    sockets = bind(Address("localhost", 0), flag="--http")
    names = [sock.getsockname()[:2] for sock in sockets]
    close(sockets)
    assert len({port for _, port in names}) == 1
    assert [host for host, _ in names] == (["127.0.0.1", "::1"] if has_ipv6() else ["127.0.0.1"])


def test_a_machine_without_ipv6_has_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    really = sockets_module._bind_one

    def without(family: int, name: tuple[object, ...]) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return really(family, name)

    monkeypatch.setattr(sockets_module, "_bind_one", without)
    sockets = bind(Address("localhost", 0), flag="--http")
    assert [sock.getsockname()[0] for sock in sockets] == ["127.0.0.1"]
    close(sockets)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_free_port_is_free_in_both_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first port drawn is taken in IPv6 only: another one is drawn."""
    really = sockets_module._bind_one
    refused: list[object] = []

    def once(family: int, name: tuple[object, ...]) -> socket.socket:
        if family == socket.AF_INET6 and not refused:
            refused.append(name[1])
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return really(family, name)

    monkeypatch.setattr(sockets_module, "_bind_one", once)
    sockets = bind(Address("localhost", 0), flag="--http")
    assert len({sock.getsockname()[1] for sock in sockets}) == 1 and len(sockets) == 2
    close(sockets)


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="chosen for each socket on Linux only")
@pytest.mark.parametrize(("host", "is_system_choice"), [("localhost", False), ("127.0.0.1", False), ("0.0.0.0", True)])
def test_only_answers_that_stay_on_this_machine_are_not_paced(host: str, is_system_choice: bool) -> None:
    def chosen(sock: socket.socket) -> str:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()

    with socket.socket() as plain:
        default = chosen(plain)
    for listening in bind(Address(host, 0), flag="--http"):
        reach = listening.getsockname()[0].replace("0.0.0.0", "127.0.0.1")
        with listening, socket.create_connection((reach, listening.getsockname()[1])):
            listening.setblocking(True)
            accepted, _ = listening.accept()
            with accepted:
                assert chosen(accepted) == (default if is_system_choice else "reno")


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="chosen for each socket on Linux only")
def test_a_system_that_refuses_the_congestion_control_can_still_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An administrator can take reno off the list (net.ipv4.tcp_allowed_congestion_control), and not all call it so."""
    monkeypatch.setattr(socket, "TCP_CONGESTION", 9999)  # refused, as reno is there
    close(bind(Address("127.0.0.1", 0), flag="--http"))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_port_in_use_is_named_with_the_flag_that_changes_it(host: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen) as caught:
            bind(Address(host, port), flag="--http")
    assert str(port) in str(caught.value) and "--http" in str(caught.value)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(CannotListen, match="--kafka"):
        bind(Address(host, 0), flag="--kafka")


class Heard(asyncio.Protocol):
    """Says when its connection has ended: one that has not when the loop ends complains of itself."""

    def __init__(self, has_ended: asyncio.Event) -> None:
        self._has_ended = has_ended

    def connection_lost(self, error: Exception | None) -> None:
        self._has_ended.set()


async def test_a_listener_reports_its_address_and_stops() -> None:
    has_ended = asyncio.Event()
    opened = await listen(Address("localhost", 0), lambda: Heard(has_ended), flag="--http")
    assert all(address.endswith(f":{opened.port}") for address in opened.addresses)
    _, writer = await asyncio.open_connection("127.0.0.1", opened.port)
    writer.close()
    await writer.wait_closed()
    await has_ended.wait()
    opened.close()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", opened.port)
