"""Dead letters: what was rejected, expired, dropped or delivered too often goes to an exchange, with its history.

The copy and the settling of the original are one group of the next round: a crash leaves the message in
one of the two places, never in none.
"""

from typing import TYPE_CHECKING, Any

from headrace.broker.types.message import NO_PROPERTIES, Message, keys_in, to_text
from headrace.errors import InvalidInput
from headrace.record.amqp.properties import Timestamp, edit

if TYPE_CHECKING:
    from headrace.broker.queues.backlog import QueueContents
    from headrace.broker.queues.view import View
    from headrace.broker.vhosts.vhost import VirtualHost

REJECTED = "rejected"
DEATHS_MAX = 64  # a message that wanders for ever must not grow for ever
COUNT_MAX = 2**62


class NoPlace(Exception):
    """No failure: a dead letter that must not be lost has nowhere to go yet."""


# Clients may send these headers, too, and whatever they like in them.


def further_keys(headers: dict[str, Any]) -> list[str]:
    found = headers.get("CC")
    return keys_in(found) if isinstance(found, list) else []


def routing_keys(death: dict[str, Any]) -> list[Any]:
    """A key that is no UTF-8 is read as bytes; as text it is written as it was."""
    found = death.get("routing-keys")
    return [to_text(key) if isinstance(key, bytes) else key for key in found] if isinstance(found, list) else []


def _deaths(headers: dict[str, Any]) -> list[dict[str, Any]]:
    found = headers.get("x-death")
    return [death for death in found if isinstance(death, dict)] if isinstance(found, list) else []


def _new_death(
    queue: "QueueContents", message: Message, headers: dict[str, Any], reason: str, now_ms: int
) -> dict[str, Any]:
    death = {
        "count": 1,
        "reason": reason,
        "queue": queue.name,
        "time": Timestamp(now_ms // 1000),
        "exchange": message.exchange,
        "routing-keys": [message.routing_key, *further_keys(headers)],
    }
    expiration = message.expiration()
    return death if expiration is None else death | {"original-expiration": expiration}


class DeadLettering:
    """The dead-lettering of one vhost."""

    def __init__(self, vhost: "VirtualHost") -> None:
        self._vhost = vhost
        self.moved = 0

    def move(self, queue: "QueueContents", view: "View", offset: int, message: Message, reason: str) -> None:
        """Takes the message out of its queue, to where its queue's dead letters go, if anywhere. NoPlace where they are
        kept until there is one."""
        if queue.policy.keeps_dead_letters and not self._has_place(queue, message, reason):
            raise NoPlace
        flushes = self._vhost.flushes
        flushes.begin_atomic()
        try:
            self.publish_copy(queue, message, reason, self._vhost.clock.now_ms())
            view.settle(offset, offset + 1)
        finally:
            flushes.end_atomic()
        queue.dead_lettered += 1

    def publish_copy(self, queue: "QueueContents", message: Message, reason: str, now_ms: int) -> int:
        """How many queues got it."""
        policy = queue.policy
        if policy.dead_letter_exchange is None:
            return 0
        exchange = self._vhost.routing.exchanges.get(policy.dead_letter_exchange)
        if exchange is None:
            return 0
        headers = message.headers()
        keys = self._keys(queue, message, headers)
        dead, dead_headers = self._with_death(queue, message, headers, reason, now_ms)
        dead.exchange, dead.routing_key = exchange.name, keys[0]
        routed = self._vhost.delays.route(exchange, dead, now_ms, keys, dead_headers)
        sent = len(routed.waits_in)
        for target in routed.queues:
            if not self._goes_in_circles(target.name, dead_headers, reason):
                sent += target.publish(dead, now_ms)
        self.moved += sent
        return sent

    def _has_place(self, queue: "QueueContents", message: Message, reason: str) -> bool:
        """Whether it goes somewhere, and nobody there refuses it."""
        host, name = self._vhost, queue.policy.dead_letter_exchange
        exchange = host.routing.exchanges.get(name) if name is not None else None
        if exchange is None:
            return name is None
        dead, headers = self._with_death(queue, message, message.headers(), reason, host.clock.now_ms())
        keys = self._keys(queue, message, message.headers())
        queues = host.routing.route_message(exchange, keys, dead, host.queues, headers).queues
        targets = [target for target in queues if not self._goes_in_circles(target.name, headers, reason)]
        return bool(targets) and not any(target.refuses(len(message.body)) for target in targets)

    @staticmethod
    def _keys(queue: "QueueContents", message: Message, headers: dict[str, Any]) -> list[str]:
        if queue.policy.dead_letter_key is not None:
            return [queue.policy.dead_letter_key]
        return [message.routing_key, *further_keys(headers)]

    @staticmethod
    def _goes_in_circles(target: str, headers: dict[str, Any], reason: str) -> bool:
        """Back where it died, now or before, and no client had a hand in it since: it would go round for ever."""
        if reason == REJECTED:
            return False
        deaths = _deaths(headers)  # this one first
        names = [death.get("queue") for death in deaths]
        if target not in names:
            return False
        return all(death.get("reason") != REJECTED for death in deaths[: names.index(target) + 1])

    @staticmethod
    def _with_death(
        queue: "QueueContents", message: Message, headers: dict[str, Any], reason: str, now_ms: int
    ) -> tuple[Message, dict[str, Any]]:
        """And its headers, which are known here: to decode them again is a third of all that a dead letter costs."""
        deaths = [death | {"routing-keys": routing_keys(death)} for death in _deaths(headers)]
        known = next((d for d in deaths if d.get("queue") == queue.name and d.get("reason") == reason), None)
        if known is not None:
            deaths.remove(known)
            count = known.get("count")
            known["count"] = min(count, COUNT_MAX) + 1 if isinstance(count, int) else 1
            known["time"] = Timestamp(now_ms // 1000)
        else:
            known = _new_death(queue, message, headers, reason, now_ms)
        added: dict[str, Any] = {"x-death": [known, *deaths][:DEATHS_MAX]}
        if "x-first-death-queue" not in headers:
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
        removed = ("x-delivery-count", "BCC") + (("CC",) if queue.policy.dead_letter_key is not None else ())
        try:
            properties = edit(message.properties, {"expiration": None}, headers=added, headers_removed=removed)
        except InvalidInput:  # what it brought cannot be read, or not be written again: it dies without that
            added["x-death"] = [_new_death(queue, message, {}, reason, now_ms)]
            properties, headers = edit(NO_PROPERTIES, headers=added), {}
        left = {name: value for name, value in headers.items() if name not in removed}
        return Message(message.exchange, message.routing_key, properties, message.body), left | added
