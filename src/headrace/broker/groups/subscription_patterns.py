"""Topic patterns of subscriptions: Kafka's brokers use RE2 for them as well."""

from collections.abc import Callable, Mapping

from headrace.broker.access import regex
from headrace.errors import InvalidPattern

PATTERN_CHARACTERS_MAX = 512
PATTERNS_MAX = 100  # of which is known what they match


def compile_pattern(pattern: str) -> regex.Pattern:
    if len(pattern) > PATTERN_CHARACTERS_MAX:
        raise InvalidPattern(f"a pattern of {len(pattern)} characters")
    return regex.compile_pattern(pattern)


class Matches:
    """Which topics patterns match. Members mostly say the same pattern, and topics seldom change: it is tried once.

    `topics` is the same object as long as none comes, goes or grows.
    """

    def __init__(self, topics: Callable[[], Mapping[str, int]]) -> None:
        self._topics = topics
        self._found: dict[str, frozenset[str]] = {}  # by pattern, of the topics in _found_in
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
        """Those that whoever said the pattern may read."""
        matching = self.of(pattern)
        return matching if may_read is None else frozenset(topic for topic in matching if may_read(topic))
