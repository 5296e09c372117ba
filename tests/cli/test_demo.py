"""`serve --demo`: its start-up lines, and traffic on every listener."""

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import httpx

from headrace import Client, Producer
from headrace.demo.shop import Shop
from tests.cli.running import PATIENCE_S, SMALL, Started, serving

FREE = ["--http", "localhost:0", "--amqp", "localhost:0", "--kafka", "localhost:0"]


def ask(url: str, path: str) -> Any:
    answer = httpx.get(url + path, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_demo_uses_all_listeners_and_stops_cleanly(tmp_path: Path) -> None:
    arguments = ["serve", "--demo", "--data-dir", str(tmp_path / "data"), *FREE, *SMALL]
    started = Started(arguments, JAVA_HOME="/nowhere")  # the pipeline has its own tests
    try:
        url = started.until(r"^http\s+(http://\S+)")[1]
        started.until(r"^ready$")
        assert len(started.lines) <= 12
        text = "".join(started.lines)
        assert f"{url}/" in text and "curl" in text and "confirmed means on disk" in text
        deadline = time.monotonic() + 2 * PATIENCE_S
        while True:
            streams = {row["name"]: row for row in ask(url, "/api/headrace/streams")}
            readers = [row["name"] for row in ask(url, "/api/headrace/readers")]
            dead = streams.get("orders.dead", {}).get("ready", 0)
            if dead > 0 and streams["orders"]["records"] > 20 and "audit" in readers:
                break
            assert time.monotonic() < deadline, (streams, readers)
            time.sleep(0.1)
        assert streams["orders"]["consumers"] == 1
        (letter, *_) = ask(url, "/api/headrace/dead-letters/%2F/orders.dead/messages")["messages"]
        assert letter["death"]["reason"] == "rejected"
    finally:
        code = started.stop(signal.SIGINT)
    assert code == 0, started.errors
    assert started.lines[-1] == "stopped; everything is on disk\n"


def test_the_demo_reports_a_conflicting_declaration(tmp_path: Path) -> None:
    """Regression: the broker closed the channel, and the demo waited for the reply for ever."""
    with serving(tmp_path / "data", "--amqp", "localhost:0") as broker:
        with Client(broker.url) as client:
            client.create_topic("orders", partitions=3)
        done = broker.run("demo", "--no-spark")
    assert done.returncode != 0
    assert b"orders" in done.stderr and b"Traceback" not in done.stderr


def test_the_audit_continues_at_the_log_start_after_retention(tmp_path: Path) -> None:
    """Regression: a demo restarted after an hour fetched the same deleted offset in a busy loop."""

    async def audit(port: int) -> None:
        shop = Shop(("localhost", 1), ("127.0.0.1", port), rate=1, say=print, login=None)
        auditing = asyncio.create_task(shop._audit())
        async with asyncio.timeout(PATIENCE_S):
            while shop.audited != 1:
                await asyncio.sleep(0.01)
        auditing.cancel()

    with serving(tmp_path / "data", "--kafka", "localhost:0") as broker:
        with Producer("orders", broker.url) as producer:
            producer.send("gone")
            producer.send("kept")
        removed = httpx.delete(f"{broker.url}/topics/orders/partitions/0/records?before=1", timeout=PATIENCE_S)
        assert removed.status_code == 204, removed.text
        asyncio.run(audit(int(ask(broker.url, "/status")["listeners"]["kafka"][0].rpartition(":")[2])))
