"""`headrace pipeline`: run pipelines on Spark, and show the state of running ones."""

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

from headrace.cli.lazy import AliasGroup
from headrace.cli.options import broker_client, broker_url, json_answer, json_option, living_broker, url_option
from headrace.errors import AlreadyExists, InvalidInput

FAILED = 1
COLUMNS = ("name", "state", "lag", "rows_per_second", "batch_ms", "rows_total", "last_error")


@click.group(cls=AliasGroup)
def pipeline() -> None:
    """Run, list and stop pipelines on Spark. A pipeline is a Python file with PySpark functions (docs/pipelines.md)."""


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
        raise AlreadyExists(f"{file} already exists; choose another name") from None
    if as_json:
        show_json({"written": str(file)})
        return
    click.echo(f"{file}\nrun it with: headrace pipeline run {file}")


@pipeline.command("run")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Read up to the current end, then exit.")
@click.option("--master", help="Spark master, such as spark://HOST:7077.  [default: this machine with all its cores]")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    default="headrace-checkpoints",
    show_default=True,
    help="Folder for the progress of each flow. Without it, flows start from the beginning, as new writers.",
)
@click.option("-c", "--conf", multiple=True, metavar="KEY=VALUE", help="Spark setting. Repeatable.")
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
    """Run the pipeline in FILE until Ctrl-C, SIGTERM or `headrace pipeline stop`.

    It stops after the current batch. Exits with 0 if it was stopped or has read everything, and with 1 if a flow
    failed.
    """
    from headrace.pipelines.java import check_java, check_pyspark

    check_pyspark()
    check_java()  # fail before the slow start of Spark
    from headrace.pipelines.load import load_pipeline
    from headrace.pipelines.run import BrokerEndpoint, PipelineFailed, PipelineRunner
    from headrace.pipelines.session import build

    settings = dict(_pair(text) for text in conf)
    declared = load_pipeline(file)
    where = BrokerEndpoint(living_broker(url, config_file), local=master is None or master.startswith("local"))
    click.echo(f"{declared.name}  {len(declared.flows)} flows  starting Spark", err=True)
    session = build(f"headrace {declared.name}", master=master, conf=declared.conf | settings)
    try:
        running = PipelineRunner(
            declared, session, where, checkpoint.absolute(), once=once, say=lambda line: click.echo(line, err=True)
        )
        running.stop_on_signals()
        running.run()
    except PipelineFailed as failed:
        click.echo(f"headrace: {failed}", err=True)
        return FAILED
    finally:
        with contextlib.suppress(Exception):  # the JVM may have died; its failure is already reported
            session.stop()
    return 0


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidInput(f"{text!r} is not a Spark setting; write KEY=VALUE")
    return name, value


@pipeline.command("ls")
@json_option
@url_option
def ls(as_json: bool, url: str | None, config_file: Path | None) -> None:
    """List the pipelines that have reported to the broker.

    Columns: name, state, lag, rows_per_second, batch_ms, rows_total, last_error. The state `lost` means that a running
    pipeline has not reported for 30 seconds.
    """
    from headrace.cli.output import show_json, show_rows

    with broker_client(url, config_file) as client:
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
    """Show the state of pipeline NAME and of each of its flows."""
    from headrace.cli.output import for_people, show_facts, show_json, show_rows
    from headrace.client.exchange import path_of

    with broker_client(url, config_file) as client:
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
    """Stop pipeline NAME after its current batch, on any machine."""
    from headrace.pipelines.run import ask_to_stop

    answer = ask_to_stop(broker_url(url, config_file), name)
    if sys.stderr.isatty():
        click.echo(f"asked {name} to stop (state: {answer['state']})", err=True)
    return {"stopping": [name], "state": answer["state"]}


def _row(one: dict[str, Any]) -> dict[str, Any]:
    said = one["details"]
    return {"name": one["name"], "state": one["state"], **{name: said.get(name) for name in COLUMNS[2:]}}
