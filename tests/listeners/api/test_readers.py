"""Consumer groups, cursors, streams and messages, as the dashboard and the command line request them."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer

from headrace.demo.kafka import KafkaClient
from headrace.errors import CorruptLog
from headrace.log.log import Log
from tests.listeners.api.conftest import Served
from tests.listeners.api.test_api import post, put_queue, take

READERS = "/api/headrace/readers"


def commit(live: Served, group: str, topic: str, offset: int) -> None:
    """Commits like a Kafka client that is not a member of the group."""

    async def work() -> None:
        host, _, port = live.kafka.rpartition(":")
        client = await KafkaClient.connect(host, int(port))
        await client.commit(group, topic, offset)
        await client.close()

    asyncio.run(work())


@pytest.fixture
def member(live: Served) -> Iterator[Any]:
    consumer = Consumer({"bootstrap.servers": live.kafka, "group.id": "living", "auto.offset.reset": "earliest"})
    yield consumer
    consumer.close()


def test_a_kafka_group_is_listed_with_its_lag_and_reset_after_a_dry_run(live: Served) -> None:
    live.publish("lagging", *({"value": str(n)} for n in range(10)))
    commit(live, "billing", "lagging", 4)
    (listed,) = live.get(f"{READERS}?name=billing").json()
    assert (listed["kind"], listed["lag"], listed["topics"]) == ("group", 6, ["lagging"])
    wish = {"topic": "lagging", "to": "shift", "shift": -3}
    plan = live.request("POST", f"{READERS}/group/billing/reset", json=wish).json()
    assert plan["dry_run"] is True and plan["moves"][0] | {"again": 3, "from": 4, "to": 1} == plan["moves"][0]
    assert live.get(f"{READERS}/group/billing").json()["lag"] == 6
    done = live.request("POST", f"{READERS}/group/billing/reset", json={**wish, "dry_run": False})
    assert done.status_code == 200 and live.get(f"{READERS}/group/billing").json()["positions"][0]["offset"] == 1
    views = live.get("/api/headrace/streams/%2F/lagging").json()["views"]
    assert {"kind": "group", "name": "billing", "lag": 9, "pin": False} in views
    assert live.request("DELETE", f"{READERS}/group/billing").status_code == 204
    assert live.get(f"{READERS}/group/billing").status_code == 404


def test_a_group_with_members_cannot_be_reset(live: Served, member: Any) -> None:
    live.publish("busy", {"value": "x"})
    member.subscribe(["busy"])
    message = None
    while message is None:
        message = member.poll(10)
    member.commit(asynchronous=False)
    (listed,) = live.get(f"{READERS}?name=living").json()
    assert listed["members"] == 1
    wish = {"topic": "busy", "to": "earliest", "dry_run": False}
    refused = live.request("POST", f"{READERS}/group/living/reset", json=wish)
    assert refused.status_code == 400 and "has 1 members" in refused.json()["reason"]


def test_an_invalid_reset_is_refused(live: Served) -> None:
    live.publish("sense", {"value": "x"})
    commit(live, "sensible", "sense", 0)
    for wish in (
        {},
        {"topic": "sense", "to": "noon"},
        {"topic": "sense", "to": "offset"},
        {"topic": "sense", "partitions": 0},
    ):
        assert live.request("POST", f"{READERS}/group/sensible/reset", json=wish).status_code == 400, wish
    assert live.request("POST", f"{READERS}/group/nobody/reset", json={"topic": "sense"}).status_code == 404
    assert live.request("POST", f"{READERS}/group/sensible/reset", json={"topic": "none"}).status_code == 404


def test_browsing_shows_the_state_of_each_message_of_a_queue(live: Served) -> None:
    put_queue(live, "states")
    for number in range(4):
        post(live, "states", str(number), headers={"n": number})
    take(live, "states", count=2)
    path = "/api/headrace/streams/%2F/states/messages"
    found = live.get(path).json()
    assert [m["state"] for m in found["messages"]] == ["settled", "settled", "ready", "ready"]
    assert found["messages"][3]["amqp"]["properties"]["headers"] == {"n": 3}
    assert [m["offset"] for m in live.get(f"{path}?offset=2&limit=1").json()["messages"]] == [2]
    assert [m["offset"] for m in live.get(f"{path}?contains=3").json()["messages"]] == [3]
    assert live.get(f"{path}?partition=1").status_code == 404
    assert live.get(f"{path}?limit=0").status_code == 400


def test_queues_in_memory_and_in_other_vhosts_are_browsed_too(live: Served) -> None:
    live.request("PUT", "/api/vhosts/side")
    live.request("PUT", "/api/queues/side/fleeting", json={"durable": False})
    body = {"routing_key": "fleeting", "payload": "gone soon", "payload_encoding": "string", "properties": {}}
    assert live.request("POST", "/api/exchanges/side/amq.default/publish", json=body).json()["routed"]
    (message,) = live.get("/api/headrace/streams/side/fleeting/messages").json()["messages"]
    assert message["value"] == {"text": "gone soon"}
    live.request("DELETE", "/api/vhosts/side")


def test_new_messages_are_followed_as_events(live: Served) -> None:
    put_queue(live, "tailed")
    with live.events("/api/headrace/streams/%2F/tailed/stream") as events:
        post(live, "tailed", "news")
        seen: list[str] = []
        while not seen:
            _, _, data = next(events)
            seen = [message["value"]["text"] for message in data["messages"]]
        assert seen == ["news"]


def test_aborted_messages_are_not_shown(live: Served) -> None:
    live.create("undone")
    producer = Producer({"bootstrap.servers": live.kafka, "transactional.id": "undone", "linger.ms": 0})
    producer.init_transactions(60)
    streams = "/api/headrace/streams/%2F/undone"
    with live.events(f"{streams}/stream") as events:
        for value, end in (("taken back", producer.abort_transaction), ("stays", producer.commit_transaction)):
            producer.begin_transaction()
            producer.produce("undone", value)
            producer.flush(60)
            end(60)
        followed: list[str] = []
        while "stays" not in followed:
            followed += [message["value"]["text"] for message in next(events)[2]["messages"]]
    assert followed == ["stays"]
    for query in ("", "?contains=a"):
        browsed = live.get(f"{streams}/messages{query}").json()["messages"]
        assert [message["value"]["text"] for message in browsed] == ["stays"]
    got = live.request("POST", "/api/queues/%2F/undone/get", json={"count": 5}).json()
    assert [message["payload"] for message in got] == ["stays"]


def test_live_numbers_are_sent_as_events(live: Served) -> None:
    with live.events("/api/headrace/overview/stream") as events:
        _, first_id, first = next(events)
        _, second_id, _ = next(events)
    assert int(second_id) > int(first_id)
    assert {"rates", "ready", "sync_ms", "alarms", "listeners", "counts"} <= first.keys()
    history = live.get("/api/headrace/overview").json()["history"]
    assert len({len(column) for column in history.values()}) == 1


def rot(live: Served, patch: pytest.MonkeyPatch, topic: str, *gaps: range) -> None:
    """Makes these offsets unreadable, as in damaged batches."""
    rotten = live.broker.streams.get(topic).partitions[0].log
    read_now, search_now = Log.read_now, Log.offset_for_timestamp_now

    def read(log: Log, offset: int, *arguments: Any, end: int | None = None) -> Any:
        for gap in gaps if log is rotten else ():
            if offset in gap:
                raise CorruptLog("a file", 1234, "a test")
            if offset < gap.start:
                end = min(end or gap.start, gap.start)
        return read_now(log, offset, *arguments, end=end)

    def search(log: Log, timestamp_ms: int, start: int = 0) -> Any:
        found = search_now(log, timestamp_ms, start)
        for gap in gaps if log is rotten else ():
            if found is None or start <= gap.start <= found[0]:
                damage = CorruptLog("a file", 1234, "a test")
                damage.offset = gap.start
                raise damage
        return found

    patch.setattr(Log, "read_now", read)
    patch.setattr(Log, "offset_for_timestamp_now", search)
    patch.setattr(Log, "next_readable_now", lambda _, offset: next(gap.stop for gap in gaps if offset in gap))


def test_browsing_skips_damage_and_reports_it(live: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        live.publish("rotten", {"value": str(number), "timestamp": 1000 + number})
    rot(live, monkeypatch, "rotten", range(3, 5), range(9, 10))
    path = "/api/headrace/streams/%2F/rotten/messages"
    for query in ("", "?offset=0", "?contains=", "?offset=0&limit=7"):
        found = live.get(path + query).json()
        assert [one["offset"] for one in found["messages"]] == [0, 1, 2, 5, 6, 7, 8], query
    reason = "a file is damaged at byte 1,234: a test"
    assert found["gaps"] == [{"start": 3, "end": 5, "reason": reason}] and found["next"] == 9
    behind = live.get(f"{path}?offset=9").json()
    assert behind["messages"] == [] and behind["gaps"] == [{"start": 9, "end": 10, "reason": reason}]
    assert behind["next"] == behind["end"] == 10
    by_time = live.get(f"{path}?timestamp=1004").json()
    assert [one["offset"] for one in by_time["messages"]] == [5, 6, 7, 8] and by_time["from"] == 5
    assert [(gap["start"], gap["end"]) for gap in by_time["gaps"]] == [(3, 5), (9, 10)]
    monkeypatch.undo()
    rot(live, monkeypatch, "rotten", *(range(odd, odd + 1) for odd in range(1, 10, 2)))
    holes = live.get(path).json()
    assert [gap["start"] for gap in holes["gaps"]] == [1, 3, 5, 7] and holes["next"] == 8, "then comes the next page"


def test_following_reports_damage_and_continues_after_it(live: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    live.publish("followed-rot", {"value": "0"})
    path = "/api/headrace/streams/%2F/followed-rot/stream"
    for number in range(1, 6):
        live.publish("followed-rot", {"value": str(number)})
    rot(live, monkeypatch, "followed-rot", range(2, 4))
    with live.events(path, headers={"last-event-id": "1"}) as events:
        seen = next(events)[2]
        assert [one["offset"] for one in seen["messages"]] == [1, 4, 5] and seen["partition"] == 0
        assert [(gap["start"], gap["end"]) for gap in seen["gaps"]] == [(2, 4)]
        live.publish("followed-rot", {"value": "6"})
        assert [one["offset"] for one in next(events)[2]["messages"]] == [6]


def test_browsing_reports_where_a_damaged_log_ends(live: Served) -> None:
    for number in range(3):
        live.publish("cut", {"value": str(number)})

    async def damage() -> None:
        live.broker.streams.get("cut").partitions[0].log.damaged_from(2, CorruptLog("a file", 7, "a test"))

    live.call(damage())
    found = live.get("/api/headrace/streams/%2F/cut/messages").json()
    assert [one["offset"] for one in found["messages"]] == [0, 1]
    assert found["gaps"] == [{"start": 2, "end": None, "reason": "a file is damaged at byte 7: a test"}]
