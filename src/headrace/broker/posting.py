"""Publishing one message into an exchange from inside the broker: for operators, tests of life and replays."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.broker.message import Message
from headrace.broker.queue import Queue
from headrace.broker.rounds import Author
from headrace.errors import AccessRefused

if TYPE_CHECKING:
    from headrace.broker.vhost import VirtualHost


def route(host: "VirtualHost", message: Message, keys: Sequence[str]) -> list[Queue]:
    """The queues a message would reach now."""
    exchange = host.routing.exchange(message.exchange)
    if exchange.internal:
        raise AccessRefused(f"cannot publish to internal exchange '{exchange.name}' in vhost '{host.name}'")
    if not exchange.name:
        for key in keys:
            host.find_topic(key)  # a topic becomes a stream queue when it is first published to
    return host.routing.route_message(exchange, keys, message, host.queues)


async def post(host: "VirtualHost", message: Message, keys: Sequence[str]) -> int:
    """How many queues took it, by any of the keys; returns when it is as durable as they are."""
    host.pressure.check()
    now_ms = host.clock.now_ms()
    exchange = host.routing.exchange(message.exchange)
    author = Author()
    with host.rounds.written_by(author):
        if exchange.delayed and host.delays.delay(exchange, message, now_ms, keys):
            taken = 1
        else:
            taken = sum(queue.publish(message, now_ms) for queue in route(host, message, keys))
    host.rounds.flush_memory()
    if author.stores:
        await host.rounds.stored(author)
    return taken
