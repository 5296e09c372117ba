"""The whole broker: overview, node, virtual hosts and health checks."""

import os
import platform
import resource
from collections import Counter
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.cooperative import YieldEvery
from headrace.broker.metrics.history import Sample
from headrace.broker.queues.queue import Queue
from headrace.broker.routing.exchanges import KIND_NAMES
from headrace.broker.types.message import NO_PROPERTIES, Message
from headrace.broker.vhosts.definitions import metadata_json
from headrace.broker.vhosts.global_parameters import NODE
from headrace.broker.vhosts.publish_message import publish_message
from headrace.broker.vhosts.settings import LIMIT_MAX, parse_metadata
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import Conflict, InvalidInput, NotFound
from headrace.listeners.http.management import message_stats, parameters
from headrace.listeners.http.management.definitions import RABBITMQ_VERSION
from headrace.listeners.http.management.parameters import JsonObject, json_response, listing, name_of, object_response
from headrace.listeners.http.management.queues import host_of
from headrace.listeners.http.management.visibility import visible_clients, visible_hosts
from headrace.listeners.http.server.authentication import MONITORING
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext
from headrace.listeners.http.server.requests import whole_number
from headrace.version import __version__

ALIVENESS_QUEUE = "aliveness-test"
RATE_WINDOW_S = 5.0
DEPRECATED = (
    ("classic_queue_mirroring", "Mirrored classic queues", False),
    ("global_qos", "A prefetch for all consumers of a channel together", True),
    ("management_metrics_collection", "Statistics of messages in the management API", True),
    ("queue_master_locator", "Queue masters: the node that holds a classic queue", False),
    ("ram_node_type", "Nodes without a disk", False),
    ("transient_nonexcl_queues", "Transient queues that are not exclusive", True),
)
DAYS = {"days": 1, "weeks": 7, "months": 30, "years": 365}


def rates_between(new: Sample, old: Sample) -> dict[str, float]:
    seconds = max(0.001, (new.at_ms - old.at_ms) / 1000)
    rate = {
        name: max(0.0, (getattr(new, name) - getattr(old, name)) / seconds)
        for name in ("records_written", "bytes_written", "bytes_read", "delivered", "acked")
    }
    rate["published"] = max(0.0, sum(new.messages_in.values()) - sum(old.messages_in.values())) / seconds
    rate |= {name: max(0.0, (value - old.traffic[name]) / seconds) for name, value in new.traffic.items()}
    rate["sent"] = max(0.0, sum(new.messages_out.values()) - sum(old.messages_out.values())) / seconds
    return rate


def recent_rates(context: HttpContext) -> tuple[Sample, dict[str, float]]:
    samples = context.broker.history.samples
    new = context.broker.history.latest()
    old = samples[max(0, len(samples) - 1 - round(RATE_WINDOW_S))]
    return new, rates_between(new, old)


def totals(context: HttpContext) -> tuple[JsonObject, JsonObject]:
    """Queue totals and message statistics of the whole broker."""
    sample, rate = recent_rates(context)
    counters = {
        "publish": sum(sample.messages_in.values()),
        **sample.traffic,
        "disk_reads": context.broker.storage.counters.records_read,
        "disk_writes": sample.records_written,
    }
    rates = {"publish": rate["published"], "disk_writes": rate["records_written"]}
    rates |= {name: rate[name] for name in sample.traffic}
    return queue_totals(sample.ready, sample.unacked), message_stats.with_rates(counters, rates)


def queue_totals(ready: int, unacked: int) -> JsonObject:
    return {
        "messages": ready + unacked,
        "messages_details": {"rate": 0.0},
        "messages_ready": ready,
        "messages_ready_details": {"rate": 0.0},
        "messages_unacknowledged": unacked,
        "messages_unacknowledged_details": {"rate": 0.0},
    }


async def totals_of(context: HttpContext, queues: list[Queue], user: str) -> tuple[JsonObject, JsonObject]:
    """The same for some queues, for a user who may see only those."""
    yielding = YieldEvery()
    ready = sum(await yielding.map(lambda queue: 0 if queue.is_stream else queue.ready, queues))
    unacked = sum(await yielding.map(lambda queue: queue.unacked, queues))
    counters: Counter[str] = Counter(dict.fromkeys(("publish", "deliver_get", "ack"), 0))
    async for queue in yielding.each(queues):
        counters.update(message_stats.queue_counters(queue))
    rates = context.rates.of(("overview", user), context.broker.clock.monotonic(), counters)
    return queue_totals(ready, unacked), message_stats.with_rates(counters, rates)


async def overview(context: HttpContext, request: Request) -> Response:
    hosts, caller = visible_hosts(context, request), caller_of(request)
    clients = visible_clients(context, request)
    yielding = YieldEvery()
    channels = sum(await yielding.map(lambda client: len(client.describe_channels()), clients))
    queues = [queue for host in hosts for queue in host.queues.values()]
    is_monitor = caller.is_one_of(MONITORING)
    depths, stats = totals(context) if is_monitor else await totals_of(context, queues, caller.name)
    consumers = sum(await yielding.map(lambda queue: len(queue.consumers), queues))
    return object_response(
        request,
        {
            "management_version": RABBITMQ_VERSION,
            "rabbitmq_version": RABBITMQ_VERSION,
            "product_name": "Headrace",
            "product_version": __version__,
            "rates_mode": "basic",
            "sample_retention_policies": {"global": [600], "basic": [600], "detailed": [600]},
            "exchange_types": [{"name": kind, "description": "", "enabled": True} for kind in KIND_NAMES],
            "cluster_name": context.broker.global_parameters.cluster_name,
            "cluster_tags": {},
            "node_tags": {},
            "default_queue_type": "classic",
            "release_series_support_status": "supported",
            "erlang_version": platform.python_version(),
            "erlang_full_version": f"Python {platform.python_version()}",
            "disable_stats": False,
            "is_op_policy_updating_enabled": True,
            "enable_queue_totals": True,
            "message_stats": stats,
            "churn_rates": churn(context),
            "queue_totals": depths,
            "object_totals": {
                "channels": channels,
                "connections": len(clients),
                "consumers": consumers,
                "exchanges": sum(len(host.routing.exchanges) for host in hosts),
                "queues": len(queues),
            },
            "statistics_db_event_queue": 0,
            "node": NODE,
            "listeners": listeners(context),
            "contexts": [{"node": NODE, **context} for context in contexts(context)],
        },
    )


def churn(context: HttpContext) -> JsonObject:
    opened = sum(listener.connections_total for listener in context.broker.stats.listeners.values())
    names = (
        "connection_created",
        "connection_closed",
        "queue_declared",
        "queue_created",
        "queue_deleted",
        "channel_created",
        "channel_closed",
    )
    shape: JsonObject = {}
    for name in names:
        shape[name] = opened if name == "connection_created" else 0
        shape[f"{name}_details"] = {"rate": 0.0}
    return shape


def listeners(context: HttpContext) -> list[JsonObject]:
    found = []
    for listener, addresses in context.addresses.items():
        for address in addresses:
            host, _, port = address.rpartition(":")
            found.append(
                {
                    "node": NODE,
                    "protocol": listener,
                    "ip_address": host.strip("[]"),
                    "port": int(port),
                    "socket_opts": {},
                    "tls": context.config.has_tls(listener),
                }
            )
    return found


def contexts(context: HttpContext) -> list[JsonObject]:
    """RabbitMQ's "web contexts": the ports of this API, as strings."""
    ports = [str(listener["port"]) for listener in listeners(context) if listener["protocol"] == "http"]
    return [{"description": "Headrace", "path": "/", "port": port} for port in dict.fromkeys(ports)]


def node_json(context: HttpContext) -> JsonObject:
    broker = context.broker
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        free = int(broker.disk.free_bytes(broker.config.data_dir))
    except OSError:
        free = 0
    try:
        open_files = len(os.listdir("/proc/self/fd"))
    except OSError:
        open_files = 0
    used = memory_bytes()
    sockets = sum(listener.connections for listener in broker.stats.listeners.values())
    uptime = broker.clock.now_ms() - broker.stats.started_ms
    pressure = broker.pressure
    return {
        "name": NODE,
        "type": "disc",
        "running": True,
        "being_drained": False,
        "os_pid": str(os.getpid()),
        "uptime": uptime,
        "mem_used": used,
        "mem_used_details": {"rate": 0.0},
        "mem_limit": pressure.limits.memory_bytes,
        "mem_alarm": pressure.verdict.memory_alarm,
        "mem_calculation_strategy": "rss",
        "disk_free": free,
        "disk_free_details": {"rate": 0.0},
        "disk_free_limit": broker.config.disk_free_limit,
        "disk_free_alarm": broker.storage.is_full or pressure.verdict.disk_alarm,
        "fd_used": open_files,
        "fd_total": soft,
        "sockets_used": sockets,
        "sockets_total": broker.config.connections_max,
        "proc_used": 1,
        "proc_total": 1,
        "processors": os.cpu_count() or 1,
        "run_queue": 0,
        "rates_mode": "basic",
        "net_ticktime": 60,
        "db_dir": broker.config.data_dir,
        "config_files": [],
        "log_files": [],
        "enabled_plugins": ["rabbitmq_management", "rabbitmq_prometheus"],
        "exchange_types": [{"name": kind, "description": "", "enabled": True} for kind in KIND_NAMES],
        "auth_mechanisms": [{"name": "PLAIN", "description": "", "enabled": True}],
        "applications": [{"name": "rabbit", "description": "Headrace", "version": RABBITMQ_VERSION}],
        "contexts": contexts(context),
        "partitions": [],
        "cluster_links": [],
        "metrics_gc_queue_length": {},
    }


def memory_bytes() -> int:
    try:
        with_pages = os.sysconf("SC_PAGE_SIZE")
        for line in _lines("/proc/self/statm"):
            return int(line.split()[1]) * with_pages
    except (OSError, ValueError, IndexError):
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _lines(path: str) -> list[str]:
    from pathlib import Path

    return Path(path).read_text().splitlines()


async def nodes(context: HttpContext, request: Request) -> Response:
    return await listing(context, request, [node_json(context)], lambda shape: shape)


def _check_node(request: Request) -> None:
    if name_of(request, "name") != NODE:
        raise NotFound("unknown node")


async def node(context: HttpContext, request: Request) -> Response:
    _check_node(request)
    return object_response(request, node_json(context))


async def node_memory(context: HttpContext, request: Request) -> Response:
    _check_node(request)
    used = memory_bytes()
    total = {"erlang": used, "rss": used, "allocated": used}
    return json_response({"memory": {"total": total, "strategy": "rss", "other_proc": used}})


async def version(context: HttpContext, request: Request) -> Response:
    """The version of RabbitMQ whose API this is: tools choose by it what to ask for."""
    return json_response(RABBITMQ_VERSION)


async def deprecated_features(context: HttpContext, request: Request) -> Response:
    """RabbitMQ's deprecated features, and whether this broker has them."""
    return json_response(
        [
            {
                "name": name,
                "desc": text,
                "deprecation_phase": "permitted_by_default" if is_here else "removed",
                "state": "permitted" if is_here else "denied",
                "doc_url": "",
                "provided_by": "rabbit",
            }
            for name, text, is_here in DEPRECATED
        ]
    )


async def empty(context: HttpContext, request: Request) -> Response:
    return json_response([])


async def nothing(context: HttpContext, request: Request) -> Response:
    return json_response({})


async def extensions(context: HttpContext, request: Request) -> Response:
    return json_response([{"javascript": "dispatcher.js"}])


async def auth(context: HttpContext, request: Request) -> Response:
    return json_response({"oauth_enabled": False})


# Virtual hosts


async def vhost_json(context: HttpContext, host: VirtualHost) -> JsonObject:
    yielding, queues = YieldEvery(), list(host.queues.values())
    ready = sum(await yielding.map(lambda queue: 0 if queue.is_stream else queue.ready, queues))
    unacked = sum(await yielding.map(lambda queue: queue.unacked, queues))
    metadata = metadata_json(host)
    return {
        "name": host.name,
        **metadata,
        "metadata": metadata,
        "tracing": False,
        "cluster_state": {NODE: "running"},
        "messages": ready + unacked,
        "messages_ready": ready,
        "messages_unacknowledged": unacked,
        "message_stats": message_stats.measured(
            context, ("vhost", host.name), await message_stats.vhost_counters(host)
        ),
        "protected_from_deletion": False,
    }


async def vhosts(context: HttpContext, request: Request) -> Response:
    shaped = [
        await vhost_json(context, host) for host in sorted(visible_hosts(context, request), key=lambda host: host.name)
    ]
    return await listing(context, request, shaped, lambda shape: shape)


async def vhost(context: HttpContext, request: Request) -> Response:
    return object_response(request, await vhost_json(context, host_of(context, request)))


async def put_vhost(context: HttpContext, request: Request) -> Response:
    name = name_of(request, "vhost")
    known = any(host.name == name for host in context.broker.vhosts)
    metadata = parse_metadata(await parameters.body_of(request))
    await context.broker.vhosts.create(name, caller_of(request).name, metadata)
    return parameters.created(new=not known)


async def delete_vhost(context: HttpContext, request: Request) -> Response:
    host = host_of(context, request)
    if host.name == "/":
        raise Conflict("the default virtual host cannot be deleted")
    await context.broker.vhosts.delete(host.name)
    return parameters.no_content()


# Limits of virtual hosts


def _limits(hosts: Iterable[VirtualHost]) -> list[JsonObject]:
    return [{"vhost": host.name, "value": host.limits} for host in hosts if host.limits]


async def vhost_limits(context: HttpContext, request: Request) -> Response:
    return await listing(context, request, _limits(visible_hosts(context, request)), lambda shape: shape)


async def limits_of_vhost(context: HttpContext, request: Request) -> Response:
    return await listing(context, request, _limits([host_of(context, request)]), lambda shape: shape)


async def put_vhost_limit(context: HttpContext, request: Request) -> Response:
    host, name = host_of(context, request), name_of(request, "limit")
    value = parameters.number(
        (await parameters.body_of(request)).get("value"), "value", least=-LIMIT_MAX, most=LIMIT_MAX
    )
    await context.broker.vhosts.set_limits(host.name, {name: value})
    return parameters.no_content()


async def delete_vhost_limit(context: HttpContext, request: Request) -> Response:
    """Succeeds for a limit that is not set, too, as in RabbitMQ."""
    await context.broker.vhosts.set_limits(host_of(context, request).name, {name_of(request, "limit"): None})
    return parameters.no_content()


# Health checks


async def aliveness(context: HttpContext, request: Request) -> Response:
    """Publishes a message to a durable queue and reads it back."""
    host, caller = host_of(context, request), caller_of(request)
    caller.configure(ALIVENESS_QUEUE, host.name)
    caller.write("", host.name)
    caller.read(ALIVENESS_QUEUE, host.name)
    queue = await host.declare_queue(
        ALIVENESS_QUEUE, durable=True, exclusive=False, auto_delete=False, arguments={}, owner=None
    )
    message = Message("", ALIVENESS_QUEUE, NO_PROPERTIES, b"test_message")
    await publish_message(host, context.broker.pressure, message, [ALIVENESS_QUEUE])
    found = queue.get()
    if found is None:
        return json_response({"status": "failed", "reason": "the test message was not returned"}, 503)
    queue.settle(found[0], found[1], found[1] + 1)
    return json_response({"status": "ok"})


async def node_health(context: HttpContext, request: Request) -> Response:
    _check_node(request)
    return await health(context, request)


async def health(context: HttpContext, request: Request) -> Response:
    reason = context.broker.why_not_ready()
    if reason is None:
        return json_response({"status": "ok"})
    return json_response({"status": "failed", "reason": reason}, 503)


async def health_certificate(context: HttpContext, request: Request) -> Response:
    """Fails if the TLS certificate expires within the given time; succeeds without TLS."""
    unit, within = name_of(request, "unit"), whole_number(name_of(request, "within"), most=2**31)
    if unit not in DAYS:
        raise InvalidInput(f"the unit must be one of {', '.join(DAYS)}, not {unit[:80]!r}")
    if within is None:
        raise InvalidInput("the time must be an integer")
    expires_s = context.broker.stats.certificate_expires_s
    left_s = None if expires_s is None else expires_s() - context.broker.clock.now_ms() / 1000
    if left_s is None or left_s > within * DAYS[unit] * 86_400:
        return json_response({"status": "ok"})
    end = f"expires in {left_s / 86_400:.1f} days" if left_s > 0 else "has expired"
    reason = f"the TLS certificate {end}"
    return json_response(
        {"status": "failed", "reason": reason, "expired": [{"cert_path": context.config.tls_cert}]}, 503
    )


async def health_port(context: HttpContext, request: Request) -> Response:
    port = whole_number(name_of(request, "port"))
    if port is None:
        raise InvalidInput("the port must be an integer")
    ports = [listener["port"] for listener in listeners(context)]
    if port in ports:
        return json_response({"status": "ok", "port": port})
    return json_response({"status": "failed", "reason": "No active listener", "missing": port, "ports": ports}, 503)


async def health_protocol(context: HttpContext, request: Request) -> Response:
    wanted = {"amqp091": "amqp", "amqp": "amqp", "http": "http", "kafka": "kafka"}.get(name_of(request, "protocol"))
    if wanted in context.addresses:
        return json_response({"status": "ok", "protocol": name_of(request, "protocol")})
    reason: dict[str, Any] = {"status": "failed", "reason": "No active listener", "protocols": list(context.addresses)}
    return json_response(reason, 503)
