"""Who is asking: the one place where this listener decides it.

As long as guest with the password that everybody knows is the only user, the routes outside /api ask nobody, and only
refuse what a page of another site may have sent. From then on every request says who sends it, by Basic credentials. A
request from this machine without any is guest, as long as guest has its first password. See docs/security.md.
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
from headrace.broker.access.users import GUEST, User, Users
from headrace.broker.types.vhost_names import DEFAULT
from headrace.errors import HeadraceError, Overloaded
from headrace.listeners.common.addresses import parse, source_of

logger = logging.getLogger("headrace.http")

# RabbitMQ's tags, and who else has what each of them gives.
ADMINISTRATOR = frozenset({"administrator"})
MONITORING = ADMINISTRATOR | {"monitoring"}
POLICYMAKER = ADMINISTRATOR | {"policymaker"}
MANAGEMENT = MONITORING | POLICYMAKER | {"management"}

KNOWN_MAX = 1_024  # credentials that are remembered as good
FAILURES_FREE = 5  # wrong credentials from one source before it has to wait
WAIT_S_MIN, WAIT_S_MAX = 1.0, 60.0
FORGET_S = 900.0
SOURCES_MAX = 10_000
NAME_CHARACTERS_SHOWN = 80
OURS_ALONE = (".localhost", ".test", ".internal", ".localdomain")
STRANGE_NAME = (
    "any site may have its name lead to this machine: say localhost or an address, or make users, who come by any name"
)
FORWARDED = frozenset({b"x-forwarded-for", b"forwarded", b"x-real-ip"})


class NotAuthorised(HeadraceError):
    """Nobody we know."""


class Forbidden(HeadraceError):
    """Somebody we know, who may not do this."""


class TooManyFailures(Overloaded):
    """The source has given wrong credentials too often; what it gives now is not looked at."""


class Caller:
    """Whoever asks, with the tags and rights of now: a change of either makes new ones."""

    __slots__ = ("_users", "name", "user")

    def __init__(self, users: Users, user: User) -> None:
        self._users, self.user, self.name = users, user, user.name

    def rights_in(self, vhost: str) -> Rights:
        """Forbidden for a vhost that the user has no permissions in."""
        rights = self._users.rights(self.name, vhost)
        if rights is None:
            raise self._forbidden(f"user {self.name!r} has no access to the virtual host {vhost!r}")
        return rights

    def is_one_of(self, tags: frozenset[str]) -> bool:
        return not tags.isdisjoint(self.user.tags)

    def sees(self, vhost: str) -> bool:
        """Whether what there is in the vhost may be shown. Monitors see everything."""
        return self.is_one_of(MONITORING) or self._users.rights(self.name, vhost) is not None

    def must_see(self, vhost: str) -> None:
        if not self.is_one_of(MONITORING):
            self.rights_in(vhost)

    def must_be(self, tags: frozenset[str]) -> None:
        if not self.is_one_of(tags):
            wanted = " or ".join(sorted(tags))
            raise self._forbidden(f"this is for users with the tag {wanted}; {self.name!r} has none of them")

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
        """For what changes nothing but is told by those who write."""
        if not self.rights_in(DEFAULT).may_write_something:
            raise self._forbidden(f"user {self.name!r} has no right to write in the virtual host {DEFAULT!r}")

    def claim_writer(self, owner: str) -> str:
        """Whose a writer of the ledger is from now on, if it was this user's or nobody's so far. Forbidden for what is
        another's: batches that somebody else counts on would be taken for repeats, and lost. Administrators may, and
        it stays whose it was."""
        if owner in ("", self.name) or not self._users.has(owner):
            return self.name
        if not self.is_one_of(ADMINISTRATOR):
            raise self._forbidden(f"user {self.name!r} may not commit for a writer of the user {owner!r}")
        return owner

    def write_key(self, exchange: str, routing_key: str, vhost: str) -> None:
        if not self.rights_in(vhost).may_write_topic(exchange, routing_key):
            raise self._refused("write", f"{exchange} with the routing key {routing_key}", vhost)

    def read_key(self, exchange: str, routing_key: str, vhost: str) -> None:
        if not self.rights_in(vhost).may_read_topic(exchange, routing_key):
            raise self._refused("read", f"{exchange} with the routing key {routing_key}", vhost)

    def _refused(self, right: str, name: str, vhost: str) -> Forbidden:
        return self._forbidden(f"user {self.name!r} has no right to {right} {name!r} in the virtual host {vhost!r}")

    def _forbidden(self, sentence: str) -> Forbidden:
        logger.warning("refused over HTTP: %s", sentence)
        return Forbidden(sentence)


class AnyUser(Caller):
    """Whoever comes while the listener is open: nobody was asked, so nothing is refused."""

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
    """Knows callers by what they send. Credentials that were good are not checked again until users change."""

    def __init__(self, users: Users, monotonic: Callable[[], float]) -> None:
        self._users = users
        self._failures = Failures(monotonic)
        self._known: dict[bytes, Caller] = {}
        self._guest: Caller | None = None
        self._version = -1
        self.anybody = AnyUser(users, User(name=GUEST))

    @property
    def is_open(self) -> bool:
        return self._users.is_open

    @property
    def version(self) -> int:
        """Whoever was let in by another one asks again."""
        return self._users.version

    def guest(self) -> Caller | None:
        """Whom a request without credentials is from, on this machine."""
        if self._version != self._users.version:
            self._version = self._users.version
            self._known.clear()
            self._guest = Caller(self._users, self._users.user(GUEST)) if self._users.guest_is_default else None
        return self._guest

    def whoever(self, scope: Scope) -> Caller:
        """While the listener is open. Forbidden for what may come from a page that took us for a part of its own
        site."""
        client, asked_for = scope.get("client"), b""
        for name, value in scope["headers"]:
            if name == b"host":
                asked_for = value
        if is_loopback(client[0] if client else None) and not could_be_this_machine(asked_for):
            logger.warning("refused over HTTP: somebody called us %r", asked_for[:NAME_CHARACTERS_SHOWN])
            raise Forbidden(STRANGE_NAME)
        return self.anybody

    def caller(self, scope: Scope) -> Caller:
        """NotAuthorised for a stranger, TooManyFailures for one who has guessed too often."""
        guest = self.guest()
        given, asked_for, forwarded = None, b"", {}
        for name, value in scope["headers"]:
            if name == b"authorization":
                given = value
            elif name == b"host":
                asked_for = value
            elif name in FORWARDED:
                forwarded[name] = value
        client = scope.get("client")
        host = client[0] if client else None
        # Behind a proxy on this machine everybody seems to be here: who was passed on is not.
        local = not forwarded and is_loopback(host)
        # The password that everybody knows is known to pages of other sites, too.
        could_be_guest = guest is not None and local and could_be_this_machine(asked_for)
        if given is None:
            if guest is None or not could_be_guest:
                raise NotAuthorised("Login failed")
            return guest
        found = self._known.get(given)
        if found is None:
            # A proxy here says last whom it passes on: one who guesses must not keep out all the others behind it.
            source = address_passed_on(forwarded) if is_loopback(host) else None
            found = self._log_in(given, source_of(source or host))
        if found.user.is_loopback_only and not (local if guest is None else could_be_guest):
            raise NotAuthorised("User can only log in via localhost")
        return found

    def _log_in(self, given: bytes, source: str) -> Caller:
        self._failures.check(source)
        name, password = credentials_of(given)
        user = self._users.authenticate(name, password)
        if user is None:
            self._failures.count(source)
            logger.warning("login over HTTP refused for %r from %s", name[:NAME_CHARACTERS_SHOWN], source)
            raise NotAuthorised("Login failed")
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        found = self._known[given] = Caller(self._users, user)
        return found


def credentials_of(given: bytes) -> tuple[str, str]:
    """Name and password of a Basic header; what is none has neither, and nobody is called that."""
    scheme, _, encoded = given.partition(b" ")
    if scheme.lower() == b"basic":
        try:
            name, _, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
            # A password is the bytes it comes in, as at the AMQP listener; escapes keep those that are no UTF-8.
            return name.decode("utf-8", "replace"), password.decode("utf-8", "surrogateescape")
        except binascii.Error:
            pass
    return "", ""


class Failures:
    """Wrong credentials by where they came from. Guessing gets slower for whoever guesses, and for nobody else."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._sources: OrderedDict[str, tuple[int, float]] = OrderedDict()  # how often, and when last

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
    """The last of X-Forwarded-For, or else X-Real-IP: a proxy adds to the one, and may let through the other."""
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
def could_be_this_machine(asked_for: bytes) -> bool:
    """Whether a Host header might be how somebody here speaks of this machine.

    A page of another site may have its own name resolve to this machine, and the browser then takes us for a part
    of that site. Nobody else can own an address, a name without a dot, one of these endings, or the machine's own name.
    """
    host = asked_for.decode("latin-1").lower()
    name = host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]
    if parse(name) is not None:
        return True
    name = name.rstrip(".")
    return "." not in name or name.endswith(OURS_ALONE) or name == platform.node().lower()
