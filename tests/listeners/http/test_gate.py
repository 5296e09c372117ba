"""HttpGate on its own: users, addresses, and limits on failed logins."""

import base64
import platform
from typing import Any

import pytest

from headrace.broker.access.protected_mode import ProtectedMode
from headrace.broker.access.users import GUEST, User, Users
from headrace.listeners.common.addresses import source_of
from headrace.listeners.http.server.authentication import (
    FAILURES_FREE,
    FORGET_S,
    KNOWN_MAX,
    SOURCES_MAX,
    WAIT_S_MAX,
    Failures,
    Forbidden,
    HttpGate,
    NotAuthorised,
    TooManyFailures,
    is_local_name,
    is_loopback,
)

PASSWORD = "no-password-of-anybody-else"


def test_the_delay_after_failed_logins_grows_up_to_a_limit_per_source() -> None:
    now = [0.0]
    failures = Failures(lambda: now[0])
    waits = []
    for _ in range(FAILURES_FREE + 12):
        failures.check("a")
        failures.count("a")
        try:
            failures.check("a")
        except TooManyFailures as refusal:
            waits.append(refusal.retry_after_s)
            now[0] += refusal.retry_after_s
    assert waits[:4] == [1.0, 2.0, 4.0, 8.0] and waits[-1] == WAIT_S_MAX
    failures.count("a")
    failures.check("b")
    now[0] += FORGET_S + 1
    failures.count("a")
    failures.check("a")
    for number in range(SOURCES_MAX + 10):
        failures.count(f"source {number}")
    assert len(failures._sources) == SOURCES_MAX


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("localhost:15672", True),
        ("127.0.0.1:15672", True),
        ("[::1]:15672", True),
        ("broker:15672", True),
        ("my.localhost", True),
        ("rebound.example.com:15672", False),
        ("127.0.0.1.example.com", False),
        ("EXAMPLE.COM.", False),
        ("localhost.example.com", False),
    ],
)
def test_dns_rebinding_does_not_give_a_site_the_permissions_of_guest(host: str, is_ours: bool) -> None:
    """DNS rebinding: a local browser sends the request and treats the response as part of another site."""
    users = Counting(GUEST)
    gate = gate_of(users)
    users.guest_has_first_password = True
    if is_ours:
        assert gate.caller(scope_of("127.0.0.1", host=host)).name == GUEST
    else:
        with pytest.raises(NotAuthorised):
            gate.caller(scope_of("127.0.0.1", host=host))
    login = scope_of("127.0.0.1", f"guest:{PASSWORD}", host=host)
    if is_ours:
        assert gate.caller(login).name == GUEST
    else:
        with pytest.raises(NotAuthorised):  # the default password is public
            gate.caller(login)
    users.guest_has_first_password, users.version = False, 2
    assert gate.caller(login).name == GUEST, "a login with its own password is that user"


@pytest.mark.parametrize(
    ("client", "host", "is_let_in"),
    [
        ("127.0.0.1", "localhost:15672", True),
        ("::1", "[::1]:15672", True),
        ("127.0.0.1", "rebound.example.com:15672", False),
        ("::ffff:127.0.0.1", "rebound.example.com", False),
        ("203.0.113.7", "broker.example.com:15672", True),  # it listens on the network, where it has a name
    ],
)
def test_dns_rebinding_is_refused_while_authentication_is_off(client: str, host: str, is_let_in: bool) -> None:
    gate = gate_of(Counting(GUEST))
    if is_let_in:
        assert gate.anonymous(scope_of(client, host=host)) is gate.any_user
    else:
        with pytest.raises(Forbidden):
            gate.anonymous(scope_of(client, host=host))


def test_the_host_name_of_this_machine_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "Box.example.com")
    is_local_name.cache_clear()
    try:
        assert is_local_name(b"box.example.com:15672")
        assert not is_local_name(b"example.com") and not is_local_name(b"a.box.example.com")
    finally:
        is_local_name.cache_clear()


def test_a_source_is_an_ipv4_address_or_an_ipv6_network() -> None:
    assert source_of("203.0.113.7") == source_of("::ffff:203.0.113.7") == "203.0.113.7"
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff") != source_of("2001:db8:0:1::1")
    assert is_loopback("127.8.8.8") and is_loopback("::1") and is_loopback("::ffff:127.0.0.1")
    assert not is_loopback("203.0.113.7") and not is_loopback("localhost.example")


class Counting(Users):
    """Stands in for Users and counts how often passwords are verified."""

    def __init__(self, *names: str) -> None:
        self._users = {name: User(name=name) for name in names}
        self.version, self.looks, self.is_open = 1, 0, False
        self.guest_has_first_password = False

    @property
    def guest_is_default(self) -> bool:
        return self.guest_has_first_password

    def authenticate(self, name: str, password: str) -> User | None:
        self.looks += 1
        return self._users.get(name) if password == PASSWORD else None


def gate_of(users: Users, *, protected: bool = True) -> HttpGate:
    return HttpGate(users, ProtectedMode(users, is_enabled=protected), lambda: 0.0)


def scope_of(client: str, credentials: str | None = None, **headers: str) -> dict[str, Any]:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    if credentials is not None:
        pairs.append((b"authorization", b"Basic " + base64.b64encode(credentials.encode())))
    return {"headers": pairs, "client": (client, 1)}


@pytest.fixture
def counted() -> tuple[Counting, HttpGate]:
    users = Counting("bill")
    return users, gate_of(users)


def test_a_password_is_verified_once_until_users_change(counted: tuple[Counting, HttpGate]) -> None:
    users, gate = counted
    gate.caller(scope_of("203.0.113.7", f"bill:{PASSWORD}"))
    before = users.looks
    for _ in range(5):
        assert gate.caller(scope_of("203.0.113.7", f"bill:{PASSWORD}")).name == "bill"
    assert users.looks == before
    users.version += 1
    gate.caller(scope_of("203.0.113.7", f"bill:{PASSWORD}"))
    assert users.looks > before


def test_the_cache_of_verified_credentials_is_bounded(counted: tuple[Counting, HttpGate]) -> None:
    _, gate = counted
    encoded = base64.b64encode(f"bill:{PASSWORD}".encode())
    for spaces in range(KNOWN_MAX + 10):
        header = b"Basic " + b" " * spaces + encoded
        assert gate.caller({"headers": [(b"authorization", header)], "client": ("203.0.113.7", 1)}).name == "bill"
    assert len(gate._known) <= KNOWN_MAX


def test_guest_may_only_log_in_locally_and_not_through_a_local_proxy() -> None:
    users = Counting(GUEST)
    gate = gate_of(users)
    assert gate.caller(scope_of("127.0.0.1", f"guest:{PASSWORD}")).name == GUEST
    with pytest.raises(NotAuthorised, match="localhost"):
        gate.caller(scope_of("203.0.113.7", f"guest:{PASSWORD}"))
    with pytest.raises(NotAuthorised, match="localhost"):
        gate.caller(scope_of("127.0.0.1", f"guest:{PASSWORD}", **{"x-forwarded-for": "203.0.113.7"}))


@pytest.mark.parametrize("header", ["x-forwarded-for", "x-real-ip"])
def test_failed_logins_through_a_local_proxy_count_per_forwarded_address(
    counted: tuple[Counting, HttpGate], header: str
) -> None:
    _, gate = counted

    def come(login: str, address: str) -> str:
        return gate.caller(scope_of("127.0.0.1", login, **{header: address})).name

    guesser = "203.0.113.7" if header == "x-real-ip" else "198.51.100.1, 203.0.113.7"  # the forged and the real address
    for _ in range(FAILURES_FREE):
        with pytest.raises(NotAuthorised):
            come("bill:wrong", guesser)
    with pytest.raises(TooManyFailures):
        come(f"bill:{PASSWORD}", guesser)
    assert come(f"bill:{PASSWORD}", "198.51.100.1") == "bill"


def test_forwarded_addresses_added_by_the_client_are_ignored(counted: tuple[Counting, HttpGate]) -> None:
    _, gate = counted
    for number in range(FAILURES_FREE + 1):
        claimed = {"x-forwarded-for": "203.0.113.7", "x-real-ip": f"198.51.100.{number}"}
        with pytest.raises(NotAuthorised if number < FAILURES_FREE else TooManyFailures):
            gate.caller(scope_of("127.0.0.1", "bill:wrong", **claimed))


def test_forwarding_headers_of_remote_proxies_are_ignored(counted: tuple[Counting, HttpGate]) -> None:
    _, gate = counted
    for number in range(FAILURES_FREE):
        with pytest.raises(NotAuthorised):
            gate.caller(scope_of("203.0.113.7", "bill:wrong", **{"x-forwarded-for": f"198.51.100.{number}"}))
    with pytest.raises(TooManyFailures):
        gate.caller(scope_of("203.0.113.7", f"bill:{PASSWORD}", **{"x-forwarded-for": "198.51.100.99"}))


@pytest.mark.parametrize("header", ["Basic", "Basic ???", "Bearer abc", "basic /w==", "Basic " + "A" * 8000])
def test_malformed_credentials_are_refused_like_wrong_ones(counted: tuple[Counting, HttpGate], header: str) -> None:
    users, gate = counted
    gate.guest()
    before = users.looks
    with pytest.raises(NotAuthorised):
        gate.caller({"headers": [(b"authorization", header.encode())], "client": ("203.0.113.7", 1)})
    assert users.looks == before + 1, "the same work for everybody"


def test_protected_mode_refuses_remote_and_forwarded_requests_while_guest_is_the_only_user() -> None:
    users = Counting(GUEST)
    users.is_open = users.guest_has_first_password = True
    gate = gate_of(users)
    for scope in (scope_of("203.0.113.7"), scope_of("127.0.0.1", **{"x-forwarded-for": "203.0.113.7"})):
        with pytest.raises(Forbidden, match="protected mode"):
            gate.anonymous(scope)
    assert gate.anonymous(scope_of("127.0.0.1", host="localhost")) is gate.any_user
    assert gate_of(users, protected=False).anonymous(scope_of("203.0.113.7")).name == GUEST


def test_guest_may_log_in_remotely_only_without_protected_mode_and_not_beside_other_users() -> None:
    users = Counting(GUEST)
    login = scope_of("203.0.113.7", f"guest:{PASSWORD}")
    users.is_open = users.guest_has_first_password = True
    assert gate_of(users, protected=False).caller(login).name == GUEST
    with pytest.raises(NotAuthorised, match="localhost"):
        gate_of(users).caller(login)
    users.is_open = False
    with pytest.raises(NotAuthorised, match="localhost"):
        gate_of(users, protected=False).caller(login)
    users.guest_has_first_password = False
    assert gate_of(users, protected=False).caller(login).name == GUEST
