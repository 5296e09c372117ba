"""Files, folders and name changes of the simulated disk, and the content of a file after a power cut.
`simdisk` states the rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

SECTOR = 512


class File:
    """One inode. `data` is the content that readers see, `durable` the content on the device, `pending` the
    difference: (sequence, position, bytes) for a write, (sequence, size, None) for a truncation."""

    __slots__ = ("data", "diverged", "durable", "links", "locked", "opened", "pending")

    def __init__(self, durable: bytes = b"") -> None:
        self.data: bytes | bytearray = durable
        self.durable = durable
        self.pending: list[tuple[int, int, bytes | None]] = []
        self.diverged = False  # after a failed sync, the page cache and the device differ
        self.opened = 0
        self.links = 1
        self.locked = False


class Folder:
    __slots__ = ("durable", "names")

    def __init__(self) -> None:
        self.names: dict[str, File | Folder] = {}
        self.durable: dict[str, File | Folder] = {}


Node = File | Folder


@dataclass(slots=True)
class NameChange:
    """`node` gets the name (folder, name), unless folder is None, and loses the name (gone_folder, gone_name)."""

    sequence: int
    node: Node
    folder: Folder | None
    name: str
    gone_folder: Folder | None = None
    gone_name: str = ""

    def touches(self, folder: Folder) -> bool:
        return self.folder is folder or self.gone_folder is folder

    def apply(self) -> None:
        if self.gone_folder is not None:
            self.gone_folder.durable.pop(self.gone_name, None)
        if self.folder is not None:
            self.folder.durable[self.name] = self.node


def replay(durable: bytes, pending: Sequence[tuple[int, int, bytes | None]]) -> bytearray:
    content = bytearray(durable)
    for _, position, data in pending:
        put(content, position, data)
    return content


def put(content: bytearray, position: int, data: bytes | None) -> None:
    if data is None:  # truncate
        if position <= len(content):
            del content[position:]
        else:
            content.extend(bytes(position - len(content)))
        return
    if position > len(content):
        content.extend(bytes(position - len(content)))
    content[position : position + len(data)] = data


def survivor(node: File, rng: Random, mode: str, horizon: int | None, noise: float, donors: list[bytes]) -> bytes:
    if not node.pending or mode == "lost":
        return node.durable
    if mode == "kept":
        return bytes(replay(node.durable, node.pending))
    if horizon is not None:
        return _stopped_at(node, horizon, rng)
    return _mixed(node, rng, noise, donors)


def _stopped_at(node: File, horizon: int, rng: Random) -> bytes:
    """All writes before the horizon, none after it, and a part of the write at the horizon."""
    whole = [entry for entry in node.pending if entry[0] < horizon]
    content = replay(node.durable, whole)
    for _, position, data in node.pending[len(whole) : len(whole) + 1]:
        if data is not None:
            put(content, position, data[: _tear(position, len(data), rng)])
    return bytes(content)


def _tear(position: int, size: int, rng: Random) -> int:
    cut = rng.randrange(size + 1)
    if rng.random() < 0.7:  # at a sector boundary
        cut = max(0, (position + cut) // SECTOR * SECTOR - position)
    return cut


def _mixed(node: File, rng: Random, noise: float, donors: list[bytes]) -> bytes:
    """A mix of sectors from two moments, with the size of either."""
    count = len(node.pending)
    dice = rng.random()
    if dice < 0.15:
        return node.durable
    if dice < 0.3:
        return bytes(replay(node.durable, node.pending))
    earlier = rng.randrange(count) if rng.random() < 0.4 else 0
    later = rng.randint(earlier + 1, count) if rng.random() < 0.4 else count
    old = replay(node.durable, node.pending[:earlier])
    new = bytearray(old)
    for _, position, data in node.pending[earlier:later]:
        put(new, position, data)
    size = len(old) if rng.random() < 0.3 else len(new)
    sectors = range(0, size, SECTOR)
    share = rng.choice((0.1, 0.5, 0.5, 0.9))
    fill = bytes(size - len(old)) if size > len(old) else b""
    if fill and noise > 0.85:
        stale = donors and rng.random() < 0.5
        fill = _stale(donors, rng, len(old), size) if stale else rng.randbytes(len(fill))
    result = old[:size] + fill
    changed = []
    for start in sectors:
        if rng.random() < share:
            part = new[start : start + SECTOR]
            if part != result[start : start + len(part)]:
                changed.append(start)
                result[start : start + len(part)] = part
    if changed and rng.random() < 0.3:  # tear one sector inside: new bytes, then old bytes
        start = rng.choice(changed)
        inside = rng.randrange(SECTOR)
        before = (old[:size] + fill)[start + inside : start + SECTOR]
        result[start + inside : start + inside + len(before)] = before
    return bytes(result[:size])


def _stale(donors: list[bytes], rng: Random, start: int, end: int) -> bytes:
    donor = rng.choice(donors)
    return donor[start:end].ljust(end - start, b"\0")
