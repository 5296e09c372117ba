"""Archived segments in a location that is no folder: everything else works through the interface."""

from pathlib import Path

import msgspec
import pytest

from headrace.log.disk.disk import Disk
from headrace.log.disk.paths import SegmentStem
from headrace.log.read.external import LogFiles
from headrace.log.recovery.inspect import Inspector
from headrace.log.tier import location, parquet
from headrace.log.tier.location import ArchiveLocation
from headrace.record.types import Slice
from tests.log.helpers import SMALL, Bench, records
from tests.log.tiers import ROLLING, archive, fill, restore, sealed, take, write

ROOT = "objects://bucket"


class ObjectStore(ArchiveLocation):
    """Immutable objects by key, as an object store has them: no folders, no renames in place, no links."""

    objects: dict[str, bytes]

    def __init__(self, _disk: Disk) -> None:
        pass

    def create(self, path: str) -> "Upload":
        return Upload(self.objects, path)

    def adopt(self, source: str, path: str) -> None:
        if source not in self.objects:
            raise FileNotFoundError(2, "no such object", source)
        self.objects[path] = self.objects.pop(source)

    def sync(self, path: str) -> None:
        assert path in self.objects

    def open(self, path: str) -> "Object":
        if path not in self.objects:
            raise FileNotFoundError(2, "no such object", path)
        return Object(self.objects[path])

    def size(self, path: str) -> int:
        return len(self.objects.get(path, b""))

    def modified_ms(self, path: str) -> int:
        return 0

    def names(self, folder: str) -> list[str]:
        return [key.removeprefix(folder + "/") for key in self.objects if key.startswith(folder + "/")]

    def remove(self, path: str) -> bool:
        self.objects.pop(path, None)
        return True

    def remove_folder(self, folder: str) -> bool:
        removed = [self.remove(f"{folder}/{name}") for name in self.names(folder)]
        return all(removed)

    def hold(self, path: str, target: str) -> bool:
        self.objects[f"{ROOT}/held{target}"] = self.objects[path]
        return True

    def held(self, path: str, target: str) -> str:
        return f"{ROOT}/held{target}"


class Object:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self) -> int:
        return len(self._data)

    def read(self, size: int, position: int) -> bytes:
        return self._data[position : position + size]

    def close(self) -> None:
        pass


class Upload:
    def __init__(self, objects: dict[str, bytes], path: str) -> None:
        self._objects = objects
        self._path = path
        self._data = bytearray()

    def write(self, data: memoryview) -> None:
        self._data += data

    def finish(self) -> None:
        self._objects[self._path] = bytes(self._data)

    def abandon(self) -> None:
        self._objects.pop(self._path, None)


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    monkeypatch.setattr(parquet, "GROUP_BYTES", 600)
    monkeypatch.setattr(ObjectStore, "objects", {}, raising=False)
    monkeypatch.setitem(location.LOCATIONS, "objects", ObjectStore)
    return ObjectStore.objects


SETTINGS = msgspec.structs.replace(SMALL, tier_dir=ROOT)


def test_segments_in_an_object_store_read_as_before_and_come_back(bench: Bench, objects: dict[str, bytes]) -> None:
    shard = bench.open(settings=SETTINGS, stream=ROLLING)
    fill(bench)
    seen = records(shard.log(1))
    assert archive(shard) == len(objects) >= 2
    assert not list(Path(bench.root).rglob("*.parquet")) and all(key.startswith(ROOT) for key in objects)
    assert records(shard.log(1)) == seen
    bench.kill()
    shard = bench.open(settings=SETTINGS, stream=ROLLING)
    assert not bench.report.damaged and records(shard.log(1)) == seen
    assert Inspector(bench.root).verify().is_sound
    restore(shard)
    assert records(shard.log(1)) == seen and not objects
    shard.close()


def test_retention_and_deletion_remove_their_objects(bench: Bench, objects: dict[str, bytes]) -> None:
    shard = bench.open(settings=SETTINGS, stream=ROLLING)
    fill(bench)
    archive(shard)
    log, before = shard.log(1), len(objects)
    shard.maintenance.starts.delete_before(log, log.segments[0].next_offset)
    shard.pump()
    shard.maintenance.sweep()
    shard.pump()
    assert len(objects) == before - 1
    shard.delete_log(1)
    shard.pump()
    assert not objects
    shard.close()


def test_a_start_removes_objects_that_no_manifest_names(bench: Bench, objects: dict[str, bytes]) -> None:
    shard = bench.open(settings=SETTINGS, stream=ROLLING)
    fill(bench)
    first, second, *_ = sealed(shard.log(1))
    write(shard, first)
    assert take(shard, first) is None
    write(shard, second)
    assert len(objects) == 2
    bench.kill()
    bench.open(settings=SETTINGS, stream=ROLLING).close()
    assert len(objects) == 1, "the object that was never adopted is gone"


def test_a_reader_in_another_process_keeps_its_object(bench: Bench, objects: dict[str, bytes]) -> None:
    shard = bench.open(settings=SETTINGS, stream=ROLLING)
    fill(bench)
    archive(shard)
    segment = shard.log(1).segments[0]
    files = LogFiles(bench.root)
    folder = Path(bench.root, "held", "reader")
    folder.mkdir(parents=True)
    link = files.link(1, SegmentStem(segment.base, segment.generation), str(folder / "x"))
    assert link is not None
    shard.maintenance.starts.delete_before(shard.log(1), segment.next_offset)
    shard.pump()
    shard.maintenance.sweep()
    shard.pump()
    assert segment.data_path not in objects
    with files.open_link(link, Slice(1, segment.base, segment.generation, 0, segment.size, 0, 0)) as source:
        found = [info.base_offset for _, info in source.headers(segment.base, segment.next_offset)]
    assert found == list(range(segment.base, segment.next_offset))
    shard.close()
