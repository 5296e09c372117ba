"""The blocking consumer: reads a topic from any position, to its end or forever."""

from collections.abc import Iterator
from types import TracebackType
from typing import Literal

from headrace.client.connection import Connection, run
from headrace.client.exchange import DEFAULT_URL, parse_url
from headrace.client.positions import Start
from headrace.client.reading import ITERATION_WAIT_S, Reading
from headrace.client.shapes import Message


class Consumer(Reading):
    """Reads one topic, all partitions or one. For one thread at a time.

    >>> with Consumer("orders", start="earliest") as consumer:
    ...     for message in consumer:      # forever; until_end() stops at the topic's current end
    ...         print(message.offset, message.value)
    ...         save(consumer.positions)  # Consumer(start=positions) continues from there

    Within a partition, messages arrive in offset order, none twice. After a lost connection the consumer reconnects
    and continues at its position, for up to `retry_s`. If retention has deleted the messages at a position,
    OffsetOutOfRange is raised, unless `on_lost` is "earliest".
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
        """Return the next messages; wait up to `wait_s` for them. An empty list means that none arrived."""
        messages, reached = run(self._connection, self._take(wait_s))
        self.positions.update(reached)
        return messages

    def __iter__(self) -> Iterator[Message]:
        while True:
            yield from self._hand_out(*run(self._connection, self._take(ITERATION_WAIT_S)))

    def until_end(self) -> Iterator[Message]:
        """Iterate over the messages that exist now, partition by partition, then stop."""
        ends = run(self._connection, self._ends())
        for partition in sorted(self.positions):
            while self.positions[partition] != ends[partition]:  # beyond it, the read itself fails
                before = self.positions[partition]
                taken, is_last = run(self._connection, self._up_to(partition, ends[partition]))
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
