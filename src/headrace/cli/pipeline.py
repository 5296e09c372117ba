"""`headrace pipeline`: run a pipeline on Spark, and see how those that run are doing."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.lazy import AliasGroup
from headrace.cli.options import broker_url, json_answer, json_option, living_broker, url_option
from headrace.errors import AlreadyExists, InvalidInput

if TYPE_CHECKING:
    from headrace.client.admin import Client

FAILED = 1
COLUMNS = ("name", "state", "lag", "rows_per_second", "batch_ms", "rows_total", "last_error")


@click.group(cls=AliasGroup)
def pipeline() -> None:
    """Run pipelines on Spark: Python files with plain PySpark functions. docs/pipelines.md says more."""


@pipeline.command("init")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default="pipeline.py")
@json_option
def init(file: Path, as_json: bool) -> None:
    """Write a commented sample pipeline to FILE."""
    from headrace.cli.output import show_json
    from headrace.pipelines.sample import SAMPLE

    try:
        with file.open("x") as target:
            target.write(SAMPLE.replace("THIS_FILE", str(file)))
    except FileExistsError:
        raise AlreadyExists(f"{file} is there already; say another name") from None
    if as_json:
        show_json({"written": str(file)})
        return
    click.echo(f"{file}\nrun it with: headrace pipeline run {file}")


@pipeline.command("run")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Read what is there and stop, instead of following for ever.")
@click.option("--master", help="Spark master, such as spark://HOST:7077; otherwise this machine, with all its cores.")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    default="headrace-checkpoints",
    show_default=True,
    help="Folder that keeps how far each flow is. Deleting it starts from the beginning, as a new writer.",
)
@click.option("-c", "--conf", multiple=True, metavar="KEY=VALUE", help="A setting of Spark; may be repeated.")
@url_option
def run(
    file: Path,
    once: bool,
    master: str | None,
    checkpoint: Path,
    conf: tuple[str, ...],
    url: str | None,
    config_file: Path | None,
) -> int:
    """Run the pipeline in FILE until it is stopped: by Ctrl-C, SIGTERM or `headrace pipeline stop`.

    It ends after the batch that is under way. The exit code is 0 when it was stopped or has read everything, and
    1 when a flow failed.
    """
    from headrace.pipelines.java import check_java, check_pyspark

    check_pyspark()
    check_java()  # before anything else takes its time
    from headrace.pipelines.load import load_pipeline
    from headrace.pipelines.run import PipelineFailed, Running, Where
    from headrace.pipelines.session import build

    settings = dict(_pair(text) for text in conf)
    declared = load_pipeline(file)
    where = Where(living_broker(url, config_file), local=master is None or master.startswith("local"))
    click.echo(f"{declared.name}  {len(declared.flows)} flows  starting Spark", err=True)
    session = build(f"headrace {declared.name}", master=master, conf=declared.conf | settings)
    try:
        running = Running(
            declared, session, where, checkpoint.absolute(), once=once, say=lambda line: click.echo(line, err=True)
        )
        running.stop_on_signals()
        running.run()
    except PipelineFailed as failed:
        click.echo(f"headrace: {failed}", err=True)
        return FAILED
    finally:
        with contextlib.suppress(Exception):  # a JVM that is gone cannot be asked to stop, and what went wrong is told
            session.stop()
    return 0


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidInput(f"{text!r} is not a setting of Spark; write KEY=VALUE")
    return name, value


@pipeline.command("ls")
@json_option
@url_option
def ls(as_json: bool, url: str | None, config_file: Path | None) -> None:
    """List the pipelines that reported to the broker.

    Columns: name, state, lag, rows_per_second, batch_ms, rows_total, last_error. A state of `lost` means that a
    running pipeline has said nothing for half a minute.
    """
    from headrace.cli.output import show_json, show_rows

    with _client(url, config_file) as client:
        answer = client.get("/pipelines")
    if as_json:
        show_json(answer)
    else:
        show_rows([_row(one) for one in answer["pipelines"]], COLUMNS, empty="no pipeline has reported yet")


@pipeline.command("status")
@click.argument("name")
@json_option
@url_option
def status(name: str, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """Show how the pipeline NAME is: over all, and flow by flow."""
    from headrace.cli.output import for_people, show_facts, show_json, show_rows
    from headrace.client.exchange import path_of

    with _client(url, config_file) as client:
        answer = client.get(path_of("pipelines", name))
    if as_json:
        show_json(answer)
        return
    show_facts(_row(answer))
    if for_people():
        click.echo()
    rows = [{"flow": flow, **said} for flow, said in answer["details"].get("flows", {}).items()]
    columns = ("flow", "batch", "rows", "input_rows_per_second", "rows_per_second", "batch_ms", "lag")
    show_rows(rows, columns, empty="no flow has run yet")


@pipeline.command("stop")
@click.argument("name")
@url_option
@json_answer
def stop(name: str, url: str | None, config_file: Path | None) -> dict[str, object]:
    """Ask the pipeline NAME to stop after its batch, wherever it runs."""
    from headrace.pipelines.run import ask_to_stop

    answer = ask_to_stop(broker_url(url, config_file), name)
    if sys.stderr.isatty():
        click.echo(f"{name} is {answer['state']} and was asked to stop", err=True)
    return {"stopping": [name], "state": answer["state"]}


def _client(url: str | None, config_file: Path | None) -> "Client":
    from headrace.client.admin import Client

    return Client(broker_url(url, config_file))


def _row(one: dict[str, Any]) -> dict[str, Any]:
    said = one["details"]
    return {"name": one["name"], "state": one["state"], **{name: said.get(name) for name in COLUMNS[2:]}}
