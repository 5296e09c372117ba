"""Building blocks for pipelines: functions from DataFrame to DataFrame, each a few lines of PySpark.

They work on streaming and static DataFrames alike, unless the docstring says otherwise.
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
    """Parses values as JSON and returns (good, bad).

    Good rows have the fields of `schema` next to key, topic, partition, offset and timestamp; a field with one of these
    names replaces the column. Bad rows are for the dead-letter topic: the original records with the reason in a header.
    """
    from pyspark.sql import functions as f

    fields = f"{schema}, `{_CORRUPT}` string"
    json = f.from_json(f.col("value").cast("string"), fields, {"columnNameOfCorruptRecord": _CORRUPT})
    parsed = records.withColumn("_json", json)
    is_bad = f.col("value").isNull() | f.col("_json").isNull() | f.col(f"_json.{_CORRUPT}").isNotNull()
    named = {name.lower() for name in parsed.select("_json.*").columns}  # Spark ignores the case of names
    ours = ("key", "topic", "partition", "offset", "timestamp")
    kept = [name for name in ours if name in records.columns and name not in named]
    good = parsed.where(~is_bad).select(*kept, "_json.*").drop(_CORRUPT)
    reason = f.when(f.col("value").isNull(), "the value is null").otherwise(
        f.lit(f"the value is not JSON with the schema {schema}")
    )
    return good, failed(parsed.where(is_bad).withColumn("_reason", reason), "_reason")


def failed(records: "DataFrame", reason: "str | Column") -> "DataFrame":
    """Rows for the dead-letter topic: the original key and value, with the reason and the place as headers."""
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
    """Rows for a sink: all columns as a JSON object in `value`, and optionally one column as the key."""
    from pyspark.sql import functions as f

    columns = [f.to_json(f.struct("*")).alias("value")]
    if key is not None:
        columns.insert(0, f.col(key).cast("string").alias("key"))
    if topic is not None:
        columns.append((f.col(topic) if isinstance(topic, str) else topic).alias("topic"))
    return rows.select(*columns)


def enrich(rows: "DataFrame", table: "DataFrame", on: str | Sequence[str], *, required: bool = False) -> "DataFrame":
    """Adds columns of a static table by key. Rows without a match are kept, unless `required`."""
    from pyspark.sql import functions as f

    keys = [on] if isinstance(on, str) else list(on)
    return rows.join(f.broadcast(table), keys, "inner" if required else "left")


def deduplicate(rows: "DataFrame", keys: str | Sequence[str], *, within: str, time: str = "timestamp") -> "DataFrame":
    """Keeps the first row of each key within a time span such as "10 minutes". Keys are remembered only that long."""
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
    """One row per window and group, emitted once the window has ended and the time `late` has passed."""
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
    """Applies a StatefulProcessor to the rows of each key (transformWithState)."""
    names = [by] if isinstance(by, str) else list(by)
    grouped = rows.groupBy(*names)
    return grouped.transformWithState(
        statefulProcessor=processor, outputStructType=schema, outputMode=output_mode, timeMode=time_mode
    )


def fan_out(rows: "DataFrame", topic: "Column") -> "DataFrame":
    """Rows for a sink without a topic: the expression gives the topic of each row."""
    return rows.withColumn("topic", topic)


def map_arrow(
    rows: "DataFrame", function: "Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]", schema: Any
) -> "DataFrame":
    """Applies a function to Arrow record batches, the cheapest way to run Python on every row."""
    return rows.mapInArrow(function, schema)
