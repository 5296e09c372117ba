"""Backup and restore as docs/operating.md says: a copy of a stopped folder, and of one whose broker stands still."""

import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.running import Broker

OFFICE = "/api/queues/%2F/work"


def publish(client: httpx.Client, first: int, count: int) -> None:
    body = [{"value": f"order {number}"} for number in range(first, first + count)]
    client.post("/topics/orders/messages", json=body).raise_for_status()


def orders(client: httpx.Client) -> list[str]:
    answer = client.get("/topics/orders/messages?limit=10000").raise_for_status()
    return [message["value"] for message in answer.json()["messages"]]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    made = Broker(tmp_path / "data")
    yield made
    if made.process.poll() is None:
        made.stop(signal.SIGKILL)


def fill(client: httpx.Client) -> None:
    """A topic, a cursor in it, and a queue with one message acknowledged and two that wait."""
    publish(client, 0, 500)
    cursor = {"topic": "orders", "partitions": [{"partition": 0, "offset": 123}]}
    client.put("/cursors/reader", json=cursor).raise_for_status()
    client.put(OFFICE, json={"durable": True, "arguments": {}}).raise_for_status()
    for text in ("done", "left", "right"):
        message = {"routing_key": "work", "payload": text, "payload_encoding": "string", "properties": {}}
        client.post("/api/exchanges/%2F/amq.default/publish", json=message).raise_for_status()
    take = {"count": 1, "ackmode": "ack_requeue_false", "encoding": "auto"}
    assert client.post(f"{OFFICE}/get", json=take).json()[0]["payload"] == "done"


def check(client: httpx.Client, confirmed: int) -> None:
    found = orders(client)
    assert found[:confirmed] == [f"order {number}" for number in range(confirmed)]
    assert client.get("/cursors/reader").json()["topics"][0]["partitions"][0]["offset"] == 123
    take = {"count": 10, "ackmode": "ack_requeue_true", "encoding": "auto"}
    assert [m["payload"] for m in client.post(f"{OFFICE}/get", json=take).json()] == ["left", "right"]
    publish(client, len(found), 1)
    assert orders(client)[-1] == f"order {len(found)}", "the copy goes on where it stands"


def test_the_copy_of_a_stopped_folder_is_the_broker_as_it_was(tmp_path: Path, broker: Broker) -> None:
    with httpx.Client(base_url=broker.url) as client:
        fill(client)
    assert broker.stop() == 0
    shutil.copytree(tmp_path / "data", tmp_path / "restored")
    restored = Broker(tmp_path / "restored")
    try:
        assert any("clean stop" in line for line in restored.lines), restored.lines
        with httpx.Client(base_url=restored.url) as client:
            check(client, 500)
            assert orders(client) == [f"order {number}" for number in range(501)]
    finally:
        assert restored.stop() == 0


def test_the_copy_of_a_broker_that_stands_still_has_all_that_was_confirmed(tmp_path: Path, broker: Broker) -> None:
    """kill -STOP, copy, kill -CONT: to the copy it is as if the broker had been killed, and that loses nothing."""
    confirmed = 500
    going = True

    def work() -> None:
        nonlocal confirmed
        with httpx.Client(base_url=broker.url, timeout=60) as busy:
            while going:
                publish(busy, confirmed, 7)
                confirmed += 7

    with httpx.Client(base_url=broker.url, timeout=60) as client:
        fill(client)
        busy = threading.Thread(target=work)
        busy.start()
        while confirmed < 1000:
            client.get("/health").raise_for_status()
        broker.process.send_signal(signal.SIGSTOP)
        try:
            then = confirmed
            shutil.copytree(tmp_path / "data", tmp_path / "copy")
        finally:
            broker.process.send_signal(signal.SIGCONT)
        while confirmed < then + 70:  # nobody lost the connection
            client.get("/health").raise_for_status()
        going = False
        busy.join()
        assert orders(client) == [f"order {number}" for number in range(confirmed)]
    restored = Broker(tmp_path / "copy")
    try:
        with httpx.Client(base_url=restored.url) as client:
            check(client, then)
    finally:
        assert restored.stop() == 0
