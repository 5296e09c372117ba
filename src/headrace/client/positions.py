"""Positions of a consumer: pure functions, shared by the blocking and the asyncio consumer."""

from collections.abc import Mapping, Sequence
from typing import Literal

from headrace.client.shapes import Message, Range, parse_message
from headrace.errors import InvalidInput, NotFound, OffsetOutOfRange

Query = Mapping[str, str | int | None]
# "earliest", "latest", an offset, -N for the last N messages, or an offset for each partition.
Start = Literal["earliest", "latest"] | int | Mapping[int, int]


def chosen(topic: str, ranges: Sequence[Range], partition: int | None) -> list[Range]:
    if partition is None:
        return list(ranges)
    found = [r for r in ranges if r.partition == partition]
    if not found:
        raise NotFound(f"topic {topic!r} has no partition {partition}; it has {len(ranges)}")
    return found


def resolve(start: Start, ranges: Sequence[Range]) -> dict[int, int]:
    """The next offset to read, for every partition."""
    if start == "earliest":
        return {r.partition: r.start for r in ranges}
    if start == "latest":
        return {r.partition: r.end for r in ranges}
    if isinstance(start, Mapping):
        known = {r.partition for r in ranges}
        if not start.keys() <= known:
            raise InvalidInput(f"no partition {min(start.keys() - known)} to start from")
        return {r.partition: start.get(r.partition, r.start) for r in ranges}
    if not isinstance(start, int) or isinstance(start, bool):
        raise InvalidInput(f"start must be earliest, latest, an offset or a mapping, not {start!r}")
    if start < 0:
        return {r.partition: max(r.start, r.end + start) for r in ranges}
    return {r.partition: start for r in ranges}


def fetch_query(partition: int, offset: int, limits: Mapping[str, int], wait_s: float) -> Query:
    query: dict[str, str | int | None] = {"partition": partition, "offset": offset, **limits}
    if wait_s > 0:
        query["wait"] = f"{max(1, int(wait_s * 1000))}ms"
    return query


def skip_lost(error: OffsetOutOfRange, ranges: Sequence[Range], partition: int) -> int:
    """The current start of a partition. A position past the end is not data loss: the error is raised."""
    start = next(r.start for r in ranges if r.partition == partition)
    if start <= error.offset:
        raise error
    return start


def event_id(positions: Mapping[int, int]) -> str:
    """The positions as a Last-Event-ID: the broker continues from there."""
    return ",".join(f"{partition}:{offset}" for partition, offset in sorted(positions.items()))


def advance(positions: dict[int, int], messages: Sequence[Message]) -> None:
    for message in messages:
        positions[message.partition] = message.offset + 1


class EventReader:
    """Parses a text/event-stream incrementally and returns complete messages.

    It stops at any other event (a gap, an error): an ordinary read from that position reports the cause.
    """

    def __init__(self) -> None:
        self.has_notice = False
        self._rest = b""

    def messages(self, piece: bytes) -> list[Message]:
        blocks = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        self._rest = blocks.pop()
        messages: list[Message] = []
        for block in blocks:
            name, data = _event(block)
            if not data:
                continue  # a comment, sent as a heartbeat
            if name != b"message":
                self.has_notice = True
                break
            messages.append(parse_message(data))
        return messages


def _event(block: bytes) -> tuple[bytes, bytes]:
    name, data = b"message", b""
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        if field == b"event":
            name = value.strip()
        elif field == b"data":
            data += value.removeprefix(b" ")
    return name, data
