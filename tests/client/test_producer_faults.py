"""What becomes of messages that both producers were given when the network or the broker does not do its part."""

import asyncio
import concurrent.futures
import contextlib
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from headrace import AsyncProducer, Producer, Published
from headrace.client.async_connection import AsyncConnection
from headrace.client.connection import Connection
from headrace.client.exchange import Response, parse_url
from headrace.errors import (
    Conflict,
    HeadraceError,
    InvalidInput,
    LogClosed,
    NotFound,
    Overloaded,
    Unconfirmed,
)
from tests.client.scripted import CLOSE, ok, refusing, scripted

STORED = b'{"messages":[{"partition":0,"offset":7}]}'


def publish(kind: str, url: str, *values: str) -> list[Published | HeadraceError]:
    """What became of each value, sent without waiting."""

    async def run() -> list[Published | HeadraceError]:
        async with AsyncProducer("t", url, retry_s=0) as producer:
            futures = [await producer.send(value) for value in values]
            with contextlib.suppress(HeadraceError):
                await producer.flush()
            return [error_or_result(future) for future in futures]

    if kind == "async":
        return asyncio.run(run())
    with Producer("t", url, retry_s=0) as producer:
        futures = [producer.send(value) for value in values]
        with contextlib.suppress(HeadraceError):
            producer.flush()
        return [error_or_result(future) for future in futures]


def error_or_result(
    future: "asyncio.Future[Published] | concurrent.futures.Future[Published]",
) -> Published | HeadraceError:
    error = future.exception()
    assert error is None or isinstance(error, HeadraceError)
    return error or future.result()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_message_that_is_refused_while_it_is_sent_is_refused_and_not_lost(kind: str) -> None:
    """A broker does not wait for the end of what is too large, and hangs up in the end."""
    answer = ok(b'{"detail":"too large"}', status="413 Content Too Large", headers="Connection: close\r\n")
    with refusing(answer) as url:
        (outcome,) = publish(kind, url, "x" * 20_000_000)
        assert isinstance(outcome, InvalidInput) and "too large" in str(outcome)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_lost_publish_fails_its_messages_and_no_others(kind: str) -> None:
    with scripted(CLOSE, ok(STORED)) as server:
        assert isinstance(publish(kind, server.url, "a")[0], Unconfirmed)
        assert publish(kind, server.url, "b") == [Published(0, 7)]


def test_flush_raises_each_unhandled_error_once() -> None:
    with scripted(CLOSE) as server:
        producer = Producer("t", server.url)
        producer.send("x")
        with pytest.raises(Unconfirmed):
            producer.flush()
        producer.flush()
        producer.close()


async def test_async_flush_raises_each_unhandled_error_once() -> None:
    with scripted(CLOSE) as server:
        producer = AsyncProducer("t", server.url)
        await producer.send("x")
        with pytest.raises(Unconfirmed):
            await producer.flush()
        await producer.close()


def test_only_the_message_at_fault_is_refused() -> None:
    """The first goes out alone; the other four wait for it and are one batch: refused, split, judged."""
    bad = ok(b'{"detail":"bad","code":"malformed_message"}', status="400 Bad Request")
    pair = b'{"messages":[{"partition":0,"offset":1},{"partition":0,"offset":2}]}'
    gate = Gate()
    with scripted(ok(STORED), bad, ok(pair), bad, bad, ok(STORED)) as server:
        producer = Producer("t", server.url)
        producer._connection = gate  # type: ignore[assignment]
        gate.inner = Connection(parse_url(server.url))
        futures = [producer.send("1")]
        gate.entered.wait()
        futures += [producer.send(value) for value in ("2", "3", "4", "5")]
        gate.opened.set()
        with pytest.raises(InvalidInput):
            producer.close()
        outcomes = [error_or_result(future) for future in futures]
    assert outcomes[0] == Published(0, 7)
    assert outcomes[1:3] == [Published(0, 1), Published(0, 2)]
    assert isinstance(outcomes[3], InvalidInput)
    assert outcomes[4] == Published(0, 7)


class Keeper:
    """A connection to a broker that stores what it can and remembers what it was asked; each line is a message."""

    def __init__(self, problem: str) -> None:
        self.asked: list[int] = []
        self._problem = problem

    def request(self, *_: object, body: bytes, **__: object) -> Response:
        lines = body.splitlines()
        self.asked.append(len(lines))
        if b"bad" in body:
            problem = json.dumps({"code": self._problem, "detail": "not there"}).encode()
            status = 404 if "not_found" in self._problem else 400
            return Response(status, {"content-type": "application/problem+json"}, problem)
        places = [{"partition": 0, "offset": offset} for offset in range(len(lines))]
        return Response(200, {}, json.dumps({"messages": places}).encode())

    def close(self) -> None: ...


class AsyncKeeper(Keeper):
    async def request(self, *_: object, body: bytes, **__: object) -> Response:  # type: ignore[override]
        return super().request(body=body)

    async def close(self) -> None: ...  # type: ignore[override]


def sent_together(kind: str, problem: str, *values: str) -> tuple[list[Published | HeadraceError], list[int]]:
    """What became of each value, all of one batch, and how many messages each request had."""

    async def run() -> tuple[list[Published | HeadraceError], list[int]]:
        producer = AsyncProducer("t")
        producer._connection = keeper = AsyncKeeper(problem)  # type: ignore[assignment]
        futures = [await producer.send(value) for value in values]
        with contextlib.suppress(HeadraceError):
            await producer.close()
        return [error_or_result(future) for future in futures], keeper.asked

    if kind == "async":
        return asyncio.run(run())
    producer = Producer("t")
    producer._connection = gate = Gate()  # type: ignore[assignment]
    gate.inner = keeper = Keeper(problem)  # type: ignore[assignment]
    first = producer.send("first")
    gate.entered.wait()
    futures = [producer.send(value) for value in values]
    gate.opened.set()
    assert first.result(60) == Published(0, 0)
    with contextlib.suppress(HeadraceError):
        producer.close()
    return [error_or_result(future) for future in futures], keeper.asked[1:]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_only_the_message_for_a_missing_partition_is_refused(kind: str) -> None:
    outcomes, _ = sent_together(kind, "partition_not_found", "1", "2", "bad", "4", "5")
    assert [isinstance(outcome, Published) for outcome in outcomes] == [True, True, False, True, True]
    assert isinstance(outcomes[2], NotFound)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    ("problem", "error"),
    [("topic_not_found", NotFound), ("invalid_input", InvalidInput), ("", InvalidInput)],
    ids=["missing", "cannot be", "no broker"],
)
def test_a_batch_that_fails_as_a_whole_is_not_split_and_retried(
    kind: str, problem: str, error: type[HeadraceError]
) -> None:
    outcomes, asked = sent_together(kind, problem, "1", "2", "bad", "4", "5")
    assert [type(outcome) for outcome in outcomes] == [error] * 5
    assert asked == [5]


class Particular:
    """A connection that refuses bad messages, and accepts good ones only after a refusal was reported."""

    def __init__(self, event: Any) -> None:
        self.told = event()
        self.opened = threading.Event()

    def answer(self, body: bytes) -> Response:
        if b"lost" in body:
            raise Unconfirmed("lost")
        if b"bad" in body:
            problem = b'{"detail":"bad","code":"malformed_message"}'
            return Response(400, {"content-type": "application/problem+json"}, problem)
        return Response(200, {}, STORED)

    def request(self, *_: object, body: bytes, **__: object) -> Response:
        answer = self.answer(body)
        if answer.status == 200:
            assert (self.opened if b"first" in body else self.told).wait(60)
        return answer

    def close(self) -> None: ...


class AsyncParticular(Particular):
    async def request(self, *_: object, body: bytes, **__: object) -> Response:  # type: ignore[override]
        answer = self.answer(body)
        if answer.status == 200:
            await asyncio.wait_for(self.told.wait(), 60)
        return answer

    async def close(self) -> None: ...  # type: ignore[override]


def test_an_error_raised_by_publish_is_not_raised_again_by_close() -> None:
    """The publisher got the error before it was recorded for flush, so it could not be removed there."""
    producer = Producer("t")
    producer._connection = connection = Particular(threading.Event)  # type: ignore[assignment]
    first = producer.send("first")
    until(lambda: first.running())
    with ThreadPoolExecutor(2) as threads:
        bad = threads.submit(producer.publish, "bad")
        until(lambda: len(producer._outbox) == 1)
        good = threads.submit(producer.publish, "good")
        until(lambda: len(producer._outbox) == 2)
        connection.opened.set()  # the first is answered, the other two go together
        refused = bad.exception(60)
        connection.told.set()
        assert good.result(60) == first.result(60) == Published(0, 7)
    assert isinstance(refused, InvalidInput)
    producer.close()


async def test_an_error_raised_by_async_publish_is_not_raised_again_by_close() -> None:
    producer = AsyncProducer("t")
    producer._connection = connection = AsyncParticular(asyncio.Event)  # type: ignore[assignment]
    bad, good = asyncio.create_task(producer.publish("bad")), asyncio.create_task(producer.publish("good"))
    with pytest.raises(InvalidInput):
        await bad
    connection.told.set()
    assert await good == Published(0, 7)
    await producer.close()


async def test_messages_lost_together_with_a_publish_are_reported_by_close() -> None:
    """The publisher got its error, but the other lost message was not reported."""
    producer = AsyncProducer("t")
    producer._connection = AsyncParticular(asyncio.Event)  # type: ignore[assignment]
    await producer.send("another")
    with pytest.raises(Unconfirmed):
        await producer.publish("lost")
    with pytest.raises(Unconfirmed):
        await producer.close()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Gate:
    """A connection that waits before its first request, so that a test knows what the next batch holds."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.inner: Connection

    def request(self, *args: Any, **options: Any) -> Response:
        self.entered.set()
        self.opened.wait()
        return self.inner.request(*args, **options)

    def close(self) -> None:
        self.inner.close()


def test_a_full_buffer_makes_send_wait_instead_of_growing() -> None:
    with scripted(*[ok(STORED)] * 20) as server, Producer("t", server.url, buffer_bytes=1) as producer:
        for _ in range(20):
            producer.send("x").result()


def stored(*_: object, body: bytes, **__: object) -> Response:
    """What a broker answers that takes everything."""
    places = [{"partition": 0, "offset": n} for n in range(body.count(b"\n"))]
    return Response(200, {}, json.dumps({"messages": places}).encode())


@pytest.mark.parametrize("what", ["flush", "close"])
def test_flush_completes_although_another_thread_keeps_sending(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """There was always something under way, and both waited for ever."""
    monkeypatch.setattr(Connection, "request", stored)
    producer = Producer("t", "http://127.0.0.1:1")

    def again(_: object = None) -> None:
        with contextlib.suppress(LogClosed):
            producer.send("x").add_done_callback(again)

    again()
    waiting = threading.Thread(target=getattr(producer, what), daemon=True)
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive()
    producer.close()


@pytest.mark.parametrize("what", ["flush", "close"])
async def test_flush_completes_although_another_task_keeps_sending(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    async def request(*args: object, **options: Any) -> Response:
        with contextlib.suppress(LogClosed):
            await producer.send("another")
        await asyncio.sleep(0)
        return stored(*args, **options)

    monkeypatch.setattr(AsyncConnection, "request", request)
    producer = AsyncProducer("t", "http://127.0.0.1:1")
    await producer.send("first")
    try:
        async with asyncio.timeout(20):
            await getattr(producer, what)()
    finally:
        producer._closed = True


def test_messages_pending_when_all_tasks_are_cancelled_are_sent_by_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of asyncio.run the sending task is cancelled too, and its messages were lost silently."""
    first, futures = asyncio.Event(), []

    async def request(*args: object, **options: Any) -> Response:
        if not first.is_set():
            first.set()
            await asyncio.Event().wait()
        return stored(*args, **options)

    async def work() -> None:
        async with AsyncProducer("t", "http://127.0.0.1:1") as producer:
            futures.append(await producer.send("under way"))
            await first.wait()
            futures.append(await producer.send("waits"))
            await asyncio.Event().wait()

    async def main() -> None:
        asyncio.create_task(work())  # noqa: RUF006 - left alone, as people do
        while len(futures) < 2:
            await asyncio.sleep(0)

    monkeypatch.setattr(AsyncConnection, "request", request)
    asyncio.run(main())
    assert [future.done() for future in futures] == [True, True]
    assert isinstance(futures[0].exception(), Unconfirmed)
    assert futures[1].result() == Published(0, 0)


def test_a_callback_may_send_although_the_buffer_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on the thread that makes room, and waited for itself."""
    full = threading.Event()

    def request(*args: object, **options: Any) -> Response:
        assert full.wait(60)
        return stored(*args, **options)

    monkeypatch.setattr(Connection, "request", request)
    producer = Producer("t", "http://127.0.0.1:1", buffer_bytes=1)
    again: list[Future[Published]] = []
    first = producer.send("first")
    first.add_done_callback(lambda _: again.append(producer.send("again")))
    until(first.running)
    second = producer.send("second")
    full.set()
    assert second.result(60)
    assert again[0].result(60)
    producer.close()


@pytest.mark.parametrize("what", ["publish", "flush", "close"])
def test_waiting_inside_a_callback_raises_an_error(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    told: list[BaseException | None] = []
    done = threading.Event()

    def wait(_: object) -> None:
        try:
            producer.publish("x") if what == "publish" else getattr(producer, what)()
        except HeadraceError as error:
            told.append(error)
        done.set()

    with Producer("t", "http://127.0.0.1:1") as producer:
        gate = threading.Event()
        monkeypatch.setattr(Connection, "request", lambda *a, **o: gate.wait(60) and stored(*a, **o))
        producer.send("first").add_done_callback(wait)
        gate.set()
        assert done.wait(60)
        assert isinstance(told[0], Conflict) and what in str(told[0])


def test_an_overloaded_broker_raises_overloaded() -> None:
    busy = ok(b'{"detail":"busy"}', status="429 Too Many Requests", headers="Retry-After: 9\r\n")
    with scripted(busy) as server:
        (outcome,) = publish("sync", server.url, "x")
        assert isinstance(outcome, Overloaded)


def test_a_bug_in_the_producer_is_raised_at_waiting_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that sends ended with it, and flush waited for ever."""

    def broken(*_: object, **__: object) -> Response:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(Connection, "request", broken)
    producer = Producer("t", "http://127.0.0.1:1")
    sent = producer.send("x")
    with pytest.raises(Unconfirmed, match="ours"):
        sent.result(30)
    with pytest.raises(Unconfirmed, match="ours"):
        producer.flush()
    with pytest.raises(Unconfirmed, match="ours"):
        producer.send("y").result(30)
    with contextlib.suppress(Unconfirmed):
        producer.close()


async def test_a_bug_in_the_producer_is_raised_at_waiting_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object, **__: object) -> Response:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(AsyncConnection, "request", broken)
    producer = AsyncProducer("t", "http://127.0.0.1:1")
    for _ in range(2):
        with pytest.raises(Unconfirmed, match="ours"):
            await asyncio.wait_for(producer.publish("x"), 30)
    await producer.close()
