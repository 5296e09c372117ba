"""`headrace serve`: run the broker. Every setting is an option of this command."""

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
    "Every setting can also be given as HEADRACE_NAME in the environment or as `name` in headrace.toml. Options "
    "override the environment, and the environment overrides the file. Write sizes as 256MB or 4 KB, and durations "
    "as 5s, 100ms or 7d."
)


def setting_option(setting: Setting) -> click.Option:
    """The option of a setting. Its value stays text, so that config parses the values of all sources alike."""
    names = [setting.flag, *("--" + alias.replace("_", "-") for alias in _flag_aliases(setting)), setting.name]
    if setting.kind == "bool":
        names[0] += f"/--no-{setting.flag[2:]}"
        return click.Option(names, default=None, help=setting.help)
    between = "," if setting.kind == "names" else "|"
    metavar = KIND_NAMES.get(setting.kind) or between.join(setting.choices) or "TEXT"
    default = setting.default
    return click.Option(names, metavar=metavar, help=f"{setting.help}  [default: {default}]")


def _flag_aliases(setting: Setting) -> tuple[str, ...]:
    """Aliases of stream settings are Kafka's spellings for topics; as options they would only clutter --help."""
    return setting.aliases if setting.scope == "broker" else ()


@config_option
@click.option("--demo", is_flag=True, help="Also run `headrace demo`, which generates traffic.")
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
        raise InvalidInput("all listeners are off: enable at least one of --amqp, --kafka and --http")
    from headrace.server import SideProcess, run

    if not demo:
        return run(config, as_json=as_json)
    if config.amqp is None or config.http is None:
        raise InvalidInput("--demo needs the AMQP and the HTTP listener, but one of them is off")
    command = (sys.executable, "-m", "headrace", "demo", "--quiet")
    shop = SideProcess(
        command, "a small shop publishes over AMQP, reads over Kafka and adds up in Spark (headrace demo)"
    )
    return run(config, side_process=shop, as_json=as_json)


serve = click.command("serve", epilog=EPILOG)(_serve)
serve.params[:0] = [setting_option(setting) for setting in SETTINGS]
