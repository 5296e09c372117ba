"""Publishes one message to an exchange for the HTTP API: by an operator, or as an aliveness test."""

from collections.abc import Sequence
from typing import Protocol

from headrace.broker.routing.exchanges import Exchange
from headrace.broker.types.message import Message
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import AccessRefused


class Admission(Protocol):
    def check(self) -> None:
        """Raises while the broker accepts no messages."""


def _exchange(host: VirtualHost, message: Message, keys: Sequence[str]) -> Exchange:
    exchange = host.routing.exchange(message.exchange)
    if exchange.internal:
        raise AccessRefused(f"cannot publish to internal exchange '{exchange.name}' in vhost '{host.name}'")
    if not exchange.name:
        for key in keys:
            host.find_topic(key)  # a topic becomes a stream queue when it is first published to
    return exchange


async def publish_message(host: VirtualHost, pressure: Admission, message: Message, keys: Sequence[str]) -> int:
    """The number of queues and delaying exchanges that accepted the message; returns when it is as durable as they
    are."""
    pressure.check()
    now_ms = host.clock.now_ms()
    exchange = _exchange(host, message, keys)
    with host.flushes.collecting() as batches:
        routed = host.delays.route(exchange, message, now_ms, keys)
        accepted = len(routed.waits_in) + sum(queue.publish(message, now_ms) for queue in routed.queues)
    exchange.counts.published += 1
    exchange.counts.routed += len(routed.queues)
    exchange.counts.dropped += not routed.queues and not routed.waits_in
    host.flushes.flush_memory()
    if any(batch.durable for batch in batches):
        await host.flushes.wait_stored(batches)
    return accepted
