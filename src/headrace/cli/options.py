"""Options that many commands share."""

import os
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.errors import InvalidInput

if TYPE_CHECKING:
    import ssl

Command = TypeVar("Command", bound=Callable[..., Any])

URL_ENV = "HEADRACE_URL"
EVERYWHERE = {"0.0.0.0": "localhost", "::": "localhost", "*": "localhost"}


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")(command)


def json_answer(command: Callable[..., Any]) -> Callable[..., None]:
    """--json for a command that only changes something: what it returns is shown, and only then."""

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
        help="Settings file; headrace.toml in the current folder when there is one.",
    )(command)


def url_option(command: Command) -> Command:
    option = click.option(
        "--url",
        metavar="URL",
        envvar=URL_ENV,
        help="Broker to talk to, http://HOST:PORT or http://USER:PASSWORD@HOST:PORT, with TLS "
        "https://HOST:PORT?cacertfile=FILE; otherwise the one of `http`.",
    )
    return config_option(option(command))


def settings_file(given: Path | None) -> Path | None:
    """The settings file asked for, or the one that lies here, or none."""
    if given is not None:
        return given
    here = Path("headrace.toml")
    return here if here.is_file() else None


def broker_url(url: str | None, config_file: Path | None) -> str:
    """Where the broker is, in the same order of precedence as for the broker itself."""
    if url:
        return url
    from headrace.config import load

    config = load(env=os.environ, file=settings_file(config_file))
    address = config.http
    if address is None:
        raise InvalidInput("the http setting is off, so --url or HEADRACE_URL must say where the broker is")
    host = EVERYWHERE.get(address.host, address.host)
    return config.http_url(f"[{host}]:{address.port}" if ":" in host else f"{host}:{address.port}")


def living_broker(url: str | None, config_file: Path | None) -> str:
    """Where the broker is, and that it is there: who types a command wants to know at once, not after
    the minute that a program waits for a broker to come back."""
    from headrace.client.admin import Client

    found = broker_url(url, config_file)
    with Client(found, retry_s=1.0) as client:
        client.get("/health/live")
    return found


def tls_contexts(url: str, listeners: Iterable[str]) -> "dict[str, ssl.SSLContext]":
    """For those listeners that speak TLS, with the trust that the broker's address asks for."""
    from headrace.client.exchange import parse_url
    from headrace.client.tls import context_of

    trust = parse_url(url).trust
    return {listener: context_of(trust) for listener in listeners}
