"""Command groups that import a command only when it runs, and that accept the verbs of other tools."""

import difflib
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

# Verbs of rabbitmqadmin, rpk, kafka-topics and kcat. Not shown in --help.
ALIASES = {
    "list": "ls",
    "describe": "info",
    "show": "info",
    "create": "add",
    "declare": "add",
    "delete": "rm",
    "configure": "set",
    "produce": "pub",
    "publish": "pub",
    "consume": "sub",
    "subscribe": "sub",
    "topics": "topic",
    "queues": "queue",
    "exchanges": "exchange",
    "bindings": "binding",
    "policies": "policy",
    "vhosts": "vhost",
    "groups": "group",
    "schemas": "schema",
    "connections": "connection",
    "users": "user",
    "close": "rm",
    "seek": "reset",
    "up": "serve",
    "server": "serve",
}

SUMMARY_CHARACTERS_MAX = 1000  # never truncate the summary of a command, as click does by default


class AliasGroup(click.Group):
    """A group that accepts aliases of its commands and suggests the nearest name for an unknown command."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, found.get_short_help_str(SUMMARY_CHARACTERS_MAX)) for name, found in commands.items() if found]
            )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, ALIASES.get(cmd_name, cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            near = difflib.get_close_matches(name, [*self.list_commands(ctx), *ALIASES], n=1)
            hint = f" Did you mean {ALIASES.get(near[0], near[0])!r}?" if near else ""
            raise click.UsageError(f"No such command {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)


class LazyGroup(AliasGroup):
    """A group that imports its commands on use: `commands_at` maps a command to `module:attribute`."""

    def __init__(
        self, *, commands_at: Mapping[str, str], hidden_at: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._commands_at = commands_at
        self._hidden_at = hidden_at or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._commands_at)  # in the order in which a new user needs them

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = self._commands_at.get(cmd_name) or self._commands_at.get(ALIASES.get(cmd_name, ""))
        place = place or self._hidden_at.get(cmd_name)
        if place is None:
            return None
        module, _, attribute = place.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command
