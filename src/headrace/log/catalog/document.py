"""Documents of the catalog: JSON that people can read, with a checksum as the last member.

    {
      "identity": [
        "/",
        "orders"
      ],
      "kind": "topic",
      "crc32c": "2a34649b"
    }

The checksum covers the bytes before its own line, including spaces, and that line has only one valid form: so every
flipped bit of a file is detected. Documents of earlier versions have no checksum. A document with a damaged checksum is
not mistaken for one of those, because a flipped bit cannot remove the member's name.
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
Identity = tuple[str, ...]  # such as (vhost, name); unique among the documents of one kind

_LAST_LINE = re.compile(rb',\n  "crc32c": "([0-9a-f]{8})"\n}\n')
_LAST_LINE_BYTES = len(b',\n  "crc32c": "00000000"\n}\n')
_END = b"\n}"


class Document(NamedTuple):
    content: dict[str, Any]  # without the checksum
    is_checked: bool  # it had one


def sealed(content: dict[str, Any]) -> bytes:
    """The file of a document, with its checksum. `content` has at least one member: the identity."""
    text = msgspec.json.format(msgspec.json.encode(content), indent=2)
    assert text.endswith(_END)
    body = text.removesuffix(_END)
    return body + b',\n  "crc32c": "%08x"\n}\n' % crc32c(body)


def read(text: bytes, path: str) -> Document:
    """Parse and verify a document. Raises CorruptCatalog if any of it cannot be trusted."""
    last = _LAST_LINE.fullmatch(text, max(0, len(text) - _LAST_LINE_BYTES))
    if last is not None and int(last[1], 16) != crc32c(text[: last.start()]):
        raise CorruptCatalog(path, "its checksum does not match its content")
    content = parse(text, path)
    if last is None and any(map(is_like_checksum, content)):
        raise CorruptCatalog(path, "its checksum cannot be read")
    content.pop(CHECKSUM, None)
    return Document(content, last is not None)


def content_of(text: bytes) -> dict[str, Any]:
    """The content of a document that was verified before."""
    content = msgspec.json.decode(text, type=dict[str, Any])
    content.pop(CHECKSUM, None)
    return content


def is_like_checksum(key: str) -> bool:
    """The checksum's name, possibly with a flipped bit."""
    return key[:3] == CHECKSUM[:3] or key[3:] == CHECKSUM[3:]


def parse(text: bytes, path: str) -> dict[str, Any]:
    """Parse a document without verifying its checksum. Raises CorruptCatalog if it cannot be parsed, or does not belong
    under this name."""
    try:
        content = msgspec.json.decode(text, type=dict[str, Any])
        identity = tuple(content["identity"])
    except KeyError:
        raise CorruptCatalog(path, "it has no identity") from None
    except (msgspec.MsgspecError, UnicodeError, TypeError) as error:
        raise CorruptCatalog(path, str(error)) from None
    if not identity or not all(isinstance(part, str) for part in identity):
        raise CorruptCatalog(path, f"its identity {identity!r} is not a list of names")
    if path.rpartition("/")[2] != file_name(identity):
        raise CorruptCatalog(path, f"it describes {identity!r}, which belongs in {file_name(identity)}")
    return content


def file_name(identity: Identity) -> str:
    """A readable prefix and 128 bits of SHA-256 over the parts of the identity with their lengths."""
    digest = hashlib.sha256()
    for part in identity:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(4, "big") + data)
    return f"{slug(identity[-1])}-{digest.hexdigest()[:32]}{SUFFIX}"
