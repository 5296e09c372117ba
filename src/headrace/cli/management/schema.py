"""`headrace schema`: the schema registry."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import click

from headrace.cli.lazy import AliasGroup
from headrace.cli.management.common import ask, manage, yes_option
from headrace.cli.options import json_answer, json_option, url_option
from headrace.errors import InvalidInput, NotFound

AVRO, JSON, PROTOBUF = "avro", "json", "protobuf"
ENDINGS = {".avsc": AVRO, ".proto": PROTOBUF}  # what ends in .json may be either of the others
LEVELS = ("NONE", *(kind + rest for kind in ("BACKWARD", "FORWARD", "FULL") for rest in ("", "_TRANSITIVE")))
INCOMPATIBLE = 5  # as when it is registered


@click.group(cls=AliasGroup)
def schema() -> None:
    """List, look at, register, check and remove schemas."""


def takes_a_schema(command: Callable[..., Any]) -> Callable[..., Any]:
    """SUBJECT, FILE and what else says which schema is meant: the command gets it as the registry wants it."""

    @json_option
    @url_option
    @wraps(command)
    def reading(file: Path, kind: str | None, references: tuple[str, ...], **others: Any) -> Any:
        return command(body=_content(file, kind, references), **others)

    kind = click.option(
        "--type",
        "kind",
        type=click.Choice((AVRO, JSON, PROTOBUF)),
        help="What FILE is; not needed when it ends in .avsc or .proto.",
    )
    reference = click.option(
        "-r",
        "--reference",
        "references",
        multiple=True,
        metavar="NAME=SUBJECT:VERSION",
        help="Another schema that this one needs, and what it calls it; repeat it.",
    )
    file = click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True, allow_dash=True))
    return click.argument("subject")(file(kind(reference(reading))))


@schema.command("ls")
@click.argument("pattern", required=False)
@click.option("--deleted", is_flag=True, help="Deleted ones, too.")
@json_option
@url_option
def ls(pattern: str | None, deleted: bool, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """List subjects whose name contains PATTERN.

    Columns: subject, type, versions, version, id, compatibility; version and id are the latest.
    """
    from headrace.cli.output import show_json, show_rows

    with manage(url, config_file) as client:
        found = list(client.pages("headrace", "schemas", name=pattern, deleted="true" if deleted else None))
    if as_json:
        show_json({"subjects": found})
        return
    columns = ("subject", "type", "versions", "version", "id", "compatibility")
    show_rows(found, columns, empty="no schemas yet: `headrace schema register SUBJECT FILE` makes the first")


@schema.command("info")
@click.argument("subject")
@click.option("--version", "version", type=click.IntRange(1), metavar="N", help="Not the latest, but this one.")
@json_option
@url_option
def info(subject: str, version: int | None, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """Show the latest schema of SUBJECT. A pipe gets nothing but its text.

    \b
    headrace schema info orders-value --version 2 > order.avsc
    """
    from headrace.cli.output import for_people, show_facts, show_json

    with manage(url, config_file) as client:
        found = client.registry("GET", "subjects", subject, "versions", str(version or "latest"))
        if not (as_json or for_people()):
            click.echo(found["schema"])
            return
        versions = client.registry("GET", "subjects", subject, "versions")
        level = _level(client.registry, subject)
    kind, references = found.get("schemaType", "AVRO"), found.get("references", [])
    facts = {name: found[name] for name in ("subject", "version", "id")} | {"type": kind, "compatibility": level}
    if as_json:
        show_json({**facts, "versions": versions, "references": references, "schema": found["schema"]})
        return
    facts["versions"] = ", ".join(map(str, versions))
    facts |= {f"needs {one['name']}": f"{one['subject']}, version {one['version']}" for one in references}
    show_facts(facts)
    click.echo()
    click.echo(laid_out(found["schema"], kind))


@schema.command("register")
@takes_a_schema
def register(subject: str, body: dict[str, object], as_json: bool, url: str | None, config_file: Path | None) -> None:
    """Register the schema in FILE under SUBJECT; it is fine if it is there. - reads stdin.

    Serializers take the subject TOPIC-value for the values of a topic, TOPIC-key for its keys.
    Columns: subject, version, id.

    \b
    headrace schema register orders-value order.avsc
    headrace schema register orders-value order.proto -r customer.proto=customers-value:1
    """
    from headrace.cli.output import show_json, show_rows

    with manage(url, config_file) as client:
        made = {"subject": subject, **client.registry("POST", "subjects", subject, "versions", body=body)}
    if as_json:
        show_json(made)
    else:
        show_rows([made], ("subject", "version", "id"))


@schema.command("check")
@takes_a_schema
def check(subject: str, body: dict[str, object], as_json: bool, url: str | None, config_file: Path | None) -> int:
    """Ask whether the schema in FILE may follow those of SUBJECT, and register nothing. - reads stdin.

    The exit code is 0 if it may and 5 if not, with the reasons, one a line.
    """
    from headrace.cli.output import show_json, show_rows

    with manage(url, config_file) as client:
        path = ("compatibility", "subjects", subject, "versions")
        found = client.registry("POST", *path, body=body, query={"verbose": "true"})
    if as_json:
        show_json({"subject": subject, "compatible": found["is_compatible"], "reasons": found["messages"]})
    else:
        show_rows([{"reason": reason} for reason in found["messages"]], ("reason",), empty="compatible")
    return 0 if found["is_compatible"] else INCOMPATIBLE


@schema.command("compatibility")
@click.argument("subject", required=False)
@click.argument("level", required=False)
@click.option("--global", "for_all", is_flag=True, help="Set LEVEL for all subjects that have none of their own.")
@click.option("--unset", is_flag=True, help="Take the level of SUBJECT away: that of all holds again.")
@json_option
@url_option
def compatibility(
    subject: str | None,
    level: str | None,
    for_all: bool,
    unset: bool,
    as_json: bool,
    url: str | None,
    config_file: Path | None,
) -> None:
    """Show what SUBJECT asks of a new schema, or without SUBJECT what all do; with LEVEL, set it.

    LEVEL is BACKWARD (reads what the last one wrote), FORWARD (the last one reads it), FULL (both), each with
    _TRANSITIVE (not only the last one, but all), or NONE.

    \b
    headrace schema compatibility orders-value FULL
    headrace schema compatibility --global BACKWARD_TRANSITIVE
    """
    if for_all and subject is not None and level is None:
        subject, level = None, subject
    if for_all and (subject is not None or level is None):
        raise InvalidInput("--global goes with a LEVEL and without a SUBJECT")
    if unset and (subject is None or level is not None):
        raise InvalidInput("--unset goes with a SUBJECT and without a LEVEL")
    if level is not None and level.upper() not in LEVELS:
        raise InvalidInput(f"{level!r} is not a level; there are {', '.join(LEVELS)}")
    path = ("config",) if subject is None else ("config", subject)
    with manage(url, config_file) as client:
        if unset:
            client.registry("DELETE", *path)
        elif level is not None:
            client.registry("PUT", *path, body={"compatibility": level.upper()})
        found = _level(client.registry, subject)
    if as_json:
        from headrace.cli.output import show_json

        show_json({"subject": subject, "compatibility": found})
    else:
        click.echo(found)


@schema.command("rm")
@click.argument("subject")
@click.option("--version", "version", type=click.IntRange(1), metavar="N", help="Only this version.")
@click.option("--permanent", is_flag=True, help="For good: its id means nothing any more.")
@yes_option
@url_option
@json_answer
def rm(
    subject: str, version: int | None, permanent: bool, yes: bool, url: str | None, config_file: Path | None
) -> dict[str, object]:
    """Remove SUBJECT, or one version of it.

    It is no longer listed, nor compared with. Whoever has its id may still ask for it, unless --permanent; messages
    that were written with it cannot be read any more then.
    """
    what = subject if version is None else f"version {version} of {subject}"
    lost = " for good? Messages that were written with it cannot be read any more." if permanent else "?"
    ask(f"Remove {what}{lost}", yes)
    path = ("subjects", subject) if version is None else ("subjects", subject, "versions", str(version))
    with manage(url, config_file) as client:
        try:
            gone = client.registry("DELETE", *path)
        except NotFound:
            if not permanent:
                raise
        if permanent:  # it may have been removed before; the registry wants that first
            gone = client.registry("DELETE", *path, query={"permanent": "true"})
    return {"removed": [subject], "versions": gone if isinstance(gone, list) else [gone]}


def _content(file: Path, kind: str | None, references: Sequence[str]) -> dict[str, object]:
    kind = kind or ENDINGS.get(file.suffix)
    if kind is None:
        raise InvalidInput(f"what is {str(file)!r}? --type says it: {AVRO}, {JSON} or {PROTOBUF}")
    text = sys.stdin.read() if str(file) == "-" else file.read_text()
    return {"schema": text, "schemaType": kind.upper(), "references": [_reference(one) for one in references]}


def _reference(text: str) -> dict[str, object]:
    name, _, place = text.partition("=")
    subject, _, version = place.rpartition(":")
    if not (name and subject and version.isdecimal()):
        raise InvalidInput(f"{text!r} is not a reference; write NAME=SUBJECT:VERSION")
    return {"name": name, "subject": subject, "version": int(version)}


def _level(registry: Callable[..., Any], subject: str | None) -> str:
    path = ("config",) if subject is None else ("config", subject)
    return str(registry("GET", *path, query={"defaultToGlobal": "true"})["compatibilityLevel"])


def laid_out(text: str, kind: str) -> str:
    """For a person: indented, and nothing in it steers the terminal."""
    import msgspec

    from headrace.cli.messages.formats import printable

    if kind != PROTOBUF.upper():
        with suppress(msgspec.DecodeError, RecursionError):  # somebody may have written it into the topic
            text = msgspec.json.format(text, indent=2)
    return "\n".join(printable(line.encode()) for line in text.split("\n"))
