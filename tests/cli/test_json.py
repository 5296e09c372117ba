"""--json of every command."""

import json
from collections.abc import Iterator
from pathlib import Path

import click
import httpx

from headrace.cli.app import root
from tests.cli.running import Broker

# Their output is a script, or the output of another program. docs/cli.md names them.
WITHOUT = {"completion", "demo", "pipeline run"}


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_every_command_has_a_json_option() -> None:
    found = dict(commands(root))
    lacking = {
        name for name, command in found.items() if "--json" not in {flag for one in command.params for flag in one.opts}
    }
    assert lacking == WITHOUT & found.keys()


BOUND = {"source": "json", "destination": "json", "routing_key": "key"}


def test_commands_that_change_something_report_it_in_json(broker: Broker) -> None:
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


def test_pipeline_and_definitions_commands_report_in_json(broker: Broker, tmp_path: Path) -> None:
    sample, exported = str(tmp_path / "sample.py"), str(tmp_path / "definitions.json")
    assert json.loads(broker.said("pipeline", "init", sample, "--json")) == {"written": sample}
    report = {"state": "running", "details": {}}
    assert httpx.put(f"{broker.url}/pipelines/told", json=report, timeout=60).status_code == 200
    assert json.loads(broker.said("pipeline", "stop", "told", "--json")) == {"stopping": ["told"], "state": "running"}
    assert json.loads(broker.said("definitions", "export", exported, "--json")) == {"exported": exported}
    assert json.loads(broker.said("definitions", "export", "--json")) == json.loads(Path(exported).read_text())
