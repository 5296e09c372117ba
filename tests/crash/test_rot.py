"""Bit rot: flipped bits, zeroed pages, and truncated, swapped, replaced or missing files (L6, L9).

Damaged data is never served and never truncated silently: it is reported with the name of the file. Damage to derived
files (indexes, slots) changes no result.
"""

import asyncio
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from headrace.broker.access import users
from headrace.broker.access.permissions import TopicPermission
from headrace.broker.broker import Broker
from headrace.broker.catalog.file_catalog import FileCatalog
from headrace.broker.streams import streams
from headrace.broker.types import vhost_names
from headrace.broker.vhosts import global_parameters, policies, store
from headrace.broker.vhosts.policies import Policy
from headrace.clock import ManualClock
from headrace.config import Config
from headrace.errors import CorruptCatalog, CorruptLog, HeadraceError
from headrace.log.catalog import document
from headrace.log.disk.disk import make_folder, write_atomically
from headrace.log.log import Log, LogSpec
from headrace.log.settings import LogSettings, StreamSettings
from headrace.log.shard import Shard
from headrace.log.state.store import DiskStateStore
from headrace.record import codec
from headrace.record.types import Record
from tests.crash.queue_world import without_threads
from tests.crash.simdisk import SimulatedDisk

ROOT = "/data"
SETTINGS = LogSettings(journal_file_bytes=8192, journal_files=3, inline_bytes_max=600, disk_reserve=0)
PER_KIND = int(os.environ.get("HEADRACE_ROT_PER_KIND", "200"))  # corruptions of each kind of file
SEED = int(os.environ.get("HEADRACE_SEED", "1"))
DERIVED = (".index", ".timeindex", "/slots")
MIRRORED = (".state", ".state-copy")  # each is a copy of the other


def spec(log_id: int, **settings: Any) -> LogSpec:
    return LogSpec(log_id, f"log{log_id}", StreamSettings(retention_ms=-1, index_interval=200, **settings))


SPECS = [
    spec(1, segment_size=700),
    spec(2, segment_size=5000),
    spec(3, segment_size=500, cleanup_policy="compact", tombstone_retention_ms=0),
]

Contents = tuple[dict[int, list[Record]], dict[bytes, bytes]]


class SampleFolder:
    """A data folder with every kind of file: sealed, active and compacted segments, state, a used journal."""

    def __init__(self, *, clean: bool) -> None:
        disk = SimulatedDisk()
        disk.mkdir(ROOT)
        disk.sync_dir("/")
        shard, _ = Shard.open(ROOT, SETTINGS, logs=SPECS, clock=ManualClock(), disk=disk)
        rng = Random(5)
        for round_number in range(30):
            for log in shard.logs.values():
                size = rng.choice((10, 60, 200, 900))
                records = [
                    (b"key%d" % rng.randrange(5), rng.randbytes(size), (), 1_000 * round_number)
                    for _ in range(rng.choice((1, 3)))
                ]
                log.append(codec.build(records))
            group = shard.group()
            group.put("t", b"k%d" % (round_number % 7), b"value %d" % round_number)
            group.commit()
            shard.pump()
            if round_number == 12:
                shard.maintenance.compact(shard.logs[3], lambda result, error: None)
                shard.pump()
            if round_number in (6, 20):
                shard.checkpoint()
                shard.pump()
        if clean:
            shard.close()
        self.disk = disk.kill()
        shard, _ = Shard.open(ROOT, SETTINGS, logs=SPECS, clock=ManualClock(), disk=self.disk.kill())
        self.contents: Contents = contents_of(shard)
        assert all(len(records) > 20 for records in self.contents[0].values())
        self.files = {p: d for p, d in self.disk.files().items() if d and not p.endswith("/lock")}

    def with_content(self, path: str, content: bytes) -> SimulatedDisk:
        image = self.disk.kill()
        image.replace(path, content)
        return image

    def without(self, *paths: str) -> SimulatedDisk:
        image = self.disk.kill()
        for path in paths:
            image.remove(path)
        image.name_changes = [c for c in image.name_changes if not any(p.endswith(c.name or "?") for p in paths)]
        return image


def contents_of(shard: Shard) -> Contents:
    return {log.id: read(log) for log in shard.logs.values()}, dict(shard.state.items("t"))


def read(log: Log) -> list[Record]:
    records: list[Record] = []
    offset = log.start_offset
    while offset < log.visible_end:
        chunk = log.read(offset, 300)
        records += codec.records(chunk.data, verify_crc=True)
        offset = chunk.next_offset
    return records


def judge(sample: SampleFolder, image: SimulatedDisk, path: str) -> str:
    """Return "same" or "reported". Fails if wrong data was served or data was lost without a report."""
    name = path.rpartition("/")[2]
    try:
        shard, report = Shard.open(ROOT, SETTINGS, logs=SPECS, clock=ManualClock(), disk=image)
    except CorruptLog as error:
        assert error.path.startswith(ROOT) and error.position >= 0
        return "reported"
    except HeadraceError as error:
        raise AssertionError(f"{name}: expected a report of the damage, got {error!r}") from error
    wanted, wanted_state = sample.contents
    outcome = "same"
    for log in shard.logs.values():
        found, damage = read_readable_part(log)
        allowed = {record.offset: record for record in wanted[log.id]}
        for record in found:
            assert allowed.get(record.offset) == record, (
                f"{name}: log {log.id} served a wrong record at {record.offset}"
            )
        if found != wanted[log.id] or damage is not None:
            assert damage is not None, f"{name}: log {log.id} lost {len(allowed) - len(found)} records without a report"
            assert damage.path.startswith(ROOT) and damage.position >= 0
            outcome = "reported"
        if log.damage is not None:
            assert str(log.damage) in report.damaged
    if dict(shard.state.items("t")) != wanted_state:
        raise AssertionError(f"{name}: the state changed without a report")
    return outcome


def read_readable_part(log: Log) -> tuple[list[Record], CorruptLog | None]:
    records: list[Record] = []
    offset = log.start_offset
    try:
        while offset < log.visible_end:
            chunk = log.read(offset, 300)
            records += codec.records(chunk.data, verify_crc=True)
            offset = chunk.next_offset
        if log.damage is not None:
            log.read(log.visible_end)
    except CorruptLog as error:
        return records, error
    return records, log.damage


@pytest.fixture(scope="module", params=["clean", "killed"])
def sample(request: pytest.FixtureRequest) -> SampleFolder:
    return SampleFolder(clean=request.param == "clean")


def kinds(sample: SampleFolder) -> dict[str, list[str]]:
    """The files by type: .log, .index, .wal, ..., slots."""
    found: dict[str, list[str]] = {}
    for path in sample.files:
        name = path.rpartition("/")[2]
        found.setdefault(name[name.rfind(".") :] if "." in name else name, []).append(path)
    return found


def rot(content: bytes, rng: Random) -> tuple[str, bytes]:
    """Return a description and the damaged content: mostly a flipped bit, sometimes a zeroed page or a truncation."""
    dice = rng.random()
    at = rng.randrange(len(content))
    if dice < 0.8:
        bit = rng.randrange(8)
        flipped = bytearray(content)
        flipped[at] ^= 1 << bit
        return f"bit {bit} of byte {at}", bytes(flipped)
    if dice < 0.9:
        page = at // 512 * 512
        return f"zeros at {page}", content[:page] + bytes(len(content[page : page + 512])) + content[page + 512 :]
    return f"cut at {at}", content[:at]


@pytest.mark.timeout(900)  # generous, for busy machines
def test_damage_to_any_file_is_never_served_and_always_reported(sample: SampleFolder) -> None:
    rng = Random(SEED)
    count, failures = 0, []
    for paths in kinds(sample).values():
        for number in range(PER_KIND):
            path = paths[number % len(paths)]  # alternate between the files of this type
            what, changed = rot(sample.files[path], rng)
            if changed == sample.files[path]:
                continue
            count += 1
            try:
                outcome = judge(sample, sample.with_content(path, changed), path)
            except AssertionError as error:
                failures.append(f"{what} of {path}: {error}")
                continue
            if path.endswith((*DERIVED, *MIRRORED)) and outcome != "same":
                failures.append(f"{what} of {path}: a derived or mirrored file changed the result")
    print(f"{count} corruptions of {len(sample.files)} files, seed {SEED}")
    assert not failures, f"\n{len(failures)} of {count}:\n" + "\n".join(failures[:20])
    assert kinds(sample).keys() >= {".log", ".seal", ".index", ".timeindex", ".wal", *MIRRORED, "slots"}


def test_a_missing_file_is_reported_or_not_needed(sample: SampleFolder) -> None:
    for path in sample.files:
        outcome = judge(sample, sample.without(path), path)
        if path.endswith((*DERIVED, *MIRRORED)):
            assert outcome == "same", path


def test_all_derived_files_may_be_deleted(sample: SampleFolder) -> None:
    derived = [path for path in sample.files if path.endswith(DERIVED)]
    assert judge(sample, sample.without(*derived), "everything derived") == "same"


def test_swapped_segments_are_detected(sample: SampleFolder) -> None:
    logs = [path for path in sample.files if path.endswith(".log")]
    outcomes = set()
    for first, second in pairwise(logs):
        image = sample.disk.kill()
        image.replace(first, sample.files[second])
        image.replace(second, sample.files[first])
        outcomes.add(judge(sample, image, first))
    assert "reported" in outcomes  # "same" if the journal still holds all records


def test_a_segment_of_another_offset_or_log_is_detected(sample: SampleFolder) -> None:
    logs = [path for path in sample.files if path.endswith(".log")]
    outcomes = set()
    for path in logs[::2]:
        for other in logs[::3]:
            # Not detected: an unsealed segment replaced by one of another log with the same offsets.
            if other.rpartition("/")[2][:20] != path.rpartition("/")[2][:20]:
                outcomes.add(judge(sample, sample.with_content(path, sample.files[other]), path))
    assert "reported" in outcomes


@pytest.mark.parametrize("suffix", MIRRORED)
def test_a_damaged_state_file_is_restored_from_its_copy_and_kept(sample: SampleFolder, suffix: str) -> None:
    path = next(path for path in sample.files if path.endswith(suffix))
    damaged = sample.files[path][:20] + b"?" + sample.files[path][21:]
    image = sample.with_content(path, damaged)
    shard, report = Shard.open(ROOT, SETTINGS, logs=SPECS, clock=ManualClock(), disk=image)
    assert contents_of(shard) == sample.contents
    first, second = report.restored
    assert path in first and "its copy" in first
    kept = path.replace("/state/", "/damaged/state/")
    assert kept in second and image.files()[kept] == damaged
    assert "RESTORED: " in report.summary()


@pytest.mark.parametrize("suffix", MIRRORED)
def test_a_checkpoint_is_durable_in_both_state_files(suffix: str) -> None:
    """After a power cut one of the files is lost; the other must hold everything that the journal no longer has."""
    disk = SimulatedDisk()
    disk.mkdir(ROOT)
    disk.sync_dir("/")
    shard, _ = Shard.open(ROOT, SETTINGS, logs=SPECS, clock=ManualClock(), disk=disk)
    for number in range(200):  # the journal files are recycled
        group = shard.group()
        group.put("t", b"%d" % (number % 50), b"value %d" % number)
        group.commit()
        shard.pump()
    cut = disk.power_cut(Random(1), "lost")
    wanted = dict(shard.state.items("t"))
    assert shard.counters.checkpoints > 3
    (path,) = (path for path in cut.files() if path.endswith(suffix))
    cut.replace(path, cut.files()[path][:-1])  # looks like a torn checkpoint
    torn = DiskStateStore(cut, f"{ROOT}/state")
    torn.load()
    assert torn.marker == shard.state.marker
    cut.remove(path)
    reopened, _ = Shard.open(ROOT, SETTINGS, logs=SPECS, clock=ManualClock(), disk=cut)
    assert dict(reopened.state.items("t")) == wanted


def test_a_state_with_both_files_damaged_is_refused(sample: SampleFolder) -> None:
    image = sample.disk.kill()
    paths = [path for path in sample.files if path.endswith(MIRRORED)]
    for path in paths:
        image.replace(path, sample.files[path][:20] + b"?" + sample.files[path][21:])
    before = image.files()
    with pytest.raises(CorruptLog) as caught:
        Shard.open(ROOT, SETTINGS, logs=SPECS, clock=ManualClock(), disk=image)
    assert caught.value.path in paths
    assert {p: c for p, c in image.files().items() if not p.endswith("/lock")} == {
        p: c for p, c in before.items() if not p.endswith("/lock")
    }


def test_a_crash_while_a_damaged_state_file_is_restored_loses_nothing(sample: SampleFolder) -> None:
    path = next(path for path in sample.files if path.endswith(".state"))
    image = sample.with_content(path, sample.files[path][:20] + b"?" + sample.files[path][21:])
    rng = Random(SEED)
    crashes: list[SimulatedDisk] = []
    image.before = lambda _kind, _path: crashes.extend([image.kill(), image.power_cut(rng, "mixed")])
    Shard.open(ROOT, SETTINGS, logs=SPECS, clock=ManualClock(), disk=image)
    assert len(crashes) > 20
    for crashed in crashes:
        shard, _ = Shard.open(ROOT, SETTINGS, logs=SPECS, clock=ManualClock(), disk=crashed)
        assert contents_of(shard) == sample.contents


# The catalog.


KINDS = (
    streams.CATALOG_KIND,
    vhost_names.CATALOG_KIND,
    policies.CATALOG_KIND,
    policies.OPERATOR_KIND,
    global_parameters.CATALOG_KIND,
    store.QUEUES,
    store.EXCHANGES,
    users.USERS,
    users.PERMISSIONS,
    users.TOPIC_PERMISSIONS,
)
COPY = f"{ROOT}/catalog/all.copy"


async def catalog_of_a_broker() -> dict[str, bytes]:
    """The files of a catalog with a document of every kind, written by a broker."""
    disk = SimulatedDisk()
    config = Config(data_dir=ROOT, http=None, amqp=None, kafka=None, disk_free_limit=0)
    broker = await Broker.open(config, clock=ManualClock(), disk=disk)
    await broker.streams.create("orders", 3, {"retention_ms": "90000"})
    await broker.global_parameters.put("cluster_name", "prod")
    host = await broker.vhosts.create("other")
    await host.declare_queue(
        "work", durable=True, exclusive=False, auto_delete=False, arguments={"x-max-length": 10}, owner=None
    )
    await host.declare_exchange("news", "topic", durable=True, auto_delete=False, internal=False, arguments={})
    for operator in (False, True):
        policy = Policy(vhost="/", name="all", pattern=".*", definition={"max-length": 1000}, apply_to="queues")
        await broker.policies.put(policy, operator=operator)
    await broker.users.set_topic_permission("/", "guest", "news", TopicPermission(write="a.*", read="b.*"))
    await broker.close()
    return {path: text for path, text in disk.files().items() if "/catalog/" in path}


@pytest.fixture(scope="module")
def catalog() -> dict[str, bytes]:
    with pytest.MonkeyPatch.context() as patches:
        without_threads(patches)  # the simulated disk is not thread-safe
        files = asyncio.run(catalog_of_a_broker())
    assert {path.split("/")[3] for path in files if path.endswith(".json")} == set(KINDS)
    return files


def catalog_disk(files: Mapping[str, bytes]) -> SimulatedDisk:
    disk = SimulatedDisk()
    for path, text in files.items():
        make_folder(disk, path.rpartition("/")[0])
        write_atomically(disk, path, text)
    return disk


def read_catalog(disk: SimulatedDisk) -> tuple[dict[str, list[dict[str, Any]]], FileCatalog]:
    found = FileCatalog(disk, ROOT)
    return {kind: list(found.load(kind)) for kind in KINDS}, found


def flips(text: bytes) -> Iterator[bytes]:
    for at in range(len(text)):
        for bit in range(8):
            yield text[:at] + bytes([text[at] ^ 1 << bit]) + text[at + 1 :]


def test_every_flipped_bit_of_a_catalog_document_is_detected(catalog: dict[str, bytes]) -> None:
    count, accepted = 0, []
    for path, text in catalog.items():
        if path.endswith(".json"):
            document.read(text, path)
            for changed in flips(text):
                count += 1
                try:
                    document.read(changed, path)
                except CorruptCatalog as error:
                    assert error.path == path
                else:
                    accepted.append(changed)
    print(f"{count} flipped bits of {len(catalog) - 1} documents")
    assert not accepted, f"{len(accepted)} of {count}: {accepted[:3]}"


def test_a_damaged_document_is_restored_and_reported_or_refused(catalog: dict[str, bytes]) -> None:
    """Flipped bits, zeroed pages and truncations. With the copy nothing is lost; without it the catalog is refused."""
    wanted, _ = read_catalog(catalog_disk(catalog))
    rng = Random(SEED)
    without_copy = {path: text for path, text in catalog.items() if path != COPY}
    for path, text in catalog.items():
        for _ in range(20):
            what, changed = rot(text, rng)
            found, opened = read_catalog(catalog_disk({**catalog, path: changed}))
            assert found == wanted, f"{what} of {path}"
            assert [path in line for line in opened.restored] == [True] * (path != COPY), what
            if path != COPY:
                with pytest.raises(CorruptCatalog) as caught:
                    read_catalog(catalog_disk({**without_copy, path: changed}))
                assert caught.value.path == path


def test_a_missing_document_is_restored_and_reported(catalog: dict[str, bytes]) -> None:
    wanted, _ = read_catalog(catalog_disk(catalog))
    for path in catalog:
        found, opened = read_catalog(catalog_disk({p: text for p, text in catalog.items() if p != path}))
        assert found == wanted
        assert [path in line for line in opened.restored] == [True] * (path != COPY)


def test_a_damaged_catalog_copy_restores_nothing_that_may_be_outdated(catalog: dict[str, bytes]) -> None:
    """The lost line of the copy may be the newest one, so an older line must not be used."""
    path = next(path for path in catalog if "/streams/" in path)
    rng = Random(SEED)
    for _ in range(50):
        _, changed = rot(catalog[COPY], rng)
        if changed.endswith(b"\n") and changed in catalog[COPY]:
            continue  # truncated between two lines
        with pytest.raises(CorruptCatalog) as caught:
            read_catalog(catalog_disk({**catalog, COPY: changed, path: catalog[path][:-1]}))
        assert caught.value.path == path
