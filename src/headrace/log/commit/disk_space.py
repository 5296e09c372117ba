"""Watches the free space of the data folder's disk: refuses appends below `disk_reserve`, or while the next start would
need more after a crash, and lifts that later."""

import logging
from collections.abc import Callable

from headrace.errors import StorageFailed
from headrace.log.commit.context import CommitContext
from headrace.log.commit.recovery_space import RecoverySpace

logger = logging.getLogger("headrace.log")

MB = 1 << 20
IDLE_CHECK_S = 1.0  # between checks while the broker writes nothing: other processes write to the disk, too
ROOM_HOLDS_S = 5.0  # a disk that is full again within this time was full all along


class DiskSpace:
    def __init__(self, context: CommitContext, space: RecoverySpace, on_room: Callable[[], object]) -> None:
        self._root = context.root
        self._space = space
        self._disk = context.disk
        self._reserve = context.settings.disk_reserve
        self._counters = context.counters
        self._status = context.status
        self._on_room = on_room  # `disk_reserve` is free again
        self._checked: tuple[int, float] | None = None  # bytes written by then, and when
        self._full_since: float | None = None  # as logged
        self._full_until = 0.0
        self._refused_before = 0

    def measure(self) -> int | None:
        """Free bytes; None, and a failure of the shard, if the data folder cannot be reached."""
        try:
            free_bytes = self._disk.free_bytes(self._root)
        except OSError as error:  # bytes written there now would never be found again
            self._status.fail(StorageFailed(f"the data folder {self._root} is out of reach: {error.strerror}"))
            return None
        self._space.measured(free_bytes)
        return free_bytes

    def check(self, bytes_written: int, now: float) -> None:
        """Called from the tick. `bytes_written`: any number that changes when the broker writes."""
        if self._is_known(bytes_written, now):
            return
        self._checked = bytes_written, now
        free_bytes = self.measure()
        if free_bytes is None:
            return
        has_reserve = free_bytes >= self._reserve
        if not has_reserve or not self._space.has_room_for(0):
            self._status.is_full = True  # before the disk says so: checkpoints and deletions still need room
        self._log(now, free_bytes)
        if has_reserve and self._status.is_full:
            self._on_room()

    def _is_known(self, bytes_written: int, now: float) -> bool:
        """An idle broker need not ask twenty times a second."""
        if self._checked is None or self._status.is_full or self._full_since is not None:
            return False
        bytes_then, checked_at = self._checked
        return bytes_then == bytes_written and now < checked_at + IDLE_CHECK_S

    def _log(self, now: float, free_bytes: int) -> None:
        if self._status.is_full:
            self._full_until = now
            if self._full_since is None:
                self._full_since, self._refused_before = now, self._counters.refused_full
                text = "the disk is full: %s has %.1f MB free, %s %.1f MB; publishes are refused"
                why, kept_bytes = "disk_reserve is", self._reserve
                if free_bytes >= self._reserve:
                    why, kept_bytes = "the next start may need", self._space.needed
                logger.error(text, self._root, free_bytes / MB, why, kept_bytes / MB)
        elif self._full_since is not None and now - self._full_until >= ROOM_HOLDS_S:
            refused = self._counters.refused_full - self._refused_before
            text = "the disk has room again: %.1f MB are free; it was full for %.1f s, refused: %d"
            logger.warning(text, free_bytes / MB, self._full_until - self._full_since, refused)
            self._full_since = None
