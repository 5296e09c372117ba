"""Requests over thousands of objects yield to the event loop."""

import asyncio

import pytest

from headrace.broker import cooperative
from headrace.broker.cooperative import STEP, YieldEvery
from tests.listeners.api.conftest import Served
from tests.listeners.api.test_api import post, put_queue

QUEUES = 10 * STEP


@pytest.fixture(scope="module")
def crowded(live: Served) -> Served:
    bindings = [
        {"source": "amq.topic", "vhost": "/", "destination": f"crowd-{n}", "destination_type": "queue",
         "routing_key": "k", "arguments": {}}
        for n in range(QUEUES)
    ]  # fmt: skip
    queues = [
        {"name": f"crowd-{n}", "vhost": "/", "durable": n % 2 == 0, "auto_delete": False, "arguments": {}}
        for n in range(QUEUES)
    ]
    answer = live.request("POST", "/api/definitions", json={"queues": queues, "bindings": bindings})
    assert answer.status_code == 204, answer.text
    return live


def counted_yields(monkeypatch: pytest.MonkeyPatch) -> list[YieldEvery]:
    yields: list[YieldEvery] = []
    maybe_yield = YieldEvery.maybe_yield

    async def counted(self: YieldEvery) -> None:
        yields.append(self)
        await maybe_yield(self)

    monkeypatch.setattr(YieldEvery, "maybe_yield", counted)
    monkeypatch.setattr(cooperative, "YIELD_EVERY_S", 0.0)
    return yields


@pytest.mark.parametrize(
    "path",
    [
        "/api/queues",
        "/api/queues?columns=name,messages",
        "/api/queues?page=1&name=crowd",
        "/api/queues?page=1&sort=messages",
        "/api/queues?page=1&sort=message_stats.publish",
        "/api/bindings",
        "/api/exchanges/%2F/amq.topic/bindings/source",
        "/api/definitions",
        "/api/vhosts",
        "/api/overview",
        "/api/headrace/overview",
        "/api/headrace/streams?page=1&sort=ready",
        "/topics",
        "/metrics",
        "/metrics/detailed",
    ],
)
def test_a_long_list_does_not_block_the_event_loop(crowded: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    yields = counted_yields(monkeypatch)
    assert crowded.get(path).status_code == 200
    assert len(yields) >= QUEUES / 2 / STEP, "half of the queues are durable, and so topics"


@pytest.mark.parametrize("kind", ["policies", "operator-policies"])
def test_applying_a_policy_to_many_queues_does_not_block_the_event_loop(
    crowded: Served, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response is sent only after the policy applies to all queues."""
    yields = counted_yields(monkeypatch)
    path, body = f"/api/{kind}/%2F/crowd", {"pattern": "^crowd-", "definition": {"max-length": 7}}
    name = "policy" if kind == "policies" else "operator_policy"
    for method, wanted in (("PUT", "crowd"), ("DELETE", None)):
        yields.clear()
        crowded.request(method, path, json=body if method == "PUT" else None).raise_for_status()
        assert len(yields) >= QUEUES / STEP
        found = [q[name] for q in crowded.get("/api/queues").json() if q["name"].startswith("crowd-")]
        assert len(found) == QUEUES and {value or None for value in found} == {wanted}


@pytest.mark.parametrize("asked", ["", "/messages?contains=nothing", "/replay"])
def test_scanning_many_dead_letters_does_not_block_the_event_loop(
    live: Served, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not asked:
        put_queue(live, "many.dead")
        for _ in range(QUEUES):
            post(live, "many.dead", "x", headers={"x-death": [{"queue": "many", "count": 1}]})
    yields = counted_yields(monkeypatch)
    method = "POST" if asked == "/replay" else "GET"
    answer = live.request(method, f"/api/headrace/dead-letters/%2F/many.dead{asked}")
    assert answer.status_code == 200, answer.text
    assert len(yields) >= 3


async def test_yielding_lets_other_tasks_run_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(cooperative, "_now", lambda: now)
    seen: list[object] = []
    asyncio.get_running_loop().call_soon(seen.append, "another")
    work = YieldEvery()
    await work.maybe_yield()
    assert seen == [], "not yet: this turn has only begun"
    now += cooperative.YIELD_EVERY_S * 2
    await work.maybe_yield()
    assert seen == ["another"]
    assert await work.map(str, range(100)) == [str(n) for n in range(100)]
    assert [n async for n in work.each(range(100))] == list(range(100))
