"""`headrace definitions`: export and import of all declared objects, in RabbitMQ's format."""

import sys
from pathlib import Path

import click

from headrace.cli.lazy import AliasGroup
from headrace.cli.management.common import json_object, manage
from headrace.cli.options import json_answer, json_option, url_option


@click.group(cls=AliasGroup)
def definitions() -> None:
    """Export and import users, queues, exchanges, bindings, policies and topics."""


@definitions.command("export")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), required=False)
@json_option
@url_option
def export(file: Path | None, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """Write all definitions as JSON to FILE, or to stdout."""
    import msgspec

    from headrace.cli.output import show_json

    with manage(url, config_file) as client:
        document = client.call("GET", "definitions")
    text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
    if file is None:
        click.echo(text, nl=False)
    else:
        file.write_text(text)
        if as_json:
            show_json({"exported": str(file)})


@definitions.command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True, allow_dash=True))
@url_option
@json_answer
def import_(file: Path, url: str | None, config_file: Path | None) -> dict[str, object]:
    """Declare the objects in FILE, which may come from RabbitMQ. Nothing is removed. FILE - reads stdin."""
    text = sys.stdin.read() if str(file) == "-" else file.read_text()
    with manage(url, config_file) as client:
        client.call("POST", "definitions", body=json_object(text, str(file)))
    return {"imported": str(file)}
