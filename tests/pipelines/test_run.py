"""`headrace pipeline` as people use it: in a process of its own, watched, stopped, and killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.pipelines.java import JavaMissing, check_java, parse_version
from headrace.pipelines.sample import SAMPLE
from tests.spark.world import RunningBroker, numbered, wait_until

QUICK = "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

COPY = '''
from headrace.pipelines import Pipeline, Sink, Source

pipeline = Pipeline(
    "copy",
    sources={"numbers": Source("in", options={"maxOffsetsPerTrigger": "1500"})},
    sinks={"out": Sink("out")},
    trigger="100ms",
)


def same(value):
    return value


@pipeline.flow(to="out")
def copy(numbers):
    from pyspark.sql.functions import udf

    return numbers.select("key", udf(same, "binary")("value").alias("value"))
'''


@pytest.fixture(autouse=True)
def java() -> None:
    try:
        check_java()
    except JavaMissing as missing:
        pytest.skip(f"Spark: {missing}")


class Command:
    """A headrace command in a session of its own, so that everything it starts can be found and killed."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._said = folder / "command.txt"
        environment = dict(os.environ, PYTHONWARNINGS="ignore")
        with self._said.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from headrace.cli import main; main()", *arguments],
                stdout=output, stderr=output, cwd=folder, start_new_session=True, env=environment,
            )  # fmt: skip

    def said(self) -> str:
        return self._said.read_text(errors="replace")[-6000:]

    def check(self) -> bool:
        assert self._process.poll() is None, self.said()
        return True

    def wait(self, seconds: float = 120) -> int:
        return self._process.wait(seconds)

    def terminate(self) -> None:
        self._process.terminate()

    def kill_tree(self) -> None:
        """Driver, JVM and Python workers at once, as a machine that loses power to them."""
        for _ in range(2):  # one that was just being born is caught by the second look
            for pid in _session(self._process.pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self._process.wait(30)


def _session(leader: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if os.getsid(int(entry.name)) == leader:
                    yield int(entry.name)
            except ProcessLookupError:
                continue


def headrace(broker: RunningBroker, *arguments: str) -> str:
    command = [sys.executable, "-c", "from headrace.cli import main; main()", *arguments, "--url", broker.url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_sample_runs_as_it_is_written_and_stops_when_asked(broker: RunningBroker, tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text(SAMPLE)
    broker.create("orders")
    broker.publish("orders", [{"value": '{"customer": "ann", "amount": 12.5}'}, {"value": "this is not JSON"}])
    run = Command(tmp_path, "pipeline", "run", "sample.py", "--url", broker.url, "-c", QUICK)
    try:
        wait_until(lambda: run.check() and _last(broker, "totals") is not None, "no total came out", 120)
        assert _last(broker, "totals") == {"customer": "ann", "total": 12.5, "orders": 1}
        broker.publish("orders", [{"value": '{"customer": "ann", "amount": 2000}'}])
        expected = {"customer": "ann", "total": 2012.5, "orders": 2}
        wait_until(lambda: run.check() and _last(broker, "totals") == expected, "the total did not change")
        wait_until(lambda: run.check() and broker.count("large-orders") == 1, "the large order is missing")
        wait_until(lambda: run.check() and broker.count("orders.dead") == 1, "the bad record is missing")
        [dead] = broker.messages("orders.dead")
        assert dead["value"] == "this is not JSON" and "not JSON" in dead["headers"]["headrace.error"]

        wait_until(lambda: "running" in headrace(broker, "pipeline", "ls"), "it is not listed as running")
        assert json.loads(headrace(broker, "pipeline", "status", "orders", "--json"))["details"]["rows_total"] >= 1
        flows = broker.ok("GET", "/pipelines/orders")["details"]["flows"]
        drawn = {name: (flow["sources"], flow["stages"], flow["sink"]) for name, flow in flows.items()}
        assert drawn == {
            "totals": (["orders"], ["select", "filter", "select", "aggregate", "select"], "totals"),
            "totals.dead": (["orders"], ["select", "filter", "select"], "orders.dead"),
            "large_orders": (["orders"], ["select", "filter", "select", "filter", "select"], "large-orders"),
        }
        assert flows["totals"]["state_rows"] == 1 and flows["totals"]["phases_ms"]["addBatch"] > 0
        assert all(flow["input_rows_per_second"] >= 0 for flow in flows.values())
        assert {c["name"] for c in broker.ok("GET", "/cursors")["cursors"]} == {
            "orders.totals.orders", "orders.large_orders.orders",
        }  # fmt: skip
        headrace(broker, "pipeline", "stop", "orders")
        assert run.wait() == 0, run.said()
        assert broker.ok("GET", "/pipelines/orders")["state"] == "stopped"
    finally:
        run.kill_tree()


def _last(broker: RunningBroker, topic: str) -> object:
    if topic not in {t["name"] for t in broker.ok("GET", "/topics")["topics"]}:
        return None
    found = broker.messages(topic)
    return json.loads(found[-1]["value"]) if found else None


def test_killing_everything_three_times_neither_loses_nor_repeats_a_record(
    broker: RunningBroker, tmp_path: Path
) -> None:
    (tmp_path / "numbers_copy.py").write_text(COPY)
    broker.create("in", 2)
    broker.create("out", 2)
    total = 30_000
    broker.publish("in", numbered(total, keys=1000))
    arguments = ("pipeline", "run", "numbers_copy.py", "--url", broker.url, "-c", QUICK)
    for kill in range(3):
        before = broker.count("out")
        run = Command(tmp_path, *arguments)
        try:
            goal = before + 3000
            wait_until(lambda goal=goal, run=run: run.check() and broker.count("out") >= goal, "no progress", 120)
        finally:
            run.kill_tree()
        if kill == 1:
            broker.kill()
            broker.start()
    assert broker.count("out") < total, "it was over before the last kill: the test proves too little"
    run = Command(tmp_path, *arguments, "--once")
    try:
        assert run.wait(180) == 0, run.said()
    finally:
        run.kill_tree()
    for partition in (0, 1):
        assert [m["value"] for m in broker.messages("out", partition)] == [
            m["value"] for m in broker.messages("in", partition)
        ]


def test_java_is_asked_for_in_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaMissing, match="JAVA_HOME points to no Java"):
        check_java()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").write_text('#!/bin/sh\necho \'java version "1.8.0_292"\' >&2\n')
    (tmp_path / "bin" / "java").chmod(0o755)
    with pytest.raises(JavaMissing, match="is Java 8"):
        check_java()
    assert parse_version('openjdk version "21.0.2" 2024-01-16') == 21
    answer = subprocess.run(
        [sys.executable, "-c", "from headrace.cli import main; main()", "pipeline", "run", "x.py"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 1 and answer.stderr.startswith("headrace: Spark needs Java 17"), answer.stderr
