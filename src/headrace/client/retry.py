"""When to retry a request; shared by the blocking and the asyncio client.

A retry is safe if the request had no effect (it was not sent, or the broker refused it with a Retry-After) or if its
effect does not matter (reads). A publish whose response was lost is never sent again: the messages may be stored, and
sending them again would duplicate them.
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
    """The state of a request that got no response."""

    NOT_SENT = auto()  # no connection, or it was closed before the first byte was sent
    LOST = auto()  # sent, in part or completely; the connection ended before the response did


def may_repeat(method: str, fate: Fate) -> bool:
    return fate is Fate.NOT_SENT or method in IDEMPOTENT


def backoff_s(attempt: int, chance: float | None = None) -> float:
    """Exponential backoff with jitter, so that a thousand clients do not retry at the same moment."""
    full = min(DELAY_S_MAX, DELAY_S_MIN * 2.0 ** min(attempt, 16))
    return float(full * (0.5 + (random.random() if chance is None else chance) / 2))


def retry_after_s(response: Response) -> float | None:
    """The Retry-After of a 429 or 503 in seconds; None for every other response.

    A 503 without Retry-After can mean a failed disk: it is unknown whether the messages were stored.
    """
    if response.status not in {429, 503}:
        return None
    try:
        seconds = float(response.headers["retry-after"])
    except (KeyError, ValueError):
        return None
    return min(max(seconds, 0.0), RETRY_AFTER_S_MAX)


Outcome = Response | tuple[Fate, str]  # a response, or the state of the request and the reason


class Attempts:
    """One request from its first attempt to its last: decides when to retry and when to give up."""

    def __init__(self, endpoint: Endpoint, method: str, retry_s: float) -> None:
        self._endpoint = endpoint
        self._method = method
        self._retry_s = retry_s
        self._deadline: float | None = None
        self._tried = 0

    def delay_s(self, outcome: Outcome) -> float | None:
        """Seconds until the next attempt; None if the outcome is final."""
        self._tried += 1
        if self._deadline is None:  # counted from the first failure: a long poll may have waited longer than retry_s
            self._deadline = time.monotonic() + self._retry_s
        if isinstance(outcome, Response):
            wanted_s = retry_after_s(outcome)
            return None if wanted_s is None or time.monotonic() + wanted_s > self._deadline else wanted_s
        fate, reason = outcome
        if not may_repeat(self._method, fate):
            raise Unconfirmed(f"{self._endpoint} did not respond ({reason}): the messages may or may not be stored")
        wanted_s = backoff_s(self._tried - 1)
        if time.monotonic() + wanted_s > self._deadline:
            raise BrokerUnreachable(f"no broker answers at {self._endpoint}: {reason}")
        return wanted_s
