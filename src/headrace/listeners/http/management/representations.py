"""JSON representations of RabbitMQ's API: queues, exchanges, bindings, policies and messages."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from headrace.broker.queues.queue import Queue
from headrace.broker.queues.queue_arguments import CLASSIC
from headrace.broker.routing.exchanges import Binding, Exchange, packed
from headrace.broker.types.message import NO_PROPERTIES, Message, expiration_fault
from headrace.broker.vhosts.global_parameters import NODE
from headrace.broker.vhosts.policies import Policy
from headrace.errors import CorruptProperties, InvalidInput
from headrace.listeners.http.management import message_stats
from headrace.listeners.http.management.parameters import JsonObject, encode
from headrace.listeners.http.server.context import HttpContext
from headrace.listeners.http.server.requests import whole_number
from headrace.record.amqp.properties import PROPERTIES, Timestamp, decode_properties, encode_properties
from headrace.wire.http import json_text
from headrace.wire.http.amqp import as_json
from headrace.wire.http.messages import LARGE_BYTES

DEFAULT_EXCHANGE = "amq.default"
USER = "guest"


def queue_json(context: HttpContext, queue: Queue, *, with_samples: bool = False) -> JsonObject:
    messages = message_stats.queue_json(context, queue, with_samples=with_samples)
    consumers = len(queue.consumers)
    size = sum(view.partition.size_bytes for view in queue.views)
    policy = queue.policy
    shape: JsonObject = {
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
        **messages,
        "message_bytes": size,
        "message_bytes_ready": size,
        "message_bytes_unacknowledged": 0,
        "messages_persistent": messages["messages"] if queue.durable else 0,
        "messages_ram": 0 if queue.durable else messages["messages"],
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
    idle_since = message_stats.idle_since(queue)
    if idle_since is not None:  # as in RabbitMQ, only while it is idle
        shape["idle_since"] = idle_since
    if not queue.is_stream:
        shape["head_message_timestamp"] = message_stats.head_timestamp(context, queue)
    if policy.kind != CLASSIC:
        shape |= {"leader": NODE, "members": [NODE], "online": [NODE]}
    return shape


# Columns that can be sorted by without building the whole representation.
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


def effective(queue: Queue) -> JsonObject:
    """The settings that policies change, compared with the declared arguments."""
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
        "retry_limit": "retry-limit",
        "retry_delay_ms": "retry-delay",
        "retry_backoff": "retry-backoff",
        "retry_delay_max_ms": "retry-delay-max",
        "max_age_ms": "max-age-ms",
        "retain_ms": "retain-ms",
        "retain_bytes": "retain-bytes",
    }
    return {name: getattr(now, field) for field, name in names.items() if getattr(now, field) != getattr(own, field)}


def exchange_json(context: HttpContext, vhost: str, exchange: Exchange) -> JsonObject:
    return {
        "name": exchange.name,
        "vhost": vhost,
        "type": exchange.declared_kind,
        "durable": exchange.durable,
        "auto_delete": exchange.auto_delete,
        "internal": exchange.internal,
        "arguments": exchange.arguments,
        "policy": exchange.policy_name,
        "message_stats": message_stats.measured(
            context, ("exchange", vhost, exchange.name), message_stats.exchange_counters(exchange)
        ),
        "user_who_performed_action": "rmq-internal" if not exchange.name or exchange.name[:4] == "amq." else USER,
    }


def binding_json(vhost: str, binding: Binding) -> JsonObject:
    return {
        "source": binding.source,
        "vhost": vhost,
        "destination": binding.destination.name,
        "destination_type": "queue" if binding.to_queue else "exchange",
        "routing_key": binding.key,
        "arguments": binding.arguments,
        "properties_key": binding.properties_key,
    }


def default_binding_json(vhost: str, queue: str) -> JsonObject:
    """The implicit binding of every queue to the default exchange, which tools expect to see."""
    return {
        "source": "",
        "vhost": vhost,
        "destination": queue,
        "destination_type": "queue",
        "routing_key": queue,
        "arguments": {},
        "properties_key": packed(queue),
    }


def policy_json(policy: Policy) -> JsonObject:
    return {
        "vhost": policy.vhost,
        "name": policy.name,
        "pattern": policy.pattern,
        "apply-to": policy.apply_to,
        "definition": policy.definition,
        "priority": policy.priority,
    }


# Messages


def message_json(message: Message, *, redelivered: bool, remaining: int) -> JsonObject:
    """A message without its payload, which `payload_pieces` adds."""
    return {
        "payload_bytes": len(message.body),
        "redelivered": redelivered,
        "exchange": message.exchange,
        "routing_key": message.routing_key,
        "message_count": remaining,
        "properties": properties_json(message.properties),
    }


def payload_pieces(shape: JsonObject, payload: bytes | memoryview, *, always_base64: bool) -> list[bytes]:
    """The encoded JSON of a message, in pieces: as text if the payload is UTF-8. A large payload of control characters
    is base64, too: as text it would take six times its size. Releases the GIL while it encodes a large payload."""
    size = -1 if always_base64 else json_text.text_size(payload)
    is_text = size >= 0 and (size <= 2 * len(payload) + 2 or len(payload) <= LARGE_BYTES)
    start = encode(shape)[:-1] + b',"payload":'
    if is_text:
        return [start, json_text.text(payload), b',"payload_encoding":"string"}']
    return [start, json_text.base64_text(payload), b',"payload_encoding":"base64"}']


def payload_json_bytes(payload: bytes | memoryview) -> int:
    """At least half the bytes that a payload takes as JSON."""
    size = len(payload)
    return size if size > LARGE_BYTES else max(size, json_text.text_size(payload))


def properties_json(properties: bytes) -> JsonObject:
    if properties == NO_PROPERTIES:
        return {}
    try:
        return {name: as_json(value) for name, value in decode_properties(properties).items() if value is not None}
    except CorruptProperties:
        return {}


def parse_message(exchange: str, fields: Mapping[str, Any]) -> Message:
    """A message from the fields of a publish request: routing_key, payload, payload_encoding, properties."""
    key = fields.get("routing_key", "")
    payload = fields.get("payload", "")
    if not isinstance(key, str) or not isinstance(payload, str):
        raise InvalidInput("routing_key and payload must be strings")
    if len(key.encode()) > 255:
        raise InvalidInput("routing_key may have at most 255 bytes")
    encoding = fields.get("payload_encoding") or "string"
    if encoding == "base64":
        try:
            body = base64.b64decode(payload, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidInput("payload is not valid base64") from None
    elif encoding == "string":
        body = payload.encode()
    else:
        raise InvalidInput("payload_encoding must be string or base64")
    properties = fields.get("properties") or {}
    if not isinstance(properties, Mapping):
        raise InvalidInput("properties must be a JSON object")
    return Message(exchange, key, parse_properties(properties), body)


def parse_properties(given: Mapping[str, Any]) -> bytes:
    known: dict[str, Any] = {}
    for name, value in given.items():
        if name not in PROPERTIES or value is None:
            continue
        if name == "timestamp":
            value = Timestamp(_number(name, value))
        elif name in ("delivery_mode", "priority"):
            value = _number(name, value)
        elif name == "headers":
            if not isinstance(value, Mapping):
                raise InvalidInput("headers must be a JSON object")
        else:
            value = str(value)
        if name == "expiration" and expiration_fault(value):
            raise InvalidInput(f"invalid expiration {value!r:.60}")
        known[name] = value
    return encode_properties(known) if known else NO_PROPERTIES


def _number(name: str, value: Any) -> int:
    if isinstance(value, str):
        value = whole_number(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidInput(f"{name} must be a non-negative integer")
    return value
