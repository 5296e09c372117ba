"""Permissions of a user in a vhost, as in RabbitMQ: three patterns for names of queues and exchanges, and two for the
routing keys of each topic exchange that has a rule."""

from collections.abc import Mapping

import msgspec

from headrace.broker.access.regex import Pattern, compile_pattern, escape
from headrace.errors import InvalidInput, InvalidPattern

DEFAULT_EXCHANGE = "amq.default"  # how permissions name the default exchange, whose name is empty
NOTHING = "^$"  # matches no name, since names are not empty
PATTERN_CHARACTERS_MAX = 8192  # lists of names are long; RE2's time is linear in their length


class Permission(msgspec.Struct, frozen=True, kw_only=True):
    configure: str
    write: str
    read: str


class TopicPermission(msgspec.Struct, frozen=True, kw_only=True):
    write: str
    read: str


EVERYTHING = Permission(configure=".*", write=".*", read=".*")


def check_patterns(permission: Permission | TopicPermission) -> None:
    for kind, text in msgspec.structs.asdict(permission).items():
        if len(text) > PATTERN_CHARACTERS_MAX:
            raise InvalidInput(f"the {kind} pattern has more than {PATTERN_CHARACTERS_MAX:,} characters")
        try:
            compile_pattern(text)
        except InvalidPattern as error:
            raise InvalidPattern(f"not a {kind} pattern: {error}") from None


class Rights:
    """The permissions of one user in one vhost. A caller that keeps them must compare Users.version."""

    __slots__ = ("_configure", "_read", "_topics", "_write", "may_write_something")

    def __init__(self, user: str, vhost: str, permission: Permission, topics: Mapping[str, TopicPermission]) -> None:
        self._configure = _searched(permission.configure)
        self._write = _searched(permission.write)
        self._read = _searched(permission.read)
        self.may_write_something = permission.write not in ("", NOTHING)
        self._topics = {
            exchange: (_filled_in(rule.write, user, vhost), _filled_in(rule.read, user, vhost))
            for exchange, rule in topics.items()
        }

    # Names of queues and exchanges; "" is the default exchange, since no queue has an empty name.

    def may_configure(self, name: str) -> bool:
        return self._configure.search(name or DEFAULT_EXCHANGE)

    def may_write(self, name: str) -> bool:
        return self._write.search(name or DEFAULT_EXCHANGE)

    def may_read(self, name: str) -> bool:
        return self._read.search(name or DEFAULT_EXCHANGE)

    # Routing keys of a topic exchange; all of them if the exchange has no rule.

    def has_topic_rule(self, exchange: str) -> bool:
        return exchange in self._topics

    def may_write_topic(self, exchange: str, routing_key: str) -> bool:
        rule = self._topics.get(exchange)
        return rule is None or rule[0].search(routing_key)

    def may_read_topic(self, exchange: str, routing_key: str) -> bool:
        rule = self._topics.get(exchange)
        return rule is None or rule[1].search(routing_key)


def _searched(text: str) -> Pattern:
    return compile_pattern(text or NOTHING)  # as in RabbitMQ, an empty pattern matches only the empty name


def _filled_in(text: str, user: str, vhost: str) -> Pattern:
    """Replace {username} and {vhost}, escaped: a name is not a pattern."""
    return _searched(text.replace("{username}", escape(user)).replace("{vhost}", escape(vhost)))
