"""kill -9, thirty times, under load from several producers and readers: no confirmed message is lost, no message that
was read disappears, none is duplicated or reordered (L1 to L5, L7)."""

import os
import random
import time
from pathlib import Path

import pytest

from tests.crash.broker_process import HANG_SECONDS_MAX, HttpBroker, Load, drain, request
from tests.crash.checker import History, check

ROUNDS = int(os.environ.get("HEADRACE_KILL_ROUNDS", "30"))
SEED = int(os.environ.get("HEADRACE_SEED", "20261115"))
TOPICS = {"orders": 1, "clicks": 3}
# Small files and frequent checkpoints, so that kills hit rolls, checkpoints and recycled journal files.
OPTIONS = ("--segment-size", "64KB", "--journal-file-size", "256KB", "--checkpoint-interval", "100ms")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_log_invariants_hold_after_thirty_kills_under_load(tmp_path: Path) -> None:
    print(f"seed {SEED}: HEADRACE_SEED={SEED} pytest {os.path.relpath(__file__)}")
    rng = random.Random(SEED)
    history = History()
    broker = HttpBroker(tmp_path, *OPTIONS)
    try:
        history.boot()
        broker.start()
        for topic, partitions in TOPICS.items():
            body = {"name": topic, "partitions": partitions}
            status, answer = request(broker.port, "POST", "/topics", body)
            assert status in (200, 201), answer
        load = Load(broker.port, history, SEED, TOPICS)
        load.start()
        for _ in range(ROUNDS):
            wait_for_progress(load)
            time.sleep(rng.random() * 0.5)  # only varies the moment of the kill
            broker.kill()
            history.boot()
            broker.start()
        wait_for_progress(load)
        load.stop()
        assert not load.failures, load.failures
        total = drain(broker.port, history, TOPICS)
        violations = check(history)
        if violations:
            history.save(str(tmp_path / "history.jsonl"))
        assert not violations, (str(tmp_path / "history.jsonl"), [str(v) for v in violations[:20]])
        print(f"{ROUNDS} kills, {load.confirmed} confirmed, {load.read} read, {total} found at the end")
        assert broker.stop() == 0
        broker.start()
        assert drain(broker.port, History(), TOPICS) == total
    finally:
        broker.close()


def wait_for_progress(load: Load, seconds: float = HANG_SECONDS_MAX) -> None:
    """Wait until the broker confirms messages and serves readers again."""
    confirmed, read = load.confirmed, load.read
    deadline = time.monotonic() + seconds
    while load.confirmed < confirmed + 50 or load.read < read + 10:
        assert not load.failures, load.failures
        assert time.monotonic() < deadline, "no progress after a restart"
        time.sleep(0.01)
