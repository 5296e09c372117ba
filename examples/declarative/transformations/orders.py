"""Orders from a topic, the large ones to another, as Spark's declarative pipelines want it."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

BROKER = os.environ.get("HEADRACE_URL", "http://localhost:15672")
spark = SparkSession.active()

dp.create_sink("large_orders", "headrace", {"bootstrap": BROKER, "topic": "large-orders"})


@dp.temporary_view
def orders() -> DataFrame:
    records = spark.readStream.format("headrace").options(bootstrap=BROKER, topic="orders", startingOffsets="earliest")
    parsed = f.from_json(f.col("value").cast("string"), "customer string, amount double")
    return records.load().select(parsed.alias("order")).select("order.*")


@dp.append_flow(target="large_orders")
def large() -> DataFrame:
    rows = spark.readStream.table("orders").where("amount >= 1000")
    return rows.select(f.col("customer").alias("key"), f.to_json(f.struct("*")).alias("value"))
