"""`headrace schema`, against a real broker."""

import json
from pathlib import Path

import pytest

from headrace.cli.app import run
from headrace.cli.management.schema import check, readable, register
from tests.cli.running import Broker


def record(*fields: dict[str, object]) -> str:
    return json.dumps({"type": "record", "name": "Order", "fields": fields}, separators=(",", ":"))


ID: dict[str, object] = {"name": "id", "type": "int"}
FIRST, SECOND = record(ID), record(ID, {"name": "note", "type": "string", "default": ""})
BROKEN = record(ID, {"name": "price", "type": "int"})  # the registered schema has no such field


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schemas")
    for name, text in (("first", FIRST), ("second", SECOND), ("broken", BROKEN)):
        (folder / f"{name}.avsc").write_text(text)
    (folder / "base.proto").write_text('syntax = "proto3"; message Base { int32 a = 1; }')
    (folder / "user.proto").write_text('syntax = "proto3"; import "base.proto"; message User { Base base = 1; }')
    (folder / "some.json").write_text('{"type": "object"}')
    return folder


def test_the_life_of_a_subject(broker: Broker, files: Path) -> None:
    first, second, broken = (str(files / f"{name}.avsc") for name in ("first", "second", "broken"))
    assert broker.said("schema", "check", "life", first) == "", "anything may be the first"
    assert broker.said("schema", "register", "life", first).split("\t")[:2] == ["life", "1"]
    made = json.loads(broker.said("schema", "register", "life", second, "--json"))
    assert (made["subject"], made["version"]) == ("life", 2)
    assert json.loads(broker.said("schema", "register", "life", second, "--json")) == made, "it is there already"

    refused = broker.run("schema", "check", "life", broken)
    assert refused.returncode == 5 and b"price" in refused.stdout and refused.stderr == b""
    said = json.loads(broker.run("schema", "check", "life", broken, "--json").stdout)
    assert said["compatible"] is False and "price" in said["reasons"][0]
    refused = broker.run("schema", "register", "life", "-", "--type", "avro", stdin=BROKEN.encode())
    assert refused.returncode == 5 and b"price" in refused.stderr

    assert broker.said("schema", "show", "life", "--version", "1") == FIRST + "\n"
    shown = json.loads(broker.said("schema", "info", "life", "--json"))
    facts = {name: shown[name] for name in ("version", "id", "type", "compatibility", "versions", "references")}
    assert facts == {"version": 2, "id": made["id"], "type": "AVRO", "compatibility": "BACKWARD", "versions": [1, 2],
                     "references": []}  # fmt: skip
    assert shown["schema"] == SECOND
    assert broker.said("schemas", "list", "lif") == f"life\tAVRO\t2\t2\t{made['id']}\tBACKWARD\n"

    assert broker.run("schema", "delete", "life").returncode == 2, "stdin is not a terminal"
    gone = json.loads(broker.said("schema", "delete", "life", "--version", "1", "--yes", "--json"))
    assert gone == {"removed": ["life"], "versions": [1]}
    gone = json.loads(broker.said("schema", "rm", "life", "--permanent", "-y", "--json"))
    assert gone == {"removed": ["life"], "versions": [1, 2]}, "those that are deleted already, too"
    assert broker.said("schema", "ls", "life", "--deleted") == ""


def test_a_deleted_subject_is_listed_on_request_and_removed_permanently(broker: Broker, files: Path) -> None:
    broker.said("schema", "register", "gone", str(files / "first.avsc"))
    broker.said("schema", "rm", "gone", "--yes")
    assert broker.said("schema", "ls", "gone") == ""
    (listed,) = json.loads(broker.said("schema", "ls", "gone", "--deleted", "--json"))["subjects"]
    assert (listed["subject"], listed["deleted"], listed["versions"]) == ("gone", True, 0)
    assert broker.run("schema", "rm", "gone", "--yes").returncode == 4
    broker.said("schema", "rm", "gone", "--permanent", "--yes")
    assert broker.run("schema", "rm", "gone", "--permanent", "--yes").returncode == 4


def test_check_and_register_agree() -> None:
    assert [one.to_info_dict() for one in check.params] == [one.to_info_dict() for one in register.params]


def test_compatibility_levels_are_shown_set_and_unset(broker: Broker) -> None:
    level = ("schema", "compatibility")
    assert broker.said(*level) == "BACKWARD\n"
    assert broker.said(*level, "levelled", "full") == "FULL\n"
    assert json.loads(broker.said(*level, "--json")) == {"subject": None, "compatibility": "BACKWARD"}
    assert broker.said(*level, "--global", "NONE") == "NONE\n"
    assert (broker.said(*level, "levelled"), broker.said(*level, "other")) == ("FULL\n", "NONE\n")
    assert broker.said(*level, "levelled", "--unset") == "NONE\n"
    broker.said(*level, "--global", "backward")


def test_a_referenced_schema_cannot_be_removed(broker: Broker, files: Path) -> None:
    broker.said("schema", "register", "base", str(files / "base.proto"))
    user = ("register", "user", str(files / "user.proto"))
    assert broker.run("schema", *user).returncode == 2, "it needs the other one"
    broker.said("schema", *user, "-r", "base.proto=base:1")
    shown = json.loads(broker.said("schema", "info", "user", "--json"))
    assert shown["references"] == [{"name": "base.proto", "subject": "base", "version": 1}]
    needed = broker.run("schema", "rm", "base", "--yes")
    assert needed.returncode == 5 and b"references exist" in needed.stderr


def test_schemas_are_printed_without_control_characters() -> None:
    assert "    12345678901234567890,\n    1.0\n" in readable('{"a":[12345678901234567890,1.0]}', "JSON")
    assert readable("no JSON\x1b[2J\nat all", "AVRO") == "no JSON\\x1b[2J\nat all"
    assert readable("[" * 100_000, "JSON") == "[" * 100_000


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["info", "nix"], 4, "Subject 'nix' not found."),
        (["rm", "nix", "-y"], 4, "Subject 'nix' not found."),
        (["register", "x", "some.json"], 2, "give it with --type"),
        (["register", "x", "some.json", "--type", "avro"], 2, "Invalid schema"),
        (["register", "x", "missing.avsc"], 2, "does not exist"),
        (["register", "x", "first.avsc", "-r", "a=b"], 2, "write NAME=SUBJECT:VERSION"),
        (["compatibility", "x", "BEST"], 2, "'BEST' is not a compatibility level"),
        (["compatibility", "--global"], 2, "--global needs a LEVEL"),
        (["compatibility", "--unset"], 2, "--unset needs a SUBJECT"),
        (["compatibility", "x", "--unset"], 4, "Subject 'x' not found"),
    ],
)
def test_an_error_is_one_sentence(
    broker: Broker,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    sentence: str,
) -> None:
    monkeypatch.setenv("HEADRACE_URL", broker.url)
    monkeypatch.chdir(files)
    assert run(["schema", *arguments]) == code
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
