"""x-stream-filter: a consumer of a stream receives only the messages with one of its filter values.

A publisher sets the value in the header x-stream-filter-value. RabbitMQ's filter works on chunks of messages and lets
others through; this one decides per message, so a client that filters again finds nothing to drop.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.broker.types.message import Message, to_text

VALUE_HEADER = "x-stream-filter-value"


@dataclass(frozen=True, slots=True)
class StreamFilter:
    values: frozenset[str]
    matches_unfiltered: bool  # x-stream-match-unfiltered: messages without a value, too

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "StreamFilter | None":
        """The filter in the arguments of basic.consume. Like RabbitMQ, ignores values that are not text."""
        wanted = arguments.get("x-stream-filter")
        listed = wanted if isinstance(wanted, list) else [wanted]
        values = frozenset(_text(value) for value in listed if isinstance(value, str | bytes))
        return cls(values, arguments.get("x-stream-match-unfiltered") is True) if values else None

    def matches(self, message: Message) -> bool:
        value = message.headers().get(VALUE_HEADER)
        if not isinstance(value, str | bytes):
            return self.matches_unfiltered
        return _text(value) in self.values


def _text(value: str | bytes) -> str:
    return to_text(value) if isinstance(value, bytes) else value
