"""Waits until enough standbys have synced a change before it is confirmed (`standby_confirms`).

Used wherever the owner thread gets the result of disk work. It waits for the latest change at that time: a standby that
has applied it has applied all changes before it, and synced everything that was synced here.
"""

import threading
from collections import deque
from collections.abc import Callable

from headrace.log.standby.change_feed import Changes

Callback = Callable[[], object]


class StandbyAcks:
    """Used on the owner thread, except `wait`."""

    def __init__(self, changes: Changes, wanted: int) -> None:
        self._changes = changes
        self.wanted = wanted
        self.confirmed = changes.sequence  # enough standbys have everything up to this change
        self._waiting: deque[tuple[int, Callback]] = deque()
        self._confirmed_more = threading.Condition()
        self._threads = 0  # number of threads in `wait`
        self._has_ended = False

    @property
    def in_step(self) -> int:
        return sum(feed.is_in_step for feed in self._changes.feeds)

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting) or self._threads > 0

    def then(self, callback: Callback) -> None:
        """Call back once enough standbys have all changes made so far, perhaps at once; in the order of the calls."""
        position = self._changes.sequence
        if position <= self.confirmed or self._has_ended:
            callback()
        else:
            self._waiting.append((position, callback))

    def wait(self) -> None:
        """Like `then`, for another thread, which blocks until then."""
        position = self._changes.sequence
        with self._confirmed_more:
            self._threads += 1
            self._confirmed_more.wait_for(lambda: position <= self.confirmed or self._has_ended)
            self._threads -= 1

    def count(self) -> None:
        """Call this when a standby has confirmed something, connected or disconnected."""
        confirmed = sorted((feed.confirmed for feed in self._changes.feeds if feed.is_in_step), reverse=True)
        if len(confirmed) >= self.wanted:
            self._advance(max(self.confirmed, confirmed[self.wanted - 1]))

    def end(self) -> None:
        """Stop waiting for standbys: the broker stops, and no client is left to be confirmed to."""
        self._has_ended = True
        self._advance(self._changes.sequence)

    def _advance(self, position: int) -> None:
        with self._confirmed_more:
            self.confirmed = position
            self._confirmed_more.notify_all()
        raised: BaseException | None = None
        while self._waiting and (self._has_ended or self._waiting[0][0] <= self.confirmed):
            try:
                self._waiting.popleft()[1]()
            except Exception as bug:  # noqa: BLE001 - raised after all others were called
                raised = raised or bug
        if raised is not None:
            raise raised
