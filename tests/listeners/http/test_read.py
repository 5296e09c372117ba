"""GET /topics/{topic}/messages, the batches beneath them, and offsets."""

import base64
import json
import threading
from contextlib import ExitStack

import pytest

from headrace.config import Address
from headrace.record import codec
from tests.listeners.amqp.running import eventually
from tests.listeners.http.live import Live, StartLive, code_of

KEYS = {"partition", "offset", "timestamp", "key", "value", "headers"}


def test_reading_from_the_start_is_the_default(live: Live, topic: str) -> None:
    live.publish(topic, *({"value": str(i)} for i in range(5)))
    answer = live.get(f"/topics/{topic}/messages").json()
    assert [m["value"] for m in answer["messages"]] == ["0", "1", "2", "3", "4"]
    assert all(m.keys() == KEYS for m in answer["messages"])
    assert answer["next_offset"] == 5


def test_pages_follow_each_other_by_next_offset(live: Live, topic: str) -> None:
    for batch in range(10):  # batches of ten, pages of seven: pages end inside batches
        live.publish(topic, *({"value": f"{batch}.{i}"} for i in range(10)))
    seen, offset = [], 0
    while True:
        page = live.get(f"/topics/{topic}/messages", params={"offset": offset, "limit": 7}).json()
        if not page["messages"]:
            break
        assert [m["offset"] for m in page["messages"]] == list(range(offset, page["next_offset"]))
        seen += [m["value"] for m in page["messages"]]
        offset = page["next_offset"]
    assert seen == [f"{batch}.{i}" for batch in range(10) for i in range(10)]


def test_max_bytes_bounds_a_page_but_returns_at_least_one_message(live: Live, topic: str) -> None:
    live.publish(topic, *({"value": "x" * 1000} for _ in range(10)))
    page = live.get(f"/topics/{topic}/messages", params={"max_bytes": 2500}).json()
    assert (len(page["messages"]), page["next_offset"]) == (2, 2)
    page = live.get(f"/topics/{topic}/messages", params={"max_bytes": 1}).json()
    assert (len(page["messages"]), page["next_offset"]) == (1, 1)


def test_a_message_larger_than_the_default_page_is_returned(live: Live, topic: str) -> None:
    live.publish(topic, {"value": "x" * 3_000_000}, {"value": "small"})
    assert live.values(topic) == ["x" * 3_000_000]
    assert live.values(topic, offset=1) == ["small"]


def test_reading_by_time(live: Live, topic: str) -> None:
    live.publish(topic, *({"value": str(i), "timestamp": 1000 * i} for i in range(10)))
    assert live.values(topic, timestamp=6500) == ["7", "8", "9"]
    assert live.values(topic, timestamp=0)[0] == "0"
    assert live.values(topic, timestamp=99_999_999) == []


def test_earliest_and_latest_are_accepted_as_offsets(live: Live, topic: str) -> None:
    live.publish(topic, {"value": "a"}, {"value": "b"})
    assert live.values(topic, offset="earliest") == ["a", "b"]
    assert live.get(f"/topics/{topic}/messages?offset=latest").json() == {"messages": [], "next_offset": 2}


def test_ndjson_responses_have_the_next_offset_in_a_header(live: Live, topic: str) -> None:
    live.publish(topic, {"value": "a\nb"}, {"value": "c"})
    answer = live.get(f"/topics/{topic}/messages", headers={"accept": "application/x-ndjson"})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["value"] for line in answer.text.splitlines()] == ["a\nb", "c"]
    assert answer.headers["headrace-next-offset"] == "2"
    assert live.get(f"/topics/{topic}/messages?format=ndjson").text == answer.text


def test_a_raw_response_is_one_value_with_the_rest_in_headers(live: Live, topic: str) -> None:
    key = base64.b64encode(b"k\xff").decode()
    live.publish(topic, {"value": "/wA=", "key": key, "encoding": "base64", "timestamp": 5}, {"value": None})
    answer = live.get(f"/topics/{topic}/messages", headers={"accept": "application/octet-stream"})
    assert answer.content == b"\xff\0"
    kept = {name: value for name, value in answer.headers.items() if name.startswith("headrace-")}
    assert kept == {
        "headrace-partition": "0",
        "headrace-offset": "0",
        "headrace-timestamp": "5",
        "headrace-key-base64": key,
        "headrace-next-offset": "1",
    }
    tombstone = live.get(f"/topics/{topic}/messages?format=raw&offset=1")
    assert (tombstone.content, tombstone.headers["headrace-tombstone"]) == (b"", "true")
    nothing = live.get(f"/topics/{topic}/messages?format=raw&offset=2")
    assert (nothing.status_code, nothing.headers["headrace-next-offset"]) == (204, "2")
    assert code_of(live.get(f"/topics/{topic}/messages?format=raw&limit=2")) == "invalid_input"


def test_binary_values_are_returned_as_marked_base64(live: Live, topic: str) -> None:
    live.publish(topic, {"value": "/w==", "encoding": "base64", "headers": {"a": "b"}})
    [message] = live.read(topic)
    assert (message["value"], message["encoding"]) == ("/w==", "base64")
    [message] = live.read(topic, encoding="base64")
    assert message["headers"] == {"a": "Yg=="}
    assert message["encoding"] == {"value": "base64", "headers": "base64"}


def test_repeated_headers_are_returned_as_pairs(live: Live, topic: str) -> None:
    live.publish(topic, {"value": 1, "headers": [["a", "x"], ["a", "y"]]})
    assert live.read(topic)[0]["headers"] == [["a", "x"], ["a", "y"]]


def test_reading_from_several_partitions_needs_a_partition(live: Live, topic: str) -> None:
    live.create(topic, partitions=3)
    answer = live.get(f"/topics/{topic}/messages")
    assert (answer.status_code, code_of(answer)) == (400, "invalid_input")
    assert answer.json()["partitions"] == [0, 1, 2]
    assert "0, 1, 2" in answer.json()["detail"]


def test_an_offset_out_of_range_is_refused_with_start_and_end(live: Live, topic: str) -> None:
    live.publish(topic, {"value": 1})
    answer = live.get(f"/topics/{topic}/messages?offset=2")
    assert (answer.status_code, code_of(answer)) == (416, "offset_out_of_range")
    assert {k: answer.json()[k] for k in ("offset", "start", "end")} == {"offset": 2, "start": 0, "end": 1}


@pytest.mark.parametrize(
    "query",
    [
        "offset=-1", "offset=x", "offset=1.5", "offset=9223372036854775808", "offset=", "offset=%00",
        "limit=0", "limit=-1", "limit=1000000000", "limit=10001", "max_bytes=0", "max_bytes=1000000000000",
        "wait=-1", "wait=abc", "wait=1e9", "wait=nan", "timestamp=-1", "timestamp=1e3",
        "partition=-1", "partition=99999999999", "format=xml", "encoding=rot13",
        "offset=0&timestamp=0", "offset=0&offset=1", "ofset=1", "offset=%ff", "&".join(["a=1"] * 50),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused(live: Live, query: str) -> None:
    live.publish("bad-parameters", {"value": 1})
    answer = live.get(f"/topics/bad-parameters/messages?{query}")
    assert (answer.status_code, code_of(answer)) == (400, "invalid_input")


def test_a_partition_that_is_not_there_is_not_found(live: Live, topic: str) -> None:
    live.publish(topic, {"value": 1})
    answer = live.get(f"/topics/{topic}/messages?partition=7")
    assert (answer.status_code, code_of(answer)) == (404, "partition_not_found")


def test_an_unsupported_media_type_is_not_acceptable(live: Live, topic: str) -> None:
    live.publish(topic, {"value": 1})
    answer = live.get(f"/topics/{topic}/messages", headers={"accept": "image/png"})
    assert (answer.status_code, code_of(answer)) == (406, "not_acceptable")


def test_a_long_poll_ends_with_the_first_message(live: Live, topic: str) -> None:
    live.publish(topic, {"value": "old"})
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(live.values(topic, offset=1, wait=50)))
    reader.start()
    live.publish(topic, {"value": "new"})
    reader.join(50)
    assert found == [["new"]]


def test_a_long_poll_returns_nothing_after_its_timeout(live: Live, topic: str) -> None:
    live.publish(topic, {"value": 1})
    answer = live.get(f"/topics/{topic}/messages?offset=1&wait=20ms")
    assert answer.json() == {"messages": [], "next_offset": 1}


def test_a_long_poll_ends_when_the_topic_is_deleted(live: Live, topic: str) -> None:
    live.publish(topic, {"value": 1})
    found: list[int] = []
    path = f"/topics/{topic}/messages?offset=1&wait=50"
    reader = threading.Thread(target=lambda: found.append(live.get(path).status_code))
    reader.start()
    while live.call(waiters(live, topic)) == 0:
        pass
    live.client.delete(f"/topics/{topic}")
    reader.join(50)
    assert found == [404]


def test_a_disconnect_during_a_long_poll_leaks_nothing(live: Live, topic: str) -> None:
    live.publish(topic, {"value": 1})
    with live.connect() as sock:
        sock.sendall(f"GET /topics/{topic}/messages?offset=1&wait=60 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        while live.call(waiters(live, topic)) == 0:
            pass
    while live.call(waiters(live, topic)) != 0:
        pass


@pytest.mark.usefixtures("no_hurry")
@pytest.mark.parametrize("path", ["messages", "partitions/0/batches"])
def test_waiting_readers_hold_no_memory_budget(own: StartLive, path: str) -> None:
    server = own()
    server.publish("quiet", {"value": "old"})
    server.listener.context.budget.bytes_max = 4 << 20
    with ExitStack() as stack:
        waiting = [stack.enter_context(server.connect()) for _ in range(8)]
        for count, sock in enumerate(waiting, 1):  # each requests a megabyte
            sock.sendall(f"GET /topics/quiet/{path}?offset=1&wait=50 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            eventually(lambda: server.call(waiters(server, "quiet")) == count, "the request waits")  # noqa: B023
        assert server.listener.context.budget.used == 0
        server.publish("busy", {"value": "x"})
        assert server.values("busy") == ["x"]
        server.publish("quiet", {"value": "new"})
        assert [sock.recv(12) for sock in waiting] == [b"HTTP/1.1 200"] * len(waiting)
    eventually(lambda: server.listener.context.budget.used == 0, "the answers are out")


@pytest.mark.usefixtures("no_hurry")
@pytest.mark.parametrize("path", ["messages", "partitions/0/batches"])
def test_a_long_poll_without_budget_at_its_end_gets_retry_after(own: StartLive, path: str) -> None:
    server = own()
    server.publish("quiet", {"value": "old"})
    budget = server.listener.context.budget
    budget.bytes_max = 1000
    with server.connect() as slow, server.connect() as sock:
        sock.sendall(f"GET /topics/quiet/{path}?offset=1&wait=50&max_bytes=500 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        eventually(lambda: server.call(waiters(server, "quiet")) == 1, "the request waits")
        slow.sendall(b"POST /topics/other/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 601\r\n\r\n" + b"x" * 600)
        eventually(lambda: budget.used == 600, "a body is on its way")
        server.publish("quiet", {"value": "new"})
        assert sock.recv(12) == b"HTTP/1.1 429"
    eventually(lambda: budget.used == 0, "no reader is left")
    assert server.values("quiet", offset=1) == ["new"]


async def waiters(live: Live, topic: str) -> int:
    log = live.broker.streams.get(topic).partitions[0].log
    return sum(waiter.callback is not None for waiter in log._waiters)


def test_offsets_returns_start_and_end_of_partitions(live: Live, topic: str) -> None:
    live.create(topic, partitions=2)
    live.publish(topic, {"value": 1, "partition": 1}, {"value": 1, "partition": 1})
    assert live.get(f"/topics/{topic}/offsets").json() == {
        "topic": topic,
        "partitions": [{"partition": 0, "start": 0, "end": 0}, {"partition": 1, "start": 0, "end": 2}],
    }


def test_batches_are_returned_as_stored(live: Live, topic: str) -> None:
    for batch in range(3):
        live.publish(topic, *({"value": f"{batch}.{i}"} for i in range(4)))
    answer = live.get(f"/topics/{topic}/partitions/0/batches", params={"offset": 5})
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["headrace-next-offset"] == "12"
    infos = codec.scan(answer.content)
    assert [(info.base_offset, info.count) for info in infos] == [(4, 4), (8, 4)]
    values = [record.value for record in codec.records(answer.content, from_offset=5)]
    assert values == [f"{b}.{i}".encode() for b in (1, 2) for i in range(4)][1:]
    end = live.get(f"/topics/{topic}/partitions/0/batches?offset=12&wait=10ms")
    assert (end.status_code, end.content, end.headers["headrace-next-offset"]) == (200, b"", "12")


@pytest.mark.parametrize(
    ("path", "status"),
    [("x", 400), ("-1", 400), ("1", 404), ("99999999999", 400), ("0/batches?offset=9", 416), ("²", 400)],
)
def test_bad_requests_for_batches_are_refused(live: Live, path: str, status: int) -> None:
    live.publish("bad-batches", {"value": 1})
    path = path if "/" in path else f"{path}/batches"
    answer = live.get(f"/topics/bad-batches/partitions/{path}")
    assert answer.status_code == status
    code_of(answer)


def test_large_responses_arrive_completely(live: Live, topic: str) -> None:
    values = [f"{i}-" + "z" * 1000 for i in range(4000)]
    for at in range(0, 4000, 1000):
        live.publish(topic, *({"value": value} for value in values[at : at + 1000]))
    assert live.values(topic, limit=10_000, max_bytes=16 << 20) == values


def test_an_undecodable_batch_is_reported_and_can_be_skipped(live: Live, topic: str) -> None:
    """A Kafka client may send a batch with a valid checksum and corrupt compressed records."""
    live.publish(topic, {"value": "before"})
    bad = codec.build([(None, b"x" * 100, (), -1)], codec=0, timestamp_ms=1)
    bad[21:23] = (4).to_bytes(2, "big")  # claims zstd
    from crc32c import crc32c

    bad[17:21] = crc32c(bytes(bad[21:])).to_bytes(4, "big")

    async def append() -> None:
        await live.broker.streams.get(topic).partitions[0].append(bad, None)

    live.call(append())
    live.publish(topic, {"value": "after"})
    page = live.get(f"/topics/{topic}/messages").json()
    assert ([message["value"] for message in page["messages"]], page["next_offset"]) == (["before"], 1)
    answer = live.get(f"/topics/{topic}/messages?offset=1")
    assert (answer.status_code, code_of(answer)) == (503, "batch_unreadable")
    assert live.values(topic, offset=answer.json()["next_offset"]) == ["after"]


def test_aborted_messages_are_not_returned(own: StartLive) -> None:
    from confluent_kafka import Producer

    server = own(kafka=Address("localhost", 0))
    server.create("t")
    address = server.server.listeners["kafka"].addresses[0]
    producer = Producer({"bootstrap.servers": address, "transactional.id": "x", "linger.ms": 0})
    producer.init_transactions(60)
    for name, end in (("a", "abort"), ("b", "commit"), ("c", "abort"), ("d", "commit")):
        producer.begin_transaction()
        for i in range(3):
            producer.produce("t", f"{name}{i}")
        producer.flush(60)
        server.publish("t", {"value": f"between {name}"})
        getattr(producer, f"{end}_transaction")(60)
    committed = ["between a", "b0", "b1", "b2", "between b", "between c", "d0", "d1", "d2", "between d"]
    assert server.values("t") == committed
    seen, offset = [], 0
    while (page := server.get(f"/topics/t/messages?limit=1&offset={offset}").json())["messages"]:
        seen += [m["value"] for m in page["messages"]]
        offset = page["next_offset"]
    assert seen == committed
    with server.events("/topics/t/stream") as events:
        assert [next(events)[2]["value"] for _ in committed] == committed


def test_an_open_transaction_holds_back_later_messages(own: StartLive) -> None:
    from confluent_kafka import Producer

    server = own(kafka=Address("localhost", 0))
    server.create("t")
    producer = Producer({"bootstrap.servers": server.server.listeners["kafka"].addresses[0], "transactional.id": "x"})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce("t", "open")
    producer.flush(60)
    server.publish("t", {"value": "behind"})
    assert server.values("t") == []
    producer.commit_transaction(60)
    assert server.values("t") == ["open", "behind"]
