"""Answers with parts of files in them: from the page cache to the socket, past the transport, which knows only bytes.

Only while the transport has nothing to write itself. The event loop lets nobody else wait for the transport's
descriptor, so whoever has to wait until the client reads on does so with a copy of it.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from headrace.broker.streams.partition import FileRange
from headrace.listeners.kafka import rawsend

logger = logging.getLogger("headrace.kafka")

SENT_AT_ONCE = 4 << 20  # then others have their turn, however fast this client reads
Piece = bytes | bytearray | memoryview | FileRange


def descriptor_of(transport: asyncio.BaseTransport) -> int:
    """Of the socket that parts of files may be sent to; -1 where every byte has to be encrypted first."""
    if not hasattr(os, "sendfile") or transport.get_extra_info("ssl_object") is not None:
        return -1
    sock = transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())


class FileSending:
    """What is still to be sent on one connection. `drained` is called when that was waited for and is over, `lost` when
    the rest can not be sent."""

    def __init__(
        self,
        descriptor: int,
        loop: asyncio.AbstractEventLoop,
        drained: Callable[[], object],
        lost: Callable[[], object],
    ) -> None:
        self._descriptor = descriptor
        self._loop = loop
        self._drained = drained
        self._lost = lost
        self._pieces: deque[Piece] = deque()
        self._sent = 0  # of the first of them
        self._watched = -1  # the copy, while the client does not read on
        self._is_loading = False
        self._is_closed = False
        self.unsent_bytes = 0

    @property
    def held_bytes(self) -> int:
        """In memory; what is in files is not."""
        return sum(len(piece) for piece in self._pieces if not isinstance(piece, FileRange))

    def send(self, pieces: Sequence[Piece]) -> None:
        if self._is_closed:
            return  # something before it is missing: the connection is about to end
        self._pieces.extend(pieces)
        self.unsent_bytes += sum(map(len, pieces))
        if self._watched < 0 and not self._is_loading:
            self._go_on()

    def _go_on(self) -> None:
        room = SENT_AT_ONCE
        checked: Piece | None = None
        try:
            with suppress(BlockingIOError):
                while self._pieces and room > 0:
                    first = self._pieces[0]
                    if first is not checked and isinstance(first, FileRange) and not first.is_cached(self._sent):
                        self._load(first)
                        return
                    checked = first
                    count = self._send_some(first, room)
                    room -= count
                    self.unsent_bytes -= count
                    self._sent += count
                    if self._sent == len(first):
                        self._pieces.popleft()
                        self._sent = 0
            self._watch(bool(self._pieces))
        except OSError as error:  # there may be no descriptor left to wait with, too
            self._fail(error)

    def _send_some(self, piece: Piece, most: int) -> int:
        if isinstance(piece, FileRange):
            start = self._sent
            count = os.sendfile(self._descriptor, piece.file, piece.position + start, min(piece.size - start, most))
            if count == 0:
                raise OSError(f"the file ends {piece.size - start:,} bytes too early")
            return count
        # A few bytes before a part of a file leave with its first ones.
        return rawsend.send(self._descriptor, piece, self._sent, len(self._pieces) > 1)

    def _fail(self, error: BaseException) -> None:
        logger.info("an answer could not be sent: %s", error)
        self.close()
        self._lost()

    # Waiting: for the client, and for the disk.

    def _watch(self, is_wanted: bool) -> None:
        if is_wanted and self._watched < 0:
            self._watched = os.dup(self._descriptor)
            self._loop.add_writer(self._watched, self._writable)
        elif not is_wanted and self._watched >= 0:
            self._loop.remove_writer(self._watched)
            os.close(self._watched)
            self._watched = -1

    def _writable(self) -> None:
        self._go_on()
        if not self._pieces and not self._is_closed:
            self._drained()

    def _load(self, first: FileRange) -> None:
        """It was in memory when it was cut; this client has been slow, and nobody else shall wait for the disk."""
        self._watch(False)
        self._is_loading = True
        self._loop.run_in_executor(None, first.load, self._sent).add_done_callback(self._loaded)

    def _loaded(self, loaded: "asyncio.Future[bytes]") -> None:
        self._is_loading = False
        error = asyncio.CancelledError() if loaded.cancelled() else loaded.exception()
        if self._is_closed:
            return
        if error is not None:
            self._fail(error)
            return
        # The bytes themselves: in the file they may be gone again already, and these have been checked.
        self._pieces[0], self._sent = loaded.result(), 0
        self._writable()

    # The end.

    def take_back(self) -> list[bytes]:
        """What was not sent, as bytes, for whoever sends it instead."""
        rest = []
        for piece in self._pieces:
            data = piece.read(self._sent) if isinstance(piece, FileRange) else bytes(memoryview(piece)[self._sent :])
            rest.append(data)
            self._sent = 0
        self.close()
        return rest

    def close(self) -> None:
        """Before the connection counts as closed: a copy of its socket would keep it open."""
        self._is_closed = True
        self._pieces.clear()
        self._sent = self.unsent_bytes = 0
        self._watch(False)
