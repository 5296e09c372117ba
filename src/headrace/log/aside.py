"""Taking a damaged file out of its place without deleting it: it goes to damaged/, for people to look at."""

from headrace.log import paths
from headrace.log.disk import Disk, make_folder


def set_aside(disk: Disk, data_dir: str, path: str) -> str:
    """The new name of path, one that was free; durable on return."""
    target = f"{data_dir}/{paths.DAMAGED}/{path.removeprefix(data_dir + '/')}"
    folder = target.rpartition("/")[0]
    make_folder(disk, folder)
    number, free = 1, target
    while disk.exists(free):
        number += 1
        free = f"{target}.{number}"
    disk.rename(path, free)
    disk.sync_dir(folder)
    disk.sync_dir(path.rpartition("/")[0])
    return free
