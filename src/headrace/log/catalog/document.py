"""Documents of the catalog: JSON for people to read, with a checksum as its last member.

    {
      "identity": [
        "/",
        "orders"
      ],
      "kind": "topic",
      "crc32c": "2a34649b"
    }

The checksum is over the bytes before its own line, as they are, spaces included, and that line has one form only: so
every flipped bit of a file is noticed, wherever it lies. Documents of earlier versions have none. One that has lost
its checksum is not taken for such a one, as a flipped bit cannot make the member's name disappear.
"""

import hashlib
import re
from typing import Any, NamedTuple

import msgspec

from headrace.errors import CorruptCatalog
from headrace.log.disk.paths import slug
from headrace.record.batch.crc32c import crc32c

SUFFIX = ".json"
CHECKSUM = "crc32c"
Identity = tuple[str, ...]  # such as (vhost, name): what makes a thing of one kind different from another

_LAST_LINE = re.compile(rb',\n  "crc32c": "([0-9a-f]{8})"\n}\n')
_LAST_LINE_BYTES = len(b',\n  "crc32c": "00000000"\n}\n')
_END = b"\n}"


class Document(NamedTuple):
    content: dict[str, Any]  # without the checksum
    is_checked: bool  # it had one


def sealed(content: dict[str, Any]) -> bytes:
    """The file of a document. It has a member at least: its identity."""
    text = msgspec.json.format(msgspec.json.encode(content), indent=2)
    assert text.endswith(_END)
    body = text.removesuffix(_END)
    return body + b',\n  "crc32c": "%08x"\n}\n' % crc32c(body)


def read(text: bytes, path: str) -> Document:
    """CorruptCatalog, which names the file, unless everything in it can be believed."""
    last = _LAST_LINE.fullmatch(text, max(0, len(text) - _LAST_LINE_BYTES))
    if last is not None and int(last[1], 16) != crc32c(text[: last.start()]):
        raise CorruptCatalog(path, "its checksum is not that of its content")
    content = parse(text, path)
    if last is None and any(map(is_like_checksum, content)):
        raise CorruptCatalog(path, "its checksum cannot be read")
    content.pop(CHECKSUM, None)
    return Document(content, last is not None)


def content_of(text: bytes) -> dict[str, Any]:
    """What a document says that has been read before, and was believed."""
    content = msgspec.json.decode(text, type=dict[str, Any])
    content.pop(CHECKSUM, None)
    return content


def is_like_checksum(key: str) -> bool:
    """The checksum's name, or what a flipped bit made of it."""
    return key[:3] == CHECKSUM[:3] or key[3:] == CHECKSUM[3:]


def parse(text: bytes, path: str) -> dict[str, Any]:
    """What a document says, whether or not it can be believed. CorruptCatalog when it says nothing, or is not the one
    that belongs under this name."""
    try:
        content = msgspec.json.decode(text, type=dict[str, Any])
        identity = tuple(content["identity"])
    except KeyError:
        raise CorruptCatalog(path, "it does not say what it describes") from None
    except (msgspec.MsgspecError, UnicodeError, TypeError) as error:
        raise CorruptCatalog(path, str(error)) from None
    if not identity or not all(isinstance(part, str) for part in identity):
        raise CorruptCatalog(path, f"it describes {identity!r}, which is no name")
    if path.rpartition("/")[2] != file_name(identity):
        raise CorruptCatalog(path, f"it describes {identity!r}, which would be in {file_name(identity)}")
    return content


def file_name(identity: Identity) -> str:
    """Readable in part, unique by its hash: 128 bits of SHA-256 over the parts with their lengths."""
    digest = hashlib.sha256()
    for part in identity:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(4, "big") + data)
    return f"{slug(identity[-1])}-{digest.hexdigest()[:32]}{SUFFIX}"
