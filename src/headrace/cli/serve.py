"""`headrace serve`: run the broker. Its flags are the settings, all of them."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from headrace.cli.options import config_option, json_option, settings_file
from headrace.config import SETTINGS, Setting, load
from headrace.errors import InvalidInput

KIND_NAMES = {
    "size": "SIZE",
    "duration": "DURATION",
    "address": "HOST:PORT",
    "path": "FOLDER",
    "file": "FILE",
    "count": "N",
}
EPILOG = (
    "Every flag can also be set as HEADRACE_NAME in the environment or as `name` in headrace.toml; "
    "flags win over the environment, the environment over the file. Sizes are written 256MB or 4 KB, "
    "durations 5s, 100ms or 7d."
)


def setting_option(setting: Setting) -> click.Option:
    """The flag of a setting. Values stay text: config parses them, so that every source is read alike."""
    names = [setting.flag, *("--" + alias.replace("_", "-") for alias in _flag_aliases(setting)), setting.name]
    if setting.kind == "bool":
        names[0] += f"/--no-{setting.flag[2:]}"
        return click.Option(names, default=None, help=setting.help)
    between = "," if setting.kind == "names" else "|"
    metavar = KIND_NAMES.get(setting.kind) or between.join(setting.choices) or "TEXT"
    default = setting.default
    return click.Option(names, metavar=metavar, help=f"{setting.help}  [default: {default}]")


def _flag_aliases(setting: Setting) -> tuple[str, ...]:
    """Kafka's spellings are for topics; on the command line they would only be noise."""
    return setting.aliases if setting.scope == "broker" else ()


@config_option
@click.option("--demo", is_flag=True, help="Keep the broker busy with a small shop: something to see at once.")
@json_option
def _serve(config_file: Path | None, demo: bool, as_json: bool, **flags: Any) -> int:
    """Run the broker until SIGTERM or Ctrl-C.

    \b
    headrace serve
    headrace serve --demo
    headrace serve --data-dir /var/lib/headrace --http 0.0.0.0:15672 --amqp off
    headrace serve --profile throughput --retention-ms 30d
    """
    config = load(flags, os.environ, settings_file(config_file))
    if config.amqp is config.kafka is config.http is None:
        raise InvalidInput("nobody could reach this broker: amqp, kafka and http are all off")
    from headrace.server import Beside, run

    if not demo:
        return run(config, as_json=as_json)
    if config.amqp is None or config.http is None:
        raise InvalidInput("--demo needs the AMQP listener and the HTTP listener: one of them is off")
    text = "orders over AMQP, some die, all are read again over Kafka and summed up in Spark (headrace demo)"
    return run(config, beside=Beside((sys.executable, "-m", "headrace", "demo", "--quiet"), text), as_json=as_json)


serve = click.command("serve", epilog=EPILOG)(_serve)
serve.params[:0] = [setting_option(setting) for setting in SETTINGS]
