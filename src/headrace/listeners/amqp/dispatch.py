"""Dispatches what the scanner reads: methods to their handlers, publishes to their route.

Methods run in the order of their arrival, across all channels of the connection. A method that waits for the disk
delays the methods after it on this connection, but no other connection. Publishes do not wait; see confirms.py.
"""

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from pamqp import commands
from pamqp.base import Frame

from headrace.errors import HeadraceError
from headrace.listeners.amqp import publish
from headrace.listeners.amqp.channel import Channel, ChannelConnection
from headrace.listeners.amqp.eager_task import EagerTask
from headrace.listeners.amqp.errors import ChannelError
from headrace.listeners.amqp.methods import connection as handshake
from headrace.listeners.amqp.methods import queue
from headrace.listeners.amqp.methods.connection import HandshakeConnection, HandshakeStage
from headrace.listeners.amqp.methods.table import HANDLERS
from headrace.listeners.amqp.session import Session
from headrace.listeners.amqp.transport import OUTPUT
from headrace.wire.amqp import protocol
from headrace.wire.amqp.methods import decode, frame, read_leading
from headrace.wire.amqp.protocol import ProtocolError
from headrace.wire.amqp.scan import ChannelState, Target

logger = logging.getLogger("headrace.amqp")

CLASS_CONNECTION, CLASS_CHANNEL = 10, 20
DECLARE = (50, 10)  # queue.declare
DECLARED_AT_ONCE = 256  # more gain nothing: the disk's part of their time is small

Origin = tuple[Channel, int, int]  # of a method: its channel, class and number


class DispatchingConnection(HandshakeConnection, ChannelConnection, Protocol):
    """The connection as its dispatcher sees it."""

    session: Session | None
    channels: dict[int, Channel]

    def open_channel(self, number: int) -> None: ...
    def end_channel(self, channel: Channel) -> None: ...
    def method_ended(self) -> None:
        """A method that waited has ended: the bytes that arrived meanwhile can be processed."""


class MethodDispatcher:
    """Receives the scanner's events. True from an event stops the scan: the remaining bytes are processed when the
    method has ended."""

    def __init__(self, connection: DispatchingConnection) -> None:
        self._connection = connection
        self._channels = connection.channels
        self._transport = connection.transport
        self._users = connection.context.users
        self._declaring: Channel | None = None  # whose queue.declare has just ended
        self.waiting: EagerTask | None = None  # the method that waits, and delays the methods after it

    def detach(self) -> None:
        """The connection is closed: the method that waits runs to its end, but is not answered."""
        if self.waiting is not None:
            self.waiting.detach()
            self.waiting = None

    @property
    def topology_version(self) -> int:
        """Changes with the routes of the vhost and with the users: both versions only grow, so does their sum."""
        session = self._connection.session
        if session is None or self._connection.stage is not HandshakeStage.RUNNING:
            return 0
        return session.vhost.routing.version + self._users.version

    def on_method(self, number: int, class_id: int, method_id: int, arguments: bytes) -> bool:
        connection = self._connection
        if class_id == CLASS_CONNECTION and number == 0:
            return handshake.on_method(connection, decode(class_id, method_id, arguments), class_id, method_id)
        if connection.stage is HandshakeStage.CLOSING:
            return False
        if connection.stage is not HandshakeStage.RUNNING or number == 0:
            raise handshake.unexpected(connection.stage, class_id, method_id)
        method = decode(class_id, method_id, arguments)
        if class_id == CLASS_CHANNEL:
            return self._on_channel_method(number, method, class_id, method_id)
        channel = self._channels.get(number)
        if channel is None:
            raise ProtocolError(protocol.CHANNEL_ERROR, "expected 'channel.open'", class_id, method_id)
        return self._handle(channel, method, class_id, method_id)

    def on_route(self, state: ChannelState, exchange: bytes, key: bytes, bits: int) -> Target | None:
        channel = self._channels[state.number]
        try:
            return publish.target(channel.session, exchange, key, bits)
        except HeadraceError as error:
            self._connection.after_feed()
            self._connection.fail(error, channel, 60, 40)
            return None

    def on_message(self, state: ChannelState, method: bytes, properties: bytes, body: bytes) -> bool:
        channel = self._channels[state.number]
        try:
            publish.message(channel, method, properties, body)
        except HeadraceError as error:
            state.sequence -= 1  # already counted, and must not be confirmed together with earlier publishes
            self._connection.after_feed()
            self._connection.fail(error, channel, 60, 40)
        return self._must_wait_for_output()

    def on_unknown_tag(self, state: ChannelState, tag: int) -> bool:
        self._connection.after_feed()
        error = ChannelError(protocol.PRECONDITION_FAILED, f"unknown delivery tag {tag}")
        self._connection.fail(error, self._channels[state.number], 60, 80)
        return False

    def on_too_large(self, state: ChannelState, body_size: int) -> bool:
        self._connection.after_feed()
        error = ChannelError(
            protocol.CONTENT_TOO_LARGE,
            f"message size {body_size} is larger than configured max size {protocol.MESSAGE_BYTES_MAX}",
        )
        self._connection.fail(error, self._channels[state.number], 60, 40)
        return False

    def declare_together(self, data: bytes) -> int:
        """A client that declares many queues sends the next declarations while one waits for the disk: those at the
        start of `data` share the syncs. Returns the size of the frames it has taken, and starts to wait unless that
        is 0.

        Only for the channel whose declaration has just ended: no other is known to expect a method next."""
        channel, self._declaring = self._declaring, None
        if channel is None or not channel.is_open or self._connection.stage is not HandshakeStage.RUNNING:
            return 0
        read = read_leading(
            data,
            channel.number,
            commands.Queue.Declare,
            count_max=DECLARED_AT_ONCE,
            frame_max=channel.session.frame_max,
        )
        count, pending = queue.declare_together(channel, [method for method, _ in read])
        if pending is None:
            return 0
        self._run(lambda: pending, (channel, *DECLARE))
        return read[count - 1].end

    def _on_channel_method(self, number: int, method: Any, class_id: int, method_id: int) -> bool:
        connection = self._connection
        channel = self._channels.get(number)
        if isinstance(method, commands.Channel.Open):
            if channel is not None:
                raise ProtocolError(protocol.CHANNEL_ERROR, "second 'channel.open' seen", class_id, method_id)
            connection.open_channel(number)
            self._transport.write(frame(number, commands.Channel.OpenOk))
            return False
        if channel is None:
            raise ProtocolError(protocol.CHANNEL_ERROR, "expected 'channel.open'", class_id, method_id)
        if isinstance(method, commands.Channel.Close):
            # If both sides close at the same time, the channel ends with the close-ok that is on its way.
            if not channel.state.closing:
                connection.end_channel(channel)
            self._transport.write(frame(number, commands.Channel.CloseOk))
            return False
        if isinstance(method, commands.Channel.CloseOk) and channel.state.closing:
            connection.end_channel(channel)
            return False
        return self._handle(channel, method, class_id, method_id)

    def _handle(self, channel: Channel, method: Frame, class_id: int, method_id: int) -> bool:
        handler = HANDLERS.get(type(method))
        if handler is None:
            raise ProtocolError(protocol.COMMAND_INVALID, "unimplemented method", class_id, method_id)
        return self._run(lambda: handler(channel, method), (channel, class_id, method_id))

    def _run(self, handle: Callable[[], Coroutine[Any, Any, None] | None], origin: Origin) -> bool:
        origin[0].settle()  # acks that came before this method take effect before it
        self._transport.in_method = True
        try:
            pending = handle()
            if pending is not None:
                task = EagerTask(pending, lambda error: self._resumed(origin, error))
                if not task.start():
                    self.waiting = task
                    return True
        except HeadraceError as error:
            self._connection.fail(error, *origin)
        self._transport.end_method()
        return self._must_wait_for_output() or self._connection.stage is HandshakeStage.CLOSED

    def _must_wait_for_output(self) -> bool:
        """Stops processing while a client that sends requests does not read the replies: the bytes of one read can
        ask for more output than there is memory."""
        if not self._transport.is_writable and self._transport.is_flooded:
            self._transport.set_reading_paused(OUTPUT, True)
            return True
        return False

    def _resumed(self, origin: Origin, error: BaseException | None) -> None:
        """The method that waited has ended."""
        self.waiting = None
        self._declaring = origin[0] if origin[1:] == DECLARE and error is None else None
        if isinstance(error, HeadraceError):
            self._connection.fail(error, *origin)
        elif error is not None:
            logger.error("internal error in an AMQP method handler", exc_info=error)
            self._connection.close(protocol.INTERNAL_ERROR, "INTERNAL_ERROR")
        self._transport.end_method()
        self._connection.method_ended()
