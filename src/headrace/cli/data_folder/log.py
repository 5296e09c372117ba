"""`headrace log`: inspect and verify the logs of a data folder, and maintain topics."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.data_folder.folder import Folder, data_dir_option
from headrace.cli.data_folder.maintenance import Engine, compact, is_for_spark, on_option, recompress, replay, tier
from headrace.cli.data_folder.repair import repair
from headrace.cli.lazy import AliasGroup
from headrace.cli.options import json_option

if TYPE_CHECKING:
    from headrace.log.recovery.inspect import Inspector, LogFacts

DAMAGED = 6
DUMP_COLUMNS = ("segment", "position", "base_offset", "last_offset", "records", "bytes", "timestamp", "codec", "flags")


@click.group(cls=AliasGroup)
def log() -> None:
    """Inspect, verify and repair the logs of a data folder, and maintain topics.

    ls, dump, verify and reindex read the files themselves; LOG is an id or a name from `headrace log ls`. compact,
    recompress, tier and replay need a running broker. repair is for a data folder that a broker cannot open.
    """


for command in (compact, recompress, tier, replay, repair):
    log.add_command(command)


@log.command("ls")
@json_option
@data_dir_option
def ls(as_json: bool, data_dir: str | None, config_file: Path | None) -> None:
    """List the logs, one per partition.

    Columns: id, name, start, end, segments, archived (segments in the tier), bytes. The end is empty until a broker
    has recorded it.
    """
    from headrace.cli.output import Row, show_json, show_rows

    with Folder(data_dir, config_file) as folder:
        rows: list[Row] = [
            {
                "id": facts.id,
                "name": facts.slug,
                "start": facts.start,
                "end": facts.visible_end,
                "segments": len(facts.segments),
                "archived": facts.archived,
                "bytes": facts.size_bytes,
            }
            for facts in folder.inspector.logs()
        ]
        if as_json:
            show_json({"data_dir": folder.path, "broker_pid": folder.broker_pid, "logs": rows})
        else:
            show_rows(rows, ("id", "name", "start", "end", "segments", "archived", "bytes"), empty="no logs")


@log.command("dump")
@click.argument("log_name", metavar="LOG")
@click.option(
    "-o", "--offset", type=click.IntRange(0), metavar="N", default=0, show_default=True, help="Start at this offset."
)
@click.option("-c", "--count", type=click.IntRange(1), metavar="N", help="Stop after N messages or batches.")
@click.option("-b", "--batches", is_flag=True, help="Print batches, as stored on disk, instead of messages.")
@json_option
@data_dir_option
def dump(
    log_name: str,
    offset: int,
    count: int | None,
    batches: bool,
    as_json: bool,
    data_dir: str | None,
    config_file: Path | None,
) -> None:
    """Print the messages of LOG, one per line, or its batches.

    Columns with -b: segment, position, base_offset, last_offset, records, bytes, timestamp, codec, flags. The flag
    delete_horizon=MS is the time from which compaction removes the batch's tombstones.
    """
    from itertools import islice

    with Folder(data_dir, config_file) as folder:
        facts = folder.find(log_name)
        lines = _batch_lines if batches else _message_lines
        out = sys.stdout.buffer
        for line in islice(lines(folder.inspector, facts, offset, as_json), count):
            out.write(line)
        out.flush()


def _batch_lines(inspector: "Inspector", facts: "LogFacts", offset: int, as_json: bool) -> Iterator[bytes]:
    import msgspec

    from headrace.record.layout import CODEC_NAMES

    # Read from the start of the segment, to compute the position of each batch.
    first = max((s.base for s in facts.segments if s.base <= offset), default=0)
    position, current = 0, None
    for segment, _, info in inspector.batches(facts, first):
        if segment is not current:
            position, current = 0, segment
        at, position = position, position + info.size
        if info.last_offset < offset:
            continue
        flags = [name for name in ("transactional", "control") if getattr(info, f"is_{name}")]
        if info.delete_horizon_ms is not None:
            flags.append(f"delete_horizon={info.delete_horizon_ms}")
        row: dict[str, Any] = {
            "segment": segment.base,
            "position": at,
            "base_offset": info.base_offset,
            "last_offset": info.last_offset,
            "records": info.count,
            "bytes": info.size,
            "timestamp": info.max_timestamp,
            "codec": CODEC_NAMES.get(info.codec, str(info.codec)),
            "flags": " ".join(flags),
        }
        yield msgspec.json.encode(row) + b"\n" if as_json else _tsv(row)


def _tsv(row: dict[str, Any]) -> bytes:
    return "\t".join(str(row[column]) for column in DUMP_COLUMNS).encode() + b"\n"


def _message_lines(inspector: "Inspector", facts: "LogFacts", offset: int, as_json: bool) -> Iterator[bytes]:
    from headrace.cli.messages.tail import readable
    from headrace.client.shapes import Message, message_json
    from headrace.record import codec

    for _, data, info in inspector.batches(facts, offset):
        for record in codec.records(data, info.position, info.position + info.size, from_offset=offset):
            message = Message(0, record.offset, record.timestamp, record.key, record.value, record.headers)
            yield message_json(message) if as_json else readable(message, str(record.offset)).encode() + b"\n"


@log.command("verify")
@click.argument("log_names", nargs=-1, metavar="[LOG]...")
@on_option
@json_option
@data_dir_option
def verify(
    log_names: tuple[str, ...], on: Engine, as_json: bool, data_dir: str | None, config_file: Path | None
) -> int:
    """Verify every batch, offset, seal and index of LOG, or of all logs.

    Exits with 0 if everything is sound and with 6 if something is damaged. Prints one line per problem.
    """
    from headrace.cli.output import show_facts, show_json
    from headrace.cli.progress import bar

    with Folder(data_dir, config_file) as folder:
        chosen = folder.choose(log_names)
        size = folder.size_bytes(chosen)
        if is_for_spark(on, size):
            from headrace.pipelines.maintenance import verify as verify_logs

            ids = [facts.id for facts in folder.inspector.logs() if chosen is None or facts.id in chosen]
            report = verify_logs(folder.path, ids, on="spark")
        else:
            with bar("verifying", size) as moved:
                report = folder.inspector.verify(chosen, moved)
    facts: dict[str, Any] = {
        "logs": report.logs,
        "segments": report.segments,
        "batches": report.batches,
        "records": report.records,
        "bytes": report.bytes,
    }
    if as_json:
        show_json({"sound": report.is_sound, **facts, "problems": report.problems})
    else:
        show_facts({"sound": report.is_sound, **facts})
        for problem in report.problems:
            click.echo(f"problem\t{problem}")
    return 0 if report.is_sound else DAMAGED


@log.command("reindex")
@click.argument("log_names", nargs=-1, metavar="[LOG]...")
@on_option
@json_option
@data_dir_option
def reindex(
    log_names: tuple[str, ...], on: Engine, as_json: bool, data_dir: str | None, config_file: Path | None
) -> None:
    """Rebuild the indexes of the sealed segments of LOG, or of all logs. The broker must be stopped."""
    from headrace.cli.output import show_facts, show_json
    from headrace.cli.progress import bar

    with Folder(data_dir, config_file, quiet=True) as folder:
        chosen = folder.choose(log_names)
        size = sum(segment.size for _, segment in folder.inspector.indexed(chosen))
        if is_for_spark(on, size):
            from headrace.pipelines.maintenance import reindex as reindex_logs

            done = reindex_logs(folder.path, chosen, on="spark")
        else:
            with bar("reindexing", size) as moved:
                done = folder.inspector.reindex(chosen, moved)
    if as_json:
        show_json({"segments": done})
    else:
        show_facts({"segments": done})
