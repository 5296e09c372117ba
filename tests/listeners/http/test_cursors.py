"""Named cursors over HTTP."""

import httpx
import pytest

from tests.listeners.http.live import Live, StartLive, code_of


def put(live: Live, cursor: str, topic: str, **fields: object) -> httpx.Response:
    offsets = fields.pop("offsets", {0: 0})
    assert isinstance(offsets, dict)
    partitions = [{"partition": p, "offset": o} for p, o in offsets.items()]
    return live.client.put(f"/cursors/{cursor}", json={"topic": topic, "partitions": partitions, **fields})


def test_a_cursor_moves_and_shows_its_lag(live: Live, topic: str) -> None:
    live.create(topic, partitions=2)
    live.publish(topic, *({"value": 1, "partition": p} for p in (0, 0, 0, 1)))
    answer = put(live, topic, topic, offsets={0: 1, 1: 0})
    assert answer.status_code == 200
    assert answer.json()["lag"] == 3
    assert live.get(f"/cursors/{topic}").json() == answer.json()
    assert answer.json()["topics"] == [
        {
            "topic": topic,
            "partitions": [
                {"partition": 0, "offset": 1, "start": 0, "end": 3, "lag": 2},
                {"partition": 1, "offset": 0, "start": 0, "end": 1, "lag": 1},
            ],
        }
    ]
    assert put(live, topic, topic, offsets={1: 1}).json()["lag"] == 2  # other partitions stay
    assert topic in [cursor["name"] for cursor in live.get("/cursors").json()["cursors"]]


def test_one_cursor_may_read_several_topics(live: Live, topic: str) -> None:
    for name in ("x", "y"):
        live.publish(topic + name, {"value": 1})
        put(live, topic, topic + name)
    assert [t["topic"] for t in live.get(f"/cursors/{topic}").json()["topics"]] == [topic + "x", topic + "y"]


def test_a_deleted_cursor_is_gone(live: Live, topic: str) -> None:
    live.publish(topic, {"value": 1})
    put(live, topic, topic)
    assert live.client.delete(f"/cursors/{topic}").status_code == 204
    assert code_of(live.get(f"/cursors/{topic}")) == "cursor_not_found"
    assert code_of(live.client.delete(f"/cursors/{topic}")) == "cursor_not_found"


def test_cursors_and_pins_survive_a_restart_but_not_a_recreated_topic(own: StartLive) -> None:
    server = own()
    server.publish("t", *({"value": i} for i in range(5)))
    server.publish("other", {"value": 1})
    put(server, "job", "t", offsets={0: 3}, pin=True, max_age_ms=-1)
    put(server, "both", "t", offsets={0: 1})
    put(server, "both", "other", offsets={0: 1})
    before = server.get("/cursors").json()
    server.stop()
    again = own()
    assert again.get("/cursors").json() == before
    assert again.broker.streams.get("t").partitions[0].log.pins == {"cursor:job": 3}
    again.client.delete("/topics/t")
    again.publish("t", {"value": "another stream"})
    assert [c["name"] for c in again.get("/cursors").json()["cursors"]] == ["both"]
    assert [t["topic"] for t in again.get("/cursors/both").json()["topics"]] == ["other"]


def test_cursor_names_may_contain_any_characters(live: Live, topic: str) -> None:
    live.publish(topic, {"value": 1})
    assert put(live, "a%2Fb%20%E2%9C%93", topic).json()["name"] == "a/b ✓"
    assert live.get("/cursors/a%2Fb%20%E2%9C%93").status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "malformed_json"),
        ({"topic": "cursors-bad"}, 400, "malformed_json"),
        ({"topic": "cursors-bad", "partitions": []}, 400, "malformed_json"),
        ({"topic": "cursors-bad", "partitions": [{}]}, 400, "malformed_json"),
        ({"topic": "cursors-bad", "partitions": [{"partition": 0, "offset": -1}]}, 400, "malformed_json"),
        ({"topic": "cursors-bad", "partitions": [{"partition": 0, "offset": None}]}, 400, "malformed_json"),
        ({"topic": "cursors-bad", "partitions": [{"partition": 0, "offset": 0}] * 2}, 400, "malformed_json"),
        ({"topic": "cursors-bad", "partitions": [{"partition": 0, "offset": 9}]}, 416, "offset_out_of_range"),
        ({"topic": "cursors-bad", "partitions": [{"partition": 9, "offset": 0}]}, 404, "partition_not_found"),
        ({"topic": "nope", "partitions": [{"partition": 0, "offset": 0}]}, 404, "topic_not_found"),
        (
            {"topic": "cursors-bad", "partitions": [{"partition": 0, "offset": 0}], "pin": 1},
            400,
            "malformed_json",
        ),
        ({"topic": "cursors-bad", "partitions": [{"partition": 0, "offset": 0}], "x": 1}, 400, "invalid_input"),
        (
            {"topic": "cursors-bad", "partitions": [{"partition": 0, "offset": 0}], "max_age_ms": -2},
            400,
            "malformed_json",
        ),
    ],
)
def test_bad_cursors_are_refused(live: Live, body: object, status: int, code: str) -> None:
    live.publish("cursors-bad", {"value": 1})
    answer = live.client.put("/cursors/bad", json=body)
    assert (answer.status_code, code_of(answer)) == (status, code)
    assert live.get("/cursors/bad").status_code == 404


def test_a_name_that_is_too_long_is_refused(live: Live, topic: str) -> None:
    live.publish(topic, {"value": 1})
    assert code_of(put(live, "x" * 256, topic)) == "invalid_input"
