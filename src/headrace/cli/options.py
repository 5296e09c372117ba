"""Options that commands share, and how a command finds its broker and settings file."""

import os
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.errors import InvalidInput

if TYPE_CHECKING:
    import ssl

    from headrace.client.admin import Client

Command = TypeVar("Command", bound=Callable[..., Any])

URL_ENV = "HEADRACE_URL"
ALL_INTERFACES = frozenset({"0.0.0.0", "::", "*"})


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def json_answer(command: Callable[..., Any]) -> Callable[..., None]:
    """Adds --json to a command that only changes something: with it, the command's return value is printed."""

    @json_option
    @wraps(command)
    def answering(*arguments: Any, as_json: bool, **options: Any) -> None:
        facts = command(*arguments, **options)
        if as_json:
            from headrace.cli.output import show_json

            show_json(facts)

    return answering


def config_option(command: Command) -> Command:
    return click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        envvar="HEADRACE_CONFIG",
        help="Settings file.  [default: headrace.toml in the current folder, if it exists]",
    )(command)


def url_option(command: Command) -> Command:
    option = click.option(
        "--url",
        metavar="URL",
        envvar=URL_ENV,
        help="URL of the broker: http://[USER:PASSWORD@]HOST:PORT, or with TLS https://HOST:PORT?cacertfile=FILE.  "
        "[default: the address in the setting `http`]",
    )
    return config_option(option(command))


def settings_file(given: Path | None) -> Path | None:
    """The given settings file, or else headrace.toml in the current folder, if it exists."""
    if given is not None:
        return given
    here = Path("headrace.toml")
    return here if here.is_file() else None


def broker_url(url: str | None, config_file: Path | None) -> str:
    """URL of the broker: the given one, or else the address in the settings, which a broker started here would use."""
    if url:
        return url
    from headrace.config import load

    config = load(env=os.environ, file=settings_file(config_file))
    address = config.http
    if address is None:
        raise InvalidInput("the setting `http` is off: give the URL of the broker with --url or HEADRACE_URL")
    host = "localhost" if address.host in ALL_INTERFACES else address.host
    return config.http_url(f"[{host}]:{address.port}" if ":" in host else f"{host}:{address.port}")


def broker_client(url: str | None, config_file: Path | None) -> "Client":
    """A client of the broker. Connects on first use."""
    from headrace.client.admin import Client

    return Client(broker_url(url, config_file))


def living_broker(url: str | None, config_file: Path | None) -> str:
    """URL of the broker, checked by a request.

    A user at a terminal gets the error at once; a client library would retry for a minute.
    """
    from headrace.client.admin import Client

    found = broker_url(url, config_file)
    with Client(found, retry_s=1.0) as client:
        client.get("/health/live")
    return found


def tls_contexts(url: str, listeners: Iterable[str]) -> "dict[str, ssl.SSLContext]":
    """A TLS context per listener, with the trust settings of the broker's URL."""
    from headrace.client.exchange import parse_url
    from headrace.client.tls import context_of

    trust = parse_url(url).trust
    return {listener: context_of(trust) for listener in listeners}
