"""Quarantine: moves a damaged file to damaged/ instead of deleting it, for people to look at."""

from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, make_folder, write_atomically


def quarantine(disk: Disk, data_dir: str, path: str) -> str:
    """Move path to damaged/; returns its new name. Durable on return."""
    target = _free_name(disk, data_dir, path)
    disk.rename(path, target)
    disk.sync_dir(target.rpartition("/")[0])
    disk.sync_dir(path.rpartition("/")[0])
    return target


def keep_copy(disk: Disk, data_dir: str, path: str, content: bytes) -> str:
    """Copy the content of path, which is about to be replaced, to damaged/; returns the copy's name. Durable on
    return."""
    target = _free_name(disk, data_dir, path)
    write_atomically(disk, target, content)
    return target


def _free_name(disk: Disk, data_dir: str, path: str) -> str:
    target = f"{data_dir}/{paths.DAMAGED}/{path.removeprefix(data_dir + '/')}"
    make_folder(disk, target.rpartition("/")[0])
    number, free = 1, target
    while disk.exists(free):
        number += 1
        free = f"{target}.{number}"
    return free
