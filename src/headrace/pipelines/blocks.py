"""Building blocks: functions from DataFrame to DataFrame that most pipelines need. Use them, or write your own.

Each is a few lines of PySpark. Streaming or not makes no difference to them, unless it says so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor
    from pyspark.sql.types import StructType

ERROR_HEADER = "headrace.error"
PLACE_HEADER = "headrace.place"
_CORRUPT = "_headrace_corrupt"


def decode_json(records: "DataFrame", schema: str) -> "tuple[DataFrame, DataFrame]":
    """(good, bad). Good rows have the fields of `schema` beside key, topic, partition, offset and timestamp; a field of
    one of these names takes its place. Bad ones are the records as they were, with the reason in a header: rows for the
    dead-letter topic."""
    from pyspark.sql import functions as f

    fields = f"{schema}, `{_CORRUPT}` string"
    json = f.from_json(f.col("value").cast("string"), fields, {"columnNameOfCorruptRecord": _CORRUPT})
    parsed = records.withColumn("_json", json)
    is_bad = f.col("value").isNull() | f.col("_json").isNull() | f.col(f"_json.{_CORRUPT}").isNotNull()
    named = {name.lower() for name in parsed.select("_json.*").columns}  # to Spark, whatever their case
    ours = ("key", "topic", "partition", "offset", "timestamp")
    kept = [name for name in ours if name in records.columns and name not in named]
    good = parsed.where(~is_bad).select(*kept, "_json.*").drop(_CORRUPT)
    reason = f.when(f.col("value").isNull(), "the value is null").otherwise(f.lit(f"the value is not JSON of {schema}"))
    return good, failed(parsed.where(is_bad).withColumn("_reason", reason), "_reason")


def failed(records: "DataFrame", reason: "str | Column") -> "DataFrame":
    """Records for the dead-letter topic: key and value as they were, why they failed and where they lay as headers."""
    from pyspark.sql import functions as f

    why = f.col(reason) if isinstance(reason, str) else reason
    place = f.concat_ws("/", f.col("topic"), f.col("partition").cast("string"), f.col("offset").cast("string"))
    headers = f.array(
        *(
            f.struct(f.lit(name).alias("key"), text.cast("string").cast("binary").alias("value"))
            for name, text in ((ERROR_HEADER, why), (PLACE_HEADER, place))
        )
    )
    return records.select("key", "value", headers.alias("headers"), "timestamp")


def encode_json(rows: "DataFrame", *, key: str | None = None, topic: "str | Column | None" = None) -> "DataFrame":
    """Rows for a sink: every column as one JSON object in `value`, one of them as the key if wanted."""
    from pyspark.sql import functions as f

    columns = [f.to_json(f.struct("*")).alias("value")]
    if key is not None:
        columns.insert(0, f.col(key).cast("string").alias("key"))
    if topic is not None:
        columns.append((f.col(topic) if isinstance(topic, str) else topic).alias("topic"))
    return rows.select(*columns)


def enrich(rows: "DataFrame", table: "DataFrame", on: str | Sequence[str], *, required: bool = False) -> "DataFrame":
    """Columns of a static table added by key. Rows without a match stay, unless `required`."""
    from pyspark.sql import functions as f

    keys = [on] if isinstance(on, str) else list(on)
    return rows.join(f.broadcast(table), keys, "inner" if required else "left")


def deduplicate(rows: "DataFrame", keys: str | Sequence[str], *, within: str, time: str = "timestamp") -> "DataFrame":
    """The first row of each key within a span of time, such as "10 minutes". State is kept for no longer than that."""
    names = [keys] if isinstance(keys, str) else list(keys)
    if not rows.isStreaming:
        return rows.dropDuplicates(names)
    return rows.withWatermark(time, within).dropDuplicatesWithinWatermark(names)


def aggregate(
    rows: "DataFrame",
    *,
    window: str,
    by: Sequence[str] = (),
    values: "Mapping[str, Column]",
    late: str = "0 seconds",
    time: str = "timestamp",
) -> "DataFrame":
    """One row per window and group, written when the window is over and `late` more has passed."""
    from pyspark.sql import functions as f

    grouped = rows.withWatermark(time, late).groupBy(f.window(time, window), *by)
    named = [column.alias(name) for name, column in values.items()]
    ends = [f.col("window.start").alias("start"), f.col("window.end").alias("end")]
    return grouped.agg(*named).select(*ends, *by, *values)


def stateful(
    rows: "DataFrame",
    *,
    by: str | Sequence[str],
    processor: "StatefulProcessor",
    schema: "str | StructType",
    time_mode: str = "None",
    output_mode: str = "Update",
) -> "DataFrame":
    """A StatefulProcessor over the rows of each key (transformWithState)."""
    names = [by] if isinstance(by, str) else list(by)
    grouped = rows.groupBy(*names)
    return grouped.transformWithState(
        statefulProcessor=processor, outputStructType=schema, outputMode=output_mode, timeMode=time_mode
    )


def fan_out(rows: "DataFrame", topic: "Column") -> "DataFrame":
    """Rows for a sink without a topic of its own: each goes where the expression says."""
    return rows.withColumn("topic", topic)


def map_arrow(
    rows: "DataFrame", function: "Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]", schema: Any
) -> "DataFrame":
    """A function over Arrow record batches: the cheapest way to run Python on every row."""
    return rows.mapInArrow(function, schema)
