"""What waits to be sent. No timer decides when a batch is full: while one request is under way the next one
gathers, so a quiet producer sends at once and a busy one sends large batches."""

from collections import deque
from typing import Generic, TypeVar

F = TypeVar("F")

BATCH_BYTES_MAX = 1 << 20
BATCH_MESSAGES_MAX = 10_000


class Outbox(Generic[F]):
    """Lines of NDJSON in the order they were sent, each with the future its sender holds."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._waiting: deque[tuple[bytes, F]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def has_room(self, line: bytes) -> bool:
        """An empty outbox has room for anything: the broker judges what is too large."""
        return not self._waiting or self.bytes + len(line) <= self.bytes_max

    def put(self, line: bytes, future: F) -> None:
        self._waiting.append((line, future))
        self.bytes += len(line)

    def take(self) -> list[tuple[bytes, F]]:
        """The next batch, oldest first."""
        batch: list[tuple[bytes, F]] = []
        size = 0
        while self._waiting and len(batch) < BATCH_MESSAGES_MAX:
            line = self._waiting[0][0]
            if batch and size + len(line) > BATCH_BYTES_MAX:
                break
            size += len(line)
            batch.append(self._waiting.popleft())
        self.bytes -= size
        return batch


def halves(batch: list[tuple[bytes, F]]) -> tuple[list[tuple[bytes, F]], list[tuple[bytes, F]]]:
    """A batch the broker refused whole, in two: so that only the message at fault fails in the end."""
    middle = len(batch) // 2
    return batch[:middle], batch[middle:]
