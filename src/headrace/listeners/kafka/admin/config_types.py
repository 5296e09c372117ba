"""Kafka's numbers for configs in requests and responses, and the values that describe a config."""

from typing import NamedTuple

from headrace.errors import InvalidInput

TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32  # types of resources
SOURCE_TOPIC, SOURCE_NODE, SOURCE_CLUSTER, SOURCE_STATIC, SOURCE_DEFAULT, SOURCE_GROUP = 1, 2, 3, 4, 5, 8
SET, DELETE, APPEND, SUBTRACT = 0, 1, 2, 3
BOOLEAN, STRING, INT, SHORT, LONG, DOUBLE, LIST = 1, 2, 3, 4, 5, 6, 7


class InvalidConfig(InvalidInput):
    """A config that the resource does not have, or an invalid value."""


class NotAList(InvalidConfig):
    """APPEND or SUBTRACT for a config that is not a list."""

    def __init__(self, name: str, operation: int) -> None:
        word = {APPEND: "append", SUBTRACT: "subtract"}.get(operation, f"operation {operation}")
        super().__init__(f"Config value {word} is not allowed for config key: {name}")


class UnclearChange(InvalidInput):
    """The request is ambiguous or incomplete."""


class Value(NamedTuple):
    name: str
    value: str
    source: int


class Config(NamedTuple):
    name: str
    value: str
    source: int
    kind: int
    inherited: tuple[Value, ...] = ()  # the values that apply without this one, the first one first
    read_only: bool = False


def merged_list(present: str, named: str, operation: int) -> str:
    """A list after APPEND or SUBTRACT. Unknown words are kept, to be refused later."""
    have = [word.strip() for word in present.split(",") if word.strip()]
    words = [word.strip() for word in named.split(",") if word.strip()]
    kept = [*have, *words] if operation == APPEND else [word for word in have if word not in words]
    return ",".join(dict.fromkeys(kept))
