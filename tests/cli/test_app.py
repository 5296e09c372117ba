"""Behaviour of all commands, tested in this process."""

import asyncio
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main, status, top
from headrace.cli.app import run
from headrace.cli.management import dlq
from headrace.cli.messages import sub
from headrace.cli.messages.bench import _run as run_bench
from headrace.errors import CorruptLog


def test_ctrl_c_during_the_imports_prints_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "headrace.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "headrace.cli.app")
    monkeypatch.delattr("headrace.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_a_closed_standard_stream_is_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stream: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, stream, None)
    assert run(["topic", "rm", "orders"]) == 2, "stdin is not a terminal"
    assert run(["doctor", "--help"]) == 0
    getattr(sys, stream).close()


def test_an_error_is_one_line_with_any_characters_in_a_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["log", "ls", "--data-dir", "two\nlines\x1b[31m"]) == 4
    assert capsys.readouterr().err.endswith("/two\\nlines\\x1b[31m is not a data folder: it has no logs/\n")


def test_json_that_is_not_an_object_is_quoted_in_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policy", "set", "keep", "^orders$", "[1]"]) == 2
    assert capsys.readouterr().err == "headrace: DEFINITION must be a JSON object: '[1]'\n"


@pytest.mark.parametrize("group", [[], ["log"], ["user"]])
def test_help_never_truncates_the_summary_of_a_command(capsys: pytest.CaptureFixture[str], group: list[str]) -> None:
    assert run([*group, "--help"]) == 0
    _, _, commands = capsys.readouterr().out.partition("Commands:\n")
    assert commands and "..." not in commands


@pytest.mark.parametrize("command", [["log", "ls"], ["log", "repair"], ["user", "ls"]])
def test_an_inaccessible_data_folder_is_reported_as_such(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str]
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("os.scandir", refuse)  # the tests may run as root, to whom permissions do not apply
    assert run([*command, "--data-dir", str(tmp_path)]) == 6
    said = capsys.readouterr().err
    assert said == f"headrace: the data folder {tmp_path} cannot be opened: permission denied for this user\n"


def test_the_doctor_reports_a_file_in_place_of_the_data_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "data").write_text("no folder")
    assert run(["doctor", "--data-dir", str(tmp_path / "data")]) == 1
    rows = [line.split("\t")[:2] for line in capsys.readouterr().out.splitlines()]
    assert ["Python", "ok"] in rows
    assert ["data folder", "missing"] in rows


def test_top_sorts_by_every_column_it_shows() -> None:
    """The broker ignores unknown columns: the rows would be sorted by name."""
    row = {"name": "x", "kind": "queue", "ready": 1, "unacked": 0, "consumers": 0, "size_bytes": 9}
    shown: dict[str, Any] = {**row, "rates": {"publish": 1.0, "ack": 2.0}}
    asked: list[str] = []

    class Broker:
        def call(self, *_: str, query: dict[str, str]) -> dict[str, Any]:
            asked.append(query.get("sort", "name"))
            return {"items": [shown]}

    for column in top.COLUMNS:
        top._sample(Broker(), 1, column)  # type: ignore[arg-type]
    for sorted_by in asked:
        at: Any = shown
        for part in sorted_by.split("."):
            at = at[part]


def test_messages_are_printed_before_a_later_error(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    class Consumer:
        def until_end(self) -> Iterator[bytes]:
            yield b"one "
            yield b"two "
            raise CorruptLog("a file", 70, "the CRC32C does not match")

    consumer: Any = Consumer()
    printed: Any = bytes
    with pytest.raises(CorruptLog):
        sub.write(printed, consumer, until_end=True)
    assert capfdbinary.readouterr().out == b"one two "


def test_following_a_quiet_topic_ends_when_the_reader_of_stdout_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quiet:
        def poll(self, _: float) -> list[bytes]:
            return []

    consumer: Any = Quiet()
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(BrokenPipeError):
            sub.write(lambda _: b"", consumer)


def test_a_replay_reports_the_messages_it_does_not_move_and_the_reason() -> None:
    plan = {"matched": 3, "targets": {"orders": 3}, "missing": {"gone": 2, "": 1}}
    assert dlq._describe(plan) == (
        "3 to orders, 2 not moved (gone does not exist), 1 not moved (their original queue is unknown)."
    )


def test_status_hides_zeros_of_the_recovery_report_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer: dict[str, Any] = dict.fromkeys(["ready", "reason", "version", "pid", "data_dir", "topics", "partitions"])
    answer |= {"archived_segments": 0}
    answer |= {
        "uptime_ms": 0,
        "listeners": {},
        "settings": [],
        "recovery": {"clean": False, "damaged": [], "records": 7},
    }
    monkeypatch.setattr("headrace.cli.output.for_people", lambda: True)
    status._show(answer, with_settings=False)
    said = capsys.readouterr().out
    assert [word for word in said.split() if word.startswith("recovery_")] == ["recovery_clean", "recovery_records"]


def test_running_a_pipeline_without_a_broker_fails_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setattr("headrace.pipelines.java.check_java", lambda: 17)
    monkeypatch.setattr(
        "headrace.pipelines.run.BrokerEndpoint", lambda *_, **__: pytest.fail("it would wait as one that runs")
    )
    monkeypatch.chdir(tmp_path)
    assert run(["pipeline", "init", "orders.py"]) == 0
    capsys.readouterr()
    assert run(["pipeline", "run", "orders.py", "--url", "http://127.0.0.1:1"]) == 3
    assert capsys.readouterr().err.startswith("headrace: no broker answers at http://127.0.0.1:1: connection refused")


def test_an_interrupted_bench_deletes_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    class Client:
        @classmethod
        async def connect(cls, *_: object) -> "Client":
            return cls()

        async def call(self, method: type, **_: object) -> None:
            called.append(method.__qualname__)

        async def publish(self, *_: object) -> None:
            raise KeyboardInterrupt

        async def close(self) -> None:
            called.append("close")

    monkeypatch.setattr("headrace.demo.amqp.AmqpClient", Client)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run_bench("localhost", 5672, None, None, 1, 1, 1))
    assert called[-2:] == ["Queue.Delete", "close"]
