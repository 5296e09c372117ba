"""Where a stream of micro-batches stands: an offset per partition, with the log and epoch it belongs to.

The log's id tells a topic from another one made later under the same name; the epoch tells records from those
that took their place after an unclean stop. Spark keeps the JSON of it in the checkpoint.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.errors import InvalidInput


class Partition(NamedTuple):
    topic: str
    number: int


class Position(NamedTuple):
    offset: int
    log_id: int
    epoch: int


Positions = dict[Partition, Position]


def to_json(positions: Mapping[Partition, Position]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place in sorted(positions):
        offset, log_id, epoch = positions[place]
        found.setdefault(place.topic, {})[str(place.number)] = {"offset": offset, "log": log_id, "epoch": epoch}
    return found


def from_json(value: Mapping[str, Any]) -> Positions:
    try:
        return {
            Partition(topic, int(number)): Position(int(at["offset"]), int(at["log"]), int(at["epoch"]))
            for topic, partitions in value.items()
            for number, at in partitions.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidInput(f"not an offset of this source: {str(value)[:200]}") from None
