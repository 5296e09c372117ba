"""Finds out whether a broker's data folder is accessible on this machine, so that its files can be used directly."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.log.disk.paths import LOCK, SLOTS


def local_data_folder(status: Mapping[str, Any]) -> str | None:
    """The data folder in the broker's status, if the folder of that path on this machine is opened by that broker.

    The path alone is not enough: this machine may run another broker with the same path, and its records would be read
    by mistake. Therefore the PID in the lock file is compared with the one in the status.
    """
    folder = Path(str(status["data_dir"]))
    try:
        lock_owner = (folder / LOCK).read_text(errors="replace").strip()
        is_data_folder = (folder / SLOTS).is_file()
    except OSError:
        return None
    return str(folder) if is_data_folder and lock_owner == str(status["pid"]) else None
