"""Declarations of exchanges and queues: checks, reserved names, and comparison with what exists."""

import secrets
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from headrace.broker.queues.queue import Queue
from headrace.broker.queues.queue_arguments import (
    CLASSIC,
    STREAM,
    QueueArguments,
    check_declared,
    check_equivalent,
    parse_arguments,
)
from headrace.broker.routing.exchanges import Exchange, check_exchange_arguments, make_exchange
from headrace.broker.types.message import KEY_BYTES_MAX, to_bytes
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
    """AMQP encodes the length in one byte; names from other listeners may be longer."""
    if len(to_bytes(name)) > KEY_BYTES_MAX:
        raise InvalidInput(f"{what} has at most {KEY_BYTES_MAX} bytes: '{name[:40]}...'")


def check_not_reserved(what: str, name: str) -> None:
    check_length("the name of a queue or exchange", name)
    if name.startswith(RESERVED):
        raise AccessRefused(f"{what} name '{name}' contains reserved prefix 'amq.*'")


def place(what: str, name: str, vhost: str) -> str:
    """How RabbitMQ names it in error messages."""
    return f"{what} '{name}' in vhost '{vhost}'"


class ExchangeDeclared(NamedTuple):
    kind: str
    durable: bool
    auto_delete: bool
    internal: bool
    arguments: Mapping[str, Any]

    def exchange(self, name: str, vhost: str, found: Exchange | None) -> Exchange:
        """The existing exchange, if the declaration matches it; otherwise a new one, not yet registered."""
        where = place("exchange", name, vhost)
        if found is not None:
            self.check_same(where, found)
            return found
        check_not_reserved("exchange", name)
        self.check(where)
        return make_exchange(
            name,
            self.kind,
            durable=self.durable,
            auto_delete=self.auto_delete,
            internal=self.internal,
            arguments=self.arguments,
        )

    def check(self, where: str) -> None:
        alternate = self.arguments.get(ALTERNATE)
        if alternate is not None and not isinstance(alternate, str):
            raise ArgumentMismatch(f"invalid arg '{ALTERNATE}' for {where}")
        for name in ("hash-header", "hash-property"):
            if not isinstance(self.arguments.get(name, ""), str):
                raise ArgumentMismatch(f"invalid arg '{name}' for {where}: a name is expected")
        check_exchange_arguments(self.kind, self.arguments)

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
        """An exclusive queue ends with its connection, so it is not stored even if declared durable."""
        return self.durable and not self.exclusive

    @property
    def kind(self) -> Any:
        """The requested queue type; not validated before `check`."""
        return self.arguments.get("x-queue-type", CLASSIC)

    def typed(self, default: str, current: str | None) -> "QueueDeclared":
        """With the vhost's default queue type if none is given. A queue that exists with another type (`current`), from
        before the default was set, is matched as it is."""
        is_given = "x-queue-type" in self.arguments
        if not self.is_stored or self.auto_delete or is_given or default == CLASSIC or current not in (None, default):
            return self
        return self._replace(arguments={**self.arguments, "x-queue-type": default})

    def check(self, where: str) -> QueueArguments:
        check_declared(where, self.arguments)
        policy = parse_arguments(where, self.arguments)
        if policy.kind != CLASSIC and (self.exclusive or not self.durable or self.auto_delete):
            wrong = "non-durable" if not self.durable else "exclusive" if self.exclusive else "auto-delete"
            raise ArgumentMismatch(f"invalid property '{wrong}' for {where} of type {policy.kind}")
        return policy

    def check_same(self, where: str, found: "Queue | QueueDeclared") -> None:
        facts = (
            ("durable", self.durable, found.durable),
            ("auto_delete", self.auto_delete, found.auto_delete),
        )
        _check_facts(where, facts)
        check_declared(where, self.arguments)
        parse_arguments(where, self.arguments)
        check_equivalent(where, self.arguments, found.arguments)


class NewQueue(NamedTuple):
    """A checked declaration of a durable queue that does not exist."""

    declared: QueueDeclared
    policy: QueueArguments


# A topic, when it is declared as a queue.
TOPIC = QueueDeclared(durable=True, exclusive=False, auto_delete=False, arguments={"x-queue-type": STREAM})


def _check_facts(where: str, facts: Iterable[tuple[str, object, object]]) -> None:
    for argument, new, old in facts:
        if new != old:
            received = f"received '{_spell(new)}' but current is '{_spell(old)}'"
            raise ArgumentMismatch(f"inequivalent arg '{argument}' for {where}: {received}")


def _spell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)
