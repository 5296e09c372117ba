"""Leases on segments at the broker, for readers that cannot make hard links or cannot see the files at all.

One reader is one lease holder, and its next plan replaces the segments of the previous one, so that only the current
batch is protected. The broker drops the lease of a reader that has died when its time has passed.
"""

import logging
import secrets
from collections.abc import Iterable, Sequence

from headrace.errors import HeadraceError, SegmentGone
from headrace.record.types import Slice
from headrace.spark.access import Lease, LeasedSegment
from headrace.spark.broker import BrokerLink
from headrace.spark.offsets import Partition

logger = logging.getLogger("headrace.spark")

SLICES_PER_REQUEST_MAX = 10_000
RELEASE_RETRY_S = 1.0  # a stopping query need not wait for an absent broker: the lease expires by itself


class BrokerLeases:
    """The leases of one reader. A request is limited in size, so a large plan has several holder names (`parts`)."""

    def __init__(self, url: str) -> None:
        self._link = BrokerLink(url)
        self._release_link = BrokerLink(url, retry_s=RELEASE_RETRY_S)
        self._holder = f"spark-{secrets.token_hex(8)}"
        self._parts = 0
        self._plan = 0

    def lease_ranges(
        self, ranges: Sequence[tuple[Partition, int, int]], for_ms: int
    ) -> tuple[list[tuple[LeasedSegment, ...]], Lease]:
        """Leases the segments that contain each range. The broker looks them up and leases them in one step."""
        found = self._link.lease_ranges(ranges, for_ms, self._name(0))
        return [tuple(LeasedSegment(**entry) for entry in segments) for segments in found], self._replace_plan(1)

    def lease_segments(self, slices: Iterable[Slice], for_ms: int) -> Lease:
        """Raises SegmentGone if a segment was deleted or rewritten before the request: the caller must plan again."""
        wanted = sorted({(cut.log_id, cut.segment, cut.generation) for cut in slices})
        size = SLICES_PER_REQUEST_MAX
        parts = [wanted[at : at + size] for at in range(0, len(wanted), size)]
        gone = [one for number, part in enumerate(parts) for one in self._link.lease(part, for_ms, self._name(number))]
        lease = self._replace_plan(len(parts))
        if gone:
            raise SegmentGone(f"{len(gone)} segments were deleted during planning, the first is {gone[0]}")
        return lease

    def _name(self, part: int) -> str:
        return f"{self._holder}/{part}"

    def _replace_plan(self, parts: int) -> Lease:
        self._release_parts(range(parts, self._parts))
        self._parts, self._plan = parts, self._plan + 1
        return _BrokerLease(self, self._plan)

    def release(self, plan: int) -> None:
        """Has no effect if a later plan has already replaced this one."""
        if plan == self._plan:
            self._release_parts(range(self._parts))
            self._parts = 0

    def _release_parts(self, parts: Iterable[int]) -> None:
        try:
            for part in parts:
                self._release_link.lease((), 1, self._name(part))
        except HeadraceError as error:
            logger.warning("the lease of a finished batch could not be released and will expire later: %s", error)

    def close(self) -> None:
        self._link.close()
        self._release_link.close()


class _BrokerLease:
    def __init__(self, leases: BrokerLeases, plan: int) -> None:
        self._leases = leases
        self._plan = plan

    def release(self) -> None:
        self._leases.release(self._plan)
