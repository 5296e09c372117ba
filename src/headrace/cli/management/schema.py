"""`headrace schema`: subjects and versions of the schema registry."""

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
SUFFIXES = {".avsc": AVRO, ".proto": PROTOBUF}  # .json is ambiguous: Avro or JSON Schema
LEVELS = ("NONE", *(kind + rest for kind in ("BACKWARD", "FORWARD", "FULL") for rest in ("", "_TRANSITIVE")))
INCOMPATIBLE = 5  # the exit code of a conflict, as when an incompatible schema is registered


@click.group(cls=AliasGroup)
def schema() -> None:
    """List, show, register, check and remove schemas."""


def schema_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds SUBJECT, FILE and the options of a schema. The command receives the schema as the registry's request
    body."""

    @json_option
    @url_option
    @wraps(command)
    def reading(file: Path, kind: str | None, references: tuple[str, ...], **others: Any) -> Any:
        return command(body=_content(file, kind, references), **others)

    kind = click.option(
        "--type",
        "kind",
        type=click.Choice((AVRO, JSON, PROTOBUF)),
        help="Type of the schema.  [default: by the suffix of FILE, .avsc or .proto]",
    )
    reference = click.option(
        "-r",
        "--reference",
        "references",
        multiple=True,
        metavar="NAME=SUBJECT:VERSION",
        help="A registered schema that this one refers to as NAME. Repeatable.",
    )
    file = click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True, allow_dash=True))
    return click.argument("subject")(file(kind(reference(reading))))


@schema.command("ls")
@click.argument("pattern", required=False)
@click.option("--deleted", is_flag=True, help="Include deleted subjects.")
@json_option
@url_option
def ls(pattern: str | None, deleted: bool, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """List subjects whose name contains PATTERN.

    Columns: subject, type, versions, version, id, compatibility. version and id belong to the latest version.
    """
    from headrace.cli.output import show_json, show_rows

    with manage(url, config_file) as client:
        found = list(client.pages("headrace", "schemas", name=pattern, deleted="true" if deleted else None))
    if as_json:
        show_json({"subjects": found})
        return
    columns = ("subject", "type", "versions", "version", "id", "compatibility")
    show_rows(found, columns, empty="no schemas; register one with `headrace schema register SUBJECT FILE`")


@schema.command("info")
@click.argument("subject")
@click.option("--version", "version", type=click.IntRange(1), metavar="N", help="Version.  [default: the latest]")
@json_option
@url_option
def info(subject: str, version: int | None, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """Show the latest schema of SUBJECT. In a pipe, only the text of the schema is printed.

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
    click.echo(readable(found["schema"], kind))


@schema.command("register")
@schema_arguments
def register(subject: str, body: dict[str, object], as_json: bool, url: str | None, config_file: Path | None) -> None:
    """Register the schema in FILE under SUBJECT. FILE - reads stdin.

    Has no effect if the schema is already registered. Serializers use the subject TOPIC-value for the values of a topic
    and TOPIC-key for its keys. Columns: subject, version, id.

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
@schema_arguments
def check(subject: str, body: dict[str, object], as_json: bool, url: str | None, config_file: Path | None) -> int:
    """Check whether the schema in FILE is compatible with SUBJECT, without registering it. FILE - reads stdin.

    Exits with 0 if it is compatible, and with 5 if not. Prints the reasons, one per line.
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
@click.option("--global", "for_all", is_flag=True, help="Set LEVEL for all subjects without a level of their own.")
@click.option("--unset", is_flag=True, help="Remove the level of SUBJECT, so that the global level applies.")
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
    """Show or set the compatibility level of SUBJECT, or the global level.

    LEVEL is BACKWARD (the new schema can read data of the previous version), FORWARD (the previous version can read
    data of the new schema), FULL (both), one of these with _TRANSITIVE (all previous versions), or NONE.

    \b
    headrace schema compatibility orders-value FULL
    headrace schema compatibility --global BACKWARD_TRANSITIVE
    """
    if for_all and subject is not None and level is None:
        subject, level = None, subject
    if for_all and (subject is not None or level is None):
        raise InvalidInput("--global needs a LEVEL and no SUBJECT")
    if unset and (subject is None or level is not None):
        raise InvalidInput("--unset needs a SUBJECT and no LEVEL")
    if level is not None and level.upper() not in LEVELS:
        raise InvalidInput(f"{level!r} is not a compatibility level; use one of {', '.join(LEVELS)}")
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
@click.option("--version", "version", type=click.IntRange(1), metavar="N", help="Remove only this version.")
@click.option("--permanent", is_flag=True, help="Also remove its id: messages written with it become unreadable.")
@yes_option
@url_option
@json_answer
def rm(
    subject: str, version: int | None, permanent: bool, yes: bool, url: str | None, config_file: Path | None
) -> dict[str, object]:
    """Remove SUBJECT, or one version of it.

    A removed schema is not listed and not checked for compatibility, but consumers can still look it up by its id,
    unless --permanent is given.
    """
    what = subject if version is None else f"version {version} of {subject}"
    question = (
        f"Permanently remove {what}? Messages written with it become unreadable." if permanent else f"Remove {what}?"
    )
    ask(question, yes)
    path = ("subjects", subject) if version is None else ("subjects", subject, "versions", str(version))
    with manage(url, config_file) as client:
        try:
            gone = client.registry("DELETE", *path)
        except NotFound:
            if not permanent:
                raise
        if permanent:  # the registry removes permanently only what was removed before
            gone = client.registry("DELETE", *path, query={"permanent": "true"})
    return {"removed": [subject], "versions": gone if isinstance(gone, list) else [gone]}


def _content(file: Path, kind: str | None, references: Sequence[str]) -> dict[str, object]:
    kind = kind or SUFFIXES.get(file.suffix)
    if kind is None:
        raise InvalidInput(f"the type of {str(file)!r} is unknown; give it with --type {AVRO}, {JSON} or {PROTOBUF}")
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


def readable(text: str, kind: str) -> str:
    """A schema for a terminal: JSON is indented, and control characters are escaped."""
    import msgspec

    from headrace.cli.messages.formats import printable

    if kind != PROTOBUF.upper():
        with suppress(msgspec.DecodeError, RecursionError):  # the topic may contain anything
            text = msgspec.json.format(text, indent=2)
    return "\n".join(printable(line.encode()) for line in text.split("\n"))
