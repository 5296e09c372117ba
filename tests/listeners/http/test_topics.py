"""Topics over HTTP: create, list, describe, configure, delete; names of every kind."""

import httpx
import pytest

from tests.listeners.http.live import Live, StartLive, code_of


def test_a_topic_is_created_described_listed_and_deleted(live: Live, topic: str) -> None:
    body = {"name": topic, "partitions": 3, "config": {"retention.ms": "1d", "compression": "zstd"}}
    answer = live.client.post("/topics", json=body)
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/topics/{topic}"
    described = live.get(f"/topics/{topic}").json()
    assert described == answer.json()
    assert described["partitions"] == 3
    assert described["overrides"] == {"retention_ms": "1d", "compression": "zstd"}
    assert described["config"]["retention_ms"] == "1d"
    assert described["config"]["segment_size"] == "256MB"
    assert [log["partition"] for log in described["logs"]] == [0, 1, 2]
    assert {"name": topic, "kind": "topic", "partitions": 3} in live.get("/topics").json()["topics"]
    assert live.client.delete(f"/topics/{topic}").status_code == 204
    assert code_of(live.get(f"/topics/{topic}")) == "topic_not_found"
    assert code_of(live.client.delete(f"/topics/{topic}")) == "topic_not_found"


def test_a_topic_needs_only_a_name(live: Live, topic: str) -> None:
    answer = live.client.post("/topics", json={"name": topic, "partitions": None, "config": None})
    assert (answer.status_code, answer.json()["partitions"]) == (201, 1)


def test_a_topic_name_can_be_used_only_once(live: Live, topic: str) -> None:
    live.create(topic)
    answer = live.client.post("/topics", json={"name": topic})
    assert (answer.status_code, code_of(answer)) == (409, "topic_exists")


def test_a_recreated_topic_is_empty(live: Live, topic: str) -> None:
    live.publish(topic, {"value": "old"})
    live.client.delete(f"/topics/{topic}")
    assert live.publish(topic, {"value": "new"}) == [(0, 0)]
    assert live.values(topic) == ["new"]


def test_settings_can_be_changed_and_reset(live: Live, topic: str) -> None:
    live.create(topic, retention_ms="1d")
    answer = live.client.patch(f"/topics/{topic}", json={"config": {"retention_ms": None, "max.message.bytes": 2048}})
    assert answer.status_code == 200
    assert answer.json()["overrides"] == {"batch_bytes_max": "2KB"}
    assert answer.json()["config"]["retention_ms"] == "7d"
    refused = live.client.post(f"/topics/{topic}/messages", json={"value": "x" * 3000})
    assert code_of(refused) == "message_too_large"


def test_partitions_can_be_added_but_not_removed(live: Live, topic: str) -> None:
    live.create(topic, partitions=2)
    answer = live.client.patch(f"/topics/{topic}", json={"partitions": 4})
    assert (answer.status_code, answer.json()["partitions"]) == (200, 4)
    assert live.publish(topic, {"value": 1, "partition": 3}) == [(3, 0)]
    answer = live.client.patch(f"/topics/{topic}", json={"partitions": 1})
    assert (answer.status_code, code_of(answer)) == (409, "conflict")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "malformed_json"),
        ({"name": 1}, "malformed_json"),
        ({"name": ""}, "invalid_input"),
        ({"name": "."}, "invalid_input"),
        ({"name": ".."}, "invalid_input"),
        ({"name": "../../etc/passwd"}, "invalid_input"),
        ({"name": "a b"}, "invalid_input"),
        ({"name": "a\0"}, "invalid_input"),
        ({"name": "é"}, "invalid_input"),
        ({"name": "a\n"}, "invalid_input"),
        ({"name": "x" * 250}, "invalid_input"),
        ({"name": "t", "partitions": 0}, "malformed_json"),
        ({"name": "t", "partitions": -1}, "malformed_json"),
        ({"name": "t", "partitions": "3"}, "malformed_json"),
        ({"name": "t", "partitions": 10**9}, "invalid_input"),
        ({"name": "t", "partitions": 10**30}, "malformed_json"),
        ({"name": "t", "config": []}, "malformed_json"),
        ({"name": "t", "config": {"nonsense": 1}}, "invalid_setting"),
        ({"name": "t", "config": {"data_dir": "/etc"}}, "invalid_setting"),
        ({"name": "t", "config": {"retention_ms": "soon"}}, "invalid_setting"),
        ({"name": "t", "config": {"retention_ms": True}}, "invalid_setting"),
        ({"name": "t", "config": {"segment_size": -5}}, "invalid_setting"),
        ({"name": "t", "config": {"write_mode": "never"}}, "invalid_setting"),
        ({"name": "t", "extra": 1}, "invalid_input"),
        ([], "malformed_json"),
    ],
)
def test_bad_topics_are_refused(live: Live, body: object, code: str) -> None:
    answer = live.client.post("/topics", json=body)
    assert (answer.status_code, code_of(answer)) == (400, code)
    assert all(topic["name"] != "t" for topic in live.get("/topics").json()["topics"])


@pytest.mark.parametrize(
    "name",
    [
        "..%2f..%2fetc", "%00", "a%00b", "x" * 300, "%2e%2e", "%2E", "a%20b", "%e4%bd%a0", "a%2fb",
        "%3Cimg%20src=x%20onerror=alert(1)%3E", "%24%7Bjndi%7D", "%25s", "a%0d%0ab",
    ],
)  # fmt: skip
def test_invalid_topic_names_are_refused_or_not_found(live: Live, name: str) -> None:
    for method, path in (
        ("GET", f"/topics/{name}"),
        ("GET", f"/topics/{name}/messages"),
        ("GET", f"/topics/{name}/offsets"),
        ("DELETE", f"/topics/{name}"),
        ("PATCH", f"/topics/{name}"),
        ("POST", f"/topics/{name}/messages"),
    ):
        answer = live.client.send(raw_request(live, method, path))
        assert answer.status_code in {400, 404}, (method, path, answer.text)
        code_of(answer)
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("name", ["%ff", "%c0%ae%c0%ae", "%ed%a0%80"])
def test_names_that_are_not_utf8_are_refused(live: Live, name: str) -> None:
    answer = live.client.send(raw_request(live, "GET", f"/topics/{name}"))
    assert (answer.status_code, code_of(answer)) == (400, "invalid_input")


def raw_request(live: Live, method: str, path: str) -> httpx.Request:
    """A request whose path httpx does not normalize."""
    content = b"{}" if method in {"PATCH", "POST"} else None
    request = live.client.build_request(method, "/", content=content)
    request.extensions["target"] = path.encode()
    return request


def test_streams_of_other_listeners_can_be_read_under_any_name(own: StartLive) -> None:
    """Queue names may have any characters; messages are read under the percent-encoded name."""
    server = own()
    name = "orders/eu west\t✓"

    async def make() -> None:
        stream = await server.broker.streams.create(name, kind="queue")
        await server.broker.publish(stream, [(b"k", b"v", (), None, -1)])

    server.call(make())
    answer = server.client.send(raw_request(server, "GET", "/topics/orders%2Feu%20west%09%E2%9C%93/messages"))
    assert answer.json()["messages"][0]["value"] == "v"
    detailed = server.get("/metrics/detailed").text
    assert 'topic="orders/eu west\t✓"' in detailed


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/topics", {"GET", "HEAD", "POST"}),
        ("DELETE", "/health", {"GET", "HEAD"}),
        ("OPTIONS", "/topics/t/messages", {"GET", "HEAD", "POST"}),
        ("TRACE", "/topics/t", {"GET", "HEAD", "PATCH", "DELETE"}),
    ],
)
def test_an_unsupported_method_is_refused_with_the_allowed_ones(
    live: Live, method: str, path: str, allowed: set[str]
) -> None:
    answer = live.request(method, path)
    assert (answer.status_code, code_of(answer)) == (405, "method_not_allowed")
    assert set(answer.headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize("path", ["/nope", "/topics/", "/topics/a/b/c/d", "/nope//", "/topics/a/messages/"])
def test_unknown_paths_are_not_found(live: Live, path: str) -> None:
    answer = live.get(path)
    assert (answer.status_code, code_of(answer)) == (404, "not_found")


def test_a_restart_keeps_topics_settings_and_messages(own: StartLive) -> None:
    server = own()
    server.create("t", partitions=2, retention_ms="2d")
    server.create("gone")
    places = server.publish("t", *({"value": str(i), "key": str(i)} for i in range(50)))
    server.client.delete("/topics/gone")
    described = server.get("/topics/t").json()
    server.stop()
    again = own()
    assert again.broker.report.clean
    assert again.get("/topics/t").json() == described
    assert [t["name"] for t in again.get("/topics").json()["topics"]] == ["t"]
    for i, (partition, offset) in enumerate(places):
        assert again.values("t", partition=partition, offset=offset, limit=1) == [str(i)]
    more = again.publish("t", {"value": "more", "partition": 0})
    assert more == [(0, sum(partition == 0 for partition, _ in places))]
