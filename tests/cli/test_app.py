"""What holds for every command, tried in this process."""

import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import top
from headrace.cli.app import run


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_a_stream_that_was_closed_before_the_start_is_no_mistake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stream: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, stream, None)
    assert run(["topic", "rm", "orders"]) == 2, "there is nobody to ask"
    assert run(["doctor", "--help"]) == 0
    getattr(sys, stream).close()


def test_a_mistake_is_one_line_whatever_is_in_a_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["log", "ls", "--data-dir", "two\nlines\x1b[31m"]) == 4
    assert capsys.readouterr().err.endswith("/two\\nlines\\x1b[31m is not a data folder: it has no logs/\n")


def test_top_sorts_by_every_column_it_shows() -> None:
    """The broker passes over a column that it does not know: the order would be that of the names."""
    row = {"name": "x", "kind": "queue", "ready": 1, "unacked": 0, "consumers": 0, "size_bytes": 9}
    shown: dict[str, Any] = {**row, "rates": {"publish": 1.0, "ack": 2.0}}
    asked: list[str] = []

    class Broker:
        def call(self, *_: str, query: dict[str, str]) -> dict[str, Any]:
            asked.append(query.get("sort", "name"))
            return {"items": [shown]}

    for column in top.COLUMNS:
        top._look(Broker(), 1, column)  # type: ignore[arg-type]
    for sorted_by in asked:
        at: Any = shown
        for part in sorted_by.split("."):
            at = at[part]
