"""The methods of class connection: the handshake (start-ok, tune-ok, open), close and update-secret.

EXPECTED says which method the client may send in which stage. The checks and their texts are RabbitMQ's.
"""

import logging
import platform
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, Protocol

from pamqp import commands

from headrace.broker.access.protected_mode import ProtectedMode
from headrace.broker.access.users import Users
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.config import Config
from headrace.errors import HeadraceError, InvalidInput
from headrace.listeners.amqp.context import ListenerContext
from headrace.listeners.amqp.errors import reply
from headrace.listeners.amqp.transport import AmqpTransport
from headrace.listeners.common.addresses import FAILURE_DELAY_S, is_loopback
from headrace.record.amqp.properties import decode_table
from headrace.version import __version__
from headrace.wire.amqp.methods import frame
from headrace.wire.amqp.protocol import (
    ACCESS_REFUSED,
    CHANNEL_ERROR,
    COMMAND_INVALID,
    FRAME_MIN,
    NOT_ALLOWED,
    SYNTAX_ERROR,
    ProtocolError,
)

logger = logging.getLogger("headrace.amqp")

RABBITMQ_VERSION = "3.13.7"  # announced with amqp_product=rabbitmq: kombu below 4.0 sets a channel-wide prefetch
CAPABILITIES = {
    "publisher_confirms": True,
    "exchange_exchange_bindings": True,
    "basic.nack": True,
    "consumer_cancel_notify": True,
    "connection.blocked": True,
    "consumer_priorities": True,
    "authentication_failure_close": True,
    "per_consumer_qos": True,
    "direct_reply_to": True,
}


class Stage(Enum):
    HEADER = "header"
    START = "start"
    TUNE = "tune"
    OPEN = "open"
    RUNNING = "running"
    CLOSING = "closing"  # connection.close is sent, close-ok is expected
    CLOSED = "closed"


# connection.close is allowed in every stage after HEADER.
EXPECTED: dict[Stage, type[Any]] = {
    Stage.START: commands.Connection.StartOk,
    Stage.TUNE: commands.Connection.TuneOk,
    Stage.OPEN: commands.Connection.Open,
}


class HandshakeConnection(Protocol):
    """The connection as the handlers of its own methods see it."""

    stage: Stage
    context: ListenerContext
    transport: AmqpTransport
    user: str
    client_properties: dict[str, Any]
    capabilities: dict[str, Any]

    def logged_in(self) -> None: ...
    def tuned(self, channel_max: int, frame_max: int, heartbeat_s: int) -> None: ...
    def open(self, vhost: VirtualHost) -> None: ...
    def close(self, code: int, text: str, class_id: int = 0, method_id: int = 0) -> None: ...
    def drop(self) -> None: ...
    def linger(self) -> None: ...


# Authentication.


def plain(response: bytes) -> tuple[str, str] | None:
    """(user, password) of a PLAIN response. None also if an authorization identity other than the user is given,
    because acting as another user is not supported."""
    parts = response.split(b"\0")
    if len(parts) != 3 or parts[0] not in (b"", parts[1]):
        return None
    # RabbitMQ hashes a password as the bytes it received; escapes preserve those that are not UTF-8.
    return parts[1].decode("utf-8", "replace"), parts[2].decode("utf-8", "surrogateescape")


def amqplain(response: bytes) -> tuple[str, str] | None:
    """(user, password) of an AMQPLAIN response."""
    try:
        table = decode_table(len(response).to_bytes(4, "big") + response)
    except InvalidInput:
        return None
    user, password = table.get("LOGIN"), table.get("PASSWORD")
    return (user, password) if isinstance(user, str) and isinstance(password, str) else None


MECHANISMS: dict[str, Callable[[bytes], tuple[str, str] | None]] = {"PLAIN": plain, "AMQPLAIN": amqplain}


class LoginRefused(ProtocolError):
    """Authentication failed. The client does not learn the reason; it is only logged."""

    def __init__(self, mechanism: str, reason: str) -> None:
        text = f"Login was refused using authentication mechanism {mechanism}. For details see the broker logfile."
        super().__init__(ACCESS_REFUSED, text)
        self.reason = reason


def log_in(method: commands.Connection.StartOk, peer: Any, users: Users, protected_mode: ProtectedMode) -> str:
    """Returns the user's name or raises LoginRefused."""
    mechanism = method.mechanism
    read = MECHANISMS.get(mechanism)
    if read is None:
        raise ProtocolError(SYNTAX_ERROR, f"unknown authentication mechanism '{mechanism[:40]}'", 10, 11)
    raw: Any = method.response
    credentials = read(raw)
    if credentials is None:
        raise ProtocolError(
            SYNTAX_ERROR, f"malformed {mechanism} response: expected a user name and a password", 10, 11
        )
    name, password = credentials
    user = users.authenticate(name, password)
    if user is None:
        raise LoginRefused(mechanism, f"user {name!r:.100} - invalid credentials")
    if not is_loopback(peer[0] if peer else None) and not protected_mode.may_connect_remotely(user):
        if protected_mode.refuses_remote_clients:
            protected_mode.log_refusal(peer[0])
        raise LoginRefused(mechanism, f"user {name!r:.100} can only connect via localhost")
    return user.name


# The handshake.


def server_properties(config: Config) -> dict[str, Any]:
    as_rabbitmq = config.amqp_product == "rabbitmq"
    return {
        "product": "RabbitMQ" if as_rabbitmq else "Headrace",
        "version": RABBITMQ_VERSION if as_rabbitmq else __version__,
        "platform": f"Python {platform.python_version()}",
        "copyright": "",
        "information": "Licensed under the Apache License 2.0",
        "cluster_name": f"headrace@{platform.node()}",
        "capabilities": CAPABILITIES,
    }


def start_frame(config: Config) -> bytes:
    return frame(
        0,
        commands.Connection.Start,
        version_major=0,
        version_minor=9,
        server_properties=server_properties(config),
        mechanisms="PLAIN AMQPLAIN",
        locales="en_US",
    )


def on_method(connection: HandshakeConnection, method: Any, class_id: int, method_id: int) -> bool:
    """Handles a method on channel 0. True if the bytes after it must not be read."""
    stage = connection.stage
    if isinstance(method, commands.Connection.CloseOk) and stage is Stage.CLOSING:
        connection.drop()
        return True
    if isinstance(method, commands.Connection.Close):
        connection.transport.write(frame(0, commands.Connection.CloseOk))
        connection.linger()
        return True
    if stage is Stage.CLOSING:
        return False
    if stage is Stage.RUNNING and isinstance(method, commands.Connection.UpdateSecret):
        connection.transport.write(frame(0, commands.Connection.UpdateSecretOk))
        return False
    expected = EXPECTED.get(stage)
    if expected is None or not isinstance(method, expected):
        raise unexpected(stage, class_id, method_id)
    return _HANDLERS[stage](connection, method)


def unexpected(stage: Stage, class_id: int, method_id: int) -> ProtocolError:
    if stage is Stage.RUNNING:
        return ProtocolError(CHANNEL_ERROR, "unexpected method in connection state running", class_id, method_id)
    return ProtocolError(
        COMMAND_INVALID,
        f"method {class_id}.{method_id} is not allowed in connection state {stage.value}",
        class_id,
        method_id,
    )


def _start_ok(connection: HandshakeConnection, method: commands.Connection.StartOk) -> bool:
    context, transport = connection.context, connection.transport
    properties: Any = method.client_properties
    connection.client_properties = properties
    found = properties.get("capabilities")
    connection.capabilities = found if isinstance(found, dict) else {}
    try:
        connection.user = log_in(method, transport.peer, context.users, context.protected_mode)
    except LoginRefused as error:
        context.stats.count("logins_refused")
        logger.warning("%s login refused from %s: %s", method.mechanism, transport.peer, error.reason)
        transport.reply_later(FAILURE_DELAY_S, partial(_refuse_login, connection, error))
        return True
    connection.logged_in()
    connection.stage = Stage.TUNE
    config = context.config
    transport.write(
        frame(
            0,
            commands.Connection.Tune,
            channel_max=config.amqp_channels_max,
            frame_max=config.amqp_frame_max,
            heartbeat=config.amqp_heartbeat_ms // 1000,
        )
    )
    return False


def _refuse_login(connection: HandshakeConnection, error: LoginRefused) -> None:
    if connection.capabilities.get("authentication_failure_close") is True:
        connection.close(*reply(error))
    else:
        connection.drop()


def _tune_ok(connection: HandshakeConnection, method: commands.Connection.TuneOk) -> bool:
    check_tune(method, connection.context.config)
    connection.tuned(method.channel_max, method.frame_max, method.heartbeat)
    connection.stage = Stage.OPEN
    connection.transport.acknowledge_now()
    return False


def check_tune(method: commands.Connection.TuneOk, config: Config) -> None:
    """Refuses values above the offered ones and frames that are too small, as RabbitMQ does."""
    for name, requested, offered in (
        ("channel_max", method.channel_max, config.amqp_channels_max),
        ("frame_max", method.frame_max, config.amqp_frame_max),
    ):
        if requested == 0 or requested > offered:
            spelled = f"{requested} (no limit)" if requested == 0 else str(requested)
            raise ProtocolError(
                NOT_ALLOWED,
                f"negotiated {name} = {spelled} is higher than the maximum allowed value ({offered})",
                10,
                31,
            )
    if method.frame_max < FRAME_MIN:
        raise ProtocolError(
            NOT_ALLOWED,
            f"negotiated frame_max = {method.frame_max} is lower than the minimum allowed value ({FRAME_MIN})",
            10,
            31,
        )


def _open(connection: HandshakeConnection, method: commands.Connection.Open) -> bool:
    try:
        connection.open(connection.context.broker.vhosts.get(method.virtual_host))
    except HeadraceError as error:
        connection.close(*reply(error), 10, 40)
        return False
    connection.stage = Stage.RUNNING
    connection.transport.start_heartbeats()
    connection.transport.write(frame(0, commands.Connection.OpenOk))
    logger.debug("AMQP connection from %s as %s", connection.transport.peer, connection.user)
    return False


_HANDLERS: dict[Stage, Callable[[HandshakeConnection, Any], bool]] = {
    Stage.START: _start_ok,
    Stage.TUNE: _tune_ok,
    Stage.OPEN: _open,
}
