"""The catalog survives a crash at any point, and takes any name."""

import os
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.catalog import Catalog, file_name
from headrace.errors import CorruptCatalog
from headrace.log.disk import RealDisk
from tests.crash.simdisk import Fault, SimulatedDisk

KIND = "streams"
Model = dict[tuple[str, ...], int]


def found(disk: SimulatedDisk) -> Model:
    return {tuple(d["identity"]): d["n"] for d in Catalog(disk, "/data").load(KIND)}


@pytest.mark.parametrize("seed", range(8))
def test_a_crash_at_any_call_leaves_the_old_or_the_new_and_never_less(seed: int) -> None:
    """Before every call that changes something, a power cut is tried in every mode."""
    rng = Random(seed)
    disk = SimulatedDisk()
    disk.mkdir("/data")
    disk.sync_dir("/")
    catalog = Catalog(disk, "/data")
    model: Model = {}
    allowed: list[Model] = [model]
    states = 0

    def cut(_kind: str, _path: str) -> None:
        nonlocal states
        for mode in ("lost", "kept", "prefix", "mixed", "mixed"):
            states += 1
            assert found(disk.power_cut(rng, mode)) in allowed

    disk.before = cut
    names = [("/", f"name {i}") for i in range(4)]
    for step in range(25):
        identity = rng.choice(names)
        after = dict(model)
        if identity in model and rng.random() < 0.4:
            del after[identity]
            allowed = [model, after]
            catalog.remove(KIND, identity)
        else:
            after[identity] = step
            allowed = [model, after]
            catalog.put(KIND, identity, {"n": step})
        model, allowed = after, [after]
        cut("", "")
    assert found(disk.kill()) == model
    assert states > 500


@pytest.mark.parametrize("kind", ["create", "pwrite", "sync", "rename", "sync_dir"])
def test_a_failed_change_leaves_the_old_or_the_new(kind: str) -> None:
    disk = SimulatedDisk()
    disk.mkdir("/data")
    disk.sync_dir("/")
    catalog = Catalog(disk, "/data")
    catalog.put(KIND, ("/", "a"), {"n": 1})
    disk.arm(Fault(kind, 1))
    with pytest.raises(OSError):
        catalog.put(KIND, ("/", "a"), {"n": 2})
    disk.disarm()
    assert found(disk)["/", "a"] in (1, 2)
    catalog.put(KIND, ("/", "a"), {"n": 3})
    assert found(disk.power_cut(Random(1), "lost")) == {("/", "a"): 3}


NAMES = st.text(min_size=1, max_size=255).filter(lambda name: len(name.encode()) <= 255)


@given(st.lists(st.tuples(st.sampled_from(["/", "v", "/v"]), NAMES), unique=True, max_size=8))
def test_every_name_has_a_file_of_its_own_that_any_filesystem_takes(identities: list[tuple[str, str]]) -> None:
    files = [file_name(identity) for identity in identities]
    assert len(set(files)) == len(files)
    for file in files:
        assert len(file) <= 100 and file.isascii() and "/" not in file and not file.startswith(".")


def test_strange_names_come_back_from_a_real_disk(tmp_path: Path) -> None:
    names = ["a", ".", "..", "../../etc/passwd", "\0", "x" * 255, "é" * 127, "a/b\\c", "\n", "CON", "a.json"]
    catalog = Catalog(RealDisk(), str(tmp_path))
    for name in names:
        catalog.put(KIND, ("/", name), {"n": 1})
    reopened = Catalog(RealDisk(), str(tmp_path))
    assert {d["identity"][1] for d in reopened.load(KIND)} == set(names)
    folder = tmp_path / "catalog" / KIND
    assert len(os.listdir(folder)) == len(names)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in folder.iterdir())


def test_parts_of_an_identity_do_not_run_into_each_other() -> None:
    assert file_name(("a", "bc")) != file_name(("ab", "c"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"identity": ["/", "other"]}', b'{"identity": 1}'])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    catalog = Catalog(RealDisk(), str(tmp_path))
    catalog.put(KIND, ("/", "a"), {"n": 1})
    [file] = (tmp_path / "catalog" / KIND).iterdir()
    file.write_bytes(content)
    with pytest.raises(CorruptCatalog) as caught:
        list(catalog.load(KIND))
    assert str(file) in str(caught.value)
