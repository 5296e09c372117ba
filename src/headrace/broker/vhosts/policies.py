"""Policies: settings of operators for all queues and exchanges whose names match a pattern.

A policy never changes a declaration. A queue keeps its arguments and has an effective policy beside them, computed
again whenever a policy is added, changed or removed. Where both limit the same thing, the tighter limit applies, as in
RabbitMQ; otherwise the queue's argument takes precedence.
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
from headrace.broker.cooperative import YieldEvery, uncancellable
from headrace.broker.queues.dead_lettering import DeadLettering
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
# The queue argument that each policy key stands for. None: known to RabbitMQ, without effect here.
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
    "retry-limit": "x-retry-limit",
    "retry-delay": "x-retry-delay",
    "retry-backoff": "x-retry-backoff",
    "retry-delay-max": "x-retry-delay-max",
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
    "retry_limit", "retry_delay_ms", "retry_backoff", "retry_delay_max_ms",
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
            return False  # accepted by an earlier version; logged when the broker started


def check(policy: Policy, *, operator: bool = False) -> None:
    """Raises InvalidInput, with RabbitMQ's text where there is one, for an invalid policy."""
    if not policy.name:
        raise InvalidInput("a policy must have a name")
    if len(policy.pattern) > PATTERN_CHARACTERS_MAX:
        raise InvalidInput(f"the pattern of a policy has at most {PATTERN_CHARACTERS_MAX} characters")
    try:
        compile_pattern(policy.pattern)
    except InvalidPattern as error:
        raise InvalidInput(f"Validation failed: invalid pattern: {error}") from None
    if policy.apply_to not in APPLY_TO:
        raise InvalidInput(f"Validation failed: apply-to must be one of {', '.join(APPLY_TO)}")
    if not policy.definition:
        raise InvalidInput("Validation failed: no policy provided")
    for key in policy.definition:
        if key not in QUEUE_KEYS and key not in EXCHANGE_KEYS:
            raise InvalidInput(f"Validation failed: {key!r} is not a recognised policy setting")
        if operator and key not in OPERATOR_KEYS:
            raise InvalidInput(f"Validation failed: {key!r} is not allowed in operator policies")
    alternate = policy.definition.get("alternate-exchange", "")
    if not isinstance(alternate, str):
        raise InvalidInput("Validation failed: alternate-exchange must be the name of an exchange")
    try:
        limits(policy.definition)
    except ArgumentMismatch as error:
        raise InvalidInput(f"Validation failed: {error}") from None


def limits(definition: Mapping[str, Any]) -> QueueArguments:
    """The queue settings of a policy, as typed arguments."""
    arguments: dict[str, Any] = {}
    for key, value in definition.items():
        argument = QUEUE_KEYS.get(key)
        if argument is not None:
            arguments[argument] = value
    if "x-dead-letter-routing-key" in arguments:
        # The exchange may come from the queue's arguments; only the types are checked here.
        arguments.setdefault("x-dead-letter-exchange", "")
    found = parse_arguments("policy", arguments)
    if "dead-letter-exchange" not in definition and found.dead_letter_exchange == "":
        found = msgspec.structs.replace(found, dead_letter_exchange=None)
    return found


def merge(declared: QueueArguments, policy: QueueArguments | None) -> QueueArguments:
    """The effective policy of a queue: its declared arguments combined with a policy."""
    if policy is None:
        return declared
    changes: dict[str, Any] = {}
    for field in TIGHTEST:
        bounds = [bound for bound in (getattr(declared, field), getattr(policy, field)) if bound is not None]
        # -1 removes the default, but not the limit of the other one.
        changes[field] = min([bound for bound in bounds if bound >= 0] or bounds, default=None)
    for field in LOOSE:
        default = QueueArguments.__struct_defaults__[QueueArguments.__struct_fields__.index(field)]
        own = getattr(declared, field)
        if own == default:
            changes[field] = getattr(policy, field)
    if declared.dead_letter_exchange is None and policy.dead_letter_exchange is None:
        changes["dead_letter_key"] = declared.dead_letter_key
    return msgspec.structs.replace(declared, **changes)


def _log_if_invalid(policy: Policy) -> None:
    try:
        compile_pattern(policy.pattern)
    except InvalidPattern as error:
        text = "policy %r of vhost %r matches nothing because its pattern is invalid: %s"
        logger.error(text, policy.name, policy.vhost, error)


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A policy document of the catalog."""

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
    @property
    def dead_letters(self) -> DeadLettering: ...


class Policies:
    """All policies of the broker, stored in the catalog. A change is durable and applied when it returns."""

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
                _log_if_invalid(known[vhost, name])

    def attach(self, hosts: Callable[[], Iterable[PolicyHost]], streams: Streams) -> None:
        """Apply the policies to everything that was loaded. Called once."""
        self._hosts = hosts
        self._streams = streams
        streams.on_create(self.apply_to_topic)
        for host in hosts():
            for _ in self._applied(host):
                pass

    def close(self) -> None:
        self._is_closed = True
        self._thread.shutdown()

    # Reading.

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
        # Of equal priorities the first by name, so that the choice is stable; RabbitMQ leaves it open.
        return min(fitting, key=lambda p: (-p.priority, p.name), default=None)

    # Changing.

    @uncancellable
    async def put(self, policy: Policy, *, operator: bool = False) -> None:
        check(policy, operator=operator)
        kind, known = (OPERATOR_KIND, self._operator) if operator else (CATALOG_KIND, self._policies)
        document = msgspec.to_builtins(policy)
        del document["vhost"], document["name"]
        async with self._changing:
            if limits(policy.definition).retry_limit:
                for host in self._hosts():
                    if host.name == policy.vhost:
                        await host.dead_letters.retries.prepare()
            identity = (policy.vhost, policy.name)
            await self._in_thread(lambda: self._catalog.put(kind, identity, document))
            known[identity] = policy
            await self._changed(policy.vhost)

    @uncancellable
    async def delete(self, vhost: str, name: str, *, operator: bool = False) -> None:
        kind, known = (OPERATOR_KIND, self._operator) if operator else (CATALOG_KIND, self._policies)
        async with self._changing:
            self.get(vhost, name, operator=operator)
            await self._in_thread(lambda: self._catalog.remove(kind, (vhost, name)))
            del known[vhost, name]
            await self._changed(vhost)

    @uncancellable
    async def vhost_removed(self, vhost: str) -> None:
        """Remove the policies of a deleted vhost: a new one of that name starts without them."""
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
        """Apply the policies of a vhost to everything in it. If a crash interrupts this, the next start does it."""
        for host in self._hosts():
            if host.name == vhost:
                async for _ in YieldEvery().each(self._applied(host)):
                    pass

    def _applied(self, host: PolicyHost) -> Iterator[None]:
        """Apply the policies to one object per step; the caller may yield to the event loop in between. Objects
        declared meanwhile get their policy when they are declared."""
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
                host.routing.changed()  # routes cache whether a queue examines each message
            yield

    def apply_to_topic(self, stream: Stream) -> None:
        """A topic gets the limits of a stream queue, even if no AMQP client uses it."""
        if stream.kind != "topic":
            return  # apply_to_queue does this
        found = [
            self._best(stream.vhost, lambda p: p.fits_kind(STREAM) and p.fits_name(stream.name), operator=operator)
            for operator in (False, True)
        ]
        bounds = [limits(policy.definition) for policy in found if policy is not None]
        ages = [bound.max_age_ms for bound in bounds if bound.max_age_ms is not None]
        sizes = [bound.bytes_max for bound in bounds if bound.bytes_max is not None]
        stream.bound(min(ages, default=None), min(sizes, default=None))

    def apply_to_queue(self, queue: Queue) -> bool:
        """Give the queue its best matching policies, or none. False if nothing changes."""
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
