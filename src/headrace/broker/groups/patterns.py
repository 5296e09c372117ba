"""Topic patterns of subscriptions: Kafka's brokers use RE2 for them as well."""

from headrace.broker import patterns
from headrace.errors import InvalidPattern

PATTERN_CHARACTERS_MAX = 512


def compile_pattern(pattern: str) -> patterns.Pattern:
    if len(pattern) > PATTERN_CHARACTERS_MAX:
        raise InvalidPattern(f"a pattern of {len(pattern)} characters")
    return patterns.compile_pattern(pattern)
