"""How much disk space a start after a crash would need, and whether the disk has it.

Recovery writes what it keeps before it deletes anything: the records since the last checkpoint, the journal entries
that may not be durable, the state (recovery.py). A disk that the broker filled itself must have room for that. So a
round is refused if it would leave less free space than the next start needs, and a checkpoint, which reduces the need,
runs earlier when space is short.

Used on the owner thread. The worker only calls `has_room_for`.
"""

import sys

from headrace.errors import DiskFull
from headrace.log.commit.file_ends import JournalEnd
from headrace.log.state.store import DiskStateStore

BLOCK_BYTES = 4096
FILES_PER_LOG = 2  # a new segment and a seal; each may fill a block that it needs only a part of
FILES = 16  # everything that a start writes besides


class RecoverySpace:
    def __init__(self, journal: JournalEnd, state: DiskStateStore) -> None:
        self._journal = journal
        self._state = state
        self._free_bytes = sys.maxsize  # as measured last, less what was written since
        self._records = 0  # bytes of records since the last checkpoint began
        self._journal_start = self._journal_next = journal.bytes_written  # at the last checkpoint, and at the next
        self._covered = 0  # bytes of records that the checkpoint under way makes durable
        self.logs = 0  # logs written to since the last checkpoint

    @property
    def needed(self) -> int:
        """Bytes that a start would write after a crash now."""
        return self._since_checkpoint + self._state_bytes

    @property
    def _since_checkpoint(self) -> int:
        """The part of them that a checkpoint makes unnecessary. State changes are written twice, as the state is."""
        entries = 2 * (self._journal.bytes_written - self._journal_start)
        return self._records + self._covered + entries + FILES_PER_LOG * BLOCK_BYTES * self.logs

    @property
    def _state_bytes(self) -> int:
        return 2 * self._state.file_bytes + FILES * BLOCK_BYTES

    @property
    def wants_checkpoint(self) -> bool:
        """Space is short, and a checkpoint would help."""
        since = self._since_checkpoint
        return self._free_bytes < 2 * (since + self._state_bytes) and since > self._state_bytes

    def measured(self, free_bytes: int) -> None:
        self._free_bytes = free_bytes

    def has_room_for(self, size: int) -> bool:
        """Whether a file may grow by `size`."""
        return self._free_bytes - size >= self.needed

    def admit(self, size: int) -> None:
        """Count a round of records that is about to be written, or refuse it. Its bytes take space in the segments, and
        again in what recovery writes: as a new segment, and as the copy of a journal entry."""
        if not self.has_room_for(3 * size):
            raise DiskFull(
                f"{self._free_bytes:,} bytes are free, and the next start needs {self.needed:,} after a crash"
            )
        self._free_bytes -= size
        self._records += size

    def checkpoint_began(self) -> None:
        self._covered += self._records
        self._records = 0
        self._journal_next = self._journal.bytes_written

    def checkpoint_ended(self) -> None:
        """Everything from before it began is durable where it belongs."""
        self._covered = 0
        self._journal_start = self._journal_next
