"""One AMQP connection: bytes from the socket to the scanner, methods to their handlers, frames back.

Methods run in the order they came, whatever their channel. One that has to wait for the disk holds back
what follows on this connection, and nobody else. Publishes do not wait: they gather, and their
confirms go out when the flush they were part of is on stable storage.
"""

import asyncio
import logging
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

from pamqp import commands
from pamqp.base import Frame

from headrace.broker.message import Message
from headrace.broker.rounds import PartlyStored
from headrace.broker.vhost import VirtualHost
from headrace.doors.amqp import handshake, publish
from headrace.doors.amqp.channel import Channel
from headrace.doors.amqp.errors import HARD, ChannelError, reply
from headrace.doors.amqp.handshake import Stage
from headrace.doors.amqp.methods import HANDLERS
from headrace.doors.amqp.steps import Steps
from headrace.errors import HeadraceError
from headrace.wire.amqp import protocol
from headrace.wire.amqp.methods import content_frames, decode, frame
from headrace.wire.amqp.protocol import PROTOCOL_HEADER, ProtocolError
from headrace.wire.amqp.scan import ChannelState, Scanner, Target

if TYPE_CHECKING:
    from headrace.doors.amqp.door import AmqpDoor

logger = logging.getLogger("headrace.amqp")

HANDSHAKE_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
UNREAD_BYTES_MAX = 1 << 20
OUTPUT_BYTES_MAX = 8 << 20  # deliveries stop long before; past it a client that asks and does not read is not read
CLASS_CONNECTION, CLASS_CHANNEL = 10, 20
QUICK_ACK_BYTES_MAX = 4096  # more than this fills a segment, and Nagle lets full ones go
QUICK_ACK: int | None = getattr(socket, "TCP_QUICKACK", None)


class Connection(asyncio.Protocol):
    def __init__(self, door: "AmqpDoor") -> None:
        self.door = door
        self.broker = door.broker
        self.rounds = door.broker.vhosts.rounds
        self.stage = Stage.HEADER
        self.user = ""
        self.client_properties: dict[str, Any] = {}
        self.capabilities: dict[str, Any] = {}
        self.channels: dict[int, Channel] = {}
        self.frame_max = protocol.FRAME_MAX_BEFORE_TUNE
        self.channel_max = door.config.amqp_channels_max
        self.heartbeat_s = 0
        self.is_writable = True
        self.has_published = False
        self.vhost: VirtualHost
        self.peer: Any = None
        self.own_address: Any = None
        self.connected_ms = door.broker.clock.now_ms()
        self.secret_updates = 0
        self._transport: asyncio.Transport
        self._socket: Any = None
        self._scanner = Scanner(self, protocol.FRAME_MAX_BEFORE_TUNE)
        self._unread = b""
        self._steps: Steps | None = None
        self._flushing = 0
        self._holds: set[str] = set()
        self._in_method = False
        self._after_method: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._heard = self._spoke = 0.0
        self._loop = asyncio.get_running_loop()
        self._messages_seen = self._bytes_seen = 0

    # The socket.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.peer = transport.get_extra_info("peername")
        self.own_address = transport.get_extra_info("sockname")
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            self._socket = sock
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        transport.set_write_buffer_limits(high=self.door.flow.write_high())
        if not self.door.admit(self):
            transport.close()
            return
        self._timer = self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._handshake_timeout)

    def connection_lost(self, error: Exception | None) -> None:
        self.stage = Stage.CLOSED
        if self._timer is not None:
            self._timer.cancel()
        if self._steps is not None:
            self._steps.leave()
            self._steps = None
        for channel in self.channels.values():
            channel.release()
        self.channels.clear()
        if hasattr(self, "vhost"):
            self.vhost.connection_closed(self)
        self.door.forget(self)

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        if "output" in self._holds:
            self.hold_reading("output", False)
            if self._steps is None:
                self._go_on()
        for channel in self.channels.values():
            channel.wake()

    def eof_received(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        if self.stage is not Stage.CLOSED:
            self._spoke = self._loop.time()
            self._transport.write(data)

    def write_after_method(self, data: bytes) -> None:
        """For news that a method of this connection causes: the client expects the answer first."""
        if self._in_method:
            self._after_method.append(data)
        else:
            self.write(data)

    def _method_done(self) -> None:
        self._in_method = False
        if self._after_method:
            news, self._after_method = self._after_method, []
            for data in news:
                self.write(data)

    def deliver(self, frames: bytes, count: int, size: int) -> None:
        self._spoke = self._loop.time()
        self._transport.write(frames)
        stats = self.door.stats
        stats.messages_out += count
        stats.bytes_out += size

    def deliver_reply(self, channel: Channel, message: Message) -> None:
        frames = content_frames(
            channel.number, commands.Basic.Deliver, message.properties, message.body, self.frame_max,
            consumer_tag=channel.reply_tag, delivery_tag=channel.state.tags.add(-1, 0), redelivered=False,
            exchange=message.exchange, routing_key=message.routing_key,
        )
        self.deliver(frames, 1, len(message.body))

    def hold_reading(self, reason: str, held: bool) -> None:
        """Reading stops while anybody has a reason to hold it."""
        before = bool(self._holds)
        (self._holds.add if held else self._holds.discard)(reason)
        if bool(self._holds) != before and self.stage is not Stage.CLOSED and not self._transport.is_closing():
            (self._transport.pause_reading if self._holds else self._transport.resume_reading)()

    # Bytes in.

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        if self.stage is Stage.CLOSED:
            return
        if self._unread:
            data = self._unread + data
            self._unread = b""
        if self._steps is not None or "output" in self._holds:
            self._unread = data
            self.hold_reading("busy", len(data) > UNREAD_BYTES_MAX)
            return
        self._process(data)

    def _process(self, data: bytes) -> None:
        if self.stage is Stage.HEADER:
            data = self._take_header(data)
        if self.stage in (Stage.HEADER, Stage.CLOSED) or not data:
            return
        try:
            used = self._scanner.feed(data, self.broker.clock.now_ms())
        except ProtocolError as error:
            self.after_feed()
            self.close(*reply(error), error.class_id, error.method_id)
            return
        except HeadraceError as error:
            self.after_feed()
            self.close(*reply(error))
            return
        self._unread = data[used:] if used < len(data) else b""
        self.after_feed()
        self.door.flow.received(self, len(data))

    def _take_header(self, data: bytes) -> bytes:
        if not PROTOCOL_HEADER.startswith(data[:8]):
            # Whatever this is, it is not AMQP 0-9-1: say what is spoken here, and goodbye.
            self._transport.write(PROTOCOL_HEADER)
            self._drop()
            return b""
        if len(data) < 8:
            self._unread = data
            return b""
        self.stage = Stage.START
        self.write(
            frame(
                0, commands.Connection.Start, version_major=0, version_minor=9,
                server_properties=handshake.server_properties(self.door.config), mechanisms="PLAIN AMQPLAIN",
                locales="en_US",
            )
        )
        return data[8:]

    def after_feed(self) -> None:
        for state in self._scanner.take_acked():
            channel = self.channels.get(state.number)
            if channel is not None:
                channel.settle()
        published = self._scanner.take_published()
        if published:
            self._after_publishes(published)

    def _after_publishes(self, published: list[ChannelState]) -> None:
        self.has_published = True
        scanner, stats = self._scanner, self.door.stats
        stats.messages_in += scanner.messages - self._messages_seen
        stats.bytes_in += scanner.bytes - self._bytes_seen
        waiting: list[tuple[Channel, int]] = []
        touched = answered = False
        for state in published:
            channel = self.channels.get(state.number)
            if channel is None:
                continue
            touched = touched or state.touched_disk
            answered = answered or channel.confirms
            if state.touched_disk or channel.waiting:
                if channel.confirms:
                    channel.waiting += 1
                    waiting.append((channel, state.sequence))
            elif channel.confirms:
                channel.confirm_to(state.sequence)
            state.touched_disk = False
        if touched or waiting:
            self._flushing += 1
            self.rounds.after(partial(self._flushed, waiting))
            if self.broker.shard.pending_bytes > self.broker.pressure.staged_bytes_max:
                self.hold_reading("disk", True)
                self.broker.shard.on_drain(partial(self.hold_reading, "disk", False))
        if not answered and scanner.bytes - self._bytes_seen < QUICK_ACK_BYTES_MAX:
            self._acknowledge_now()
        self._messages_seen, self._bytes_seen = scanner.messages, scanner.bytes
        self.door.flow.published(self)

    def _flushed(self, waiting: list[tuple[Channel, int]], error: HeadraceError | None) -> None:
        self._flushing -= 1
        if error is None:
            for channel, sequence in waiting:
                channel.stored(sequence)
        elif isinstance(error, PartlyStored):
            # Some queues have it, some do not: neither ack nor nack would be true.
            self.close(*reply(error))
        else:
            for channel, sequence in waiting:
                channel.failed(sequence)

    async def flushed(self) -> None:
        """For methods that look at queues: what this connection published before is there to be seen."""
        self.after_feed()
        self.rounds.flush_memory()
        if self._flushing:
            await self.rounds.settle_down()

    # What the scanner says. True stops the scan: the rest is processed when the method is done.

    @property
    def topology_version(self) -> int:
        return self.vhost.routing.version if self.stage is Stage.RUNNING else 0

    def on_method(self, number: int, class_id: int, method_id: int, arguments: bytes) -> bool:
        if class_id == CLASS_CONNECTION:
            if number != 0:
                text = "connection methods belong to channel 0"
                raise ProtocolError(protocol.CHANNEL_ERROR, text, class_id, method_id)
            return self._on_connection(decode(class_id, method_id, arguments), class_id, method_id)
        if self.stage is Stage.CLOSING:
            return False
        if self.stage is not Stage.RUNNING or number == 0:
            raise handshake.unexpected(self.stage, class_id, method_id)
        method = decode(class_id, method_id, arguments)
        if class_id == CLASS_CHANNEL:
            return self._on_channel(number, method, class_id, method_id)
        channel = self.channels.get(number)
        if channel is None:
            raise ProtocolError(protocol.CHANNEL_ERROR, "expected 'channel.open'", class_id, method_id)
        return self._run(channel, method, class_id, method_id)

    def _run(self, channel: Channel, method: Frame, class_id: int, method_id: int) -> bool:
        handler = HANDLERS.get(type(method))
        if handler is None:
            raise ProtocolError(protocol.COMMAND_INVALID, f"{method.name} is not for servers", class_id, method_id)
        channel.settle()  # acks that came before this method happened before it
        where = (channel, class_id, method_id)
        self._in_method = True
        try:
            pending = handler(channel, method)
            if pending is not None:
                steps = Steps(pending, lambda error: self._resumed(where, error))
                if not steps.start():
                    self._steps = steps
                    return True
        except HeadraceError as error:
            self.fail(error, *where)
        self._method_done()
        if not self.is_writable and self.is_flooded:
            self.hold_reading("output", True)  # one read may ask for more than there is memory
            return True
        return self.stage is Stage.CLOSED

    def _resumed(self, where: tuple[Channel, int, int], error: BaseException | None) -> None:
        self._steps = None
        if isinstance(error, HeadraceError):
            self.fail(error, *where)
        elif error is not None:
            logger.error("a bug in a method of the AMQP door", exc_info=error)
            self.close(protocol.INTERNAL_ERROR, "INTERNAL_ERROR")
        self._method_done()
        if "output" not in self._holds:
            self._go_on()

    def _go_on(self) -> None:
        if self.stage is not Stage.CLOSED:
            data, self._unread = self._unread, b""
            self._process(data)
            if self._steps is None:
                self.hold_reading("busy", False)

    def on_route(self, state: ChannelState, exchange: bytes, key: bytes, bits: int) -> Target | None:
        try:
            return publish.target(self, exchange, key, bits)
        except HeadraceError as error:
            self.after_feed()
            self.fail(error, self.channels[state.number], 60, 40)
            return None

    def on_message(self, state: ChannelState, method: bytes, properties: bytes, body: bytes) -> bool:
        channel = self.channels[state.number]
        try:
            publish.message(channel, method, properties, body)
        except HeadraceError as error:
            self.after_feed()
            self.fail(error, channel, 60, 40)
        return False

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

    # Connection and channel methods.

    def _on_connection(self, method: Any, class_id: int, method_id: int) -> bool:
        if isinstance(method, commands.Connection.CloseOk):
            if self.stage is Stage.CLOSING:
                self._drop()
            return True
        if isinstance(method, commands.Connection.Close):
            self.write(frame(0, commands.Connection.CloseOk))
            self._linger()
            return True
        if self.stage is Stage.CLOSING:
            return False
        if self.stage is Stage.RUNNING and isinstance(method, commands.Connection.UpdateSecret):
            self.secret_updates += 1
            self.write(frame(0, commands.Connection.UpdateSecretOk))
            return False
        expected = handshake.EXPECTED.get(self.stage)
        if expected is None or not isinstance(method, expected):
            raise handshake.unexpected(self.stage, class_id, method_id)
        if self.stage is Stage.START:
            return self._on_start_ok(method)
        if self.stage is Stage.TUNE:
            return self._on_tune_ok(method)
        return self._on_open(method)

    def _on_start_ok(self, method: commands.Connection.StartOk) -> bool:
        properties: Any = method.client_properties
        self.client_properties = properties
        found = properties.get("capabilities")
        self.capabilities = found if isinstance(found, dict) else {}
        try:
            self.user = handshake.log_in(method, self.peer)
        except handshake.Refused as error:
            self.door.stats.count("logins_refused")
            logger.warning("login refused from %s: user %r", self.peer, method.mechanism)
            if self.wants("authentication_failure_close"):
                self.close(*reply(error))
            else:
                self._drop()
            return True
        self.stage = Stage.TUNE
        config = self.door.config
        self.write(
            frame(
                0, commands.Connection.Tune, channel_max=config.amqp_channels_max, frame_max=config.amqp_frame_max,
                heartbeat=config.amqp_heartbeat_ms // 1000,
            )
        )
        return False

    def _on_tune_ok(self, method: commands.Connection.TuneOk) -> bool:
        handshake.check_tune(method, self.door.config)
        self.channel_max = method.channel_max
        self.frame_max = self._scanner.frame_max = method.frame_max
        self.heartbeat_s = method.heartbeat
        self.stage = Stage.OPEN
        self._acknowledge_now()
        return False

    def _acknowledge_now(self) -> None:
        """tune-ok and publishes without confirms have no answer. Clients with Nagle's algorithm hold back what
        follows until TCP has acknowledged them, and TCP waits 40 ms for an answer to ride on."""
        if self._socket is not None and QUICK_ACK is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, QUICK_ACK, 1)

    def _on_open(self, method: commands.Connection.Open) -> bool:
        try:
            self.vhost = self.broker.vhosts.get(method.virtual_host)
        except HeadraceError as error:
            self.close(*reply(error), 10, 40)
            return False
        self.stage = Stage.RUNNING
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.heartbeat_s:
            self._timer = self._loop.call_later(self.heartbeat_s / 2, self._beat)
        self.write(frame(0, commands.Connection.OpenOk))
        self.door.opened(self)
        return False

    def _on_channel(self, number: int, method: Any, class_id: int, method_id: int) -> bool:
        channel = self.channels.get(number)
        if isinstance(method, commands.Channel.Open):
            if channel is not None:
                raise ProtocolError(protocol.CHANNEL_ERROR, "second 'channel.open' seen", class_id, method_id)
            if number > self.channel_max or len(self.channels) >= self.channel_max:
                raise ProtocolError(
                    protocol.CHANNEL_ERROR,
                    f"channel {number} is over the negotiated channel_max {self.channel_max}", class_id, method_id,
                )
            channel = self.channels[number] = Channel(self, number)
            self._scanner.add_channel(channel.state)
            self.write(frame(number, commands.Channel.OpenOk))
            return False
        if channel is None:
            if isinstance(method, commands.Channel.CloseOk):
                return False
            raise ProtocolError(protocol.CHANNEL_ERROR, "expected 'channel.open'", class_id, method_id)
        if isinstance(method, commands.Channel.Close | commands.Channel.CloseOk):
            self.after_feed()
            channel.release()
            del self.channels[number]
            self._scanner.remove_channel(number)
            if isinstance(method, commands.Channel.Close):
                self.write(frame(number, commands.Channel.CloseOk))
            return False
        return self._run(channel, method, class_id, method_id)

    # Closing.

    def fail(self, error: HeadraceError, channel: Channel, class_id: int, method_id: int) -> None:
        """A method could not be done: the channel ends, or the whole connection when the code is a hard one."""
        code, text = reply(error)
        if code in HARD:
            self.close(code, text, class_id, method_id)
        elif channel.is_open and self.stage is Stage.RUNNING:
            channel.send_close(code, text, class_id, method_id)

    def close(self, code: int, text: str, class_id: int = 0, method_id: int = 0) -> None:
        """Says why, and waits a little for the client to have read it."""
        if self.stage in (Stage.CLOSING, Stage.CLOSED):
            return
        # At a shutdown there would be a line for each of thousands.
        level = logging.DEBUG if code == protocol.CONNECTION_FORCED else logging.INFO
        logger.log(level, "closing AMQP connection from %s: %d %s", self.peer, code, text)
        self.write(
            frame(
                0, commands.Connection.Close, reply_code=code, reply_text=text, class_id=class_id, method_id=method_id
            )
        )
        self.stage = Stage.CLOSING
        for reason in list(self._holds):
            self.hold_reading(reason, False)  # close-ok is to be read
        for channel in self.channels.values():
            channel.release()
            channel.state.closing = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._drop)

    def _linger(self) -> None:
        """Some clients still write what they had buffered after connection.close: hanging up on them would be a
        reset, and they would never read close-ok. They hang up when they have read it."""
        self.after_feed()
        self.stage = Stage.CLOSED
        for channel in self.channels.values():
            channel.release()
        self._holds.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def _drop(self) -> None:
        self.stage = Stage.CLOSED
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def fileno(self) -> int:
        return -1 if self._socket is None else int(self._socket.fileno())

    def abort_for(self, reason: str) -> None:
        logger.warning("closing AMQP connection from %s: %s", self.peer, reason)
        self.door.stats.count("shed")
        self._transport.abort()

    def tell_blocked(self, reason: str | None) -> None:
        if self.stage is Stage.RUNNING and self.wants("connection.blocked"):
            if reason is None:
                self.write(frame(0, commands.Connection.Unblocked))
            else:
                self.write(frame(0, commands.Connection.Blocked, reason=reason))

    def _handshake_timeout(self) -> None:
        self._timer = None
        self.door.stats.count("handshake_timeouts")
        self._drop()

    def _beat(self) -> None:
        """Twice per interval: speak if we were silent, hang up if the client was for two intervals."""
        now = self._loop.time()
        if self._holds:
            self._heard = now  # we do not read: its silence is ours
        if now - self._heard > 2 * self.heartbeat_s:
            logger.info("no heartbeat from %s for %d s", self.peer, 2 * self.heartbeat_s)
            self.door.stats.count("missed_heartbeats")
            self._transport.abort()
            return
        if now - self._spoke >= self.heartbeat_s / 2 - 0.01:
            self.write(protocol.HEARTBEAT)
        self._timer = self._loop.call_later(self.heartbeat_s / 2, self._beat)

    @property
    def is_flooded(self) -> bool:
        return self._transport.get_write_buffer_size() > OUTPUT_BYTES_MAX

    @property
    def is_sending(self) -> bool:
        return any(channel.state.expects_content for channel in self.channels.values())

    @property
    def buffered_bytes(self) -> int:
        incoming = sum(c.state.pending_bytes + (c.tx.size_bytes if c.tx else 0) for c in self.channels.values())
        return self._transport.get_write_buffer_size() + len(self._unread) + incoming

    @property
    def is_held(self) -> bool:
        """Whether its socket is not read because of memory or disk."""
        return bool(self._holds & {"pressure", "disk"})

    @property
    def messages_in(self) -> int:
        return self._messages_seen

    @property
    def bytes_in(self) -> int:
        return self._bytes_seen

    def wants(self, capability: str) -> bool:
        return self.capabilities.get(capability) is True
