"""The source and the sink through Spark Connect, where the session is only a client of a server."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from headrace.pipelines.java import JavaMissing, check_java
from tests.spark.test_sink import values
from tests.spark.world import ANY_PORT, JAVA_OPTIONS, RunningBroker, numbered, run_patiently

CLIENT = """
import sys
from pyspark.sql import SparkSession

path, url, folder, java = sys.argv[1:]
builder = SparkSession.builder.remote("local[1]").config("spark.sql.shuffle.partitions", "1")
builder = builder.config("spark.driver.extraJavaOptions", java)
spark = builder.config("spark.ui.enabled", "false").getOrCreate()
print("CLIENT", type(spark).__module__, flush=True)
source = {"path": path, "topic": "connect-in"}
rows = spark.read.format("headrace").options(**source).load()
print("ROWS", rows.count(), rows.columns, flush=True)
stream = spark.readStream.format("headrace").options(startingOffsets="earliest", **source).load()
writer = stream.select("key", "value").writeStream.format("headrace")
writer = writer.options(bootstrap=url, topic="connect-out", checkpointLocation=folder)
query = writer.trigger(availableNow=True).start()
query.awaitTermination()
print("DONE", query.exception(), flush=True)
spark.stop()
"""


def test_source_and_sink_work_through_spark_connect(shared_broker: RunningBroker, tmp_path: Path) -> None:
    try:
        check_java()
    except JavaMissing as missing:
        pytest.skip(f"Spark: {missing}")
    if importlib.util.find_spec("grpc") is None:
        pytest.skip("Spark Connect: pyspark[connect] is not installed")
    broker = shared_broker
    for topic in ("connect-in", "connect-out"):
        broker.create(topic, 2)
    broker.publish("connect-in", numbered(500))
    environment = dict(os.environ, SPARK_LOCAL_IP="127.0.0.1", PYTHONWARNINGS="ignore", **ANY_PORT)
    arguments = [broker.path, broker.url, str(tmp_path / "checkpoint"), JAVA_OPTIONS]
    answer = run_patiently([sys.executable, "-c", CLIENT, *arguments], env=environment)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert "CLIENT pyspark.sql.connect.session" in answer.stdout
    assert "ROWS 500 ['key', 'value', 'topic'" in answer.stdout and "DONE None" in answer.stdout
    assert values(broker, "connect-out") == [str(n) for n in range(500)]
