"""The catalog as files: one small, readable JSON file per stream, exchange, queue, user...

Each change is atomic: temporary file, sync, rename, sync of the folder. Names that clients choose never become file
names: a file is named after a hash of the name, prefixed with a readable piece of it; the name itself is inside.
State that changes often is not here but in the shard's state store.

Every file has a checksum, and there is a second copy of all of them. A damaged file is restored from the copy when the
catalog is opened, and reported. A file that cannot be restored is an error: starting without it would hide the object
it describes.
"""

import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.errors import CorruptCatalog
from headrace.log.catalog import document as documents
from headrace.log.catalog.copy import CatalogCopy
from headrace.log.catalog.document import Identity, file_name
from headrace.log.catalog.survey import Survey, restore, survey
from headrace.log.disk.disk import Disk, write_all_atomically
from headrace.log.disk.paths import CATALOG
from headrace.log.disk.quarantine import quarantine
from headrace.log.standby.acks import StandbyAcks


class FileCatalog:
    """Implements Catalog. The data folder must be locked before the first call."""

    def __init__(self, disk: Disk, data_dir: str) -> None:
        self._disk = disk
        self._data_dir = data_dir
        self._root = os.path.join(data_dir, CATALOG)
        self._copy = CatalogCopy(disk, self._root)
        self._durable_folders: set[str] = set()
        self._changing = threading.Lock()
        self._read_ahead: dict[str, list[bytes]] | None = None
        self._taken: set[str] = set()  # kinds that were loaded, or have changed since they were read
        self.confirms: StandbyAcks | None = None  # set when changes must wait for standbys
        self.restored: list[str] = []  # a sentence for each file that was damaged

    def load(self, kind: str) -> Iterator[dict[str, Any]]:
        """Every document of a kind. All kinds are read at once, so that damage is found before any document is
        used."""
        with self._changing:
            if self._read_ahead is None or kind in self._taken:
                self._read_ahead, self._taken = {}, set()
                for (of_kind, _), text in self._reconcile().texts.items():
                    self._read_ahead.setdefault(of_kind, []).append(text)
            self._taken.add(kind)
            found = self._read_ahead.pop(kind, [])
        yield from map(documents.content_of, found)

    def put(self, kind: str, identity: Identity, document: dict[str, Any]) -> None:
        self.put_all(kind, {identity: document})

    def put_all(self, kind: str, contents: Mapping[Identity, dict[str, Any]]) -> None:
        folder = self._folder(kind)
        texts = {
            file_name(identity): documents.sealed({"identity": identity, **document})
            for identity, document in contents.items()
        }
        with self._changing:
            self._changed(kind)
            replaced = sum(self._size(os.path.join(folder, file)) for file in texts)
            write_all_atomically(self._disk, folder, texts)
            if self._copy.is_ready:
                self._copy.add(kind, texts, replaced)
            else:
                self._reconcile()
        self._confirm()

    def remove(self, kind: str, identity: Identity) -> None:
        folder, file = self._folder(kind), file_name(identity)
        path = os.path.join(folder, file)
        with self._changing:
            self._changed(kind)
            if not self._copy.is_ready:
                self._reconcile()
            if self._disk.exists(path):
                if self._copy.is_ready:
                    self._copy.add(kind, {file: None}, self._size(path))
                self._disk.unlink(path)
                # Without this a crash could bring the object back after its deletion was confirmed.
                self._disk.sync_dir(folder)
        self._confirm()

    def _confirm(self) -> None:
        if self.confirms is not None:
            self.confirms.wait()

    def _size(self, path: str) -> int:
        return self._disk.file_size(path) if self._disk.exists(path) else 0

    def _changed(self, kind: str) -> None:
        self._taken.add(kind)
        if self._read_ahead is not None:
            self._read_ahead.pop(kind, None)

    def _reconcile(self) -> Survey:
        """Make documents and copy agree: restore damaged files, delete unfinished files of a crash."""
        found = survey(self._disk, self._root, self._copy)
        for finding in found.findings:
            if not found.can_restore(finding):
                raise CorruptCatalog(finding.path, f"{finding.reason}; `headrace log repair` says what can be done")
        for path in found.unfinished:
            self._disk.unlink(path)
        if found.findings:
            self.restored += [restore(self._disk, self._data_dir, finding) for finding in found.findings]
            found = survey(self._disk, self._root, self._copy)
        if found.lost_with_the_copy:
            kept = quarantine(self._disk, self._data_dir, self._copy.path)
            names = ", ".join(found.lost_with_the_copy)
            self.restored.append(
                f"the catalog's copy was damaged and is kept in {kept}: it named {names}, which no longer exist"
            )
        # After a kill, a name may be visible that a power failure could still lose: make it durable before using it.
        for folder in (self._data_dir, self._root, *found.folders):
            if self._disk.exists(folder):
                self._disk.sync_dir(folder)
        self._copy.settle(found.copy, found.texts)
        return found

    def _folder(self, kind: str) -> str:
        folder = os.path.join(self._root, kind)
        if folder not in self._durable_folders:
            self._disk.mkdir(self._root)  # one by one: only the last part of a path gets the private mode
            self._disk.mkdir(folder)
            # A new folder's name must survive a crash, like the files in it.
            self._disk.sync_dir(self._root)
            self._disk.sync_dir(os.path.dirname(self._root))
            self._durable_folders.add(folder)
        return folder
