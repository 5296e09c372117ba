"""How many standbys must have a change on their disks before anybody is told of it (`standby_confirms`).

Asked wherever the owner thread hears that the disk is done. What is waited for is the last change there is by then: a
standby that has made it has made all those before it, and synced what was synced here.
"""

import threading
from collections import deque
from collections.abc import Callable

from headrace.log.standby.change_feed import Changes

Callback = Callable[[], object]


class StandbyAcks:
    """For the owner thread, but for `wait`."""

    def __init__(self, changes: Changes, wanted: int) -> None:
        self._changes = changes
        self.wanted = wanted
        self.confirmed = changes.sequence  # as many standbys as are wanted have everything up to here
        self._waiting: deque[tuple[int, Callback]] = deque()
        self._news = threading.Condition()
        self._threads = 0  # that wait
        self._is_over = False

    @property
    def in_step(self) -> int:
        return sum(feed.is_in_step for feed in self._changes.feeds)

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting) or self._threads > 0

    def then(self, callback: Callback) -> None:
        """At once, or when the standbys have what was done by now; in the order of the calls."""
        position = self._changes.sequence
        if position <= self.confirmed or self._is_over:
            callback()
        else:
            self._waiting.append((position, callback))

    def wait(self) -> None:
        """The same for another thread, which stops until then."""
        position = self._changes.sequence
        with self._news:
            self._threads += 1
            self._news.wait_for(lambda: position <= self.confirmed or self._is_over)
            self._threads -= 1

    def count(self) -> None:
        """A standby has said something, came or went."""
        confirmed = sorted((feed.confirmed for feed in self._changes.feeds if feed.is_in_step), reverse=True)
        if len(confirmed) >= self.wanted:
            self._reached(max(self.confirmed, confirmed[self.wanted - 1]))

    def end(self) -> None:
        """Wait for nobody any more: the broker stops, and nobody is left to be told."""
        self._is_over = True
        self._reached(self._changes.sequence)

    def _reached(self, position: int) -> None:
        with self._news:
            self.confirmed = position
            self._news.notify_all()
        raised: BaseException | None = None
        while self._waiting and (self._is_over or self._waiting[0][0] <= self.confirmed):
            try:
                self._waiting.popleft()[1]()
            except Exception as bug:  # noqa: BLE001 - it holds up nobody else, and is raised after that
                raised = raised or bug
        if raised is not None:
            raise raised
