"""`headrace log`: inspecting a data folder, with and without a running broker."""

import json
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cli.running import Broker, headrace, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with forty messages in sealed segments and a few in another topic; no broker is running."""
    data = tmp_path_factory.mktemp("data")
    with serving(data, "--segment-size", "4KB") as broker:
        for n in range(4):
            broker.said("pub", "orders", stdin=b"".join(b"%02d" % (n * 10 + i) + b"x" * 400 + b"\n" for i in range(10)))
        broker.said("pub", "other", "a", "b", "-k", "key")
    return data


def said(folder: Path, *arguments: str) -> str:
    done = headrace("log", *arguments, HEADRACE_DATA_DIR=str(folder))
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_logs_are_listed(folder: Path) -> None:
    rows = [line.split("\t") for line in said(folder, "ls").splitlines()]
    assert [(row[1], row[2], row[3]) for row in rows] == [("orders", "0", "40"), ("other", "0", "2")]
    listed = json.loads(said(folder, "ls", "--json"))
    assert listed["broker_pid"] is None
    assert listed["logs"][0]["segments"] >= 4


def test_messages_are_dumped_without_a_broker(folder: Path) -> None:
    lines = [json.loads(line) for line in said(folder, "dump", "orders", "--json", "-o", "15", "-c", "10").splitlines()]
    assert [(m["offset"], m["value"][:2]) for m in lines] == [(n, f"{n}") for n in range(15, 25)]
    assert said(folder, "dump", "other").splitlines()[0].split("  ")[1:] == ["0", "key:", "a"]


def test_batches_are_dumped_as_stored(folder: Path) -> None:
    batches = [json.loads(line) for line in said(folder, "dump", "orders", "-b", "--json").splitlines()]
    assert sum(batch["records"] for batch in batches) == 40
    for before, after in pairwise(batches):
        assert after["base_offset"] == before["last_offset"] + 1
        if before["segment"] == after["segment"]:
            assert after["position"] == before["position"] + before["bytes"]
        else:
            assert after["position"] == 0
    late = said(folder, "dump", "orders", "-b", "-o", "35").splitlines()
    assert late == said(folder, "dump", "orders", "-b").splitlines()[-len(late) :]


def test_verify_reports_a_sound_folder(folder: Path) -> None:
    report = json.loads(said(folder, "verify", "--json"))
    assert report["sound"] is True
    assert (report["logs"], report["records"], report["problems"]) == (2, 42, [])
    assert json.loads(said(folder, "verify", "other", "--json"))["records"] == 2


def test_damage_is_found_and_has_its_own_exit_code(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as broker:
        broker.said("pub", "orders", *["message"] * 10)
    (segment,) = (tmp_path / "data" / "logs").glob("*orders*/*.log")
    data = bytearray(segment.read_bytes())
    data[100] ^= 1
    segment.write_bytes(data)
    done = headrace("log", "verify", "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 6
    assert f"problem\t{segment} is damaged at byte" in done.stdout.decode()


def test_a_deleted_index_is_rebuilt(folder: Path) -> None:
    indexes = sorted((folder / "logs").glob("*orders*/*.index"))[:-1]
    before = [index.read_bytes() for index in indexes]
    for index in indexes:
        index.unlink()
    assert int(said(folder, "reindex", "orders").split("\t")[1]) >= len(indexes)
    assert [index.read_bytes() for index in indexes] == before


def test_the_folder_of_a_running_broker_can_be_inspected_but_not_changed(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as broker:
        broker.said("pub", "orders", "x")
        done = headrace("log", "ls", "--json", "--data-dir", str(tmp_path / "data"))
        assert json.loads(done.stdout)["broker_pid"] == broker.process.pid
        assert f"a broker (pid {broker.process.pid}) has" in done.stderr.decode()
        refused = headrace("log", "reindex", "--data-dir", str(tmp_path / "data"))
        assert refused.returncode == 8
        assert "in use by another broker" in refused.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["dump", "nix"], "log 'nix' does not exist"),
        (["ls", "--data-dir", "/nowhere"], "/nowhere is not a data folder"),
    ],
)
def test_a_missing_object_is_exit_code_4(folder: Path, arguments: list[str], sentence: str) -> None:
    done = headrace("log", *arguments, HEADRACE_DATA_DIR=str(folder))
    assert done.returncode == 4
    assert sentence in done.stderr.decode()


def test_a_damaged_journal_prevents_the_start_until_it_is_repaired(tmp_path: Path) -> None:
    data = tmp_path / "data"
    broker = Broker(data, "--checkpoint-interval", "1h")  # after a checkpoint the journal is not needed
    try:
        broker.said("pub", "orders", *["first"] * 5)
        broker.said("pub", "orders", *["last"] * 5)
    finally:
        broker.stop(signal.SIGKILL)
    journal = max((data / "journal").iterdir(), key=lambda path: path.read_bytes().rfind(b"last"))
    content = bytearray(journal.read_bytes())
    content[content.rfind(b"last")] ^= 1
    journal.write_bytes(content)
    refused = headrace("serve", "--data-dir", str(data), "--http", "localhost:0", "--amqp", "off", "--kafka", "off")
    assert refused.returncode == 6
    (sentence,) = refused.stderr.decode().splitlines()
    assert "were synced and are gone" in sentence and "headrace log repair" in sentence
    looked = headrace("log", "repair", "--data-dir", str(data))
    assert looked.returncode == 6 and b"sound\tfalse" in looked.stdout
    assert b"--accept-loss" in looked.stderr and b"were synced and are gone" in looked.stdout
    accepted = headrace("log", "repair", "--accept-loss", "--json", "--data-dir", str(data))
    assert accepted.returncode == 0, accepted.stderr
    (aside,) = json.loads(accepted.stdout)["set_aside"]
    assert Path(aside).read_bytes() == bytes(content)
    assert headrace("log", "repair", "--data-dir", str(data)).returncode == 0
    with serving(data) as broker:
        found = [json.loads(line)["value"] for line in broker.said("sub", "orders", "-e", "-J").splitlines()]
        assert found == ["first"] * 5 + ["last"] * 5, "the segment had them; only the journal's copy was damaged"
