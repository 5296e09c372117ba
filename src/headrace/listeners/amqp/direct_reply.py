"""Direct reply-to: answers go straight to the channel that asked, past every queue."""

import secrets
from typing import TYPE_CHECKING

from headrace.broker.types.message import Message

if TYPE_CHECKING:
    from headrace.listeners.amqp.channel import Channel

PSEUDO_QUEUE = "amq.rabbitmq.reply-to"
PREFIX = PSEUDO_QUEUE + "."


class DirectReplies:
    """The channels that wait for answers, by the token in their reply address."""

    def __init__(self) -> None:
        self._channels: dict[str, Channel] = {}

    def add(self, channel: "Channel") -> str:
        token = secrets.token_urlsafe(18)
        self._channels[token] = channel
        return token

    def remove(self, token: str) -> None:
        self._channels.pop(token, None)

    def find(self, routing_key: str) -> "Channel | None":
        return self._channels.get(routing_key.removeprefix(PREFIX)) if routing_key.startswith(PREFIX) else None

    def deliver(self, message: Message) -> bool:
        channel = self.find(message.routing_key)
        if channel is None or not channel.is_open or channel.connection.is_flooded:
            return False
        channel.connection.deliver_reply(channel, message)
        return True
