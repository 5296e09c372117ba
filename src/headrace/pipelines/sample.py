"""The sample that `headrace pipeline init` writes: small, commented, and run by a test as it is."""

SAMPLE = '''\
"""Orders come in as JSON; what is not JSON goes to the dead-letter topic; totals per customer go out.

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
    # Where records come from. A source has the columns of Spark's Kafka source: key, value, topic, partition,
    # offset, timestamp. With pin=True retention waits for this pipeline.
    sources={"orders": Source("orders")},
    # Where rows go. A sink needs a column `value`; `key`, `headers`, `timestamp` and `topic` if you like.
    sinks={
        "totals": Sink("totals", output_mode="update"),
        "large": Sink("large-orders", compression="zstd"),
    },
    # How often to look for new records (with --once it reads what is there and stops).
    trigger="1s",
    # Where records go that could not be read, with the reason in a header.
    dead_letter="orders.dead",
)

SCHEMA = "customer string, amount double"


# A flow is a function from DataFrames, one per source it names, to the rows of its sink. It may return the rows
# that failed as well. Each flow is one exactly-once query with a cursor of its own: `headrace pipeline status`.
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
