"""A damaged catalog: restored by the start, or repaired with `headrace log repair`."""

import json
from pathlib import Path

import pytest

from headrace.cli.data_folder import repair
from tests.cli.running import ONLY_HTTP, SMALL, headrace, serving
from tests.crash.test_rot import KINDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data") / "data"
    with serving(data) as broker:
        broker.said("topic", "add", "orders", "-c", "retention_ms=90000000")
        broker.said("pub", "orders", "first", "second")
    return data


def document(data: Path) -> Path:
    (path,) = (data / "catalog" / "streams").iterdir()
    return path


def flip_a_digit(data: Path) -> bytes:
    """Shortens the retention in the document: if it were accepted, messages would be deleted."""
    content = document(data).read_bytes()
    at = content.index(b"retention_ms") + len(b'retention_ms": "')
    assert content[at : at + 1].isdigit()
    changed = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    document(data).write_bytes(changed)
    return changed


def messages(data: Path) -> list[str]:
    with serving(data) as broker:
        return broker.said("sub", "orders", "-e", "-f", "%s\n").splitlines()


def test_a_damaged_catalog_is_restored_or_can_be_repaired(folder: Path) -> None:
    before = document(folder).read_bytes()
    flip_a_digit(folder)
    with serving(folder) as broker:
        assert broker.said("sub", "orders", "-e", "-f", "%s\n").splitlines() == ["first", "second"]
        assert "RESTORED: " in "".join(broker.lines) and str(document(folder)) in "".join(broker.lines)
        assert json.loads(broker.said("status", "--json"))["recovery"]["restored"]
    assert document(folder).read_bytes() == before

    damaged = flip_a_digit(folder)
    (folder / "catalog" / "all.copy").unlink()
    refused = headrace("serve", "--data-dir", str(folder), *ONLY_HTTP, *SMALL)
    assert refused.returncode == 6
    (sentence,) = refused.stderr.decode().splitlines()
    assert str(document(folder)) in sentence and "headrace log repair" in sentence
    looked = headrace("log", "repair", "--json", "--data-dir", str(folder))
    assert looked.returncode == 6 and b"--as-is FILE" in looked.stderr
    (facts,) = json.loads(looked.stdout)["documents"]
    assert facts["says"].encode() == damaged and facts["copy"] is None and facts["can_be_taken"]
    plain = headrace("log", "repair", "--data-dir", str(folder)).stdout.decode()
    assert "its checksum does not match its content" in plain and "without it\tthe stream is missing" in plain

    accepted = headrace("log", "repair", "--accept-loss", "--data-dir", str(folder))
    assert accepted.returncode == 0, accepted.stderr
    kept = folder / "damaged" / "catalog" / "streams"
    aside = max(kept.iterdir(), key=lambda path: len(path.name))  # the shorter name is what the start replaced
    assert f"quarantined: {aside}\n" in accepted.stdout.decode()
    assert aside.read_bytes() == damaged
    with serving(folder) as broker:
        assert broker.said("topic", "ls", "--json").count("orders") == 0
    assert headrace("log", "dump", "orders", "--data-dir", str(folder)).stdout.count(b"\n") == 2

    aside.rename(folder / "catalog" / "streams" / document_name(aside))
    taken = headrace("log", "repair", "--as-is", document(folder).name, "--data-dir", str(folder))
    assert taken.returncode == 0, taken.stderr
    assert messages(folder) == ["first", "second"]


def document_name(aside: Path) -> str:
    """The name without the number that was added because the name was taken."""
    return aside.name.partition(".json")[0] + ".json"


def test_repair_refuses_a_document_that_is_not_damaged(folder: Path) -> None:
    done = headrace("log", "repair", "--as-is", "other.json", "--data-dir", str(folder))
    assert done.returncode != 0
    assert "other.json is not a damaged document" in done.stderr.decode()


def test_every_kind_of_document_has_a_described_effect() -> None:
    assert repair.WITHOUT.keys() == set(KINDS)
