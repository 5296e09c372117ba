"""RabbitMQ's message_stats of queues, exchanges, channels and virtual hosts: each count with its rate."""

import contextlib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from headrace.broker.cooperative import YieldEvery
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.queue_counts import QueueCounts
from headrace.broker.queues.view import View
from headrace.broker.routing.exchanges import Exchange
from headrace.broker.streams.partition import ReadWaits, when_loaded
from headrace.broker.types.message import from_record
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import HeadraceError
from headrace.listeners.http.server.context import HttpContext
from headrace.publish_counts import PublishCounts
from headrace.record import codec
from headrace.record.amqp.properties import property_of

JsonObject = dict[str, Any]
HEAD_BYTES = 4096  # whole batches are read; a message for which that is not enough is read with its batch


def with_rates(counters: Mapping[str, int], rates: Mapping[str, float]) -> JsonObject:
    """RabbitMQ's form: each count with its rate. Counts are integers: tools written in Go refuse 7.0."""
    stats: JsonObject = {}
    for name, value in counters.items():
        rate = rates.get(name)
        stats[name] = value
        stats[f"{name}_details"] = {"rate": round(rate, 2) if rate else 0.0}
    return stats


def measured(context: HttpContext, key: tuple[str, ...], counters: Mapping[str, int]) -> JsonObject:
    """The counters with their rates since the last request."""
    return with_rates(counters, context.rates.of(key, context.broker.clock.monotonic(), counters))


def queue_counters(queue: Queue) -> dict[str, int]:
    return {"publish": queue.published, **queue.counts.by_name()}


def exchange_counters(exchange: Exchange) -> dict[str, int]:
    counts = exchange.counts
    return {
        "publish_in": counts.published,
        "publish_out": counts.routed,
        "return_unroutable": counts.returned,
        "drop_unroutable": counts.dropped,
    }


async def vhost_counters(host: VirtualHost) -> dict[str, int]:
    published, counts = PublishCounts(), QueueCounts()
    host.routing.count_into(published)
    counts.add(host.services.deleted_counts)
    async for queue in YieldEvery().each(list(host.queues.values())):
        counts.add(queue.counts)
    return {
        "publish": published.published,
        "confirm": published.confirmed,
        "return_unroutable": published.returned,
        "drop_unroutable": published.dropped,
        **counts.by_name(),
    }


def queue_json(context: HttpContext, queue: Queue, *, with_samples: bool) -> JsonObject:
    """The messages in a queue, how fast they become more or fewer, and its message_stats. The samples of the lengths
    are those of this request and the one before, since nothing is recorded for queues that no client asks about."""
    ready, unacked, counters = queue.ready, queue.unacked, queue_counters(queue)
    levels = {"messages": ready + unacked, "messages_ready": ready, "messages_unacknowledged": unacked}
    now_s = context.broker.clock.monotonic()
    sample = context.rates.sample(("queue", queue.vhost.name, queue.name), now_s, counters, levels)
    shape: JsonObject = {}
    for name, value in levels.items():
        details: JsonObject = {"rate": round(sample.rates[name], 2)}
        if with_samples:
            now_ms = context.broker.clock.now_ms()
            details["samples"] = [{"timestamp": now_ms, "sample": value}]
            if sample.before is not None:
                at_s, before = sample.before
                at_ms = now_ms - round((now_s - at_s) * 1000)
                details["samples"].append({"timestamp": at_ms, "sample": before[name]})
            details["avg_rate"] = details["rate"]
            details["avg"] = sum(one["sample"] for one in details["samples"]) / len(details["samples"])
        shape[name], shape[f"{name}_details"] = value, details
    shape["message_stats"] = with_rates(counters, sample.rates)
    return shape


def idle_since(queue: Queue) -> str | None:
    at_ms = queue.counts.idle_since_ms(queue.published)
    if at_ms is None:
        return None
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")


def head_timestamp(context: HttpContext, queue: Queue) -> int | None:
    """The timestamp property of the oldest message that is not settled. None also if it is not in memory: a list of
    queues must not wait for the disk. Kept until another message is the oldest."""
    lows = tuple(view.low for view in queue.views)
    known = context.heads.get(queue)
    if known is not None and known[0] == lows:
        return known[1]
    try:
        stamps = [stamp for view in queue.views if (stamp := _head(view)) is not None]
    except (ReadWaits, HeadraceError):
        return None
    found = min(stamps, default=None)
    if all(view.low < view.partition.stable_end for view in queue.views):
        context.heads[queue] = (lows, found)
    return found


async def load_head(queue: Queue) -> None:
    """Read the oldest message from the disk, so that head_timestamp finds it."""
    if queue.is_stream:
        return
    for view in queue.views:
        if view.low < view.partition.stable_end:
            with contextlib.suppress(HeadraceError):
                await when_loaded(partial(view.partition.read_now, view.low, HEAD_BYTES))


def _head(view: View) -> int | None:
    if view.low >= view.partition.stable_end:
        return None
    chunk = view.reader.committed(view.partition.read_now(view.low, HEAD_BYTES))
    records = codec.records(chunk.data, from_offset=view.low, to_offset=chunk.next_offset, limit=1)
    if not records:
        return None
    found = property_of(from_record(records[0]).properties, "timestamp")
    return int(found) if isinstance(found, int) else None
