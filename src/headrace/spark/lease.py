"""Keeping what was planned at the broker: where files cannot be linked, or cannot be seen at all.

One reader is one holder, and what it plans next replaces what it held: no batch but the one under way is kept. A
reader that dies is forgotten by the broker when its time is over.
"""

import logging
import secrets
from collections.abc import Iterable, Sequence

from headrace.errors import HeadraceError, SegmentGone
from headrace.record.types import Slice
from headrace.spark.access import Held, Hold
from headrace.spark.broker import BrokerLink
from headrace.spark.offsets import Partition

logger = logging.getLogger("headrace.spark")

LEASED_AT_ONCE = 10_000  # slices that one request asks for
GIVE_BACK_RETRY_S = 1.0  # a broker that is not there forgets by itself: a query need not wait for it to stop


class BrokerLease:
    """What the broker holds for one reader."""

    def __init__(self, url: str) -> None:
        self._link = BrokerLink(url)
        self._last_word = BrokerLink(url, retry_s=GIVE_BACK_RETRY_S)
        self._holder = f"spark-{secrets.token_hex(8)}"
        self._parts = 0  # holders there are of us: what one request cannot ask for, several do
        self._plan = 0

    def hold_ranges(
        self, ranges: Sequence[tuple[Partition, int, int]], for_ms: int
    ) -> tuple[list[tuple[Held, ...]], Hold]:
        """The segments in which each range lies; held from the moment the broker looked."""
        found = self._link.lease_ranges(ranges, for_ms, self._name(0))
        return [tuple(Held(**entry) for entry in segments) for segments in found], self._held(1)

    def hold_segments(self, slices: Iterable[Slice], for_ms: int) -> Hold:
        """SegmentGone when one was removed or rewritten before the broker heard of it: plan again."""
        wanted = sorted({(piece.log_id, piece.segment, piece.generation) for piece in slices})
        parts = [wanted[at : at + LEASED_AT_ONCE] for at in range(0, len(wanted), LEASED_AT_ONCE)]
        gone = [one for number, part in enumerate(parts) for one in self._link.lease(part, for_ms, self._name(number))]
        hold = self._held(len(parts))
        if gone:
            raise SegmentGone(f"{len(gone)} segments went while they were planned, the first of them {gone[0]}")
        return hold

    def _name(self, part: int) -> str:
        return f"{self._holder}/{part}"

    def _held(self, parts: int) -> Hold:
        self._give_back(range(parts, self._parts))
        self._parts, self._plan = parts, self._plan + 1
        return _Lease(self, self._plan)

    def release(self, plan: int) -> None:
        """What a later plan has replaced is not held any more."""
        if plan == self._plan:
            self._give_back(range(self._parts))
            self._parts = 0

    def _give_back(self, parts: Iterable[int]) -> None:
        try:
            for part in parts:
                self._last_word.lease((), 1, self._name(part))
        except HeadraceError as error:
            logger.warning("the broker could not be told that a batch is done, and holds its files longer: %s", error)

    def close(self) -> None:
        self._link.close()
        self._last_word.close()


class _Lease:
    def __init__(self, lease: BrokerLease, plan: int) -> None:
        self._lease = lease
        self._plan = plan

    def release(self) -> None:
        self._lease.release(self._plan)
