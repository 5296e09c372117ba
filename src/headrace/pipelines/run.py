"""Running a pipeline: one Spark session, a query per flow, reports to the broker, a stop that ends between batches."""

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
from headrace.pipelines.load import mistake
from headrace.pipelines.sight import folder_in_sight
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
# Spark gives a Python worker ten seconds to connect back when a query starts; a busy machine needs more.
START_RACE = ("Python worker failed to connect back", "Timed out while waiting for the Python worker")
DEAD = ".dead"


def ask_to_stop(url: str, name: str) -> dict[str, Any]:
    """What the broker knows of the pipeline that is to stop."""
    return BrokerLink(url, retry_s=2.0).send("POST", "pipelines", name, "stop", body={})


class PipelineFailed(HeadraceError):
    """A flow ended with an error; it is in the message."""


class Where:
    """How this pipeline reaches its broker: always by HTTP, and by the files where they can be seen."""

    def __init__(self, url: str, *, local: bool) -> None:
        self.url = url
        self.link = BrokerLink(url, retry_s=20.0)
        status = self.link.get("status")
        self.path = folder_in_sight(status) if local else None

    def reading(self) -> dict[str, str]:
        return {"bootstrap": self.url} | ({"path": self.path} if self.path is not None else {})

    def writing(self) -> dict[str, str]:
        return {"bootstrap": self.url}


class Running:
    """A pipeline at work. `run` returns when it is stopped, or with --once when it has read what is there."""

    def __init__(
        self,
        pipeline: Pipeline,
        session: "SparkSession",
        where: Where,
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
        self._drawn: dict[str, dict[str, Any]] = {name: stages.declared(pipeline, name) for name in pipeline.flows}
        self._last_error: str | None = None

    def stop(self) -> None:
        """From any thread or signal: end after the batch that is under way."""
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
                self._start_patiently(name)
            self._follow()
        except Exception as error:
            failure = _plainly(error)
            self._halt()
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
        good, failed = self._made(flow, flow)
        sink = self._pipeline.sinks[sink_name]
        self._drawn[flow] |= {"stages": stages.stages_of(good)}
        self._write(flow, good, sink.as_options(), sink.output_mode)
        if failed is not None:
            topic = self._pipeline.dead_letter
            if topic is None:
                raise PipelineFailed(f"flow {flow!r} returns records that failed, and no dead_letter topic is declared")
            # Once more, with cursors of its own: those of the rows move, and let go of what they pin, with the rows.
            _, bad = self._made(flow, flow + DEAD)
            assert bad is not None, "a flow's function makes the same of its sources whenever it is called"
            dead = {"sink": topic, "stages": stages.stages_of(bad), "dead": True}
            self._drawn[flow + DEAD] = self._drawn[flow] | dead
            self._write(flow + DEAD, bad, {"topic": topic}, "append")

    def _made(self, flow: str, name: str) -> "tuple[DataFrame, DataFrame | None]":
        """What a flow's function makes of its sources, for the query of that name: rows, and records that failed."""
        made = self._pipeline.flows[flow][0](*(self._stream(name, one) for one in self._pipeline.arguments(flow)))
        return made if isinstance(made, tuple) else (made, None)

    def _stream(self, name: str, source: str) -> "DataFrame":
        return self._session.readStream.format("headrace").options(**self._reading(name, source)).load()

    def _reading(self, name: str, source: str) -> dict[str, str]:
        """The options of a source as the query of that name reads it."""
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
        if "topic" in options:  # it is there from the start, so that its readers can be, too
            self._where.link.partitions(options["topic"], create=True)
        checkpoint = self._checkpoints / self._pipeline.name / name
        options = self._where.writing() | dict(options)
        writer = rows.writeStream.outputMode(output_mode).queryName(f"{self._pipeline.name}.{name}")
        if output_mode == "append":
            writer = writer.format("headrace").options(**options)
        else:
            # Spark lets a Python sink append only. A batch of changed rows is written as a batch, under the name of
            # the query and the number of the batch, and so as exactly once as the rest.
            writer = writer.foreachBatch(self._write_changes(checkpoint, options))
        writer = writer.option("checkpointLocation", str(checkpoint))
        if self._once:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=self._pipeline.interval)
        self._queries[name] = query = writer.start()
        # One after the other: each starts several Python processes, and all at once they lose the race together.
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

    def _start_patiently(self, flow: str) -> None:
        while not self._stopping.is_set():
            try:
                self._start(flow)
                return
            except HeadraceError:
                raise
            except Exception as error:
                if not self._may_try_again(flow, error):
                    raise PipelineFailed(f"flow {flow!r} cannot be started: {self._reason(flow, error)}") from error

    def _reason(self, flow: str, error: Exception) -> str:
        """Of Spark's errors the line that says what happened, of those of the flow's function where in its file."""
        if type(error).__module__.startswith(("pyspark.", "py4j.")):
            return _first_line(error)
        code = getattr(self._pipeline.flows[flow][0], "__code__", None)
        return mistake(error, code.co_filename if code is not None else "")

    def _restart(self, name: str, error: Exception) -> bool:
        """Try again what failed only because the machine was busy."""
        flow = name.removesuffix(DEAD)
        if not self._may_try_again(flow, error):
            return False
        self._start_patiently(flow)
        return True

    def _may_try_again(self, flow: str, error: Exception) -> bool:
        """Whether this is Spark's race to start Python workers, and was not lost too often; waits a moment, then."""
        attempt = self._attempts.get(flow, 0) + 1
        if not _lost_the_race(error) or attempt >= START_ATTEMPTS:
            return False
        self._attempts[flow] = attempt
        self._say(f"{self._pipeline.name}  flow {flow} lost the race to start its Python workers; again")
        for other in (flow, flow + DEAD):
            if other in self._queries:
                self._queries.pop(other).stop()
        self._stopping.wait(min(2.0**attempt, START_WAIT_S_MAX))
        return True

    # While it runs.

    def _follow(self) -> None:
        reported = 0.0
        while not self._stopping.is_set():
            # Before they are asked what failed: one that ends in between has not been asked.
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
                    self._say(f"{self._pipeline.name}  was asked to stop")
                    self._stopping.set()
            self._stopping.wait(POLL_S)
        self._end_between_batches()

    def _end_between_batches(self) -> None:
        """A query that is stopped in the middle of a batch does that batch again; so each gets to its end.

        From now on the sources have nothing new. Whoever is then seen between two triggers has no batch under way and
        begins none. One whose last batch fails has failed, stop or no stop."""
        self._stop_file.touch()
        deadline = time.monotonic() + STOP_S_MAX
        failed: list[tuple[str, Exception]] = []
        for name, query in self._queries.items():
            while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
                time.sleep(0.01)
            error = query.exception()  # before it is stopped: what that cuts off is no failure
            query.stop()
            if error is not None and not _lost_the_race(error):
                failed.append((name, error))
        if failed:
            name, first = failed[0]
            raise PipelineFailed(f"flow {name!r} failed: {_first_line(first)}") from first

    def _halt(self) -> None:
        """After a failure, which is the one to tell: what goes wrong now is only said."""
        for name, query in list(self._queries.items()):
            try:
                if query.isActive:
                    query.stop()
            except Exception as problem:  # noqa: BLE001 - whatever it is: a JVM that is gone has many ways to say so
                del self._queries[name]  # nor can it be asked how far it got
                self._say(f"{self._pipeline.name}  flow {name} could not be stopped: {_first_line(problem)}")

    # Reporting.

    def _report(self, state: str, error: str | None = None) -> bool:
        """Tell the terminal and the broker; True when somebody asked this pipeline to stop."""
        last = {name: _progress(query) for name, query in self._queries.items()}
        for name, said in last.items():
            if said is not None and self._counted.get(name, -1) < said["batchId"]:
                self._count(name, self._queries[name])
        details = progress.details(last, self._drawn, self._rows, error or self._last_error)
        self._say(progress.line(self._pipeline.name, state, details))
        try:
            answer = self._where.link.report(self._pipeline.name, state, details)
        except HeadraceError as problem:
            self._say(f"{self._pipeline.name}  the broker did not take the report: {problem}")
            return False
        return bool(answer["stop_requested"]) and state == "running"

    def _count(self, name: str, query: "StreamingQuery") -> None:
        for said in query.recentProgress:
            if said["batchId"] > self._counted.get(name, -1):
                self._attempts.pop(name.removesuffix(DEAD), None)  # it has started: what it lost before is forgotten
                if "addBatch" in said["durationMs"]:  # one that had nothing to do has the number of the batch to come
                    self._counted[name] = said["batchId"]
                    self._rows += said["numInputRows"]

    def _finish_cursors(self) -> None:
        """Spark tells a source of its last batch only with the next one: after a stop nobody would."""
        for name, query in self._queries.items():
            ends = list(progress.end_offsets(_progress(query)))
            for source in self._pipeline.arguments(name.removesuffix(DEAD)):
                self._finish_cursor(read_options(self._reading(name, source)), ends)

    def _finish_cursor(self, options: ReadOptions, ends: Iterable[Mapping[str, Any]]) -> None:
        """Spark says where its sources ended in the order of its plan, and a plan may hold one twice: a cursor goes as
        far as all of those that read its topics."""
        assert options.cursor is not None
        reached: Positions = {}
        for end in ends:
            for place, at in _positions(end).items():
                if options.reads(place.topic) and (place not in reached or at.offset < reached[place].offset):
                    reached[place] = at
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
        return {}  # of somebody else's source


def _progress(query: "StreamingQuery") -> Mapping[str, Any] | None:
    return query.lastProgress


def _plainly(error: Exception) -> Exception:
    """Whatever way Python has to say that nobody answers at the other end of its connection to Spark."""
    if isinstance(error, ConnectionError) or type(error).__name__ == "Py4JNetworkError":
        reason = "it crashed or was killed, for want of memory perhaps"
        return PipelineFailed(f"Spark's JVM does not answer any more ({_first_line(error)}): {reason}")
    return error


def _lost_the_race(error: BaseException) -> bool:
    return any(mark in str(error) for mark in START_RACE)


def _first_line(error: BaseException) -> str:
    """The line that says what happened: of a Python error inside Spark, the last of its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("headrace.") or "Error: " in line]
    return (ours[-1] if ours else lines[0] if lines else type(error).__name__)[:500]
