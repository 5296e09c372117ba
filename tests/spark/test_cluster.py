"""A Spark cluster whose workers cannot see the data folder, so that everything goes through the broker."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark
import pytest

from headrace.pipelines.java import JavaMissing, check_java
from tests.ports import free_port
from tests.spark.world import JAVA_OPTIONS, RunningBroker, numbered, run_patiently, wait_until

SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
COUNT = 20_000

DRIVER = """
import sys
from pathlib import Path
from headrace.pipelines.session import build

master, url, folder, hidden, java = sys.argv[1:]
spark = build("cluster", master=master, conf={
    "spark.executor.memory": "512m", "spark.cores.max": "2", "spark.executor.cores": "1",
    "spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": java, "spark.executor.extraJavaOptions": java,
    "spark.sql.shuffle.partitions": "2",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0", "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
})

def look(batches):
    import pyarrow as pa
    for _ in batches:
        pass
    yield pa.RecordBatch.from_pylist([{"host": str(__import__("os").getppid()), "sees": Path(hidden).exists()}])

seen = spark.range(4, numPartitions=4).mapInArrow(look, "host string, sees boolean").collect()
print("SEES", sorted({row.sees for row in seen}), flush=True)
frame = spark.readStream.format("headrace").options(
    bootstrap=url, topic="in", startingOffsets="earliest", maxOffsetsPerTrigger="8000", splitBytes="64KB").load()
query = frame.select("key", "value").writeStream.format("headrace").options(
    bootstrap=url, topic="out", checkpointLocation=folder).trigger(availableNow=True).start()
query.awaitTermination()
print("BATCHES", len(query.recentProgress), flush=True)
spark.stop()
"""


@contextmanager
def running(command: list[str], said: Path) -> Iterator[None]:
    with said.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, 9)
        process.wait(30)


def without_sight_of(folder: Path) -> list[str]:
    """A command prefix that runs a program with an empty data folder, if this user may use namespaces."""
    hide = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none "{folder}" && exec "$@"', "sh"]
    able = shutil.which("unshare") and subprocess.run([*hide, "true"], capture_output=True, check=False).returncode == 0
    return hide if able else []


def test_source_and_sink_work_without_access_to_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        check_java()
    except JavaMissing as missing:
        pytest.skip(f"Spark: {missing}")
    broker = RunningBroker(tmp_path).start()
    hide = without_sight_of(broker.data)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.setenv("SPARK_DAEMON_JAVA_OPTS", JAVA_OPTIONS)
    with ExitStack() as stack:
        stack.callback(broker.close)
        broker.create("in", 2)
        broker.create("out", 3)
        broker.publish("in", numbered(COUNT, keys=500))
        master_said = tmp_path / "master.txt"
        master = ["org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(free_port())]
        stack.enter_context(running([str(SPARK_CLASS), *master, "--webui-port", "0"], master_said))
        wait_until(lambda: b"I have been elected leader" in master_said.read_bytes(), "no master")
        found = re.search(r"Starting Spark master at (spark://\S+)", master_said.read_text())
        assert found is not None
        for number in (1, 2):
            said = tmp_path / f"worker-{number}.txt"
            worker = ["org.apache.spark.deploy.worker.Worker", found[1], "--host", "127.0.0.1", "--cores", "1"]
            worker += ["--memory", "1g", "--webui-port", "0", "--work-dir", str(tmp_path / f"work-{number}")]
            stack.enter_context(running([*hide, str(SPARK_CLASS), *worker], said))
        (tmp_path / "driver.py").write_text(DRIVER)
        arguments = [found[1], broker.url, str(tmp_path / "checkpoint"), str(broker.data / "slots"), JAVA_OPTIONS]
        answer = run_patiently([sys.executable, "-W", "ignore", str(tmp_path / "driver.py"), *arguments])
        assert answer.returncode == 0, answer.stderr[-4000:]
        # A worker that does not hear from the master in time registers again.
        assert len(set(re.findall(r"Registering worker (\S+)", master_said.read_text()))) == 2, "one worker did it all"
        assert f"SEES {[not hide]}" in answer.stdout
        copied = [m for p in range(3) for m in broker.messages("out", p)]
        assert sorted(int(m["value"]) for m in copied) == list(range(COUNT))
