"""Leases over HTTP: leased segments stay readable unchanged."""

from typing import Any

import pytest

from tests.listeners.http.live import Live, code_of

RANGE = {"partition": 0, "start": 0, "end": 9}


def lease(live: Live, **fields: Any) -> Any:
    return live.client.post("/leases", json={"for_ms": 60_000} | fields)


def test_a_lease_of_offsets_returns_their_segments(live: Live, topic: str) -> None:
    live.publish(topic, {"value": 1}, {"value": 2})
    answer = lease(live, ranges=[{"topic": topic, **RANGE}], holder=topic).json()
    assert answer["ranges"] == [{"segments": [{"segment": 0, "generation": 0, "next_offset": 2}]}]
    batches = f"/topics/{topic}/partitions/0/batches"
    planned = live.get(f"{batches}?offset=0&segment=0&generation=0")
    assert planned.content == live.get(f"{batches}?offset=0").content and planned.content
    assert planned.headers["headrace-next-offset"] == "2"
    assert live.get(f"{batches}?offset=2&segment=0&generation=0").content == b""
    assert code_of(live.get(f"{batches}?offset=3&segment=0&generation=0")) == "offset_out_of_range"
    assert code_of(live.get(f"{batches}?offset=0&segment=0&generation=1")) == "segment_gone"
    assert code_of(live.get(f"{batches}?offset=0&segment=0")) == "invalid_input"
    assert code_of(live.get(f"{batches}?offset=0&segment=0&generation=0&wait=1s")) == "invalid_input"


def test_a_removed_segment_is_readable_only_through_an_earlier_lease(live: Live, topic: str) -> None:
    live.publish(topic, {"value": 1}, {"value": 2})
    lease(live, ranges=[{"topic": topic, **RANGE}], holder=topic)
    live.client.delete(f"/topics/{topic}/partitions/0/records?before=1")
    planned = f"/topics/{topic}/partitions/0/batches?offset=0&segment=0&generation=0"
    assert live.get(planned).content
    assert lease(live, ranges=[], holder=topic).status_code == 200
    assert code_of(live.get(planned)) == "offset_out_of_range"


def test_a_lease_lists_missing_segments(live: Live, topic: str) -> None:
    live.publish(topic, {"value": 1})
    log = live.get(f"/topics/{topic}/log").json()["partitions"][0]["log"]
    there, gone = ({"log": log, "segment": 0, "generation": number} for number in (0, 7))
    assert lease(live, slices=[there, gone], holder=topic).json()["gone"] == [gone]
    elsewhere = {"log": 1 << 40, "segment": 0, "generation": 0}
    assert lease(live, slices=[elsewhere]).json()["gone"] == [elsewhere]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, "malformed_json"),
        ({"slices": [], "ranges": []}, "malformed_json"),
        ({"ranges": {}}, "malformed_json"),
        ({"ranges": [{"topic": "x"}]}, "malformed_json"),
        ({"ranges": [{"topic": 1, **RANGE}]}, "malformed_json"),
        ({"ranges": [{"topic": "x", **RANGE, "start": None}]}, "malformed_json"),
        ({"ranges": [{"topic": "leases-nowhere", **RANGE}]}, "topic_not_found"),
        ({"ranges": [], "holder": ""}, "invalid_input"),
        ({"ranges": [], "more": 1}, "malformed_json"),
    ],
)
def test_a_malformed_lease_is_refused(live: Live, fields: dict[str, Any], code: str) -> None:
    assert code_of(lease(live, **fields)) == code
