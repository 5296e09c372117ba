"""Connections that have not said who they are: one address leaves some places of a listener to others.

The same rule wherever strangers wait: in a handshake of TLS, before a login, and at the HTTP listener, where every
request
says it anew. It is about strangers only, since an address may be that of many, behind a proxy or a NAT: who has logged
in is not counted any more.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

SOURCE_PART = 0.75  # of what there is for all

T = TypeVar("T")


class PerSourceLimit(Generic[T]):
    """`places` is how many there are for strangers, taken or not."""

    def __init__(self, places: Callable[[], int]) -> None:
        self._places = places
        self._of: dict[str, dict[T, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, source: str, one: T) -> T | None:
        """Returns the one of this source that came first, if they are too many now. Where that one goes, an address
        that sends nothing but silence keeps out neither others nor its own: whoever comes gets a moment to speak."""
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
