"""Queues, exchanges and bindings in the words of RabbitMQ's API."""

import platform
from collections.abc import Mapping
from typing import Any

from headrace.broker.queues.queue import Queue
from headrace.broker.routing.exchanges import Binding, Exchange
from headrace.broker.vhosts.policies import Policy
from headrace.listeners.http.management.parameters import Shape
from headrace.listeners.http.management.rates import Rates
from headrace.listeners.http.server.context import HttpContext

NODE = f"headrace@{platform.node() or 'localhost'}"
DEFAULT_EXCHANGE = "amq.default"
USER = "guest"


def rates_of(site: HttpContext) -> Rates:
    return site.rates


def with_rates(counters: Mapping[str, int], rates: Mapping[str, float]) -> Shape:
    """RabbitMQ's message_stats: a count and its rate side by side. Tools written in Go take no 7.0 for a count."""
    stats: Shape = {}
    for name, value in counters.items():
        stats[name] = value
        stats[f"{name}_details"] = {"rate": round(rates.get(name, 0.0), 2)}
    return stats


def queue_counters(queue: Queue) -> dict[str, int]:
    """Published is what its logs were given: nobody counts on the way in."""
    return {
        "publish": sum(view.partition.end_offset for view in queue.views),
        "deliver_get": queue.delivered,
        "ack": queue.acked,
        "redeliver": queue.redelivered,
    }


def queue_shape(site: HttpContext, queue: Queue) -> Shape:
    ready, unacked = queue.ready, queue.unacked
    now_s = site.broker.clock.monotonic()
    counters = queue_counters(queue)
    rates = site.rates.of(("queue", queue.vhost.name, queue.name), now_s, counters)
    consumers = len(queue.consumers)
    size = sum(view.partition.size_bytes for view in queue.views)
    policy = queue.policy
    depth_rate = rates["publish"] - rates["ack"]
    shape: Shape = {
        "name": queue.name,
        "vhost": queue.vhost.name,
        "type": policy.kind,
        "node": NODE,
        "state": "running",
        "durable": queue.durable,
        "auto_delete": queue.auto_delete,
        "exclusive": queue.exclusive,
        "arguments": queue.arguments,
        "policy": queue.policy_name,
        "operator_policy": queue.operator_policy_name,
        "effective_policy_definition": effective(queue),
        "consumers": consumers,
        "consumer_capacity": 1.0 if consumers else 0,
        "consumer_utilisation": 1.0 if consumers else 0,
        "messages": ready + unacked,
        "messages_details": {"rate": round(depth_rate, 2)},
        "messages_ready": ready,
        "messages_ready_details": {"rate": round(rates["publish"] - rates["deliver_get"], 2)},
        "messages_unacknowledged": unacked,
        "messages_unacknowledged_details": {"rate": round(rates["deliver_get"] - rates["ack"], 2)},
        "message_bytes": size,
        "message_bytes_ready": size,
        "message_bytes_unacknowledged": 0,
        "messages_persistent": ready + unacked if queue.durable else 0,
        "messages_ram": 0 if queue.durable else ready + unacked,
        "message_stats": with_rates(counters, rates),
        "memory": 0 if queue.durable else size,
        "exclusive_consumer_tag": None,
        "single_active_consumer_tag": queue.consumers.active.tag if queue.consumers.active is not None else None,
        "storage_version": 1,
        "reductions": 0,
        "backing_queue_status": {"mode": "default"},
        "headrace": {
            "partitions": len(queue.views),
            "size_bytes": size,
            "dead_lettered": queue.dead_lettered,
            "start": [view.partition.start_offset for view in reversed(queue.views)],
            "end": [view.partition.end_offset for view in reversed(queue.views)],
            "dead_letter_exchange": policy.dead_letter_exchange,
            "dead_letter_routing_key": policy.dead_letter_key,
        },
    }
    return shape


# Sort columns of a list of queues that need no whole shape.
QUEUE_COLUMNS = {
    "name": lambda queue: queue.name,
    "vhost": lambda queue: queue.vhost.name,
    "type": lambda queue: queue.policy.kind,
    "messages": lambda queue: queue.ready + queue.unacked,
    "messages_ready": lambda queue: queue.ready,
    "messages_unacknowledged": lambda queue: queue.unacked,
    "consumers": lambda queue: len(queue.consumers),
    "message_bytes": lambda queue: sum(view.partition.size_bytes for view in queue.views),
    "policy": lambda queue: queue.policy_name or "",
}


def effective(queue: Queue) -> Shape:
    """What policies add to what was declared."""
    own, now = queue.declared_policy, queue.policy
    if own == now:
        return {}
    names = {
        "ttl_ms": "message-ttl",
        "expires_ms": "expires",
        "length_max": "max-length",
        "bytes_max": "max-length-bytes",
        "overflow": "overflow",
        "dead_letter_exchange": "dead-letter-exchange",
        "dead_letter_key": "dead-letter-routing-key",
        "delivery_limit": "delivery-limit",
        "max_age_ms": "max-age-ms",
        "retain_ms": "retain-ms",
        "retain_bytes": "retain-bytes",
    }
    return {name: getattr(now, field) for field, name in names.items() if getattr(now, field) != getattr(own, field)}


def exchange_shape(site: HttpContext, vhost: str, exchange: Exchange) -> Shape:
    return {
        "name": exchange.name,
        "vhost": vhost,
        "type": exchange.declared_kind,
        "durable": exchange.durable,
        "auto_delete": exchange.auto_delete,
        "internal": exchange.internal,
        "arguments": exchange.arguments,
        "policy": exchange.policy_name,
        "user_who_performed_action": "rmq-internal" if not exchange.name or exchange.name[:4] == "amq." else USER,
    }


def binding_shape(vhost: str, binding: Binding) -> Shape:
    return {
        "source": binding.source,
        "vhost": vhost,
        "destination": binding.destination.name,
        "destination_type": "queue" if binding.to_queue else "exchange",
        "routing_key": binding.key,
        "arguments": binding.arguments,
        "properties_key": binding.properties_key,
    }


def default_binding_shape(vhost: str, queue: str) -> Shape:
    """Every queue is bound to the default exchange by its name, and tools expect to see it."""
    return {
        "source": "",
        "vhost": vhost,
        "destination": queue,
        "destination_type": "queue",
        "routing_key": queue,
        "arguments": {},
        "properties_key": queue,
    }


def policy_shape(policy: Policy) -> Shape:
    return {
        "vhost": policy.vhost,
        "name": policy.name,
        "pattern": policy.pattern,
        "apply-to": policy.apply_to,
        "definition": policy.definition,
        "priority": policy.priority,
    }


def properties_shape(properties: Mapping[str, Any]) -> Shape:
    return {name: value for name, value in properties.items() if value is not None}
