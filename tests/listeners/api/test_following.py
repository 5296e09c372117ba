"""Following a queue or topic: skipped messages are counted, and the end is reported."""

from typing import Any

import pytest

from headrace.listeners.http.management import browse
from tests.listeners.api.conftest import Served

STREAMS = "/api/headrace/streams/%2F"


@pytest.mark.parametrize("durable", [True, False])
def test_following_ends_when_the_queue_is_deleted(live: Served, durable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        browse, "HEARTBEAT_S", 0.1
    )  # the latest time at which the deletion of an in-memory queue is noticed
    queue = "/api/queues/%2F/ending"
    live.request("PUT", queue, json={"durable": durable})
    with live.events(f"{STREAMS}/ending/stream") as events:
        live.request("DELETE", queue)
        live.request("PUT", queue, json={"durable": durable})  # another one
        name, _, data = next(events)
        assert name == "error" and "ending" in data["detail"]
        assert next(events, None) is None
    live.request("DELETE", queue)


def test_following_includes_added_partitions(live: Served) -> None:
    live.create("growing")
    with live.events(f"{STREAMS}/growing/stream") as events:
        assert live.request("PATCH", "/topics/growing", json={"partitions": 3}).status_code == 200
        for partition in (0, 2):
            live.publish("growing", {"value": f"to {partition}", "partition": partition})
        seen: list[dict[str, Any]] = []
        while len(seen) < 2:
            seen += next(events)[2]["messages"]
    assert sorted((one["partition"], one["value"]["text"]) for one in seen) == [(0, "to 0"), (2, "to 2")]


def test_large_messages_that_arrive_together_are_sent_or_counted_as_skipped(live: Served) -> None:
    live.create("heavy")
    with live.events(f"{STREAMS}/heavy/stream") as events:
        live.publish("heavy", *({"value": f"{n:02d}" + "x" * 100_000} for n in range(90)))
        numbers: list[int] = []
        skipped = 0
        while len(numbers) + skipped < 90:
            data = next(events)[2]
            numbers += [one["offset"] for one in data["messages"]]
            skipped += data["skipped"]
    assert numbers == sorted(set(numbers)) and numbers[-1] == 89


def test_a_reconnecting_follower_resumes(live: Served) -> None:
    """A browser reconnects with the last event id, after a restart of the broker or a proxy."""
    live.create("resumed", 2)
    with live.events(f"{STREAMS}/resumed/stream") as events:
        live.publish("resumed", {"value": "first", "partition": 1})
        _, last, data = next(events)
        assert [one["value"]["text"] for one in data["messages"]] == ["first"]
    for partition in (0, 1):
        live.publish("resumed", {"value": f"meanwhile {partition}", "partition": partition})
    with live.events(f"{STREAMS}/resumed/stream", headers={"last-event-id": last}) as events:
        seen = [one["value"]["text"] for _ in range(2) for one in next(events)[2]["messages"]]
    assert sorted(seen) == ["meanwhile 0", "meanwhile 1"]


@pytest.mark.parametrize("last", ["", "x", "1,2,3,4", "-1,-1", "99999999999999999999,1", "٣,٤", "5"])
def test_an_unknown_event_id_starts_at_the_end(live: Served, last: str) -> None:
    live.request("POST", "/topics", json={"name": "unsaid", "partitions": 2})
    live.publish("unsaid", {"value": "old", "partition": 0})
    headers = {"last-event-id": last.encode()}
    with live.events(f"{STREAMS}/unsaid/stream", headers=headers) as events:
        live.publish("unsaid", {"value": f"new {last}", "partition": 0})
        assert [one["value"]["text"] for one in next(events)[2]["messages"]] == [f"new {last}"]
