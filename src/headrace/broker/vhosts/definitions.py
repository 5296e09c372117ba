"""Definitions: export and import of everything declared, as the JSON document that RabbitMQ uses.

An import adds and changes, but never removes. The whole document is checked before anything is changed (dry_run.py).
Bindings are imported last, so that they find both ends. Repeating an interrupted import completes it.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from headrace.broker.access.users import Users
from headrace.broker.cooperative import YieldEvery
from headrace.broker.routing.exchanges import is_kind
from headrace.broker.streams.defaults import Change
from headrace.broker.streams.streams import Streams
from headrace.broker.types.vhost_names import DEFAULT
from headrace.broker.vhosts.declarations import PREDECLARED, ExchangeDeclared, QueueDeclared
from headrace.broker.vhosts.definitions_users import UserDefinitions
from headrace.broker.vhosts.definitions_users import export as export_users
from headrace.broker.vhosts.dry_run import DraftBinding, DryRun
from headrace.broker.vhosts.global_parameters import CLUSTER_ID, GlobalParameters, check_parameter
from headrace.broker.vhosts.policies import Policies, Policy, check
from headrace.broker.vhosts.settings import (
    LIMITS,
    METADATA_FIELDS,
    QUEUES,
    Limits,
    VhostMetadata,
    limit_of,
    parse_limits,
    parse_metadata,
)
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.broker.vhosts.vhosts import VirtualHosts
from headrace.errors import InvalidInput

Document = dict[str, Any]


class DefinedBroker(Protocol):
    """The parts of a broker that definitions describe."""

    @property
    def vhosts(self) -> VirtualHosts: ...
    @property
    def streams(self) -> Streams: ...
    @property
    def users(self) -> Users: ...
    @property
    def policies(self) -> Policies: ...
    @property
    def global_parameters(self) -> GlobalParameters: ...


LISTS = (
    "vhosts",
    "users",
    "permissions",
    "topic_permissions",
    "parameters",
    "global_parameters",
    "policies",
    "queues",
    "exchanges",
    "bindings",
)
# Ignored by an import into one vhost, as in RabbitMQ. Topics are always in the default vhost.
OF_ALL_VHOSTS = ("vhosts", "users", "permissions", "topic_permissions", "global_parameters", "topics")
STREAM_ARGUMENT = "x-queue-type"
OPERATOR, VHOST_LIMITS = "operator_policy", "vhost-limits"  # the parameters that have an effect here
# A value of another type would be stored, and the next start would take it for damage and fail.
SHAPES: dict[str, tuple[type, str]] = {
    "vhost": (str, "a name"),
    "durable": (bool, "true or false"),
    "auto_delete": (bool, "true or false"),
    "internal": (bool, "true or false"),
    "routing_key": (str, "a string"),
    "destination_type": (str, "queue or exchange"),
    "partitions": (int, "a whole number"),
    "config": (dict, "an object"),
    "kafka_config": (dict, "an object"),
}


async def export(broker: DefinedBroker, vhost: str | None = None) -> Document:
    """Everything durable; exclusive and transient objects are not included."""
    hosts = [host for host in broker.vhosts if vhost in (None, host.name)]
    named = vhost is None
    turns = YieldEvery()
    document: Document = {name: [] for name in LISTS if named or name in ("parameters", "policies", "queues")}
    for host in hosts:
        if named:
            document["vhosts"].append({"name": host.name, **_metadata_fields(host)})
        for key, items in (("exchanges", _exchanges(host)), ("queues", _queues(host)), ("bindings", _bindings(host))):
            into = document.setdefault(key, [])
            async for item in turns.each(items):
                into.append(item if named else _without_vhost(item))
        for policy in broker.policies.list(host.name):
            shape = {"vhost": policy.vhost, "name": policy.name, **_policy_fields(policy)}
            document["policies"].append(shape if named else _without_vhost(shape))
        for shape in runtime_parameters(broker, host):
            document["parameters"].append(shape if named else _without_vhost(shape))
    if named:
        document["topics"] = [
            {
                "name": s.name,
                "partitions": len(s.partitions),
                "config": dict(s.document.config),
                **({"kafka_config": dict(s.document.kafka)} if s.document.kafka else {}),
            }
            for s in broker.streams.list()
            if s.kind == "topic"
        ]
        document["global_parameters"] = [
            {"name": name, "value": value} for name, value in (await broker.global_parameters.list()).items()
        ]
        document |= export_users(broker.users)
    return document


def runtime_parameters(broker: DefinedBroker, host: VirtualHost) -> list[Document]:
    """What RabbitMQ calls the runtime parameters of a virtual host, except its policies."""
    found: list[Document] = [
        {"component": OPERATOR, "vhost": policy.vhost, "name": policy.name, "value": _policy_fields(policy)}
        for policy in broker.policies.list(host.name, operator=True)
    ]
    if host.limits:
        found.append({"component": VHOST_LIMITS, "vhost": host.name, "name": "limits", "value": dict(host.limits)})
    return found


def _policy_fields(policy: Policy) -> Document:
    return {
        "pattern": policy.pattern,
        "apply-to": policy.apply_to,
        "definition": policy.definition,
        "priority": policy.priority,
    }


def _metadata_fields(host: VirtualHost) -> Document:
    """In two places, as in RabbitMQ: older versions read one, newer ones the other."""
    metadata = metadata_json(host)
    return {**metadata, "metadata": metadata}


def metadata_json(host: VirtualHost) -> Document:
    """All fields, also those with their default: tools read them without asking whether they exist."""
    about = host.metadata
    return {
        "description": about.description or ("Default virtual host" if host.name == DEFAULT else ""),
        "tags": list(about.tags),
        "default_queue_type": about.default_queue_type,
    }


def _metadata(item: Document) -> VhostMetadata | None:
    """None if the item contains no metadata."""
    inner = item.get("metadata")
    fields = inner if isinstance(inner, dict) else item
    return parse_metadata(fields) if any(name in fields for name in METADATA_FIELDS) else None


def _without_vhost(item: Document) -> Document:
    return {name: value for name, value in item.items() if name != "vhost"}


def _exchanges(host: VirtualHost) -> Iterable[Document]:
    for name, exchange in sorted(host.routing.exchanges.items()):
        if name not in PREDECLARED and exchange.durable:
            yield {
                "name": name,
                "vhost": host.name,
                "type": exchange.declared_kind,
                "durable": True,
                "auto_delete": exchange.auto_delete,
                "internal": exchange.internal,
                "arguments": exchange.arguments,
            }


def _queues(host: VirtualHost) -> Iterable[Document]:
    for name, queue in [(name, host.queues[name]) for name in sorted(host.queues)]:
        stream = host.store.streams.find(name, host.name)
        is_topic = stream is not None and stream.kind == "topic"
        if queue.durable and not queue.exclusive and not is_topic:
            yield {
                "name": name,
                "vhost": host.name,
                "durable": True,
                "auto_delete": queue.auto_delete,
                "arguments": queue.arguments,
            }


def _bindings(host: VirtualHost) -> Iterable[Document]:
    for exchange in list(host.routing.exchanges.values()):
        for binding in list(exchange.bindings.values()):
            lasts = binding.destination.durable and not getattr(binding.destination, "exclusive", False)
            if exchange.durable and lasts:
                yield {
                    "source": binding.source,
                    "vhost": host.name,
                    "destination": binding.destination.name,
                    "destination_type": "queue" if binding.to_queue else "exchange",
                    "routing_key": binding.key,
                    "arguments": binding.arguments,
                }


class ImportCounts(dict[str, int]):
    """Number of items of each kind in the document, including those without effect: other parameters than operator
    policies and vhost limits, and users in an import into one vhost."""


async def import_(broker: DefinedBroker, document: Mapping[str, Any], vhost: str | None = None) -> ImportCounts:
    """Import the document. Raises InvalidInput, with nothing changed, if any part of it is invalid."""
    items = {name: _list(document, name) for name in (*LISTS, "topics")}
    if vhost is not None:
        items |= {name: [] for name in OF_ALL_VHOSTS}
    policies = [(_policy(item, vhost), False) for item in items["policies"]]
    policies += [
        (_policy({**item, **_object(item.get("value"))}, vhost, operator=True), True)
        for item in items["parameters"]
        if item.get("component") == OPERATOR
    ]
    _check(items, vhost)
    limits = _limits(items["parameters"], vhost)
    _check_room(broker, items["queues"], limits, vhost)
    about = [_metadata(item) for item in items["vhosts"]]
    users = UserDefinitions(broker.users, items)
    for item in items["global_parameters"]:
        check_parameter(item.get("name"), item.get("value"))
    await _check_declared(broker, items, about, vhost)
    for item, metadata in zip(items["vhosts"], about, strict=True):
        await broker.vhosts.create(item["name"], metadata=metadata)
    hosts: dict[str, VirtualHost] = {}

    async def host_of(item: Document) -> VirtualHost:
        name = _vhost(item, vhost)
        if name not in hosts:
            hosts[name] = await broker.vhosts.create(name)
        return hosts[name]

    for name in users.vhosts:
        await host_of({"vhost": name})
    await users.apply()
    for policy, operator in policies:
        await host_of({"vhost": policy.vhost})
        await broker.policies.put(policy, operator=operator)
    for name, value in limits.items():
        await host_of({"vhost": name})
        await broker.vhosts.set_limits(name, {limit: value.get(limit) for limit in LIMITS})
    for item in items["global_parameters"]:
        if item["name"] != CLUSTER_ID:  # the identity of the cluster that exported the document
            await broker.global_parameters.put(item["name"], item.get("value"))
    await _import_declared(broker, items, host_of)
    return ImportCounts({name: len(items[name]) for name in (*LISTS, "topics")})


async def _import_declared(
    broker: DefinedBroker, items: Mapping[str, list[Document]], host_of: Callable[[Document], Awaitable[VirtualHost]]
) -> None:
    for item in items["topics"]:
        if broker.streams.find(item["name"]) is None:
            await broker.streams.create(item["name"], item.get("partitions", 1), _topic_settings(item))
    for item in items["exchanges"]:
        if item["name"] not in PREDECLARED:
            await _import_exchange(await host_of(item), item)
    for item in items["queues"]:
        await _import_queue(await host_of(item), item)
    for item in items["bindings"]:
        if item["source"]:  # the default exchange has implicit bindings
            await _import_binding(await host_of(item), item)


async def _import_exchange(host: VirtualHost, item: Document) -> None:
    await host.declare_exchange(item["name"], **_exchange(item)._asdict())


async def _import_queue(host: VirtualHost, item: Document) -> None:
    await host.declare_queue(item["name"], **_queue(item)._asdict(), owner=None)


async def _import_binding(host: VirtualHost, item: Document) -> None:
    binding = _binding(item)
    destination = host.queue(binding.destination) if binding.to_queue else host.routing.exchange(binding.destination)
    await host.bind(binding.source, destination, binding.key, binding.arguments)


def _exchange(item: Document) -> ExchangeDeclared:
    return ExchangeDeclared(
        item["type"],
        durable=item.get("durable", True),
        auto_delete=item.get("auto_delete", False),
        internal=item.get("internal", False),
        arguments=item.get("arguments") or {},
    )


def _queue(item: Document) -> QueueDeclared:
    return QueueDeclared(
        durable=item.get("durable", True),
        exclusive=False,
        auto_delete=item.get("auto_delete", False),
        arguments=item.get("arguments") or {},
    )


def _topic_settings(item: Document) -> Change:
    kafka = item.get("kafka_config", {})
    if not all(isinstance(value, str) for value in kafka.values()):
        raise InvalidInput(f"the values in kafka_config must be strings: {str(item)[:200]}")
    return Change(item.get("config", {}), kafka)


def _binding(item: Document) -> DraftBinding:
    return DraftBinding(
        item["source"],
        item["destination"],
        to_queue=item.get("destination_type", "queue") == "queue",
        key=item.get("routing_key", ""),
        arguments=item.get("arguments") or {},
    )


def _vhost(item: Document, vhost: str | None) -> Any:
    """The vhost to import into: the given one, or that of the item."""
    return vhost if vhost is not None else item.get("vhost", "/")


def _list(document: Mapping[str, Any], name: str) -> list[Document]:
    found = document.get(name) or []
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise InvalidInput(f"{name} must be a list of objects")
    return found


def _object(value: Any) -> Document:
    return value if isinstance(value, dict) else {}


def _policy(item: Document, vhost: str | None, *, operator: bool = False) -> Policy:
    try:
        found = {
            "vhost": _vhost(item, vhost),
            "name": item["name"],
            "pattern": item["pattern"],
            "definition": item["definition"],
            "priority": int(item.get("priority", 0)),
            "apply_to": item.get("apply-to") or "all",
        }
        policy = msgspec.convert(found, Policy)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InvalidInput(f"a policy needs name, pattern and definition: {str(item)[:200]}") from None
    check(policy, operator=operator)
    return policy


def _limits(parameters: list[Document], vhost: str | None) -> dict[str, Limits]:
    """The limits in the document, by vhost."""
    found = {}
    for item in parameters:
        if item.get("component") == VHOST_LIMITS:
            name = _vhost(item, vhost)
            if not isinstance(name, str):
                raise InvalidInput(f"vhost must be a name: {str(item)[:200]}")
            found[name] = parse_limits(item.get("value"))
    return found


def _check_room(broker: DefinedBroker, queues: list[Document], limits: Mapping[str, Limits], vhost: str | None) -> None:
    """Raises if the queues of the document exceed the limits that apply after the import."""
    hosts = {host.name: host for host in broker.vhosts}
    wanted: dict[str, set[str]] = {}
    for item in queues:
        wanted.setdefault(_vhost(item, vhost), set()).add(item["name"])
    for name, names in wanted.items():
        host = hosts.get(name)
        limit = limit_of(limits.get(name, host.limits if host is not None else {}), QUEUES)
        if limit is None:
            continue
        there = {queue for queue in host.queues if host.has_queue(queue)} if host is not None else set()
        if names - there and len(names | there) > limit:
            raise InvalidInput(f"with these definitions vhost '{name}' would exceed its limit of {limit:,} queues")


def _check(items: Mapping[str, list[Document]], vhost: str | None) -> None:
    for kind, names in (
        ("vhosts", ("name",)),
        ("exchanges", ("name", "type")),
        ("queues", ("name",)),
        ("bindings", ("source", "destination")),
        ("topics", ("name",)),
    ):
        for item in items[kind]:
            for name in names:
                if not isinstance(item.get(name), str):
                    raise InvalidInput(f"one of the {kind} has no {name}: {str(item)[:200]}")
            for name, (shape, what) in SHAPES.items():
                if not isinstance(item.get(name, shape()), shape):
                    raise InvalidInput(f"{name} must be {what}: {str(item)[:200]}")
            if not isinstance(item.get("arguments") or {}, dict):
                raise InvalidInput(f"arguments must be an object: {str(item)[:200]}")
    for item in items["exchanges"]:
        if not is_kind(item["type"]):
            raise InvalidInput(f"unknown exchange type {item['type'][:80]!r} of {item['name'][:80]!r}")


async def _check_declared(
    broker: DefinedBroker, items: Mapping[str, list[Document]], about: list[VhostMetadata | None], vhost: str | None
) -> None:
    """Dry run in the order of `_import_declared`: raises if the import would be refused, unless others make changes
    meanwhile."""
    draft = DryRun(broker.vhosts, broker.streams)
    turns = YieldEvery()
    for item, metadata in zip(items["vhosts"], about, strict=True):
        draft.vhost(item["name"], metadata)
    async for item in turns.each(items["topics"]):
        draft.topic(item["name"], item.get("partitions", 1), _topic_settings(item))
    async for item in turns.each(items["exchanges"]):
        if item["name"] not in PREDECLARED:
            draft.exchange(_vhost(item, vhost), item["name"], _exchange(item))
    async for item in turns.each(items["queues"]):
        draft.queue(_vhost(item, vhost), item["name"], _queue(item))
    async for item in turns.each(items["bindings"]):
        if item["source"]:
            draft.binding(_vhost(item, vhost), _binding(item))
