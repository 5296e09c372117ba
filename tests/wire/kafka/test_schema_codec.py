"""The schema-driven codec against kio's own, for every supported API and version."""

import dataclasses
import datetime
import io
import struct
import typing
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer

from headrace.errors import MalformedRequest
from headrace.wire.kafka.apis import VERSIONS, Api, is_flexible
from headrace.wire.kafka.codec import decode, encode, encode_body
from headrace.wire.kafka.schema import request_entity, request_struct, response_entity, response_struct, shape_of

OFFERED = [
    (api, version)
    for api, versions in VERSIONS.items()
    for version in range(max(versions.lowest, 3 if api is Api.PRODUCE else 0), versions.highest + 1)
]
SAMPLES = {
    "int8": 3,
    "int16": 300,
    "int32": 70_000,
    "int64": 1 << 40,
    "uint16": 60_000,
    "bool": True,
    "uuid": uuid.UUID(int=0x1234567890),
    "float64": 2.5,
    "string": "héllo",
    "bytes": b"\x00\xff",
    "records": b"\x01\x02",
    "error_code": ErrorCode.not_coordinator,
    "timedelta_i32": datetime.timedelta(milliseconds=1500),
    "timedelta_i64": datetime.timedelta(milliseconds=2500),
    "datetime_i64": datetime.datetime.fromtimestamp(1_700_000_000, datetime.UTC),
}


def sample(entity: type, count: int) -> Any:
    """A kio entity with every field filled."""
    hints = typing.get_type_hints(entity)
    values = {}
    for field in dataclasses.fields(entity):
        shape = shape_of(field, hints[field.name])
        one = sample(shape.nested, count) if shape.nested else SAMPLES[shape.kafka_type]
        values[field.name] = (one,) * count if shape.array else one
    return entity(**values)


def plain(value: Any) -> Any:
    """kio's values as headrace represents them."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, SimpleNamespace):
        return {name: plain(one) for name, one in vars(value).items()}
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, datetime.timedelta):
        return round(value.total_seconds() * 1000)
    if isinstance(value, datetime.datetime):
        return round(value.timestamp() * 1000)
    if isinstance(value, uuid.UUID):
        return value.bytes
    return int(value) if isinstance(value, ErrorCode) else value


def within(got: Any, expected: Any) -> Any:
    """The decoded values without the defaults of fields that the version lacks."""
    if isinstance(expected, dict):
        return {name: within(got[name], one) for name, one in expected.items()}
    if isinstance(expected, list):
        return [within(one, other) for one, other in zip(got, expected, strict=True)]
    return got


def written(entity: Any) -> bytes:
    buffer = io.BytesIO()
    entity_writer(type(entity))(buffer, entity)
    return buffer.getvalue()


@pytest.mark.parametrize(("api", "version"), OFFERED, ids=lambda value: getattr(value, "name", value))
def test_requests_read_as_kio_wrote_them(api: Api, version: int) -> None:
    for count in (0, 1, 3):
        entity = sample(request_entity(api, version), count)
        got = plain(decode(request_struct(api, version), written(entity)))
        assert within(got, plain(entity)) == plain(entity)


@pytest.mark.parametrize(("api", "version"), OFFERED, ids=lambda value: getattr(value, "name", value))
def test_responses_are_the_bytes_that_kio_writes(api: Api, version: int) -> None:
    for count in (0, 1, 3):
        entity = sample(response_entity(api, version), count)
        assert encode_body(response_struct(api, version), plain(entity)) == written(entity)


@pytest.mark.parametrize(("api", "version"), OFFERED, ids=lambda value: getattr(value, "name", value))
def test_a_response_of_defaults_can_be_read_by_kio(api: Api, version: int) -> None:
    body = encode_body(response_struct(api, version), {})
    entity, size = entity_reader(response_entity(api, version))(body, 0)
    assert size == len(body)
    assert isinstance(entity, response_entity(api, version))


@pytest.mark.parametrize(("api", "version"), OFFERED, ids=lambda value: getattr(value, "name", value))
def test_every_cut_of_a_request_is_malformed_and_nothing_else(api: Api, version: int) -> None:
    data = written(sample(request_entity(api, version), 2))
    for cut in range(len(data)):
        with pytest.raises(MalformedRequest):
            decode(request_struct(api, version), data[:cut])


def test_the_flexible_versions_match_kio() -> None:
    for api, version in OFFERED:
        assert is_flexible(api, version) == request_entity(api, version).__flexible__, (api, version)
        assert is_flexible(api, version) == response_entity(api, version).__flexible__, (api, version)


def test_fields_that_an_old_version_lacks_have_their_later_default() -> None:
    entity = request_entity(Api.HEARTBEAT, 0)(group_id="g", generation_id=1, member_id="m")
    request = decode(request_struct(Api.HEARTBEAT, 0), written(entity))
    assert request.group_instance_id is None


def test_a_misspelt_response_field_is_an_assertion_error() -> None:
    with pytest.raises(AssertionError, match="generation"):
        encode(response_struct(Api.JOIN_GROUP, 9), {"generation": 3}, 1, True)


JOIN = b"\2g" + struct.pack(">ii", 1, 1) + b"\1" + b"\0" + b"\2c"  # JoinGroup 9 up to its protocols


@pytest.mark.parametrize(
    "body",
    [
        JOIN + b"\xff\xff\xff\xff\x0f",  # 2**32 - 2 protocols
        JOIN + b"\xff\xff\xff\x7f" + bytes(100),
        JOIN + b"\1\0" + b"\xff\xff\xff\xff\x0f" + b"\1\0" * 30,  # 2**32 - 1 tags
        b"\xff\xff\xff\xff\x0fg",
        b"\0",  # null where a string must be
        b"\xff" * 11,  # a varint that never ends
        b"\2\xff" + JOIN[2:] + b"\1\0\0",  # not UTF-8
    ],
)
def test_false_counts_and_lengths_are_malformed(body: bytes) -> None:
    with pytest.raises(MalformedRequest):
        decode(request_struct(Api.JOIN_GROUP, 9), body)


def test_unknown_tags_are_skipped() -> None:
    request = decode(request_struct(Api.JOIN_GROUP, 9), JOIN + b"\1" + b"\0" + b"\2\x64\3abc\x65\0")
    assert request.group_id == "g"


def test_more_elements_than_allowed_are_refused() -> None:
    with pytest.raises(MalformedRequest):
        decode(request_struct(Api.DELETE_GROUPS, 1), struct.pack(">i", 300_000) + bytes(300_000 * 2))


@given(st.binary(max_size=200), st.sampled_from(OFFERED))
def test_random_bytes_are_read_or_malformed(data: bytes, which: tuple[Api, int]) -> None:
    try:
        decode(request_struct(*which), data)
    except MalformedRequest:
        pass
