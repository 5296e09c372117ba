"""What holds for every command, tried in this process."""

import sys
from pathlib import Path

import pytest

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
