"""The asyncio producer: one connection, and one task that sends."""

import asyncio
from types import TracebackType

from headrace.client.async_connection import AsyncConnection, run_async
from headrace.client.exchange import DEFAULT_URL, parse_url
from headrace.client.publishing import Pending, Publishing
from headrace.client.shapes import Data, Headers, Published, message_line
from headrace.errors import HeadraceError, LogClosed, Unconfirmed


class AsyncProducer:
    """Like Producer, for asyncio: belongs to one event loop; tasks may share it.

    >>> async with AsyncProducer("orders") as producer:
    ...     await producer.publish("first")                  # on disk when it returns
    ...     future = await producer.send("second", key="k")  # waits only for room
    ...     (await future).offset
    """

    def __init__(
        self,
        topic: str,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float = 30.0,
        retry_s: float = 10.0,
        buffer_bytes: int = 32 << 20,
    ) -> None:
        self.topic = topic
        self._connection = AsyncConnection(parse_url(url), timeout_s=timeout_s, retry_s=retry_s)
        self._state: Publishing[asyncio.Future[Published]] = Publishing(topic, buffer_bytes)
        self._room = asyncio.Condition()
        self._sender: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()  # set and replaced after every batch
        self._closed = False

    async def send(
        self,
        value: Data | None,
        *,
        key: Data | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> "asyncio.Future[Published]":
        """Return a future that resolves to the message's place once the message is on disk."""
        line = message_line(value, key=key, headers=headers, partition=partition, timestamp=timestamp)
        return await self._put(Pending(line, asyncio.Future(), is_awaited=False))

    async def publish(
        self,
        value: Data | None,
        *,
        key: Data | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> Published:
        """Return the message's place once the message is on disk."""
        line = message_line(value, key=key, headers=headers, partition=partition, timestamp=timestamp)
        return await (await self._put(Pending(line, asyncio.Future(), is_awaited=True)))

    async def flush(self) -> None:
        """Wait for every message sent so far; raise the first failure of a `send` since the last flush."""
        last = self._state.sent
        while self._state.settled < last:
            self._start()  # the end of asyncio.run cancels every task, including ours while a flush still waits
            await self._progress.wait()
        failure = self._state.take_failure()
        if failure is not None:
            raise failure

    async def close(self) -> None:
        """Accept no more messages, send the waiting ones, then close; raises like flush."""
        self._closed = True  # first: tasks that go on sending must not keep the producer open
        try:
            async with self._room:
                self._room.notify_all()
            await self.flush()
        finally:
            await self._connection.close()

    async def __aenter__(self) -> "AsyncProducer":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except HeadraceError:
            if error is None:  # otherwise the error of the `async with` block is the one to show
                raise

    async def _put(self, message: "Pending[asyncio.Future[Published]]") -> "asyncio.Future[Published]":
        outbox = self._state.outbox
        if not self._closed and not outbox.has_room(message.line):
            async with self._room:
                await self._room.wait_for(lambda: self._closed or outbox.has_room(message.line))
        if self._closed:
            raise LogClosed("the producer is closed")
        message.future.add_done_callback(_retrieve_exception)
        self._state.accept(message)
        self._start()
        return message.future

    def _start(self) -> None:
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._run(), name=f"producer {self.topic}")
            self._sender.add_done_callback(lambda _: self._notify_progress())

    def _notify_progress(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()

    async def _run(self) -> None:
        while taken := self._state.outbox.take():
            try:
                async with self._room:
                    self._room.notify_all()
                batch = [message for message in taken if not message.future.cancelled()]
                if batch:
                    await run_async(self._connection, self._state.deliver(batch))
            except asyncio.CancelledError:
                lost = [message for message in taken if not message.future.done()]
                self._state.fail(lost, Unconfirmed("cancelled while in flight: the message may or may not be stored"))
                raise
            finally:
                self._state.settled += len(taken)
                self._notify_progress()


def _retrieve_exception(future: "asyncio.Future[Published]") -> None:
    """Keep asyncio from logging a failure that was never awaited: flush raises it."""
    if not future.cancelled():
        future.exception()
