"""Writes the reference tables of docs/configuration.md and docs/cli.md from the code: `make docs`.

With --check it changes nothing and fails when a page is not what the code says (tests/test_docs.py does that).
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from headrace.cli.app import BUG, EXIT_CODES, INTERRUPTED, root
from headrace.cli.lazy import ALIASES
from headrace.config import DURABILITIES, PROFILES, SETTINGS, Setting, format_duration, format_size

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end of generated -->)", re.S)


def settings(scope: str) -> Iterator[str]:
    yield "| setting | kind | default | meaning |"
    yield "|---|---|---|---|"
    for setting in SETTINGS:
        if setting.scope == scope:
            name = f"`{setting.name}`" + "".join(f"<br>`{alias}`" for alias in setting.aliases)
            yield f"| {name} | {_kind(setting)} | `{setting.default}` | {setting.help.replace('|', chr(92) + '|')} |"


def _kind(setting: Setting) -> str:
    if setting.choices:
        return ("some of " if setting.kind == "names" else "") + ", ".join(f"`{choice}`" for choice in setting.choices)
    words = "".join(f" or `{word}`" for word in setting.words)
    bounds = ""
    if setting.least or setting.most is not None:
        show = {"size": format_size, "duration": format_duration}.get(setting.kind, str)
        most = "" if setting.most is None else f" to {show(setting.most)}"
        bounds = f", {show(setting.least)}{most or ' or more'}"
    return f"{setting.kind}{words}{bounds}"


def profiles() -> Iterator[str]:
    bundles = {f"--profile {name}": bundle for name, bundle in PROFILES.items() if bundle}
    bundles |= {f"--durability {name}": bundle for name, bundle in DURABILITIES.items() if bundle}
    yield "| bundle | sets |"
    yield "|---|---|"
    for name, bundle in bundles.items():
        yield f"| `{name}` | {', '.join(f'`{setting} = {value}`' for setting, value in bundle.items())} |"


def commands() -> Iterator[str]:
    context = click.Context(root, info_name="headrace")
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        assert command is not None
        yield from _command(command, click.Context(command, parent=context, info_name=name))


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    path = context.command_path
    yield f"### {path}"
    yield ""
    if isinstance(command, click.Group):
        yield _prose(command.help or "")
        yield ""
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _command(inner, click.Context(inner, parent=context, info_name=name))
        return
    yield "```"
    yield f"{path} {' '.join(command.collect_usage_pieces(context))}"
    yield "```"
    yield ""
    yield _prose(command.help or "")
    yield ""
    if path == "headrace serve":
        yield "The other options are the settings of [configuration.md](configuration.md): `--name VALUE` for each."
        yield ""
    yield "| option | meaning |"
    yield "|---|---|"
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or (path == "headrace serve" and parameter.name in {s.name for s in SETTINGS}):
            continue
        names, text = record
        if "--help" in parameter.opts or not text:  # arguments are explained in the prose
            continue
        yield f"| `{names.replace('|', chr(92) + '|')}` | {re.sub(chr(10), ' ', text)} |"
    yield ""


def _prose(text: str) -> str:
    """A docstring as Markdown: what click keeps as it is (after \\b) becomes a code block."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if paragraph.startswith("\b"):
            lines = [line.strip() for line in paragraph.splitlines()[1:]]
            paragraphs.append("\n".join(["```", *lines, "```"]))
        else:
            paragraphs.append(" ".join(line.strip() for line in paragraph.splitlines()))
    return "\n\n".join(paragraphs)


def aliases() -> Iterator[str]:
    by_target: dict[str, list[str]] = {}
    for alias, target in ALIASES.items():
        by_target.setdefault(target, []).append(alias)
    yield "| verb | also |"
    yield "|---|---|"
    for target, names in by_target.items():
        yield f"| `{target}` | {', '.join(f'`{name}`' for name in names)} |"


def exit_codes() -> Iterator[str]:
    meanings = {0: "success"} | {code: text for _, code, text in reversed(EXIT_CODES) if text}
    meanings |= {BUG: "internal error: please report it", INTERRUPTED: "interrupted by Ctrl-C"}
    yield "| code | meaning |"
    yield "|---|---|"
    for code, meaning in sorted(meanings.items()):
        yield f"| {code} | {meaning} |"


BLOCKS: dict[str, Callable[[], Iterator[str]]] = {
    "broker-settings": lambda: settings("broker"),
    "stream-settings": lambda: settings("stream"),
    "profiles": profiles,
    "commands": commands,
    "aliases": aliases,
    "exit-codes": exit_codes,
}


def render(page: str) -> str:
    return BLOCK.sub(lambda m: m[1] + "\n".join(BLOCKS[m[2]]()).rstrip() + "\n" + m[3], page)


def stale() -> list[Path]:
    return [path for path in sorted(DOCS.glob("*.md")) if render(path.read_text()) != path.read_text()]


def main() -> None:
    if "--check" in sys.argv[1:]:
        if wrong := stale():
            sys.exit(f"{', '.join(path.name for path in wrong)}: not what the code says; run `make docs`")
        return
    for path in stale():
        path.write_text(render(path.read_text()))
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
