"""The demo's pipeline: revenue per minute and product. Values that are not orders go to the topic orders.bad.

To run it by hand, use `headrace pipeline run` with the path of this file.
"""

from typing import Any

from pyspark.sql import functions as f

from headrace.pipelines import Pipeline, Sink, Source, blocks

pipeline = Pipeline(
    "revenue",
    sources={"orders": Source("orders")},
    sinks={"revenue": Sink("revenue", output_mode="update")},
    trigger="2s",
    dead_letter="orders.bad",
)

SCHEMA = "product string, quantity int, amount double"


@pipeline.flow(to="revenue")
def revenue(orders: Any) -> Any:
    good, bad = blocks.decode_json(orders, SCHEMA)
    per_minute = (
        good.withWatermark("timestamp", "5 minutes")
        .groupBy(f.window("timestamp", "1 minute").alias("window"), "product")
        .agg(f.round(f.sum("amount"), 2).alias("revenue"), f.count("*").alias("orders"))
    )
    rows = per_minute.select(f.date_format("window.start", "HH:mm").alias("minute"), "product", "revenue", "orders")
    return blocks.encode_json(rows, key="product"), bad
