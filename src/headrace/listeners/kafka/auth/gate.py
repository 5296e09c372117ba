"""LoginGate: the one place where this listener decides which connections are admitted, with the broker's users.

The broker is open while guest with its default password is the only user: then no connection has to log in, and
protected mode admits connections from this machine only. With users, a connection logs in before anything else. One
exception: a connection from this machine that does not log in is guest, as long as guest has its default password. The
HTTP listener follows the same rule; see docs/security.md.
"""

import logging
from enum import Enum
from typing import Protocol

from headrace.broker.access.protected_mode import ProtectedMode
from headrace.broker.access.users import GUEST, User, Users
from headrace.listeners.common.addresses import is_loopback
from headrace.listeners.kafka.admin.topic_index import VHOST, Topics
from headrace.listeners.kafka.auth.access import Access, AnyUser
from headrace.listeners.kafka.auth.mechanism import PLAIN, Exchange, LoginRefused, Plain, wrong
from headrace.listeners.kafka.auth.scram import Scram
from headrace.wire.kafka.apis import Api

logger = logging.getLogger("headrace.kafka")

BEFORE_LOGIN = frozenset({Api.API_VERSIONS, Api.SASL_HANDSHAKE, Api.SASL_AUTHENTICATE})


class Stage(Enum):
    """How far a login has come."""

    NONE = "none"  # not started, or completed
    TOKEN = "token"  # the mechanism is chosen, SaslAuthenticate is next
    RAW_TOKEN = "raw token"  # as before Kafka 1.0: the next bytes are the token itself


class Client(Protocol):
    """A connection as the gate sees it."""

    user: str
    has_logged_in: bool
    mechanism: str
    exchange: Exchange | None
    access: Access | None
    login: Stage
    admitted_at: int
    peer: tuple[str, int]

    def refuse(self, reason: str | None) -> None: ...


class ClientRequest(Protocol):
    """A request as the gate sees it."""

    @property
    def api(self) -> Api: ...
    @property
    def connection(self) -> Client: ...


class LoginGate:
    """Decides which user a connection is, and whether its requests are admitted."""

    def __init__(self, users: Users, topics: Topics, protected_mode: ProtectedMode) -> None:
        self._users, self._topics, self._protected_mode = users, topics, protected_mode
        self.anybody = AnyUser(topics)

    @property
    def is_open(self) -> bool:
        return self._users.is_open

    def admits(self, request: ClientRequest) -> bool:
        """Called when the connection was not admitted yet, or the users have changed since it was."""
        if request.api in BEFORE_LOGIN:
            return True
        connection = request.connection
        user = self.user_of(connection)
        if user is None:
            if self.is_open:
                self._protected_mode.log_refusal(connection.peer[0])
                connection.refuse(None)
            else:
                connection.refuse(f"{request.api.name} without a login")
            return False
        connection.user = user
        connection.access = None if self.is_open else self._access(user, connection)
        connection.admitted_at = self._users.version
        return True

    def _access(self, user: str, connection: Client) -> Access:
        rights = self._users.rights(user, VHOST)
        return Access(self._users.user(user), rights, self._topics, connection.peer)

    def user_of(self, connection: Client) -> str | None:
        """The connection's user as of now. None: it has to log in."""
        if connection.has_logged_in:
            return connection.user if self._users.has(connection.user) else None
        if self.is_open:
            is_refused = self._protected_mode.refuses_remote_clients and not is_loopback(connection.peer[0])
            return None if is_refused else ""
        is_silent = connection.login is Stage.NONE  # a login that was started has to be completed
        if is_silent and is_loopback(connection.peer[0]) and self._users.guest_is_default:
            return GUEST
        return None

    def exchange(self, mechanism: str) -> Exchange:
        return Plain(self._users) if mechanism == PLAIN else Scram(self._users, mechanism)

    def log_in(self, token: bytes, connection: Client) -> tuple[bytes, bool]:
        """(answer to a token, whether the login is complete). Raises LoginRefused."""
        exchange = connection.exchange
        assert exchange is not None  # a handshake came first
        answer = exchange.take(token)
        if exchange.user is None:
            return answer, False
        self._let_in(exchange.user, exchange.mechanism, connection)
        connection.exchange = None
        return answer, True

    def _let_in(self, user: User, mechanism: str, connection: Client) -> None:
        name = user.name
        if not is_loopback(connection.peer[0]) and not self._protected_mode.may_connect_remotely(user):
            if self._protected_mode.refuses_remote_clients:
                self._protected_mode.log_refusal(connection.peer[0])
            raise wrong(mechanism, f"user {name!r:.100} can only connect via localhost")
        if connection.has_logged_in and connection.user != name:
            text = f"Cannot change principals during re-authentication from User:{connection.user} to User:{name}"
            raise LoginRefused(text, f"user {name!r:.100} on a connection of {connection.user!r:.100}")
        connection.user, connection.has_logged_in, connection.mechanism = name, True, mechanism
        connection.admitted_at = -1  # its next request is admitted as this user
        logger.debug("Kafka connection from %s as %s", connection.peer, name)
