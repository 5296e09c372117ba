from collections.abc import Sequence

from typing_extensions import Buffer

from headrace.wire.amqp.tags import TagRing

WHOLE: int
FOREIGN: int

def encode_deliveries(
    data: Buffer,
    from_offset: int,
    to_offset: int,
    ring: TagRing,
    source: int,
    no_ack: bool,
    channel: int,
    consumer_tag: bytes,
    count_max: int,
    bytes_max: int,
    frame_max: int,
    redelivered_below: int,
    expired_until: int,
) -> tuple[bytes, int, int, int, Sequence[tuple[int, int]], int]: ...
