"""Whether a broker's data folder can be seen from here, so that its files can be read and written themselves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.log.disk.paths import LOCK, SLOTS


def folder_in_sight(status: Mapping[str, Any]) -> str | None:
    """The folder that a broker's status names, if it is the one that this broker has open.

    A path alone says nothing: on another machine there may be a broker of its own with a folder of the same name, and
    its records would be read in place of those that were asked for.
    """
    folder = Path(str(status["data_dir"]))
    try:
        holder = (folder / LOCK).read_text(errors="replace").strip()
        is_there = (folder / SLOTS).is_file()
    except OSError:
        return None
    return str(folder) if is_there and holder == str(status["pid"]) else None
