"""Output to stdout and stderr that never blocks or stops a long-running process.

The reader may be gone (closed pipe, closed terminal) or may have stopped reading: a write to its full pipe would block
for ever, and signal handlers of the process would not run. Output that cannot be written is dropped.
"""

import contextlib
import select
from io import UnsupportedOperation
from os import write
from typing import TextIO

PATIENCE_MS = 1000  # wait this long for a full pipe, but only for the first write that finds it full
CHUNK_BYTES = select.PIPE_BUF  # a pipe that polls as writable accepts this much without blocking


class NonBlockingOutput:
    """The part of a text stream that `logging` needs. `write` returns once the text is written or dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        try:
            self._file: int | None = stream.fileno()
        except UnsupportedOperation:  # an in-memory stream, as in tests
            self._file = None
        self._is_stuck = False

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            if self._file is None:
                self._stream.write(text)
            else:
                self._write(self._file, text.encode(self._stream.encoding, "backslashreplace"))

    def _write(self, file: int, data: bytes) -> None:
        while data:
            if not self._has_room(file):
                return
            data = data[write(file, data[:CHUNK_BYTES]) :]

    def _has_room(self, file: int) -> bool:
        poll = select.poll()
        poll.register(file, select.POLLOUT)
        self._is_stuck = not poll.poll(0 if self._is_stuck else PATIENCE_MS)
        return not self._is_stuck

    def flush(self) -> None:
        if self._file is None:
            self._stream.flush()
