"""Backup and restore as described in docs/operating.md: copies of the folder of a stopped and of a paused broker."""

import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.running import PATIENCE_S, Broker

OFFICE = "/api/queues/%2F/work"


def publish(client: httpx.Client, first: int, count: int) -> None:
    body = [{"value": f"order {number}"} for number in range(first, first + count)]
    client.post("/topics/orders/messages", json=body).raise_for_status()


def orders(client: httpx.Client) -> list[str]:
    """Reads page by page, because a page may end before the last message."""
    found: list[str] = []
    offset = 0
    while True:
        page = client.get("/topics/orders/messages", params={"limit": 10_000, "offset": offset})
        messages = page.raise_for_status().json()["messages"]
        if not messages:
            return found
        found += [message["value"] for message in messages]
        offset = page.json()["next_offset"]


def asking(broker: Broker) -> httpx.Client:
    return httpx.Client(base_url=broker.url, timeout=PATIENCE_S)


def stand_still(process: subprocess.Popen[str]) -> None:
    """Sends SIGSTOP and waits until all threads have stopped."""
    process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{process.pid}/task")
    deadline = time.monotonic() + PATIENCE_S
    while any(state_of(task) != "T" for task in tasks.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def state_of(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    made = Broker(tmp_path / "data")
    yield made
    if made.process.poll() is None:
        made.stop(signal.SIGKILL)


def fill(client: httpx.Client) -> None:
    """A topic with a cursor, and a queue with one acknowledged and two ready messages."""
    publish(client, 0, 500)
    cursor = {"topic": "orders", "partitions": [{"partition": 0, "offset": 123}]}
    client.put("/cursors/reader", json=cursor).raise_for_status()
    client.put(OFFICE, json={"durable": True, "arguments": {}}).raise_for_status()
    for text in ("done", "left", "right"):
        message: dict[str, object] = {
            "routing_key": "work",
            "payload": text,
            "payload_encoding": "string",
            "properties": {},
        }
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


def test_a_copy_of_a_stopped_brokers_folder_has_everything(tmp_path: Path, broker: Broker) -> None:
    with asking(broker) as client:
        fill(client)
    assert broker.stop() == 0
    shutil.copytree(tmp_path / "data", tmp_path / "restored")
    restored = Broker(tmp_path / "restored")
    try:
        assert any("clean stop" in line for line in restored.lines), restored.lines
        with asking(restored) as client:
            check(client, 500)
            assert orders(client) == [f"order {number}" for number in range(501)]
    finally:
        assert restored.stop() == 0


def test_a_copy_of_a_paused_brokers_folder_has_everything_confirmed(tmp_path: Path, broker: Broker) -> None:
    """kill -STOP, copy, kill -CONT: the copy looks like the folder of a killed broker, which loses nothing."""
    confirmed = 500
    going = True

    def work() -> None:
        nonlocal confirmed
        with asking(broker) as one:
            while going:
                publish(one, confirmed, 7)
                confirmed += 7

    with asking(broker) as client:
        fill(client)
        busy = threading.Thread(target=work)
        busy.start()
        while confirmed < 1000:
            assert busy.is_alive()
            client.get("/health").raise_for_status()
        stand_still(broker.process)
        try:
            then = confirmed
            shutil.copytree(tmp_path / "data", tmp_path / "copy")
        finally:
            broker.process.send_signal(signal.SIGCONT)
        while confirmed < then + 70:
            assert busy.is_alive(), "the publisher kept its connection"
            client.get("/health").raise_for_status()
        going = False
        busy.join()
        assert orders(client) == [f"order {number}" for number in range(confirmed)]
    restored = Broker(tmp_path / "copy")
    try:
        with asking(restored) as client:
            check(client, then)
    finally:
        assert restored.stop() == 0
