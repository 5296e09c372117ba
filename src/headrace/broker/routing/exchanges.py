"""Exchange types. To add one, write a subclass of Exchange here and list it in KINDS; nothing else has to change."""

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Protocol
from urllib.parse import quote_plus

from headrace.broker.routing.topic_trie import TopicTrie
from headrace.broker.types.message import HASHED, Message
from headrace.errors import ArgumentMismatch, InvalidInput
from headrace.publish_counts import PublishCounts

Arguments = Mapping[str, Any]


class Destination(Protocol):
    """A queue or an exchange."""

    @property
    def name(self) -> str: ...
    @property
    def durable(self) -> bool: ...


class Binding:
    """A destination bound to an exchange. Bindings with the same destination, key and arguments are the same."""

    __slots__ = ("arguments", "destination", "identity", "key", "source")

    def __init__(self, source: str, destination: Destination, key: str, arguments: Arguments) -> None:
        self.source = source
        self.destination = destination
        self.key = key
        self.arguments = dict(arguments)
        self.identity = (id(destination), key, canonical(self.arguments))

    @property
    def to_queue(self) -> bool:
        return not isinstance(self.destination, Exchange)

    @property
    def properties_key(self) -> str:
        """The name of the binding in RabbitMQ's HTTP API; "~" separates its parts and stands for an empty key. The key
        is percent-encoded here already: in a path the name is encoded once more."""
        key = packed(self.key)
        if not self.arguments:
            return key
        digest = hashlib.blake2s(canonical(self.arguments).encode(), digest_size=8).hexdigest()
        return f"{key}~{digest}"


def packed(key: str) -> str:
    """A routing key in a properties_key."""
    return quote_plus(key, errors="surrogateescape").replace("~", "%7E") or "~"


def canonical(arguments: Arguments) -> str:
    return repr(sorted(arguments.items(), key=lambda item: item[0])) if arguments else ""


class Exchange:
    """Base class of all exchange types. Subclasses define `kind` and `match`, and what else differs.

    Routes that depend on the routing key alone are cached, so `match` may be plain Python.
    """

    kind: ClassVar[str]
    delayed: ClassVar[bool] = False

    def __init__(
        self,
        name: str,
        *,
        durable: bool = False,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Arguments | None = None,
    ) -> None:
        self.name = name
        self.durable, self.auto_delete, self.internal = durable, auto_delete, internal
        self.arguments: dict[str, Any] = dict(arguments or {})
        self.bindings: dict[tuple[int, str, str], Binding] = {}
        self.counts = PublishCounts()
        self.policy_name: str | None = None
        self.policy_alternate: str | None = None

    @property
    def declared_kind(self) -> str:
        return self.kind

    @property
    def needs_message(self) -> bool:
        """Whether the destinations depend on more than the routing key, so that routes cannot be cached."""
        return self.delayed

    @property
    def alternate(self) -> str | None:
        value = self.arguments.get("alternate-exchange")
        return value if isinstance(value, str) else self.policy_alternate

    def bind(self, binding: Binding) -> bool:
        """False if the binding exists."""
        if binding.identity in self.bindings:
            return False
        self.check(binding.key, binding.arguments)
        self.bindings[binding.identity] = binding
        self._add(binding)
        return True

    def unbind(self, identity: tuple[int, str, str]) -> Binding | None:
        binding = self.bindings.pop(identity, None)
        if binding is not None:
            self._remove(binding)
        return binding

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Raises ArgumentMismatch if an exchange of this type cannot have these arguments."""

    def check(self, key: str, arguments: Arguments) -> None:
        """Raises if this exchange cannot have such a binding."""

    def _add(self, binding: Binding) -> None: ...

    def _remove(self, binding: Binding) -> None: ...

    def match(self, key: str, headers: Arguments | None) -> Iterable[Destination]:
        """The destinations of one routing key; may contain duplicates."""
        raise NotImplementedError

    def match_all(
        self, keys: Sequence[str], headers: Arguments | None, message: Message | None
    ) -> Iterable[Destination]:
        """The destinations of a message with these routing keys (its own, CC and BCC). `message` is None when a route
        is computed to be cached."""
        return chain.from_iterable(self.match(key, headers) for key in keys)


class Direct(Exchange):
    kind = "direct"

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self._by_key: dict[str, list[Destination]] = {}

    def _add(self, binding: Binding) -> None:
        self._by_key.setdefault(binding.key, []).append(binding.destination)

    def _remove(self, binding: Binding) -> None:
        there = self._by_key[binding.key]
        there.remove(binding.destination)
        if not there:
            del self._by_key[binding.key]

    def match(self, key: str, headers: Arguments | None) -> Iterable[Destination]:
        return self._by_key.get(key, ())


class Fanout(Exchange):
    kind = "fanout"

    def match(self, key: str, headers: Arguments | None) -> Iterable[Destination]:
        return (binding.destination for binding in self.bindings.values())


class Topic(Exchange):
    kind = "topic"

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self._trie: TopicTrie[Destination] = TopicTrie()

    def _add(self, binding: Binding) -> None:
        self._trie.add(binding.key, binding.destination)

    def _remove(self, binding: Binding) -> None:
        self._trie.remove(binding.key, binding.destination)

    def match(self, key: str, headers: Arguments | None) -> Iterable[Destination]:
        return self._trie.match(key)


class Headers(Exchange):
    kind = "headers"
    MODES: ClassVar = ("all", "any", "all-with-x", "any-with-x")

    @property
    def needs_message(self) -> bool:
        return True

    def check(self, key: str, arguments: Arguments) -> None:
        mode = arguments.get("x-match", "all")
        if mode not in self.MODES:
            raise InvalidInput(f"Invalid x-match field value {mode!r}; expected all, any, all-with-x or any-with-x")

    def match(self, key: str, headers: Arguments | None) -> Iterator[Destination]:
        for binding in self.bindings.values():
            if self.fits(binding.arguments, headers or {}):
                yield binding.destination

    @staticmethod
    def fits(wanted: Arguments, headers: Arguments) -> bool:
        mode = str(wanted.get("x-match", "all"))
        pairs = [
            (name, value)
            for name, value in wanted.items()
            if name != "x-match" and (mode.endswith("-with-x") or not name.startswith("x-"))
        ]
        # A binding argument without a value only requires that the header exists.
        hits = (name in headers and (value is None or _is_same(headers[name], value)) for name, value in pairs)
        return any(hits) if mode.startswith("any") else all(hits)


def _is_same(found: Any, wanted: Any) -> bool:
    """AMQP distinguishes 1 from true and 1.0; Python's == does not."""
    kinds = bool, int
    return found == wanted and all(isinstance(found, kind) is isinstance(wanted, kind) for kind in kinds)


class ConsistentHash(Exchange):
    """Sends each message to one destination, by consistent hashing. The key of a binding is its weight."""

    kind = "x-consistent-hash"
    POINTS_PER_WEIGHT: ClassVar = 40
    WEIGHT_MAX: ClassVar = 1000
    NUMBER_BITS: ClassVar = 24
    NUMBER_MASK: ClassVar = (1 << NUMBER_BITS) - 1

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        # Points of the ring, with the number of their binding in the lower bits: eight bytes each. Sorted when the next
        # message arrives, once for all bindings added since the last one.
        self._ring = array("Q")
        self._is_sorted = True
        self._numbered: dict[int, Binding] = {}
        self._free_numbers: list[int] = []
        self._header = self.arguments.get("hash-header")
        self._property = self.arguments.get("hash-property")  # of the message, hashed instead of the routing key

    @property
    def needs_message(self) -> bool:
        return self.delayed or bool(self._header or self._property)

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        if "hash-header" in arguments and "hash-property" in arguments:
            raise ArgumentMismatch("hash-header and hash-property are mutually exclusive")
        hashed = arguments.get("hash-property", HASHED[0])
        if hashed not in HASHED:
            raise ArgumentMismatch(f"Unsupported property: {hashed}")

    def check(self, key: str, arguments: Arguments) -> None:
        if not key.isdecimal() or not 0 < int(key) <= self.WEIGHT_MAX:
            raise ArgumentMismatch(f"The binding key must be a weight from 1 to {self.WEIGHT_MAX}, not {key!r}")

    @staticmethod
    def point(text: str) -> int:
        """A 64-bit hash; the ring uses the upper bits."""
        return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")

    def _add(self, binding: Binding) -> None:
        number = self._free_numbers.pop() if self._free_numbers else len(self._numbered)
        assert number <= self.NUMBER_MASK
        self._numbered[number] = binding
        name, upper = binding.destination.name, ~self.NUMBER_MASK
        points = range(int(binding.key) * self.POINTS_PER_WEIGHT)
        self._ring.fromlist([self.point(f"{name}/{point}") & upper | number for point in points])
        self._is_sorted = False

    def _remove(self, binding: Binding) -> None:
        number = next(number for number, bound in self._numbered.items() if bound is binding)
        del self._numbered[number]
        self._free_numbers.append(number)
        self._ring = array("Q", (entry for entry in self._ring if entry & self.NUMBER_MASK != number))

    def match(self, key: str, headers: Arguments | None) -> Iterable[Destination]:
        if not self._ring:
            return ()
        if self._header:
            key = str((headers or {}).get(str(self._header), ""))
        if not self._is_sorted:
            self._ring = array("Q", sorted(self._ring))
            self._is_sorted = True
        at = bisect_left(self._ring, self.point(key) & ~self.NUMBER_MASK) % len(self._ring)
        return (self._numbered[self._ring[at] & self.NUMBER_MASK].destination,)

    def match_all(
        self, keys: Sequence[str], headers: Arguments | None, message: Message | None
    ) -> Iterable[Destination]:
        if self._property:
            return self.match(message.hashable(str(self._property)) if message is not None else "", headers)
        return self.match(keys[0], headers) if keys else ()  # a message has one place on the ring


KINDS: dict[str, type[Exchange]] = {
    exchange.kind: exchange for exchange in (Direct, Fanout, Topic, Headers, ConsistentHash)
}
DELAYED = "x-delayed-message"  # any of the others, with a delay before it
KIND_NAMES = (*KINDS, DELAYED)


def is_kind(kind: str) -> bool:
    return kind in KIND_NAMES


def check_exchange_arguments(kind: str, arguments: Arguments) -> None:
    """The checks of the exchange's type; of a delayed exchange, those of the type behind the delay."""
    for name in (kind, arguments.get("x-delayed-type")):
        found = KINDS.get(name) if isinstance(name, str) else None
        if found is not None:
            found.check_arguments(arguments)


def make_exchange(name: str, kind: str, **options: Any) -> Exchange:
    """An exchange of a type. The type behind the delay of x-delayed-message is its argument x-delayed-type."""
    if kind == DELAYED:
        inner = (options.get("arguments") or {}).get("x-delayed-type")
        if not isinstance(inner, str) or inner not in KINDS:
            raise ArgumentMismatch("Invalid argument, 'x-delayed-type' must be an existing exchange type")
        return _delayed(KINDS[inner])(name, **options)
    return KINDS[kind](name, **options)


_DELAYED: dict[type[Exchange], type[Exchange]] = {}


def _delayed(inner: type[Exchange]) -> type[Exchange]:
    if inner not in _DELAYED:
        members = {"declared_kind": property(lambda self: DELAYED), "delayed": True}
        _DELAYED[inner] = type(f"Delayed{inner.__name__}", (inner,), members)
    return _DELAYED[inner]
