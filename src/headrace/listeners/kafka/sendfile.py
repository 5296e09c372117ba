"""Sends responses that contain file ranges from the page cache to the socket, bypassing the transport.

Only while the transport's own buffer is empty. The event loop does not let other code watch the transport's descriptor,
so FileSending watches a duplicate of it while the client does not read.
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

SENT_AT_ONCE = 4 << 20  # in one event-loop iteration, however fast this client reads
Piece = bytes | bytearray | memoryview | FileRange


def descriptor_of(transport: asyncio.BaseTransport) -> int:
    """The socket's descriptor if file ranges can be sent to it; -1 with TLS, which has to encrypt every byte."""
    if not hasattr(os, "sendfile") or transport.get_extra_info("ssl_object") is not None:
        return -1
    sock = transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())


class FileSending:
    """The unsent pieces of one connection. Calls `drained` when all are sent after a wait for the client or the disk,
    and `lost` when the rest cannot be sent."""

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
        self._sent = 0  # bytes of the first piece
        self._watched = -1  # the duplicate descriptor, while the client does not read
        self._is_loading = False
        self._is_closed = False
        self.unsent_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of pieces in memory; file ranges do not count."""
        return sum(len(piece) for piece in self._pieces if not isinstance(piece, FileRange))

    def send(self, pieces: Sequence[Piece]) -> None:
        if self._is_closed:
            return  # an earlier piece could not be sent: the connection is about to close
        self._pieces.extend(pieces)
        self.unsent_bytes += sum(map(len, pieces))
        if self._watched < 0 and not self._is_loading:
            self._send_more()

    def _send_more(self) -> None:
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
        except OSError as error:  # from sending, or from dup when no descriptors are left
            self._fail(error)

    def _send_some(self, piece: Piece, most: int) -> int:
        if isinstance(piece, FileRange):
            start = self._sent
            count = os.sendfile(self._descriptor, piece.file, piece.position + start, min(piece.size - start, most))
            if count == 0:
                raise OSError(f"the segment file is {piece.size - start:,} bytes too short")
            return count
        # MSG_MORE: a few bytes before a file range leave in one packet with its first bytes.
        return rawsend.send(self._descriptor, piece, self._sent, len(self._pieces) > 1)

    def _fail(self, error: BaseException) -> None:
        logger.info("cannot send a response: %s", error)
        self.close()
        self._lost()

    # Waiting for the client, or for the disk.

    def _watch(self, is_wanted: bool) -> None:
        if is_wanted and self._watched < 0:
            self._watched = os.dup(self._descriptor)
            self._loop.add_writer(self._watched, self._writable)
        elif not is_wanted and self._watched >= 0:
            self._loop.remove_writer(self._watched)
            os.close(self._watched)
            self._watched = -1

    def _writable(self) -> None:
        self._send_more()
        if not self._pieces and not self._is_closed:
            self._drained()

    def _load(self, first: FileRange) -> None:
        """Read the range in a worker thread: it has left the page cache since the fetch, because this client is slow,
        and the event loop must not wait for the disk."""
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
        # Send the bytes that were read and verified: the range may have left the page cache again.
        self._pieces[0], self._sent = loaded.result(), 0
        self._writable()

    # The end.

    def take_back(self) -> list[bytes]:
        """The unsent rest as bytes, for the transport to send."""
        rest = []
        for piece in self._pieces:
            data = piece.read(self._sent) if isinstance(piece, FileRange) else bytes(memoryview(piece)[self._sent :])
            rest.append(data)
            self._sent = 0
        self.close()
        return rest

    def close(self) -> None:
        """Must be called before the connection is closed: the duplicate descriptor would keep the socket open."""
        self._is_closed = True
        self._pieces.clear()
        self._sent = self.unsent_bytes = 0
        self._watch(False)
