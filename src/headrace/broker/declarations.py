"""What a client declares: the names that are taken, and what must be the same when the thing is there already."""

import secrets
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from headrace.broker.exchanges import Exchange
from headrace.broker.message import HASHED, KEY_BYTES_MAX, to_bytes
from headrace.broker.policy import CLASSIC, QueuePolicy, check_declared, check_equivalent, parse_arguments
from headrace.broker.queue import Queue
from headrace.errors import AccessRefused, ArgumentMismatch, InvalidInput

PREDECLARED = {
    "": "direct",
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.topic": "topic",
    "amq.headers": "headers",
    "amq.match": "headers",
}
RESERVED = "amq."
ALTERNATE = "alternate-exchange"


def server_name(prefix: str = "amq.gen-") -> str:
    return prefix + urlsafe_b64encode(secrets.token_bytes(16)).rstrip(b"=").decode()


def check_length(what: str, name: str) -> None:
    """AMQP has a byte for it; what comes by another door may be longer."""
    if len(to_bytes(name)) > KEY_BYTES_MAX:
        raise InvalidInput(f"{what} has at most {KEY_BYTES_MAX} bytes: '{name[:40]}...'")


def check_not_reserved(what: str, name: str) -> None:
    check_length("the name of a queue or exchange", name)
    if name.startswith(RESERVED):
        raise AccessRefused(f"{what} name '{name}' contains reserved prefix 'amq.*'")


class ExchangeDeclared(NamedTuple):
    kind: str
    durable: bool
    auto_delete: bool
    internal: bool
    arguments: Mapping[str, Any]

    def check(self, where: str) -> None:
        alternate = self.arguments.get(ALTERNATE)
        if alternate is not None and not isinstance(alternate, str):
            raise ArgumentMismatch(f"invalid arg '{ALTERNATE}' for {where}")
        for name in ("hash-header", "hash-property"):
            if not isinstance(self.arguments.get(name, ""), str):
                raise ArgumentMismatch(f"invalid arg '{name}' for {where}: a name is expected")
        if "x-consistent-hash" in (self.kind, self.arguments.get("x-delayed-type")):
            self._check_hash()

    def _check_hash(self) -> None:
        if "hash-header" in self.arguments and "hash-property" in self.arguments:
            raise ArgumentMismatch("hash-header and hash-property are mutually exclusive")
        hashed = self.arguments.get("hash-property", HASHED[0])
        if hashed not in HASHED:
            raise ArgumentMismatch(f"Unsupported property: {hashed}")

    def check_same(self, where: str, found: Exchange) -> None:
        facts = (
            ("type", self.kind, found.declared_kind),
            ("durable", self.durable, found.durable),
            ("auto_delete", self.auto_delete, found.auto_delete),
            ("internal", self.internal, found.internal),
            (ALTERNATE, self.arguments.get(ALTERNATE), found.arguments.get(ALTERNATE)),
        )
        _check_facts(where, facts)


class QueueDeclared(NamedTuple):
    durable: bool
    exclusive: bool
    auto_delete: bool
    arguments: Mapping[str, Any]

    @property
    def is_stored(self) -> bool:
        """An exclusive queue goes with its connection: it need not last, whatever it says."""
        return self.durable and not self.exclusive

    def check(self, where: str) -> QueuePolicy:
        check_declared(where, self.arguments)
        policy = parse_arguments(where, self.arguments)
        if policy.kind != CLASSIC and (self.exclusive or not self.durable or self.auto_delete):
            wrong = "non-durable" if not self.durable else "exclusive" if self.exclusive else "auto-delete"
            raise ArgumentMismatch(f"invalid property '{wrong}' for {where} of type {policy.kind}")
        return policy

    def check_same(self, where: str, found: Queue) -> None:
        facts = (
            ("durable", self.durable, found.durable),
            ("auto_delete", self.auto_delete, found.auto_delete),
        )
        _check_facts(where, facts)
        check_declared(where, self.arguments)
        parse_arguments(where, self.arguments)
        check_equivalent(where, self.arguments, found.arguments)


def _check_facts(where: str, facts: Iterable[tuple[str, object, object]]) -> None:
    for argument, new, old in facts:
        if new != old:
            received = f"received '{_spell(new)}' but current is '{_spell(old)}'"
            raise ArgumentMismatch(f"inequivalent arg '{argument}' for {where}: {received}")


def _spell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)
