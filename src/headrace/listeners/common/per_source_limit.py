"""Limits the unauthenticated connections of one source, so that other sources can still connect.

Used during TLS handshakes, before logins, and at the HTTP listener, where every request authenticates anew. Connections
are no longer counted once they have logged in, because many clients may share an address behind a proxy or NAT.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

SOURCE_PART = 0.75  # of all places

T = TypeVar("T")


class PerSourceLimit(Generic[T]):
    """`places` returns the number of places for unauthenticated connections, both free and taken."""

    def __init__(self, places: Callable[[], int]) -> None:
        self._places = places
        self._of: dict[str, dict[T, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, source: str, one: T) -> T | None:
        """Adds a connection. Returns the oldest one of the source if it has too many now: the caller closes it, so
        that silent connections block neither other sources nor newer connections of their own."""
        own = self._of.setdefault(source, {})
        own[one] = None
        self._count += 1
        return next(iter(own)) if len(own) > max(1, self._places() * SOURCE_PART) else None

    def leave(self, source: str, one: T) -> None:
        own = self._of.get(source)
        if own is not None and one in own:
            del own[one]
            self._count -= 1
            if not own:
                del self._of[source]
