"""A keep-alive connection to a broker's HTTP listener, for asyncio."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.client.connection import CONNECT_S_MAX, IDLE_S_MAX, RECEIVE_BYTES, reason_of
from headrace.client.exchange import Endpoint, Response, ResponseReader, request_bytes
from headrace.client.retry import Attempts, Fate, Outcome

if TYPE_CHECKING:
    import ssl


class AsyncConnection:
    """One request at a time; a second one waits for the first. Otherwise as Connection."""

    def __init__(self, endpoint: Endpoint, *, timeout_s: float = 30.0, retry_s: float = 10.0) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._idle_since = 0.0
        self._turn = asyncio.Lock()
        self._tls: ssl.SSLContext | None = None

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int | None] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        wait_s: float = 0.0,
    ) -> Response:
        data = request_bytes(self.endpoint, method, path, query=query, headers=headers, body=body)
        attempts = Attempts(self.endpoint, method, self._retry_s)
        while True:
            async with self._turn:
                outcome = await self._attempt(data, self._timeout_s + wait_s)
            if (delay_s := attempts.delay_s(outcome)) is None:
                assert isinstance(outcome, Response)
                return outcome
            await asyncio.sleep(delay_s)

    async def stream(
        self, path: str, *, query: Mapping[str, str | int | None] | None = None, headers: Mapping[str, str]
    ) -> "AsyncStream":
        """An answer that goes on, over a connection of its own."""
        request = request_bytes(self.endpoint, "GET", path, query=query, headers=headers)
        try:
            reader, writer = await self.connect()
        except OSError:
            return AsyncStream(None, None)
        writer.write(request)
        return AsyncStream(reader, writer)

    async def close(self) -> None:
        writer = self._writer
        self._drop()
        if writer is not None:
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _drop(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _attempt(self, data: bytes, timeout_s: float) -> Outcome:
        answer = ResponseReader(to_head=data.startswith(b"HEAD "))
        sent = done = False
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = self._usable() or await self.connect()
                self._reader, self._writer = reader, writer
                sent = True  # from here on nobody knows how much of it arrived
                # Not drained first: whoever is refused on the way is told why, and then hung up on.
                writer.write(data)
                while answer.response is None:
                    piece = await reader.read(RECEIVE_BYTES)
                    if not piece:
                        raise ConnectionResetError("the connection was closed")
                    answer.feed(piece)
            done = True
        except OSError as error:
            if self.endpoint.tls:
                from headrace.client.tls import refuse_if_final

                refuse_if_final(self.endpoint, error)
            return (Fate.LOST if sent else Fate.NOT_SENT), reason_of(error)
        finally:
            if done and answer.keep_alive:
                self._idle_since = time.monotonic()
            else:
                self._drop()  # also when cancelled half-way: what would come next belongs to nobody
        assert answer.response is not None
        return answer.response

    def _usable(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        reader, writer = self._reader, self._writer
        if reader is None or writer is None:
            return None
        fresh = time.monotonic() - self._idle_since < IDLE_S_MAX
        if fresh and not reader.at_eof() and not writer.is_closing():
            return reader, writer
        self._drop()
        return None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.endpoint.tls and self._tls is None:
            from headrace.client.tls import context_of

            self._tls = context_of(self.endpoint.trust)
        async with asyncio.timeout(min(CONNECT_S_MAX, self._timeout_s)):
            return await asyncio.open_connection(
                self.endpoint.host, self.endpoint.port, ssl=self._tls, limit=4 * RECEIVE_BYTES
            )


class AsyncStream:
    """As connection.Stream."""

    def __init__(self, reader: asyncio.StreamReader | None, writer: asyncio.StreamWriter | None) -> None:
        self._pieces: list[bytes] = []
        self._answer = ResponseReader(self._pieces.append)
        self._reader, self._writer = reader, writer

    @property
    def response(self) -> Response | None:
        return self._answer.response

    async def read(self, wait_s: float) -> bytes | None:
        if self._reader is None:
            return None
        try:
            async with asyncio.timeout(max(wait_s, 0.001)):
                data = await self._reader.read(RECEIVE_BYTES)
        except TimeoutError:
            return b""
        except OSError:
            data = b""
        if data:
            self._answer.feed(data)
        if not data or self._answer.response is not None:
            self.close()
        pieces = b"".join(self._pieces)
        self._pieces.clear()
        return pieces if data else None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None
