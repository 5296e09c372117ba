"""The catalog survives a crash at any point, and takes any name."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.broker import Broker
from headrace.broker.catalog.catalog import file_name
from headrace.broker.catalog.file_catalog import FileCatalog
from headrace.config import Config
from headrace.errors import CorruptCatalog
from headrace.log.catalog import copy
from headrace.log.disk.disk import RealDisk, write_atomically
from tests.crash.simdisk import Fault, SimulatedDisk

KIND = "streams"
COPY = "/data/catalog/all.copy"
Model = dict[tuple[str, ...], int]


def found(disk: SimulatedDisk) -> Model:
    return {tuple(d["identity"]): d["n"] for d in FileCatalog(disk, "/data").load(KIND)}


@pytest.mark.parametrize("seed", range(8))
def test_a_crash_at_any_call_leaves_the_old_or_the_new_and_never_less(seed: int) -> None:
    """Before every call that changes something, a power cut is tried in every mode."""
    rng = Random(seed)
    disk = SimulatedDisk()
    disk.mkdir("/data")
    disk.sync_dir("/")
    catalog = FileCatalog(disk, "/data")
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


@pytest.mark.parametrize("sync_each_max", [1, 64])
def test_a_crash_while_many_are_put_leaves_the_old_or_the_new_of_each(sync_each_max: int) -> None:
    """And once they are put, all of them stay."""
    rng = Random(1)
    disk = SimulatedDisk()
    disk.sync_each_max = sync_each_max
    disk.mkdir("/data")
    disk.sync_dir("/")
    catalog = FileCatalog(disk, "/data")
    catalog.put(KIND, ("/", "kept"), {"n": 0})
    catalog.put(KIND, ("/", "a"), {"n": 0})
    after: Model = {("/", name): 1 for name in "abcd"}
    states = 0

    def cut(_kind: str, _path: str) -> None:
        nonlocal states
        for mode in ("lost", "kept", "prefix", "mixed", "mixed"):
            states += 1
            read = found(disk.power_cut(rng, mode))
            assert read.pop(("/", "kept")) == 0
            assert read["/", "a"] in (0, 1)
            assert {**read, ("/", "a"): 1}.items() <= after.items()

    disk.before = cut
    catalog.put_all(KIND, {identity: {"n": 1} for identity in after})
    disk.before = None
    assert states > 50
    for mode in ("lost", "kept", "prefix", "mixed"):
        assert found(disk.power_cut(rng, mode)) == {("/", "kept"): 0, **after}


def test_many_documents_share_their_syncs() -> None:
    disk = SimulatedDisk()
    disk.mkdir("/data")
    catalog = FileCatalog(disk, "/data")
    catalog.put(KIND, ("/", "first"), {"n": 0})
    before = disk.calls.copy()
    catalog.put_all(KIND, {("/", str(n)): {"n": n} for n in range(200)})
    calls = disk.calls - before
    assert (calls["sync"], calls["sync_filesystem"], calls["sync_dir"]) == (1, 1, 1)


@pytest.mark.parametrize("kind", ["create", "pwrite", "sync", "rename", "sync_dir"])
def test_a_failed_change_leaves_the_old_or_the_new(kind: str) -> None:
    disk = SimulatedDisk()
    disk.mkdir("/data")
    disk.sync_dir("/")
    catalog = FileCatalog(disk, "/data")
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


def test_unusual_names_survive_a_real_disk(tmp_path: Path) -> None:
    names = ["a", ".", "..", "../../etc/passwd", "\0", "x" * 255, "é" * 127, "a/b\\c", "\n", "CON", "a.json"]
    catalog = FileCatalog(RealDisk(), str(tmp_path))
    for name in names:
        catalog.put(KIND, ("/", name), {"n": 1})
    reopened = FileCatalog(RealDisk(), str(tmp_path))
    assert {d["identity"][1] for d in reopened.load(KIND)} == set(names)
    folder = tmp_path / "catalog" / KIND
    assert len(os.listdir(folder)) == len(names)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in folder.iterdir())


def test_parts_of_an_identity_do_not_run_into_each_other() -> None:
    assert file_name(("a", "bc")) != file_name(("ab", "c"))


BROKEN = [b"", b"{", b"[]", b'{"identity": ["/", "other"]}', b'{"identity": 1}', b'{"identity": []}', b"\xff"]


@pytest.mark.parametrize("content", BROKEN)
def test_a_damaged_file_is_restored_from_the_copy_and_kept(tmp_path: Path, content: bytes) -> None:
    catalog = FileCatalog(RealDisk(), str(tmp_path))
    catalog.put(KIND, ("/", "a"), {"n": 1})
    catalog.put(KIND, ("/", "a"), {"n": 2})
    [file] = (tmp_path / "catalog" / KIND).iterdir()
    before = file.read_bytes()
    file.write_bytes(content)
    reopened = FileCatalog(RealDisk(), str(tmp_path))
    assert list(reopened.load(KIND)) == [{"identity": ["/", "a"], "n": 2}]
    (said,) = reopened.restored
    [kept] = (tmp_path / "damaged" / "catalog" / KIND).iterdir()
    assert str(file) in said and str(kept) in said
    assert kept.read_bytes() == content
    assert file.read_bytes() == before


@pytest.mark.parametrize("content", BROKEN)
def test_a_damaged_file_without_a_copy_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    catalog = FileCatalog(RealDisk(), str(tmp_path))
    catalog.put(KIND, ("/", "a"), {"n": 1})
    [file] = (tmp_path / "catalog" / KIND).iterdir()
    file.write_bytes(content)
    (tmp_path / "catalog" / "all.copy").unlink()
    for _ in range(2):
        with pytest.raises(CorruptCatalog) as caught:
            list(FileCatalog(RealDisk(), str(tmp_path)).load(KIND))
        assert str(file) in str(caught.value)
    assert file.read_bytes() == content


def test_a_lost_document_is_restored_and_a_removed_one_is_not(tmp_path: Path) -> None:
    catalog = FileCatalog(RealDisk(), str(tmp_path))
    for name in ("gone", "removed", "kept"):
        catalog.put(KIND, ("/", name), {"n": 1})
    catalog.remove(KIND, ("/", "removed"))
    (tmp_path / "catalog" / KIND / file_name(("/", "gone"))).unlink()
    reopened = FileCatalog(RealDisk(), str(tmp_path))
    assert sorted(d["identity"][1] for d in reopened.load(KIND)) == ["gone", "kept"]
    (said,) = reopened.restored
    assert "missing" in said


def old_document(disk: SimulatedDisk, name: str, n: int) -> str:
    """As an earlier version wrote it."""
    path = f"/data/catalog/{KIND}/{file_name(('/', name))}"
    text = msgspec.json.format(msgspec.json.encode({"identity": ["/", name], "n": n}), indent=2) + b"\n"
    for folder in ("/data", "/data/catalog", f"/data/catalog/{KIND}"):
        disk.mkdir(folder)
        disk.sync_dir(os.path.dirname(folder))
    write_atomically(disk, path, text)
    return path


def test_a_folder_of_an_earlier_version_is_read_and_protected_from_then_on() -> None:
    disk = SimulatedDisk()
    paths = {name: old_document(disk, name, 1) for name in ("a", "b")}
    assert found(disk) == {("/", "a"): 1, ("/", "b"): 1}
    FileCatalog(disk, "/data").put(KIND, ("/", "b"), {"n": 2})
    assert b"crc32c" in disk.files()[paths["b"]] and b"crc32c" not in disk.files()[paths["a"]]
    flipped = disk.files()[paths["a"]].replace(b'"n": 1', b'"n": 3')
    disk.replace(paths["a"], flipped)
    catalog = FileCatalog(disk, "/data")
    assert {d["identity"][1]: d["n"] for d in catalog.load(KIND)} == {"a": 1, "b": 2}
    assert len(catalog.restored) == 1
    assert flipped in disk.files().values()


def test_documents_read_after_a_kill_survive_a_power_cut() -> None:
    """The name of a new document is seen and not durable yet: whatever is built on it must not be lost with it."""
    disk = SimulatedDisk()
    disk.mkdir("/data")
    disk.sync_dir("/")
    catalog = FileCatalog(disk, "/data")
    catalog.put(KIND, ("/", "a"), {"n": 1})
    killed: list[SimulatedDisk] = []
    disk.before = lambda kind, _path: killed.append(disk.kill())
    catalog.put(KIND, ("/", "b"), {"n": 2})
    seen = 0
    for image in killed:
        reopened = FileCatalog(image, "/data")
        before = list(reopened.load(KIND))
        after = FileCatalog(image.power_cut(Random(1), "lost"), "/data")
        assert list(after.load(KIND)) == before
        assert reopened.restored == after.restored == [], "no document is missing, for the copy to bring it back"
        seen += len(before) == 2
    assert seen > 1


def test_a_catalog_copy_on_a_full_disk_neither_refuses_a_change_nor_restores_an_old_one() -> None:
    disk = SimulatedDisk()
    disk.mkdir("/data")
    disk.sync_dir("/")
    catalog = FileCatalog(disk, "/data")
    catalog.put(KIND, ("/", "a"), {"n": 1})
    disk.arm(Fault("pwrite", 1, error=errno.ENOSPC, share=0.5, within=COPY))
    catalog.put(KIND, ("/", "a"), {"n": 2})
    disk.disarm()
    image = disk.power_cut(Random(1), "lost")
    path = f"/data/catalog/{KIND}/{file_name(('/', 'a'))}"
    image.replace(path, image.files()[path][:-1])
    with pytest.raises(CorruptCatalog):
        found(image)
    catalog.put(KIND, ("/", "b"), {"n": 3})  # there is room again
    image = disk.power_cut(Random(1), "lost")
    image.replace(path, image.files()[path][:-1])
    assert found(image) == {("/", "a"): 2, ("/", "b"): 3}


@pytest.mark.parametrize("kind", ["create", "pwrite", "sync", "rename", "sync_dir", "unlink"])
def test_a_failing_disk_never_leaves_an_outdated_copy(kind: str) -> None:
    """Every call of three changes fails once; then every document rots. What comes back was true at the end."""
    for nth in range(1, 9):
        disk = SimulatedDisk()
        disk.mkdir("/data")
        disk.sync_dir("/")
        catalog = FileCatalog(disk, "/data")
        catalog.put(KIND, ("/", "a"), {"n": 1})
        catalog.put(KIND, ("/", "b"), {"n": 1})
        model: dict[str, set[int | None]] = {"a": {1}, "b": {1}}
        disk.arm(Fault(kind, nth))
        for name, value in (("a", 2), ("b", None), ("a", 3)):
            try:
                if value is None:
                    catalog.remove(KIND, ("/", name))
                else:
                    catalog.put(KIND, ("/", name), {"n": value})
                model[name] = {value}
            except OSError:
                model[name].add(value)
        disk.disarm()
        image = disk.power_cut(Random(nth), "lost")
        for path in image.files():
            if path.endswith(".json"):
                image.replace(path, b"rotten")
        try:
            left = found(image)
        except CorruptCatalog:
            continue
        assert left.get(("/", "a")) in model["a"], nth
        assert left.get(("/", "b")) in model["b"], nth


def test_the_copy_does_not_grow_with_the_number_of_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "_REWRITE_BYTES_MIN", 2000)
    disk = SimulatedDisk()
    disk.mkdir("/data")
    catalog = FileCatalog(disk, "/data")
    largest = 0
    for n in range(100):
        catalog.put(KIND, ("/", "a"), {"n": n})
        largest = max(largest, len(disk.files()[COPY]))
    assert 2000 < largest < 3500
    anew = []
    disk.before = lambda kind, path: anew.append(path) if kind == "rename" and COPY in path else None
    for n in range(100):
        catalog.put(KIND, ("/", f"new{n}"), {"n": n})
    disk.before = None
    assert len(anew) <= 1, "more documents are no reason to write it anew"
    disk.remove(f"/data/catalog/{KIND}/{file_name(('/', 'a'))}")
    assert found(disk)["/", "a"] == 99


def test_threads_that_change_it_at_once_all_reach_the_copy(tmp_path: Path) -> None:
    """Streams, queues, policies and users have a thread each."""
    catalog = FileCatalog(RealDisk(), str(tmp_path))
    with ThreadPoolExecutor(4) as threads:
        for n in range(40):
            threads.submit(catalog.put, f"kind{n % 4}", ("/", f"name{n}"), {"n": n}).add_done_callback(
                lambda done: done.result()
            )
    for file in (tmp_path / "catalog").glob("kind*/*.json"):
        file.unlink()
    reopened = FileCatalog(RealDisk(), str(tmp_path))
    assert sorted(d["n"] for kind in range(4) for d in reopened.load(f"kind{kind}")) == list(range(40))


@pytest.mark.parametrize(
    "kind", ["streams", "queues", "exchanges", "policies", "operator-policies", "global-parameters"]
)
async def test_a_sound_document_that_describes_nothing_is_an_error_that_names_it(tmp_path: Path, kind: str) -> None:
    """Taken as it was after a bit had changed the name of a member, say."""
    config = Config(data_dir=str(tmp_path), http=None, amqp=None, kafka=None)
    catalog = FileCatalog(RealDisk(), str(tmp_path))
    catalog.put(kind, ("/", "a"), {"strange": 1})
    with pytest.raises(CorruptCatalog) as caught:
        await Broker.open(config)
    assert f"catalog/{kind}/{file_name(('/', 'a'))}" in str(caught.value)
    assert "--without FILE" in str(caught.value)
