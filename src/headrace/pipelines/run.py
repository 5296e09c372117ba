"""PipelineRunner: runs the flows of a pipeline as Spark queries, reports to the broker, and stops between batches."""

import json
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError, InvalidInput
from headrace.pipelines import progress, stages
from headrace.pipelines.declare import Pipeline
from headrace.pipelines.load import describe_error
from headrace.pipelines.local_folder import local_data_folder
from headrace.spark.broker import BrokerLink
from headrace.spark.offsets import Positions, from_json
from headrace.spark.options import ReadOptions, read_options
from headrace.spark.plan import by_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

REPORT_S = 2.0
POLL_S = 0.2
STOP_S_MAX = 60.0
START_ATTEMPTS = 8
START_WAIT_S_MAX = 15.0
# Errors when a Python worker does not connect within Spark's ten seconds, which happens on a busy machine.
START_TIMEOUTS = ("Python worker failed to connect back", "Timed out while waiting for the Python worker")
DEAD = ".dead"


def ask_to_stop(url: str, name: str) -> dict[str, Any]:
    """Requests a stop through the broker, and returns the broker's record of the pipeline."""
    return BrokerLink(url, retry_s=2.0).send("POST", "pipelines", name, "stop", body={})


class PipelineFailed(HeadraceError):
    """A flow failed; the message contains the reason."""


class BrokerEndpoint:
    """How the flows reach the broker: over HTTP, and through its files if they are on this machine (`local`)."""

    def __init__(self, url: str, *, local: bool) -> None:
        self.url = url
        self.link = BrokerLink(url, retry_s=20.0)
        status = self.link.get("status")
        self.path = local_data_folder(status) if local else None

    def reading(self) -> dict[str, str]:
        return {"bootstrap": self.url} | ({"path": self.path} if self.path is not None else {})

    def writing(self) -> dict[str, str]:
        return {"bootstrap": self.url}


class PipelineRunner:
    """Runs a pipeline. `run` returns when it is stopped, or with `once` when it has reached the current end."""

    def __init__(
        self,
        pipeline: Pipeline,
        session: "SparkSession",
        where: BrokerEndpoint,
        checkpoints: Path,
        *,
        once: bool = False,
        say: Callable[[str], object] = print,
    ) -> None:
        self._pipeline = pipeline
        self._session = session
        self._where = where
        self._checkpoints = checkpoints
        self._once = once
        self._say = say
        self._queries: dict[str, StreamingQuery] = {}
        self._stopping = threading.Event()
        self._stop_file: Path
        self._attempts: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        self._rows = 0
        self._graph: dict[str, dict[str, Any]] = {name: stages.declared(pipeline, name) for name in pipeline.flows}
        self._last_error: str | None = None

    def stop(self) -> None:
        """Stops after the current batch. May be called from any thread or signal handler."""
        self._stopping.set()

    def stop_on_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stop())

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="headrace-pipeline-") as folder:
            self._stop_file = Path(folder, "stop")
            self._run()

    def _run(self) -> None:
        self._report("starting")
        try:
            for name in self._pipeline.flows:
                self._start_with_retries(name)
            self._follow()
        except Exception as error:
            failure = _explain_lost_jvm(error)
            self._stop_after_failure()
            self._report("failed", _first_line(failure))
            self._where.link.close()
            if failure is error:
                raise
            raise failure from error
        self._finish_cursors()
        self._report("stopped")
        self._where.link.close()

    # Starting.

    def _start(self, flow: str) -> None:
        sink_name = self._pipeline.flows[flow][1]
        good, failed = self._call_flow(flow, flow)
        sink = self._pipeline.sinks[sink_name]
        self._graph[flow] |= {"stages": stages.stages_of(good)}
        self._write(flow, good, sink.as_options(), sink.output_mode)
        if failed is not None:
            topic = self._pipeline.dead_letter
            if topic is None:
                raise PipelineFailed(f"flow {flow!r} returns failed records, but no dead_letter topic is declared")
            # A second query with its own cursors: the cursors of the first, and their pins, move with the good rows.
            _, bad = self._call_flow(flow, flow + DEAD)
            assert bad is not None, "a flow function returns the same kinds of rows at every call"
            dead = {"sink": topic, "stages": stages.stages_of(bad), "dead": True}
            self._graph[flow + DEAD] = self._graph[flow] | dead
            self._write(flow + DEAD, bad, {"topic": topic}, "append")

    def _call_flow(self, flow: str, name: str) -> "tuple[DataFrame, DataFrame | None]":
        """Calls the flow's function with the sources of the query `name`; returns good rows and failed records."""
        made = self._pipeline.flows[flow][0](*(self._stream(name, one) for one in self._pipeline.arguments(flow)))
        return made if isinstance(made, tuple) else (made, None)

    def _stream(self, name: str, source: str) -> "DataFrame":
        return self._session.readStream.format("headrace").options(**self._reading(name, source)).load()

    def _reading(self, name: str, source: str) -> dict[str, str]:
        """Options of a source for the query `name`."""
        declared = self._pipeline.sources[source]
        options = self._where.reading() | declared.as_options()
        if "cursor" not in options:
            options["cursor"] = f"{self._pipeline.name}.{name}.{source}"
        elif name.endswith(DEAD):
            options["cursor"] += DEAD
        options["stopFile"] = str(self._stop_file)
        if declared.pin:
            options["pin"] = "true"
        return options

    def _write(self, name: str, rows: "DataFrame", options: Mapping[str, str], output_mode: str) -> None:
        if "topic" in options:  # created at the start, so that consumers can start before the first row
            self._where.link.partitions(options["topic"], create=True)
        checkpoint = self._checkpoints / self._pipeline.name / name
        options = self._where.writing() | dict(options)
        writer = rows.writeStream.outputMode(output_mode).queryName(f"{self._pipeline.name}.{name}")
        if output_mode == "append":
            writer = writer.format("headrace").options(**options)
        else:
            # Spark supports only append for Python sinks. Changed rows are written with foreachBatch, under the id of
            # the query and the number of the batch, so that they too are stored exactly once.
            writer = writer.foreachBatch(self._write_changes(checkpoint, options))
        writer = writer.option("checkpointLocation", str(checkpoint))
        if self._once:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=self._pipeline.interval)
        self._queries[name] = query = writer.start()
        # Start the queries one after the other: each starts several Python processes, which would time out together.
        deadline = time.monotonic() + STOP_S_MAX
        while query.isActive and query.status["message"].startswith("Initializing") and time.monotonic() < deadline:
            time.sleep(0.02)

    @staticmethod
    def _write_changes(checkpoint: Path, options: Mapping[str, str]) -> "Callable[[DataFrame, int], None]":
        def write(changed: "DataFrame", batch: int) -> None:
            query = json.loads((checkpoint / "metadata").read_text())["id"]
            once = {"writeId": f"query:{query}", "writeBatch": str(batch)}
            changed.write.format("headrace").mode("append").options(**options, **once).save()

        return write

    def _start_with_retries(self, flow: str) -> None:
        """Starts a flow, again if Spark's Python workers do not connect in time."""
        while not self._stopping.is_set():
            try:
                self._start(flow)
                return
            except HeadraceError:
                raise
            except Exception as error:
                if not self._may_retry(flow, error):
                    raise PipelineFailed(f"flow {flow!r} cannot be started: {self._reason(flow, error)}") from error

    def _reason(self, flow: str, error: Exception) -> str:
        """The essential line of Spark's errors; for errors of the flow's function, also the line in its file."""
        if type(error).__module__.startswith(("pyspark.", "py4j.")):
            return _first_line(error)
        code = getattr(self._pipeline.flows[flow][0], "__code__", None)
        return describe_error(error, code.co_filename if code is not None else "")

    def _restart(self, name: str, error: Exception) -> bool:
        """Restarts a flow that failed only because the machine was busy; False for any other failure."""
        flow = name.removesuffix(DEAD)
        if not self._may_retry(flow, error):
            return False
        self._start_with_retries(flow)
        return True

    def _may_retry(self, flow: str, error: Exception) -> bool:
        """Whether Python workers did not connect in time, and attempts are left. Stops the flow's queries and waits."""
        attempt = self._attempts.get(flow, 0) + 1
        if not _is_start_timeout(error) or attempt >= START_ATTEMPTS:
            return False
        self._attempts[flow] = attempt
        self._say(f"{self._pipeline.name}  flow {flow}: Spark's Python workers did not start in time; retrying")
        for other in (flow, flow + DEAD):
            if other in self._queries:
                self._queries.pop(other).stop()
        self._stopping.wait(min(2.0**attempt, START_WAIT_S_MAX))
        return True

    # While it runs.

    def _follow(self) -> None:
        reported = 0.0
        while not self._stopping.is_set():
            # Checked before the exceptions: a query that ends in between is still asked for its exception next time.
            is_active = any(query.isActive for query in self._queries.values())
            for name, query in list(self._queries.items()):
                error = query.exception()
                if error is not None and not self._restart(name, error):
                    raise PipelineFailed(f"flow {name!r} failed: {_first_line(error)}") from error
                is_active = is_active or error is not None
            if not is_active:
                return
            if time.monotonic() - reported >= REPORT_S:
                reported = time.monotonic()
                if self._report("running"):
                    self._say(f"{self._pipeline.name}  stop requested")
                    self._stopping.set()
            self._stopping.wait(POLL_S)
        self._stop_between_batches()

    def _stop_between_batches(self) -> None:
        """Stops each query after its current batch; a query stopped in the middle would repeat the batch.

        The stop file makes the sources report no new records. A query that is then seen between two triggers has no
        batch in progress and starts none. If the last batch of a query fails, the pipeline has failed.
        """
        self._stop_file.touch()
        deadline = time.monotonic() + STOP_S_MAX
        failed: list[tuple[str, Exception]] = []
        for name, query in self._queries.items():
            while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
                time.sleep(0.01)
            error = query.exception()  # before the stop, whose interruption is no failure
            query.stop()
            if error is not None and not _is_start_timeout(error):
                failed.append((name, error))
        if failed:
            name, first = failed[0]
            raise PipelineFailed(f"flow {name!r} failed: {_first_line(first)}") from first

    def _stop_after_failure(self) -> None:
        """Stops all queries. Further errors are only printed, so that the first failure is the one reported."""
        for name, query in list(self._queries.items()):
            try:
                if query.isActive:
                    query.stop()
            except Exception as problem:  # noqa: BLE001 - a lost JVM shows in many exceptions
                del self._queries[name]  # its progress cannot be read either
                self._say(f"{self._pipeline.name}  flow {name} could not be stopped: {_first_line(problem)}")

    # Reporting.

    def _report(self, state: str, error: str | None = None) -> bool:
        """Reports to the terminal and the broker. True if the broker has a stop request for this pipeline."""
        last = {name: _progress(query) for name, query in self._queries.items()}
        for name, found in last.items():
            if found is not None and self._counted.get(name, -1) < found["batchId"]:
                self._count(name, self._queries[name])
        details = progress.details(last, self._graph, self._rows, error or self._last_error)
        self._say(progress.line(self._pipeline.name, state, details))
        try:
            answer = self._where.link.report(self._pipeline.name, state, details)
        except HeadraceError as problem:
            self._say(f"{self._pipeline.name}  the broker did not accept the report: {problem}")
            return False
        return bool(answer["stop_requested"]) and state == "running"

    def _count(self, name: str, query: "StreamingQuery") -> None:
        for found in query.recentProgress:
            if found["batchId"] > self._counted.get(name, -1):
                self._attempts.pop(name.removesuffix(DEAD), None)  # it has started, so retries are available again
                if "addBatch" in found["durationMs"]:  # an idle trigger reports the number of the next batch
                    self._counted[name] = found["batchId"]
                    self._rows += found["numInputRows"]

    def _finish_cursors(self) -> None:
        """Moves the cursors past the last batch, which Spark would commit only together with the next one."""
        for name, query in self._queries.items():
            ends = list(progress.end_offsets(_progress(query)))
            for source in self._pipeline.arguments(name.removesuffix(DEAD)):
                self._finish_cursor(read_options(self._reading(name, source)), ends)

    def _finish_cursor(self, options: ReadOptions, ends: Iterable[Mapping[str, Any]]) -> None:
        """Moves a cursor as far as all reads of its topics have come.

        Spark reports end offsets in the order of its plan, and a plan may contain the same source twice.
        """
        assert options.cursor is not None
        reached: Positions = {}
        for end in ends:
            for partition, at in _positions(end).items():
                known = reached.get(partition)
                if options.reads(partition.topic) and (known is None or at.offset < known.offset):
                    reached[partition] = at
        for topic, offsets in by_topic(reached):
            try:
                self._where.link.put_cursor(
                    options.cursor, topic, offsets, pin=options.pin, max_age_ms=options.pin_max_age_ms
                )
            except HeadraceError as problem:
                self._say(f"{self._pipeline.name}  cursor {options.cursor} could not be moved: {problem}")


def _positions(end: Mapping[str, Any]) -> Positions:
    try:
        return from_json(end)
    except InvalidInput:
        return {}  # offsets of another kind of source


def _progress(query: "StreamingQuery") -> Mapping[str, Any] | None:
    return query.lastProgress


def _explain_lost_jvm(error: Exception) -> Exception:
    """Replaces the many forms of a lost connection to the JVM by one clear error; returns other errors unchanged."""
    if isinstance(error, ConnectionError) or type(error).__name__ == "Py4JNetworkError":
        reason = "it crashed or was killed, possibly for lack of memory"
        return PipelineFailed(f"Spark's JVM does not answer any more ({_first_line(error)}): {reason}")
    return error


def _is_start_timeout(error: BaseException) -> bool:
    return any(mark in str(error) for mark in START_TIMEOUTS)


def _first_line(error: BaseException) -> str:
    """The essential line of an error: for a Python error inside Spark, the last line of its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("headrace.") or "Error: " in line]
    return (ours[-1] if ours else lines[0] if lines else type(error).__name__)[:500]
