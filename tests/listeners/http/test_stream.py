"""GET /topics/{topic}/stream: server-sent events."""

import contextlib
import itertools
import threading

import pytest

from headrace.listeners.http.native import event_stream
from headrace.listeners.http.server.bounded_protocol import BoundedHttp
from tests.listeners.amqp.running import eventually
from tests.listeners.http.live import Live, StartLive, code_of


def test_events_have_messages_and_the_next_offset_of_every_partition(live: Live, topic: str) -> None:
    live.create(topic, partitions=2)
    live.publish(topic, {"value": "a", "partition": 0}, {"value": "b", "partition": 1})
    with live.events(f"/topics/{topic}/stream") as events:
        (first, first_id, data), (second, second_id, other) = itertools.islice(events, 2)
    assert (first, second) == ("message", "message")
    assert (data["value"], data["partition"], first_id) == ("a", 0, "0:1,1:0")
    assert (other["value"], other["partition"], second_id) == ("b", 1, "0:1,1:1")


def test_a_reconnecting_reader_misses_nothing_and_sees_nothing_twice(live: Live, topic: str) -> None:
    live.create(topic, partitions=3)
    sent = {f"{p}.{i}" for p in range(3) for i in range(40)}
    for i in range(40):
        live.publish(topic, *({"value": f"{p}.{i}", "partition": p} for p in range(3)))
    seen: list[str] = []
    last = ""
    while len(seen) < len(sent):
        headers = {"last-event-id": last} if last else {}
        with live.events(f"/topics/{topic}/stream", headers=headers) as events:
            for _, identity, data in itertools.islice(events, 17):
                seen.append(data["value"])
                last = identity
                if len(seen) == len(sent):
                    break
    assert len(seen) == len(set(seen)) and set(seen) == sent
    for p in range(3):
        assert [v for v in seen if v.startswith(f"{p}.")] == [f"{p}.{i}" for i in range(40)]


def test_new_messages_are_sent_as_they_are_published(live: Live, topic: str) -> None:
    live.create(topic)
    with live.events(f"/topics/{topic}/stream?offset=latest") as events:
        for i in range(5):
            publisher = threading.Thread(target=live.publish, args=(topic, {"value": str(i)}))
            publisher.start()
            _, identity, data = next(events)
            publisher.join()
            assert (data["value"], identity) == (str(i), f"0:{i + 1}")


def test_partitions_that_are_added_are_followed(live: Live, topic: str) -> None:
    live.publish(topic, {"value": "a"})
    with live.events(f"/topics/{topic}/stream") as events:
        assert next(events)[1] == "0:1"
        live.client.patch(f"/topics/{topic}", json={"partitions": 2})
        live.publish(topic, {"value": "b", "partition": 1}, {"value": "c", "partition": 0})
        seen = [next(events) for _ in range(2)]
    assert {data["value"] for _, _, data in seen} == {"b", "c"}
    assert seen[-1][1] == "0:2,1:1"


def test_a_stream_may_start_at_an_offset_or_a_time_or_be_one_partition(live: Live, topic: str) -> None:
    live.create(topic, partitions=2)
    live.publish(topic, *({"value": str(i), "timestamp": i, "partition": 1} for i in range(5)))
    for query in ("partition=1&offset=3", "timestamp=3", "partition=1&timestamp=3", "last_event_id=1:3"):
        with live.events(f"/topics/{topic}/stream?{query}") as events:
            assert next(events)[2]["value"] == "3"


def test_base64_can_be_requested(live: Live, topic: str) -> None:
    live.publish(topic, {"value": "a"})
    with live.events(f"/topics/{topic}/stream?encoding=base64") as events:
        assert next(events)[2]["value"] == "YQ=="


def test_a_gap_left_by_retention_is_reported(own: StartLive) -> None:
    server = own()
    server.publish("t", *({"value": str(i)} for i in range(10)))

    async def drop() -> None:
        await server.broker.shard.maintenance.starts.delete_before(server.broker.streams.get("t").partitions[0].log, 6)

    server.call(drop())
    with server.events("/topics/t/stream", headers={"last-event-id": "0:2"}) as events:
        name, identity, data = next(events)
        assert (name, identity) == ("gap", "0:6")
        assert (data["partition"], data["from"], data["to"]) == (0, 2, 6)
        assert next(events)[2]["value"] == "6"


def test_a_stream_ends_when_its_topic_is_deleted(live: Live, topic: str) -> None:
    live.publish(topic, {"value": 1})
    with live.events(f"/topics/{topic}/stream") as events:
        next(events)
        assert live.client.delete(f"/topics/{topic}").status_code == 204
        assert list(events) == []


def test_a_stopping_broker_ends_streams_and_long_polls_at_once(own: StartLive) -> None:
    server = own()
    server.publish("t", {"value": 1})
    with server.events("/topics/t/stream") as events:
        next(events)
        with server.connect() as sock:
            sock.sendall(b"GET /topics/t/messages?offset=1&wait=60 HTTP/1.1\r\nHost: x\r\n\r\n")
            server.loop.call_soon_threadsafe(server._stop.set)
            assert list(events) == []
            # An empty page, or a reset if the request was not read yet, but no wait of a minute.
            with contextlib.suppress(ConnectionResetError):
                sock.recv(65536)


@pytest.mark.parametrize(
    ("query", "headers", "status"),
    [
        ("offset=0", {}, 400),  # ambiguous with two partitions
        ("offset=-1&partition=0", {}, 400),
        ("offset=7&partition=0", {}, 416),
        ("partition=9", {}, 404),
        ("limit=5", {}, 400),
        ("", {"last-event-id": "nonsense"}, 400),
        ("", {"last-event-id": "0:1,0:2"}, 400),
        ("", {"last-event-id": "0:99"}, 416),
        ("", {"last-event-id": "7:0"}, 404),
        ("", {"accept": "application/json"}, 406),
    ],
)
def test_bad_requests_for_a_stream_are_refused(live: Live, query: str, headers: dict[str, str], status: int) -> None:
    if live.get("/topics/bad-streams").status_code == 404:
        live.create("bad-streams", partitions=2)
    answer = live.get(f"/topics/bad-streams/stream?{query}", headers=headers)
    assert answer.status_code == status
    code_of(answer)


def test_a_disconnecting_reader_leaks_nothing(live: Live, topic: str) -> None:
    live.publish(topic, {"value": 1})

    async def tasks() -> int:
        return len(live.listener._state.tasks)

    for _ in range(5):
        with live.events(f"/topics/{topic}/stream") as events:
            next(events)
            assert live.call(tasks()) >= 1
    while live.call(tasks()) != 0:
        pass


@pytest.mark.parametrize("path", ["stream", "messages?wait=60m"])
def test_a_disconnecting_reader_with_a_pipelined_request_leaks_nothing(
    own: StartLive, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last request used to see the disconnect."""
    monkeypatch.setattr(event_stream, "HEARTBEAT_S", 3600.0)
    live = own(read_wait_ms_max=3_600_000)
    live.create("t")

    async def lines() -> bool:
        return any(isinstance(link, BoundedHttp) and link.pipeline for link in live.listener._state.connections)

    log = live.broker.streams.get("t").partitions[0].log
    with live.connect() as sock:
        for wanted in (f"/topics/t/{path}", "/health"):
            sock.sendall(f"GET {wanted} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        eventually(lambda: any(waiter.callback is not None for waiter in log._waiters), "it waits")
        eventually(lambda: live.call(lines()), "the other is in line")

    async def tasks() -> int:
        return len(live.listener._state.tasks)

    eventually(lambda: live.call(tasks()) == 0, "nothing is left")
