"""Rot: bits flip, pages go blank, files are cut, swapped, replaced by older ones, or gone (L6, L9).

None of it is ever served, none of it is cut in silence: what cannot be read any more is reported, with the file. What
is derived (indexes, slots) may be anything, and changes no answer.
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
from headrace.broker.vhosts import global_parameters, policies, store, vhosts
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
TWICE = (".state", ".state-copy")  # each is the other's copy


def spec(log_id: int, **settings: object) -> LogSpec:
    return LogSpec(log_id, f"log{log_id}", StreamSettings(retention_ms=-1, index_interval=200, **settings))


SPECS = [
    spec(1, segment_size=700),
    spec(2, segment_size=5000),
    spec(3, segment_size=500, cleanup_policy="compact", tombstone_retention_ms=0),
]

Answers = tuple[dict[int, list[Record]], dict[bytes, bytes]]


class Library:
    """A data folder with everything in it: sealed, active and compacted segments, state, a used journal."""

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
        self.answers: Answers = ask(shard)
        assert all(len(records) > 20 for records in self.answers[0].values())
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


def ask(shard: Shard) -> Answers:
    return {log.id: read(log) for log in shard.logs.values()}, dict(shard.state.items("t"))


def read(log: Log) -> list[Record]:
    records: list[Record] = []
    offset = log.start_offset
    while offset < log.visible_end:
        chunk = log.read(offset, 300)
        records += codec.records(chunk.data, verify_crc=True)
        offset = chunk.next_offset
    return records


def judge(library: Library, image: SimulatedDisk, path: str) -> str:
    """ "same" or "reported"; an AssertionError when something false was served, or something was cut in silence."""
    name = path.rpartition("/")[2]
    try:
        shard, report = Shard.open(ROOT, SETTINGS, logs=SPECS, clock=ManualClock(), disk=image)
    except CorruptLog as error:
        assert error.path.startswith(ROOT) and error.position >= 0
        return "reported"
    except HeadraceError as error:
        raise AssertionError(f"{name}: not a report but {error!r}") from error
    wanted, wanted_state = library.answers
    outcome = "same"
    for log in shard.logs.values():
        found, damage = read_what_is_left(log)
        allowed = {record.offset: record for record in wanted[log.id]}
        for record in found:
            assert allowed.get(record.offset) == record, f"{name}: log {log.id} served a false {record.offset}"
        if found != wanted[log.id] or damage is not None:
            assert damage is not None, f"{name}: log {log.id} lost {len(allowed) - len(found)} records in silence"
            assert damage.path.startswith(ROOT) and damage.position >= 0
            outcome = "reported"
        if log.damage is not None:
            assert str(log.damage) in report.damaged
    if dict(shard.state.items("t")) != wanted_state:
        raise AssertionError(f"{name}: state changed in silence")
    return outcome


def read_what_is_left(log: Log) -> tuple[list[Record], CorruptLog | None]:
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
def library(request: pytest.FixtureRequest) -> Library:
    return Library(clean=request.param == "clean")


def kinds(library: Library) -> dict[str, list[str]]:
    """The files by what they are: .log, .index, .wal, ..., slots."""
    found: dict[str, list[str]] = {}
    for path in library.files:
        name = path.rpartition("/")[2]
        found.setdefault(name[name.rfind(".") :] if "." in name else name, []).append(path)
    return found


def rot(content: bytes, rng: Random) -> tuple[str, bytes]:
    """(what happened, what is left): a flipped bit mostly, a blank page or a cut at times."""
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


@pytest.mark.timeout(900)  # of a machine that has other things to do, too
def test_l6_rot_in_any_file_is_never_served_and_never_cut_in_silence(library: Library) -> None:
    rng = Random(SEED)
    count, silent = 0, []
    for paths in kinds(library).values():
        for number in range(PER_KIND):
            path = paths[number % len(paths)]  # every file of the kind has its turn
            what, changed = rot(library.files[path], rng)
            if changed == library.files[path]:
                continue
            count += 1
            try:
                outcome = judge(library, library.with_content(path, changed), path)
            except AssertionError as error:
                silent.append(f"{what} of {path}: {error}")
                continue
            if path.endswith((*DERIVED, *TWICE)) and outcome != "same":
                silent.append(f"{what} of {path}: it can be made again, and yet answers changed")
    print(f"{count} corruptions of {len(library.files)} files, seed {SEED}")
    assert not silent, f"\n{len(silent)} of {count}:\n" + "\n".join(silent[:20])
    assert kinds(library).keys() >= {".log", ".seal", ".index", ".timeindex", ".wal", *TWICE, "slots"}


def test_l6_a_missing_file_is_reported_or_not_missed(library: Library) -> None:
    for path in library.files:
        outcome = judge(library, library.without(path), path)
        if path.endswith((*DERIVED, *TWICE)):
            assert outcome == "same", path


def test_l9_all_that_is_derived_may_be_deleted_at_once(library: Library) -> None:
    derived = [path for path in library.files if path.endswith(DERIVED)]
    assert judge(library, library.without(*derived), "everything derived") == "same"


def test_l6_swapped_segments_are_noticed(library: Library) -> None:
    logs = [path for path in library.files if path.endswith(".log")]
    outcomes = set()
    for first, second in pairwise(logs):
        image = library.disk.kill()
        image.replace(first, library.files[second])
        image.replace(second, library.files[first])
        outcomes.add(judge(library, image, first))
    assert "reported" in outcomes  # "same" is what the journal still holds


def test_l6_a_segment_of_another_time_or_log_is_noticed(library: Library) -> None:
    logs = [path for path in library.files if path.endswith(".log")]
    outcomes = set()
    for path in logs[::2]:
        for other in logs[::3]:
            # Not seen: another log's segment of the same offsets, in place of one that is not sealed yet.
            if other.rpartition("/")[2][:20] != path.rpartition("/")[2][:20]:
                outcomes.add(judge(library, library.with_content(path, library.files[other]), path))
    assert "reported" in outcomes


@pytest.mark.parametrize("suffix", TWICE)
def test_l6_a_damaged_state_file_is_named_and_kept_while_its_copy_serves(library: Library, suffix: str) -> None:
    path = next(path for path in library.files if path.endswith(suffix))
    damaged = library.files[path][:20] + b"?" + library.files[path][21:]
    image = library.with_content(path, damaged)
    shard, report = Shard.open(ROOT, SETTINGS, logs=SPECS, clock=ManualClock(), disk=image)
    assert ask(shard) == library.answers
    first, second = report.restored
    assert path in first and "its copy" in first
    kept = path.replace("/state/", "/damaged/state/")
    assert kept in second and image.files()[kept] == damaged
    assert "RESTORED: " in report.summary()


@pytest.mark.parametrize("suffix", TWICE)
def test_l6_a_checkpoint_is_in_both_files_before_it_counts(suffix: str) -> None:
    """A power cut, and one of them is gone: what the journal no longer has must be in the other."""
    disk = SimulatedDisk()
    disk.mkdir(ROOT)
    disk.sync_dir("/")
    shard, _ = Shard.open(ROOT, SETTINGS, logs=SPECS, clock=ManualClock(), disk=disk)
    for number in range(200):  # the journal is used again and again
        group = shard.group()
        group.put("t", b"%d" % (number % 50), b"value %d" % number)
        group.commit()
        shard.pump()
    cut = disk.power_cut(Random(1), "lost")
    wanted = dict(shard.state.items("t"))
    assert shard.counters.checkpoints > 3
    (path,) = (path for path in cut.files() if path.endswith(suffix))
    cut.replace(path, cut.files()[path][:-1])  # looks like a checkpoint that a crash tore
    torn = DiskStateStore(cut, f"{ROOT}/state")
    torn.load()
    assert torn.marker == shard.state.marker
    cut.remove(path)
    reopened, _ = Shard.open(ROOT, SETTINGS, logs=SPECS, clock=ManualClock(), disk=cut)
    assert dict(reopened.state.items("t")) == wanted


def test_l6_a_state_whose_files_are_both_damaged_is_refused(library: Library) -> None:
    image = library.disk.kill()
    paths = [path for path in library.files if path.endswith(TWICE)]
    for path in paths:
        image.replace(path, library.files[path][:20] + b"?" + library.files[path][21:])
    before = image.files()
    with pytest.raises(CorruptLog) as caught:
        Shard.open(ROOT, SETTINGS, logs=SPECS, clock=ManualClock(), disk=image)
    assert caught.value.path in paths
    assert {p: c for p, c in image.files().items() if not p.endswith("/lock")} == {
        p: c for p, c in before.items() if not p.endswith("/lock")
    }


def test_l6_being_killed_while_a_damaged_state_is_replaced_changes_nothing(library: Library) -> None:
    path = next(path for path in library.files if path.endswith(".state"))
    image = library.with_content(path, library.files[path][:20] + b"?" + library.files[path][21:])
    rng = Random(SEED)
    crashes: list[SimulatedDisk] = []
    image.before = lambda _kind, _path: crashes.extend([image.kill(), image.power_cut(rng, "mixed")])
    Shard.open(ROOT, SETTINGS, logs=SPECS, clock=ManualClock(), disk=image)
    assert len(crashes) > 20
    for crashed in crashes:
        shard, _ = Shard.open(ROOT, SETTINGS, logs=SPECS, clock=ManualClock(), disk=crashed)
        assert ask(shard) == library.answers


# The catalog.


KINDS = (
    streams.CATALOG_KIND,
    vhosts.CATALOG_KIND,
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
    """The files of a catalog with a document of every kind, as a broker writes them."""
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
        without_threads(patches)  # the simulated disk is for one at a time
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


def test_l6_every_flipped_bit_of_every_document_is_noticed(catalog: dict[str, bytes]) -> None:
    count, believed = 0, []
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
                    believed.append(changed)
    print(f"{count} flipped bits of {len(catalog) - 1} documents")
    assert not believed, f"{len(believed)} of {count}: {believed[:3]}"


def test_l6_a_rotten_document_is_restored_and_reported_or_refused(catalog: dict[str, bytes]) -> None:
    """Flips, blank pages and cuts of each file. With the copy nothing is lost, without it nothing is believed."""
    wanted, _ = read_catalog(catalog_disk(catalog))
    rng = Random(SEED)
    without_copy = {path: text for path, text in catalog.items() if path != COPY}
    for path, text in catalog.items():
        for _ in range(20):
            what, changed = rot(text, rng)
            found, opened = read_catalog(catalog_disk({**catalog, path: changed}))
            assert found == wanted, f"{what} of {path}"
            assert [path in said for said in opened.restored] == [True] * (path != COPY), what
            if path != COPY:
                with pytest.raises(CorruptCatalog) as caught:
                    read_catalog(catalog_disk({**without_copy, path: changed}))
                assert caught.value.path == path


def test_l6_a_missing_document_is_restored_and_reported(catalog: dict[str, bytes]) -> None:
    wanted, _ = read_catalog(catalog_disk(catalog))
    for path in catalog:
        found, opened = read_catalog(catalog_disk({p: text for p, text in catalog.items() if p != path}))
        assert found == wanted
        assert [path in said for said in opened.restored] == [True] * (path != COPY)


def test_l6_a_rotten_copy_brings_nothing_back_that_may_be_out_of_date(catalog: dict[str, bytes]) -> None:
    """Both are damaged: the line that is lost may be the one that counts."""
    path = next(path for path in catalog if "/streams/" in path)
    rng = Random(SEED)
    for _ in range(50):
        _, changed = rot(catalog[COPY], rng)
        if changed.endswith(b"\n") and changed in catalog[COPY]:
            continue  # cut between two lines
        with pytest.raises(CorruptCatalog) as caught:
            read_catalog(catalog_disk({**catalog, COPY: changed, path: catalog[path][:-1]}))
        assert caught.value.path == path
