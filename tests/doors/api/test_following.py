"""Following what comes to a queue or topic: what was left out is counted, and an end is said."""

import pytest

from tests.doors.api.conftest import Served

STREAMS = "/api/headrace/streams/%2F"


@pytest.mark.parametrize("durable", [True, False])
def test_following_ends_with_the_queue(live: Served, durable: bool) -> None:
    queue = "/api/queues/%2F/ending"
    live.request("PUT", queue, json={"durable": durable})
    with live.events(f"{STREAMS}/ending/stream") as events:
        live.request("DELETE", queue)
        live.request("PUT", queue, json={"durable": durable})  # another one
        name, _, data = next(events)
        assert name == "error" and "ending" in data["detail"]
        assert next(events, None) is None
    live.request("DELETE", queue)
