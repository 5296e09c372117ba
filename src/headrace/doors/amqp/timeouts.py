"""Consumer timeouts: a consumer that sits on a message too long loses its channel, where a queue asks for that.

RabbitMQ does it to everybody after 30 minutes, which kills long tasks. Here it happens only to consumers of
queues with x-consumer-timeout, or with that argument of their own.
"""

import asyncio
from typing import TYPE_CHECKING

from headrace.doors.amqp.errors import ChannelError
from headrace.wire.amqp.protocol import PRECONDITION_FAILED

if TYPE_CHECKING:
    from headrace.doors.amqp.channel import Channel

LOOK_S = 0.25


class Timeouts:
    """The channels that have a limit; looked at while there are any."""

    def __init__(self) -> None:
        self._channels: dict[Channel, tuple[int, int, float]] = {}  # limit in ms, oldest tag, since when
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, channel: "Channel", limit_ms: int) -> None:
        loop = asyncio.get_running_loop()
        known = self._channels.get(channel)
        limit_ms = min(limit_ms, known[0]) if known is not None else limit_ms
        self._channels[channel] = limit_ms, channel.state.tags.oldest_tag, loop.time()
        if self._timer is None:
            self._timer = loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for channel, (limit_ms, tag, since) in list(self._channels.items()):
            tags = channel.state.tags
            if not channel.is_open:
                del self._channels[channel]
            elif tags.oldest_tag != tag or not tags.unacked:
                self._channels[channel] = limit_ms, tags.oldest_tag, now
            elif now - since > limit_ms / 1000:
                del self._channels[channel]
                text = (
                    f"delivery acknowledgement on channel {channel.number} timed out. "
                    f"Timeout value used: {limit_ms} ms"
                )
                channel.connection.fail(ChannelError(PRECONDITION_FAILED, text), channel, 0, 0)
        self._timer = loop.call_later(LOOK_S, self._look) if self._channels else None

    def close(self) -> None:
        self._channels.clear()
        if self._timer is not None:
            self._timer.cancel()
