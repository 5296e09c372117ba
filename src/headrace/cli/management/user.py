"""`headrace user`: who may come in, and what they may do."""

import sys
from functools import wraps
from pathlib import Path
from typing import Any

import click

from headrace.cli.lazy import AliasGroup
from headrace.cli.management.common import ask, vhost_option, yes_option
from headrace.cli.management.user_stores import UserStore, user_store
from headrace.cli.options import json_answer, json_option, url_option
from headrace.errors import AlreadyExists, InvalidInput


def place_options(command: Any) -> Any:
    """Which users: those of a running broker, or of a stopped one's folder. The command gets them as `store`."""

    @url_option
    @click.option(
        "--data-dir",
        metavar="FOLDER",
        help="Work in the data folder of a broker that is stopped, without a password: for those who are locked out.",
    )
    @wraps(command)
    def opened(*arguments: Any, url: str | None, config_file: Path | None, data_dir: str | None, **options: Any) -> Any:
        with user_store(url, config_file, data_dir) as store:
            return command(*arguments, store=store, **options)

    return opened


def password_options(command: Any) -> Any:
    """The command gets what they say as `password`."""

    @click.argument("password", required=False)
    @click.option(
        "--password", "password_option", metavar="PASSWORD", help="The password. Others on this machine see it in `ps`."
    )
    @click.option("--password-stdin", is_flag=True, help="Read the password from stdin, up to the end of the line.")
    @wraps(command)
    def given(
        *arguments: Any, password: str | None, password_option: str | None, password_stdin: bool, **options: Any
    ) -> Any:
        said = [found for found in (password, password_option) if found is not None]
        if len(said) + password_stdin > 1:
            raise InvalidInput("say the password once")
        if password_stdin:
            said = [sys.stdin.readline().rstrip("\r\n")]
        elif not said:
            if not sys.stdin.isatty():
                raise InvalidInput("there is nobody to ask for the password: write it to stdin with --password-stdin")
            said = [click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)]
        if not said[0]:
            raise InvalidInput("a password is not empty")
        return command(*arguments, password=said[0], **options)

    return given


@click.group(cls=AliasGroup)
def user() -> None:
    """List, add and remove users, and say what they may do.

    With --data-dir the users of a broker that is stopped, which is the way back in when no password is known any more.
    """


@user.command("ls")
@json_option
@place_options
def ls(as_json: bool, store: UserStore) -> None:
    """List users.

    Columns: name, tags.
    """
    from headrace.cli.output import show_json, show_rows

    found = [{"name": one["name"], "tags": _listed(one["tags"])} for one in store.users()]
    if as_json:
        show_json({"users": found})
    else:
        rows = [{"name": one["name"], "tags": ", ".join(one["tags"])} for one in found]
        show_rows(rows, ("name", "tags"), empty="no users: nobody can come in")


@user.command("rights")
@click.argument("name", required=False)
@click.option("-V", "-p", "--vhost", help="Only in this virtual host.")
@json_option
@place_options
def rights(name: str | None, vhost: str | None, as_json: bool, store: UserStore) -> None:
    """List what users may do, or only user NAME.

    Columns: user, vhost, exchange (of a topic rule), configure, write, read.
    """
    from headrace.cli.output import show_json, show_rows

    def is_wanted(one: dict[str, Any]) -> bool:
        return name in (None, one["user"]) and vhost in (None, one["vhost"])

    permissions = [one for one in store.permissions() if is_wanted(one)]
    topics = [one for one in store.topic_permissions() if is_wanted(one)]
    if as_json:
        show_json({"permissions": permissions, "topic_permissions": topics})
        return
    rows = sorted(permissions + topics, key=lambda one: (one["user"], one["vhost"], one.get("exchange", "")))
    columns = ("user", "vhost", "exchange", "configure", "write", "read")
    show_rows(rows, columns, empty="nobody may do anything")


@user.command("add")
@click.argument("name")
@password_options
@click.option("-t", "--tag", "tags", multiple=True, help="Such as administrator, monitoring; repeat it.")
@place_options
@json_answer
def add(name: str, tags: tuple[str, ...], password: str, store: UserStore) -> dict[str, object]:
    """Add user NAME, who may do nothing until `headrace user grant` says so. Asks for the password.

    \b
    headrace user add ann --tag administrator
    pass show headrace/ann | headrace user add ann --password-stdin
    """
    if store.exists(name):
        raise AlreadyExists(f"user {name!r} exists already; `headrace user passwd` and `user tags` change one")
    store.add(name, password, tags)
    return {"added": [name]}


@user.command("rm")
@click.argument("name")
@yes_option
@place_options
@json_answer
def rm(name: str, yes: bool, store: UserStore) -> dict[str, object]:
    """Remove user NAME with everything it may do, and close its connections."""
    ask(f"Remove user {name}?", yes)
    store.remove(name)
    return {"removed": [name]}


@user.command("passwd")
@click.argument("name")
@password_options
@place_options
@json_answer
def passwd(name: str, password: str, store: UserStore) -> dict[str, object]:
    """Give user NAME another password. Connections that are open stay open."""
    store.set_password(name, password)
    return {"changed": [name]}


@user.command("tags")
@click.argument("name")
@click.argument("tags", nargs=-1)
@place_options
@json_answer
def tags(name: str, tags: tuple[str, ...], store: UserStore) -> dict[str, object]:
    """Give user NAME these TAGS and no others: administrator, monitoring, policymaker, management, impersonator."""
    store.set_tags(name, tags)
    return {"changed": [name]}


@user.command("grant")
@click.argument("name")
@click.argument("configure")
@click.argument("write")
@click.argument("read")
@vhost_option
@place_options
@json_answer
def grant(name: str, configure: str, write: str, read: str, vhost: str, store: UserStore) -> dict[str, object]:
    """Say what user NAME may do in a virtual host: three patterns, found anywhere in the names of queues and exchanges.

    \b
    headrace user grant ann '.*' '.*' '.*'
    headrace user grant sensor '' '^amq\\.topic$' ''
    """
    store.grant(vhost, name, configure, write, read)
    return {"changed": [name]}


@user.command("revoke")
@click.argument("name")
@vhost_option
@place_options
@json_answer
def revoke(name: str, vhost: str, store: UserStore) -> dict[str, object]:
    """Keep user NAME out of a virtual host."""
    store.revoke(vhost, name)
    return {"changed": [name]}


@user.command("grant-topic")
@click.argument("name")
@click.argument("exchange")
@click.argument("write")
@click.argument("read")
@vhost_option
@place_options
@json_answer
def grant_topic(name: str, exchange: str, write: str, read: str, vhost: str, store: UserStore) -> dict[str, object]:
    """Bound the routing keys that user NAME may publish with to topic exchange EXCHANGE, and bind with from it.

    \b
    headrace user grant-topic sensor amq.topic '^{username}\\.' ''
    """
    store.grant_topic(vhost, name, exchange, write, read)
    return {"changed": [name]}


@user.command("revoke-topic")
@click.argument("name")
@click.argument("exchange", required=False)
@vhost_option
@place_options
@json_answer
def revoke_topic(name: str, exchange: str | None, vhost: str, store: UserStore) -> dict[str, object]:
    """Take away the rule of user NAME for topic exchange EXCHANGE, or all of them: any routing key is allowed then."""
    store.revoke_topic(vhost, name, exchange)
    return {"changed": [name]}


def _listed(tags: list[str] | str) -> list[str]:
    return [tag for tag in tags.split(",") if tag] if isinstance(tags, str) else tags
