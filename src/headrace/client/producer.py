"""Publishing, blocking or with futures, over one connection and one thread of its own."""

import atexit
import threading
from concurrent.futures import Future
from types import TracebackType

from headrace.client import forks
from headrace.client.connection import Connection
from headrace.client.exchange import DEFAULT_URL, parse_url, path_of
from headrace.client.outbox import Outbox, halves
from headrace.client.shapes import NDJSON, Data, Headers, Published, is_about_one, message_line, parse_published
from headrace.errors import Conflict, HeadraceError, InvalidInput, LogClosed, NotFound, Unconfirmed

Waiting = tuple[bytes, "Future[Published]"]


class Asked(Future[Published]):
    """Of `publish`, which raises what became of it: flush need not say it again."""


class Producer:
    """Publishes to one topic. Safe to use from several threads; messages keep the order of `send`.

    >>> with Producer("orders") as producer:
    ...     producer.publish("first")                  # waits: on disk when it returns
    ...     future = producer.send("second", key="k")  # does not wait
    ...     future.result().offset

    Batches by itself: what is sent while a request is under way goes into the next one. `send` waits only
    when `buffer_bytes` are waiting. Callbacks of its futures may send, but not wait for others. A message whose
    answer got lost fails with Unconfirmed and is not sent again: it may be stored, and only the caller knows
    whether a duplicate would hurt. A process that is forked may use it, too, and begins with nothing to send.
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
        self._connection = Connection(parse_url(url), timeout_s=timeout_s, retry_s=retry_s)
        self._path = path_of("topics", topic, "messages")
        self._buffer_bytes = buffer_bytes
        self._closed = False
        self._begin()
        forks.tell(self)

    def _begin(self) -> None:
        self._outbox: Outbox[Future[Published]] = Outbox(self._buffer_bytes)
        self._changed = threading.Condition()
        self._sent = self._settled = 0  # how many messages there were, and of how many it is known what became of them
        self._failure: HeadraceError | None = None
        self._thread: threading.Thread | None = None

    def forked(self) -> None:
        """The thread is the parent's, and so is what waits: sent from here, too, it would be stored twice."""
        self._begin()

    def send(
        self,
        value: Data | None,
        *,
        key: Data | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> "Future[Published]":
        """A future of where the message is stored; it resolves once the message is on disk."""
        line = message_line(value, key=key, headers=headers, partition=partition, timestamp=timestamp)
        return self._put(line, Future())

    def _put(self, line: bytes, future: "Future[Published]") -> "Future[Published]":
        with self._changed:
            # A callback that sends runs on the thread that makes room: it would wait for itself.
            self._changed.wait_for(lambda: self._closed or self._is_ours() or self._outbox.has_room(line))
            if self._closed:
                raise LogClosed("the producer is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"producer {self.topic}", daemon=True)
                self._thread.start()
                atexit.register(self.close)  # a program that just ends has still said send()
            self._outbox.put(line, future)
            self._sent += 1
            self._changed.notify_all()
        return future

    def publish(
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
        self._refuse_callbacks("publish")
        return self._put(line, Asked()).result()

    def flush(self) -> None:
        """Waits for what was sent until now; raises the first failure of a `send` since the last flush."""
        self._refuse_callbacks("flush")
        with self._changed:
            last = self._sent
            self._changed.wait_for(lambda: self._settled >= last)
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Takes no more, sends what is waiting, then closes; raises as flush does."""
        self._refuse_callbacks("close")
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True  # first: whoever goes on sending must not keep it from ending
            self._changed.notify_all()
        try:
            if self._thread is not None:
                self._thread.join()
        finally:
            self._connection.close()
        self.flush()

    def _is_ours(self) -> bool:
        return threading.current_thread() is self._thread

    def _refuse_callbacks(self, what: str) -> None:
        if self._is_ours():
            raise Conflict(f"a callback of a message can send, but not {what}: it would wait for what waits for it")

    def __enter__(self) -> "Producer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except HeadraceError:
            if error is None:  # otherwise the first mistake is the one to show
                raise

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._outbox) > 0)
                taken = self._outbox.take()
                if not taken:
                    return
                batch = [waiting for waiting in taken if waiting[1].set_running_or_notify_cancel()]
                self._changed.notify_all()
            if batch:
                self._deliver(batch)
            with self._changed:
                self._settled += len(taken)
                self._changed.notify_all()

    def _deliver(self, batch: list[Waiting]) -> None:
        try:
            response = self._connection.request(
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
                self._deliver(half)
            return
        except Exception as bug:  # noqa: BLE001 - a bug of ours, too, is told: nobody may wait for ever
            told = bug if isinstance(bug, HeadraceError) else Unconfirmed(f"what became of it is not known: {bug!r}")
            self._fail(batch, told)
            return
        for (_, future), published in zip(batch, stored, strict=True):
            future.set_result(published)

    def _fail(self, batch: list[Waiting], error: HeadraceError) -> None:
        if not all(isinstance(future, Asked) for _, future in batch):
            with self._changed:
                self._failure = self._failure or error
        for _, future in batch:
            future.set_exception(error)
