"""Where a reader stands. Pure: shared by the blocking and the asyncio consumer."""

from collections.abc import Mapping, Sequence
from typing import Literal

from headrace.client.shapes import Message, Range, parse_message
from headrace.errors import InvalidInput, NotFound, OffsetOutOfRange

Query = Mapping[str, str | int | None]
# "earliest", "latest", an offset, minus N for the last N, or the offset of every partition to go on from.
Start = Literal["earliest", "latest"] | int | Mapping[int, int]


def chosen(topic: str, ranges: Sequence[Range], partition: int | None) -> list[Range]:
    if partition is None:
        return list(ranges)
    found = [r for r in ranges if r.partition == partition]
    if not found:
        raise NotFound(f"topic {topic!r} has no partition {partition}; it has {len(ranges)}")
    return found


def resolve(start: Start, ranges: Sequence[Range]) -> dict[int, int]:
    """The offset to read next, for every partition."""
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
        raise InvalidInput(f"start is earliest, latest, a number or a mapping, not {start!r}")
    if start < 0:
        return {r.partition: max(r.start, r.end + start) for r in ranges}
    return {r.partition: start for r in ranges}


def fetch_query(partition: int, offset: int, limits: Mapping[str, int], wait_s: float) -> Query:
    query: dict[str, str | int | None] = {"partition": partition, "offset": offset, **limits}
    if wait_s > 0:
        query["wait"] = f"{max(1, int(wait_s * 1000))}ms"
    return query


def skip_lost(error: OffsetOutOfRange, ranges: Sequence[Range], partition: int) -> int:
    """Where a partition begins now. A position past the end is no loss to skip: the error stands."""
    start = next(r.start for r in ranges if r.partition == partition)
    if start <= error.offset:
        raise error
    return start


def event_id(positions: Mapping[int, int]) -> str:
    """The positions as the id of a server-sent event: the broker goes on from there."""
    return ",".join(f"{partition}:{offset}" for partition, offset in sorted(positions.items()))


def advance(positions: dict[int, int], messages: Sequence[Message]) -> None:
    for message in messages:
        positions[message.partition] = message.offset + 1


class EventReader:
    """Takes pieces of a text/event-stream as they come, gives the messages that are whole.

    A notice (a gap, an error) ends it: a plain read from there says what it is about.
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
                continue  # a comment, so that the connection is known to live
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
