"""Spark on the log beside Spark on Parquet of the same rows: `python -m bench.spark`.

CPU-seconds per million records, of the JVM and of all Python processes, from /proc: on a busy machine the wall
clock says little. Each figure is the median of eight runs after four to warm up. What is compared runs in turns, so
that neither side has the JVM to itself while it still compiles what it runs often. The bars are those of
docs/pipelines.md.

What is compared: the same rows with the same columns, all of which the query looks at, so that neither side may skip
one. Every record has its own time and its own noise, as in a topic of events: Parquet cannot turn them into a short
dictionary, and zstd does not find them in the record before. What is alike in all rows (topic, partition, kind of
timestamp) Parquet does keep in a few bytes, as it would for anybody. The log is not compressed, as is the default.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import uuid
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as f

from headrace.pipelines.session import build
from headrace.record.arrow.write import BinaryRows, PartitionedWriter
from headrace.spark.broker import BrokerLink

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.spark.world import RunningBroker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
WARM_UP_RUNS = 4
RUNS = 8
KEYS = 1000
UPLOAD_ROWS = 100_000
START_MS = 1_800_000_000_000


@dataclass(frozen=True)
class Cpu:
    """CPU-seconds of the JVM and of the Python processes that it started."""

    jvm: float
    python: float

    @property
    def total(self) -> float:
        return self.jvm + self.python


class Meter:
    """Watches the processes below this one. Each is remembered as it was last seen, so that one that ends counts."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], tuple[str, float]] = {}  # pid and start -> name, CPU-seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Meter":
        self._look()
        self._first = dict(self._seen)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self._look()

    def _look(self) -> None:
        found: dict[int, tuple[int, str, str, float]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    head, _, rest = (entry / "stat").read_text().rpartition(")")
                except OSError:
                    continue
                fields = rest.split()
                used = (int(fields[11]) + int(fields[12])) * TICK_S
                found[int(entry.name)] = int(fields[1]), fields[19], head.partition("(")[2], used
        for pid, (_, started, name, used) in found.items():
            at = pid
            while at in found and at != os.getpid():
                at = found[at][0]
            if at == os.getpid() and pid != at:
                self._seen[pid, started] = name, used

    @property
    def used(self) -> Cpu:
        jvm = python = 0.0
        for key, (name, used) in self._seen.items():
            more = used - self._first.get(key, (name, 0.0))[1]
            if name == "java":
                jvm += more
            else:
                python += more
        return Cpu(jvm, python)


def typical(records: int, *works: Callable[[], object]) -> list[tuple[Cpu, float]]:
    """(CPU per million, seconds) of the middle one of each one's runs; they take turns."""
    found: list[list[tuple[Cpu, float]]] = [[] for _ in works]
    for run in range(WARM_UP_RUNS + RUNS):
        for work, figures in zip(works, found, strict=True):
            started = time.monotonic()
            with Meter() as meter:
                work()
            seconds = time.monotonic() - started
            if run >= WARM_UP_RUNS:
                figures.append((Cpu(meter.used.jvm / records * 1e6, meter.used.python / records * 1e6), seconds))
    return [sorted(figures, key=lambda pair: pair[0].total)[RUNS // 2] for figures in found]


def fill(broker: RunningBroker, topic: str, records: int, size: int) -> None:
    import pyarrow as pa

    broker.create(topic, 2)
    link = BrokerLink(broker.url)
    half = size // 2
    text = (b'{"kind": "order", "state": "paid", "country": "PT", "amount": ' * (1 + half // 60))[: half - 16]
    for number, first in enumerate(range(0, records, UPLOAD_ROWS)):
        count = min(UPLOAD_ROWS, records - first)
        noise = os.urandom(count * half)
        keys = pa.array([b"%08d" % (n % KEYS) for n in range(first, first + count)], pa.binary())
        # Half its own noise, half text: it compresses neither to nothing nor not at all.
        values = pa.array(
            [b"%016d" % (first + n) + noise[n * half : (n + 1) * half] + text for n in range(count)], pa.binary()
        )
        times = array("q", range(START_MS + first, START_MS + first + count))
        writer = PartitionedWriter(2, timestamp_ms=START_MS, batch_bytes=64 << 10)
        writer.add(_rows(keys), _rows(values), timestamps=times)
        parts, body = [], bytearray()
        name = uuid.uuid4().hex
        names = []
        for partition, batches in writer.take():
            for batch in batches:
                if len(body) + len(batch) > 32 << 20:
                    link.stage(name, body)
                    names.append(name)
                    name, body = uuid.uuid4().hex, bytearray()
                where = {"staged": name, "topic": topic, "partition": partition}
                parts.append(where | {"position": len(body), "length": len(batch)})
                body += batch
        link.stage(name, body)
        link.commit(f"fill-{topic}", number, parts)
    link.close()


def _rows(array: Any) -> BinaryRows:
    validity, offsets, data = array.buffers()
    return BinaryRows(offsets, data, validity, array.offset, len(array))


def aggregate(frame: "DataFrame") -> None:
    """Every column is looked at; Parquet may not skip one."""
    whole = f.max("partition"), f.max("offset"), f.min("timestamp"), f.max("timestampType")
    grouped = frame.groupBy("key").agg(f.count("topic"), f.sum(f.length("value")), *whole)
    assert len(grouped.collect()) == KEYS


def show(name: str, figure: Cpu, seconds: float, records: int, bar: str = "") -> None:
    rate = records / seconds / 1e6
    print(
        f"{name:34} {figure.total:6.2f}  ({figure.jvm:.2f} JVM + {figure.python:.2f} Python)  {rate:5.2f} M/s  {bar}",
        flush=True,
    )


def sizes(spark: "SparkSession", broker: RunningBroker, folder: Path, records: int, size: int) -> None:
    topic = f"rows-{size}"
    fill(broker, topic, records, size)
    ours = spark.read.format("headrace").options(path=broker.path, topic=topic).load()
    parquet = str(folder / topic)
    ours.write.option("compression", "zstd").parquet(parquet)
    theirs = spark.read.parquet(parquet)
    bar = 0.7 if size == 100 else 3.0
    (log, log_s), (lake, lake_s) = typical(records, lambda: aggregate(ours), lambda: aggregate(theirs))
    show(f"{size} B aggregate, log", log, log_s, records, f"bar {bar}")
    show(f"{size} B aggregate, Parquet zstd", lake, lake_s, records)
    print(f"{'':34} {log.total / lake.total:6.2f}x Parquet  bar 1.4x", flush=True)
    few = spark.read.format("headrace").options(path=broker.path, topic=topic, columns="key,offset").load()
    [(pruned, pruned_s)] = typical(records, lambda: few.groupBy("key").agg({"offset": "max"}).count())
    show(f"{size} B aggregate of key, offset", pruned, pruned_s, records)
    sink_records = records // 2
    ends = {topic: {str(p): end // 2 for p, (_, end) in broker.ends(topic).items()}}
    half = {"path": broker.path, "topic": topic, "endingOffsets": json.dumps(ends), "columns": "key,value"}
    rows = spark.read.format("headrace").options(**half).load()

    def copy() -> None:
        rows.write.format("headrace").mode("append").options(bootstrap=broker.url, topic=f"copy-{size}").save()

    broker_before = broker.cpu_seconds()
    [(sink, sink_s)] = typical(sink_records, copy)
    broker_s = (broker.cpu_seconds() - broker_before) / (sink_records * (WARM_UP_RUNS + RUNS)) * 1e6
    bar_text = f"bar {3 if size == 100 else 12}; broker {broker_s:.2f}"
    show(f"{size} B source to sink", sink, sink_s, sink_records, bar_text)


def latency(spark: "SparkSession", broker: RunningBroker, folder: Path) -> None:
    broker.create("ticks")
    frame = (
        spark.readStream.format("headrace").options(path=broker.path, topic="ticks", startingOffsets="earliest").load()
    )
    query = (
        frame.select("key", "value")
        .writeStream.format("headrace")
        .options(bootstrap=broker.url, topic="tocks", checkpointLocation=str(folder / "ticks"))
        .trigger(processingTime="0 seconds")
        .start()
    )
    broker.create("tocks")
    waits = []
    for number in range(25):
        before = broker.count("tocks")
        broker.publish("ticks", ({"value": str(n)} for n in range(10)))
        started = time.monotonic()
        while broker.count("tocks") < before + 10:
            assert query.exception() is None, query.exception()
            time.sleep(0.005)
        if number >= 5:
            waits.append(time.monotonic() - started)
    phases = [p["durationMs"] for p in query.recentProgress if p["numInputRows"]][5:]
    query.stop()
    middle = {name: statistics.median(p.get(name, 0) for p in phases) for name in ("triggerExecution", "addBatch")}
    print(
        f"{'micro-batch, append to sink':34} p50 {statistics.median(waits) * 1000:.0f} ms  "
        f"min {min(waits) * 1000:.0f} ms  (trigger {middle['triggerExecution']:.0f} ms, "
        f"of it addBatch {middle['addBatch']:.0f} ms)",
        flush=True,
    )


def first_batch(broker: RunningBroker, folder: Path) -> None:
    """From nothing to the first batch: a new process, Spark's start included."""
    import subprocess

    broker.create("start-in")
    broker.publish("start-in", [{"value": "x"}])
    (folder / "first.py").write_text(
        "from headrace.pipelines import Pipeline, Sink, Source\n"
        "pipeline = Pipeline('first', sources={'s': Source('start-in')}, sinks={'o': Sink('start-out')})\n"
        "@pipeline.flow(to='o')\ndef copy(s):\n    return s.select('key', 'value')\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", "from headrace.cli import main; main()", "pipeline", "run"]
    started = time.monotonic()
    with Meter() as meter:
        subprocess.run(
            [*command, "first.py", "--once", "--url", broker.url], cwd=folder, check=True, capture_output=True
        )
    seconds = time.monotonic() - started
    assert broker.count("start-out") == 1
    print(f"{'start, one batch, stop':34} {seconds:.1f} s, {meter.used.total:.1f} CPU-s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.spark", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the records")
    parser.add_argument("--only", choices=["start", "100", "1000", "latency"], help="one part of it")
    options = parser.parse_args()
    share = 4 if options.quick else 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the broker is not left behind

    def wanted(part: str) -> bool:
        return options.only in (None, part)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        broker = RunningBroker(folder).start()
        try:
            load = os.getloadavg()[0]
            print(f"load {load:.1f} on {os.cpu_count()} cores; CPU-seconds per million records", flush=True)
            if wanted("start"):
                first_batch(broker, folder)
            spark = build("bench", conf={"spark.driver.memory": "3g"})
            if wanted("100"):
                sizes(spark, broker, folder, 4_000_000 // share, 100)
            if wanted("1000"):
                sizes(spark, broker, folder, 1_000_000 // share, 1000)
            if wanted("latency"):
                latency(spark, broker, folder)
            spark.stop()
        finally:
            broker.close()


if __name__ == "__main__":
    main()
