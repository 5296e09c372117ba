"""Policies: what operators ask of many queues and exchanges at once, by a pattern of their names.

A policy never changes what was declared: a queue keeps its arguments and has an effective policy beside
them, made anew whenever a policy comes, changes or goes. Where both bound the same thing the tighter bound
holds, as in RabbitMQ; for everything else the argument wins, since whoever declared the queue asked for it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import msgspec

from headrace.broker.access.regex import compile_pattern
from headrace.broker.catalog.catalog import Catalog, shaped
from headrace.broker.cooperative import YieldEvery, to_the_end
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.queue_arguments import CLASSIC, QUORUM, STREAM, QueueArguments, parse_arguments
from headrace.broker.routing.exchanges import Exchange
from headrace.broker.routing.router import Routing
from headrace.broker.streams.streams import Stream, Streams
from headrace.errors import ArgumentMismatch, InvalidInput, InvalidPattern, NotFound, StorageError

logger = logging.getLogger("headrace.policies")

CATALOG_KIND = "policies"
OPERATOR_KIND = "operator-policies"
APPLY_TO = ("queues", "classic_queues", "quorum_queues", "streams", "exchanges", "all")
KINDS = {"classic_queues": CLASSIC, "quorum_queues": QUORUM, "streams": STREAM}
PATTERN_CHARACTERS_MAX = 1024
# Key of a policy: the queue argument it stands for. None: known to RabbitMQ and without a meaning here.
QUEUE_KEYS: dict[str, str | None] = {
    "message-ttl": "x-message-ttl",
    "expires": "x-expires",
    "max-length": "x-max-length",
    "max-length-bytes": "x-max-length-bytes",
    "overflow": "x-overflow",
    "dead-letter-exchange": "x-dead-letter-exchange",
    "dead-letter-routing-key": "x-dead-letter-routing-key",
    "dead-letter-strategy": "x-dead-letter-strategy",
    "delivery-limit": "x-delivery-limit",
    "consumer-timeout": "x-consumer-timeout",
    "max-age": "x-max-age",
    "retain-ms": "x-retain-ms",
    "retain-bytes": "x-retain-bytes",
    "queue-mode": None,
    "queue-version": None,
    "queue-leader-locator": None,
    "queue-master-locator": None,
    "ha-mode": None,
    "ha-params": None,
    "ha-sync-mode": None,
    "stream-max-segment-size-bytes": None,
    "max-in-memory-length": None,
    "max-in-memory-bytes": None,
    "target-group-size": None,
    "federation-upstream": None,
    "federation-upstream-set": None,
}
EXCHANGE_KEYS = ("alternate-exchange",)
TIGHTEST = ("ttl_ms", "expires_ms", "length_max", "bytes_max", "delivery_limit", "max_age_ms", "consumer_timeout_ms")
LOOSE = (
    "overflow", "dead_letter_exchange", "dead_letter_key", "dead_letter_strategy", "retain_ms", "retain_bytes",
)  # fmt: skip
OPERATOR_KEYS = (
    "message-ttl",
    "expires",
    "max-length",
    "max-length-bytes",
    "delivery-limit",
    "overflow",
    *("max-in-memory-length", "max-in-memory-bytes", "target-group-size", "ha-mode", "ha-params", "ha-sync-mode"),
)


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    vhost: str
    name: str
    pattern: str
    definition: dict[str, Any]
    priority: int = 0
    apply_to: str = "all"

    def fits_queue(self, queue: Queue) -> bool:
        return self.fits_kind(queue.policy.kind) and self.fits_name(queue.name)

    def fits_kind(self, kind: str) -> bool:
        return self.apply_to != "exchanges" and KINDS.get(self.apply_to, kind) == kind

    def fits_exchange(self, exchange: Exchange) -> bool:
        return self.apply_to in ("exchanges", "all") and self.fits_name(exchange.name)

    def fits_name(self, name: str) -> bool:
        try:
            return compile_pattern(self.pattern).search(name)
        except InvalidPattern:
            return False  # of an earlier version, which took it; Policies has said so at the start


def check(policy: Policy, *, operator: bool = False) -> None:
    """InvalidInput, in RabbitMQ's words where it has some, when the policy cannot be."""
    if not policy.name:
        raise InvalidInput("a policy has a name")
    if len(policy.pattern) > PATTERN_CHARACTERS_MAX:
        raise InvalidInput(f"a pattern has at most {PATTERN_CHARACTERS_MAX} characters")
    try:
        compile_pattern(policy.pattern)
    except InvalidPattern as error:
        raise InvalidInput(f"Validation failed: not a pattern: {error}") from None
    if policy.apply_to not in APPLY_TO:
        raise InvalidInput(f"Validation failed: apply-to is one of {', '.join(APPLY_TO)}")
    if not policy.definition:
        raise InvalidInput("Validation failed: no policy provided")
    for key in policy.definition:
        if key not in QUEUE_KEYS and key not in EXCHANGE_KEYS:
            raise InvalidInput(f"Validation failed: {key!r} is not a recognised policy setting")
        if operator and key not in OPERATOR_KEYS:
            raise InvalidInput(f"Validation failed: {key!r} is not for operator policies")
    alternate = policy.definition.get("alternate-exchange", "")
    if not isinstance(alternate, str):
        raise InvalidInput("Validation failed: alternate-exchange is the name of an exchange")
    try:
        limits(policy.definition)
    except ArgumentMismatch as error:
        raise InvalidInput(f"Validation failed: {error}") from None


def limits(definition: Mapping[str, Any]) -> QueueArguments:
    """What a policy says about queues, typed like the arguments it stands for."""
    arguments: dict[str, Any] = {}
    for key, value in definition.items():
        argument = QUEUE_KEYS.get(key)
        if argument is not None:
            arguments[argument] = value
    if "x-dead-letter-routing-key" in arguments:
        # The exchange may come from the queue's own arguments; here only the shape is checked.
        arguments.setdefault("x-dead-letter-exchange", "")
    found = parse_arguments("policy", arguments)
    if "dead-letter-exchange" not in definition and found.dead_letter_exchange == "":
        found = msgspec.structs.replace(found, dead_letter_exchange=None)
    return found


def merge(declared: QueueArguments, policy: QueueArguments | None, named: Iterable[str] = ()) -> QueueArguments:
    """The effective policy of a queue. `named` are the keys that the policy really has."""
    if policy is None:
        return declared
    changes: dict[str, Any] = {}
    for field in TIGHTEST:
        bounds = [bound for bound in (getattr(declared, field), getattr(policy, field)) if bound is not None]
        # -1 takes away what holds when nobody says anything, not what the other one says.
        changes[field] = min([bound for bound in bounds if bound >= 0] or bounds, default=None)
    for field in LOOSE:
        default = QueueArguments.__struct_defaults__[QueueArguments.__struct_fields__.index(field)]
        own = getattr(declared, field)
        if own == default:
            changes[field] = getattr(policy, field)
    if declared.dead_letter_exchange is None and policy.dead_letter_exchange is None:
        changes["dead_letter_key"] = declared.dead_letter_key
    return msgspec.structs.replace(declared, **changes)


def _say_if_unusable(policy: Policy) -> None:
    try:
        compile_pattern(policy.pattern)
    except InvalidPattern as error:
        words = "policy %r of vhost %r fits nothing until its pattern is changed: %s"
        logger.error(words, policy.name, policy.vhost, error)


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A policy as the catalog keeps it."""

    identity: tuple[str, str]
    pattern: str
    definition: dict[str, Any]
    priority: int = 0
    apply_to: str = "all"


class PolicyHost(Protocol):
    """A vhost, as far as policies are applied to it."""

    @property
    def name(self) -> str: ...
    @property
    def queues(self) -> Mapping[str, Queue]: ...
    @property
    def routing(self) -> Routing[Queue]: ...


class Policies:
    """All policies of the broker, kept in the catalog. Changes are durable when they return."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._policies: dict[tuple[str, str], Policy] = {}
        self._operator: dict[tuple[str, str], Policy] = {}
        self._thread = ThreadPoolExecutor(1, "policies")
        self._changing = asyncio.Lock()
        self._is_closed = False
        self._hosts: Callable[[], Iterable[PolicyHost]] = tuple
        self._streams: Streams
        for kind, known in ((CATALOG_KIND, self._policies), (OPERATOR_KIND, self._operator)):
            for document in catalog.load(kind):
                stored = shaped(kind, document, _Stored)
                vhost, name = stored.identity
                known[vhost, name] = Policy(
                    vhost=vhost,
                    name=name,
                    pattern=stored.pattern,
                    definition=stored.definition,
                    priority=stored.priority,
                    apply_to=stored.apply_to,
                )
                _say_if_unusable(known[vhost, name])

    def attach(self, hosts: Callable[[], Iterable[PolicyHost]], streams: Streams) -> None:
        """Once everything declared has been loaded."""
        self._hosts = hosts
        self._streams = streams
        streams.on_create(self.apply_to_topic)
        for host in hosts():
            for _ in self._applied(host):
                pass

    def close(self) -> None:
        self._is_closed = True
        self._thread.shutdown()

    # Looking.

    def list(self, vhost: str | None = None, *, operator: bool = False) -> "list[Policy]":
        known = self._operator if operator else self._policies
        return [policy for key, policy in sorted(known.items()) if vhost is None or policy.vhost == vhost]

    def get(self, vhost: str, name: str, *, operator: bool = False) -> Policy:
        found = (self._operator if operator else self._policies).get((vhost, name))
        if found is None:
            raise NotFound(f"no policy {name!r} in vhost {vhost!r}")
        return found

    def _best(self, vhost: str, fits: Callable[[Policy], bool], *, operator: bool = False) -> Policy | None:
        known = self._operator if operator else self._policies
        fitting = (p for p in known.values() if p.vhost == vhost and fits(p))
        # Of equals the first by name: RabbitMQ leaves it open, people like an answer that stays.
        return min(fitting, key=lambda p: (-p.priority, p.name), default=None)

    # Changing.

    @to_the_end
    async def put(self, policy: Policy, *, operator: bool = False) -> None:
        check(policy, operator=operator)
        kind, known = (OPERATOR_KIND, self._operator) if operator else (CATALOG_KIND, self._policies)
        document = msgspec.to_builtins(policy)
        del document["vhost"], document["name"]
        async with self._changing:
            identity = (policy.vhost, policy.name)
            await self._in_thread(lambda: self._catalog.put(kind, identity, document))
            known[identity] = policy
            await self._changed(policy.vhost)

    @to_the_end
    async def delete(self, vhost: str, name: str, *, operator: bool = False) -> None:
        kind, known = (OPERATOR_KIND, self._operator) if operator else (CATALOG_KIND, self._policies)
        async with self._changing:
            self.get(vhost, name, operator=operator)
            await self._in_thread(lambda: self._catalog.remove(kind, (vhost, name)))
            del known[vhost, name]
            await self._changed(vhost)

    @to_the_end
    async def vhost_removed(self, vhost: str) -> None:
        """One that is made anew under its name begins without them."""
        async with self._changing:
            for kind, known in ((CATALOG_KIND, self._policies), (OPERATOR_KIND, self._operator)):
                for identity in [key for key in known if key[0] == vhost]:
                    await self._in_thread(partial(self._catalog.remove, kind, identity))
                    del known[identity]

    async def _in_thread(self, work: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as error:
            raise StorageError(f"the catalog cannot be written: {error.strerror}") from error

    # Applying.

    async def _changed(self, vhost: str) -> None:
        """Returns when it holds for everything. A start applies all that the catalog has: what a crash cuts off here
        holds then."""
        for host in self._hosts():
            if host.name == vhost:
                async for _ in YieldEvery().each(self._applied(host)):
                    pass

    def _applied(self, host: PolicyHost) -> Iterator[None]:
        """Step by step, everything that can have a policy; others may have their turn after each step. What is
        declared meanwhile has the policy from the beginning."""
        streams = (stream for stream in self._streams if stream.vhost == host.name)
        everything: tuple[Queue | Stream | Exchange, ...] = (
            *host.queues.values(), *streams, *host.routing.exchanges.values(),
        )  # fmt: skip
        for found in everything:
            if self._is_closed:
                return
            if isinstance(found, Exchange):
                self.apply_to_exchange(host.name, found)
                host.routing.changed()
            elif isinstance(found, Stream):
                self.apply_to_topic(found)
            elif not found.is_deleted and self.apply_to_queue(found):
                host.routing.changed()  # publishers remember whether a queue looks at each message
            yield

    def apply_to_topic(self, stream: Stream) -> None:
        """A topic is bounded like a stream queue, also when no AMQP client ever asked for it."""
        if stream.kind != "topic":
            return  # its queue sees to it
        found = [
            self._best(stream.vhost, lambda p: p.fits_kind(STREAM) and p.fits_name(stream.name), operator=operator)
            for operator in (False, True)
        ]
        bounds = [limits(policy.definition) for policy in found if policy is not None]
        ages = [bound.max_age_ms for bound in bounds if bound.max_age_ms is not None]
        sizes = [bound.bytes_max for bound in bounds if bound.bytes_max is not None]
        stream.bound(min(ages, default=None), min(sizes, default=None))

    def apply_to_queue(self, queue: Queue) -> bool:
        """Gives a queue the policy that fits it best, or takes away the one it had. False when nothing changes."""
        vhost = queue.vhost.name
        policy = self._best(vhost, lambda p: p.fits_queue(queue)) if self._policies else None
        operator = self._best(vhost, lambda p: p.fits_queue(queue), operator=True) if self._operator else None
        effective = queue.declared_policy
        for found in (policy, operator):
            if found is not None:
                effective = merge(effective, limits(found.definition))
        queue.policy_name = policy.name if policy is not None else None
        queue.operator_policy_name = operator.name if operator is not None else None
        if effective == queue.policy:
            return False
        queue.apply_policy(effective)
        return True

    def apply_to_exchange(self, vhost: str, exchange: Exchange) -> None:
        policy = self._best(vhost, lambda p: p.fits_exchange(exchange)) if self._policies else None
        exchange.policy_name = policy.name if policy is not None else None
        alternate = policy.definition.get("alternate-exchange") if policy is not None else None
        exchange.policy_alternate = alternate

    def __iter__(self) -> Iterator[Policy]:
        return iter(self.list())
