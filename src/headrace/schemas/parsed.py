"""A cache of parsed schemas: a new version is compared with earlier ones, and parsing takes ten times as long."""

from collections import OrderedDict
from collections.abc import Mapping

from headrace.schemas.kinds import Schema

CHARS_MAX = 2 << 20  # of all texts including references; the parsed form takes up to twenty times as much
CHARS_MIN = 200  # the least that a schema counts for

Key = tuple[str, str, tuple[tuple[str, str], ...]]


class Parsed:
    """An LRU cache. Parsed schemas are immutable, so callers may share them."""

    def __init__(self, chars_max: int = CHARS_MAX) -> None:
        self._chars_max = chars_max
        self._chars = 0
        self._kept: OrderedDict[Key, Schema] = OrderedDict()

    @staticmethod
    def key(kind: str, text: str, references: Mapping[str, str]) -> Key:
        """Uses the texts of references, not their versions: a deleted version may be registered again with another
        text."""
        return kind, text, tuple(references.items())

    def get(self, key: Key) -> Schema | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def keep(self, key: Key, schema: Schema) -> None:
        if key in self._kept or _chars(key) > self._chars_max:
            return
        self._kept[key] = schema
        self._chars += _chars(key)
        while self._chars > self._chars_max:
            gone, _ = self._kept.popitem(last=False)
            self._chars -= _chars(gone)


def _chars(key: Key) -> int:
    _, text, references = key
    return CHARS_MIN + len(text) + sum(len(referred) for _, referred in references)
