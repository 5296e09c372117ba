"""Settings of a virtual host: its limits, and its metadata with the default queue type."""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.broker.queues.queue_arguments import CLASSIC, QUORUM, STREAM
from headrace.errors import InvalidInput

CONNECTIONS, QUEUES = "max-connections", "max-queues"
LIMITS = (CONNECTIONS, QUEUES)
LIMIT_MAX = 1 << 31
METADATA_FIELDS = ("description", "tags", "default_queue_type")
TEXT_CHARACTERS_MAX = 1024
TAGS_MAX = 64

Limits = dict[str, int]


def parse_limits(given: Any) -> Limits:
    """RabbitMQ's vhost limits: whole numbers, negative for no limit."""
    if not isinstance(given, Mapping):
        raise InvalidInput("the limits of a vhost must be an object")
    for name, value in given.items():
        if name not in LIMITS:
            raise InvalidInput(f"unknown vhost limit {str(name)[:80]!r}: expected {' or '.join(LIMITS)}")
        if type(value) is not int or abs(value) > LIMIT_MAX:
            raise InvalidInput(f"{name} of a vhost must be a whole number up to {LIMIT_MAX:,}, not {str(value)[:80]!r}")
    return dict(given)


def limit_of(limits: Limits, name: str) -> int | None:
    """None if there is no limit."""
    found = limits.get(name, -1)
    return found if found >= 0 else None


class VhostMetadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    description: str = ""
    tags: tuple[str, ...] = ()
    default_queue_type: str = CLASSIC


def parse_metadata(fields: Mapping[str, Any]) -> VhostMetadata:
    """As in RabbitMQ, missing fields get their defaults, not their former values."""
    description, kind = fields.get("description") or "", fields.get("default_queue_type") or CLASSIC
    if not isinstance(description, str) or len(description) > TEXT_CHARACTERS_MAX:
        raise InvalidInput(f"the description of a vhost must be a string of up to {TEXT_CHARACTERS_MAX:,} characters")
    kind = CLASSIC if kind == "undefined" else kind  # RabbitMQ exports this for "no default"
    if kind not in (CLASSIC, QUORUM, STREAM):
        raise InvalidInput(f"unknown queue type {str(kind)[:80]!r}: expected {CLASSIC}, {QUORUM} or {STREAM}")
    return VhostMetadata(description=description, tags=_tags(fields.get("tags") or ()), default_queue_type=kind)


def _tags(given: Any) -> tuple[str, ...]:
    """A list, or names separated by commas."""
    listed = given.split(",") if isinstance(given, str) else given
    if not isinstance(listed, list | tuple) or not all(isinstance(tag, str) for tag in listed):
        raise InvalidInput("the tags of a vhost must be a list of strings, or a string with commas between the tags")
    found = tuple(dict.fromkeys(tag.strip() for tag in listed if tag.strip()))
    if len(found) > TAGS_MAX or any(len(tag) > TEXT_CHARACTERS_MAX for tag in found):
        raise InvalidInput(f"a vhost has at most {TAGS_MAX} tags of up to {TEXT_CHARACTERS_MAX:,} characters")
    return found
