"""Manual repair of the catalog, for damaged documents that a start cannot restore from the catalog's copy.

A start restores everything it can be certain of. A person decides about the other documents, one by one: accept the
document as it is, take the version in the copy although the copy is damaged, too, or drop it. Nothing is deleted.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from headrace.errors import CorruptCatalog, InvalidInput
from headrace.log.catalog import document
from headrace.log.catalog.copy import CatalogCopy, CopyContent
from headrace.log.catalog.survey import CatalogFinding, Survey, put_back, survey
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, RealDisk
from headrace.log.disk.quarantine import quarantine
from headrace.log.standby import follower

T = TypeVar("T")


class DocumentFacts(NamedTuple):
    kind: str
    path: str
    problem: str
    says: str | None  # content of the file, readable or not
    copy: str | None  # the version in the catalog's copy
    restores_itself: bool  # the next start restores it from the copy
    can_be_taken: bool  # it can be parsed and has the right name


class CatalogRepair(NamedTuple):
    path: str
    what: str


def examine(root: str, disk: Disk | None = None) -> list[DocumentFacts]:
    """All documents that cannot be trusted. The broker must be stopped; nothing is changed."""
    return _locked(root, disk or RealDisk(), lambda catalog: [catalog.facts(f) for f in catalog.survey.findings])


def decide(
    root: str,
    *,
    as_is: Sequence[str] = (),
    from_copy: Sequence[str] = (),
    without: Sequence[str] = (),
    accept_loss: bool = False,
    disk: Disk | None = None,
) -> list[CatalogRepair]:
    """Apply decisions about documents, named by their path or file name. All names are checked before anything is
    changed. Documents that the next start can restore are left to it. After an interruption, call it again: the rest is
    as it was."""

    def work(catalog: "_Catalog") -> list[CatalogRepair]:
        taken = [(catalog.find(name), catalog.take) for name in as_is]
        copied = [(catalog.find(name), catalog.put_copy) for name in from_copy]
        dropped = [(catalog.find(name, sound=True), catalog.drop) for name in without]
        chosen = {finding.path for finding, _ in (*taken, *copied, *dropped)}
        left = [(f, catalog.give_up) for f in catalog.not_restorable() if accept_loss and f.path not in chosen]
        if len(chosen) < len(taken) + len(copied) + len(dropped):
            raise InvalidInput("a document is named twice: choose one decision for it")
        for finding, _ in taken:
            document.parse(finding.text or b"", finding.path)
        for finding, _ in copied:
            if finding.copy is None:
                raise InvalidInput(f"the catalog's copy does not contain {finding.path}")
        done = [CatalogRepair(finding.path, act(finding)) for finding, act in (*taken, *copied, *dropped, *left)]
        if done:
            catalog.settle_copy()
        return done

    return _locked(root, disk or RealDisk(), work)


class _Catalog:
    def __init__(self, root: str, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self._folder = f"{root}/{paths.CATALOG}"
        self._copy = CatalogCopy(disk, self._folder)
        self.survey: Survey = survey(disk, self._folder, self._copy)

    def facts(self, finding: CatalogFinding) -> DocumentFacts:
        return DocumentFacts(
            finding.kind,
            finding.path,
            finding.reason,
            _text(finding.text),
            _text(finding.copy),
            self.survey.can_restore(finding),
            _can_be_taken(finding),
        )

    def not_restorable(self) -> list[CatalogFinding]:
        return [finding for finding in self.survey.findings if not self.survey.can_restore(finding)]

    def find(self, name: str, *, sound: bool = False) -> CatalogFinding:
        """A damaged document; with `sound`, any document."""
        for finding in self.survey.findings:
            if name in (finding.path, finding.file):
                return finding
        for (kind, file), text in self.survey.texts.items():
            path = f"{self._folder}/{kind}/{file}"
            if sound and name in (path, file):
                return CatalogFinding(kind, file, path, "", text, self.survey.copy.texts.get((kind, file)))
        raise InvalidInput(f"{name} is not a {'' if sound else 'damaged '}document of {self._folder}")

    def take(self, finding: CatalogFinding) -> str:
        content = document.parse(finding.text or b"", finding.path)
        # Remains of a damaged checksum are not part of the document: the real one is always the last member.
        content = {key: value for key, value in content.items() if not document.is_like_checksum(key)}
        kept = put_back(self._disk, self._root, finding, document.sealed(content))
        return f"accepted as it is, with a new checksum{kept}"

    def put_copy(self, finding: CatalogFinding) -> str:
        assert finding.copy is not None
        document.read(finding.copy, finding.path)
        return f"taken from the catalog's copy{put_back(self._disk, self._root, finding, finding.copy)}"

    def give_up(self, finding: CatalogFinding) -> str:
        return f"quarantined: {quarantine(self._disk, self._root, finding.path)}"

    def drop(self, finding: CatalogFinding) -> str:
        """Removes it from the copy first: otherwise the next start would restore it."""
        if self.survey.copy.is_sound:
            self.survey.copy.texts.pop((finding.kind, finding.file), None)
            self._copy.settle(CopyContent(is_there=True), self.survey.copy.texts)
        return "quarantined" if finding.text is None else self.give_up(finding)

    def settle_copy(self) -> None:
        """Bring the copy up to date with the decisions. While other documents are damaged it stays as it is, because it
        may be needed to repair them."""
        found = survey(self._disk, self._folder, self._copy)
        if not found.findings:
            if found.lost_with_the_copy:
                quarantine(self._disk, self._root, self._copy.path)
            self._copy.settle(found.copy, found.texts)


def _locked(root: str, disk: Disk, work: Callable[[_Catalog], T]) -> T:
    lock = disk.lock(f"{root}/{paths.LOCK}")
    try:
        follower.check_whole(disk, root)
        return work(_Catalog(root, disk))
    finally:
        disk.close(lock)


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", "replace")


def _can_be_taken(finding: CatalogFinding) -> bool:
    try:
        document.parse(finding.text or b"", finding.path)
    except CorruptCatalog:
        return False
    return True
