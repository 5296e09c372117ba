"""Following what comes to a queue or topic: what was left out is counted, and an end is said."""

from typing import Any

import pytest

from headrace.doors.http.api import browse
from tests.doors.api.conftest import Served

STREAMS = "/api/headrace/streams/%2F"


@pytest.mark.parametrize("durable", [True, False])
def test_following_ends_with_the_queue(live: Served, durable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browse, "HEARTBEAT_S", 0.1)  # when a queue in memory is missed at the latest
    queue = "/api/queues/%2F/ending"
    live.request("PUT", queue, json={"durable": durable})
    with live.events(f"{STREAMS}/ending/stream") as events:
        live.request("DELETE", queue)
        live.request("PUT", queue, json={"durable": durable})  # another one
        name, _, data = next(events)
        assert name == "error" and "ending" in data["detail"]
        assert next(events, None) is None
    live.request("DELETE", queue)


def test_following_goes_on_to_partitions_that_are_added(live: Served) -> None:
    live.create("growing")
    with live.events(f"{STREAMS}/growing/stream") as events:
        assert live.request("PATCH", "/topics/growing", json={"partitions": 3}).status_code == 200
        for partition in (0, 2):
            live.publish("growing", {"value": f"to {partition}", "partition": partition})
        seen: list[dict[str, Any]] = []
        while len(seen) < 2:
            seen += next(events)[2]["messages"]
    assert sorted((one["partition"], one["value"]["text"]) for one in seen) == [(0, "to 0"), (2, "to 2")]


def test_of_large_messages_that_come_together_none_is_left_out_unsaid(live: Served) -> None:
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
