"""A broker in its own process whose disk ends no sync while the test holds it, as a slow disk for a long moment.

Run as a program, it is `headrace` on such a disk: python -m tests.crash.held_disk LOCK ANNOUNCEMENT ARGUMENT...
"""

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.broker import broker as broker_module
from headrace.cli import main
from headrace.log.disk.disk import FileId, RealDisk
from tests.crash.broker_process import HttpBroker


class HeldDisk(RealDisk):
    """Every sync waits for a lock that the test may hold. Written bytes are in the files, so a kill keeps them."""

    def __init__(self, lock: Path, announcement: Path) -> None:
        self._lock = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
        self._announcement = announcement

    def sync(self, file: FileId) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if "/journal/" in os.readlink(f"/proc/self/fd/{file}"):  # not a checkpoint, which no round waits for
                self._announcement.touch()
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        super().sync(file)
        fcntl.flock(self._lock, fcntl.LOCK_UN)


class HeldBroker(HttpBroker):
    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder, *options, amqp=True)
        self._lock = folder / "lock"
        self._lock.touch()
        self._announcement = folder / "a-sync-waits"
        self.program = ("tests.crash.held_disk", str(self._lock), str(self._announcement))

    @property
    def waits_for_disk(self) -> bool:
        """A sync of the journal has begun that does not end before the disk is released."""
        return self._announcement.exists()

    @contextmanager
    def disk_held(self) -> Iterator[None]:
        lock = os.open(self._lock, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


if __name__ == "__main__":
    lock, announcement = (Path(argument) for argument in sys.argv[1:3])
    del sys.argv[1:3]
    setattr(broker_module, "RealDisk", lambda: HeldDisk(lock, announcement))  # noqa: B010 - a class, to mypy
    main()
