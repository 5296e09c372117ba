"""Reading a topic from asyncio."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Literal

from headrace.client.async_connection import AsyncConnection
from headrace.client.exchange import DEFAULT_URL, parse_url
from headrace.client.positions import Start
from headrace.client.reading import ITERATION_WAIT_S, Ask, EagerTask, Follow, Get, Pause, Reading, T
from headrace.client.shapes import Message


class AsyncConsumer(Reading):
    """As Consumer, for asyncio: belongs to one event loop and to one task at a time.

    >>> async with AsyncConsumer("orders", start="earliest") as consumer:
    ...     async for message in consumer:
    ...         print(message.offset, message.value)
    """

    def __init__(
        self,
        topic: str,
        url: str = DEFAULT_URL,
        *,
        partition: int | None = None,
        start: Start = "earliest",
        since_ms: int | None = None,
        on_lost: Literal["raise", "earliest"] = "raise",
        batch_messages: int = 1000,
        batch_bytes: int = 1 << 20,
        timeout_s: float = 30.0,
        retry_s: float = 60.0,
    ) -> None:
        limits = {"limit": batch_messages, "max_bytes": batch_bytes}
        super().__init__(topic, partition=partition, start=start, since_ms=since_ms, on_lost=on_lost, limits=limits)
        self._connection = AsyncConnection(parse_url(url), timeout_s=timeout_s, retry_s=retry_s)

    async def poll(self, wait_s: float = 20.0) -> list[Message]:
        """The next messages; waits for them up to `wait_s`; an empty list when there are none."""
        messages, reached = await self._run(self._take(wait_s))
        self.positions.update(reached)
        return messages

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            for message in self._hand_out(*await self._run(self._take(ITERATION_WAIT_S))):
                yield message

    async def until_end(self) -> AsyncIterator[Message]:
        """What is there now, partition by partition, and then no more."""
        ends = await self._run(self._ends())
        for partition in sorted(self.positions):
            while self.positions[partition] != ends[partition]:  # past it: the broker says what is wrong
                before = self.positions[partition]
                taken, is_last = await self._run(self._up_to(partition, ends[partition]))
                for message in self._hand_out(*taken):
                    yield message
                if partition not in self.positions:
                    return
                if is_last or self.positions[partition] == before:
                    break

    async def close(self) -> None:
        self._unfollow()
        await self._connection.close()

    async def __aenter__(self) -> "AsyncConsumer":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, steps: EagerTask[T]) -> T:
        try:
            wanted = next(steps)
            while True:
                wanted = steps.send(await self._answer(wanted))
        except StopIteration as done:
            result: T = done.value
            return result

    async def _answer(self, ask: Ask) -> Any:
        if isinstance(ask, Get):
            return await self._connection.request("GET", ask.path, query=ask.query, wait_s=ask.wait_s)
        if isinstance(ask, Follow):
            return await self._connection.stream(ask.path, headers=ask.headers)
        if isinstance(ask, Pause):
            return await asyncio.sleep(ask.wait_s)
        return await ask.stream.read(ask.wait_s)
