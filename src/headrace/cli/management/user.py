"""`headrace user`: users, tags and permissions."""

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


def store_options(command: Any) -> Any:
    """Adds --url and --data-dir, and passes the users that they select to the command as `store`."""

    @url_option
    @click.option(
        "--data-dir",
        metavar="FOLDER",
        help="Work on the data folder of a stopped broker instead, which needs no password.",
    )
    @wraps(command)
    def opened(*arguments: Any, url: str | None, config_file: Path | None, data_dir: str | None, **options: Any) -> Any:
        with user_store(url, config_file, data_dir) as store:
            return command(*arguments, store=store, **options)

    return opened


def password_options(command: Any) -> Any:
    """Adds the ways to give a password, and passes it to the command as `password`."""

    @click.argument("password", required=False)
    @click.option(
        "--password",
        "password_option",
        metavar="PASSWORD",
        help="Password. Other users of this machine can see it in `ps`.",
    )
    @click.option("--password-stdin", is_flag=True, help="Read the password from the first line of stdin.")
    @wraps(command)
    def given(
        *arguments: Any, password: str | None, password_option: str | None, password_stdin: bool, **options: Any
    ) -> Any:
        passwords = [found for found in (password, password_option) if found is not None]
        if len(passwords) + password_stdin > 1:
            raise InvalidInput("give the password only once")
        if password_stdin:
            passwords = [sys.stdin.readline().rstrip("\r\n")]
        elif not passwords:
            if not sys.stdin.isatty():
                raise InvalidInput("no password given: write it to stdin and use --password-stdin")
            passwords = [click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)]
        if not passwords[0]:
            raise InvalidInput("the password must not be empty")
        return command(*arguments, password=passwords[0], **options)

    return given


@click.group(cls=AliasGroup)
def user() -> None:
    """List, add and remove users, and manage their permissions.

    If you have lost the passwords, stop the broker and use --data-dir to change them in its data folder.
    """


@user.command("ls")
@json_option
@store_options
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
        show_rows(rows, ("name", "tags"), empty="no users; add one with `headrace user add NAME`")


@user.command("rights")
@click.argument("name", required=False)
@click.option("-V", "-p", "--vhost", help="Only for this virtual host.")
@json_option
@store_options
def rights(name: str | None, vhost: str | None, as_json: bool, store: UserStore) -> None:
    """List the permissions of all users, or of user NAME.

    Columns: user, vhost, exchange (topic permissions only), configure, write, read.
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
    show_rows(rows, columns, empty="no permissions; grant some with `headrace user grant`")


@user.command("add")
@click.argument("name")
@password_options
@click.option("-t", "--tag", "tags", multiple=True, help="Tag, such as administrator or monitoring. Repeatable.")
@store_options
@json_answer
def add(name: str, tags: tuple[str, ...], password: str, store: UserStore) -> dict[str, object]:
    """Add user NAME. Asks for the password.

    A new user has no permissions; grant them with `headrace user grant`.

    \b
    headrace user add ann --tag administrator
    pass show headrace/ann | headrace user add ann --password-stdin
    """
    if store.exists(name):
        raise AlreadyExists(
            f"user {name!r} already exists; change it with `headrace user passwd` or `headrace user tags`"
        )
    store.add(name, password, tags)
    return {"added": [name]}


@user.command("rm")
@click.argument("name")
@yes_option
@store_options
@json_answer
def rm(name: str, yes: bool, store: UserStore) -> dict[str, object]:
    """Remove user NAME and its permissions, and close its connections."""
    ask(f"Remove user {name}?", yes)
    store.remove(name)
    return {"removed": [name]}


@user.command("passwd")
@click.argument("name")
@password_options
@store_options
@json_answer
def passwd(name: str, password: str, store: UserStore) -> dict[str, object]:
    """Change the password of user NAME. Open connections stay open."""
    store.set_password(name, password)
    return {"changed": [name]}


@user.command("tags")
@click.argument("name")
@click.argument("tags", nargs=-1)
@store_options
@json_answer
def tags(name: str, tags: tuple[str, ...], store: UserStore) -> dict[str, object]:
    """Replace the tags of user NAME.

    TAGS are administrator, monitoring, policymaker, management and impersonator. Without TAGS, all are removed.
    """
    store.set_tags(name, tags)
    return {"changed": [name]}


@user.command("grant")
@click.argument("name")
@click.argument("configure")
@click.argument("write")
@click.argument("read")
@vhost_option
@store_options
@json_answer
def grant(name: str, configure: str, write: str, read: str, vhost: str, store: UserStore) -> dict[str, object]:
    """Set the permissions of user NAME in a virtual host.

    CONFIGURE, WRITE and READ are regular expressions, searched in the names of queues and exchanges. An empty one
    permits nothing.

    \b
    headrace user grant ann '.*' '.*' '.*'
    headrace user grant sensor '' '^amq\\.topic$' ''
    """
    store.grant(vhost, name, configure, write, read)
    return {"changed": [name]}


@user.command("revoke")
@click.argument("name")
@vhost_option
@store_options
@json_answer
def revoke(name: str, vhost: str, store: UserStore) -> dict[str, object]:
    """Remove the permissions of user NAME in a virtual host."""
    store.revoke(vhost, name)
    return {"changed": [name]}


@user.command("grant-topic")
@click.argument("name")
@click.argument("exchange")
@click.argument("write")
@click.argument("read")
@vhost_option
@store_options
@json_answer
def grant_topic(name: str, exchange: str, write: str, read: str, vhost: str, store: UserStore) -> dict[str, object]:
    """Restrict the routing keys that user NAME may use with topic exchange EXCHANGE.

    WRITE applies to the routing keys of publishes, READ to those of bindings.

    \b
    headrace user grant-topic sensor amq.topic '^{username}\\.' ''
    """
    store.grant_topic(vhost, name, exchange, write, read)
    return {"changed": [name]}


@user.command("revoke-topic")
@click.argument("name")
@click.argument("exchange", required=False)
@vhost_option
@store_options
@json_answer
def revoke_topic(name: str, exchange: str | None, vhost: str, store: UserStore) -> dict[str, object]:
    """Remove the topic permissions of user NAME for EXCHANGE, or for all exchanges. Any routing key is allowed then."""
    store.revoke_topic(vhost, name, exchange)
    return {"changed": [name]}


def _listed(tags: list[str] | str) -> list[str]:
    return [tag for tag in tags.split(",") if tag] if isinstance(tags, str) else tags
