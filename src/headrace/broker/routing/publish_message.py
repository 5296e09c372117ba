"""Publishing one message into an exchange from inside the broker: for operators, tests of life and replays."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.broker.queues.flush import Author
from headrace.broker.routing.exchanges import Exchange
from headrace.broker.types.message import Message
from headrace.errors import AccessRefused

if TYPE_CHECKING:
    from headrace.broker.vhosts.vhost import VirtualHost


def _exchange(host: "VirtualHost", message: Message, keys: Sequence[str]) -> Exchange:
    exchange = host.routing.exchange(message.exchange)
    if exchange.internal:
        raise AccessRefused(f"cannot publish to internal exchange '{exchange.name}' in vhost '{host.name}'")
    if not exchange.name:
        for key in keys:
            host.find_topic(key)  # a topic becomes a stream queue when it is first published to
    return exchange


async def post(host: "VirtualHost", message: Message, keys: Sequence[str]) -> int:
    """How many queues took it, by any of the keys, or keep it until it is due; returns when it is as durable as they
    are."""
    host.pressure.check()
    now_ms = host.clock.now_ms()
    exchange = _exchange(host, message, keys)
    author = Author()
    with host.flushes.written_by(author):
        routed = host.delays.route(exchange, message, now_ms, keys)
        taken = len(routed.waits_in) + sum(queue.publish(message, now_ms) for queue in routed.queues)
    host.flushes.flush_memory()
    if author.stores:
        await host.flushes.stored(author)
    return taken
