"""Removes expired hard links: readers outside the broker (Spark) link the files they read, see log/disk/paths.py."""

import asyncio

from headrace.clock import ExpiryClock
from headrace.errors import StorageError
from headrace.log.disk.disk import Disk
from headrace.log.disk.paths import HELD, held_until


async def remove_expired_links(disk: Disk, root: str, clock: ExpiryClock) -> list[str]:
    """Remove the links of readers that died before releasing them, so that they do not fill the disk."""
    return await asyncio.to_thread(_remove, disk, f"{root}/{HELD}", clock.now_ms())


def _remove(disk: Disk, folder: str, now_ms: int) -> list[str]:
    if not disk.exists(folder):
        return []
    old = [name for name in disk.listdir(folder) if (until := held_until(name)) is not None and until < now_ms]
    gone: list[str] = []
    barred: OSError | None = None
    for name in old:
        try:
            for file in disk.listdir(f"{folder}/{name}"):
                disk.unlink(f"{folder}/{name}/{file}")
            disk.rmdir(f"{folder}/{name}")
        except FileNotFoundError:
            continue  # a reader removed it at the same time
        except OSError as error:  # perhaps another user's: remove the others all the same
            barred = error
            continue
        gone.append(name)
    if barred is not None:
        raise StorageError(f"{barred.filename or folder} has expired and cannot be removed: {barred}")
    return gone
