"""Publishing from asyncio, over one connection."""

import asyncio
from types import TracebackType

from headrace.client.async_connection import AsyncConnection
from headrace.client.exchange import DEFAULT_URL, parse_url, path_of
from headrace.client.outbox import Outbox, halves
from headrace.client.shapes import NDJSON, Data, Headers, Published, is_about_one, message_line, parse_published
from headrace.errors import HeadraceError, InvalidInput, LogClosed, NotFound, Unconfirmed

Waiting = tuple[bytes, "asyncio.Future[Published]"]


class Asked(asyncio.Future[Published]):
    """Of `publish`, which raises what became of it: flush need not say it again."""


class AsyncProducer:
    """As Producer, for asyncio: belongs to one event loop, and tasks may share it.

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
        self._path = path_of("topics", topic, "messages")
        self._outbox: Outbox[asyncio.Future[Published]] = Outbox(buffer_bytes)
        self._room = asyncio.Condition()
        self._pump: asyncio.Task[None] | None = None
        self._sent = self._settled = 0  # how many messages there were, and of how many it is known what became of them
        self._progress = asyncio.Event()  # set, and replaced, with every batch
        self._failure: HeadraceError | None = None
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
        """A future of where the message is stored; it resolves once the message is on disk."""
        line = message_line(value, key=key, headers=headers, partition=partition, timestamp=timestamp)
        return await self._put(line, asyncio.Future())

    async def _put(self, line: bytes, future: "asyncio.Future[Published]") -> "asyncio.Future[Published]":
        if not self._closed and not self._outbox.has_room(line):
            async with self._room:
                await self._room.wait_for(lambda: self._closed or self._outbox.has_room(line))
        if self._closed:
            raise LogClosed("the producer is closed")
        future.add_done_callback(_seen)
        self._outbox.put(line, future)
        self._sent += 1
        self._start()
        return future

    def _start(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run(), name=f"producer {self.topic}")
            self._pump.add_done_callback(lambda _: self._step())

    def _step(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()

    async def publish(
        self,
        value: Data | None,
        *,
        key: Data | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> Published:
        """Where the message is stored: it is on disk when this returns."""
        line = message_line(value, key=key, headers=headers, partition=partition, timestamp=timestamp)
        return await (await self._put(line, Asked()))

    async def flush(self) -> None:
        """Waits for what was sent until now; raises the first failure of a `send` since the last flush."""
        last = self._sent
        while self._settled < last:
            self._start()  # the end of asyncio.run cancels every task, also that of whoever still waits here
            await self._progress.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    async def close(self) -> None:
        """Takes no more, sends what is waiting, then closes; raises as flush does."""
        self._closed = True  # first: whoever goes on sending must not keep it from ending
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
            if error is None:  # otherwise the first mistake is the one to show
                raise

    async def _run(self) -> None:
        while taken := self._outbox.take():
            try:
                async with self._room:
                    self._room.notify_all()
                batch = [waiting for waiting in taken if not waiting[1].cancelled()]
                if batch:
                    await self._deliver(batch)
            except asyncio.CancelledError:
                lost = [waiting for waiting in taken if not waiting[1].done()]
                self._fail(lost, Unconfirmed("cancelled while it was sent: it may or may not be stored"))
                raise
            finally:
                self._settled += len(taken)
                self._step()

    async def _deliver(self, batch: list[Waiting]) -> None:
        try:
            response = await self._connection.request(
                "POST",
                self._path,
                headers={"Content-Type": NDJSON},
                body=b"".join([line for line, _ in batch]),
            )
            stored = parse_published(response, len(batch))
        except (InvalidInput, NotFound) as error:
            if len(batch) == 1 or not is_about_one(error):
                self._fail(batch, error)
                return
            for half in halves(batch):
                await self._deliver(half)
            return
        except Exception as bug:  # noqa: BLE001 - a bug of ours, too, is told: nobody may wait for ever
            told = bug if isinstance(bug, HeadraceError) else Unconfirmed(f"what became of it is not known: {bug!r}")
            self._fail(batch, told)
            return
        for (_, future), published in zip(batch, stored, strict=True):
            if not future.done():  # cancelled meanwhile: stored all the same
                future.set_result(published)

    def _fail(self, batch: list[Waiting], error: HeadraceError) -> None:
        if not all(isinstance(future, Asked) for _, future in batch):
            self._failure = self._failure or error
        for _, future in batch:
            if not future.done():
                future.set_exception(error)


def _seen(future: "asyncio.Future[Published]") -> None:
    """A failure nobody awaits is raised by flush; asyncio need not complain about it, too."""
    if not future.cancelled():
        future.exception()
