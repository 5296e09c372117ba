"""A data folder as the commands see it that read its files, with or without a broker on it."""

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
        help="The data folder; otherwise the `data_dir` setting says where it is.",
    )
    return config_option(option(command))


@contextlib.contextmanager
def allowed(path: str) -> Iterator[None]:
    """A folder of somebody else is said to be one, and not to be empty or no data folder: its data is there."""
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.scandir(path).close()
        yield
    except OSError as error:
        reasons = {errno.EACCES: "this user may not use it", errno.EROFS: "its filesystem is read-only"}
        reason = reasons.get(error.errno or 0)
        if reason is None or not str(error.filename).startswith(path):  # something else, such as the archive
            raise
        raise StorageError(f"the data folder {path} cannot be opened: {reason}") from error


class Folder:
    """A data folder opened for looking. Says so when a broker is at work in it."""

    def __init__(self, data_dir: str | None, config_file: Path | None, *, quiet: bool = False) -> None:
        from headrace.config import load
        from headrace.log.recovery.inspect import Inspector

        config = load({"data_dir": data_dir}, os.environ, settings_file(config_file))
        self.path = os.path.abspath(config.data_dir)
        self.broker_pid = holder(Path(self.path) / "lock")
        self._allowed = contextlib.ExitStack()
        self._allowed.enter_context(allowed(self.path))
        self.inspector = Inspector(self.path)
        if self.broker_pid is not None and not quiet:
            click.echo(
                f"headrace: a broker (pid {self.broker_pid}) has {self.path} open; what it writes now is left out",
                err=True,
            )

    def find(self, name: str) -> "LogFacts":
        logs = self.inspector.logs()
        found = [facts for facts in logs if name in (str(facts.id), facts.slug)]
        if not found:
            raise NotFound(f"no log {name!r} in {self.path}; `headrace log ls` lists them")
        if len(found) > 1:
            ids = ", ".join(str(facts.id) for facts in found)
            raise InvalidInput(f"{name!r} names the logs {ids}: say which by number")
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
        self._allowed.__exit__(kind, error, trace)


def holder(lock: Path) -> int | None:
    """The process that holds a lock file, without touching the lock: a broker that starts just now must get it."""
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
