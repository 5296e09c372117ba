"""Builds the Spark session for pipelines: the same Python on workers, retried tasks, cheap checkpoints."""

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
# Spark checks bounds and nulls itself; Arrow would check both again for every value.
ARROW_UNCHECKED = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"


def settings(master: str, cores: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The settings of every session; `extra` overrides them. docs/pipelines.md explains each."""
    chosen = {
        "spark.sql.streaming.checkpointFileManagerClass": CHECKPOINTS,  # halves the latency of a micro-batch
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB,  # required by transformWithState
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.task.maxFailures": str(TASK_ATTEMPTS),
        # defaultJavaOptions, because extraJavaOptions belong to the user.
        "spark.driver.defaultJavaOptions": ARROW_UNCHECKED,
        "spark.executor.defaultJavaOptions": ARROW_UNCHECKED,
    }
    if os.name == "posix":
        # Rows pass between the JVM and Python a fifth cheaper than over TCP, and other users cannot connect.
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
    """All cores, and four attempts per task: with plain local[N], the first error fails the query."""
    return f"local[{cores or os.cpu_count() or 1},{TASK_ATTEMPTS}]"


def build(
    name: str, *, master: str | None = None, conf: Mapping[str, str] | None = None, cores: int | None = None
) -> "SparkSession":
    """Checks PySpark and Java, then starts the session of this process or returns the existing one."""
    check_pyspark()
    check_java()
    # Workers use this Python; the `python3` on the PATH may lack our packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    master = master or local_master(cores)
    if master.startswith("local"):  # not on a cluster: its workers would look for the driver on their own machines
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name).master(master)
    for key, value in settings(master, cores or os.cpu_count() or 1, conf).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session
