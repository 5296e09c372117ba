"""Reading large records over HTTP: rendered outside the event loop, bounded, or refused with a form that works."""

import base64
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.listeners.http.server import rendering
from headrace.listeners.http.server.memory_budget import Budget
from headrace.record import codec
from headrace.record.types import Record
from headrace.wire.http import json_text, messages
from tests.listeners.http.live import Live, StartLive, code_of

GZIP = 1
MB = 1 << 20


def store(live: Live, topic: str, *records: tuple[Any, ...], compression: int = GZIP, **settings: str) -> None:
    """Append one batch, as a Kafka client would."""

    async def append() -> None:
        stream = live.broker.streams.find(topic) or await live.broker.streams.create(topic, 1, settings)
        await stream.partitions[0].append(codec.build(records, codec=compression, timestamp_ms=1))

    live.call(append())


@pytest.fixture
def encoders(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the threads that have encoded more than a megabyte."""
    threads: set[str] = set()

    def watched(work: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        def encode_and_note(data: Any) -> bytes:
            if len(data) > MB:
                threads.add(threading.current_thread().name.partition("_")[0])
            return work(data)

        return encode_and_note

    for name in ("text", "base64_text"):
        monkeypatch.setattr(json_text, name, watched(getattr(json_text, name)))
    encode = msgspec.json.encode

    def watched_json(value: Any, **options: Any) -> bytes:
        found = encode(value, **options)
        if len(found) > MB:
            threads.add(f"msgspec in {threading.current_thread().name}")
        return found

    monkeypatch.setattr(msgspec.json, "encode", watched_json)
    return threads


VALUES = {"nul": bytes(2 * MB), "text": 'ä\n"'.encode() * MB, "binary": b"\xff\x00" * MB}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("query", ["", "format=ndjson", "encoding=base64"])
def test_a_large_record_is_rendered_in_a_thread(
    live: Live, topic: str, encoders: set[str], kind: str, query: str
) -> None:
    value = VALUES[kind]
    store(live, topic, (b"k", value, (("h", b"v"),), 1))
    answer = live.get(f"/topics/{topic}/messages?limit=1&{query}")
    assert answer.status_code == 200, answer.text[:300]
    found = msgspec.json.decode(answer.content)
    message = found if "ndjson" in query else found["messages"][0]
    is_base64 = "base64" in query or kind == "binary"
    assert (base64.b64decode(message["value"]) if is_base64 else message["value"].encode()) == value
    assert answer.headers["headrace-next-offset"] == "1"
    assert encoders == {"http-read"}


@pytest.mark.parametrize("binary", [False, True])
def test_a_large_record_has_the_same_json_as_a_small_one(binary: bool) -> None:
    parts = (None, b"", b'text "\n\0 \xc3\xa4', b"\xff\xfe")
    headers: list[Any] = [(), (("a", b"1"), ("b", None)), (("a", b"1"), ("a", b"2")), (("a", b"\xff"), ("b", b"ok"))]
    headers.append((("amqp.properties", b"\x80\x00\x04text"), ("amqp.exchange", b"x")))
    for key in parts:
        for value in parts:
            for some in headers:
                record = Record(7, 8, key, value, some)
                rendered = b"".join(messages.render_large(3, record, binary=binary))
                assert rendered == msgspec.json.encode(messages.render(3, record, binary=binary))
                assert len(rendered) <= messages.large_size(record, binary=binary) + 200


def test_a_record_too_large_for_json_is_refused_with_forms_that_work(
    own: StartLive, topic: str, encoders: set[str]
) -> None:
    server = own(read_bytes_max=MB, decompressed_bytes_max=4 * MB)
    value = bytes(3 * MB)
    store(server, topic, (b"k", value, (), 1), key_index="true")
    for path in ("messages?limit=1", "messages?format=ndjson", "keys/k"):
        answer = server.get(f"/topics/{topic}/{path}")
        assert (answer.status_code, code_of(answer)) == (406, "too_large_to_read")
        problem = answer.json()
        assert (problem["offset"], problem["next_offset"], problem["limit"]) == (0, 1, 4 * MB)
        assert 18 * MB < problem["size"] < 18 * MB + 1000, "each NUL takes six bytes"
        assert f"/topics/{topic}/messages?format=raw&partition=0&offset=0" in problem["detail"]
        assert "Kafka consumers" in problem["detail"]
    assert encoders == set(), "nothing was built"
    raw = server.get(f"/topics/{topic}/messages?format=raw&partition=0&offset=0")
    assert raw.status_code == 200 and raw.content == value
    exact = server.get(f"/topics/{topic}/messages?limit=1&encoding=base64")
    assert exact.status_code == 406, "base64 takes four thirds and the rest of the message"
    stored = server.get(f"/topics/{topic}/partitions/0/batches?offset=0")
    assert len(codec.records(stored.content)[0].value or b"") == 3 * MB


def test_a_batch_that_the_broker_does_not_decode_is_refused_with_forms_that_work(own: StartLive, topic: str) -> None:
    server = own(decompressed_bytes_max=64 << 10)
    server.broker.pages.decoder.bytes_max = MB
    store(server, topic, (b"k", bytes(3 * MB), (), 1))
    for query in ("limit=1", "format=raw"):
        answer = server.get(f"/topics/{topic}/messages?{query}")
        assert (answer.status_code, code_of(answer)) == (406, "too_large_to_read")
        assert answer.json()["offset"] == 0 and answer.json()["size"] > 3 * MB
        assert f"/topics/{topic}/partitions/0/batches?offset=0" in answer.json()["detail"]
        assert "format=raw" not in answer.json()["detail"]


def test_the_same_request_works_again_after_a_refusal(own: StartLive, topic: str) -> None:
    """The response was 429 for ever: the request's own share of the budget counted against it."""
    server = own(memory_limit=64 * MB)  # a budget of 16 MB
    store(server, topic, (None, bytes(14 * MB), (), 1))
    for _ in range(3):
        assert server.get(f"/topics/{topic}/messages").status_code == 406
        raw = server.get(f"/topics/{topic}/messages?format=raw&max_bytes=16777216")
        assert (raw.status_code, len(raw.content)) == (200, 14 * MB)


def test_a_page_as_json_ends_before_it_takes_much_more_than_it_may(live: Live, topic: str) -> None:
    """NUL bytes take six times their size: a page of 1 MB was a response of 6 MB, one of 16 MB would take 96 MB."""
    store(live, topic, *((None, bytes(10_000), (), 1) for _ in range(100)))
    seen, offset = 0, 0
    while offset < 100:
        answer = live.get(f"/topics/{topic}/messages?offset={offset}&max_bytes=200000")
        assert len(answer.content) <= rendering.JSON_RATIO * 200_000 + 100
        page = answer.json()
        assert [message["offset"] for message in page["messages"]] == list(range(offset, page["next_offset"]))
        assert int(answer.headers["headrace-next-offset"]) == page["next_offset"] > offset
        seen, offset = seen + len(page["messages"]), page["next_offset"]
    assert seen == 100


def test_memory_is_admitted_before_a_large_record_is_rendered(
    own: StartLive, topic: str, encoders: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While others use the budget, the request is refused for now, and nothing is built."""
    server = own()
    store(server, topic, (None, bytes(2 * MB), (), 1))
    taken: list[int] = []
    has_room = Budget.has_room

    def full(self: Budget, source: str, size: int, own_bytes: int) -> bool:
        taken.append(size)
        return size <= MB and has_room(self, source, size, own_bytes)

    monkeypatch.setattr(Budget, "has_room", full)
    answer = server.get(f"/topics/{topic}/messages?limit=1&max_bytes=1000000")
    assert (answer.status_code, code_of(answer)) == (429, "overloaded")
    assert max(taken) > 11 * MB and encoders == set()
    monkeypatch.setattr(Budget, "has_room", has_room)
    assert server.get(f"/topics/{topic}/messages?limit=1&max_bytes=1000000").status_code == 200


def test_a_follower_gets_a_large_record_in_pieces_and_a_gap_for_one_that_is_too_large(
    own: StartLive, topic: str, encoders: set[str]
) -> None:
    server = own(read_bytes_max=MB, decompressed_bytes_max=8 * MB)
    text = b"x" * (3 * MB)
    store(server, topic, (None, b"first", (), 1))
    store(server, topic, (None, bytes(7 * MB), (), 1))
    store(server, topic, (None, text, (), 1))
    with server.events(f"/topics/{topic}/stream?offset=earliest") as events:
        (_, _, first), (kind, identity, gap), (_, last_id, third) = (next(events) for _ in range(3))
    assert first["value"] == "first"
    assert (kind, identity, gap["from"], gap["to"]) == ("gap", "0:2", 1, 2)
    assert "format=raw&partition=0&offset=1" in gap["reason"]
    assert (third["value"].encode(), last_id) == (text, "0:3")
    assert encoders == {"http-read"}


def test_a_raw_response_has_no_header_for_a_long_key(live: Live, topic: str) -> None:
    store(live, topic, (b"k" * 100_000, b"value", (), 1))
    answer = live.get(f"/topics/{topic}/messages?format=raw")
    assert answer.content == b"value" and answer.headers["headrace-key-bytes"] == "100000"
    assert "headrace-key-base64" not in answer.headers
    assert live.get(f"/topics/{topic}/messages").json()["messages"][0]["key"] == "k" * 100_000


def test_the_dashboard_shows_the_start_of_every_part_of_a_large_record(
    live: Live, topic: str, encoders: set[str]
) -> None:
    part = b"x" * (2 * MB)
    store(live, topic, (part, part, (("a", b"1"), ("b", part), ("c", b"2")), 1))
    answer = live.get(f"/api/headrace/streams/%2F/{topic}/messages?offset=0", auth=("guest", "guest"))
    [message] = answer.json()["messages"]
    assert len(message["key"]["text"]) == len(message["value"]["text"]) == 64 * 1024
    assert [name for name, _ in message["headers"]] == ["a", "b"] and len(message["headers"][1][1]["text"]) < 64 * 1024
    assert message["truncated"] and message["value_bytes"] == 2 * MB
    assert len(answer.content) < MB and encoders == set()


def test_the_management_api_returns_a_large_payload_from_a_thread(live: Live, topic: str, encoders: set[str]) -> None:
    """As base64 if its text would take six times its size."""
    guest = ("guest", "guest")
    live.client.put(f"/api/queues/%2F/{topic}", json={"durable": True}, auth=guest).raise_for_status()
    for value in (b"x" * (3 * MB), bytes(3 * MB), b"\0" * 100):
        store(live, topic, (None, value, (), 1))
    asked = {"count": 3, "ackmode": "ack_requeue_false", "encoding": "auto"}
    found = live.client.post(f"/api/queues/%2F/{topic}/get", json=asked, auth=guest).json()
    assert [(one["payload_bytes"], one["payload_encoding"]) for one in found] == [
        (3 * MB, "string"), (3 * MB, "base64"), (100, "string")
    ]  # fmt: skip
    assert found[0]["payload"] == "x" * (3 * MB) and base64.b64decode(found[1]["payload"]) == bytes(3 * MB)
    assert encoders == {"http-read"}
    assert live.client.post(f"/api/queues/%2F/{topic}/get", json=asked, auth=guest).json() == []


def test_a_record_of_an_older_data_folder_can_be_read(own: StartLive, tmp_path: Path, topic: str) -> None:
    size = 40 * MB
    before = own(decompressed_bytes_max=128 * MB)
    store(before, topic, (None, bytes(size), (), 1))
    before.stop()
    server = own()
    assert server.config.decompressed_bytes_max < size
    answer = server.get(f"/topics/{topic}/messages")
    assert (answer.status_code, answer.json()["offset"]) == (406, 0)
    assert len(server.get(f"/topics/{topic}/messages?format=raw").content) == size
