"""`headrace log compact|recompress|tier|replay`: maintenance of a running broker's topics, here or on Spark."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from headrace.cli.options import Command, broker_url, json_option, url_option
from headrace.errors import InvalidInput

if TYPE_CHECKING:
    from headrace.pipelines.maintenance import Done

Engine = Literal["auto", "local", "spark"]
SPARK_BYTES_MIN = 4 << 30
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def on_option(command: Command) -> Command:
    return click.option(
        "--on",
        type=click.Choice(["auto", "local", "spark"]),
        default="auto",
        show_default=True,
        help="Where to run: local is this process; auto is Spark from 4 GB on, if PySpark is installed.",
    )(command)


def is_for_spark(on: Engine, size: int) -> bool:
    """Whether the job runs on Spark. Does not import PySpark, which a small job does not need."""
    if on != "auto":
        return on == "spark"
    from importlib.util import find_spec

    return size >= SPARK_BYTES_MIN and find_spec("pyspark") is not None


@click.command("compact")
@click.argument("topic")
@on_option
@json_option
@url_option
def compact(topic: str, on: Engine, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """Compact TOPIC: keep only the last record of each key in its sealed segments.

    Offsets do not change. On Spark, the topic must have cleanup_policy=compact.
    """
    from headrace.pipelines.maintenance import TopicMaintenance

    maintenance = TopicMaintenance(broker_url(url, config_file), on=on)
    _show(maintenance.compact(topic), as_json)


@click.command("recompress")
@click.argument("topic")
@click.option("--codec", type=click.Choice(CODECS), default="zstd", show_default=True, help="Compression codec.")
@on_option
@json_option
@url_option
def recompress(topic: str, codec: str, on: Engine, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """Recompress the sealed segments of TOPIC with another codec. Records and offsets do not change."""
    from headrace.pipelines.maintenance import TopicMaintenance

    maintenance = TopicMaintenance(broker_url(url, config_file), on=on)
    _show(maintenance.recompress(topic, codec), as_json)


@click.command("tier")
@click.argument("topic")
@click.option("--restore", is_flag=True, help="Turn archived segments back into local segments.")
@click.option(
    "--older-than",
    metavar="DURATION",
    help="Only segments whose newest record is older than this, such as 7d.  [default: all sealed segments]",
)
@on_option
@json_option
@url_option
def tier(
    topic: str,
    restore: bool,
    older_than: str | None,
    on: Engine,
    as_json: bool,
    url: str | None,
    config_file: Path | None,
) -> None:
    """Archive the sealed segments of TOPIC as Parquet files (zstd) in the folder `tier_dir`.

    Clients still read the same records at the same offsets. The broker deletes a segment only after it has read the
    Parquet file back and compared it. If interrupted, run the command again. Needs pyarrow, here and at the broker.
    """
    import time

    from headrace.config import parse_duration
    from headrace.pipelines.maintenance import TopicMaintenance

    if restore and older_than is not None:
        raise InvalidInput("--older-than cannot be combined with --restore")
    try:
        before_ms = None if older_than is None else int(time.time() * 1000) - parse_duration(older_than)
    except ValueError as error:
        raise InvalidInput(f"--older-than: {error}") from None
    maintenance = TopicMaintenance(broker_url(url, config_file), on=on)
    done = maintenance.restore(topic) if restore else maintenance.tier(topic, before_ms=before_ms)
    _show(done, as_json)


@click.command("replay")
@click.argument("topic")
@click.argument("target")
@click.option(
    "--start",
    metavar="WHERE",
    default="earliest",
    show_default=True,
    help='earliest, or offsets as JSON: {"TOPIC": {"0": 100}}. Partitions not listed start at their beginning.',
)
@click.option("--id", "write_id", help="Name of this replay. A second run with the same name stores nothing.")
@on_option
@json_option
@url_option
def replay(
    topic: str,
    target: str,
    start: str,
    write_id: str | None,
    on: Engine,
    as_json: bool,
    url: str | None,
    config_file: Path | None,
) -> None:
    """Copy the records of TOPIC to TARGET atomically, with keys, headers and timestamps."""
    from headrace.cli.output import show_facts, show_json
    from headrace.pipelines.maintenance import TopicMaintenance

    count = TopicMaintenance(broker_url(url, config_file), on=on).replay(topic, target, start=start, write_id=write_id)
    if as_json:
        show_json({"records": count})
    else:
        show_facts({"records": count})


def _show(done: "Done", as_json: bool) -> None:
    from headrace.cli.output import show_facts, show_json

    for reason in done.left:
        click.echo(f"headrace: {reason}", err=True)
    written = done.written
    facts = {
        "segments": len(written),
        "bytes_before": sum(w.bytes_before for w in written),
        "bytes_after": sum(w.bytes_after for w in written),
        "records": sum(w.records for w in written),
    }
    if as_json:
        show_json(facts)
    else:
        show_facts(facts)
