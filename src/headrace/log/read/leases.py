"""Leases: segments that somebody is reading, and that stay although their log is done with them.

Everybody who plans reads is a holder. What a holder asks for replaces what it had: a stream that plans its next batch
has read the one before, so retention waits for no more than the batch under way. A holder that dies is forgotten when
its time is over.
"""

from collections.abc import Mapping

from headrace.errors import LimitReached
from headrace.log.segments.segment import Segment

HOLDERS_MAX = 10_000
Key = tuple[int, int, int]  # log, base of the segment, generation


class Leases:
    def __init__(self) -> None:
        self._held: dict[str, tuple[int, dict[Key, Segment]]] = {}  # holder: until when, in ms, and what
        self._unnamed = 0

    def take(self, segments: Mapping[Key, Segment], until_ms: int, holder: str | None = None) -> str:
        """Who holds them: the holder given, or a new one that nobody else is. To hold nothing is to give back."""
        if holder is None:
            self._unnamed += 1
            holder = f"\0{self._unnamed}"
        if not segments:
            self.give_back(holder)
            return holder
        if holder not in self._held and len(self._held) >= HOLDERS_MAX:
            raise LimitReached(f"{HOLDERS_MAX:,} readers hold leases already")
        self._held[holder] = until_ms, dict(segments)
        return holder

    def give_back(self, holder: str) -> None:
        self._held.pop(holder, None)

    def segment(self, key: Key, now_ms: int) -> Segment | None:
        """A segment that somebody holds, whether or not it is still part of its log."""
        return next((held[key] for until, held in self._held.values() if until > now_ms and key in held), None)

    def held(self, now_ms: int) -> set[Key]:
        """What must stay; those whose time is over are forgotten."""
        self._held = {holder: lease for holder, lease in self._held.items() if lease[0] > now_ms}
        return {key for _, held in self._held.values() for key in held}
