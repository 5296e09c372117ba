"""Standbys at the HTTP listener: access, malformed requests, and publishes that wait for confirmation."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.broker.access.permissions import EVERYTHING
from headrace.broker.standbys import Standbys
from headrace.clock import ManualClock
from headrace.errors import InvalidInput
from headrace.log.disk.disk import RealDisk
from headrace.log.settings import LogSettings
from headrace.log.standby.frames import Frame, FrameReader, Kind
from tests.listeners.amqp.running import eventually
from tests.listeners.http.live import Live, StartLive, code_of

ODD: list[dict[str, Any]] = [{"name": ""}, {"copy": 1}, {"format": 2}, {"kept": []}, {"kept": {"a": [1]}}]
HELLO: dict[str, Any] = {"name": "second", "copy": "one", "format": 1, "kept": {}}
PASSWORD = "no-password-of-anybody-else"


class Follower:
    """Reads the frames of a change stream, on its own connection, until it ends."""

    def __init__(self, live: Live, **options: Any) -> None:
        self._live = live
        self._options = options
        self.frames: list[Frame] = []
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        reader = FrameReader()
        address = f"{self._live.base}/standby/stream"
        with (
            contextlib.suppress(httpx.HTTPError),  # the broker stopped first
            httpx.stream("POST", address, json=HELLO, timeout=60, **self._options) as answer,
        ):
            assert answer.status_code == 200
            for data in answer.iter_bytes():
                self.frames += reader.feed(data)
        self.is_over.set()

    def last(self) -> int:
        return self.frames[-1].sequence

    def wait_in_step(self) -> None:
        eventually(lambda: any(frame.kind == Kind.IN_STEP for frame in self.frames), "not in step")


def test_a_standby_must_be_an_administrator(live: Live) -> None:
    users = live.broker.users
    elsewhere = {"x-forwarded-for": "203.0.113.7"}  # refused even while guest is the only user
    assert live.request("POST", "/standby/stream", json=HELLO, headers=elsewhere).status_code == 401
    live.call(users.put_user("reader", password=PASSWORD, tags=["monitoring"]))
    live.call(users.set_permission("/", "reader", EVERYTHING))
    login = ("reader", PASSWORD)
    assert live.request("POST", "/standby/stream", json=HELLO, auth=login).status_code == 403
    assert live.request("PUT", "/standby/x", json={"position": 1}, auth=login).status_code == 403
    assert live.request("POST", "/standby/stream", json=HELLO, auth=("reader", "wrong")).status_code == 401
    assert live.get("/standby", auth=login).json()["standbys"] == []


@pytest.mark.parametrize(
    "hello",
    [{}, *({**HELLO, **odd} for odd in ODD)],
    ids=str,
)
def test_a_malformed_hello_is_refused(live: Live, hello: dict[str, Any]) -> None:
    assert live.request("POST", "/standby/stream", json=hello).status_code == 400
    assert live.get("/standby").json()["standbys"] == []


def test_an_unknown_standby_gets_404(live: Live) -> None:
    answer = live.request("PUT", "/standby/nobody", json={"position": 1})
    assert answer.status_code == 404 and code_of(answer) == "not_found"
    assert live.request("PUT", "/standby/nobody", json={"at": 1}).status_code == 400


def test_standbys_can_confirm_while_the_memory_budget_is_used_up(live: Live) -> None:
    budget = live.listener.context.budget
    size = budget.bytes_max
    budget.add("a publisher", size)
    try:
        assert live.request("PUT", "/standby/nobody", json={"position": 1}).status_code == 404
        assert live.request("POST", "/standby/stream", json={**HELLO, "name": ""}).status_code == 400
    finally:
        budget.add("a publisher", -size)


def test_changes_have_higher_numbers_after_a_restart(tmp_path: Path) -> None:
    """A takeover compares positions: a standby that was away must not look more recent."""
    clock = ManualClock()
    nothing: Any = None

    def standbys() -> Standbys:
        return Standbys(nothing, nothing, RealDisk(), str(tmp_path), clock, wanted=0, memory_bytes_max=1 << 30)

    before = standbys().changes
    clock.advance(1)
    after = standbys().changes
    assert before is not None and after is not None
    assert after.sequence > before.sequence + 100_000


def test_a_broker_with_a_separate_tier_refuses_standbys(own: StartLive, tmp_path: Path) -> None:
    live = own(log=LogSettings(journal_file_bytes=1 << 20, tier_dir=str(tmp_path / "elsewhere")))
    answer = live.request("POST", "/standby/stream", json=HELLO)
    assert answer.status_code == 409 and "tier_dir" in answer.json()["detail"]


def test_standby_confirms_is_refused_with_a_separate_tier(own: StartLive, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="standby_confirms: archived segments are in"):
        own(log=LogSettings(journal_file_bytes=1 << 20, tier_dir=str(tmp_path / "elsewhere")), standby_confirms=1)


def test_the_change_stream_ends_when_the_tag_administrator_is_removed(own: StartLive) -> None:
    live = own(log=LogSettings(journal_file_bytes=1 << 20))
    live.call(live.broker.users.put_user("second", password=PASSWORD, tags=["administrator"]))
    follower = Follower(live, auth=("second", PASSWORD))
    follower.wait_in_step()
    live.call(live.broker.users.put_user("second", password=PASSWORD, tags=[]))
    assert follower.is_over.wait(60)
    assert live.get("/standby").json()["standbys"] == []


def test_a_reconnecting_copy_is_not_counted_twice(own: StartLive) -> None:
    """The first connection may be dead, which only the standby has noticed."""
    live = own(log=LogSettings(journal_file_bytes=1 << 20), standby_confirms=2)
    first = Follower(live)
    first.wait_in_step()
    gone = live.get("/standby").json()["standbys"][0]["id"]
    assert live.request("PUT", f"/standby/{gone}", json={"position": first.last()}).status_code == 200
    again = Follower(live)
    assert first.is_over.wait(60)
    again.wait_in_step()
    (only,) = live.get("/standby").json()["standbys"]
    live.request("PUT", f"/standby/{only['id']}", json={"position": again.last()})
    assert live.request("PUT", f"/standby/{gone}", json={"position": again.last()}).status_code == 404
    assert live.get("/standby").json()["in_step"] == 1
    assert "1 of 2 are in step" in live.get("/health").json()["reason"]


def test_a_publish_is_confirmed_when_the_standby_has_it(own: StartLive) -> None:
    live = own(log=LogSettings(journal_file_bytes=1 << 20), standby_confirms=1)
    assert "0 of 1 are in step" in live.get("/health").json()["reason"]
    answers: list[Any] = []

    def publish() -> None:
        answers.append(live.publish("t", {"value": "x"}))

    publisher = threading.Thread(target=publish)
    publisher.start()  # creates the topic, too
    follower = Follower(live)
    follower.wait_in_step()
    name = live.get("/standby").json()["standbys"][0]["id"]
    while publisher.is_alive():
        assert live.request("PUT", f"/standby/{name}", json={"position": follower.last()}).status_code == 200
        publisher.join(0.02)
    assert answers == [[(0, 0)]]
    state = live.get("/standby").json()
    assert state["in_step"] == 1 and state["standbys"][0]["state"] == "in step"
    assert live.get("/health").status_code == 200


def test_a_stop_does_not_wait_forever_for_standbys_and_confirms_nothing(own: StartLive) -> None:
    live = own(log=LogSettings(journal_file_bytes=1 << 20), standby_confirms=1, stop_timeout_ms=500)
    answers: list[Any] = []

    def publish() -> None:
        try:
            answers.append(httpx.post(f"{live.base}/topics/t/messages", json=[{"value": "y"}], timeout=60))
        except httpx.HTTPError:  # disconnected
            answers.append(None)

    waiting = threading.Thread(target=publish)
    waiting.start()
    eventually(lambda: live.get("/standby").json()["waiting"], "no request waits")
    live.stop()
    waiting.join(60)
    assert answers == [None] or answers[0].status_code >= 500
