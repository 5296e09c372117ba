"""What the nouns of the management API share: the connection, the vhost, a question before what cannot be undone."""

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
    """-p is what rabbitmqctl calls it."""
    return click.option("-V", "-p", "--vhost", default="/", show_default=True, help="The virtual host.")(command)


def yes_option(command: Command) -> Command:
    return click.option("-y", "--yes", is_flag=True, help="Do not ask.")(command)


def manage(url: str | None, config_file: Path | None) -> "Management":
    from headrace.client.management import Management

    return Management(broker_url(url, config_file))


def ask(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInput(f"{question} Say --yes when nobody can be asked.")
    click.confirm(question, abort=True, err=True)


def pairs(texts: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE, where a value that is JSON is taken as such: numbers, true, false, objects."""
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
        raise InvalidInput(f"{what} is not JSON: {text[:80]!r}") from None
    if not isinstance(found, dict):
        raise InvalidInput(f"{what} must be a JSON object: {text[:80]!r}")
    return found
