"""Leases: segments whose files stay, although they have left their log, because a reader still needs them.

Every planner of reads is a holder. A holder's new lease replaces its previous one: a stream that plans its next batch
has read the one before, so only the batch in progress delays the removal of files. The lease of a holder that died
expires. All times are those of the monotonic clock: leases are kept in memory only.
"""

from collections.abc import Mapping

from headrace.errors import LimitReached
from headrace.log.segments.segment import Segment

HOLDERS_MAX = 10_000
Key = tuple[int, int, int]  # log, base of the segment, generation


class Leases:
    def __init__(self) -> None:
        self._held: dict[str, tuple[float, dict[Key, Segment]]] = {}  # holder -> (expiry, segments)
        self._unnamed = 0

    def take(self, segments: Mapping[Key, Segment], until_s: float, holder: str | None = None) -> str:
        """Lease segments to a holder, a new one unless it is given; returns its name. No segments: the lease ends."""
        if holder is None:
            self._unnamed += 1
            holder = f"\0{self._unnamed}"
        if not segments:
            self.give_back(holder)
            return holder
        if holder not in self._held and len(self._held) >= HOLDERS_MAX:
            raise LimitReached(f"{HOLDERS_MAX:,} readers hold leases already")
        self._held[holder] = until_s, dict(segments)
        return holder

    def give_back(self, holder: str) -> None:
        self._held.pop(holder, None)

    def segment(self, key: Key, now_s: float) -> Segment | None:
        """A leased segment, even if it is no longer part of its log."""
        return next((held[key] for until, held in self._held.values() if until > now_s and key in held), None)

    def held(self, now_s: float) -> set[Key]:
        """The leased segments; expired leases are dropped."""
        self._held = {holder: lease for holder, lease in self._held.items() if lease[0] > now_s}
        return {key for _, held in self._held.values() for key in held}
