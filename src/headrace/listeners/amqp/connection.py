"""An AMQP connection: feeds received bytes to the scanner and dispatches methods to their handlers.

Methods run in the order of their arrival, across all channels. A method that waits for the disk delays the methods
after it on this connection, but no other connection. Publishes do not wait; see confirms.py.
"""

import asyncio
import logging
from typing import Any

from pamqp import commands
from pamqp.base import Frame

from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import HeadraceError
from headrace.listeners.amqp import publish
from headrace.listeners.amqp.access import Access
from headrace.listeners.amqp.channel import Channel
from headrace.listeners.amqp.confirms import PublisherConfirms
from headrace.listeners.amqp.context import ListenerContext
from headrace.listeners.amqp.eager_task import EagerTask
from headrace.listeners.amqp.errors import HARD, ChannelError, reply
from headrace.listeners.amqp.methods import connection as handshake
from headrace.listeners.amqp.methods.connection import Stage
from headrace.listeners.amqp.methods.table import HANDLERS
from headrace.listeners.amqp.registry import ConnectionRegistry
from headrace.listeners.amqp.session import Session
from headrace.listeners.amqp.transport import CLOSE_TIMEOUT_S, OUTPUT, UNPROCESSED, AmqpTransport
from headrace.wire.amqp import protocol
from headrace.wire.amqp.methods import decode, frame
from headrace.wire.amqp.protocol import PROTOCOL_HEADER, ProtocolError
from headrace.wire.amqp.scan import ChannelState, Scanner, Target

logger = logging.getLogger("headrace.amqp")

HANDSHAKE_TIMEOUT_S = 10.0
UNPROCESSED_BYTES_MAX = 1 << 20
CLASS_CONNECTION, CLASS_CHANNEL = 10, 20


class Connection(asyncio.Protocol):
    """The asyncio protocol of one socket, and the receiver of the scanner's events."""

    def __init__(self, context: ListenerContext, registry: "ConnectionRegistry[Connection]") -> None:
        loop = asyncio.get_running_loop()
        self.context = context
        self.transport = AmqpTransport(context.stats, loop)
        self.stage = Stage.HEADER
        self.session: Session | None = None
        self.user = ""
        self.client_properties: dict[str, Any] = {}
        self.capabilities: dict[str, Any] = {}
        self.channels: dict[int, Channel] = {}
        self.frame_max = protocol.FRAME_MAX_BEFORE_TUNE
        self.channel_max = context.config.amqp_channels_max
        self.connected_ms = context.clock.now_ms()
        self._registry = registry
        self._flow = registry.flow
        self._flushes = context.flushes
        self._loop_time = loop.time
        self._scanner = Scanner(self, protocol.FRAME_MAX_BEFORE_TUNE)
        self._confirms = PublisherConfirms(self._scanner, self.channels, self.transport, context)
        self._unprocessed = b""
        self._task: EagerTask | None = None  # the method that waits

    # Called by asyncio.

    def connection_made(self, transport: Any) -> None:
        self.transport.attach(transport, self._flow.write_high())
        if not self._registry.admit(self):
            transport.close()
            return
        self.transport.arm(HANDSHAKE_TIMEOUT_S, self._handshake_timeout)

    def _handshake_timeout(self) -> None:
        self.context.stats.count("handshake_timeouts")
        self.drop()

    def connection_lost(self, error: Exception | None) -> None:
        self.stage = Stage.CLOSED
        self.transport.is_closed = True
        self.transport.disarm()
        if self._task is not None:
            self._task.detach()
            self._task = None
        for channel in self.channels.values():
            channel.release()
        self.channels.clear()
        if self.session is not None:
            self.session.close()
        self._registry.forget(self)

    def pause_writing(self) -> None:
        self.transport.is_writable = False

    def resume_writing(self) -> None:
        transport = self.transport
        transport.is_writable = True
        if OUTPUT in transport.paused_for:
            transport.hold_reading(OUTPUT, False)
            if self._task is None:
                self._continue()
        for channel in self.channels.values():
            channel.wake()

    def eof_received(self) -> bool:
        return False

    def data_received(self, data: bytes) -> None:
        transport = self.transport
        transport.last_read = self._loop_time()
        if self.stage is Stage.CLOSED:
            return
        if self._unprocessed:
            data = self._unprocessed + data
            self._unprocessed = b""
        if self._task is not None or OUTPUT in transport.paused_for:
            self._unprocessed = data
            transport.hold_reading(UNPROCESSED, len(data) > UNPROCESSED_BYTES_MAX)
            return
        self._process(data)

    # Received bytes.

    def _process(self, data: bytes) -> None:
        if self.stage is Stage.HEADER:
            data = self._read_header(data)
        if self.stage in (Stage.HEADER, Stage.CLOSED) or not data:
            return
        flushes = self._flushes
        author, flushes.author = flushes.author, self._confirms.author
        try:
            used = self._feed(data)
        except ProtocolError as error:
            self.after_feed()
            self.close(*reply(error), error.class_id, error.method_id)
            return
        except HeadraceError as error:
            self.after_feed()
            self.close(*reply(error))
            return
        finally:
            flushes.author = author
        self._unprocessed = data[used:] if used < len(data) else b""
        self.after_feed()
        self._flow.received(self, len(data))

    def _feed(self, data: bytes) -> int:
        """Returns the number of bytes used. While the log of any queue refuses writes, feeds one frame at a time, so
        that the outcome of each publish is known separately."""
        now_ms = self.context.clock.now_ms()
        # Not during the handshake: its handlers stop the scan for reasons that the loop below does not know.
        if not self._flushes.refusing or self.stage in handshake.EXPECTED:
            return self._scanner.feed(data, now_ms)
        used, left = 0, memoryview(data)
        while step := self._scanner.feed(left[: protocol.frame_size(left)], now_ms):
            used += step
            left = left[step:]
            self.after_feed()
            if self._task is not None or OUTPUT in self.transport.paused_for or self.stage is Stage.CLOSED:
                break
        return used

    def _read_header(self, data: bytes) -> bytes:
        """Returns the bytes after the protocol header."""
        if not PROTOCOL_HEADER.startswith(data[:8]):
            # Not AMQP 0-9-1: the specification asks for the supported header and a closed socket.
            self.transport.write(PROTOCOL_HEADER)
            self.drop()
            return b""
        if len(data) < 8:
            self._unprocessed = data
            return b""
        self.stage = Stage.START
        self.transport.write(handshake.start_frame(self.context.config))
        return data[8:]

    def after_feed(self) -> None:
        """Applies the acks and publishes that the scanner has collected."""
        for state in self._scanner.take_acked():
            channel = self.channels.get(state.number)
            if channel is not None:
                channel.settle()
        published = self._scanner.take_published()
        if published:
            self._confirms.after_publishes(published)
            self._flow.published(self)

    async def flushed(self) -> None:
        """Waits until everything that this connection has published is visible in the queues."""
        self.after_feed()
        self._flushes.flush_memory()
        if self._confirms.flushes_pending:
            await self._flushes.over()

    # The handshake.

    def logged_in(self) -> None:
        self._registry.logged_in(self)

    def tuned(self, channel_max: int, frame_max: int, heartbeat_s: int) -> None:
        self.channel_max = channel_max
        self.frame_max = self._scanner.frame_max = frame_max
        self.transport.heartbeat_s = heartbeat_s

    def open(self, vhost: VirtualHost) -> None:
        access = Access(self.context.users, self.user, vhost.name, self.transport.peer)
        if access.rights() is None:
            text = f"access to vhost '{vhost.name}' refused for user '{self.user}'"
            logger.warning("from %s: %s", self.transport.peer, text)
            raise ChannelError(protocol.NOT_ALLOWED, text)
        access.check_vhost_limit(vhost, lambda: len(self._registry.of_vhost(vhost.name)))
        access.check_limit("connections", lambda: len(self._registry.of_user(self.user)))
        self.session = Session(vhost, access, self.user, self.frame_max, self.capabilities)

    # Events of the scanner. True stops the scan: the remaining bytes are processed when the method has ended.

    @property
    def topology_version(self) -> int:
        """Changes with the routes of the vhost and with the users: both versions only grow, so does their sum."""
        session = self.session
        if session is None or self.stage is not Stage.RUNNING:
            return 0
        return session.vhost.routing.version + self.context.users.version

    def on_method(self, number: int, class_id: int, method_id: int, arguments: bytes) -> bool:
        if class_id == CLASS_CONNECTION and number == 0:
            return handshake.on_method(self, decode(class_id, method_id, arguments), class_id, method_id)
        if self.stage is Stage.CLOSING:
            return False
        if self.stage is not Stage.RUNNING or number == 0:
            raise handshake.unexpected(self.stage, class_id, method_id)
        method = decode(class_id, method_id, arguments)
        if class_id == CLASS_CHANNEL:
            return self._on_channel_method(number, method, class_id, method_id)
        channel = self.channels.get(number)
        if channel is None:
            raise ProtocolError(protocol.CHANNEL_ERROR, "expected 'channel.open'", class_id, method_id)
        return self._run(channel, method, class_id, method_id)

    def on_route(self, state: ChannelState, exchange: bytes, key: bytes, bits: int) -> Target | None:
        channel = self.channels[state.number]
        try:
            return publish.target(channel.session, exchange, key, bits)
        except HeadraceError as error:
            self.after_feed()
            self.fail(error, channel, 60, 40)
            return None

    def on_message(self, state: ChannelState, method: bytes, properties: bytes, body: bytes) -> bool:
        channel = self.channels[state.number]
        try:
            publish.message(channel, method, properties, body)
        except HeadraceError as error:
            state.sequence -= 1  # already counted, and must not be confirmed together with earlier publishes
            self.after_feed()
            self.fail(error, channel, 60, 40)
        return self._must_wait_for_output()

    def on_unknown_tag(self, state: ChannelState, tag: int) -> bool:
        self.after_feed()
        error = ChannelError(protocol.PRECONDITION_FAILED, f"unknown delivery tag {tag}")
        self.fail(error, self.channels[state.number], 60, 80)
        return False

    def on_too_large(self, state: ChannelState, body_size: int) -> bool:
        self.after_feed()
        error = ChannelError(
            protocol.CONTENT_TOO_LARGE,
            f"message size {body_size} is larger than configured max size {protocol.MESSAGE_BYTES_MAX}",
        )
        self.fail(error, self.channels[state.number], 60, 40)
        return False

    # Methods of channels.

    def _run(self, channel: Channel, method: Frame, class_id: int, method_id: int) -> bool:
        handler = HANDLERS.get(type(method))
        if handler is None:
            raise ProtocolError(protocol.COMMAND_INVALID, "unimplemented method", class_id, method_id)
        channel.settle()  # acks that came before this method take effect before it
        origin = (channel, class_id, method_id)
        self.transport.in_method = True
        try:
            pending = handler(channel, method)
            if pending is not None:
                task = EagerTask(pending, lambda error: self._resumed(origin, error))
                if not task.start():
                    self._task = task
                    return True
        except HeadraceError as error:
            self.fail(error, *origin)
        self.transport.end_method()
        return self._must_wait_for_output() or self.stage is Stage.CLOSED

    def _must_wait_for_output(self) -> bool:
        """Stops processing while a client that sends requests does not read the replies: the bytes of one read can
        ask for more output than there is memory."""
        if not self.transport.is_writable and self.transport.is_flooded:
            self.transport.hold_reading(OUTPUT, True)
            return True
        return False

    def _resumed(self, origin: tuple[Channel, int, int], error: BaseException | None) -> None:
        """The method that waited has ended."""
        self._task = None
        if isinstance(error, HeadraceError):
            self.fail(error, *origin)
        elif error is not None:
            logger.error("internal error in an AMQP method handler", exc_info=error)
            self.close(protocol.INTERNAL_ERROR, "INTERNAL_ERROR")
        self.transport.end_method()
        if OUTPUT not in self.transport.paused_for:
            self._continue()

    def _continue(self) -> None:
        """Processes the bytes that arrived while a method waited."""
        if self.stage is not Stage.CLOSED:
            data, self._unprocessed = self._unprocessed, b""
            self._process(data)
            if self._task is None:
                self.transport.hold_reading(UNPROCESSED, False)

    def _on_channel_method(self, number: int, method: Any, class_id: int, method_id: int) -> bool:
        channel = self.channels.get(number)
        if isinstance(method, commands.Channel.Open):
            if channel is not None:
                raise ProtocolError(protocol.CHANNEL_ERROR, "second 'channel.open' seen", class_id, method_id)
            self._open_channel(number)
            return False
        if channel is None:
            raise ProtocolError(protocol.CHANNEL_ERROR, "expected 'channel.open'", class_id, method_id)
        if isinstance(method, commands.Channel.Close):
            # If both sides close at the same time, the channel ends with the close-ok that is on its way.
            if not channel.state.closing:
                self._end_channel(channel)
            self.transport.write(frame(number, commands.Channel.CloseOk))
            return False
        if isinstance(method, commands.Channel.CloseOk) and channel.state.closing:
            self._end_channel(channel)
            return False
        return self._run(channel, method, class_id, method_id)

    def _open_channel(self, number: int) -> None:
        session = self.session
        assert session is not None, "channels are opened in stage RUNNING only"
        if len(self.channels) >= self.channel_max:
            text = f"number of channels opened ({len(self.channels)}) has reached the negotiated channel_max"
            raise ProtocolError(protocol.NOT_ALLOWED, f"{text} ({self.channel_max})")
        session.access.check_limit("channels", self._channels_of_user)
        channel = self.channels[number] = Channel(self, session, self.context, number)
        self._scanner.add_channel(channel.state)
        self.transport.write(frame(number, commands.Channel.OpenOk))

    def _end_channel(self, channel: Channel) -> None:
        self.after_feed()
        channel.release()
        del self.channels[channel.number]
        self._scanner.remove_channel(channel.number)

    def _channels_of_user(self) -> int:
        return sum(len(connection.channels) for connection in self._registry.of_user(self.user))

    # Closing.

    def fail(self, error: HeadraceError, channel: Channel, class_id: int, method_id: int) -> None:
        """Reports an error of a method: closes the channel, or the connection if the reply code is a hard error."""
        code, text = reply(error)
        if code in HARD:
            self.close(code, text, class_id, method_id)
        elif channel.is_open and self.stage is Stage.RUNNING:
            channel.send_close(code, text, class_id, method_id)

    def close(self, code: int, text: str, class_id: int = 0, method_id: int = 0) -> None:
        """Sends connection.close and waits CLOSE_TIMEOUT_S for close-ok."""
        if self.stage in (Stage.CLOSING, Stage.CLOSED):
            return
        # A shutdown closes thousands of connections: one log line for each would be too many.
        level = logging.DEBUG if code == protocol.CONNECTION_FORCED else logging.INFO
        logger.log(level, "closing AMQP connection from %s: %d %s", self.transport.peer, code, text)
        self.transport.write(
            frame(
                0, commands.Connection.Close, reply_code=code, reply_text=text, class_id=class_id, method_id=method_id
            )
        )
        self.stage = Stage.CLOSING
        self.transport.resume_reading()  # to read close-ok
        for channel in self.channels.values():
            channel.release()
            channel.state.closing = True
        self.transport.arm(CLOSE_TIMEOUT_S, self.drop)

    def linger(self) -> None:
        """The client has closed the connection; see AmqpTransport.linger."""
        self.after_feed()
        self.stage = Stage.CLOSED
        for channel in self.channels.values():
            channel.release()
        # Now and not when the socket is closed: after close-ok the client may rely on its exclusive queues being gone.
        if self.session is not None:
            self.session.close()
        self.transport.linger()

    def drop(self) -> None:
        """Closes the socket after the pending output."""
        self.stage = Stage.CLOSED
        self.transport.close()

    def abort(self) -> None:
        self.transport.abort()

    # For backpressure.Flow, the registry and connection_info.

    def abort_for(self, reason: str) -> None:
        logger.warning("closing AMQP connection from %s: %s", self.transport.peer, reason)
        self.context.stats.count("shed")
        self.transport.abort()

    def hold_reading(self, reason: str, held: bool) -> None:
        self.transport.hold_reading(reason, held)

    def tell_blocked(self, reason: str | None) -> None:
        if self.stage is Stage.RUNNING and self.capabilities.get("connection.blocked") is True:
            if reason is None:
                self.transport.write(frame(0, commands.Connection.Unblocked))
            else:
                self.transport.write(frame(0, commands.Connection.Blocked, reason=reason))

    def fileno(self) -> int:
        return self.transport.fileno()

    @property
    def is_sending(self) -> bool:
        return any(channel.state.expects_content for channel in self.channels.values())

    @property
    def buffered_bytes(self) -> int:
        incoming = sum(c.state.pending_bytes + (c.tx.size_bytes if c.tx else 0) for c in self.channels.values())
        return self.transport.output_bytes + len(self._unprocessed) + incoming

    @property
    def source(self) -> str:
        return self.transport.source

    @property
    def vhost_name(self) -> str | None:
        return self.session.vhost.name if self.session is not None and self.stage is Stage.RUNNING else None

    @property
    def messages_in(self) -> int:
        return self._scanner.messages

    @property
    def bytes_in(self) -> int:
        return self._scanner.bytes
