"""What exists, as one small JSON file per thing, for people to read: streams, exchanges, queues, users...

A file appears, changes and vanishes as a whole: temporary file, sync, rename, sync of the folder. Names that
clients choose never become file names: a file is called after a hash of the name, with a piece of it in front
for people; the name itself is inside. What changes often is not here but in the shard's state.
"""

import hashlib
import os
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.errors import CorruptCatalog
from headrace.log.disk import Disk, read_whole, write_atomically
from headrace.log.paths import CATALOG, UNFINISHED, slug

SUFFIX = ".json"
Identity = tuple[str, ...]  # such as (vhost, name): what makes a thing of one kind different from another


class Catalog:
    """Each change blocks until it is on disk: whoever has an event loop makes changes in a thread."""

    def __init__(self, disk: Disk, data_dir: str) -> None:
        self._disk = disk
        self._root = os.path.join(data_dir, CATALOG)
        self._durable_folders: set[str] = set()

    def load(self, kind: str) -> Iterator[dict[str, Any]]:
        """Every document of a kind. Unfinished files of a crash are removed; a damaged one is an error:
        starting without it would hide whatever it describes."""
        folder = self._folder(kind)
        for file in self._disk.listdir(folder):
            path = os.path.join(folder, file)
            if file.endswith(UNFINISHED):
                self._disk.unlink(path)
            elif file.endswith(SUFFIX):
                yield self._read(path, file)

    def _read(self, path: str, file: str) -> dict[str, Any]:
        try:
            document = msgspec.json.decode(read_whole(self._disk, path), type=dict[str, Any])
            identity = tuple(document["identity"])
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise CorruptCatalog(path, str(error)) from None
        if not all(isinstance(part, str) for part in identity) or file_name(identity) != file:
            raise CorruptCatalog(path, f"it describes {identity!r}, which would be in {file_name(identity)}")
        return document

    def put(self, kind: str, identity: Identity, document: dict[str, Any]) -> None:
        """On return the document is durable; on an error the old one is still there, or the new one is."""
        path = os.path.join(self._folder(kind), file_name(identity))
        text = msgspec.json.format(msgspec.json.encode({"identity": identity, **document}), indent=2)
        write_atomically(self._disk, path, text + b"\n")

    def remove(self, kind: str, identity: Identity) -> None:
        folder = self._folder(kind)
        path = os.path.join(folder, file_name(identity))
        if self._disk.exists(path):
            self._disk.unlink(path)
            # Without this a crash can bring the thing back after somebody was told that it is gone.
            self._disk.sync_dir(folder)

    def _folder(self, kind: str) -> str:
        folder = os.path.join(self._root, kind)
        if folder not in self._durable_folders:
            self._disk.mkdir(self._root)  # one by one: only the last of a path gets the private mode
            self._disk.mkdir(folder)
            # The name of a new folder must outlive a crash as well as what is put inside.
            self._disk.sync_dir(self._root)
            self._disk.sync_dir(os.path.dirname(self._root))
            self._durable_folders.add(folder)
        return folder


def file_name(identity: Identity) -> str:
    """Readable in part, unique by its hash: 128 bits of SHA-256 over the parts with their lengths."""
    digest = hashlib.sha256()
    for part in identity:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(4, "big") + data)
    return f"{slug(identity[-1])}-{digest.hexdigest()[:32]}{SUFFIX}"
