"""Methods of the connection itself: start-ok, tune-ok, open, close, update-secret."""

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from pamqp import commands

from headrace.errors import HeadraceError
from headrace.listeners.amqp.errors import reply
from headrace.listeners.amqp.methods import handshake
from headrace.listeners.amqp.methods.handshake import Stage
from headrace.listeners.common.logins import FAILURE_DELAY_S
from headrace.wire.amqp.methods import frame

if TYPE_CHECKING:
    from headrace.listeners.amqp.connection import Connection

logger = logging.getLogger("headrace.amqp")


def greeting(connection: "Connection") -> bytes:
    return frame(
        0, commands.Connection.Start, version_major=0, version_minor=9,
        server_properties=handshake.server_properties(connection.listener.config), mechanisms="PLAIN AMQPLAIN",
        locales="en_US",
    )  # fmt: skip


def on_method(connection: "Connection", method: Any, class_id: int, method_id: int) -> bool:
    """True: nothing of what came with it is read any more."""
    stage = connection.stage
    if isinstance(method, commands.Connection.CloseOk) and stage is Stage.CLOSING:
        connection.drop()
        return True
    if isinstance(method, commands.Connection.Close):
        connection.write(frame(0, commands.Connection.CloseOk))
        connection.linger()
        return True
    if stage is Stage.CLOSING:
        return False
    if stage is Stage.RUNNING and isinstance(method, commands.Connection.UpdateSecret):
        connection.secret_updates += 1
        connection.write(frame(0, commands.Connection.UpdateSecretOk))
        return False
    expected = handshake.EXPECTED.get(stage)
    if expected is None or not isinstance(method, expected):
        raise handshake.unexpected(stage, class_id, method_id)
    return _STEPS[stage](connection, method)


def _start_ok(connection: "Connection", method: commands.Connection.StartOk) -> bool:
    properties: Any = method.client_properties
    connection.client_properties = properties
    found = properties.get("capabilities")
    connection.capabilities = found if isinstance(found, dict) else {}
    try:
        connection.user = handshake.log_in(method, connection.peer, connection.broker.users)
    except handshake.Refused as error:
        connection.listener.stats.count("logins_refused")
        logger.warning("%s login refused from %s: %s", method.mechanism, connection.peer, error.why)
        connection.answer_late(FAILURE_DELAY_S, partial(_refuse, connection, error))
        return True
    connection.listener.logged_in(connection)
    connection.stage = Stage.TUNE
    config = connection.listener.config
    connection.write(
        frame(
            0, commands.Connection.Tune, channel_max=config.amqp_channels_max, frame_max=config.amqp_frame_max,
            heartbeat=config.amqp_heartbeat_ms // 1000,
        )
    )  # fmt: skip
    return False


def _refuse(connection: "Connection", error: handshake.Refused) -> None:
    if connection.wants("authentication_failure_close"):
        connection.close(*reply(error))
    else:
        connection.drop()


def _tune_ok(connection: "Connection", method: commands.Connection.TuneOk) -> bool:
    handshake.check_tune(method, connection.listener.config)
    connection.tuned(method.channel_max, method.frame_max, method.heartbeat)
    connection.stage = Stage.OPEN
    connection.acknowledge_now()
    return False


def _open(connection: "Connection", method: commands.Connection.Open) -> bool:
    try:
        connection.enter(connection.broker.vhosts.get(method.virtual_host))
    except HeadraceError as error:
        connection.close(*reply(error), 10, 40)
        return False
    connection.stage = Stage.RUNNING
    connection.start_heartbeats()
    connection.write(frame(0, commands.Connection.OpenOk))
    connection.listener.opened(connection)
    return False


_STEPS: dict[Stage, Callable[["Connection", Any], bool]] = {
    Stage.START: _start_ok,
    Stage.TUNE: _tune_ok,
    Stage.OPEN: _open,
}
