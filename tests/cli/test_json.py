"""--json everywhere: what a program asks for it can read."""

import json
from collections.abc import Iterator

import click

from headrace.cli.app import root
from tests.cli.running import Broker

# Their output is JSON, a script or what a child process says, whatever is asked for.
WITHOUT = {"completion", "definitions export", "demo", "pipeline init", "pipeline run", "pipeline stop"}


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_every_command_answers_in_json_when_asked() -> None:
    found = dict(commands(root))
    lacking = {
        name for name, command in found.items() if "--json" not in {flag for one in command.params for flag in one.opts}
    }
    assert lacking == WITHOUT & found.keys()


BOUND = {"source": "json", "destination": "json", "routing_key": "key"}


def test_what_changes_something_says_what(broker: Broker) -> None:
    for words, answer in (
        ("queue add json", {"added": ["json"]}),
        ("exchange add json -t fanout", {"added": ["json"]}),
        ("binding add json json key", {"added": [BOUND]}),
        ("exchange pub json key hello", {"routed": True}),
        ("binding rm json json key", {"removed": [BOUND]}),
        ("queue purge json --yes", {"purged": ["json"], "messages": 1}),
        ("exchange rm json --yes", {"removed": ["json"]}),
        ("queue rm json --yes", {"removed": ["json"]}),
    ):
        assert json.loads(broker.said(*words.split(), "--json")) == answer
