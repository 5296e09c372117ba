from collections.abc import Sequence

from typing_extensions import Buffer

from headrace.wire.amqp.tags import TagRing

class Encoded:
    """The result of one call of DeliveryEncoder.encode."""

    @property
    def frames(self) -> bytes: ...
    @property
    def next_offset(self) -> int:
        """The first offset that is neither delivered nor in a gap."""
    @property
    def count(self) -> int: ...
    @property
    def body_bytes(self) -> int: ...
    @property
    def redelivered(self) -> int:
        """How many of `count` have the redelivered flag."""
    @property
    def needs_message(self) -> bool:
        """Whether the record at next_offset must be delivered as a message, by Python."""
    @property
    def gaps(self) -> Sequence[tuple[int, int]]:
        """Ranges below next_offset without a record: control batches, and records that compaction removed."""

class DeliveryEncoder:
    def __init__(
        self,
        ring: TagRing,
        channel: int,
        consumer_tag: bytes,
        *,
        no_ack: bool,
        frame_max: int,
        bytes_max: int,
    ) -> None: ...
    def encode(
        self,
        data: Buffer,
        start: int,
        end: int,
        source: int,
        count_max: int,
        redelivered_below: int,
        expired_until: int,
    ) -> Encoded: ...
