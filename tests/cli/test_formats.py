"""Parsing of offsets, times and formats; exit codes and error output."""

import subprocess
import sys

import click
import pytest

from headrace import Message, errors
from headrace.cli import app as cli
from headrace.cli import output
from headrace.cli.lazy import ALIASES
from headrace.cli.messages.formats import ReadRange, compile_format, parse_range, parse_time, printable, unescape
from headrace.cli.messages.pub import split
from headrace.errors import InvalidInput

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("beginning", ReadRange("earliest")),
        ("latest", ReadRange("latest")),
        ("17", ReadRange(17)),
        ("-5", ReadRange(-5)),
        ("s@1h", ReadRange(since_ms=NOW_MS - 3_600_000)),
        ("s@1600000000000,e@1600000001000", ReadRange(since_ms=1_600_000_000_000, until_ms=1_600_000_001_000)),
        ("s@2023-11-14T22:13:20+00:00", ReadRange(since_ms=NOW_MS)),
    ],
)
def test_offsets_in_kcat_notation_are_parsed(text: str, where: ReadRange) -> None:
    assert parse_range(text, NOW_MS) == where


@pytest.mark.parametrize("text", ["", "x", "s@", "1.5", "s@yesterday", "99999999999999999999"])
def test_an_invalid_offset_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_range(text, NOW_MS)


def test_times_are_durations_ago_dates_or_milliseconds() -> None:
    assert parse_time("90s", NOW_MS) == NOW_MS - 90_000
    assert parse_time("-2d", NOW_MS) == NOW_MS - 2 * 86_400_000
    assert parse_time("2023-11-14T22:13:20.5Z", NOW_MS) == NOW_MS + 500


def test_a_format_prints_the_fields_it_names() -> None:
    message = Message(2, 7, 99, b"key", b"v\xff", (("a", b"1"), ("b", None)))
    form = compile_format(r"%t %p %o %T %k(%K) %s(%S) %h 100%% \x41\t\\n", "orders")
    assert form(message) == b"orders 2 7 99 key(3) v\xff(2) a=1,b= 100% A\t\\n"
    assert compile_format("%s%k%S%K", "t")(Message(0, 0, 0, None, None)) == b"-1-1"


def test_escapes_and_control_characters() -> None:
    assert unescape(r"a\tb\x00\n\q") == "a\tb\x00\n\\q"
    assert printable("ü \x1b[0m\n".encode()) == "ü \\x1b[0m\\n"
    assert printable(b"\xff") == "\\xff"
    assert printable(None) == "null"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_input_is_split_at_delimiters_regardless_of_read_sizes(size: int) -> None:
    class Pieces:
        def __init__(self, data: bytes) -> None:
            self.data = data

        def read(self, _: int) -> bytes:
            piece, self.data = self.data[:size], self.data[size:]
            return piece

    assert list(split(Pieces(b"a||bc||||d|"), b"||")) == [b"a", b"bc", b"", b"d|"]  # type: ignore[arg-type]


def test_every_error_class_maps_to_the_exit_code_of_its_category() -> None:
    kinds = [kind for kind, _, _ in cli.EXIT_CODES]
    for at, kind in enumerate(kinds):  # the first match decides, so no class may follow one of its base classes
        assert not any(issubclass(kind, earlier) for earlier in kinds[:at])
    assert kinds[-1] is errors.HeadraceError


def test_aliases_point_to_commands_and_shadow_none() -> None:
    context = click.Context(cli.root)
    nouns = {name: cli.root.get_command(context, name) for name in cli.root.list_commands(context)}
    verbs = {verb for noun in nouns.values() if isinstance(noun, click.Group) for verb in noun.commands}
    assert set(ALIASES.values()) <= nouns.keys() | verbs
    assert not ALIASES.keys() & nouns.keys()


def test_an_internal_error_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("HEADRACE_TRACEBACK", raising=False)
    monkeypatch.setattr(cli.root, "main", lambda **_: 1 / 0)
    assert cli.run(["x"]) == cli.BUG
    assert capsys.readouterr().err.count("\n") == 1


def test_a_narrow_terminal_wraps_values_but_not_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "for_people", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    row = {"name": "offset_checkpoint_interval", "value": "a/path" * 9, "origin": "from the environment"}
    output.show_rows([row], ("name", "value", "origin"))
    assert "offset_checkpoint_interval" in capsys.readouterr().out


def test_light_commands_do_not_import_the_broker() -> None:
    """Every command pays for imports: --help must not import the broker, rich, or numeric libraries."""
    program = (
        "import sys; from headrace.cli.app import run; run(['topic', 'ls', '--help']);"
        "print([m for m in sys.modules if m.split('.')[0] in "
        "{'asyncio', 'rich', 'starlette', 'uvicorn', 'kio', 'uvloop', 'pyspark'} "
        "or m.startswith(('headrace.broker', 'headrace.listeners', 'headrace.record', 'headrace.log.shard'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version_and_help_need_no_broker(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("headrace ")
    assert cli.run([]) == 0
    assert "serve" in capsys.readouterr().out
