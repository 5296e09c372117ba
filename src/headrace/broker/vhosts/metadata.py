"""What is written about a virtual host, and what its queues are when nobody says."""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.broker.queues.queue_arguments import CLASSIC, QUORUM, STREAM
from headrace.errors import InvalidInput

FIELDS = ("description", "tags", "default_queue_type")
TEXT_CHARACTERS_MAX = 1024
TAGS_MAX = 64


class Metadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    description: str = ""
    tags: tuple[str, ...] = ()
    default_queue_type: str = CLASSIC


def parse_metadata(fields: Mapping[str, Any]) -> Metadata:
    """As in RabbitMQ: what is not said is as it is by default, whatever it was before."""
    description, kind = fields.get("description") or "", fields.get("default_queue_type") or CLASSIC
    if not isinstance(description, str) or len(description) > TEXT_CHARACTERS_MAX:
        raise InvalidInput(f"the description of a vhost is a text of up to {TEXT_CHARACTERS_MAX:,} characters")
    kind = CLASSIC if kind == "undefined" else kind  # RabbitMQ's word for it
    if kind not in (CLASSIC, QUORUM, STREAM):
        raise InvalidInput(f"the type of a queue is {CLASSIC}, {QUORUM} or {STREAM}, not {str(kind)[:80]!r}")
    return Metadata(description=description, tags=_tags(fields.get("tags") or ()), default_queue_type=kind)


def _tags(given: Any) -> tuple[str, ...]:
    """A list, or words with commas between them."""
    listed = given.split(",") if isinstance(given, str) else given
    if not isinstance(listed, list | tuple) or not all(isinstance(tag, str) for tag in listed):
        raise InvalidInput("the tags of a vhost are a list of words, or words with commas between them")
    found = tuple(dict.fromkeys(tag.strip() for tag in listed if tag.strip()))
    if len(found) > TAGS_MAX or any(len(tag) > TEXT_CHARACTERS_MAX for tag in found):
        raise InvalidInput(f"a vhost has at most {TAGS_MAX} tags of up to {TEXT_CHARACTERS_MAX:,} characters")
    return found
