"""The arguments of a queue (x-...), checked and typed once when it is declared."""

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import msgspec

from headrace.broker.types.message import TTL_MS_MAX
from headrace.errors import ArgumentMismatch

CLASSIC, QUORUM, STREAM = "classic", "quorum", "stream"
DROP_HEAD, REJECT, REJECT_DLX = "drop-head", "reject-publish", "reject-publish-dlx"
AT_MOST_ONCE, AT_LEAST_ONCE = "at-most-once", "at-least-once"
FIXED, EXPONENTIAL = "fixed", "exponential"
PRIORITY_MAX = 255
DELIVERY_LIMIT_QUORUM = 20  # RabbitMQ 4's default
LEADER_LOCATORS = ("client-local", "balanced", "random", "least-leaders")  # accepted as by RabbitMQ, without effect
TTL_MAX = 2**53  # milliseconds; beyond this, dates cannot be represented
BOUND_MAX = 2**63 - 1  # the largest AMQP integer: clients send it for "no limit"
DOUBLINGS_MAX = 40  # one millisecond, doubled this often, is longer than any delay
STREAM_OFFSETS = ("first", "last", "next")


class QueueArguments(msgspec.Struct, frozen=True, kw_only=True):
    kind: str = CLASSIC
    ttl_ms: int | None = None
    expires_ms: int | None = None
    length_max: int | None = None
    bytes_max: int | None = None
    overflow: str = DROP_HEAD
    dead_letter_exchange: str | None = None
    dead_letter_key: str | None = None
    dead_letter_strategy: str = AT_MOST_ONCE
    priority_max: int = 0
    single_active: bool = False
    delivery_limit: int | None = None  # -1: none, even if the queue type has a default
    consumer_timeout_ms: int | None = None
    retry_limit: int | None = None
    retry_delay_ms: int | None = None
    retry_backoff: str | None = None
    retry_delay_max_ms: int | None = None
    retain_ms: int | None = None
    retain_bytes: int | None = None
    max_age_ms: int | None = None

    @property
    def returns_max(self) -> int | None:
        """How often a message may be returned; None: without limit."""
        if self.delivery_limit is None:
            return DELIVERY_LIMIT_QUORUM if self.kind == QUORUM else None
        return self.delivery_limit if self.delivery_limit >= 0 else None

    def retry_delay(self, attempt: int) -> int:
        """The milliseconds before the given retry of a message, counted from 1."""
        delay = self.retry_delay_ms or 0
        if self.retry_backoff == EXPONENTIAL:
            delay <<= min(attempt - 1, DOUBLINGS_MAX)
        return min(delay, TTL_MS_MAX if self.retry_delay_max_ms is None else self.retry_delay_max_ms)

    @property
    def counts_deliveries(self) -> bool:
        return self.kind == QUORUM or self.returns_max is not None

    @property
    def is_bounded(self) -> bool:
        """Whether the length, the bytes or the age of the messages is limited."""
        return self.length_max is not None or self.bytes_max is not None or self.ttl_ms is not None

    @property
    def keeps_dead_letters(self) -> bool:
        """Whether dead letters are kept until they can be stored (at-least-once). As in RabbitMQ, only where the queue
        never drops messages."""
        return self.dead_letter_strategy == AT_LEAST_ONCE and self.kind == QUORUM and self.overflow == REJECT

    @property
    def decides_per_message(self) -> bool:
        """Whether each publish must be examined in Python before it is appended."""
        return (
            self.priority_max > 0
            or self.bytes_max is not None
            or (self.length_max is not None and self.overflow != DROP_HEAD)
        )


NO_ARGUMENTS = QueueArguments()  # one object for all queues without arguments: there may be many


def _number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _at_least(least: int, most: int = TTL_MAX) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        if not _number(value):
            return "expected integer"
        if value < least:
            return f"{{value_negative,{value}}}" if least == 0 else f"{{value_not_positive,{value}}}"
        if value > most:
            return f"{{value_too_large,{value}}}"
        return None

    return check


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else "{unacceptable_type,longstr expected}"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "{unacceptable_type,bool expected}"


def _one_of(*names: str) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        return None if value in names else f"{{invalid_value,{value}}}, expected one of {', '.join(names)}"

    return check


def max_age_ms(value: Any) -> int | None:
    """RabbitMQ's "7D" and the like, in milliseconds."""
    units = {"Y": 365 * 86400, "M": 30 * 86400, "D": 86400, "h": 3600, "m": 60, "s": 1}
    if not isinstance(value, str) or value[-1:] not in units or not value[:-1].isdecimal():
        return None
    try:
        return int(value[:-1]) * units[value[-1]] * 1000
    except ValueError:
        return None  # thousands of digits


def _age(value: Any) -> str | None:
    return None if max_age_ms(value) is not None else f"{{invalid_max_age,{value}}}"


def _leader_locator(value: Any) -> str | None:
    if not isinstance(value, str):
        return "{unacceptable_type,longstr expected}"
    return None if value in LEADER_LOCATORS else "invalid_queue_locator_arg"


CHECKS: dict[str, tuple[str | None, Callable[[Any], str | None]]] = {
    "x-queue-type": ("kind", _one_of(CLASSIC, QUORUM, STREAM)),
    "x-message-ttl": ("ttl_ms", _at_least(0)),
    "x-expires": ("expires_ms", _at_least(1)),
    "x-max-length": ("length_max", _at_least(0, BOUND_MAX)),
    "x-max-length-bytes": ("bytes_max", _at_least(0, BOUND_MAX)),
    "x-overflow": ("overflow", _one_of(DROP_HEAD, REJECT, REJECT_DLX)),
    "x-dead-letter-exchange": ("dead_letter_exchange", _text),
    "x-dead-letter-routing-key": ("dead_letter_key", _text),
    "x-dead-letter-strategy": ("dead_letter_strategy", _one_of(AT_MOST_ONCE, AT_LEAST_ONCE)),
    "x-max-priority": ("priority_max", _at_least(0, PRIORITY_MAX)),
    "x-single-active-consumer": ("single_active", _flag),
    "x-delivery-limit": ("delivery_limit", _at_least(-1)),
    "x-consumer-timeout": ("consumer_timeout_ms", _at_least(1)),
    "x-retry-limit": ("retry_limit", _at_least(0)),
    "x-retry-delay": ("retry_delay_ms", _at_least(0, TTL_MS_MAX)),
    "x-retry-backoff": ("retry_backoff", _one_of(FIXED, EXPONENTIAL)),
    "x-retry-delay-max": ("retry_delay_max_ms", _at_least(0, TTL_MS_MAX)),
    "x-queue-mode": (None, _one_of("default", "lazy")),
    "x-queue-version": (None, _at_least(1, 2)),
    "x-queue-leader-locator": (None, _leader_locator),
    "x-queue-master-locator": (None, _text),
    "x-quorum-initial-group-size": (None, _at_least(1)),
    "x-initial-cluster-size": (None, _at_least(1)),
    "x-max-in-memory-length": (None, _at_least(0)),
    "x-max-in-memory-bytes": (None, _at_least(0)),
    "x-max-age": ("max_age_ms", _age),
    "x-stream-max-segment-size-bytes": (None, _at_least(1)),
    "x-retain-ms": ("retain_ms", _at_least(1)),
    "x-retain-bytes": ("retain_bytes", _at_least(1)),
}
# Arguments that must be the same when a queue is declared again, as in RabbitMQ; others may differ.
COMPARED = tuple(name for name in CHECKS if name not in ("x-queue-master-locator", "x-queue-leader-locator"))
# Arguments that RabbitMQ refuses for other queue types.
_QUORUM_ONLY = (
    "x-delivery-limit",
    "x-dead-letter-strategy",
    "x-max-in-memory-length",
    "x-max-in-memory-bytes",
    "x-quorum-initial-group-size",
)
_STREAM_ONLY = ("x-initial-cluster-size", "x-max-age", "x-stream-max-segment-size-bytes")
_CLASSIC_ONLY = ("x-max-priority", "x-queue-mode", "x-queue-version", "x-queue-master-locator")
_NO_STREAM = (
    *("x-message-ttl", "x-expires", "x-dead-letter-exchange", "x-dead-letter-routing-key", "x-overflow"),
    *("x-max-length", "x-single-active-consumer"),
    *("x-retry-limit", "x-retry-delay", "x-retry-backoff", "x-retry-delay-max"),
)
REFUSED: dict[str, tuple[str, ...]] = {
    CLASSIC: _QUORUM_ONLY + _STREAM_ONLY,
    QUORUM: _CLASSIC_ONLY + _STREAM_ONLY,
    STREAM: _CLASSIC_ONLY + _QUORUM_ONLY + _NO_STREAM,
}


def check_declared(where: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that clients may not declare. Policies may contain them: a policy applies to queues of several
    types, and RabbitMQ accepts any number there."""
    kind = arguments.get("x-queue-type", CLASSIC)
    for name in REFUSED.get(kind, ()) if isinstance(kind, str) else ():
        if name in arguments:
            raise ArgumentMismatch(f"invalid arg '{name}' for {where} of queue type rabbit_{kind}_queue")
    for name in ("x-message-ttl", "x-expires"):
        value = arguments.get(name)
        if _number(value) and value > TTL_MS_MAX:
            raise ArgumentMismatch(f"invalid arg '{name}' for {where}: {{value_too_large,{value}}}")


def parse_arguments(where: str, arguments: Mapping[str, Any]) -> QueueArguments:
    """Raises ArgumentMismatch with RabbitMQ's text for an invalid argument. Unknown arguments are ignored."""
    fields: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in CHECKS:
            continue
        field, check = CHECKS[name]
        fault = check(value)
        if fault is not None:
            raise ArgumentMismatch(f"invalid arg '{name}' for {where}: {fault}")
        if field is not None:
            fields[field] = max_age_ms(value) if field == "max_age_ms" else value
    if "dead_letter_key" in fields and "dead_letter_exchange" not in fields:
        raise ArgumentMismatch(f"invalid arg 'x-dead-letter-routing-key' for {where}: routing_key_but_no_dlx_defined")
    return QueueArguments(**fields) if fields else NO_ARGUMENTS


def type_name(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    return {int: "signedint", str: "longstr", float: "double"}.get(type(value), type(value).__name__)


def check_equivalent(where: str, declared: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    for name in COMPARED:
        default = CLASSIC if name == "x-queue-type" else None
        new, old = declared.get(name, default), current.get(name, default)
        if new == old:
            continue
        received = "none" if new is None else f"the value '{new}' of type '{type_name(new)}'"
        there = "none" if old is None else f"the value '{old}' of type '{type_name(old)}'"
        raise ArgumentMismatch(f"inequivalent arg '{name}' for {where}: received {received} but current is {there}")
