"""Reading a topic, blocking: from anywhere, to the end or for ever, over one or two connections."""

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal

from headrace.client.connection import Connection
from headrace.client.exchange import DEFAULT_URL, parse_url
from headrace.client.positions import Start
from headrace.client.reading import ITERATION_WAIT_S, Ask, EagerTask, Follow, Get, Pause, Reading, T
from headrace.client.shapes import Message


class Consumer(Reading):
    """Reads one topic, all partitions or one. For one thread at a time.

    >>> with Consumer("orders", start="earliest") as consumer:
    ...     for message in consumer:      # for ever; until_end() stops where the topic ends now
    ...         print(message.offset, message.value)
    ...         save(consumer.positions)  # Consumer(start=positions) goes on from there

    Within a partition messages come in the order of their offsets, none twice. A lost connection is made
    again and reading goes on where it was, for up to `retry_s`. If the messages at a position are gone
    (retention), OffsetOutOfRange is raised, unless `on_lost` is "earliest".
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
        self._connection = Connection(parse_url(url), timeout_s=timeout_s, retry_s=retry_s)

    def poll(self, wait_s: float = 20.0) -> list[Message]:
        """The next messages; waits for them up to `wait_s`; an empty list when there are none."""
        messages, reached = self._run(self._take(wait_s))
        self.positions.update(reached)
        return messages

    def __iter__(self) -> Iterator[Message]:
        while True:
            yield from self._hand_out(*self._run(self._take(ITERATION_WAIT_S)))

    def until_end(self) -> Iterator[Message]:
        """What is there now, partition by partition, and then no more."""
        ends = self._run(self._ends())
        for partition in sorted(self.positions):
            while self.positions[partition] != ends[partition]:  # past it: the broker says what is wrong
                before = self.positions[partition]
                taken, is_last = self._run(self._up_to(partition, ends[partition]))
                yield from self._hand_out(*taken)
                if partition not in self.positions:
                    return
                if is_last or self.positions[partition] == before:
                    break

    def close(self) -> None:
        self._unfollow()
        self._connection.close()

    def __enter__(self) -> "Consumer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, steps: EagerTask[T]) -> T:
        try:
            wanted = next(steps)
            while True:
                wanted = steps.send(self._answer(wanted))
        except StopIteration as done:
            result: T = done.value
            return result

    def _answer(self, ask: Ask) -> Any:
        if isinstance(ask, Get):
            return self._connection.request("GET", ask.path, query=ask.query, wait_s=ask.wait_s)
        if isinstance(ask, Follow):
            return self._connection.stream(ask.path, headers=ask.headers)
        if isinstance(ask, Pause):
            return time.sleep(ask.wait_s)
        return ask.stream.read(ask.wait_s)
