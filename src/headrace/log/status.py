"""Whether a shard accepts work: its phase, its first failure, and whether its disk is full.

One object is shared by the shard and the components of its commit path, so that none of them needs the shard itself.
Used on the owner thread only.
"""

from collections.abc import Callable
from enum import Enum, auto

from headrace.errors import DiskFull, StorageError, StorageFailed
from headrace.log.counters import Counters


class Phase(Enum):
    OPEN = auto()
    CLOSING = auto()  # nothing new is accepted; rounds and checkpoints under way are finished
    LAST_CHECKPOINT = auto()  # no round is left: the checkpoint that marks the stop as clean is being written
    CLOSED = auto()


class ShardStatus:
    __slots__ = (
        "_counters",
        "_disk_reserve",
        "_on_failure",
        "_on_idle",
        "_root",
        "failure",
        "is_full",
        "phase",
        "refuses",
    )

    def __init__(
        self,
        root: str,
        disk_reserve: int,
        counters: Counters,
        *,
        on_failure: Callable[[StorageError], object],
        on_idle: Callable[[], object],
    ) -> None:
        self._root = root
        self._disk_reserve = disk_reserve
        self._counters = counters
        self._on_failure = on_failure
        self._on_idle = on_idle
        self.phase = Phase.OPEN
        self.refuses = False  # new work, because the shard is stopping; derived from the phase
        self.failure: StorageError | None = None
        self.is_full = False  # appends are refused until there is room again

    def enter(self, phase: Phase) -> None:
        """CLOSED is final."""
        if self.phase is not Phase.CLOSED:
            self.phase = phase
            self.refuses = phase in (Phase.CLOSING, Phase.CLOSED)

    @property
    def is_closed(self) -> bool:
        return self.phase is Phase.CLOSED

    def fail(self, error: BaseException) -> None:
        """A write or sync failed: nothing is confirmed from here on. The next start finds out what is on the disk."""
        if self.failure is None:
            self.failure = (
                error if isinstance(error, StorageFailed) else StorageFailed(f"writing to {self._root} failed: {error}")
            )
            self.failure.__cause__ = error
        self._on_failure(self.failure)

    def refused_for_space(self) -> DiskFull:
        """Counts a refused append and returns the error for it."""
        self._counters.refused_full += 1
        return DiskFull(f"less than {self._disk_reserve:,} bytes are free at {self._root}")

    def report_idle(self) -> None:
        """A round or a checkpoint ended: a shard that is closing may go on."""
        self._on_idle()
