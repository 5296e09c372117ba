"""The files and folders of the simulated disk: lookup, inspection and deliberate damage."""

import errno
import os
from collections.abc import Iterator

from tests.crash.inodes import File, Folder, NameChange, Node


class Tree:
    def __init__(self) -> None:
        self.root = Folder()
        self.name_changes: list[NameChange] = []  # not durable yet, oldest first
        self.used = 0
        self._files: dict[int, tuple[File, str, bool]] = {}  # open files: file, path, read only
        self._open_folders: dict[int, str] = {}  # path by descriptor
        self._folders: dict[str, Folder] = {}  # cache by path, cleared when a folder loses its name

    def walk(self) -> Iterator[tuple[str, Node]]:
        """Yield every file and folder with its path, sorted by name, then those that have no name any more."""
        seen: set[int] = set()
        for path, node in self._named():
            seen.add(id(node))
            yield path, node
        for node, path, _ in list(self._files.values()):
            if id(node) not in seen:
                seen.add(id(node))
                yield path, node
        for change in self.name_changes:  # replaced or removed, but still on the device
            if id(change.node) not in seen:
                seen.add(id(change.node))
                yield change.gone_name, change.node

    def files(self) -> dict[str, bytes]:
        """Path and visible content of every file."""
        return {path: bytes(node.data) for path, node in self._named() if isinstance(node, File)}

    def key(self) -> int:
        """A hash of the content. Recovery depends only on the content, so equal images need one recovery."""
        parts: list[object] = []
        folders = [self.root]
        while folders:
            names = folders.pop().names
            parts.append(len(names))
            for name in sorted(names):
                node = names[name]
                parts.append(name)
                if isinstance(node, Folder):
                    folders.append(node)
                    continue
                parts.append(bytes(node.data))  # bytes cache their hash, and images share them
                if node.pending or node.diverged:
                    parts.append((node.durable, node.diverged, tuple(node.pending)))
        for change in self.name_changes:
            parts.append((change.sequence, change.name, change.gone_name))
        return hash(tuple(parts))

    def open_paths(self) -> list[str]:
        return sorted([*(path for _, path, _ in self._files.values()), *self._open_folders.values()])

    def flip(self, path: str, position: int, mask: int = 1) -> None:
        node = self._file_at(path)
        content = bytearray(node.data)
        content[position] ^= mask
        self._settle(node, bytes(content))

    def replace(self, path: str, content: bytes) -> None:
        """Give the file another durable content, as bit rot or an operator would."""
        self._settle(self._file_at(path), content)

    def remove(self, path: str) -> None:
        folder, name = self._parent(path)
        self._drop_name(folder, name)
        folder.durable.pop(name, None)

    def unsynced(self, payload: bytes) -> str | None:
        """Return why a power cut now could lose `payload`, or None if it is in a durable file with a durable path.

        Every confirm is checked with this.
        """
        reasons = []
        durable = self._durable_names()
        for path, node in self._named():
            if not isinstance(node, File) or payload not in node.data:
                continue
            if payload not in node.durable:
                reasons.append(f"{path} is not synced")
            elif id(node) not in durable:
                reasons.append(f"{path} is synced, but its name is not")
            else:
                return None
        return "; ".join(reasons) or "it is in no file"

    # Helpers.

    def _named(self) -> Iterator[tuple[str, Node]]:
        stack: list[tuple[str, Node]] = [("", self.root)]
        while stack:
            path, node = stack.pop()
            yield path or "/", node
            if isinstance(node, Folder):
                names = node.names
                stack.extend([(f"{path}/{name}", names[name]) for name in sorted(names, reverse=True)])

    def _durable_names(self) -> set[int]:
        reached: set[int] = set()
        stack: list[Node] = [self.root]
        while stack:
            node = stack.pop()
            reached.add(id(node))
            if isinstance(node, Folder):
                stack.extend(node.durable.values())
        return reached

    def _settle(self, node: File, content: bytes) -> None:
        node.data = node.durable = content
        node.pending = []
        node.diverged = False

    def _count_used(self) -> None:
        self.used = 0
        folders = [self.root]
        while folders:
            for node in folders.pop().names.values():
                if isinstance(node, Folder):
                    folders.append(node)
                else:
                    self.used += len(node.data)

    def _drop_name(self, folder: Folder, name: str) -> None:
        if isinstance(folder.names.pop(name), Folder):
            self._folders.clear()

    def _parent(self, path: str) -> tuple[Folder, str]:
        above, _, name = path.rpartition("/")
        folder = self._folders.get(above) or self._folder_at(above)
        if folder is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return folder, name

    def _find(self, path: str) -> Node | None:
        above, _, name = path.rpartition("/")
        folder = self._folders.get(above) or self._folder_at(above)
        return folder if folder is None or not name else folder.names.get(name)

    def _folder_at(self, path: str) -> Folder | None:
        node: Node | None = self.root
        for part in path.split("/"):
            if part:
                if not isinstance(node, Folder):
                    return None
                node = node.names.get(part)
        if not isinstance(node, Folder):
            return None
        self._folders[path] = node
        return node

    def _node(self, path: str) -> Node:
        node = self._find(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return node

    def _file_at(self, path: str) -> File:
        node = self._node(path)
        assert isinstance(node, File)
        return node
