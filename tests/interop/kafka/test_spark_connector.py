"""Spark's own Kafka connector, from Maven Central, reads and writes our topics: batch and stream."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.interop.kafka.broker import KafkaBroker
from tests.interop.kafka.jars import classpath
from tests.java import QUICK_JAVA

pytestmark = [pytest.mark.peer, pytest.mark.slow]

# The newest connector on Maven Central, and the newest of its helper that is there: no 4.3 of either yet.
ARTIFACTS = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.12.0",
)

JOB = """
import sys
from pyspark.sql import SparkSession
address, jars, checkpoint, java = sys.argv[1:]
spark = (SparkSession.builder.master("local[2]").config("spark.driver.extraClassPath", jars)
         .config("spark.jars", jars.replace(":", ",")).config("spark.ui.enabled", "false")
         .config("spark.driver.extraJavaOptions", java)
         .config("spark.sql.shuffle.partitions", "2").getOrCreate())
spark.sparkContext.setLogLevel("ERROR")
kafka = {"kafka.bootstrap.servers": address}
rows = spark.range(1000).selectExpr("cast(id as string) as key", "concat('v', id) as value")
rows.write.format("kafka").options(**kafka, topic="first").save()
first = spark.read.format("kafka").options(**kafka, subscribe="first").load()
values = {row.value for row in first.selectExpr("cast(value as string)").collect()}
assert values == {f"v{number}" for number in range(1000)}, len(values)
stream = spark.readStream.format("kafka").options(**kafka, subscribe="first", startingOffsets="earliest").load()
query = (stream.selectExpr("key", "upper(cast(value as string)) as value").writeStream.format("kafka")
         .options(**kafka, topic="second", checkpointLocation=checkpoint).trigger(availableNow=True).start())
assert query.awaitTermination(400)
second = spark.read.format("kafka").options(**kafka, subscribe="second").load()
assert second.filter("cast(value as string) like 'V%'").count() == 1000
print("DONE")
"""


@pytest.mark.timeout(700)
def test_sparks_kafka_connector_reads_and_writes(broker: KafkaBroker, tmp_path: Path) -> None:
    jars = classpath("spark-kafka-4.2.0", *ARTIFACTS, bare=True)
    script = tmp_path / "job.py"
    script.write_text(JOB)
    done = subprocess.run(
        [sys.executable, str(script), broker.address, jars, str(tmp_path / "checkpoint"), " ".join(QUICK_JAVA)],
        capture_output=True,
        text=True,
        timeout=660,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["DONE"], done.stdout[-2000:] + done.stderr[-4000:]
