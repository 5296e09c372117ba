"""Output of commands: a table on a terminal, tab-separated values in a pipe, JSON with --json.

Piped output has no header line and no colours, and tabs and line breaks inside values are escaped, so that `cut -f2`
and `while read` work. rich is imported only for a terminal.
"""

import sys
from collections.abc import Mapping, Sequence

import click
import msgspec

Cell = str | int | float | bool | None
Row = Mapping[str, Cell]
NAME_WIDTH_MAX = 32  # the first column is not wrapped up to this width, even on a narrow terminal


def for_people() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()


def show_json(value: object) -> None:
    """Prints one JSON document: indented on a terminal, on one line in a pipe."""
    data = msgspec.json.encode(value)
    click.echo(msgspec.json.format(data, indent=2) if for_people() else data)


def show_rows(rows: Sequence[Row], columns: Sequence[str], *, empty: str = "nothing to show") -> None:
    """Prints a table or TSV. Columns are keys of the rows; the table shows their underscores as spaces."""
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
    """Prints names and values, one pair per line."""
    if not for_people():
        for name, value in facts.items():
            click.echo(f"{name}\t{_plain(value)}")
        return
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        click.echo(f"{click.style(name.ljust(width), bold=True)}  {_friendly(value)}")


def say(sentence: str) -> None:
    """Prints a remark to stderr, if that is a terminal."""
    if sys.stderr.isatty():
        click.echo(sentence, err=True)


def say_in_place(sentence: str) -> None:
    """Like `say`, but replaces the previous remark, for progress. An empty sentence clears the line."""
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
