"""The first words of a connection: start, tune, open. What may come when is a table; the rest is RabbitMQ's checks."""

import platform
from enum import Enum
from typing import Any

from pamqp import commands

from headrace.broker.access.users import Users
from headrace.config import Config
from headrace.listeners.amqp.methods import auth
from headrace.listeners.common.addresses import is_loopback
from headrace.version import __version__
from headrace.wire.amqp.protocol import (
    ACCESS_REFUSED,
    CHANNEL_ERROR,
    COMMAND_INVALID,
    FRAME_MIN,
    NOT_ALLOWED,
    SYNTAX_ERROR,
    ProtocolError,
)

RABBITMQ_VERSION = "3.13.7"  # of the product switch: kombu below 4.0 sets a channel-wide prefetch
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
    CLOSING = "closing"  # we sent connection.close and wait for close-ok
    CLOSED = "closed"


# What the client may say on channel 0, and when. Close is always allowed once the header is there.
EXPECTED: dict[Stage, type[Any]] = {
    Stage.START: commands.Connection.StartOk,
    Stage.TUNE: commands.Connection.TuneOk,
    Stage.OPEN: commands.Connection.Open,
}


class Refused(ProtocolError):
    """Login failed. Clients that do not know the capability just see the connection end. They are not told why:
    the reason is for the log."""

    def __init__(self, mechanism: str, why: str) -> None:
        text = f"Login was refused using authentication mechanism {mechanism}. For details see the broker logfile."
        super().__init__(ACCESS_REFUSED, text)
        self.why = why


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


def log_in(method: commands.Connection.StartOk, peer: Any, users: Users) -> str:
    """The user, or Refused."""
    mechanism = method.mechanism
    read = auth.MECHANISMS.get(mechanism)
    if read is None:
        raise ProtocolError(SYNTAX_ERROR, f"unknown authentication mechanism '{mechanism[:40]}'", 10, 11)
    raw: Any = method.response
    credentials = read(raw)
    if credentials is None:
        raise ProtocolError(SYNTAX_ERROR, f"response of {mechanism} is not a user and a password", 10, 11)
    name, password = credentials
    user = users.authenticate(name, password)
    if user is None:
        raise Refused(mechanism, f"user {name!r:.100} - invalid credentials")
    if user.is_loopback_only and not is_loopback(peer[0] if peer else None):
        raise Refused(mechanism, f"user {name!r:.100} can only connect via localhost")
    return user.name


def check_tune(method: commands.Connection.TuneOk, config: Config) -> None:
    """Asking for more than was offered, or for frames too small to work with, is refused as in RabbitMQ."""
    for name, asked, offered in (
        ("channel_max", method.channel_max, config.amqp_channels_max),
        ("frame_max", method.frame_max, config.amqp_frame_max),
    ):
        if asked == 0 or asked > offered:
            spelled = f"{asked} (no limit)" if asked == 0 else str(asked)
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


def unexpected(stage: Stage, class_id: int, method_id: int) -> ProtocolError:
    if stage is Stage.RUNNING:
        return ProtocolError(CHANNEL_ERROR, "unexpected method in connection state running", class_id, method_id)
    return ProtocolError(
        COMMAND_INVALID, f"method {class_id}.{method_id} is not allowed now ({stage.value})", class_id, method_id
    )
