"""Dead-lettering: messages that are rejected, expired, dropped or returned too often go to an exchange.

The copy and the settle of the original are one atomic group: after a crash the message is in one of the two queues,
never in neither. The copy's headers (x-death) tell where and why it died.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from headrace.broker.queues.delays import Delays
from headrace.broker.queues.flush import FlushCoordinator
from headrace.broker.queues.queue_arguments import QueueArguments
from headrace.broker.queues.retries import COUNT_HEADER, Retries, RetryingQueue
from headrace.broker.queues.view import View
from headrace.broker.routing.exchanges import Exchange
from headrace.broker.routing.router import Routing
from headrace.broker.types.message import NO_PROPERTIES, Message, cc_keys, to_text
from headrace.clock import Clock
from headrace.errors import InvalidInput
from headrace.record.amqp.properties import Int64, Timestamp, edit

REJECTED = "rejected"
DEATHS_MAX = 64  # bounds the headers of a message that is dead-lettered again and again
COUNT_MAX = 2**62


class NoPlace(Exception):
    """No queue accepts a dead letter that must not be lost (at-least-once)."""


class Origin(Protocol):
    """The queue that a dead letter comes from."""

    name: str
    policy: QueueArguments


# Clients may send these headers too, with any content.


def routing_keys(death: dict[str, Any]) -> list[Any]:
    """The keys as text. A key that is not UTF-8 was decoded as bytes."""
    found = death.get("routing-keys")
    return [to_text(key) if isinstance(key, bytes) else key for key in found] if isinstance(found, list) else []


def _deaths(headers: dict[str, Any]) -> list[dict[str, Any]]:
    """The latest first."""
    found = headers.get("x-death")
    return [death for death in found if isinstance(death, dict)] if isinstance(found, list) else []


def _new_death(queue: Origin, message: Message, headers: dict[str, Any], reason: str, now_ms: int) -> dict[str, Any]:
    death = {
        "count": Int64(1),
        "reason": reason,
        "queue": queue.name,
        "time": Timestamp(now_ms // 1000),
        "exchange": message.exchange,
        "routing-keys": [message.routing_key, *cc_keys(headers)],
    }
    expiration = message.expiration()
    return death if expiration is None else death | {"original-expiration": expiration}


def _count(death: dict[str, Any]) -> Int64:
    found = death.get("count")
    return Int64(min(found, COUNT_MAX)) if isinstance(found, int) else Int64(0)


class DeadLettering:
    """The dead-lettering of one vhost."""

    def __init__(
        self,
        routing: Routing[Any],
        queues: Mapping[str, RetryingQueue],
        delays: Delays[Any],
        flushes: FlushCoordinator,
        clock: Clock,
    ) -> None:
        self._routing = routing
        self._queues = queues
        self._delays = delays
        self.retries = Retries(queues, delays, flushes, clock)
        self._flushes = flushes
        self._clock = clock

    def move(self, queue: Origin, view: View, offset: int, message: Message, reason: str) -> bool:
        """Settle the message and publish a copy to the queue's dead-letter exchange, if it has one. False if it has
        none, or if the queue retries the message instead. Raises NoPlace if the copy must not be lost and no queue
        accepts it."""
        if reason == REJECTED and self.retries.keep(queue.name, queue.policy, view, offset, message):
            return False
        if queue.policy.keeps_dead_letters and not self._has_place(queue, message, reason):
            raise NoPlace
        self._flushes.begin_atomic()
        try:
            self.publish_copy(queue, message, reason, self._clock.now_ms())
            view.settle(offset, offset + 1)
        finally:
            self._flushes.end_atomic()
        return queue.policy.dead_letter_exchange is not None

    def publish_copy(self, queue: Origin, message: Message, reason: str, now_ms: int) -> int:
        """The number of queues and delaying exchanges that received the copy."""
        exchange = self._exchange(queue)
        if exchange is None:
            return 0
        headers = message.headers()
        keys = self._keys(queue, message, headers)
        dead, dead_headers = self._with_death(queue, message, headers, reason, now_ms)
        dead.exchange, dead.routing_key = exchange.name, keys[0]
        routed = self._delays.route(exchange, dead, now_ms, keys, dead_headers)
        sent = len(routed.waits_in)
        for target in routed.queues:
            if not self._is_cycle(target.name, dead_headers, reason):
                sent += target.publish(dead, now_ms)
        return sent

    def _exchange(self, queue: Origin) -> Exchange | None:
        name = queue.policy.dead_letter_exchange
        return None if name is None else self._routing.exchanges.get(name)

    def _has_place(self, queue: Origin, message: Message, reason: str) -> bool:
        """Whether the copy reaches a queue and none refuses it; True for a queue without a dead-letter exchange."""
        exchange = self._exchange(queue)
        if exchange is None:
            return queue.policy.dead_letter_exchange is None
        dead, headers = self._with_death(queue, message, message.headers(), reason, self._clock.now_ms())
        keys = self._keys(queue, message, message.headers())
        queues = self._routing.route_message(exchange, keys, dead, self._queues, headers).queues
        targets = [target for target in queues if not self._is_cycle(target.name, headers, reason)]
        return bool(targets) and not any(target.refuses(len(message.body)) for target in targets)

    @staticmethod
    def _keys(queue: Origin, message: Message, headers: dict[str, Any]) -> list[str]:
        if queue.policy.dead_letter_key is not None:
            return [queue.policy.dead_letter_key]
        deaths = [] if message.claims_deaths else _deaths(headers)
        if deaths and routing_keys(deaths[0])[:1] != [message.routing_key]:
            return [message.routing_key]  # its last dead-letter exchange got a key instead of those in CC
        return [message.routing_key, *cc_keys(headers)]

    @staticmethod
    def _is_cycle(target: str, headers: dict[str, Any], reason: str) -> bool:
        """Whether the message died in this queue before and no client rejected it since: it would circulate for
        ever."""
        if reason == REJECTED:
            return False
        deaths = _deaths(headers)
        names = [death.get("queue") for death in deaths]
        if target not in names:
            return False
        return all(death.get("reason") != REJECTED for death in deaths[: names.index(target) + 1])

    @staticmethod
    def _with_death(
        queue: Origin, message: Message, headers: dict[str, Any], reason: str, now_ms: int
    ) -> tuple[Message, dict[str, Any]]:
        """The dead letter and its headers: decoding them again would be a third of the cost of a dead letter."""
        # As in RabbitMQ 4, x-death of a client counts for nothing: it could hide a cycle, or have it see one.
        before = [] if message.claims_deaths else _deaths(headers)
        deaths = [death | {"routing-keys": routing_keys(death), "count": _count(death)} for death in before]
        known = next((d for d in deaths if d.get("queue") == queue.name and d.get("reason") == reason), None)
        if known is not None:
            deaths.remove(known)
            known["count"] = Int64(known["count"] + 1)
        else:
            known = _new_death(queue, message, headers, reason, now_ms)
        added: dict[str, Any] = {"x-death": [known, *deaths][:DEATHS_MAX]}
        if not before:
            added |= {
                "x-first-death-queue": queue.name,
                "x-first-death-reason": reason,
                "x-first-death-exchange": message.exchange,
            }
        added |= {
            "x-last-death-queue": queue.name,
            "x-last-death-reason": reason,
            "x-last-death-exchange": message.exchange,
        }
        removed = ("x-delivery-count", "BCC", *((COUNT_HEADER,) if message.retries else ()))
        try:
            properties = edit(message.properties, {"expiration": None}, headers=added, headers_removed=removed)
        except InvalidInput:  # its properties cannot be decoded or encoded again: drop them
            added["x-death"] = [_new_death(queue, message, {}, reason, now_ms)]
            properties, headers = edit(NO_PROPERTIES, headers=added), {}
        left = {name: value for name, value in headers.items() if name not in removed}
        return Message(message.exchange, message.routing_key, properties, message.body), left | added
