"""What a crash leaves of a simulated disk. The rules are stated in `simdisk`."""

from random import Random

from tests.crash.inodes import File, Folder, NameChange, Node, survivor
from tests.crash.tree import Tree


def killed(disk: Tree, found: Tree) -> None:
    """Make `found` the disk as the next process finds it when this one dies now."""
    copies: dict[int, Node] = {}

    def copy(node: Node) -> Node:
        known = copies.get(id(node))
        if known is not None:
            return known
        made: Node
        if isinstance(node, File):
            made = File(node.durable)
            made.data = node.durable if node.data is node.durable else bytes(node.data)
            made.pending = list(node.pending)
            made.diverged = node.diverged
            copies[id(node)] = made
            return made
        made = copies[id(node)] = Folder()
        made.names = {name: copy(child) for name, child in node.names.items()}
        made.durable = {name: copy(child) for name, child in node.durable.items()}
        return made

    root = copy(disk.root)
    assert isinstance(root, Folder)
    found.root = root
    for change in disk.name_changes:
        found.name_changes.append(
            NameChange(
                change.sequence,
                copy(change.node),
                None if change.folder is None else _folder(copy(change.folder)),
                change.name,
                None if change.gone_folder is None else _folder(copy(change.gone_folder)),
                change.gone_name,
            )
        )


def cut(disk: Tree, found: Tree, rng: Random, mode: str, *, stale: bool) -> None:
    """Make `found` one of the disks that could be found when the power fails now."""
    horizon = _horizon(disk, rng) if mode == "prefix" else None
    names_kept = _names_kept(disk, rng, mode, horizon)
    survivors: dict[int, File] = {}
    donors = _donors(disk) if stale else []
    noise = rng.random() if mode == "mixed" else 0.0

    def survive(node: File) -> File:
        known = survivors.get(id(node))
        if known is None:
            known = survivors[id(node)] = File(survivor(node, rng, mode, horizon, noise, donors))
        return known

    changed: dict[int, dict[str, Node]] = {}

    def names_of(folder: Folder) -> dict[str, Node]:
        return changed.get(id(folder), folder.durable)

    def rebuild(folder: Folder) -> Folder:
        made = Folder()
        for name, child in names_of(folder).items():
            made.names[name] = rebuild(child) if isinstance(child, Folder) else survive(child)
        made.durable = dict(made.names)
        return made

    for change in names_kept:
        if change.gone_folder is not None:
            names = changed.setdefault(id(change.gone_folder), dict(names_of(change.gone_folder)))
            names.pop(change.gone_name, None)
        if change.folder is not None:
            names = changed.setdefault(id(change.folder), dict(names_of(change.folder)))
            names[change.name] = change.node
    found.root = rebuild(disk.root)


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
