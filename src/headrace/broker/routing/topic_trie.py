"""Trie of topic binding patterns: `*` matches one word, `#` any number of words, including none."""

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Node(Generic[T]):
    __slots__ = ("children", "values")

    def __init__(self) -> None:
        self.children: dict[str, Node[T]] = {}
        self.values: list[T] = []


class TopicTrie(Generic[T]):
    """Values by pattern. The time to match depends on the key and the wildcards on its way, not on the patterns."""

    def __init__(self) -> None:
        self._root: Node[T] = Node()

    def add(self, pattern: str, value: T) -> None:
        node = self._root
        for word in pattern.split("."):
            node = node.children.setdefault(word, Node())
        node.values.append(value)

    def remove(self, pattern: str, value: T) -> None:
        path = [self._root]
        words = pattern.split(".")
        for word in words:
            path.append(path[-1].children[word])
        path[-1].values.remove(value)
        for parent, word, child in zip(path[-2::-1], reversed(words), path[:0:-1], strict=True):
            if child.values or child.children:
                break
            del parent.children[word]

    def match(self, key: str) -> Iterator[T]:
        """The values of all matching patterns; may contain duplicates."""
        words = key.split(".")
        # Visited (node, position) pairs: without them `#.#.#.#` would try every way to split the key.
        seen: set[tuple[int, int]] = set()
        stack = [(self._root, 0)]
        while stack:
            node, at = stack.pop()
            if (id(node), at) in seen:
                continue
            seen.add((id(node), at))
            children = node.children
            if at == len(words):
                yield from node.values
            else:
                child = children.get(words[at])
                if child is not None and words[at] not in ("*", "#"):
                    stack.append((child, at + 1))
                child = children.get("*")
                if child is not None:
                    stack.append((child, at + 1))
            child = children.get("#")
            if child is not None:
                stack.extend((child, position) for position in range(at, len(words) + 1))
