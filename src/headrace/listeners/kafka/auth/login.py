"""Who is there: the one place where this listener decides it, with the users that the other listeners know.

As long as guest with the password that everybody knows is the only user, nobody is asked. From then on a connection
says who it is before anything else. One from this machine that does not is guest, as long as guest has its first
password. The same rule as at the HTTP listener; see docs/security.md.
"""

import logging
from enum import Enum
from typing import TYPE_CHECKING, Any

from headrace.broker.access import scram_keys
from headrace.broker.access.users import GUEST, User, Users
from headrace.errors import MalformedRequest
from headrace.listeners.common.addresses import FAILURE_DELAY_S, is_loopback
from headrace.listeners.kafka.admin.topic_index import VHOST, Topics
from headrace.listeners.kafka.auth.access import Access, AnyUser
from headrace.listeners.kafka.auth.mechanism import PLAIN, Exchange, LoginRefused, Plain, wrong
from headrace.listeners.kafka.auth.scram import Scram
from headrace.listeners.kafka.errors import Code
from headrace.wire.kafka.apis import Api
from headrace.wire.kafka.codec import decode
from headrace.wire.kafka.schema import request_struct

if TYPE_CHECKING:
    from headrace.listeners.kafka.connection import Connection
    from headrace.listeners.kafka.listener import KafkaListener
    from headrace.listeners.kafka.request_pipeline import Request

logger = logging.getLogger("headrace.kafka")

MECHANISMS = [PLAIN, *scram_keys.HASHES]
BEFORE_LOGIN = frozenset({Api.API_VERSIONS, Api.SASL_HANDSHAKE, Api.SASL_AUTHENTICATE})
TOKEN_BYTES_MAX = 512 * 1024  # Kafka's sasl.server.max.receive.size: nobody unknown sends more than this


class Stage(Enum):
    """What of a login has happened."""

    NONE = "none"  # nothing, or it is over
    TOKEN = "token"  # the mechanism is chosen, SaslAuthenticate is next
    RAW_TOKEN = "raw token"  # as before Kafka 1.0: the next bytes are the token itself


class LoginGate:
    """Lets connections in."""

    def __init__(self, users: Users, topics: Topics) -> None:
        self._users, self._topics = users, topics
        self.anybody = AnyUser(topics)

    @property
    def is_open(self) -> bool:
        return self._users.is_open

    def admits(self, request: "Request") -> bool:
        """Asked when users have changed since the connection was let in, if it was."""
        if request.api in BEFORE_LOGIN:
            return True
        connection = request.connection
        user = self.user_of(connection)
        if user is None:
            connection.refuse(f"{request.api.name} without a login")
            return False
        connection.user = user
        connection.access = None if self.is_open else self._access(user, connection)
        connection.admitted_at = self._users.version
        return True

    def _access(self, user: str, connection: "Connection") -> Access:
        rights = self._users.rights(user, VHOST)
        return Access(self._users.user(user), rights, self._topics, connection.peer)

    def user_of(self, connection: "Connection") -> str | None:
        """Whose the connection is now. None: it has to log in."""
        if connection.has_logged_in:
            return connection.user if self._users.has(connection.user) else None
        if self.is_open:
            return ""
        is_silent = connection.login is Stage.NONE  # who began a login ends it
        if is_silent and is_loopback(connection.peer[0]) and self._users.guest_is_default:
            return GUEST
        return None

    def exchange(self, mechanism: str) -> Exchange:
        return Plain(self._users) if mechanism == PLAIN else Scram(self._users, mechanism)

    def log_in(self, token: bytes, connection: "Connection") -> tuple[bytes, bool]:
        """The answer to one token, and whether the connection is a user's now; LoginRefused if it can not be."""
        exchange = connection.exchange
        assert exchange is not None  # a handshake came first
        answer = exchange.take(token)
        if exchange.user is None:
            return answer, False
        self._let_in(exchange.user, exchange.mechanism, connection)
        connection.exchange = None
        return answer, True

    def _let_in(self, user: User, mechanism: str, connection: "Connection") -> None:
        name = user.name
        if user.is_loopback_only and not is_loopback(connection.peer[0]):
            raise wrong(mechanism, f"user {name!r:.100} can only connect via localhost")
        if connection.has_logged_in and connection.user != name:
            text = f"Cannot change principals during re-authentication from User:{connection.user} to User:{name}"
            raise LoginRefused(text, f"user {name!r:.100} on a connection of {connection.user!r:.100}")
        connection.user, connection.has_logged_in, connection.mechanism = name, True, mechanism
        connection.admitted_at = -1  # asked again, as this user
        logger.debug("Kafka connection from %s as %s", connection.peer, name)


# The requests. Not async: what follows on the connection must find them done.


def sasl_handshake(listener: "KafkaListener", request: "Request") -> None:
    fields = _fields(request)
    connection = request.connection
    if fields.mechanism not in MECHANISMS:
        _note(listener, connection, f"there is no mechanism {fields.mechanism!r:.40}")
        connection.end()
        request.reply({"error_code": Code.UNSUPPORTED_SASL_MECHANISM, "mechanisms": MECHANISMS})
        return
    connection.exchange = listener.gate.exchange(fields.mechanism)
    connection.login = Stage.RAW_TOKEN if request.version == 0 else Stage.TOKEN
    request.reply({"mechanisms": MECHANISMS})


def sasl_authenticate(listener: "KafkaListener", request: "Request") -> None:
    fields = _fields(request)
    connection = request.connection
    stage, connection.login = connection.login, Stage.NONE
    if stage is not Stage.TOKEN:
        text = "SaslAuthenticate request received without a SaslHandshake"
        _note(listener, connection, text)
        connection.end()
        request.reply({"error_code": Code.ILLEGAL_SASL_STATE, "error_message": text})
        return
    try:
        answer, is_done = listener.gate.log_in(fields.auth_bytes, connection)
    except LoginRefused as error:
        _note(listener, connection, error.why)
        connection.end()
        refused = {"error_code": Code.SASL_AUTHENTICATION_FAILED, "error_message": str(error)}
        listener.loop.call_later(FAILURE_DELAY_S, request.reply, refused)
        return
    if is_done:
        listener.logged_in(connection)
    else:
        connection.login = Stage.TOKEN
    request.reply({"auth_bytes": answer})


def take_raw_token(listener: "KafkaListener", connection: "Connection", token: bytes) -> None:
    """What follows version 0 of the handshake is no request, and neither is its answer: a token each."""
    connection.login = Stage.NONE
    if len(token) > TOKEN_BYTES_MAX:
        raise MalformedRequest(f"a token of {len(token):,} bytes")
    try:
        answer, is_done = listener.gate.log_in(token, connection)
    except LoginRefused as error:
        _note(listener, connection, error.why)
        connection.end()
        listener.loop.call_later(FAILURE_DELAY_S, connection.abort, error)
        return
    if is_done:
        listener.logged_in(connection)
    else:
        connection.login = Stage.RAW_TOKEN
    connection.send_token(answer)


def _fields(request: "Request") -> Any:
    if request.size > TOKEN_BYTES_MAX:
        raise MalformedRequest(f"{request.api.name} of {request.size:,} bytes")
    return decode(request_struct(request.api, request.version), request.body, request.position)


def _note(listener: "KafkaListener", connection: "Connection", why: str) -> None:
    listener.stats.count("logins_refused")
    logger.warning("login refused from %s: %s", connection.peer, why)
