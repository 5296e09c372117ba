"""Dead letters: browsing, dry runs, and replays that are stopped, killed and resumed."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.broker.queues.dead_letter_browser import DeadLetterBrowser
from headrace.broker.streams import browse
from headrace.log.commit.committer import Committer
from tests.cli.running import Broker as Process
from tests.listeners.amqp.running import eventually
from tests.listeners.api.conftest import Api, Served
from tests.listeners.api.test_api import depth, post, put_queue, take
from tests.listeners.api.test_readers import rot

OFFICE = "/api/headrace/dead-letters/%2F"


def make_mortal(live: Api, name: str) -> None:
    """A queue with NAME.dead as its dead-letter queue."""
    put_queue(live, f"{name}.dead")
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{name}.dead"}
    put_queue(live, name, **arguments)


def kill_all(live: Api, name: str) -> None:
    while take(live, name, "reject_requeue_false", 1000):
        pass


def replay(live: Api, name: str, **wish: Any) -> dict[str, Any]:
    answer = live.request("POST", f"{OFFICE}/{name}/replay", json=wish)
    assert answer.status_code in (200, 202), answer.text
    return dict(answer.json())


def ended(live: Api, begun: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        now = live.get(f"/api/headrace/replays/{begun['id']}").json()
        if now["state"] != "running":
            return dict(now)
        assert time.monotonic() < deadline, now
        time.sleep(0.02)


@pytest.mark.parametrize("time", ["yesterday", [1], {"at": 1}, 1.5, None])
def test_a_death_header_forged_by_a_client_is_shown_and_replayed(live: Served, time: Any) -> None:
    make_mortal(live, "made-up")
    death = {"queue": "made-up", "reason": "rejected", "count": "many", "time": time, "routing-keys": "k"}
    post(live, "made-up.dead", "x", headers={"x-death": [death]})
    seen = live.get(f"{OFFICE}/made-up.dead")
    assert [group["origin"] for group in seen.json()["groups"]] == ["made-up"]
    assert live.get(f"{OFFICE}/made-up.dead/messages").json()["messages"][0]["death"]["time"] == 0
    assert ended(live, replay(live, "made-up.dead", dry_run=False))["state"] == "done"
    assert [found["payload"] for found in take(live, "made-up")] == ["x"]


def test_dead_letters_are_summarized_by_origin_and_reason(live: Served) -> None:
    make_mortal(live, "told")
    for number in range(3):
        post(live, "told", f"order {number}")
    kill_all(live, "told")
    listed = live.get("/api/headrace/dead-letters?name=told.dead").json()
    assert [(queue["name"], queue["sources"]) for queue in listed] == [("told.dead", ["told"])]
    seen = live.get(f"{OFFICE}/told.dead").json()
    (group,) = seen["groups"]
    assert (group["origin"], group["reason"], group["messages"], group["deaths_max"]) == ("told", "rejected", 3, 1)
    (first, *_) = live.get(f"{OFFICE}/told.dead/messages").json()["messages"]
    assert first["value"] == {"text": "order 0"} and first["death"]["queue"] == "told"
    assert depth(live, "told.dead") == 3, "looking changes nothing"


def test_a_dead_letter_after_large_ones_is_found(live: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request scans some megabytes, and the next continues there."""
    monkeypatch.setattr(browse, "SCAN_BYTES_MAX", 1000)
    make_mortal(live, "bulky")
    for value in ("x" * 3000, "y" * 3000, "the one", "z" * 3000):
        post(live, "bulky", value)
        kill_all(live, "bulky")
    found = live.get(f"{OFFICE}/bulky.dead/messages?contains=the one").json()["messages"]
    assert [message["value"]["text"] for message in found] == ["the one"]
    assert len(live.get(f"{OFFICE}/bulky.dead/messages").json()["messages"]) == 4
    assert replay(live, "bulky.dead")["matched"] == 4


def test_a_replay_is_a_dry_run_by_default(live: Served) -> None:
    make_mortal(live, "dry")
    post(live, "dry", "a")
    kill_all(live, "dry")
    assert replay(live, "dry.dead") == {"dry_run": True, "matched": 1, "targets": {"dry": 1}, "missing": {}, "gaps": []}
    assert (depth(live, "dry"), depth(live, "dry.dead")) == (0, 1)


def test_dead_letters_around_damage_are_shown_and_replayed(live: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    make_mortal(live, "rotting")
    for number in range(6):
        post(live, "rotting", str(number))
        kill_all(live, "rotting")  # each a batch of its own
    rot(live, monkeypatch, "rotting.dead", range(2, 4))
    gap = {"partition": 0, "start": 2, "end": 4, "reason": "a file is damaged at byte 1,234: a test"}
    seen = live.get(f"{OFFICE}/rotting.dead").json()
    assert [group["messages"] for group in seen["groups"]] == [4] and seen["gaps"] == [gap]
    shown = live.get(f"{OFFICE}/rotting.dead/messages").json()
    assert [one["offset"] for one in shown["messages"]] == [0, 1, 4, 5] and shown["gaps"] == [gap]
    planned = replay(live, "rotting.dead")
    assert planned["matched"] == 4 and planned["gaps"] == [gap]
    done = ended(live, replay(live, "rotting.dead", dry_run=False))
    assert (done["state"], done["moved"]) == ("failed", 4) and "at offsets 2 to 3 cannot be read" in done["error"]
    assert [found["payload"] for found in take(live, "rotting")] == ["0", "1", "4", "5"]
    assert depth(live, "rotting.dead") == 2


def test_a_replay_returns_messages_in_order_and_once(live: Served) -> None:
    make_mortal(live, "back")
    for number in range(20):
        post(live, "back", f"{number}", headers={"kept": True})
    kill_all(live, "back")
    done = ended(live, replay(live, "back.dead", dry_run=False))
    assert (done["state"], done["moved"], done["skipped"]) == ("done", 20, 0)
    assert depth(live, "back.dead") == 0
    messages = take(live, "back")
    assert [m["payload"] for m in messages] == [str(n) for n in range(20)]
    headers: Any = messages[0]["properties"]["headers"]  # type: ignore[index]
    assert headers["kept"] is True and headers["x-replays"] == 1 and headers["x-death"][0]["count"] == 1


def test_a_replay_can_be_limited_filtered_and_redirected(live: Served) -> None:
    make_mortal(live, "some")
    put_queue(live, "elsewhere")
    for number in range(10):
        post(live, "some", f"{'odd' if number % 2 else 'even'} {number}")
    kill_all(live, "some")
    wish = {"contains": "odd", "count": 2, "to": "elsewhere"}
    assert replay(live, "some.dead", **wish)["targets"] == {"elsewhere": 2}
    done = ended(live, replay(live, "some.dead", dry_run=False, **wish))
    assert done["moved"] == 2
    assert [m["payload"] for m in take(live, "elsewhere")] == ["odd 1", "odd 3"]
    assert replay(live, "some.dead", reason="expired")["matched"] == 0
    assert replay(live, "some.dead", origin="some")["matched"] == 8


def test_dead_letters_of_deleted_queues_stay(live: Served) -> None:
    make_mortal(live, "gone")
    post(live, "gone", "x")
    kill_all(live, "gone")
    live.request("DELETE", "/api/queues/%2F/gone")
    assert replay(live, "gone.dead")["missing"] == {"gone": 1}
    done = ended(live, replay(live, "gone.dead", dry_run=False))
    assert (done["moved"], done["skipped"], depth(live, "gone.dead")) == (0, 1, 1)


def test_messages_that_die_again_are_not_replayed_again(live: Served) -> None:
    make_mortal(live, "circle")
    post(live, "circle", "x")
    kill_all(live, "circle")
    ended(live, replay(live, "circle.dead", dry_run=False))
    kill_all(live, "circle")
    (group,) = live.get(f"{OFFICE}/circle.dead").json()["groups"]
    assert (group["messages"], group["deaths_max"]) == (1, 2)


def test_a_slow_replay_can_be_stopped(live: Served) -> None:
    make_mortal(live, "slow")
    for number in range(50):
        post(live, "slow", str(number))
    kill_all(live, "slow")
    begun = replay(live, "slow.dead", dry_run=False, rate=1)
    stopped = live.request("DELETE", f"/api/headrace/replays/{begun['id']}").json()
    assert stopped["state"] == "stopped" and stopped["moved"] < 50
    assert depth(live, "slow") + depth(live, "slow.dead") == 50


def test_a_replay_counts_only_durable_messages(live: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    make_mortal(live, "held")
    for number in range(3):
        post(live, "held", str(number))
    kill_all(live, "held")
    disk = threading.Event()
    disk.set()
    move, commit = DeadLetterBrowser._move_some, Committer.commit

    def move_and_hold(*arguments: Any) -> Any:
        disk.clear()
        return move(*arguments)

    def commit_later(*arguments: Any) -> Any:
        assert disk.wait(60)
        return commit(*arguments)

    monkeypatch.setattr(DeadLetterBrowser, "_move_some", move_and_hold)
    monkeypatch.setattr(
        Committer, "plan", lambda *_: None
    )  # all rounds go through the worker thread, which the test can block
    monkeypatch.setattr(Committer, "commit", commit_later)
    try:
        begun = replay(live, "held.dead", dry_run=False)
        eventually(lambda: not disk.is_set())
        now = live.get(f"/api/headrace/replays/{begun['id']}").json()
        assert (now["state"], now["moved"], depth(live, "held")) == ("running", 0, 0)
    finally:
        monkeypatch.undo()
        disk.set()
    done = ended(live, begun)
    assert (done["moved"], depth(live, "held"), depth(live, "held.dead")) == (3, 3, 0)


def test_malformed_requests_are_refused(live: Served) -> None:
    make_mortal(live, "nonsense")
    for wish in ({"count": 0}, {"rate": -1}, {"to": 5}, {"contains": 1}, {"dry_run": "maybe"}):
        assert live.request("POST", f"{OFFICE}/nonsense.dead/replay", json=wish).status_code == 400
    nowhere = live.request("POST", f"{OFFICE}/nonsense.dead/replay", json={"to": "no", "dry_run": False})
    assert nowhere.status_code == 404
    assert live.request("POST", f"{OFFICE}/none/replay", json={}).status_code == 404


class Remote:
    """A broker in its own process, which can be killed."""

    def __init__(self, folder: Path) -> None:
        self.process = Process(folder)
        self.client = httpx.Client(base_url=self.process.url, timeout=60)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.client.request(method, path, **options)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.client.close()
        return self.process.stop(number)


def test_a_replay_interrupted_by_a_kill_continues_without_loss_or_duplicates(tmp_path: Path) -> None:
    count = int(os.environ.get("HEADRACE_REPLAY_MESSAGES", "3000"))
    folder = tmp_path / "data"
    first = Remote(folder)
    try:
        make_mortal(first, "many")
        for at in range(0, count, 1000):
            body = [{"value": str(number)} for number in range(at, min(at + 1000, count))]
            assert first.request("POST", "/topics/many/messages", json=body).status_code == 200
        kill_all(first, "many")
        begun = replay(first, "many.dead", dry_run=False, rate=max(1000, count // 2))
        while first.get(f"/api/headrace/replays/{begun['id']}").json()["moved"] < count // 4:
            time.sleep(0.005)
    finally:
        first.stop(signal.SIGKILL)
    second = Remote(folder)
    try:
        done = ended(second, begun)
        assert done["state"] == "done", done
        assert depth(second, "many.dead") == 0
        found = []
        while messages := take(second, "many", count=1000):
            found += [int(str(message["payload"])) for message in messages]
        assert found == sorted(found) and found == list(range(count))
    finally:
        assert second.stop() == 0


@pytest.fixture(scope="module", autouse=True)
def no_leftovers(live: Served) -> None:
    assert live.get("/api/headrace/replays").json() == []
