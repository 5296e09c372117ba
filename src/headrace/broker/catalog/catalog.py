"""What exists, as one small JSON file per thing, for people to read: streams, exchanges, queues, users...

A file appears, changes and vanishes as a whole: temporary file, sync, rename, sync of the folder. Names that
clients choose never become file names: a file is called after a hash of the name, with a piece of it in front
for people; the name itself is inside. What changes often is not here but in the shard's state.

Every file has a checksum, and there is a second copy of all of them: what was damaged is restored from it when the
catalog is opened, and reported. What cannot be restored is an error: starting without it would hide whatever it
describes.
"""

import os
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from headrace.errors import CorruptCatalog
from headrace.log.catalog import document as documents
from headrace.log.catalog.copy import CatalogCopy
from headrace.log.catalog.document import Identity, file_name
from headrace.log.catalog.survey import Survey, restore, survey
from headrace.log.disk.disk import Disk, write_atomically
from headrace.log.disk.paths import CATALOG
from headrace.log.disk.quarantine import quarantine
from headrace.log.standby.acks import StandbyAcks

__all__ = ["Catalog", "Identity", "file_name", "shaped"]

T = TypeVar("T")


class Catalog:
    """Each change blocks until it is on disk: whoever has an event loop makes changes in a thread. Any thread may.
    Whoever makes one has the data folder's lock by the first call."""

    def __init__(self, disk: Disk, data_dir: str) -> None:
        self._disk = disk
        self._data_dir = data_dir
        self._root = os.path.join(data_dir, CATALOG)
        self._copy = CatalogCopy(disk, self._root)
        self._durable_folders: set[str] = set()
        self._changing = threading.Lock()
        self._read_ahead: dict[str, list[bytes]] | None = None
        self._taken: set[str] = set()  # kinds whose documents were given out, or have changed since
        self.confirms: StandbyAcks | None = None
        self.restored: list[str] = []  # what was damaged, a sentence each

    def load(self, kind: str) -> Iterator[dict[str, Any]]:
        """Every document of a kind. All kinds are read at once, so that whatever is damaged is known before anything
        is made of the rest."""
        with self._changing:
            if self._read_ahead is None or kind in self._taken:
                self._read_ahead, self._taken = {}, set()
                for (of_kind, _), text in self._reconcile().texts.items():
                    self._read_ahead.setdefault(of_kind, []).append(text)
            self._taken.add(kind)
            found = self._read_ahead.pop(kind, [])
        yield from map(documents.content_of, found)

    def put(self, kind: str, identity: Identity, document: dict[str, Any]) -> None:
        """On return the document is durable; on an error the old one is still there, or the new one is."""
        folder, file = self._folder(kind), file_name(identity)
        text = documents.sealed({"identity": identity, **document})
        with self._changing:
            self._changed(kind)
            path = os.path.join(folder, file)
            replaced = self._size(path)
            write_atomically(self._disk, path, text)
            if self._copy.is_ready:
                self._copy.add(kind, file, text, replaced)
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
                    self._copy.add(kind, file, None, self._size(path))
                self._disk.unlink(path)
                # Without this a crash can bring the thing back after somebody was told that it is gone.
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
        """Documents and copy say the same afterwards. What is sound counts; unfinished files of a crash go."""
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
                f"the catalog's copy was damaged and is kept in {kept}: it named {names}, which are not there"
            )
        # After a kill a name may be seen that a power cut would still take back: nothing may be built on that.
        for folder in (self._data_dir, self._root, *found.folders):
            if self._disk.exists(folder):
                self._disk.sync_dir(folder)
        self._copy.settle(found.copy, found.texts)
        return found

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


def shaped(kind: str, document: dict[str, Any], shape: type[T]) -> T:
    """A document as what it should be. One that was changed by hand, or taken as it was, may be something else."""
    try:
        return msgspec.convert(document, shape)
    except msgspec.ValidationError as error:
        path = f"{CATALOG}/{kind}/{file_name(tuple(document['identity']))}"
        raise CorruptCatalog(path, f"{error}; `headrace log repair --without FILE` goes on without it") from None
