"""Files that root creates in a data folder of another user: the broker of that user must be able to use them."""

import os
from pathlib import Path

import pytest

from headrace.log.disk.disk import RealDisk, write_atomically
from headrace.log.maintenance.offline_rewrite import Written
from headrace.log.read.external import LogFiles
from headrace.pipelines.maintenance import to_staging
from headrace.record.types import Slice
from headrace.spark.access import ReadTask
from headrace.spark.hard_links import HardLinks
from headrace.spark.offsets import Partition

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files for others")

OWNER = 12_345, 12_346


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    os.chown(folder, *OWNER)
    return folder


def owner(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_uid, found.st_gid


def test_files_staged_as_root_belong_to_the_brokers_user(theirs: Path) -> None:
    def write(path: str) -> Written:
        disk = RealDisk()
        disk.close(disk.open(path, create=True, exclusive=True))
        return Written(0, 0, 0)

    staged = to_staging(str(theirs), write)
    assert isinstance(staged, tuple)
    assert owner(theirs / "staging") == OWNER
    assert owner(theirs / "staging" / f"{staged[0]}.staged") == OWNER


def test_links_made_as_root_can_be_removed_by_the_broker(theirs: Path) -> None:
    """Links of a killed reader would fill the disk, and no other reader could create links."""
    segment = theirs / "logs" / "7-orders" / f"{0:020d}.log"
    segment.parent.mkdir(parents=True)
    segment.write_bytes(b"records")
    task = ReadTask(Partition("orders", 0), 7, 0, 1, Slice(7, 0, 0, 0, 7, 0, 1))
    links = HardLinks(str(theirs), LogFiles(str(theirs)))
    assert links.can_link() and owner(theirs / "held") == OWNER
    (theirs / "held").rmdir()
    [linked], _ = links.link([task], 1000)
    assert linked.link is not None
    assert owner(theirs / "held") == owner(Path(linked.link).parent) == OWNER


def test_folders_and_documents_made_as_root_belong_to_the_folders_owner(theirs: Path) -> None:
    disk = RealDisk()
    disk.mkdir(f"{theirs}/tier/1-t/")
    disk.mkdir(f"{theirs}/tier/1-t")  # already exists
    write_atomically(disk, f"{theirs}/tier/1-t/document", b"x")
    for path in (theirs / "tier", theirs / "tier" / "1-t", theirs / "tier" / "1-t" / "document"):
        assert owner(path) == OWNER
        assert path.stat().st_mode & 0o077 == 0


def test_a_symlink_does_not_give_away_files_of_root(theirs: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"root's")
    (theirs / "document").symlink_to(secret)
    disk = RealDisk()
    disk.close(disk.open(f"{theirs}/document", create=True))
    with pytest.raises(FileExistsError):
        disk.open(f"{theirs}/document", create=True, exclusive=True)
    assert owner(secret) == (0, 0)


def test_a_folder_cannot_be_made_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"")
    with pytest.raises(FileExistsError):
        RealDisk().mkdir(f"{tmp_path}/there")
