"""The state of a simulated disk after a crash. `simdisk` states the rules."""

from random import Random

from tests.crash.inodes import File, Folder, NameChange, Node, survivor
from tests.crash.tree import Tree


def killed(disk: Tree, found: Tree) -> None:
    """Fill `found` with the disk that the next process finds if this process is killed now."""
    copies: dict[int, Node] = {}
    found.root = _folder(_copy(disk.root, copies))
    for change in disk.name_changes:
        found.name_changes.append(
            NameChange(
                change.sequence,
                _copy(change.node, copies),
                None if change.folder is None else _folder(_copy(change.folder, copies)),
                change.name,
                None if change.gone_folder is None else _folder(_copy(change.gone_folder, copies)),
                change.gone_name,
            )
        )


# Not a recursive closure: its reference cycle would keep all copies alive until a garbage collection.


def _copy(node: Node, copies: dict[int, Node]) -> Node:
    known = copies.get(id(node))
    if known is not None:
        return known
    if isinstance(node, File):
        file = copies[id(node)] = File(node.durable)
        if node.data is not node.durable:
            file.data = bytes(node.data)
        if node.pending:
            file.pending = list(node.pending)
        file.diverged = node.diverged
        return file
    folder = copies[id(node)] = Folder()
    folder.names = {name: _copy(child, copies) for name, child in node.names.items()}
    folder.durable = {name: _copy(child, copies) for name, child in node.durable.items()}
    return folder


def cut(disk: Tree, found: Tree, rng: Random, mode: str, *, stale: bool) -> None:
    """Fill `found` with one of the disks that a power cut at this moment could leave."""
    found.root = _Cut(disk, rng, mode, stale).rebuild(disk.root)


class _Cut:
    def __init__(self, disk: Tree, rng: Random, mode: str, stale: bool) -> None:
        self._rng = rng
        self._mode = mode
        self._horizon = _horizon(disk, rng) if mode == "prefix" else None
        names_kept = _names_kept(disk, rng, mode, self._horizon)
        self._donors = _donors(disk) if stale else []
        self._noise = rng.random() if mode == "mixed" else 0.0
        self._survivors: dict[int, File] = {}
        self._changed: dict[int, dict[str, Node]] = {}  # names by folder
        for change in names_kept:
            if change.gone_folder is not None:
                self._names_to_change(change.gone_folder).pop(change.gone_name, None)
            if change.folder is not None:
                self._names_to_change(change.folder)[change.name] = change.node

    def _names_to_change(self, folder: Folder) -> dict[str, Node]:
        names = self._changed.get(id(folder))
        if names is None:
            names = self._changed[id(folder)] = dict(folder.durable)
        return names

    def rebuild(self, folder: Folder) -> Folder:
        made = Folder()
        names = made.names
        for name, child in self._changed.get(id(folder), folder.durable).items():
            names[name] = self.rebuild(child) if isinstance(child, Folder) else self._survive(child)
        made.durable = dict(names)
        return made

    def _survive(self, node: File) -> File:
        known = self._survivors.get(id(node))
        if known is None:
            content = node.durable
            if node.pending:
                content = survivor(node, self._rng, self._mode, self._horizon, self._noise, self._donors)
            known = self._survivors[id(node)] = File(content)
        return known


def _horizon(disk: Tree, rng: Random) -> int:
    sequences = [change.sequence for change in disk.name_changes]
    for _, node in disk.walk():
        if isinstance(node, File):
            sequences.extend(entry[0] for entry in node.pending)
    return rng.choice(sequences) if sequences else 0


def _names_kept(disk: Tree, rng: Random, mode: str, horizon: int | None) -> list[NameChange]:
    if mode == "lost":
        return []
    if mode == "kept":
        return disk.name_changes
    if horizon is not None:
        return [change for change in disk.name_changes if change.sequence < horizon]
    return [change for change in disk.name_changes if rng.random() < 0.5]


def _donors(disk: Tree) -> list[bytes]:
    return [node.durable for _, node in disk.walk() if isinstance(node, File) and node.durable]


def _folder(node: Node) -> Folder:
    assert isinstance(node, Folder)
    return node
