"""The last message of a key, over HTTP and from the command line."""

import base64
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from headrace.broker.streams import key_index
from headrace.broker.streams.key_index_rocksdb import KeyStore
from headrace.broker.streams.partition import Partition
from headrace.client.admin import Client
from headrace.errors import Conflict, CorruptLog, NotFound
from headrace.log.read.reader import Chunk
from tests.listeners.http.live import Live, StartLive


def make(live: Live, topic: str, partitions: int = 1, **config: Any) -> None:
    body = {"name": topic, "partitions": partitions, "config": {"key_index": "true", **config}}
    live.client.post("/topics", json=body).raise_for_status()


def publish(live: Live, topic: str, *messages: dict[str, Any]) -> list[dict[str, int]]:
    answer = live.client.post(f"/topics/{topic}/messages", json=list(messages))
    answer.raise_for_status()
    found: list[dict[str, int]] = answer.json()["messages"]
    return found


def ask(live: Live, topic: str, key: str | bytes, **query: Any) -> httpx.Response:
    return live.client.get(f"/topics/{topic}/keys/{quote(key, safe='')}", params=query)


def value(live: Live, topic: str, key: str | bytes) -> str | None:
    answer = ask(live, topic, key)
    if answer.status_code == 404:
        assert answer.json()["code"] == "key_not_found"
        return None
    answer.raise_for_status()
    found: str = answer.json()["value"]
    return found


def test_the_last_message_of_a_key_is_found_right_after_its_confirm(live: Live, topic: str) -> None:
    make(live, topic)
    for number in range(20):
        a, b = f"a{number}", f"b{number}"
        publish(live, topic, {"key": "a", "value": a}, {"key": "b", "value": b}, {"value": "without a key"})
        assert [value(live, topic, key) for key in "abc"] == [a, b, None]
    found = ask(live, topic, "b").json()
    assert (found["partition"], found["offset"], found["key"], found["headers"]) == (0, 58, "b", {})


def test_a_tombstone_deletes_a_key_and_a_new_message_restores_it(live: Live, topic: str) -> None:
    make(live, topic)
    publish(live, topic, {"key": "a", "value": "1"})
    publish(live, topic, {"key": "a", "value": None})
    assert value(live, topic, "a") is None
    publish(live, topic, {"key": "a", "value": "2"})
    assert value(live, topic, "a") == "2"


@pytest.mark.parametrize("key", ["a/b c?d#e", "schlüssel", b"\xff\x00", ""])
def test_a_key_may_be_any_bytes(live: Live, topic: str, key: str | bytes) -> None:
    name = topic.encode("ascii", "ignore").decode().replace("[", "-")[:80] + str(len(key))
    make(live, name)
    import base64

    data = key.encode() if isinstance(key, str) else key
    publish(live, name, {"key": base64.b64encode(data).decode(), "value": "v", "encoding": {"key": "base64"}})
    if not key:
        assert ask(live, name, key).status_code == 404, "an empty part of a path is none"
    else:
        assert value(live, name, key) == "v"
        assert base64.b64decode(ask(live, name, key, encoding="base64").json()["key"]) == data


def test_the_newest_message_of_all_partitions_is_found(live: Live, topic: str) -> None:
    make(live, topic, partitions=4)
    for number in range(4):
        publish(live, topic, {"key": "a", "value": str(number), "partition": number, "timestamp": 1000 + number % 3})
    assert ask(live, topic, "a").json()["partition"] == 2
    publish(live, topic, *({"key": f"k{number}", "value": str(number)} for number in range(100)))
    assert [value(live, topic, f"k{number}") for number in range(100)] == [str(number) for number in range(100)]


def test_browsing_finds_the_last_message_of_a_key_in_any_partition(live: Live, topic: str) -> None:
    make(live, topic, partitions=3)
    publish(live, topic, *({"key": "ä", "value": str(number), "partition": 2} for number in range(3)))

    def browse(**query: str) -> httpx.Response:
        return live.get(f"/api/headrace/streams/%2F/{topic}/messages", params=query)

    (found,) = browse(key="ä", last="true").json()["messages"]
    assert (found["partition"], found["offset"], found["value"]) == (2, 2, {"text": "2"})
    assert browse(key="b", last="true").json() == {"messages": []}
    assert browse(last="true").status_code == 400
    live.client.patch(f"/topics/{topic}", json={"config": {"key_index": "false"}}).raise_for_status()
    assert "set key_index to true" in browse(key="ä", last="true").json()["detail"]


def test_enabling_the_key_index_also_indexes_existing_messages(live: Live, topic: str) -> None:
    make(live, topic, key_index="false")
    publish(live, topic, {"key": "a", "value": "1"})
    answer = ask(live, topic, "a")
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert "set key_index to true" in answer.json()["detail"]
    live.client.patch(f"/topics/{topic}", json={"config": {"key_index": "true"}}).raise_for_status()
    assert value(live, topic, "a") == "1"
    assert ask(live, "nowhere", "a").json()["code"] == "topic_not_found"


def test_an_index_survives_restarts_and_continues(own: StartLive, topic: str) -> None:
    for number in range(3):
        live = own()
        if not number:
            make(live, topic)
        publish(live, topic, {"key": f"k{number}", "value": str(number)}, {"key": "last", "value": str(number)})
        assert [value(live, topic, f"k{one}") for one in range(number + 1)] == [str(one) for one in range(number + 1)]
        assert value(live, topic, "last") == str(number)
        live.stop()


def test_a_missing_or_corrupt_index_is_rebuilt(own: StartLive, topic: str, tmp_path: Path) -> None:
    live = own()
    make(live, topic)
    publish(live, topic, *({"key": f"k{number}", "value": str(number)} for number in range(500)))
    assert value(live, topic, "k499") == "499"
    live.stop()
    folder = tmp_path / "data" / key_index.FOLDER
    for spoil in (lambda: shutil.rmtree(folder), lambda: (folder / "CURRENT").write_bytes(b"rot")):
        spoil()
        live = own()
        assert [value(live, topic, key) for key in ("k0", "k499", "k500")] == ["0", "499", None]
        live.stop()


def test_an_index_that_is_ahead_of_its_log_is_rebuilt(own: StartLive, topic: str, tmp_path: Path) -> None:
    """As after a power cut that lost the end of an async log, where other records are written now."""
    live = own()
    make(live, topic)
    publish(live, topic, {"key": "a", "value": "1"}, {"key": "b", "value": "2"})
    assert value(live, topic, "b") == "2"
    log_id = live.broker.streams.get(topic).partitions[0].log.id
    live.stop()
    store = KeyStore(str(tmp_path / "data" / key_index.FOLDER))
    store.put(log_id, [(b"a", 2), (b"ghost", 3)], 4)
    store.close()
    live = own()
    publish(live, topic, {"key": "c", "value": "3"}, {"key": "d", "value": "4"})
    assert [value(live, topic, key) for key in ("a", "b", "c", "d", "ghost")] == ["1", "2", "3", "4", None]


def test_messages_deleted_by_retention_leave_the_index(own: StartLive, topic: str) -> None:
    live = own()
    make(live, topic, cleanup_policy="delete")
    publish(live, topic, *({"key": f"k{number}", "value": str(number)} for number in range(10)))
    assert value(live, topic, "k0") == "0"
    live.client.delete(f"/topics/{topic}/partitions/0/records", params={"before": 8}).raise_for_status()
    assert [value(live, topic, f"k{number}") for number in (0, 7, 8, 9)] == [None, None, "8", "9"]
    publish(live, topic, {"key": "k10", "value": "10"})
    assert value(live, topic, "k10") == "10"
    log_id = live.broker.streams.get(topic).partitions[0].log.id
    store = live.broker.keys._store
    assert store is not None
    for _ in range(1000):
        if store.find(log_id, b"k0") is None:
            break
        publish(live, topic, {"value": "x"})
    assert store.find(log_id, b"k0") is None and store.find(log_id, b"k8") == 8


def test_a_recreated_topic_does_not_inherit_the_old_index(live: Live, topic: str) -> None:
    make(live, topic)
    publish(live, topic, {"key": "a", "value": "1"})
    assert value(live, topic, "a") == "1"
    live.client.delete(f"/topics/{topic}").raise_for_status()
    make(live, topic)
    assert value(live, topic, "a") is None


def test_the_last_message_in_a_compacted_topic_is_found(live: Live, topic: str) -> None:
    make(live, topic, cleanup_policy="compact", segment_size="1MB")
    for number in range(4):
        filler = [{"key": f"f{one}", "value": "x" * 10_000} for one in range(60)]
        publish(live, topic, {"key": "a", "value": str(number)}, *filler)
        publish(live, topic, *filler)
    assert live.client.post(f"/topics/{topic}/compact").status_code == 200
    assert value(live, topic, "a") == "3"
    assert value(live, topic, "f1") == "x" * 10_000


def test_a_lookup_while_the_index_is_behind_gets_retry_after(
    own: StartLive, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_index, "WAIT_S", 0.05)
    monkeypatch.setattr(key_index.Keys, "_follow", _never)
    live = own()
    make(live, topic)
    publish(live, topic, {"key": "a", "value": "1"})
    answer = ask(live, topic, "a")
    assert (answer.status_code, answer.json()["code"]) == (503, "index_behind")
    assert answer.headers["retry-after"] == "1"
    assert "1 messages behind" in answer.json()["detail"]


def test_an_unreadable_log_does_not_block_other_indexes(
    own: StartLive, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = own()
    for name in ("damaged", topic):
        make(live, name)
    damaged = live.broker.streams.get("damaged").partitions[0].log
    read_now = Partition.read_now

    def read(partition: Partition, *arguments: Any, **options: Any) -> Chunk:
        if partition.log is damaged:
            raise CorruptLog("a file", 0, "a test")
        return read_now(partition, *arguments, **options)

    monkeypatch.setattr(Partition, "read_now", read)
    publish(live, "damaged", {"key": "a", "value": "1"})
    answer = ask(live, "damaged", "a")
    assert answer.status_code == 503 and "cannot advance: a file is damaged" in answer.json()["detail"]
    publish(live, topic, {"key": "a", "value": "2"})
    assert value(live, topic, "a") == "2"


async def _never(self: object, *arguments: object) -> bool:
    return False


def test_without_rocksdict_the_error_says_how_to_install_it(
    own: StartLive, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_index, "is_installed", lambda: False)
    live = own()
    make(live, topic)
    answer = ask(live, topic, "a")
    assert answer.status_code == 409 and "pip install 'headrace[keys]'" in answer.json()["detail"]


def test_the_python_client_finds_the_last_message(live: Live, topic: str) -> None:
    make(live, topic)
    publish(live, topic, {"key": "a/b", "value": "1"})
    with Client(live.base) as client:
        found = client.last(topic, "a/b")
        assert found is not None and (found.key, found.value, found.offset) == (b"a/b", b"1", 0)
        assert client.last(topic, b"\xff") is None
        with pytest.raises(NotFound, match="topic 'nowhere' does not exist"):
            client.last("nowhere", "a")
        live.client.patch(f"/topics/{topic}", json={"config": {"key_index": "false"}}).raise_for_status()
        with pytest.raises(Conflict):
            client.last(topic, "a/b")


# Ranges of keys.


def pages(live: Live, topic: str, query: str) -> list[list[str]]:
    """The values of each page, in order."""
    found, after = [], ""
    while True:
        answer = live.client.get(f"/topics/{topic}/keys?{query}{after}")
        answer.raise_for_status()
        body = answer.json()
        found.append([message["value"] for message in body["messages"]])
        if body["next"] is None:
            return found
        after = f"&from={body['next']}"


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_range_of_keys_is_read_in_order_and_in_pages(live: Live, topic: str, partitions: int) -> None:
    make(live, topic, partitions)
    for life in "ab":
        publish(live, topic, *({"key": f"k{number:02}", "value": f"{life}{number:02}"} for number in range(10)))
    publish(live, topic, {"key": "j", "value": "before"}, {"key": "l", "value": "after"}, {"key": "k05", "value": None})
    every = [f"b{number:02}" for number in range(10) if number != 5]
    assert pages(live, topic, "prefix=k") == [every]
    assert pages(live, topic, "prefix=k&limit=4") == [every[:4], every[4:8], every[8:]]
    assert pages(live, topic, "") == [["before", *every, "after"]]
    assert pages(live, topic, "to=k02") == [["before", "b00", "b01"]]
    assert [value for page in pages(live, topic, "limit=2&to=k03") for value in page] == ["before", *every[:3]]
    assert live.client.get(f"/topics/{topic}/keys?from=k08&to=l").json()["messages"][0]["key"] == "k08"
    assert pages(live, topic, "from=x") == [[]]


def test_a_range_of_keys_sees_everything_confirmed_before(live: Live, topic: str) -> None:
    make(live, topic)
    for number in range(20):
        publish(live, topic, {"key": f"{number:02}", "value": str(number)})
        assert pages(live, topic, "") == [[str(seen) for seen in range(number + 1)]]


def test_keys_of_any_bytes_are_read_page_by_page(live: Live, topic: str) -> None:
    make(live, topic)
    keys = [b"", b"\x00", b"a&b=c", b"\xc3\xa9", b"\xfe", b"\xff", b"\xff\x00", b"\xff\xff\xff"]
    for key in keys:
        body = {"key": base64.b64encode(key).decode(), "value": "x", "encoding": {"key": "base64"}}
        publish(live, topic, body)
    with Client(live.base) as client:
        assert [found.key for found in client.scan(topic, page=1)] == keys
        assert [found.key for found in client.scan(topic, prefix=b"\xff")] == keys[5:]
        assert [found.key for found in client.scan(topic, start=b"a", stop=b"\xfe")] == keys[2:4]
        assert list(client.scan(topic, prefix="a", stop="a")) == []


def test_a_page_of_keys_is_bounded_in_bytes_and_in_work(
    live: Live, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(live, topic)
    publish(live, topic, *({"key": f"k{number}", "value": "x" * 1000} for number in range(6)))
    assert [len(page) for page in pages(live, topic, "max_bytes=2500")] == [3, 3]
    monkeypatch.setattr(key_index, "SCANNED_MAX", 4)
    publish(live, topic, *({"key": f"k{number}", "value": None} for number in range(5)))
    assert pages(live, topic, "") == [[], ["x" * 1000]], "a page ends after as many keys, even if all were deleted"


def test_keys_of_a_range_need_the_index_and_valid_parameters(live: Live, topic: str) -> None:
    live.client.post("/topics", json={"name": topic}).raise_for_status()
    answer = live.client.get(f"/topics/{topic}/keys?prefix=a")
    assert answer.status_code == 409 and "key_index" in answer.json()["detail"]
    for query in ("limit=0", "limit=1001", "prefx=a", "limit=%ff", "prefix=a&prefix=b"):
        assert live.client.get(f"/topics/{topic}/keys?{query}").status_code == 400, query
    assert live.client.get("/topics/nowhere/keys").status_code == 404
