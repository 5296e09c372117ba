"""One AMQP connection: bytes from the socket to the scanner, methods to their handlers, frames back.

Methods run in the order they came, whatever their channel. One that has to wait for the disk holds back
what follows on this connection, and nobody else. Publishes do not wait: they gather, and their
confirms go out when the flush they were part of is on stable storage.
"""

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from pamqp import commands
from pamqp.base import Frame

from headrace.broker.types.message import Message
from headrace.broker.types.publish_tracker import PublishTracker
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import HeadraceError
from headrace.listeners.amqp import publish
from headrace.listeners.amqp.access import Access
from headrace.listeners.amqp.channel import Channel
from headrace.listeners.amqp.eager_task import EagerTask
from headrace.listeners.amqp.errors import HARD, ChannelError, reply
from headrace.listeners.amqp.methods import handshake, opening
from headrace.listeners.amqp.methods.handshake import Stage
from headrace.listeners.amqp.methods.table import HANDLERS
from headrace.listeners.amqp.transport import CLOSE_TIMEOUT_S, AmqpTransport
from headrace.wire.amqp import protocol
from headrace.wire.amqp.methods import content_frames, decode, frame
from headrace.wire.amqp.protocol import PROTOCOL_HEADER, ProtocolError
from headrace.wire.amqp.scan import ChannelState, Runs, Scanner, Target

if TYPE_CHECKING:
    from headrace.listeners.amqp.listener import AmqpListener

logger = logging.getLogger("headrace.amqp")

UNREAD_BYTES_MAX = 1 << 20
CLASS_CONNECTION, CLASS_CHANNEL = 10, 20
QUICK_ACK_BYTES_MAX = 4096  # more than this fills a segment, and Nagle lets full ones go


class Connection(AmqpTransport):
    def __init__(self, listener: "AmqpListener") -> None:
        super().__init__(listener)
        self.broker = listener.broker
        self.flushes = listener.broker.vhosts.flushes
        self.user = ""
        self.client_properties: dict[str, Any] = {}
        self.capabilities: dict[str, Any] = {}
        self.channels: dict[int, Channel] = {}
        self.frame_max = protocol.FRAME_MAX_BEFORE_TUNE
        self.channel_max = listener.config.amqp_channels_max
        self.has_published = False
        self.users = listener.broker.users
        self.vhost: VirtualHost
        self.access: Access
        self.connected_ms = listener.broker.clock.now_ms()
        self.secret_updates = 0
        self._scanner = Scanner(self, protocol.FRAME_MAX_BEFORE_TUNE)
        self._unread = b""
        self._steps: EagerTask | None = None
        self._flushing = 0
        self._author, self._author_at = PublishTracker(), 0  # of what was published since the last answer was asked for
        self._in_method = False
        self._after_method: list[bytes] = []
        self._messages_seen = self._bytes_seen = 0

    # The socket.

    def _is_admitted(self) -> bool:
        return self.listener.admit(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.stage = Stage.CLOSED
        self._disarm()
        if self._steps is not None:
            self._steps.leave()
            self._steps = None
        for channel in self.channels.values():
            channel.release()
        self.channels.clear()
        self._give_up_exclusive()
        self.listener.forget(self)

    def _give_up_exclusive(self) -> None:
        if hasattr(self, "vhost"):
            self.vhost.connection_closed(self)

    def resume_writing(self) -> None:
        self.is_writable = True
        if "output" in self._holds:
            self.hold_reading("output", False)
            if self._steps is None:
                self._go_on()
        for channel in self.channels.values():
            channel.wake()

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
        stats = self.listener.stats
        stats.messages_out += count
        stats.bytes_out += size

    def deliver_reply(self, channel: Channel, message: Message) -> None:
        frames = content_frames(
            channel.number,
            commands.Basic.Deliver,
            message.properties,
            message.body,
            self.frame_max,
            consumer_tag=channel.reply_tag,
            delivery_tag=channel.state.tags.add(-1, 0),
            redelivered=False,
            exchange=message.exchange,
            routing_key=message.routing_key,
        )
        self.deliver(frames, 1, len(message.body))

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
        author, self.flushes.tracker = self.flushes.tracker, self._author
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
            self.flushes.tracker = author
        self._unread = data[used:] if used < len(data) else b""
        self.after_feed()
        self.listener.flow.received(self, len(data))

    def _feed(self, data: bytes) -> int:
        """How many bytes were used. While some queue's log refuses what comes, one frame at a time: what became of
        each publish is known then, wherever it went."""
        now_ms = self.broker.clock.now_ms()
        if not self.flushes.refusing or self.stage in handshake.EXPECTED:  # which stops for reasons of its own
            return self._scanner.feed(data, now_ms)
        used, left = 0, memoryview(data)
        while step := self._scanner.feed(left[: protocol.frame_size(left)], now_ms):
            used += step
            left = left[step:]
            self.after_feed()
            if self._steps is not None or "output" in self._holds or self.stage is Stage.CLOSED:
                break
        return used

    def _take_header(self, data: bytes) -> bytes:
        if not PROTOCOL_HEADER.startswith(data[:8]):
            # Whatever this is, it is not AMQP 0-9-1: say what is spoken here, and goodbye.
            self._transport.write(PROTOCOL_HEADER)
            self.drop()
            return b""
        if len(data) < 8:
            self._unread = data
            return b""
        self.stage = Stage.START
        self.write(opening.greeting(self))
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
        scanner, stats = self._scanner, self.listener.stats
        stats.messages_in += scanner.messages - self._messages_seen
        stats.bytes_in += scanner.bytes - self._bytes_seen
        waiting: list[tuple[Channel, int, Runs]] = []
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
                    waiting.append((channel, state.sequence, state.take_runs()))
            elif channel.confirms:
                channel.confirm_to(state.sequence)
                state.take_runs()
            state.touched_disk = False
        if touched or waiting:
            self._flushing += 1
            self._author.stores |= touched
            self.flushes.after(partial(self._flushed, waiting, self._author if touched else None))
            if self.broker.shard.pending_bytes > self.broker.pressure.staged_bytes_max:
                self.hold_reading("disk", True)
                self.broker.shard.on_drain(partial(self.hold_reading, "disk", False))
        if not answered and scanner.bytes - self._bytes_seen < QUICK_ACK_BYTES_MAX:
            self.acknowledge_now()
        self._messages_seen, self._bytes_seen = scanner.messages, scanner.bytes
        if waiting or self._author_at != self.flushes.flush_count:  # where nobody asks, once for each flush will do
            self._next_author()
        self.listener.flow.published(self)

    def _next_author(self) -> None:
        """What is published from now on has an answer of its own."""
        author, self._author, self._author_at = self._author, PublishTracker(), self.flushes.flush_count
        author.detach()
        if self.flushes.tracker is author:
            self.flushes.tracker = self._author

    def _flushed(
        self, waiting: list[tuple[Channel, int, Runs]], author: PublishTracker | None, error: HeadraceError | None
    ) -> None:
        """Without an author it waited for what was published before it, and that has its answer."""
        self._flushing -= 1
        refusal = author.outcome(error) if author is not None else None
        for channel, sequence, runs in waiting:
            if refusal is not None:
                channel.failed(sequence, runs, refusal)
            else:
                channel.stored(sequence)

    def enter(self, vhost: VirtualHost) -> None:
        access = Access(self.users, self.user, vhost.name, self.peer)
        if access.rights() is None:
            text = f"access to vhost '{vhost.name}' refused for user '{self.user}'"
            logger.warning("from %s: %s", self.peer, text)
            raise ChannelError(protocol.NOT_ALLOWED, text)
        access.check_vhost_limit(vhost, lambda: len(self.listener.running_in(vhost.name)))
        access.check_limit("connections", lambda: len(self.listener.running_of(self.user)))
        self.vhost, self.access = vhost, access

    def tuned(self, channel_max: int, frame_max: int, heartbeat_s: int) -> None:
        self.channel_max = channel_max
        self.frame_max = self._scanner.frame_max = frame_max
        self.heartbeat_s = heartbeat_s

    async def flushed(self) -> None:
        """For methods that look at queues: what this connection published before is there to be seen."""
        self.after_feed()
        self.flushes.flush_memory()
        if self._flushing:
            await self.flushes.wait_flushed()

    # What the scanner says. True stops the scan: the rest is processed when the method is done.

    @property
    def topology_version(self) -> int:
        """Both only grow, so that the sum is another one after a change of either."""
        return self.vhost.routing.version + self.users.version if self.stage is Stage.RUNNING else 0

    def on_method(self, number: int, class_id: int, method_id: int, arguments: bytes) -> bool:
        if class_id == CLASS_CONNECTION and number == 0:
            return opening.on_method(self, decode(class_id, method_id, arguments), class_id, method_id)
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
            raise ProtocolError(protocol.COMMAND_INVALID, "unimplemented method", class_id, method_id)
        channel.settle()  # acks that came before this method happened before it
        where = (channel, class_id, method_id)
        self._in_method = True
        try:
            pending = handler(channel, method)
            if pending is not None:
                steps = EagerTask(pending, lambda error: self._resumed(where, error))
                if not steps.start():
                    self._steps = steps
                    return True
        except HeadraceError as error:
            self.fail(error, *where)
        self._method_done()
        return self._waits_for_reader() or self.stage is Stage.CLOSED

    def _waits_for_reader(self) -> bool:
        """One read may ask for more than there is memory, or have more returned than that."""
        if not self.is_writable and self.is_flooded:
            self.hold_reading("output", True)
            return True
        return False

    def _resumed(self, where: tuple[Channel, int, int], error: BaseException | None) -> None:
        self._steps = None
        if isinstance(error, HeadraceError):
            self.fail(error, *where)
        elif error is not None:
            logger.error("a bug in a method of the AMQP listener", exc_info=error)
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
            state.sequence -= 1  # it is counted already, and what is refused is not to be confirmed with the rest
            self.after_feed()
            self.fail(error, channel, 60, 40)
        return self._waits_for_reader()

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

    # Channel methods.

    def _on_channel(self, number: int, method: Any, class_id: int, method_id: int) -> bool:
        channel = self.channels.get(number)
        if isinstance(method, commands.Channel.Open):
            if channel is not None:
                raise ProtocolError(protocol.CHANNEL_ERROR, "second 'channel.open' seen", class_id, method_id)
            if len(self.channels) >= self.channel_max:
                text = f"number of channels opened ({len(self.channels)}) has reached the negotiated channel_max"
                raise ProtocolError(protocol.NOT_ALLOWED, f"{text} ({self.channel_max})")
            self.access.check_limit("channels", self._channels_of_user)
            channel = self.channels[number] = Channel(self, number)
            self._scanner.add_channel(channel.state)
            self.write(frame(number, commands.Channel.OpenOk))
            return False
        if channel is None:
            raise ProtocolError(protocol.CHANNEL_ERROR, "expected 'channel.open'", class_id, method_id)
        if isinstance(method, commands.Channel.Close):
            if not channel.state.closing:  # else both closed it at once, and the answer to our close is on its way
                self._end_channel(channel)
            self.write(frame(number, commands.Channel.CloseOk))
            return False
        if isinstance(method, commands.Channel.CloseOk) and channel.state.closing:
            self._end_channel(channel)
            return False
        return self._run(channel, method, class_id, method_id)

    def _end_channel(self, channel: Channel) -> None:
        self.after_feed()
        channel.release()
        del self.channels[channel.number]
        self._scanner.remove_channel(channel.number)

    def _channels_of_user(self) -> int:
        return sum(len(connection.channels) for connection in self.listener.running_of(self.user))

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
        self._arm(CLOSE_TIMEOUT_S, self.drop)

    def linger(self) -> None:
        """Some clients still write what they had buffered after connection.close: hanging up on them would be a
        reset, and they would never read close-ok. They hang up when they have read it."""
        self.after_feed()
        self.stage = Stage.CLOSED
        for channel in self.channels.values():
            channel.release()
        self._give_up_exclusive()  # whoever waits for close-ok may count on it, and its socket may end later
        self._holds.clear()
        self._arm(CLOSE_TIMEOUT_S, self._transport.abort)

    def tell_blocked(self, reason: str | None) -> None:
        if self.stage is Stage.RUNNING and self.wants("connection.blocked"):
            if reason is None:
                self.write(frame(0, commands.Connection.Unblocked))
            else:
                self.write(frame(0, commands.Connection.Blocked, reason=reason))

    @property
    def is_sending(self) -> bool:
        return any(channel.state.expects_content for channel in self.channels.values())

    @property
    def buffered_bytes(self) -> int:
        incoming = sum(c.state.pending_bytes + (c.tx.size_bytes if c.tx else 0) for c in self.channels.values())
        return self._transport.get_write_buffer_size() + len(self._unread) + incoming

    @property
    def messages_in(self) -> int:
        return self._messages_seen

    @property
    def bytes_in(self) -> int:
        return self._bytes_seen

    def wants(self, capability: str) -> bool:
        return self.capabilities.get(capability) is True
