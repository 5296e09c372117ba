"""Authentication of HTTP requests.

While guest with its default password is the only user, routes outside /api need no credentials; they refuse requests of
other machines (protected mode) and requests that a page of another site may have sent. Otherwise every request needs
Basic credentials; local requests without any are guest's, as long as guest has its default password. See
docs/security.md.
"""

import base64
import binascii
import logging
import platform
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache

from starlette.types import Scope

from headrace.broker.access.permissions import Rights
from headrace.broker.access.protected_mode import REFUSED, ProtectedMode
from headrace.broker.access.users import GUEST, LOOPBACK_USERS, User, Users
from headrace.broker.types.vhost_names import DEFAULT
from headrace.errors import HeadraceError, Overloaded
from headrace.listeners.common.addresses import parse, source_of

logger = logging.getLogger("headrace.http")

# RabbitMQ's user tags; each set contains all tags that grant the same access.
ADMINISTRATOR = frozenset({"administrator"})
MONITORING = ADMINISTRATOR | {"monitoring"}
POLICYMAKER = ADMINISTRATOR | {"policymaker"}
MANAGEMENT = MONITORING | POLICYMAKER | {"management"}

KNOWN_MAX = 1_024  # verified credentials that are cached
FAILURES_FREE = 5  # failed logins of a source before it has to wait
WAIT_S_MIN, WAIT_S_MAX = 1.0, 60.0
FORGET_S = 900.0
SOURCES_MAX = 10_000
NAME_CHARACTERS_SHOWN = 80
PRIVATE_SUFFIXES = (".localhost", ".test", ".internal", ".localdomain")
FOREIGN_HOST = (
    "the Host header is a public name, which a malicious site could resolve to this machine: use localhost or an IP "
    "address, or create users, which may use any name"
)
FORWARDED = frozenset({b"x-forwarded-for", b"forwarded", b"x-real-ip"})


class NotAuthorised(HeadraceError):
    """The credentials are missing or wrong."""


class Forbidden(HeadraceError):
    """The user is known but lacks the permission."""


class TooManyFailures(Overloaded):
    """Too many failed logins from this source: its credentials are not checked for a while."""


class Caller:
    """The user of a request, with current tags and permissions; replaced when either changes."""

    __slots__ = ("_users", "name", "user")

    def __init__(self, users: Users, user: User) -> None:
        self._users, self.user, self.name = users, user, user.name

    def rights_in(self, vhost: str) -> Rights:
        """Forbidden for a vhost that the user has no permissions in."""
        rights = self._users.rights(self.name, vhost)
        if rights is None:
            raise self._forbidden(f"user {self.name!r} has no access to virtual host {vhost!r}")
        return rights

    def is_one_of(self, tags: frozenset[str]) -> bool:
        return not tags.isdisjoint(self.user.tags)

    def sees(self, vhost: str) -> bool:
        """Whether the caller may see the virtual host; users with the tag monitoring see all."""
        return self.is_one_of(MONITORING) or self._users.rights(self.name, vhost) is not None

    def must_see(self, vhost: str) -> None:
        if not self.is_one_of(MONITORING):
            self.rights_in(vhost)

    def must_be(self, tags: frozenset[str]) -> None:
        if not self.is_one_of(tags):
            wanted = " or ".join(sorted(tags))
            raise self._forbidden(f"this requires the tag {wanted}, which user {self.name!r} does not have")

    def configure(self, name: str, vhost: str = DEFAULT) -> None:
        if not self.rights_in(vhost).may_configure(name):
            raise self._refused("configure", name, vhost)

    def write(self, name: str, vhost: str = DEFAULT) -> None:
        if not self.rights_in(vhost).may_write(name):
            raise self._refused("write", name, vhost)

    def read(self, name: str, vhost: str = DEFAULT) -> None:
        if not self.rights_in(vhost).may_read(name):
            raise self._refused("read", name, vhost)

    def write_something(self) -> None:
        """For requests of writers that change no topic: any write permission is enough."""
        if not self.rights_in(DEFAULT).may_write_something:
            raise self._forbidden(f"user {self.name!r} has no write permission in virtual host {DEFAULT!r}")

    def claim_writer(self, owner: str) -> str:
        """The new owner of a writer in the sink ledger: this user, if it has no other owner. Forbidden for a writer of
        another user, whose later batches would be taken for duplicates and lost. Administrators may commit for any
        writer; the owner stays."""
        if owner in ("", self.name) or not self._users.has(owner):
            return self.name
        if not self.is_one_of(ADMINISTRATOR):
            raise self._forbidden(f"user {self.name!r} may not commit for a writer of user {owner!r}")
        return owner

    def write_key(self, exchange: str, routing_key: str, vhost: str) -> None:
        if not self.rights_in(vhost).may_write_topic(exchange, routing_key):
            raise self._refused("write", f"{exchange} with routing key {routing_key}", vhost)

    def read_key(self, exchange: str, routing_key: str, vhost: str) -> None:
        if not self.rights_in(vhost).may_read_topic(exchange, routing_key):
            raise self._refused("read", f"{exchange} with routing key {routing_key}", vhost)

    def _refused(self, right: str, name: str, vhost: str) -> Forbidden:
        return self._forbidden(f"user {self.name!r} has no {right} permission for {name!r} in virtual host {vhost!r}")

    def _forbidden(self, sentence: str) -> Forbidden:
        logger.warning("HTTP request refused: %s", sentence)
        return Forbidden(sentence)


class AnyUser(Caller):
    """The caller while authentication is off: everything is allowed."""

    __slots__ = ()

    def sees(self, vhost: str) -> bool:
        return True

    def must_see(self, vhost: str) -> None: ...

    def must_be(self, tags: frozenset[str]) -> None: ...

    def configure(self, name: str, vhost: str = DEFAULT) -> None: ...

    def write(self, name: str, vhost: str = DEFAULT) -> None: ...

    def read(self, name: str, vhost: str = DEFAULT) -> None: ...

    def write_something(self) -> None: ...

    def claim_writer(self, owner: str) -> str:
        return owner

    def write_key(self, exchange: str, routing_key: str, vhost: str) -> None: ...

    def read_key(self, exchange: str, routing_key: str, vhost: str) -> None: ...


class HttpGate:
    """Authenticates requests. Verified credentials are cached until users change."""

    def __init__(self, users: Users, protected_mode: ProtectedMode, monotonic: Callable[[], float]) -> None:
        self._users = users
        self._protected_mode = protected_mode
        self._failures = Failures(monotonic)
        self._known: dict[bytes, Caller] = {}
        self._guest: Caller | None = None
        self._version = -1
        self.any_user = AnyUser(users, User(name=GUEST))

    @property
    def is_open(self) -> bool:
        return self._users.is_open

    @property
    def version(self) -> int:
        """Changes with users and permissions; long responses then check their permission again."""
        return self._users.version

    def guest(self) -> Caller | None:
        """The caller of a local request without credentials, if guest has its default password."""
        if self._version != self._users.version:
            self._version = self._users.version
            self._known.clear()
            self._guest = Caller(self._users, self._users.user(GUEST)) if self._users.guest_is_default else None
        return self._guest

    def anonymous(self, scope: Scope) -> Caller:
        """The caller while authentication is off. Forbidden for a client on another machine in protected mode, and if a
        page of another site may have sent the request by DNS rebinding."""
        client, host_header, is_forwarded = scope.get("client"), b"", False
        for name, value in scope["headers"]:
            if name == b"host":
                host_header = value
            elif name in FORWARDED:
                is_forwarded = True
        is_local = is_loopback(client[0] if client else None)
        # Behind a local proxy all requests seem local; those with forwarding headers are not.
        if self._protected_mode.refuses_remote_clients and (is_forwarded or not is_local):
            self._protected_mode.log_refusal(client[0] if client else None)
            raise Forbidden(REFUSED)
        if is_local and not is_local_name(host_header):
            logger.warning("HTTP request refused: the Host header is %r", host_header[:NAME_CHARACTERS_SHOWN])
            raise Forbidden(FOREIGN_HOST)
        return self.any_user

    def caller(self, scope: Scope) -> Caller:
        """NotAuthorised without valid credentials, TooManyFailures after too many failed logins."""
        guest = self.guest()
        given, host_header, forwarded = None, b"", {}
        for name, value in scope["headers"]:
            if name == b"authorization":
                given = value
            elif name == b"host":
                host_header = value
            elif name in FORWARDED:
                forwarded[name] = value
        client = scope.get("client")
        host = client[0] if client else None
        # Behind a local proxy all requests seem local; those with forwarding headers are not.
        local = not forwarded and is_loopback(host)
        # Pages of other sites know the default password, too.
        could_be_guest = guest is not None and local and is_local_name(host_header)
        if given is None:
            if guest is None or not could_be_guest:
                raise NotAuthorised("Login failed")
            return guest
        found = self._known.get(given)
        if found is None:
            # Behind a local proxy, count failures by forwarded address: one attacker must not lock out all clients.
            source = address_passed_on(forwarded) if is_loopback(host) else None
            found = self._log_in(given, source_of(source or host))
        if local:
            is_allowed = guest is None or could_be_guest or found.user.name not in LOOPBACK_USERS
        else:
            is_allowed = self._protected_mode.may_connect_remotely(found.user)
        if not is_allowed:
            raise NotAuthorised("User can only log in via localhost")
        return found

    def _log_in(self, given: bytes, source: str) -> Caller:
        self._failures.check(source)
        name, password = credentials_of(given)
        user = self._users.authenticate(name, password)
        if user is None:
            self._failures.count(source)
            logger.warning("HTTP login failed for user %r from %s", name[:NAME_CHARACTERS_SHOWN], source)
            raise NotAuthorised("Login failed")
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        found = self._known[given] = Caller(self._users, user)
        return found


def credentials_of(given: bytes) -> tuple[str, str]:
    """User name and password of a Basic header; empty strings, which match no user, if it is malformed."""
    scheme, _, encoded = given.partition(b" ")
    if scheme.lower() == b"basic":
        try:
            name, _, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
            # A password is bytes, as in AMQP: surrogate escapes keep those that are not UTF-8.
            return name.decode("utf-8", "replace"), password.decode("utf-8", "surrogateescape")
        except binascii.Error:
            pass
    return "", ""


class Failures:
    """Failed logins by source. Each failure makes the source wait longer, and no other."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._sources: OrderedDict[str, tuple[int, float]] = OrderedDict()  # count and time of the last

    def check(self, source: str) -> None:
        count, last = self._sources.get(source, (0, 0.0))
        if count < FAILURES_FREE:
            return
        waited = self._monotonic() - last
        left = min(WAIT_S_MAX, WAIT_S_MIN * 2.0 ** min(count - FAILURES_FREE, 16)) - waited
        if left > 0:
            raise TooManyFailures("too many failed logins from this address; try again later", left)

    def count(self, source: str) -> None:
        now = self._monotonic()
        count, last = self._sources.pop(source, (0, now))
        self._sources[source] = (1 if now - last > FORGET_S else count + 1, now)
        while len(self._sources) > SOURCES_MAX:
            self._sources.popitem(last=False)


def address_passed_on(forwarded: Mapping[bytes, bytes]) -> str | None:
    """Last address of X-Forwarded-For, or else X-Real-IP: a proxy appends to the first but may pass on the second."""
    value = forwarded.get(b"x-forwarded-for") or forwarded.get(b"x-real-ip") or b""
    last = value.decode("latin-1").rpartition(",")[2].strip()
    return last if parse(last) is not None else None


@lru_cache(maxsize=4_096)
def is_loopback(host: str | None) -> bool:
    if not host:
        return True
    address = parse(host)
    return address is not None and address.is_loopback


@lru_cache(maxsize=1_024)
def is_local_name(host_header: bytes) -> bool:
    """Whether the Host header can only mean this machine or one in its network.

    A malicious site can resolve its own name to this machine (DNS rebinding), and the browser then treats the broker as
    part of that site. It cannot own an IP address, a name without a dot, a private suffix, or this machine's name.
    """
    host = host_header.decode("latin-1").lower()
    name = host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]
    if parse(name) is not None:
        return True
    name = name.rstrip(".")
    return "." not in name or name.endswith(PRIVATE_SUFFIXES) or name == platform.node().lower()
