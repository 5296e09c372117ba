"""Shared by the management commands: the connection, the vhost option, confirmation prompts, and argument parsing."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.cli.options import broker_url
from headrace.errors import InvalidInput

if TYPE_CHECKING:
    from headrace.client.management import Management

Command = TypeVar("Command", bound=Callable[..., Any])


def vhost_option(command: Command) -> Command:
    """-p is rabbitmqctl's spelling."""
    return click.option("-V", "-p", "--vhost", default="/", show_default=True, help="Virtual host.")(command)


def yes_option(command: Command) -> Command:
    return click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")(command)


def manage(url: str | None, config_file: Path | None) -> "Management":
    from headrace.client.management import Management

    return Management(broker_url(url, config_file))


def ask(question: str, yes: bool) -> None:
    """Asks for confirmation, and aborts the command without it."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInput(f"{question} Confirm with --yes: stdin is not a terminal")
    click.confirm(question, abort=True, err=True)


def purge_queue(client: "Management", vhost: str, name: str, what: str, yes: bool) -> dict[str, object]:
    """Removes all ready messages of a queue after confirmation; `what` is what the prompt calls them."""
    ready = client.call("GET", "queues", vhost, name)["messages_ready"]
    ask(f"Permanently remove {ready:,} {what} from queue {name}?", yes)
    client.call("DELETE", "queues", vhost, name, "contents")
    return {"purged": [name], "messages": ready}


def pairs(texts: Sequence[str]) -> dict[str, Any]:
    """Parses NAME=VALUE arguments. A value that is valid JSON, such as a number or true, is decoded."""
    import msgspec

    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidInput(f"{text!r} is not an argument; write NAME=VALUE, such as x-max-length=1000")
        try:
            found[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found[name] = value
    return found


def json_object(text: str, what: str) -> dict[str, Any]:
    import msgspec

    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise InvalidInput(f"{what} is not valid JSON: {text[:80]!r}") from None
    if not isinstance(found, dict):
        raise InvalidInput(f"{what} must be a JSON object: {text[:80]!r}")
    return found
