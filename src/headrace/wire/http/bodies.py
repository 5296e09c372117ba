"""Content negotiation: media type and compression of a request body, and the media type of the response."""

import zlib
from collections.abc import Iterator, Sequence

from headrace.errors import CorruptBatch, DecompressedTooLarge, InvalidInput, UnsupportedMedia
from headrace.record.compression import codecs
from headrace.record.layout import ZSTD

Body = bytes | bytearray
JSON = "application/json"
NDJSON = "application/x-ndjson"
RAW = "application/octet-stream"
EVENTS = "text/event-stream"
PROBLEM = "application/problem+json"

SPELLINGS = {
    JSON: JSON,
    NDJSON: NDJSON,
    "application/ndjson": NDJSON,
    "application/jsonl": NDJSON,
    "application/jsonlines": NDJSON,
    RAW: RAW,
    "text/plain": RAW,
}
CONTENT_ENCODINGS = ("gzip", "deflate", "zstd")
STEP_BYTES = 256 * 1024  # decompressed at once
KEPT_BYTES_MAX = 8 << 20  # decompressed in memory before the size of the body is known
GZIP_MEMBERS_MAX = 100  # each costs a copy of the remaining body, so many empty members would take quadratic time


def media_type(header: str | None, *, default: str = RAW) -> str:
    """JSON, NDJSON or RAW. For a form, the default of curl -d, the error says how to set the content type."""
    if header is None or not header.strip():
        return default
    name, *parameters = header.lower().split(";")
    known = SPELLINGS.get(name.strip())
    if known is None:
        hint = "; with curl, add -H 'content-type: ...'" if "form" in name else ""
        raise UnsupportedMedia(
            f"content type {name.strip()[:80]!r} is not one of {JSON}, {NDJSON}, {RAW} and text/plain{hint}"
        )
    charsets = [p.partition("=")[2].strip(' "') for p in parameters if p.strip().startswith("charset=")]
    charset = charsets[0] if charsets else "utf-8"
    if known != RAW and charset not in {"utf-8", "utf8", "us-ascii"}:
        raise UnsupportedMedia(f"JSON must be UTF-8, not {charset[:40]!r}")
    return known


def decompress(data: Body, encoding: str | None, limit_bytes: int) -> Body:
    """The body without its content encoding; DecompressedTooLarge if it is longer than the limit."""
    name = (encoding or "identity").strip().lower()
    if name in {"identity", ""}:
        return data
    try:
        if name in {"gzip", "x-gzip"}:
            return _inflate(data, zlib.MAX_WBITS | 16, limit_bytes)
        if name == "deflate":
            return _inflate(data, zlib.MAX_WBITS, limit_bytes)
        if name == "zstd":
            return codecs.decompress(ZSTD, data, limit_bytes)
    except (zlib.error, CorruptBatch):
        raise InvalidInput(f"the request body is not valid {name} data") from None
    raise UnsupportedMedia(f"content encoding {name[:80]!r} is not one of {', '.join(CONTENT_ENCODINGS)}")


def _inflate(data: Body, window_bits: int, limit_bytes: int) -> Body:
    """A few kilobytes may expand to gigabytes, so what exceeds KEPT_BYTES_MAX is only counted at first: a body over the
    limit is refused with no more than that in memory. Other bodies of that size are decompressed twice."""
    parts: list[bytes] = []
    size = 0
    for part in _inflated(data, window_bits):
        size += len(part)
        if size > limit_bytes:
            raise DecompressedTooLarge(f"the decompressed request body exceeds the limit of {limit_bytes:,} bytes")
        if size <= KEPT_BYTES_MAX:
            parts.append(part)
    if size <= KEPT_BYTES_MAX:
        return b"".join(parts)
    parts.clear()
    whole, at = bytearray(size), 0
    for part in _inflated(data, window_bits):
        whole[at : at + len(part)] = part
        at += len(part)
    return whole


def _inflated(data: Body, window_bits: int) -> Iterator[bytes]:
    rest: bytes | bytearray = data
    for _ in range(GZIP_MEMBERS_MAX):  # a gzip body may consist of several members
        inflater = zlib.decompressobj(window_bits)
        view, at = memoryview(rest), 0
        while not inflater.eof:
            piece = inflater.unconsumed_tail or view[at : at + STEP_BYTES]
            if not inflater.unconsumed_tail:
                at += len(piece)
            part = inflater.decompress(piece, STEP_BYTES)
            if not part and not inflater.eof and at >= len(view) and not inflater.unconsumed_tail:
                raise zlib.error("truncated")
            yield part
        rest = inflater.unused_data + bytes(view[at:])
        if not rest:
            return
    raise zlib.error("too many members")


def accepted(header: str | None, offered: Sequence[str]) -> str | None:
    """The offered media type that the Accept header prefers; None if it accepts none of them."""
    if header is None or not header.strip():
        return offered[0]
    wanted: list[tuple[str, float]] = []
    for item in header.lower().split(",")[:64]:
        name, *parameters = item.split(";")
        wanted.append((SPELLINGS.get(name.strip(), name.strip()), _quality(parameters)))
    best, best_quality = None, 0.0
    for kind in offered:
        quality = max((q for name, q in wanted if _matches(name, kind)), default=0.0)
        if quality > best_quality:
            best, best_quality = kind, quality
    return best


def _matches(name: str, kind: str) -> bool:
    return name in {kind, "*/*", "*", kind.partition("/")[0] + "/*"}


def _quality(parameters: Sequence[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return min(1.0, max(0.0, float(value)))
            except ValueError:
                return 0.0
    return 1.0
