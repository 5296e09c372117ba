"""stdout and stderr of a process that goes on: nobody listening is no reason to stop, and no reason to wait.

A reader may be gone (a closed pipe, a closed terminal), or there and not read on: a write to its full pipe waits for
ever, and whoever waits there hears no signal. What cannot be said is left out.
"""

import contextlib
import select
from io import UnsupportedOperation
from os import write
from typing import TextIO

PATIENCE_MS = 1000  # with a reader that is behind; once, until there is room again
PIECE_BYTES = select.PIPE_BUF  # what a pipe that is writable takes without waiting


class NonBlockingOutput:
    """As much of a text stream as `logging` needs. What is written is gone, or left out, on return."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        try:
            self._file: int | None = stream.fileno()
        except UnsupportedOperation:  # no file, as in tests
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
            data = data[write(file, data[:PIECE_BYTES]) :]

    def _has_room(self, file: int) -> bool:
        poll = select.poll()
        poll.register(file, select.POLLOUT)
        self._is_stuck = not poll.poll(0 if self._is_stuck else PATIENCE_MS)
        return not self._is_stuck

    def flush(self) -> None:
        if self._file is None:
            self._stream.flush()
