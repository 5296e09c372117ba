"""Server-sent events. The id of an event contains the next offset of every partition, such as `0:15,1:7`: a client
that reconnects with it as Last-Event-ID misses no message and sees none twice.
"""

import re
from collections.abc import Mapping

from headrace.errors import InvalidInput

POSITION = re.compile(r"(\d{1,10}):(\d{1,19})")
HEARTBEAT = b":\n\n"
END = b"\n\n"
PARTITIONS_MAX = 10_000


def event_id(positions: Mapping[int, int]) -> str:
    return ",".join(f"{partition}:{offset}" for partition, offset in positions.items())


def parse_event_id(text: str) -> dict[int, int]:
    positions: dict[int, int] = {}
    pieces = text.strip().split(",", PARTITIONS_MAX)
    for piece in pieces:
        match = POSITION.fullmatch(piece)
        if match is None or int(match[1]) in positions:
            raise InvalidInput("Last-Event-ID must be the id of an event of this stream, such as 0:15,1:7")
        positions[int(match[1])] = int(match[2])
    return positions


def begin(identity: str, name: str = "") -> bytes:
    """The start of an event. Its data, JSON without line breaks, and END follow."""
    kind = f"event: {name}\n" if name else ""
    return f"{kind}id: {identity}\ndata: ".encode()


def event(data: bytes, identity: str, name: str = "") -> bytes:
    """One event. The data is JSON without line breaks, which would end the event."""
    assert b"\n" not in data and b"\r" not in data
    return b"".join((begin(identity, name), data, END))
