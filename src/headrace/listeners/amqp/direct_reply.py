"""Direct reply-to: replies go straight to the channel that sent the request, without a queue."""

import secrets
from typing import Protocol

from headrace.broker.types.message import Message

PSEUDO_QUEUE = "amq.rabbitmq.reply-to"
PREFIX = PSEUDO_QUEUE + "."


class Requester(Protocol):
    """A channel that consumes from the pseudo-queue."""

    def deliver_reply(self, message: Message) -> bool:
        """False if the channel is closed or its client does not read."""


class DirectReplies:
    """The channels that expect replies, by the token in their reply address."""

    def __init__(self) -> None:
        self._requesters: dict[str, Requester] = {}

    def add(self, requester: Requester) -> str:
        token = secrets.token_urlsafe(18)
        self._requesters[token] = requester
        return token

    def remove(self, token: str) -> None:
        self._requesters.pop(token, None)

    def find(self, routing_key: str) -> Requester | None:
        return self._requesters.get(routing_key.removeprefix(PREFIX)) if routing_key.startswith(PREFIX) else None

    def deliver(self, message: Message) -> bool:
        requester = self.find(message.routing_key)
        return requester is not None and requester.deliver_reply(message)
