"""`headrace pipeline` in its own process: watched, stopped and killed."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace.pipelines import Pipeline, Sink, Source
from headrace.pipelines import run as pipeline_run
from headrace.pipelines.java import JavaMissing, check_java, parse_version
from headrace.pipelines.load import load_pipeline
from headrace.pipelines.run import START_ATTEMPTS, BrokerEndpoint, PipelineFailed, PipelineRunner
from headrace.pipelines.sample import SAMPLE
from tests.listing import listed
from tests.spark.world import QUICK, RunningBroker, numbered, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# PySpark warns about pandas 3 even where it does not use it.
pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")

START_S_MAX = 400  # for a new session on a busy machine
COPY = """
import time

from headrace.pipelines import Pipeline, Sink, Source

pipeline = Pipeline(
    "copy",
    sources={"numbers": Source("in", options={"maxOffsetsPerTrigger": "1500"})},
    sinks={"out": Sink("out")},
    trigger="100ms",
)


def same(value):
    while int(value) >= LIMIT:  # stops here until it is killed
        time.sleep(0.1)
    return value


@pipeline.flow(to="out")
def copy(numbers):
    from pyspark.sql.functions import udf

    return numbers.select("key", udf(same, "binary")("value").alias("value"))
"""


@pytest.fixture(autouse=True)
def java() -> None:
    try:
        check_java()
    except JavaMissing as missing:
        pytest.skip(f"Spark: {missing}")


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Runs a function in a thread meanwhile."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


class Command:
    """A headrace command in its own process group, so that everything it starts can be found and killed."""

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

    def wait(self, seconds: float = 300) -> int:
        return self._process.wait(seconds)

    def terminate(self) -> None:
        self._process.terminate()

    def kill_tree(self) -> None:
        """Kills driver, JVM and Python workers at once, like a power failure."""
        for _ in range(2):  # the second pass catches a process that was just being started
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
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_the_sample_runs_unchanged_and_stops_on_request(
    broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.delenv(name)  # let the session choose the Python of its workers
    (tmp_path / "sample.py").write_text(SAMPLE)
    broker.create("orders")
    broker.publish("orders", [{"value": '{"customer": "ann", "amount": 12.5}'}, {"value": "this is not JSON"}])
    run = Command(tmp_path, "pipeline", "run", "sample.py", "--url", broker.url, "-c", QUICK)
    try:
        wait_until(
            lambda: run.check() and _last(broker, "totals") is not None, "no total came out", START_S_MAX, every=0.2
        )
        assert _last(broker, "totals") == {"customer": "ann", "total": 12.5, "orders": 1}
        broker.publish("orders", [{"value": '{"customer": "ann", "amount": 2000}'}])
        expected = {"customer": "ann", "total": 2012.5, "orders": 2}
        wait_until(lambda: run.check() and _last(broker, "totals") == expected, "the total did not change")
        wait_until(lambda: run.check() and broker.count("large-orders") == 1, "the large order is missing")
        wait_until(lambda: run.check() and broker.count("orders.dead") == 1, "the bad record is missing")
        [dead] = broker.messages("orders.dead")
        assert dead["value"] == "this is not JSON" and "not JSON" in dead["headers"]["headrace.error"]

        flows: dict[str, Any] = {}

        def is_reported() -> bool:
            """Reports arrive some time after the batch, and those of idle queries contain less."""
            broker.publish("orders", [{"value": '{"customer": "ann", "amount": 1}'}])
            flows.update(broker.ok("GET", "/pipelines/orders")["details"]["flows"])
            begun = all("input_rows_per_second" in flow for flow in flows.values())
            return begun and "state_rows" in flows["totals"] and "addBatch" in flows["totals"]["phases_ms"]

        wait_until(lambda: run.check() and is_reported(), "no batch was reported", every=1.0)
        drawn = {name: (flow["sources"], flow["stages"], flow["sink"]) for name, flow in flows.items()}
        assert drawn == {
            "totals": (["orders"], ["select", "filter", "select", "aggregate", "select"], "totals"),
            "totals.dead": (["orders"], ["select", "filter", "select"], "orders.dead"),
            "large_orders": (["orders"], ["select", "filter", "select", "filter", "select"], "large-orders"),
        }
        assert flows["totals"]["state_rows"] == 1 and flows["totals"]["phases_ms"]["addBatch"] > 0
        assert all(flow["input_rows_per_second"] >= 0 for flow in flows.values())
        assert {c["name"] for c in broker.ok("GET", "/cursors")["cursors"]} == {
            "orders.totals.orders", "orders.totals.dead.orders", "orders.large_orders.orders",
        }  # fmt: skip
        wait_until(lambda: "running" in headrace(broker, "pipeline", "ls"), "it is not listed as running")
        assert json.loads(headrace(broker, "pipeline", "status", "orders", "--json"))["details"]["rows_total"] >= 1
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
    spark: "SparkSession", broker: RunningBroker, tmp_path: Path
) -> None:
    copy = tmp_path / "numbers_copy.py"
    broker.create("in", 2)
    broker.create("out", 2)
    total = 30_000
    broker.publish("in", numbered(total, keys=1000))
    arguments = ("pipeline", "run", "numbers_copy.py", "--url", broker.url, "-c", QUICK)
    for kill in range(3):
        before = broker.count("out")
        copy.write_text(COPY.replace("LIMIT", str(before + 9000)))
        run = Command(tmp_path, *arguments)
        try:
            goal = before + 3000
            wait_until(
                lambda goal=goal, run=run: run.check() and broker.count("out") >= goal,
                "no progress",
                START_S_MAX,
                every=0.2,
            )
        finally:
            run.kill_tree()
        if kill == 1:
            broker.kill()
            broker.start()
    assert broker.count("out") < total, "it was over before the last kill: the test proves too little"
    # Finish in the existing session: the state of the killed process is in the checkpoint.
    checkpoints = tmp_path / "headrace-checkpoints"
    assert listed(checkpoints / "copy" / "copy" / "commits", "[0-9]*")
    copy.write_text(COPY.replace("LIMIT", str(total)))
    where = BrokerEndpoint(broker.url, local=True)
    PipelineRunner(load_pipeline(copy), spark, where, checkpoints, once=True, say=print).run()
    for partition in (0, 1):
        assert [m["value"] for m in broker.messages("out", partition)] == [
            m["value"] for m in broker.messages("in", partition)
        ]


def copying(broker: RunningBroker, name: str, change: Callable[[Any], Any], **options: str) -> Pipeline:
    declared = Pipeline(
        name, sources={"rows": Source(f"{name}.in", options=options)}, sinks={"out": Sink(f"{name}.out")}, trigger="0s"
    )

    @declared.flow(to="out")
    def copy(rows: Any) -> Any:
        return change(rows.select("value"))

    return declared


def test_a_signal_stops_a_pipeline_after_the_current_batch(
    spark: "SparkSession", shared_broker: RunningBroker, tmp_path: Path
) -> None:
    """Every planned batch is finished: a stop in the middle would leave one to repeat."""
    broker = shared_broker
    broker.create("term.in")
    broker.create("term.out")
    total = 1000  # more than it can process before the signal
    broker.publish("term.in", numbered(total))

    def slowly(batches: Any) -> Any:
        import time

        for batch in batches:
            time.sleep(0.5)
            yield batch

    declared = copying(broker, "term", lambda rows: rows.mapInArrow(slowly, "value binary"), maxOffsetsPerTrigger="5")
    said: list[str] = []
    running = PipelineRunner(declared, spark, BrokerEndpoint(broker.url, local=True), tmp_path, say=said.append)

    def interrupt() -> None:
        try:
            wait_until(lambda: broker.count("term.out") >= 5, "no batch came through")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    watcher = threading.Thread(target=interrupt)
    try:
        running.stop_on_signals()
        watcher.start()
        running.run()
    finally:
        watcher.join()
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    checkpoint = tmp_path / "term" / "copy"
    planned, done = ({p.name for p in listed(checkpoint / kind, "[0-9]*")} for kind in ("offsets", "commits"))
    assert planned == done and broker.count("term.out") == 5 * len(done) < total
    assert broker.ok("GET", "/pipelines/term")["state"] == "stopped"
    assert broker.ok("GET", "/cursors/term.copy.rows")["lag"] == total - 5 * len(done)


def test_a_flow_whose_python_workers_time_out_is_started_again(
    spark: "SparkSession", shared_broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once where the flow is built and once in its query, with Spark's own messages."""
    broker, lost = shared_broker, tmp_path / "lost"
    words = "org.apache.spark.SparkException: Python worker failed to connect back."
    broker.create("race.in")
    broker.create("race2.in")
    broker.publish("race.in", numbered(20))
    monkeypatch.setattr(pipeline_run, "START_WAIT_S_MAX", 0.0)  # no waiting in this test
    calls: list[int] = []

    def racing(batches: Any) -> Any:
        if lost.exists():
            raise RuntimeError(words)
        yield from batches

    def change(rows: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError(words)
        return rows.mapInArrow(racing, "value binary")

    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if "did not start in time" in line and len(calls) == 2:
            lost.unlink(missing_ok=True)

    lost.touch()
    where = BrokerEndpoint(broker.url, local=True)
    PipelineRunner(copying(broker, "race", change), spark, where, tmp_path, once=True, say=say).run()
    assert len(calls) - 1 == sum("did not start in time" in line for line in said) >= 2, "Spark may lose one, too"
    assert broker.count("race.out") == 20

    def fail(rows: Any) -> Any:
        calls.append(1)
        raise RuntimeError(words)

    calls.clear()
    with pytest.raises(PipelineFailed, match="failed to connect back"):
        PipelineRunner(copying(broker, "race2", fail), spark, where, tmp_path, once=True, say=said.append).run()
    assert len(calls) == START_ATTEMPTS, "it is not tried for ever"


def test_a_flow_that_fails_during_the_check_has_failed(
    spark: "SparkSession", shared_broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the query had no exception at the check, ended before the next check, and counted as finished."""
    from pyspark.sql.streaming.query import StreamingQuery

    broker = shared_broker
    broker.create("late.in")
    broker.publish("late.in", numbered(20))
    ask = StreamingQuery.exception

    def ask_and_wait(query: StreamingQuery) -> Any:
        found = ask(query)
        wait_until(lambda: not query.isActive, "the flow never failed")
        return found

    def failing(batches: Any) -> Any:
        raise RuntimeError("no such luck")
        yield from batches

    def change(rows: Any) -> Any:
        return rows.mapInArrow(failing, "value binary")

    monkeypatch.setattr(StreamingQuery, "exception", ask_and_wait)
    running = PipelineRunner(
        copying(broker, "late", change), spark, BrokerEndpoint(broker.url, local=True), tmp_path, once=True
    )
    with pytest.raises(PipelineFailed, match="no such luck"):
        running.run()
    assert broker.ok("GET", "/pipelines/late")["state"] == "failed"


def test_a_flow_that_fails_in_its_last_batch_has_failed(
    spark: "SparkSession", shared_broker: RunningBroker, tmp_path: Path
) -> None:
    """Regression: after a stop request failures were not checked, and the exit code was 0."""
    broker = shared_broker
    broker.create("halt.in")
    broker.publish("halt.in", numbered(20))
    marks = tmp_path / "marks"
    marks.mkdir()

    def failing(batches: Any) -> Any:
        import time

        (marks / "begun").touch()
        while not (marks / "stopped").exists():
            time.sleep(0.01)
        raise RuntimeError("no such luck")
        yield from batches

    declared = copying(broker, "halt", lambda rows: rows.mapInArrow(failing, "value binary"))
    running = PipelineRunner(declared, spark, BrokerEndpoint(broker.url, local=True), tmp_path / "checkpoints")

    def stop() -> None:
        try:
            wait_until((marks / "begun").exists, "no batch began")
        finally:
            running.stop()
            (marks / "stopped").touch()

    with beside(stop), pytest.raises(PipelineFailed, match="no such luck"):
        running.run()
    assert broker.ok("GET", "/pipelines/halt")["state"] == "failed"


def test_a_failure_during_the_stop_does_not_hide_the_first_failure(
    spark: "SparkSession", shared_broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost JVM cannot stop a query; the first failure must still be reported to the broker."""
    from pyspark.sql.streaming.query import StreamingQuery

    broker = shared_broker
    broker.create("worse.in")
    real = StreamingQuery.stop

    def stop(query: StreamingQuery) -> None:
        real(query)
        raise ConnectionRefusedError("no reply")

    def follow() -> None:
        raise PipelineFailed("no such luck")

    running = PipelineRunner(
        copying(broker, "worse", lambda rows: rows), spark, BrokerEndpoint(broker.url, local=True), tmp_path
    )
    monkeypatch.setattr(StreamingQuery, "stop", stop)
    monkeypatch.setattr(running, "_follow", follow)
    with pytest.raises(PipelineFailed, match="no such luck"):
        running.run()
    said = broker.ok("GET", "/pipelines/worse")
    assert (said["state"], said["details"]["last_error"]) == ("failed", "no such luck")


def test_a_stop_moves_each_cursor_to_the_end_of_its_source(
    spark: "SparkSession", shared_broker: RunningBroker, tmp_path: Path
) -> None:
    """Spark lists sources in the order of its plan, not of the function's parameters. The options of a cursor, such as
    its pin, must be the same after the stop."""
    broker = shared_broker
    for topic, count in (("pair.one", 10), ("pair.two", 20)):
        broker.create(topic)
        broker.publish(topic, numbered(count))
    one = Source("pair.one", options={"pin": "true", "pinMaxAge": "7d"})
    two = Source("pair.two", options={"cursor": "pair.named"})
    declared = Pipeline("pair", sources={"one": one, "two": two}, sinks={"out": Sink("pair.out")})

    @declared.flow(to="out")
    def both(one: Any, two: Any) -> Any:
        return two.select("value").union(one.select("value"))

    PipelineRunner(declared, spark, BrokerEndpoint(broker.url, local=True), tmp_path, once=True).run()
    assert broker.count("pair.out") == 30
    day = 24 * 3600 * 1000
    assert {
        cursor["name"]: (cursor["pin"], cursor["max_age_ms"], _offsets(cursor))
        for cursor in broker.ok("GET", "/cursors")["cursors"]
        if cursor["name"].startswith("pair.")
    } == {
        "pair.both.one": (True, 7 * day, {"pair.one": 10}),
        "pair.named": (False, day, {"pair.two": 20}),
    }


def _offsets(cursor: Any) -> dict[str, int]:
    return {topic["topic"]: topic["partitions"][0]["offset"] for topic in cursor["topics"]}


def test_rows_after_an_idle_period_are_counted(
    spark: "SparkSession", shared_broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an idle query reports under the number of the next batch, whose rows then counted as counted."""
    broker = shared_broker
    broker.create("idle.in")
    broker.create("idle.out")
    broker.publish("idle.in", numbered(5))
    monkeypatch.setattr(pipeline_run, "REPORT_S", 0.1)
    spark.conf.set("spark.sql.streaming.noDataProgressEventInterval", "100")
    running = PipelineRunner(
        copying(broker, "idle", lambda rows: rows), spark, BrokerEndpoint(broker.url, local=True), tmp_path
    )

    def is_idle() -> bool:
        status, said = broker.call("GET", "/pipelines/idle")  # 404 until its first report
        return status == 200 and said["details"].get("flows", {}).get("copy", {}).get("batch") == 1

    def watch() -> None:
        try:
            wait_until(is_idle, "it is never idle")
            broker.publish("idle.in", numbered(7))
            wait_until(lambda: broker.count("idle.out") == 12, "the rows did not come")
        finally:
            running.stop()

    try:
        with beside(watch):
            running.run()
    finally:
        spark.conf.unset("spark.sql.streaming.noDataProgressEventInterval")
    assert broker.ok("GET", "/pipelines/idle")["details"]["rows_total"] == 12


def test_records_not_read_by_the_dead_letter_query_stay_pinned(
    spark: "SparkSession", shared_broker: RunningBroker, tmp_path: Path
) -> None:
    """Rows and dead letters are two queries with their own progress: with a shared cursor, the faster one moved the
    pin."""
    broker = shared_broker
    broker.create("slow.in")
    broker.create("slow.out")
    broker.publish("slow.in", numbered(20))
    begun, go_on = tmp_path / "begun", tmp_path / "go_on"

    def waiting(batches: Any) -> Any:
        import time

        begun.touch()
        while not go_on.exists():
            time.sleep(0.01)
        yield from batches

    declared = Pipeline(
        "slow", sources={"rows": Source("slow.in", pin=True, options={"maxOffsetsPerTrigger": "5"})},
        sinks={"out": Sink("slow.out")}, dead_letter="slow.dead", trigger="0s",
    )  # fmt: skip

    @declared.flow(to="out")
    def copy(rows: Any) -> Any:
        rows = rows.select("value")
        return rows, rows.mapInArrow(waiting, "value binary")

    def reached() -> list[int]:
        cursors = broker.ok("GET", "/cursors")["cursors"]
        return sorted(_offsets(c)["slow.in"] for c in cursors if c["name"].startswith("slow.") and c["pin"])

    running = PipelineRunner(declared, spark, BrokerEndpoint(broker.url, local=True), tmp_path / "checkpoints")
    found: list[int] = []

    def watch() -> None:
        try:
            wait_until(begun.exists, "no dead letters were looked for")
            broker.publish("slow.in", numbered(20))
            wait_until(lambda: broker.count("slow.out") == 40 and reached()[-1] >= 35, "the rows did not come")
            found.extend(reached())
        finally:
            go_on.touch()
            running.stop()

    with beside(watch):
        running.run()
    assert found[0] == 0, "nothing of the dead letters was read by then"
    assert reached()[0] > 0


def test_missing_java_is_reported_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaMissing, match="JAVA_HOME has no bin/java"):
        check_java()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").write_text("#!/bin/sh\necho 'java version \"1.8.0_292\"' >&2\n")
    (tmp_path / "bin" / "java").chmod(0o755)
    with pytest.raises(JavaMissing, match="is Java 8"):
        check_java()
    assert parse_version('openjdk version "21.0.2" 2024-01-16') == 21
    answer = subprocess.run(
        [sys.executable, "-c", "from headrace.cli import main; main()", "pipeline", "run", "x.py"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 1 and answer.stderr.startswith("headrace: Spark needs Java 17"), answer.stderr
