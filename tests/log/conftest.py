import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.log.disk.disk import FileId, RealDisk
from tests.log.helpers import Bench


@pytest.fixture(autouse=True)
def files_of_the_dead() -> Iterator[None]:
    """Close the files of brokers that a test killed or abandoned. The test process lives on, so hundreds of files would
    stay open until later tests find no free descriptor."""
    opened: set[FileId] = set()
    real_open, real_lock, real_close = RealDisk.open, RealDisk.lock, RealDisk.close

    def open_(
        self: RealDisk, path: str, *, create: bool = False, exclusive: bool = False, readonly: bool = False
    ) -> FileId:
        file = real_open(self, path, create=create, exclusive=exclusive, readonly=readonly)
        opened.add(file)
        return file

    def lock(self: RealDisk, path: str) -> FileId:
        file = real_lock(self, path)
        opened.add(file)
        return file

    def close(self: RealDisk, file: FileId) -> None:
        opened.discard(file)
        real_close(self, file)

    # Patches of its own, since a test may undo its `monkeypatch`; not a disk of its own: the log asks for the real one.
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(RealDisk, "open", open_)
        patches.setattr(RealDisk, "lock", lock)
        patches.setattr(RealDisk, "close", close)
        yield
    for file in opened:
        os.close(file)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    yield Bench(tmp_path)
