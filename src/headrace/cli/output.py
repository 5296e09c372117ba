"""What a command shows: a table for people, tab-separated values for pipes, JSON for programs.

Piped output has no header line and no colours, and a tab or line break inside a value is escaped, so that
`cut -f2` and `while read` work. rich is imported only where a person is looking.
"""

import sys
from collections.abc import Mapping, Sequence

import click
import msgspec

Cell = str | int | float | bool | None
Row = Mapping[str, Cell]
NAME_WIDTH_MAX = 32  # of the first column: up to this it is whole, however narrow the terminal


def for_people() -> bool:
    return sys.stdout.isatty()


def show_json(value: object) -> None:
    """One JSON document: indented for a person, on one line for a program."""
    data = msgspec.json.encode(value)
    click.echo(msgspec.json.format(data, indent=2) if for_people() else data)


def show_rows(rows: Sequence[Row], columns: Sequence[str], *, empty: str = "nothing to show") -> None:
    """A table or TSV; columns are the keys of a row, underscores shown as spaces."""
    if not for_people():
        for row in rows:
            click.echo("\t".join(_plain(row.get(column)) for column in columns))
        return
    if not rows:
        click.echo(empty)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        numbers = all(isinstance(row.get(column), int | float | None) for row in rows)
        table.add_column(column.replace("_", " "), justify="right" if numbers else "left", overflow="fold")
    table.columns[0].min_width = min(NAME_WIDTH_MAX, max(len(_friendly(row.get(columns[0]))) for row in rows))
    for row in rows:
        table.add_row(*(Text(_friendly(row.get(column))) for column in columns))
    Console().print(table)


def show_facts(facts: Mapping[str, Cell]) -> None:
    """Names and values, one a line."""
    if not for_people():
        for name, value in facts.items():
            click.echo(f"{name}\t{_plain(value)}")
        return
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        click.echo(f"{click.style(name.ljust(width), bold=True)}  {_friendly(value)}")


def say(sentence: str) -> None:
    """A remark for a person beside the output: on stderr, and only when somebody is looking."""
    if sys.stderr.isatty():
        click.echo(sentence, err=True)


def say_in_place(sentence: str) -> None:
    """As say, in the place of what was said in it last: for what goes on. Nothing clears the line."""
    if sys.stderr.isatty():
        click.echo(f"\r{sentence}\033[K", err=True, nl=False)


def _plain(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, float):
        return f"{cell:.3f}"
    return str(cell).replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


def _friendly(cell: Cell) -> str:
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return _plain(cell)
