"""Media types, content encodings and event ids."""

import gzip
import zlib
from collections.abc import Callable

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DecompressedTooLarge, InvalidInput, UnsupportedMedia
from headrace.wire.http.bodies import JSON, NDJSON, RAW, accepted, decompress, media_type
from headrace.wire.http.events import event, event_id, parse_event_id

DATA = b"some text, " * 1000
COMPRESSED = {
    "gzip": gzip.compress(DATA),
    "deflate": zlib.compress(DATA),
    "zstd": bytes(cramjam.zstd.compress(DATA)),
}


@pytest.mark.parametrize("encoding", COMPRESSED)
def test_compressed_bodies_are_decompressed(encoding: str) -> None:
    assert decompress(COMPRESSED[encoding], encoding.upper(), len(DATA)) == DATA


@pytest.mark.parametrize("encoding", COMPRESSED)
def test_a_body_that_decompresses_past_the_limit_is_refused(encoding: str) -> None:
    with pytest.raises(DecompressedTooLarge):
        decompress(COMPRESSED[encoding], encoding, len(DATA) - 1)


@pytest.mark.parametrize("encoding", COMPRESSED)
@pytest.mark.parametrize("spoil", [lambda data: b"", lambda data: data[:-5], lambda data: b"x" + data])
def test_a_corrupt_body_is_refused(encoding: str, spoil: Callable[[bytes], bytes]) -> None:
    with pytest.raises(InvalidInput):
        decompress(spoil(COMPRESSED[encoding]), encoding, 1 << 20)


def test_gzip_may_have_several_members_but_not_thousands() -> None:
    assert decompress(gzip.compress(b"a") + gzip.compress(b"b"), "gzip", 100) == b"ab"
    with pytest.raises(InvalidInput):
        decompress(gzip.compress(b"") * 1000, "gzip", 100)


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "compress", "\x00"])
def test_other_encodings_are_refused(encoding: str) -> None:
    with pytest.raises(UnsupportedMedia):
        decompress(b"x", encoding, 100)


@pytest.mark.parametrize(
    ("header", "media"),
    [
        (None, RAW),
        ("", RAW),
        ("application/json", JSON),
        ("Application/JSON; charset=UTF-8", JSON),
        ("application/x-ndjson", NDJSON),
        ("application/jsonl", NDJSON),
        ("text/plain; charset=latin-1", RAW),
        ("application/octet-stream", RAW),
    ],
)
def test_known_content_types(header: str | None, media: str) -> None:
    assert media_type(header) == media


@pytest.mark.parametrize(
    "header",
    [
        "application/xml",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/json; charset=utf-16",
        ";",
        "json",
    ],
)
def test_unknown_content_types_are_refused(header: str) -> None:
    with pytest.raises(UnsupportedMedia):
        media_type(header)


@pytest.mark.parametrize(
    ("header", "chosen"),
    [
        (None, JSON),
        ("*/*", JSON),
        ("text/html,application/xhtml+xml,*/*;q=0.8", JSON),
        ("application/x-ndjson", NDJSON),
        ("application/*;q=0.5, application/octet-stream", RAW),
        ("application/json;q=0, application/x-ndjson;q=0.1", NDJSON),
        ("text/plain", RAW),
        ("image/png", None),
        ("application/json;q=nonsense", None),
    ],
)
def test_the_preferred_media_type_is_chosen(header: str | None, chosen: str | None) -> None:
    assert accepted(header, (JSON, NDJSON, RAW)) == chosen


@given(st.dictionaries(st.integers(0, 10_000), st.integers(0, 2**62), min_size=1, max_size=5))
def test_event_ids_survive_a_round_trip(positions: dict[int, int]) -> None:
    assert parse_event_id(event_id(positions)) == positions


@pytest.mark.parametrize("text", ["", "x", "1", "1:2,", "1:-2", "1:2,1:3", "1:" + "9" * 20, "0:1;1:2"])
def test_a_malformed_event_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_event_id(text)


def test_an_event_has_an_id_an_optional_name_and_one_line_of_data() -> None:
    assert event(b"{}", "0:1") == b"id: 0:1\ndata: {}\n\n"
    assert event(b"{}", "0:1", "gap") == b"event: gap\nid: 0:1\ndata: {}\n\n"
