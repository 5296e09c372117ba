"""The sample pipeline that `headrace pipeline init` writes. A test runs it unchanged."""

SAMPLE = '''\
"""Reads orders in JSON and writes totals per customer. Values that are not JSON go to the dead-letter topic.

Try it:

    headrace serve &
    headrace pub orders '{"customer": "ann", "amount": 12.5}'
    headrace pub orders 'this is not JSON'
    headrace pipeline run THIS_FILE --once
    headrace sub totals -o earliest --exit
"""

from pyspark.sql import functions as f

from headrace.pipelines import Pipeline, Sink, Source, blocks

pipeline = Pipeline(
    "orders",
    # Topics to read. A source has the columns of Spark's Kafka source: key, value, topic, partition, offset,
    # timestamp. With pin=True, retention does not delete records before this pipeline has read them.
    sources={"orders": Source("orders")},
    # Topics to write. A sink needs a column `value`; `key`, `headers`, `timestamp` and `topic` are optional.
    sinks={
        "totals": Sink("totals", output_mode="update"),
        "large": Sink("large-orders", compression="zstd"),
    },
    # How often to start a batch for new records. (With --once, the pipeline reads up to the current end and exits.)
    trigger="1s",
    # Topic for records that could not be parsed, with the reason in a header.
    dead_letter="orders.dead",
)

SCHEMA = "customer string, amount double"


# A flow is a function from DataFrames, one for each source it names, to the rows of its sink. It may also return the
# failed rows. Each flow is an exactly-once query with its own cursor; `headrace pipeline status` shows its progress.
@pipeline.flow(to="totals")
def totals(orders):
    good, bad = blocks.decode_json(orders, SCHEMA)
    sums = good.groupBy("customer").agg(f.sum("amount").alias("total"), f.count("*").alias("orders"))
    return blocks.encode_json(sums, key="customer"), bad


@pipeline.flow(to="large")
def large_orders(orders):
    good, _ = blocks.decode_json(orders, SCHEMA)
    return blocks.encode_json(good.where("amount >= 1000").select("customer", "amount"), key="customer")
'''
