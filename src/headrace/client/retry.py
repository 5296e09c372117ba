"""When to try again: the same answers for the blocking and the asyncio client.

Trying again is safe when nothing can have happened (nothing was sent, or the broker refused and said when to
come back) or when it does not matter (reading). Publishing whose answer got lost is never sent again by
itself: the messages may be stored, and a second time would be a duplicate.
"""

import random
import time
from enum import Enum, auto

from headrace.client.exchange import Endpoint, Response
from headrace.errors import BrokerUnreachable, Unconfirmed

IDEMPOTENT = frozenset({"GET", "HEAD", "PUT"})
DELAY_S_MIN, DELAY_S_MAX = 0.05, 2.0
RETRY_AFTER_S_MAX = 60.0


class Fate(Enum):
    """What became of a request that got no answer."""

    NOT_SENT = auto()  # no connection, or one that was closed before the first byte went out
    LOST = auto()  # sent, in part or whole; the connection ended before the answer did


def may_repeat(method: str, fate: Fate) -> bool:
    return fate is Fate.NOT_SENT or method in IDEMPOTENT


def backoff_s(attempt: int, chance: float | None = None) -> float:
    """Doubles per attempt, with chance mixed in, so that a thousand clients do not come back as one."""
    full = min(DELAY_S_MAX, DELAY_S_MIN * 2.0 ** min(attempt, 16))
    return float(full * (0.5 + (random.random() if chance is None else chance) / 2))


def retry_after_s(response: Response) -> float | None:
    """Seconds after which a refused request is welcome; None when it was not refused in that way.

    Without Retry-After a 503 can mean a failed disk, after which nobody knows what was kept.
    """
    if response.status not in {429, 503}:
        return None
    try:
        seconds = float(response.headers["retry-after"])
    except (KeyError, ValueError):
        return None
    return min(max(seconds, 0.0), RETRY_AFTER_S_MAX)


Outcome = Response | tuple[Fate, str]  # an answer, or what became of the request and why


class Attempts:
    """One request from its first try to its last: when to try again, and when to say that it failed."""

    def __init__(self, endpoint: Endpoint, method: str, retry_s: float) -> None:
        self._endpoint = endpoint
        self._method = method
        self._retry_s = retry_s
        self._deadline: float | None = None
        self._tried = 0

    def delay_s(self, outcome: Outcome) -> float | None:
        """How long to wait before the next try; None when the outcome is the answer."""
        self._tried += 1
        if self._deadline is None:  # counted from here: a read may have waited for longer before it was cut off
            self._deadline = time.monotonic() + self._retry_s
        if isinstance(outcome, Response):
            wanted_s = retry_after_s(outcome)
            return None if wanted_s is None or time.monotonic() + wanted_s > self._deadline else wanted_s
        fate, reason = outcome
        if not may_repeat(self._method, fate):
            raise Unconfirmed(f"{self._endpoint} did not answer ({reason}): what was sent may or may not be stored")
        wanted_s = backoff_s(self._tried - 1)
        if time.monotonic() + wanted_s > self._deadline:
            raise BrokerUnreachable(f"no broker answers at {self._endpoint}: {reason}")
        return wanted_s
