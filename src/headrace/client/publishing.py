"""Publishing without I/O: the outbox, batching, and the outcome of every message.

No timer decides when a batch is full. While one request is in flight, the next batch collects, so an idle producer
sends at once and a busy one sends large batches.
"""

from collections import deque
from typing import Generic, NamedTuple, Protocol, TypeVar

from headrace.client.conversation import Conversation, Post
from headrace.client.exchange import path_of
from headrace.client.shapes import NDJSON, Published, is_about_one, parse_published
from headrace.errors import HeadraceError, InvalidInput, NotFound, Unconfirmed

BATCH_BYTES_MAX = 1 << 20
BATCH_MESSAGES_MAX = 10_000


class PublishFuture(Protocol):
    """The common part of concurrent.futures.Future and asyncio.Future."""

    def done(self) -> bool: ...
    def set_result(self, result: Published, /) -> None: ...
    def set_exception(self, exception: HeadraceError, /) -> None: ...


F = TypeVar("F", bound=PublishFuture)


class Pending(NamedTuple, Generic[F]):
    """One message on its way to the broker."""

    line: bytes  # of NDJSON
    future: F
    is_awaited: bool  # the caller waits for this future, so flush() need not report its failure again


class Outbox(Generic[F]):
    """Messages that wait to be sent, in the order of `send`."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._waiting: deque[Pending[F]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def has_room(self, line: bytes) -> bool:
        """An empty outbox has room for any message: the broker decides what is too large."""
        return not self._waiting or self.bytes + len(line) <= self.bytes_max

    def put(self, message: Pending[F]) -> None:
        self._waiting.append(message)
        self.bytes += len(message.line)

    def take(self) -> list[Pending[F]]:
        """The next batch, oldest first."""
        batch: list[Pending[F]] = []
        size = 0
        while self._waiting and len(batch) < BATCH_MESSAGES_MAX:
            line = self._waiting[0].line
            if batch and size + len(line) > BATCH_BYTES_MAX:
                break
            size += len(line)
            batch.append(self._waiting.popleft())
        self.bytes -= size
        return batch


class Publishing(Generic[F]):
    """The state that the blocking and the asyncio producer share.

    `sent` counts the messages accepted from the caller, `settled` those whose outcome is known. `failure` is the
    first failure that no caller has waited for; flush() raises it.
    """

    def __init__(self, topic: str, buffer_bytes: int) -> None:
        self.outbox: Outbox[F] = Outbox(buffer_bytes)
        self.sent = self.settled = 0
        self.failure: HeadraceError | None = None
        self._path = path_of("topics", topic, "messages")

    def accept(self, message: Pending[F]) -> None:
        self.outbox.put(message)
        self.sent += 1

    def take_failure(self) -> HeadraceError | None:
        failure, self.failure = self.failure, None
        return failure

    def deliver(self, batch: list[Pending[F]]) -> Conversation[None]:
        """Send a batch and resolve its futures. Never raises: every failure goes to the futures."""
        body = b"".join([message.line for message in batch])
        try:
            response = yield Post(self._path, {"Content-Type": NDJSON}, body)
            stored = parse_published(response, len(batch))
        except (InvalidInput, NotFound) as error:
            if len(batch) == 1 or not is_about_one(error):
                self.fail(batch, error)
                return
            # The broker refused the whole batch because of one message. Sending the halves again makes sure that
            # only this message fails.
            middle = len(batch) // 2
            yield from self.deliver(batch[:middle])
            yield from self.deliver(batch[middle:])
        except Exception as error:  # noqa: BLE001 - even a bug of ours must resolve the futures, or callers wait forever
            known = error if isinstance(error, HeadraceError) else Unconfirmed(f"the outcome is unknown: {error!r}")
            self.fail(batch, known)
        else:
            for message, published in zip(batch, stored, strict=True):
                if not message.future.done():  # cancelled in the meantime; the message is stored all the same
                    message.future.set_result(published)

    def fail(self, batch: list[Pending[F]], error: HeadraceError) -> None:
        if not all(message.is_awaited for message in batch):
            self.failure = self.failure or error
        for message in batch:
            if not message.future.done():
                message.future.set_exception(error)
