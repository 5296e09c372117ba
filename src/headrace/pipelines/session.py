"""A Spark session as pipelines need it: the right Python, retried tasks, cheap checkpoints, no surprises."""

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.pipelines.java import check_java, check_pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CHECKPOINTS = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
TASK_ATTEMPTS = 4
# Spark knows how many rows a batch has and asks for nulls itself; Arrow would check both again at every value.
ARROW_UNCHECKED = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"


def settings(master: str, cores: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What every session gets; `extra` wins. See docs/pipelines.md for the reason of each."""
    chosen = {
        "spark.sql.streaming.checkpointFileManagerClass": CHECKPOINTS,  # half the latency of a micro-batch
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB,  # what transformWithState needs
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.task.maxFailures": str(TASK_ATTEMPTS),
        # Defaults, not extraJavaOptions: those are for whoever runs the pipeline.
        "spark.driver.defaultJavaOptions": ARROW_UNCHECKED,
        "spark.executor.defaultJavaOptions": ARROW_UNCHECKED,
    }
    if os.name == "posix":
        # Rows between the JVM and Python: a fifth cheaper than over TCP, and nobody else can connect.
        chosen["spark.python.unix.domain.socket.enabled"] = "true"
    if master.startswith("local"):
        chosen |= {
            "spark.sql.shuffle.partitions": str(cores),
            "spark.driver.memory": "1g",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
        }
    return chosen | dict(extra or {})


def local_master(cores: int | None = None) -> str:
    """All cores, and four attempts for each task: plain local[N] fails a query on the first error."""
    return f"local[{cores or os.cpu_count() or 1},{TASK_ATTEMPTS}]"


def build(
    name: str, *, master: str | None = None, conf: Mapping[str, str] | None = None, cores: int | None = None
) -> "SparkSession":
    """Checks PySpark and Java, then starts (or joins) the one session of this process."""
    check_pyspark()
    check_java()
    # Workers run the Python that runs this; whatever `python3` is on the PATH may lack our packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    master = master or local_master(cores)
    if master.startswith("local"):  # the workers of a cluster would look for the driver on their own machines
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name).master(master)
    for key, value in settings(master, cores or os.cpu_count() or 1, conf).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session
