"""The blocking producer: one connection, and one background thread that sends."""

import atexit
import threading
from concurrent.futures import Future
from types import TracebackType

from headrace.client import forks
from headrace.client.connection import Connection, run
from headrace.client.exchange import DEFAULT_URL, parse_url
from headrace.client.publishing import Outbox, Pending, Publishing
from headrace.client.shapes import Data, Headers, Published, message_line
from headrace.errors import Conflict, HeadraceError, LogClosed


class Producer:
    """Publishes to one topic. Safe to use from several threads; messages keep the order of `send`.

    >>> with Producer("orders") as producer:
    ...     producer.publish("first")                  # waits: on disk when it returns
    ...     future = producer.send("second", key="k")  # does not wait
    ...     future.result().offset

    Messages that are sent while a request is in flight form the next batch. `send` blocks only while `buffer_bytes`
    are waiting. A callback of a future may call `send`, but must not wait for other messages. A message whose response
    was lost fails with Unconfirmed and is not sent again: it may be stored, and only the caller knows whether a
    duplicate would hurt. A forked process may keep using the producer; it starts with an empty outbox.
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
        self._buffer_bytes = buffer_bytes
        self._closed = False
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        self._state: Publishing[Future[Published]] = Publishing(self.topic, self._buffer_bytes)
        self._changed = threading.Condition()  # guards _state and _closed
        self._thread: threading.Thread | None = None

    @property
    def _outbox(self) -> "Outbox[Future[Published]]":
        return self._state.outbox

    def forked(self) -> None:
        """The thread and the waiting messages belong to the parent: sent from here too, they would be stored twice."""
        self._reset()

    def send(
        self,
        value: Data | None,
        *,
        key: Data | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> "Future[Published]":
        """Return a future that resolves to the message's place once the message is on disk."""
        line = message_line(value, key=key, headers=headers, partition=partition, timestamp=timestamp)
        return self._put(Pending(line, Future(), is_awaited=False))

    def publish(
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
        self._refuse_in_callback("publish")
        return self._put(Pending(line, Future(), is_awaited=True)).result()

    def flush(self) -> None:
        """Wait for every message sent so far; raise the first failure of a `send` since the last flush."""
        self._refuse_in_callback("flush")
        state = self._state
        with self._changed:
            last = state.sent
            self._changed.wait_for(lambda: state.settled >= last)
            failure = state.take_failure()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Accept no more messages, send the waiting ones, then close; raises like flush."""
        self._refuse_in_callback("close")
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True  # first: threads that go on sending must not keep the producer open
            self._changed.notify_all()
        try:
            if self._thread is not None:
                self._thread.join()
        finally:
            self._connection.close()
        self.flush()

    def __enter__(self) -> "Producer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except HeadraceError:
            if error is None:  # otherwise the error of the `with` block is the one to show
                raise

    def _put(self, message: "Pending[Future[Published]]") -> "Future[Published]":
        state = self._state
        with self._changed:
            # A callback that sends runs on the thread that empties the outbox: waiting for room would deadlock.
            self._changed.wait_for(
                lambda: self._closed or self._is_sender_thread() or state.outbox.has_room(message.line)
            )
            if self._closed:
                raise LogClosed("the producer is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"producer {self.topic}", daemon=True)
                self._thread.start()
                atexit.register(self.close)  # a program that ends without close() still sends its messages
            state.accept(message)
            self._changed.notify_all()
        return message.future

    def _is_sender_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _refuse_in_callback(self, what: str) -> None:
        if self._is_sender_thread():
            raise Conflict(f"a callback of a message may send, but not {what}: it would wait for itself")

    def _run(self) -> None:
        state = self._state
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(state.outbox) > 0)
                taken = state.outbox.take()
                if not taken:
                    return
                batch = [message for message in taken if message.future.set_running_or_notify_cancel()]
                self._changed.notify_all()
            if batch:
                self._deliver(batch)
            with self._changed:
                state.settled += len(taken)
                self._changed.notify_all()

    def _deliver(self, batch: "list[Pending[Future[Published]]]") -> None:
        run(self._connection, self._state.deliver(batch))
