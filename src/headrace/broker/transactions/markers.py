"""Markers: the control batches that end a transaction in a log, and those that damaged logs still need."""

import logging
from collections.abc import Iterable

from headrace.broker.transactions.transaction import OwedMarker, Transaction
from headrace.log.shard import Shard
from headrace.record import codec
from headrace.record.layout import CONTROL_ABORT, CONTROL_COMMIT

logger = logging.getLogger("headrace.broker")


def control_batch(producer_id: int, epoch: int, *, commit: bool, now_ms: int) -> bytearray:
    kind = CONTROL_COMMIT if commit else CONTROL_ABORT
    key = b"\0\0" + kind.to_bytes(2, "big")
    value = b"\0\0" + bytes(4)  # version, coordinator epoch: always 0
    return codec.build(
        [(key, value, (), now_ms)],
        timestamp_ms=now_ms,
        producer_id=producer_id,
        producer_epoch=epoch,
        transactional=True,
        control=True,
    )


def is_due(shard: Shard, marker: OwedMarker) -> bool:
    """Whether the log is intact again, which only a start can find out."""
    log = shard.logs.get(marker.log_id)
    return log is not None and log.damage is None


def log_owed(one: Transaction, owed: Iterable[OwedMarker]) -> None:
    for marker in owed:
        logger.error(
            "%s-%d is damaged and lacks the marker of a transaction of %r that was %s: readers of committed messages "
            "stop before it until the log is restored or the topic is deleted",
            marker.topic,
            marker.partition,
            one.transactional_id,
            "committed" if marker.commit else "aborted",
        )
