"""An AMQP connection: owns its transport, its scanner, its channels and their confirms.

Received bytes go to the scanner (wire/amqp/scan.pyx), whose events go to the dispatcher (dispatch.py).
"""

import asyncio
import logging
from typing import Any

from pamqp import commands

from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import HeadraceError
from headrace.listeners.amqp.access import Access
from headrace.listeners.amqp.channel import Channel
from headrace.listeners.amqp.confirms import PublisherConfirms
from headrace.listeners.amqp.context import ListenerContext
from headrace.listeners.amqp.dispatch import MethodDispatcher
from headrace.listeners.amqp.errors import HARD, ChannelError, reply
from headrace.listeners.amqp.methods import connection as handshake
from headrace.listeners.amqp.methods.connection import HandshakeStage
from headrace.listeners.amqp.registry import ConnectionRegistry
from headrace.listeners.amqp.session import Session
from headrace.listeners.amqp.transport import CLOSE_TIMEOUT_S, OUTPUT, UNPROCESSED, AmqpTransport
from headrace.wire.amqp import protocol
from headrace.wire.amqp.methods import frame
from headrace.wire.amqp.protocol import PROTOCOL_HEADER, ProtocolError
from headrace.wire.amqp.scan import Scanner

logger = logging.getLogger("headrace.amqp")

HANDSHAKE_TIMEOUT_S = 10.0
UNPROCESSED_BYTES_MAX = 1 << 20


class Connection(asyncio.Protocol):
    """The asyncio protocol of one socket."""

    def __init__(self, context: ListenerContext, registry: "ConnectionRegistry[Connection]") -> None:
        loop = asyncio.get_running_loop()
        self.context = context
        self.transport = AmqpTransport(context.stats, loop)
        self.stage = HandshakeStage.HEADER
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
        self._dispatcher = MethodDispatcher(self)
        self.scanner = Scanner(self._dispatcher, protocol.FRAME_MAX_BEFORE_TUNE)
        self._confirms = PublisherConfirms(self.scanner, self.channels, self.transport, context)
        self._unprocessed = b""

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
        self.stage = HandshakeStage.CLOSED
        self.transport.is_closed = True
        self.transport.disarm()
        self._dispatcher.detach()
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
            transport.set_reading_paused(OUTPUT, False)
            if self._dispatcher.waiting is None:
                self._continue()
        for channel in self.channels.values():
            channel.wake()

    def eof_received(self) -> bool:
        return False

    def data_received(self, data: bytes) -> None:
        transport = self.transport
        transport.last_read = self._loop_time()
        counts = transport.counts
        counts.received_bytes += len(data)
        counts.reads += 1
        if self.stage is HandshakeStage.CLOSED:
            return
        if self._unprocessed:
            data = self._unprocessed + data
            self._unprocessed = b""
        if self._dispatcher.waiting is not None or OUTPUT in transport.paused_for:
            self._unprocessed = data
            transport.set_reading_paused(UNPROCESSED, len(data) > UNPROCESSED_BYTES_MAX)
            return
        self._process(data)

    # Received bytes.

    def _process(self, data: bytes) -> None:
        if self.stage is HandshakeStage.HEADER:
            data = self._read_header(data)
        if self.stage in (HandshakeStage.HEADER, HandshakeStage.CLOSED) or not data:
            return
        now_ms = self.context.clock.now_ms()
        try:
            # Not one by one during the handshake: its handlers stop the scan for reasons that _feed_frames ignores.
            if not self._flushes.refusing or self.stage in handshake.EXPECTED:
                used = self.scanner.feed(data, now_ms)
            else:
                used = self._feed_frames(data, now_ms)
        except ProtocolError as error:
            self.after_feed()
            self.close(*reply(error), error.class_id, error.method_id)
            return
        except HeadraceError as error:
            self.after_feed()
            self.close(*reply(error))
            return
        self._unprocessed = data[used:] if used < len(data) else b""
        self.after_feed()
        self._flow.received(self, len(data))

    def _feed_frames(self, data: bytes, now_ms: int) -> int:
        """Like Scanner.feed, one frame at a time. While the log of any queue refuses writes, each publish is registered
        with the flush separately."""
        used, left = 0, memoryview(data)
        while step := self.scanner.feed(left[: protocol.frame_size(left)], now_ms):
            used += step
            left = left[step:]
            self.after_feed()
            if (
                self._dispatcher.waiting is not None
                or OUTPUT in self.transport.paused_for
                or self.stage is HandshakeStage.CLOSED
            ):
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
        self.stage = HandshakeStage.START
        cluster_name = self.context.broker.global_parameters.cluster_name
        self.transport.write(handshake.start_frame(self.context.config, cluster_name))
        return data[8:]

    def method_ended(self) -> None:
        if OUTPUT not in self.transport.paused_for:
            self._continue()

    def _continue(self) -> None:
        """Processes the bytes that arrived while a method waited."""
        if self.stage is not HandshakeStage.CLOSED:
            data = self._unprocessed
            used = self._dispatcher.declare_together(data)
            self._unprocessed = b""
            if self._dispatcher.waiting is not None:
                self._unprocessed = data[used:]
                return
            self._process(data[used:])
            if self._dispatcher.waiting is None:
                self.transport.set_reading_paused(UNPROCESSED, False)

    def after_feed(self) -> None:
        """Applies the acks and publishes that the scanner has collected."""
        for state in self.scanner.take_acked():
            channel = self.channels.get(state.number)
            if channel is not None:
                channel.settle()
        published = self.scanner.take_published()
        if published:
            self._confirms.after_publishes(published)
            if self not in self._flow.publishers:
                self._flow.published(self)

    async def flushed(self) -> None:
        """Waits until everything that this connection has published is visible in the queues."""
        self.after_feed()
        self._flushes.flush_memory()
        if self._confirms.flushes_pending:
            await self._flushes.wait_flushed()

    # The handshake.

    def logged_in(self) -> None:
        self._registry.logged_in(self)

    def tuned(self, channel_max: int, frame_max: int, heartbeat_s: int) -> None:
        self.channel_max = channel_max
        self.frame_max = self.scanner.frame_max = frame_max
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

    # Channels.

    def open_channel(self, number: int) -> None:
        session = self.session
        assert session is not None, "channels are opened in stage RUNNING only"
        if len(self.channels) >= self.channel_max:
            text = f"number of channels opened ({len(self.channels)}) has reached the negotiated channel_max"
            raise ProtocolError(protocol.NOT_ALLOWED, f"{text} ({self.channel_max})")
        if number > self.channel_max:
            text = f"channel number {number} is higher than the negotiated channel_max ({self.channel_max})"
            raise ProtocolError(protocol.CHANNEL_ERROR, text, 20, 10)
        session.access.check_limit("channels", self._channels_of_user)
        channel = self.channels[number] = Channel(self, session, self.context, number)
        self.scanner.add_channel(channel.state)

    def end_channel(self, channel: Channel) -> None:
        self.after_feed()
        channel.release()
        del self.channels[channel.number]
        self.scanner.remove_channel(channel.number)

    def _channels_of_user(self) -> int:
        return sum(len(connection.channels) for connection in self._registry.of_user(self.user))

    # Closing.

    def fail(self, error: HeadraceError, channel: Channel, class_id: int, method_id: int) -> None:
        """Reports an error of a method: closes the channel, or the connection if the reply code is a hard error."""
        code, text = reply(error)
        if code in HARD:
            self.close(code, text, class_id, method_id)
        elif channel.is_open and self.stage is HandshakeStage.RUNNING:
            channel.send_close(code, text, class_id, method_id)

    def close(self, code: int, text: str, class_id: int = 0, method_id: int = 0) -> None:
        """Sends connection.close and waits CLOSE_TIMEOUT_S for close-ok."""
        if self.stage in (HandshakeStage.CLOSING, HandshakeStage.CLOSED):
            return
        # A shutdown closes thousands of connections: one log line for each would be too many.
        level = logging.DEBUG if code == protocol.CONNECTION_FORCED else logging.INFO
        logger.log(level, "closing AMQP connection from %s: %d %s", self.transport.peer, code, text)
        self.transport.write(
            frame(
                0, commands.Connection.Close, reply_code=code, reply_text=text, class_id=class_id, method_id=method_id
            )
        )
        self.stage = HandshakeStage.CLOSING
        self.transport.resume_reading()  # to read close-ok
        for channel in self.channels.values():
            channel.release()
            channel.state.closing = True
        self.transport.arm(CLOSE_TIMEOUT_S, self.drop)

    def linger(self) -> None:
        """The client has closed the connection; see AmqpTransport.linger."""
        self.after_feed()
        self.stage = HandshakeStage.CLOSED
        for channel in self.channels.values():
            channel.release()
        # Now and not when the socket is closed: after close-ok the client may rely on its exclusive queues being gone.
        if self.session is not None:
            self.session.close()
        self.transport.linger()

    def drop(self) -> None:
        """Closes the socket after the pending output."""
        self.stage = HandshakeStage.CLOSED
        self.transport.close()

    def abort(self) -> None:
        self.transport.abort()

    # For backpressure.Flow, the registry and connection_info.

    def abort_for(self, reason: str) -> None:
        logger.warning("closing AMQP connection from %s: %s", self.transport.peer, reason)
        self.context.stats.count("shed")
        self.transport.abort()

    def set_reading_paused(self, reason: str, held: bool) -> None:
        self.transport.set_reading_paused(reason, held)

    def notify_blocked(self, reason: str | None) -> None:
        if self.stage is HandshakeStage.RUNNING and self.capabilities.get("connection.blocked") is True:
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
        return self.session.vhost.name if self.session is not None and self.stage is HandshakeStage.RUNNING else None
