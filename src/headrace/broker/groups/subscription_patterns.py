"""Regular expressions in subscriptions. They use RE2, as in Kafka's broker."""

from collections.abc import Callable, Mapping

from headrace.broker.access import regex
from headrace.errors import InvalidPattern

PATTERN_CHARACTERS_MAX = 512
PATTERNS_MAX = 100  # whose matches are cached


def compile_pattern(pattern: str) -> regex.Pattern:
    if len(pattern) > PATTERN_CHARACTERS_MAX:
        raise InvalidPattern(f"a pattern of {len(pattern)} characters; at most {PATTERN_CHARACTERS_MAX} are allowed")
    return regex.compile_pattern(pattern)


class Matches:
    """A cache of the topics that patterns match: most members use the same pattern, and topics seldom change.

    `topics` returns the same object until a topic is created, deleted or gets more partitions.
    """

    def __init__(self, topics: Callable[[], Mapping[str, int]]) -> None:
        self._topics = topics
        self._found: dict[str, frozenset[str]] = {}  # pattern -> matching topics of _found_in
        self._found_in: Mapping[str, int] | None = None

    def of(self, pattern: str) -> frozenset[str]:
        topics = self._topics()
        if topics is not self._found_in or len(self._found) >= PATTERNS_MAX:
            self._found_in, self._found = topics, {}
        found = self._found.get(pattern)
        if found is None:
            matches = compile_pattern(pattern).fullmatch
            found = self._found[pattern] = frozenset(topic for topic in topics if matches(topic))
        return found

    def readable(self, pattern: str, may_read: Callable[[str], bool] | None) -> frozenset[str]:
        """The matching topics that the member may read."""
        matching = self.of(pattern)
        return matching if may_read is None else frozenset(topic for topic in matching if may_read(topic))
