"""Manual repair of a catalog that a start cannot restore by itself. Nothing is ever deleted."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from headrace.broker.catalog.catalog import file_name
from headrace.broker.catalog.file_catalog import FileCatalog
from headrace.errors import CorruptCatalog, DataFolderLocked, InvalidInput
from headrace.log.catalog import repair
from tests.crash.simdisk import SimulatedDisk

ROOT = "/data"
COPY = f"{ROOT}/catalog/all.copy"
A, B = (f"{ROOT}/catalog/streams/{file_name(('/', name))}" for name in "ab")


def found(disk: SimulatedDisk) -> dict[str, int]:
    return {document["identity"][1]: document["n"] for document in FileCatalog(disk, ROOT).load("streams")}


def filled() -> SimulatedDisk:
    """Two documents, the second changed once: its first line in the copy is out of date."""
    disk = SimulatedDisk()
    disk.mkdir(ROOT)
    disk.sync_dir("/")
    catalog = FileCatalog(disk, ROOT)
    catalog.put("streams", ("/", "a"), {"n": 1})
    catalog.put("streams", ("/", "b"), {"n": 1})
    catalog.put("streams", ("/", "b"), {"n": 2})
    return disk


def change(disk: SimulatedDisk, path: str, old: bytes, new: bytes) -> bytes:
    content = disk.files()[path].replace(old, new)
    assert content != disk.files()[path]
    disk.replace(path, content)
    return content


def both_damaged() -> SimulatedDisk:
    """A digit of b flipped, and so is one in the last line of the copy, which is b's, too."""
    disk = filled()
    change(disk, B, b'"n": 2', b'"n": 3')
    content = disk.files()[COPY]
    at = content.rindex(b'n\\": 2')
    disk.replace(COPY, content[:at] + b"N" + content[at + 1 :])
    with pytest.raises(CorruptCatalog, match="headrace log repair"):
        found(disk)
    return disk


def test_examining_the_catalog_changes_nothing() -> None:
    disk = both_damaged()
    before = disk.files()
    (facts,) = repair.examine(ROOT, disk)
    assert (facts.path, facts.kind) == (B, "streams")
    assert not facts.restores_itself and facts.can_be_taken
    assert '"n": 3' in (facts.says or "") and '"n": 1' in (facts.copy or "")
    assert {p: c for p, c in disk.files().items() if p != f"{ROOT}/lock"} == before


def test_documents_that_a_start_restores_are_left_to_it() -> None:
    disk = filled()
    change(disk, B, b'"n": 2', b'"n": 3')
    (facts,) = repair.examine(ROOT, disk)
    assert facts.restores_itself
    assert repair.decide(ROOT, accept_loss=True, disk=disk) == []
    assert found(disk) == {"a": 1, "b": 2}


@pytest.mark.parametrize("make", [filled, both_damaged])
def test_a_document_can_be_accepted_as_it_is_with_a_new_checksum(make: Callable[[], SimulatedDisk]) -> None:
    disk = make()
    change(disk, B, b'"n": ', b'"n": 4')
    (done,) = repair.decide(ROOT, as_is=[B], disk=disk)
    assert done.path == B
    assert found(disk)["b"] in (42, 43)
    disk.remove(B)
    assert found(disk)["b"] in (42, 43), "the copy has it, too"


def test_remains_of_a_broken_checksum_are_not_part_of_the_document() -> None:
    disk = both_damaged()
    change(disk, B, b'"crc32c"', b'"crc32b"')
    repair.decide(ROOT, as_is=[B.rpartition("/")[2]], disk=disk)
    (document,) = (d for d in FileCatalog(disk, ROOT).load("streams") if d["identity"][1] == "b")
    assert document == {"identity": ["/", "b"], "n": 3}


def test_a_document_is_restored_from_a_damaged_copy_only_on_request() -> None:
    disk = both_damaged()
    damaged = disk.files()[B]
    repair.decide(ROOT, from_copy=[B], disk=disk)
    assert found(disk) == {"a": 1, "b": 1}
    assert damaged in disk.files().values()


def test_going_on_without_a_document_keeps_it() -> None:
    disk = both_damaged()
    damaged, copy = disk.files()[B], disk.files()[COPY]
    (done,) = repair.decide(ROOT, accept_loss=True, disk=disk)
    kept = f"{ROOT}/damaged/catalog/streams/{B.rpartition('/')[2]}"
    assert kept in done.what and disk.files()[kept] == damaged
    assert disk.files()[f"{ROOT}/damaged/catalog/all.copy"] == copy, "it may still have something to say"
    assert found(disk) == {"a": 1}
    assert repair.examine(ROOT, disk) == []
    disk.remove(A)
    assert found(disk) == {"a": 1}, "what is left is protected again"


@pytest.mark.parametrize("make", [filled, both_damaged])
@pytest.mark.parametrize("path", [A, B])
def test_a_document_can_be_dropped_whether_or_not_it_is_damaged(make: Callable[[], SimulatedDisk], path: str) -> None:
    disk = make()
    content = disk.files()[path]
    (done,) = repair.decide(ROOT, without=[path], accept_loss=path == A and make is both_damaged, disk=disk)[:1]
    assert done.path == path and path not in disk.files()
    assert disk.files()[path.replace("/catalog/", "/damaged/catalog/")] == content
    assert "ab"[path == B] not in found(disk)
    assert path not in disk.files(), "the copy does not bring it back"


def test_impossible_decisions_are_refused() -> None:
    disk = both_damaged()
    before = disk.files()
    with pytest.raises(InvalidInput, match="not a damaged document"):
        repair.decide(ROOT, as_is=[A], disk=disk)
    with pytest.raises(InvalidInput, match="twice"):
        repair.decide(ROOT, as_is=[B], from_copy=[B], disk=disk)
    with pytest.raises(InvalidInput, match="not a document"):
        repair.decide(ROOT, without=["nix.json"], disk=disk)
    change(disk, B, b"identity", b"Identity")
    with pytest.raises(CorruptCatalog, match="it has no identity"):
        repair.decide(ROOT, as_is=[B], accept_loss=True, disk=disk)
    disk.remove(COPY)
    with pytest.raises(InvalidInput, match="does not contain"):
        repair.decide(ROOT, from_copy=[B], disk=disk)
    assert disk.files().keys() - {f"{ROOT}/lock"} == before.keys() - {COPY}
    lock = disk.lock(f"{ROOT}/lock")
    with pytest.raises(DataFolderLocked):
        repair.decide(ROOT, accept_loss=True, disk=disk)
    disk.close(lock)


@pytest.mark.parametrize("options", [{"as_is": [B]}, {"from_copy": [B]}, {"accept_loss": True}, {"without": [B]}])
def test_being_interrupted_loses_nothing(options: dict[str, Any]) -> None:
    disk = both_damaged().power_cut(Random(1), "kept")
    damaged = disk.files()[B]
    wanted = disk.kill()
    repair.decide(ROOT, disk=wanted, **options)
    rng = Random(2)
    crashes: list[SimulatedDisk] = []
    disk.before = lambda _kind, _path: crashes.extend(
        [disk.kill(), *(disk.power_cut(rng, mode) for mode in ("lost", "mixed", "mixed"))]
    )
    repair.decide(ROOT, disk=disk, **options)
    assert len(crashes) > 15
    for crashed in crashes:
        assert damaged in crashed.files().values()
        findings = repair.examine(ROOT, crashed)
        if any(not facts.restores_itself for facts in findings):
            repair.decide(ROOT, disk=crashed, **options)
        assert found(crashed) == found(wanted.kill())
