"""Positions of a stream of micro-batches: an offset per partition, with the id and the epoch of its log.

The log's id distinguishes a topic from one created later under the same name; the epoch distinguishes records from
those that replaced them after an unclean stop. Spark keeps positions as JSON in the checkpoint.
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
    for partition in sorted(positions):
        offset, log_id, epoch = positions[partition]
        found.setdefault(partition.topic, {})[str(partition.number)] = {"offset": offset, "log": log_id, "epoch": epoch}
    return found


def from_json(value: Mapping[str, Any]) -> Positions:
    try:
        return {
            Partition(topic, int(number)): Position(int(at["offset"]), int(at["log"]), int(at["epoch"]))
            for topic, partitions in value.items()
            for number, at in partitions.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidInput(f"not a valid offset of this source: {str(value)[:200]}") from None
