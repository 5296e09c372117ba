"""Files that readers beside the broker hold by a second name: what is past its time goes. See log/disk/paths.py."""

import asyncio

from headrace.clock import Clock
from headrace.errors import StorageError
from headrace.log.disk.disk import Disk
from headrace.log.disk.paths import HELD, held_until


async def sweep_held(disk: Disk, root: str, clock: Clock) -> list[str]:
    """A reader releases what it held; one that died cannot, and would fill the disk."""
    return await asyncio.to_thread(_sweep, disk, f"{root}/{HELD}", clock.now_ms())


def _sweep(disk: Disk, folder: str, now_ms: int) -> list[str]:
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
            continue  # a reader swept it at the same time
        except OSError as error:  # a reader of another user made it, perhaps: the others go all the same
            barred = error
            continue
        gone.append(name)
    if barred is not None:
        raise StorageError(f"{barred.filename or folder} is held past its time and cannot be removed: {barred}")
    return gone
