"""POST /topics/{topic}/messages."""

import base64
import gzip
import json
import threading
import zlib
from collections.abc import Callable
from typing import Any

import cramjam
import pytest

from headrace.errors import Overloaded
from headrace.listeners.http.server import authorization
from headrace.listeners.http.server.memory_budget import Budget
from headrace.record.codec import partition_for
from headrace.wire.http import bodies
from tests.listeners.http.live import Live, StartLive, code_of, read_all

MB = 1 << 20


def test_publishing_a_json_message_returns_its_partition_and_offset(live: Live, topic: str) -> None:
    answer = live.client.post(f"/topics/{topic}/messages", json={"key": "k", "value": "v"})
    assert answer.status_code == 200
    assert answer.json() == {"messages": [{"partition": 0, "offset": 0}]}
    [message] = live.read(topic)
    assert message.pop("timestamp") > 1_600_000_000_000
    assert message == {"partition": 0, "offset": 0, "key": "k", "value": "v", "headers": {}}


def test_a_raw_message_is_stored_byte_by_byte(live: Live, topic: str) -> None:
    body = bytes(range(256))
    answer = live.client.post(
        f"/topics/{topic}/messages",
        params={"key": "ключ", "partition": 0, "timestamp": 1234},
        content=body,
        headers={"content-type": "application/octet-stream", "Headrace-Header-Trace": "abc"},
    )
    assert answer.json() == {"messages": [{"partition": 0, "offset": 0}]}
    [message] = live.read(topic)
    assert base64.b64decode(message["value"]) == body
    assert message["encoding"] == {"value": "base64"}
    assert (message["key"], message["timestamp"], message["headers"]) == ("ключ", 1234, {"trace": "abc"})


def test_malformed_amqp_properties_in_a_header_are_refused(live: Live, topic: str) -> None:
    path = f"/topics/{topic}/messages"
    raw = {"content-type": "text/plain", "Headrace-Header-Amqp.Properties": "no properties"}
    answers = [
        live.client.post(path, content=b"v", headers=raw),
        live.client.post(path, json={"value": "v", "headers": {"amqp.properties": "no properties"}}),
        live.client.post(path, json=[{"value": "v"}, {"value": "v", "headers": [["amqp.properties", ""]]}]),
    ]
    for answer in answers:
        assert answer.status_code == 400 and "amqp.properties" in answer.text
    live.publish(topic, {"value": "v", "headers": {"amqp.properties": "AAA="}, "encoding": {"headers": "base64"}})
    assert live.values(topic) == ["v"]


def test_no_content_type_means_raw(live: Live, topic: str) -> None:
    live.client.post(f"/topics/{topic}/messages", content=b'{"value": 1}')
    assert live.values(topic) == ['{"value": 1}']


def test_an_empty_message_needs_a_content_type(live: Live, topic: str) -> None:
    assert code_of(live.client.post(f"/topics/{topic}/messages")) == "invalid_input"
    live.client.post(f"/topics/{topic}/messages", headers={"content-type": "text/plain"})
    assert live.values(topic) == [""]


def test_ndjson_has_one_message_per_line(live: Live, topic: str) -> None:
    body = b'{"value": "a"}\n\n{"value": {"b": 1}}\r\n{"value": null, "key": "k"}'
    answer = live.client.post(
        f"/topics/{topic}/messages", content=body, headers={"content-type": "application/x-ndjson"}
    )
    assert [m["offset"] for m in answer.json()["messages"]] == [0, 1, 2]
    assert live.values(topic) == ["a", '{"b": 1}', None]


def test_offsets_are_returned_in_the_order_sent_across_partitions(live: Live, topic: str) -> None:
    live.create(topic, partitions=4)
    messages = [{"key": f"k{i}", "value": i} for i in range(200)]
    places = live.publish(topic, *messages)
    for message, (partition, offset) in zip(messages, places, strict=True):
        assert partition == partition_for(str(message["key"]).encode(), 4)
        [read] = live.read(topic, partition=partition, offset=offset, limit=1)
        assert (read["key"], read["value"]) == (message["key"], str(message["value"]))
    for partition in range(4):
        offsets = [offset for p, offset in places if p == partition]
        assert offsets == list(range(len(offsets)))


def test_keyless_messages_of_a_request_share_a_partition_and_requests_rotate(live: Live, topic: str) -> None:
    live.create(topic, partitions=3)
    used = [{p for p, _ in live.publish(topic, *[{"value": 1}] * 5)} for _ in range(3)]
    assert sorted(used, key=min) == [{0}, {1}, {2}]


def test_a_message_may_name_its_partition(live: Live, topic: str) -> None:
    live.create(topic, partitions=3)
    assert live.publish(topic, {"value": 1, "partition": 2}, {"value": 1, "partition": 0}) == [(2, 0), (0, 0)]


def test_an_unknown_partition_refuses_the_whole_request(live: Live, topic: str) -> None:
    live.create(topic, partitions=2)
    answer = live.client.post(
        f"/topics/{topic}/messages", json=[{"value": 1, "partition": 0}, {"value": 1, "partition": 2}]
    )
    assert (answer.status_code, code_of(answer)) == (404, "partition_not_found")
    assert live.read(topic, partition=0) == []


def test_an_unknown_topic_is_created_with_one_partition(live: Live, topic: str) -> None:
    live.publish(topic, {"value": 1})
    assert live.get(f"/topics/{topic}").json()["partitions"] == 1


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ({"val": 1}, 400),
        ({"value": 1, "partition": 1}, 404),
        pytest.param({"value": "x" * 17 * MB}, 413, id="too large"),
    ],
)
def test_a_bad_request_creates_no_topic(live: Live, message: object, status: int) -> None:
    topic = f"bad-{status}"
    assert live.client.post(f"/topics/{topic}/messages", json=message).status_code == status
    assert live.get(f"/topics/{topic}").status_code == 404


def test_auto_creation_can_be_switched_off(own: StartLive) -> None:
    server = own(auto_create_topics=False)
    answer = server.client.post("/topics/t/messages", json={"value": 1})
    assert (answer.status_code, code_of(answer)) == (404, "topic_not_found")
    server.create("t")
    assert server.publish("t", {"value": 1}) == [(0, 0)]


@pytest.mark.parametrize(
    ("encoding", "fold"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("zstd", lambda data: bytes(cramjam.zstd.compress(data))),
    ],
)
def test_bodies_may_be_compressed(live: Live, topic: str, encoding: str, fold: Callable[[bytes], bytes]) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    body = fold(json.dumps({"value": "x" * 1000}).encode())
    answer = live.client.post(f"/topics/{topic}/messages", content=body, headers=headers)
    assert answer.status_code == 200
    assert live.values(topic) == ["x" * 1000]


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_the_compression_setting_is_applied_and_invisible(live: Live, topic: str, compression: str) -> None:
    live.create(topic, compression=compression)
    values = [f"some text that repeats {i % 7}" for i in range(500)]
    live.publish(topic, *({"value": value} for value in values))
    assert live.values(topic) == values
    size = live.get(f"/topics/{topic}").json()["logs"][0]["size_bytes"]
    assert size < 8000 if compression != "none" else size > 15000


def test_a_request_larger_than_a_batch_is_several_batches(own: StartLive) -> None:
    server = own()
    server.create("t", batch_bytes_max="64KB")
    values = [str(i) * 1000 for i in range(100)]
    places = server.publish("t", *({"value": value} for value in values))
    assert places == [(0, i) for i in range(100)]
    assert server.values("t") == values


def test_a_message_larger_than_a_batch_is_refused(live: Live, topic: str) -> None:
    live.create(topic, batch_bytes_max="64KB")
    answer = live.client.post(f"/topics/{topic}/messages", json=[{"value": "a"}, {"value": "x" * 70_000}])
    assert (answer.status_code, code_of(answer)) == (413, "message_too_large")
    assert live.read(topic) == []


def test_large_bodies_are_parsed_in_a_thread(live: Live, topic: str) -> None:
    messages = [{"value": "y" * 1000, "key": str(i)} for i in range(2000)]
    assert len(live.publish(topic, *messages)) == 2000
    assert len(live.read(topic, limit=10_000, max_bytes=16 * MB)) == 2000


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "malformed_json"),
        (b"{", "malformed_json"),
        (b'{"value": NaN}', "malformed_json"),
        (b'{"value": 1, "value": 2}', "malformed_json"),
        (b"[" * 100_000, "malformed_json"),
        (b'{"value": ' + b"1" * 5000 + b"}", "malformed_json"),
        (b'{"value": "\\ud800"}', "malformed_json"),
        (b'{"value": "\xff"}', "malformed_json"),
        (b"[]", "invalid_input"),
        (b"{}", "malformed_message"),
        (b'{"value": 1, "partition": -1}', "malformed_message"),
        (b'{"value": 1, "partition": 1e9}', "partition_not_found"),
        (b'{"value": 1, "timestamp": -5}', "malformed_message"),
        (b'{"value": "a", "encoding": "base64"}', "malformed_message"),
        (b'[{"value": 1}, 2]', "malformed_message"),
    ],
)
def test_bad_json_is_refused_with_a_code(live: Live, body: bytes, code: str) -> None:
    live.publish("bad-json", {"value": "there"})
    answer = live.client.post("/topics/bad-json/messages", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == (404 if code == "partition_not_found" else 400)
    assert code_of(answer) == code
    assert set(live.values("bad-json")) == {"there"}


def test_the_error_has_the_index_of_the_malformed_message(live: Live, topic: str) -> None:
    answer = live.client.post(f"/topics/{topic}/messages", json=[{"value": 1}, {"key": 1}])
    assert answer.json()["index"] == 1


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "application/xml", "a/b/c"])
def test_other_content_types_are_refused(live: Live, topic: str, content_type: str) -> None:
    answer = live.client.post(f"/topics/{topic}/messages", content=b"a=b", headers={"content-type": content_type})
    assert (answer.status_code, code_of(answer)) == (415, "unsupported_media_type")


def test_an_unknown_content_encoding_is_refused(live: Live, topic: str) -> None:
    answer = live.client.post(f"/topics/{topic}/messages", content=b"x", headers={"content-encoding": "br"})
    assert (answer.status_code, code_of(answer)) == (415, "unsupported_media_type")


def test_query_parameters_of_raw_messages_are_refused_for_json(live: Live, topic: str) -> None:
    answer = live.client.post(f"/topics/{topic}/messages?key=a", json={"value": 1})
    assert (answer.status_code, code_of(answer)) == (400, "invalid_input")


@pytest.mark.parametrize(
    "query", ["partition=-1", "partition=x", "timestamp=1.5", "key=a&key=b", "nonsense=1", "key=%ff"]
)
def test_bad_parameters_of_raw_messages_are_refused(live: Live, topic: str, query: str) -> None:
    answer = live.client.post(f"/topics/{topic}/messages?{query}", content=b"x")
    assert (answer.status_code, code_of(answer)) == (400, "invalid_input")


def test_a_content_length_over_the_limit_is_refused_before_reading(own: StartLive) -> None:
    server = own(request_bytes_max=1000)
    head = b"POST /topics/t/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n"
    with server.connect() as sock:
        sock.sendall(head)  # without a byte of the body
        answer = read_all(sock)
    assert b" 413 " in answer and b"body_too_large" in answer and b"connection: close" in answer


def test_a_chunked_body_over_the_limit_is_refused_while_it_arrives(own: StartLive) -> None:
    server = own(request_bytes_max=1000)
    answer = server.client.post("/topics/t/messages", content=iter([b"x" * 600] * 100))
    assert (answer.status_code, code_of(answer)) == (413, "body_too_large")
    assert server.get("/topics/t").status_code == 404


@pytest.mark.parametrize(
    ("encoding", "fold"), [("gzip", gzip.compress), ("zstd", lambda d: bytes(cramjam.zstd.compress(d)))]
)
def test_a_compressed_body_that_decompresses_past_the_limit_is_refused(
    own: StartLive, encoding: str, fold: Callable[[bytes], bytes]
) -> None:
    server = own(decompressed_bytes_max=MB)
    bomb = fold(b"\0" * (40 * MB))
    answer = server.client.post("/topics/t/messages", content=bomb, headers={"content-encoding": encoding})
    assert (answer.status_code, code_of(answer)) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("encoding", "fold"), [("gzip", gzip.compress), ("zstd", lambda d: bytes(cramjam.zstd.compress(d)))]
)
def test_a_small_body_that_decompresses_to_a_large_one_is_decompressed_in_a_thread(
    live: Live, topic: str, monkeypatch: pytest.MonkeyPatch, encoding: str, fold: Callable[[bytes], bytes]
) -> None:
    """64 MB out of 64 KB kept everybody else waiting."""
    decompressed: dict[str, int] = {}

    def watched(*args: Any) -> bodies.Body:
        found = decompress(*args)
        decompressed[threading.current_thread().name.partition("_")[0]] = len(found)
        return found

    decompress = bodies.decompress
    monkeypatch.setattr(bodies, "decompress", watched)
    body = b"x" * (4 * MB - 100_000)
    headers = {"content-encoding": encoding, "content-type": "application/octet-stream"}
    answer = live.client.post(f"/topics/{topic}/messages", content=fold(body), headers=headers)
    assert decompressed == {"http-body": len(body)}, answer.text


def test_expect_100_continue_is_answered(live: Live, topic: str) -> None:
    with live.connect() as sock:
        sock.sendall(
            f"POST /topics/{topic}/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
            "Expect: 100-continue\r\n\r\n".encode()
        )
        assert sock.recv(65536).startswith(b"HTTP/1.1 100")
        sock.sendall(b"hello")
        assert b" 200 OK" in sock.recv(65536)


def test_requests_over_the_memory_budget_get_retry_after(own: StartLive) -> None:
    server = own()
    server.listener.context.budget.bytes_max = 1000
    with server.connect() as first:
        first.sendall(b"POST /topics/t/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 901\r\n\r\n" + b"x" * 900)
        while server.listener.context.budget.used < 900:
            server.get("/health")  # the other request is read in the meantime
        answer = server.client.post("/topics/t/messages", content=b"y" * 200)
        assert (answer.status_code, code_of(answer)) == (429, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        first.sendall(b"x")
        assert b" 200 OK" in first.recv(65536)
    assert server.client.post("/topics/t/messages", content=b"y" * 200).status_code == 200


def test_an_announced_body_reserves_no_budget(own: StartLive) -> None:
    """A few slow large bodies used to block all other publishers for hours."""
    server = own()
    server.listener.context.budget.bytes_max = 1000
    with server.connect() as slow:
        slow.sendall(b"POST /topics/t/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\nx")
        while not server.listener.context.budget.used:
            server.get("/health")
        assert server.client.post("/topics/t/messages", content=b"y" * 200).status_code == 200
        slow.sendall(b"x" * 4999)
        assert b" 200 OK" in slow.recv(65536), "alone it may be larger than the budget"


def test_large_responses_count_against_the_budget_and_small_ones_do_not(
    own: StartLive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of slow clients with a large response each would use all of the memory."""
    server = own()
    for number in range(10):
        server.create(f"topic-{number}")
    server.listener.context.budget.bytes_max = 700
    with server.connect() as slow:
        slow.sendall(b"POST /topics/t/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 501\r\n\r\n" + b"x" * 500)
        while server.listener.context.budget.used < 500:
            server.get("/health")
        paths = ("/topics", "/api/queues", "/api/definitions")
        assert [server.get(path).status_code for path in paths] == [200] * 3
        monkeypatch.setattr(authorization, "BUDGETED_BYTES_MIN", 300)
        assert [server.get(path).status_code for path in paths] == [429] * 3
        assert server.get("/health").status_code == 200
    while server.listener.context.budget.used:
        server.get("/health")
    assert server.get("/topics").status_code == 200


def test_one_address_cannot_use_up_the_budget() -> None:
    budget = Budget(1000)
    with budget.share("a") as first, budget.share("a") as second, budget.share("b") as other:
        first.take(700)
        with pytest.raises(Overloaded):
            second.take(100)
        other.take(200)
        with pytest.raises(Overloaded):
            other.take(200)
        first.release()
        second.take(100)
    assert budget.used == 0 and not budget._by_source


def test_publishers_are_refused_while_the_disk_is_too_slow(own: StartLive) -> None:
    server = own()
    server.publish("t", {"value": 1})

    async def behind(size: int) -> None:
        server.broker.shard.staging.pending_bytes += size

    server.call(behind(1 << 30))
    answer = server.client.post("/topics/t/messages", json={"value": 2})
    assert (answer.status_code, code_of(answer)) == (429, "overloaded")
    server.call(behind(-(1 << 30)))
    assert server.publish("t", {"value": 2}) == [(0, 1)]


def test_a_body_of_newlines_contains_no_message(live: Live, topic: str) -> None:
    body = b"\n \r\n" * 1_000_000
    answer = live.client.post(
        f"/topics/{topic}/messages", content=body, headers={"content-type": "application/x-ndjson"}
    )
    assert (answer.status_code, code_of(answer)) == (400, "invalid_input")


def test_a_compacted_topic_refuses_messages_without_a_key(live: Live, topic: str) -> None:
    live.create(topic, cleanup_policy="compact")
    answer = live.client.post(f"/topics/{topic}/messages", json=[{"key": "a", "value": 1}, {"value": 2}])
    assert (answer.status_code, code_of(answer)) == (400, "invalid_input")
    assert answer.json()["detail"] == f"message 1 has no key: topic {topic!r} is compacted, so every message needs one"
    assert live.read(topic) == [], "all or nothing"
    live.publish(topic, {"key": "", "value": 1}, {"key": "a", "value": None})
