"""Taking a damaged file out of its place without deleting it: it goes to damaged/, for people to look at."""

from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, make_folder, write_atomically


def set_aside(disk: Disk, data_dir: str, path: str) -> str:
    """The new name of path; durable on return."""
    target = _free_name(disk, data_dir, path)
    disk.rename(path, target)
    disk.sync_dir(target.rpartition("/")[0])
    disk.sync_dir(path.rpartition("/")[0])
    return target


def keep(disk: Disk, data_dir: str, path: str, content: bytes) -> str:
    """The name of a copy of what is in path, which is to be replaced; durable on return."""
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
