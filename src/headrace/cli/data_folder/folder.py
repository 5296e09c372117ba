"""Folder: a data folder opened for reading, with or without a running broker."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import click

from headrace.cli.options import Command, config_option, settings_file
from headrace.errors import InvalidInput, NotFound, StorageError

if TYPE_CHECKING:
    from headrace.log.recovery.inspect import LogFacts


def data_dir_option(command: Command) -> Command:
    option = click.option(
        "--data-dir",
        "--storage-path",
        "data_dir",
        metavar="FOLDER",
        help="Data folder.  [default: the setting `data_dir`]",
    )
    return config_option(option(command))


@contextlib.contextmanager
def explain_missing_access(path: str) -> Iterator[None]:
    """Turns a permission error on the folder into a StorageError that says so.

    Without this check a folder of another user would look empty, or like no data folder at all.
    """
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.scandir(path).close()
        yield
    except OSError as error:
        reasons = {errno.EACCES: "permission denied for this user", errno.EROFS: "its filesystem is read-only"}
        reason = reasons.get(error.errno or 0)
        if reason is None or not str(error.filename).startswith(path):  # another place, such as the archive
            raise
        raise StorageError(f"the data folder {path} cannot be opened: {reason}") from error


class Folder:
    """A data folder opened for reading. Prints a note if a broker is running on it, unless `quiet`."""

    def __init__(self, data_dir: str | None, config_file: Path | None, *, quiet: bool = False) -> None:
        from headrace.config import load
        from headrace.log.recovery.inspect import Inspector

        config = load({"data_dir": data_dir}, os.environ, settings_file(config_file))
        self.path = os.path.abspath(config.data_dir)
        self.broker_pid = lock_owner(Path(self.path) / "lock")
        self._access = contextlib.ExitStack()
        self._access.enter_context(explain_missing_access(self.path))
        self.inspector = Inspector(self.path)
        if self.broker_pid is not None and not quiet:
            click.echo(
                f"headrace: a broker (pid {self.broker_pid}) has opened {self.path}; its latest writes are not shown",
                err=True,
            )

    def find(self, name: str) -> "LogFacts":
        logs = self.inspector.logs()
        found = [facts for facts in logs if name in (str(facts.id), facts.slug)]
        if not found:
            raise NotFound(f"log {name!r} does not exist in {self.path}; list the logs with `headrace log ls`")
        if len(found) > 1:
            ids = ", ".join(str(facts.id) for facts in found)
            raise InvalidInput(f"several logs are called {name!r}; use one of the ids {ids}")
        return found[0]

    def choose(self, names: tuple[str, ...]) -> set[int] | None:
        return {self.find(name).id for name in names} if names else None

    def size_bytes(self, chosen: set[int] | None) -> int:
        return sum(f.batch_bytes for f in self.inspector.logs() if chosen is None or f.id in chosen)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inspector.close()
        self._access.__exit__(kind, error, trace)


def lock_owner(lock: Path) -> int | None:
    """PID of the process that holds a lock file. Does not try the lock, so that a starting broker can take it."""
    try:
        inode = lock.stat().st_ino
        table = Path("/proc/locks").read_text()
    except OSError:
        return None
    for line in table.splitlines():
        # 1: FLOCK  ADVISORY  WRITE 4711 08:01:1234567 0 EOF
        fields = line.split()
        if len(fields) >= 6 and fields[3] == "WRITE" and fields[5].rpartition(":")[2] == str(inode):
            return int(fields[4])
    return None
