"""A keep-alive connection to the broker's HTTP listener, for asyncio."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.client.connection import CONNECT_S_MAX, IDLE_S_MAX, RECEIVE_BYTES, reason_of
from headrace.client.conversation import Ask, Conversation, Follow, Get, Listen, Pause, Post, T
from headrace.client.exchange import Endpoint, Response, ResponseReader, request_bytes
from headrace.client.retry import Attempts, Fate, Outcome

if TYPE_CHECKING:
    import ssl


class AsyncConnection:
    """Like Connection, for asyncio. Requests run one at a time; others wait."""

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
        """A response without an end, over its own connection."""
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
                sent = True  # from here on, the broker may have received part or all of it
                # No drain(): a broker that refuses a request early responds and closes, and the response must be read.
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
                self._drop()  # also when cancelled: the rest of this response must not be read as the next one
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


async def run_async(connection: AsyncConnection, conversation: Conversation[T]) -> T:
    """Perform the requests of a conversation and return its result."""
    step: Callable[[], Ask] = partial(next, conversation)
    while True:
        try:
            ask = step()
        except StopIteration as done:
            result: T = done.value
            return result
        try:
            step = partial(conversation.send, await _perform(connection, ask))
        except Exception as error:  # noqa: BLE001 - the conversation decides what a failed request means
            step = partial(conversation.throw, error)


async def _perform(connection: AsyncConnection, ask: Ask) -> Any:
    match ask:
        case Get(path, query, wait_s):
            return await connection.request("GET", path, query=query, wait_s=wait_s)
        case Post(path, headers, body):
            return await connection.request("POST", path, headers=headers, body=body)
        case Follow(path, headers):
            return await connection.stream(path, headers=headers)
        case Listen(stream, wait_s):
            return await stream.read(wait_s)
        case Pause(wait_s):
            return await asyncio.sleep(wait_s)


class AsyncStream:
    """Like connection.Stream."""

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
