"""The Celery application of the tests. Broker and result backend come from the environment."""

import os
import time
from typing import Any

from celery import Celery

app = Celery("tests", broker=os.environ["TEST_BROKER"], backend=os.environ.get("TEST_BACKEND", "rpc://"))
app.conf.update(
    worker_prefetch_multiplier=1,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_queue_max_priority=10,
    task_default_priority=3,
    worker_send_task_events=True,
    task_send_sent_event=True,
    broker_connection_retry_on_startup=True,
    result_expires=600,
    worker_hijack_root_logger=False,
    worker_cancel_long_running_tasks_on_connection_loss=False,
)


@app.task
def add(a: int, b: int) -> int:
    return a + b


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(bind=True, max_retries=3)
def flaky(self: Any, succeed_at: int) -> int:
    if self.request.retries < succeed_at:
        raise self.retry(countdown=0.1)
    return int(self.request.retries)


@app.task
def note(path: str, word: str) -> None:
    with open(path, "a") as file:
        file.write(word + "\n")


@app.task
def slow_note(path: str, word: str, seconds: float) -> None:
    with open(path, "a") as file:
        file.write(f"begin {word}\n")
    time.sleep(seconds)
    with open(path, "a") as file:
        file.write(f"end {word}\n")
