"""Celery, as it comes: worker and client against our listener, nothing configured for us."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.listeners.amqp.running import Running, eventually

pytestmark = pytest.mark.filterwarnings("ignore")
WORKER_PATIENCE_S = 60


class Worker:
    def __init__(self, environment: dict[str, str], folder: Path, *options: str) -> None:
        self._log = folder / "worker.txt"
        command = [
            sys.executable, "-m", "celery", "-A", "tests.interop.amqp.celery_app", "worker", "--loglevel", "INFO",
            "--concurrency", "1", "-n", f"{folder.name}@test", *options,
        ]  # fmt: skip
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=output, stderr=output, start_new_session=True,
                cwd=Path(__file__).parents[3],
            )  # fmt: skip
        try:
            eventually(lambda: " ready." in self._log.read_text() or self.process.poll() is not None)
            assert self.process.poll() is None
        except AssertionError as error:
            self.stop()
            raise AssertionError(f"the worker did not start:\n{self._log.read_text()}") from error

    def kill(self) -> None:
        os.killpg(self.process.pid, 9)
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(WORKER_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.kill()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    running = Running(tmp_path_factory.mktemp("celery") / "data")
    yield {"TEST_BROKER": f"amqp://guest:guest@127.0.0.1:{running.port}//"}
    running.stop()


@pytest.fixture(scope="module")
def app(environment: dict[str, str]) -> Iterator[Any]:
    os.environ.update(environment)
    from tests.interop.amqp import celery_app

    yield celery_app
    results = celery_app.app.backend.result_consumer
    if results._consumer is not None:
        results.stop()  # or its socket is collected in the midst of some other test
    celery_app.app.pool.force_close_all()
    celery_app.app.close()


@pytest.fixture(scope="module")
def worker(environment: dict[str, str], app: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(environment, tmp_path_factory.mktemp("worker"))
    yield made
    made.stop()


@pytest.mark.usefixtures("worker")
def test_rpc_results_are_returned(app: Any) -> None:
    results = [app.add.delay(n, n) for n in range(20)]
    assert [result.get(timeout=WORKER_PATIENCE_S) for result in results] == [2 * n for n in range(20)]


@pytest.mark.usefixtures("worker")
def test_a_task_that_fails_is_retried_until_it_succeeds(app: Any) -> None:
    assert app.flaky.delay(2).get(timeout=WORKER_PATIENCE_S) == 2


@pytest.mark.usefixtures("worker")
def test_a_backlog_of_eta_tasks_does_not_starve_the_worker(app: Any, tmp_path: Path) -> None:
    """Tasks for later fill the prefetch window; Celery widens it, and the broker must follow at once."""
    for _ in range(10):
        app.note.apply_async((str(tmp_path / "later"), "x"), countdown=3600)
    assert app.add.delay(1, 2).get(timeout=WORKER_PATIENCE_S) == 3
    app.note.apply_async((str(tmp_path / "soon"), "done"), countdown=0.3)
    eventually(lambda: (tmp_path / "soon").exists())
    assert not (tmp_path / "later").exists()


@pytest.mark.usefixtures("worker")
def test_inspect_events_and_revoke_reach_the_worker(app: Any, tmp_path: Path) -> None:
    inspect = app.app.control.inspect(timeout=2)
    assert list(eventually(inspect.ping).values()) == [{"ok": "pong"}]
    eventually(lambda: "celery" in str(inspect.active_queues()))  # a busy worker answers later than it is waited for
    result = app.note.apply_async((str(tmp_path / "never"), "x"), countdown=3)
    result.revoke()
    eventually(lambda: result.id in str(inspect.revoked()))
    assert "task-succeeded" in events_of(app)


def events_of(app: Any) -> list[str]:
    """Kinds of events, up to the first success. Tasks are sent repeatedly, because events before the receiver's
    queue is bound are lost."""
    seen: list[str] = []
    done = threading.Event()

    def send() -> None:
        while not done.wait(0.3):
            app.add.delay(1, 1)

    def on_event(event: dict[str, Any]) -> None:
        seen.append(event["type"])
        receiver.should_stop = event["type"] == "task-succeeded"

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with app.app.connection() as connection:
            receiver = app.app.events.Receiver(connection, handlers={"*": on_event})
            receiver.capture(limit=None, timeout=WORKER_PATIENCE_S, wakeup=False)
    finally:
        done.set()
        sender.join()
    return seen


def test_the_higher_priority_is_worked_on_first(app: Any, environment: dict[str, str], tmp_path: Path) -> None:
    for word, priority in [("low", 0), ("high", 9), ("middle", 5), ("low", 0), ("high", 9)]:
        app.note.apply_async((str(tmp_path / "notes"), word), priority=priority, queue="ordered")
    with app.app.connection() as connection:  # not the connection of the tasks, which uses no confirms
        channel = connection.channel()
        eventually(lambda: channel.queue_declare("ordered", passive=True).message_count == 5, "all tasks are there")
    worker = Worker(environment, tmp_path, "-Q", "ordered", "--without-gossip", "--without-mingle")
    try:
        notes = eventually(lambda: _lines(tmp_path / "notes", 5))
    finally:
        worker.stop()
    assert notes == ["high", "high", "middle", "low", "low"]


def test_a_task_whose_worker_was_killed_is_done_by_the_next(
    app: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "notes"
    app.slow_note.apply_async((str(path), "a", 30), queue="killed")
    first = Worker(environment, tmp_path, "-Q", "killed", "--without-gossip", "--without-mingle")
    try:
        eventually(lambda: _lines(path, 1))
    finally:
        first.kill()
    (tmp_path / "second").mkdir()
    second = Worker(environment, tmp_path / "second", "-Q", "killed", "--without-gossip", "--without-mingle")
    try:
        assert eventually(lambda: _lines(path, 2))[:2] == ["begin a", "begin a"]
    finally:
        second.kill()


def test_a_chord_joins_its_parts(app: Any, environment: dict[str, str], tmp_path: Path) -> None:
    """The rpc backend has no chords, so this one keeps its results in files."""
    (tmp_path / "results").mkdir()
    backend = {"TEST_BACKEND": f"file://{tmp_path / 'results'}"}
    worker = Worker({**environment, **backend}, tmp_path, "-Q", "chords")
    script = (
        "from celery import chord\n"
        "from tests.interop.amqp.celery_app import add, total\n"
        "parts = [add.s(n, n).set(queue='chords') for n in range(5)]\n"
        "print(chord(parts)(total.s().set(queue='chords')).get(timeout=100))\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script], env={**os.environ, **environment, **backend},
            capture_output=True, timeout=150, cwd=Path(__file__).parents[3], check=False,
        )  # fmt: skip
    finally:
        worker.stop()
    assert done.stdout.strip() == b"20", done.stderr.decode()


def _lines(path: Path, count: int) -> list[str] | None:
    lines = path.read_text().splitlines() if path.exists() else []
    return lines if len(lines) >= count else None
