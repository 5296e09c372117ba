"""Survey of the catalog's folder: which documents can be trusted, and which the catalog's copy can restore."""

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.errors import CorruptCatalog
from headrace.log.catalog import document as documents
from headrace.log.catalog.copy import CatalogCopy, CopyContent, Name
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, make_folder, read_whole, write_atomically
from headrace.log.disk.quarantine import keep_copy

MISSING = "it is missing"


class CatalogFinding(NamedTuple):
    """A document that is missing or cannot be trusted."""

    kind: str
    file: str
    path: str
    reason: str
    text: bytes | None  # content of the file; None if it is missing
    copy: bytes | None  # the version in the catalog's copy


@dataclass(slots=True)
class Survey:
    copy: CopyContent
    texts: dict[Name, bytes] = field(default_factory=dict)  # of documents that can be trusted
    findings: list[CatalogFinding] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)

    @property
    def lost_with_the_copy(self) -> list[str]:
        """Files that a damaged copy names and that do not exist. Either they were removed, and the line that recorded
        it is the damaged one, or they were lost: that cannot be told apart."""
        if self.copy.is_sound:
            return []
        there = {*self.texts, *((finding.kind, finding.file) for finding in self.findings)}
        return [f"{kind}/{file}" for kind, file in self.copy.texts if (kind, file) not in there]

    def can_restore(self, finding: CatalogFinding) -> bool:
        """Only a copy that is intact to its end is known to hold the latest version."""
        return self.copy.is_sound and finding.copy is not None


def survey(disk: Disk, root: str, copy: CatalogCopy) -> Survey:
    """Read everything; nothing is changed."""
    found = Survey(copy.read())
    kinds = [name for name in disk.listdir(root) if "." not in name] if disk.exists(root) else []
    for kind in kinds:
        found.folders.append(f"{root}/{kind}")
        for file in disk.listdir(f"{root}/{kind}"):
            path = f"{root}/{kind}/{file}"
            if file.endswith(paths.UNFINISHED):
                found.unfinished.append(path)
            elif file.endswith(documents.SUFFIX):
                _look(disk, found, kind, file, path)
    if found.copy.is_sound:  # otherwise the damaged line may be the one that recorded its removal
        seen = {*found.texts, *((finding.kind, finding.file) for finding in found.findings)}
        found.findings += [
            CatalogFinding(kind, file, f"{root}/{kind}/{file}", MISSING, None, text)
            for (kind, file), text in found.copy.texts.items()
            if (kind, file) not in seen
        ]
    return found


def _look(disk: Disk, found: Survey, kind: str, file: str, path: str) -> None:
    text = read_whole(disk, path)
    copied = found.copy.texts.get((kind, file))
    try:
        document = documents.read(text, path)
        if not document.is_checked and found.copy.is_sound and copied not in (None, text):
            raise CorruptCatalog(path, "it has no checksum and differs from the catalog's copy")
    except CorruptCatalog as error:
        found.findings.append(CatalogFinding(kind, file, path, error.reason, text, copied))
        return
    found.texts[kind, file] = text if copied != text else copied  # one object for both: there may be many


def put_back(disk: Disk, data_dir: str, finding: CatalogFinding, text: bytes) -> str:
    """Replace a damaged document and keep the old file in damaged/; returns a phrase that says where."""
    kept = ""
    if finding.text is not None:
        kept = f"; the damaged file is now {keep_copy(disk, data_dir, finding.path, finding.text)}"
    make_folder(disk, finding.path.rpartition("/")[0])
    write_atomically(disk, finding.path, text)
    return kept


def restore(disk: Disk, data_dir: str, finding: CatalogFinding) -> str:
    """Restore a document from the catalog's copy; returns a message."""
    assert finding.copy is not None
    kept = put_back(disk, data_dir, finding, finding.copy)
    return f"{finding.path} was damaged ({finding.reason}) and was restored from the catalog's copy{kept}"
