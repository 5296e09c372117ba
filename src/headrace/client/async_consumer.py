"""The asyncio consumer."""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Literal

from headrace.client.async_connection import AsyncConnection, run_async
from headrace.client.exchange import DEFAULT_URL, parse_url
from headrace.client.positions import Start
from headrace.client.reading import ITERATION_WAIT_S, Reading
from headrace.client.shapes import Message


class AsyncConsumer(Reading):
    """Like Consumer, for asyncio: belongs to one event loop and to one task at a time.

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
        """Return the next messages; wait up to `wait_s` for them. An empty list means that none arrived."""
        messages, reached = await run_async(self._connection, self._take(wait_s))
        self.positions.update(reached)
        return messages

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            for message in self._hand_out(*await run_async(self._connection, self._take(ITERATION_WAIT_S))):
                yield message

    async def until_end(self) -> AsyncIterator[Message]:
        """Iterate over the messages that exist now, partition by partition, then stop."""
        ends = await run_async(self._connection, self._ends())
        for partition in sorted(self.positions):
            while self.positions[partition] != ends[partition]:  # beyond it, the read itself fails
                before = self.positions[partition]
                taken, is_last = await run_async(self._connection, self._up_to(partition, ends[partition]))
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
