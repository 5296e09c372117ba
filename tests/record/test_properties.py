"""The codec of AMQP properties and field tables against pamqp, and its limits on malicious input."""

import datetime
import random
import struct
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands, decode, encode

from headrace.errors import CorruptProperties, InvalidInput
from headrace.record.amqp.properties import (
    DEPTH_MAX,
    OBJECTS_MAX,
    PROPERTIES,
    Timestamp,
    Value,
    decode_properties,
    decode_table,
    edit,
    encode_properties,
    encode_table,
    property_of,
)

SECONDS = 1_700_000_000
MOMENT = datetime.datetime.fromtimestamp(SECONDS, tz=datetime.UTC)

ALL: dict[str, Value] = {
    "content_type": "text/plain",
    "content_encoding": "utf-8",
    "headers": {"a": 1, "b": {"c": [True, None, "x"]}},
    "delivery_mode": 2,
    "priority": 9,
    "correlation_id": "c-1",
    "reply_to": "amq.reply",
    "expiration": "60000",
    "message_id": "m-1",
    "timestamp": Timestamp(SECONDS),
    "type": "order",
    "user_id": "guest",
    "app_id": "shop",
    "cluster_id": "old",
}


def encoded_by_pamqp(properties: dict[str, Any]) -> bytes:
    """Encode these properties with pamqp."""
    named = {("message_type" if name == "type" else name): value for name, value in properties.items()}
    if "timestamp" in named:
        named["timestamp"] = datetime.datetime.fromtimestamp(named["timestamp"], tz=datetime.UTC)
    basic = commands.Basic.Properties()
    for name, value in named.items():
        setattr(basic, name, value)
    return basic.marshal()


def decoded_by_pamqp(raw: bytes) -> dict[str, Any]:
    basic = commands.Basic.Properties()
    basic.unmarshal(struct.unpack_from(">H", raw)[0], raw[2:])
    found: dict[str, Any] = {
        ("type" if name == "message_type" else name): value for name, value in basic if value is not None
    }
    if "timestamp" in found:
        found["timestamp"] = int(found["timestamp"].timestamp())
    return found


def test_all_fourteen_properties_are_encoded_and_decoded_as_by_pamqp() -> None:
    assert len(PROPERTIES) == len(ALL) == 14
    assert decode_properties(encoded_by_pamqp(ALL)) == ALL
    assert decoded_by_pamqp(encode_properties(ALL)) == ALL
    without_headers = {name: value for name, value in ALL.items() if name != "headers"}
    assert encode_properties(without_headers) == encoded_by_pamqp(without_headers)


@given(st.sets(st.sampled_from([name for name in PROPERTIES if name != "headers"])))
def test_every_subset_of_properties_agrees_with_pamqp(names: set[str]) -> None:
    chosen: dict[str, Value] = {name: ALL[name] for name in PROPERTIES if name in names}
    raw = encode_properties(chosen)
    assert raw == encoded_by_pamqp(chosen)
    assert decode_properties(raw) == chosen
    for name in PROPERTIES:
        assert property_of(raw, name) == chosen.get(name)


# Every field type that RabbitMQ writes: the encoded field and its value.
FIELDS: list[tuple[bytes, Any]] = [
    (b"t\x00", False),
    (b"t\x01", True),
    (b"b\x80", -128),
    (b"B\xff", 255),
    (b"s\x80\x00", -32768),
    (b"u\xff\xff", 65535),
    (b"I\x80\x00\x00\x00", -(2**31)),
    (b"i\xff\xff\xff\xff", 2**32 - 1),
    (b"l\x80" + bytes(7), -(2**63)),
    (b"L\x7f" + b"\xff" * 7, 2**63 - 1),
    (b"f\x3f\x80\x00\x00", 1.0),
    (b"d\xbf\xf0" + bytes(6), -1.0),
    (b"D\x02\x00\x00\x30\x39", Decimal("123.45")),
    (b"S\x00\x00\x00\x03abc", "abc"),
    (b"S\x00\x00\x00\x00", ""),
    (b"S\x00\x00\x00\x02\xff\xfe", b"\xff\xfe"),
    (b"A\x00\x00\x00\x05t\x01Vb\x07", [True, None, 7]),
    (b"A\x00\x00\x00\x00", []),
    (b"T" + struct.pack(">Q", SECONDS), Timestamp(SECONDS)),
    (b"F\x00\x00\x00\x04\x01kb\x05", {"k": 5}),
    (b"F\x00\x00\x00\x00", {}),
    (b"V", None),
    (b"x\x00\x00\x00\x03\x00\x01\x02", b"\x00\x01\x02"),
]


def table(*fields: bytes) -> bytes:
    body = b"".join(b"\x01" + bytes([65 + i]) + field for i, field in enumerate(fields))
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(("raw", "value"), FIELDS)
def test_every_field_type_of_rabbitmq_is_decoded(raw: bytes, value: Any) -> None:
    found = decode_table(table(raw))["A"]
    assert found == value
    assert type(found) is type(value)
    _, by_pamqp = decode.field_table(table(raw))
    expected = by_pamqp["A"]
    if isinstance(expected, datetime.datetime):
        expected = int(expected.timestamp())
    assert found == expected


def test_one_table_can_hold_all_field_types() -> None:
    raw = table(*(field for field, _ in FIELDS))
    assert list(decode_table(raw).values()) == [value for _, value in FIELDS]


def test_a_negative_decimal_is_encoded_as_clients_do() -> None:
    raw = encode.field_table({"d": Decimal("-1.5")})
    assert decode_table(raw) == {"d": Decimal("-1.5")}
    assert encode_table({"d": Decimal("-1.5")}) == raw


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, width=32)
    | st.text(max_size=20)
    | st.binary(max_size=20).map(bytes)
    | st.decimals(-20_000, 20_000, places=3)
    | st.integers(0, 2**32 - 1).map(Timestamp),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)
tables = st.dictionaries(st.text(max_size=20), plain, max_size=6)


@given(tables)
def test_decoding_an_encoded_table_returns_the_table(fields: dict[str, Any]) -> None:
    assert decode_table(encode_table(fields)) == fields


def as_pamqp(value: Any) -> Any:
    """Convert value to the types that pamqp returns."""
    match value:
        case Timestamp():
            return datetime.datetime.fromtimestamp(value, tz=datetime.UTC)
        case bytes():
            return bytearray(value)
        case dict():
            return {name: as_pamqp(item) for name, item in value.items()}
        case list():
            return [as_pamqp(item) for item in value]
    return value


def non_negative(value: Any) -> Any:
    """Make decimals positive, because pamqp writes them signed but reads them unsigned."""
    match value:
        case Decimal():
            return abs(value)
        case dict():
            return {name: non_negative(item) for name, item in value.items()}
        case list():
            return [non_negative(item) for item in value]
    return value


@given(tables.map(non_negative))
def test_tables_are_interchangeable_with_pamqp(fields: dict[str, Any]) -> None:
    assert decode.field_table(encode_table(fields))[1] == as_pamqp(fields)
    assert decode_table(encode.field_table(as_pamqp(fields))) == fields


def test_integers_and_floats_use_types_that_every_client_supports() -> None:
    assert encode_table({"n": 5})[4:] == b"\x01nI\x00\x00\x00\x05"
    assert encode_table({"n": 2**31})[4:] == b"\x01nl" + struct.pack(">q", 2**31)
    assert encode_table({"n": 0.5})[4:] == b"\x01nd" + struct.pack(">d", 0.5)


def test_text_that_is_not_utf8_is_encoded_as_its_original_bytes() -> None:
    """Routing keys are bytes, so an x-death header may have to hold one in Latin-1."""
    raw = encode_table({"keys": ["caf\udce9"]})
    assert b"S\x00\x00\x00\x04caf\xe9" in raw
    assert decode_table(raw) == {"keys": [b"caf\xe9"]}
    assert encode_table({"caf\udce9": None})[4:] == b"\x04caf\xe9V"


def test_editing_does_not_change_the_bytes_of_other_fields() -> None:
    """An int16 stays an int16 and an unsigned integer stays unsigned; only the named fields change."""
    headers = table(b"s\x00\x07", b"B\xff", b"S\x00\x00\x00\x02\xff\xfe", b"f\x3f\x80\x00\x00")
    raw = struct.pack(">H", 0x8000 | 0x2000 | 0x0100) + b"\x04text" + headers + b"\x0560000"
    assert edit(raw) == raw
    assert edit(raw, {"expiration": None}) == struct.pack(">H", 0xA000) + b"\x04text" + headers
    changed = edit(raw, headers={"x-death": [{"count": 1}], "B": "replaced"}, headers_removed=["D", "absent"])
    assert b"\x01As\x00\x07" in changed
    assert b"\x01CS\x00\x00\x00\x02\xff\xfe" in changed
    assert decode_properties(changed) == {
        "content_type": "text",
        "headers": {"A": 7, "C": b"\xff\xfe", "x-death": [{"count": 1}], "B": "replaced"},
        "expiration": "60000",
    }


def test_editing_inserts_properties_in_protocol_order() -> None:
    raw = encode_properties({"type": "t"})
    both = edit(raw, {"content_type": "c", "priority": 3}, headers={"h": 1})
    assert both == encode_properties({"content_type": "c", "headers": {"h": 1}, "priority": 3, "type": "t"})
    assert edit(both, {"content_type": None, "headers": None, "priority": None}) == raw
    assert encode_properties({"content_type": None}) == b"\x00\x00"


def test_a_timestamp_beyond_the_range_of_datetime_is_decoded() -> None:
    """Some clients send milliseconds or nonsense; neither may prevent a delivery."""
    raw = struct.pack(">HQ", 0x0040, 2**64 - 1)
    assert decode_properties(raw) == {"timestamp": 2**64 - 1}
    assert encode_properties(decode_properties(raw)) == raw


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x80",
        b"\x00\x01",
        b"\x00\x02",
        b"\x80\x01\x00\x00",
        b"\x80\x00",
        b"\x80\x00\x05abc",
        b"\x20\x00\x00\x00\x00",
        b"\x20\x00\x00\x00\x00\x01",
        b"\x20\x00\xff\xff\xff\xff",
        b"\x20\x00\x00\x00\x00\x04\x01aZ\x00",
        b"\x20\x00\x00\x00\x00\x02\x05ab",
        b"\x20\x00\x00\x00\x00\x07\x01aS\x00\x00\x00\x09",
        b"\x20\x00\x00\x00\x00\x07\x01aF\x00\x00\x00\x01",
        b"\x20\x00\x00\x00\x00\x07\x01aA\x7f\xff\xff\xff",
        b"\x00\x40\x00\x00\x00",
        b"\x10\x00",
        b"\x10\x00\x02extra",
    ],
)
def test_malformed_properties_are_refused(raw: bytes) -> None:
    with pytest.raises(CorruptProperties):
        decode_properties(raw)
    if raw[:1] != b"\x20":
        with pytest.raises(CorruptProperties):
            edit(raw)
    with pytest.raises(CorruptProperties):
        edit(raw, headers={"a": 1})


def nested(depth: int, kind: bytes) -> bytes:
    value = b"V"
    for _ in range(depth):
        inner = (b"\x01k" if kind == b"F" else b"") + value
        value = kind + struct.pack(">I", len(inner)) + inner
    return table(value)


@pytest.mark.parametrize("kind", [b"F", b"A"])
def test_the_nesting_depth_is_limited(kind: bytes) -> None:
    assert decode_table(nested(DEPTH_MAX - 1, kind))
    for depth in (DEPTH_MAX, 10_000):
        with pytest.raises(CorruptProperties, match="deeper"):
            decode_table(nested(depth, kind))
    value: Any = None
    for _ in range(DEPTH_MAX):
        value = {"k": value} if kind == b"F" else [value]
    with pytest.raises(InvalidInput, match="deeper"):
        encode_table({"k": value})


def test_the_number_of_fields_is_limited() -> None:
    def voids(count: int) -> bytes:
        return table(b"A" + struct.pack(">I", count) + b"V" * count)

    assert len(decode_table(voids(OBJECTS_MAX - 1))["A"]) == OBJECTS_MAX - 1  # type: ignore[arg-type]
    with pytest.raises(CorruptProperties, match="more than"):
        decode_table(voids(OBJECTS_MAX))


@pytest.mark.parametrize(
    "fields",
    [
        {"k" * 256: 1},
        {"k": 2**63},
        {"k": -(2**63) - 1},
        {"k": Decimal("NaN")},
        {"k": Decimal("Infinity")},
        {"k": Decimal("1E+999999")},
        {"k": Decimal("1E-300")},
        {"k": Decimal(2**31)},
        {"k": Timestamp(2**64)},
        {"k": Timestamp(-1)},
        {"k": object()},
        {"k": {1, 2}},
    ],
)
def test_a_value_that_a_table_cannot_hold_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        encode_table(fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", 256),
        ("priority", -1),
        ("priority", "9"),
        ("delivery_mode", 1.0),
        ("timestamp", -1),
        ("timestamp", MOMENT),
        ("headers", "text"),
        ("expiration", 60000),
        ("type", "x" * 256),
        ("colour", "red"),
    ],
)
def test_a_property_of_the_wrong_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=name if name != "type" else "longer"):
        encode_properties({name: value})
    with pytest.raises(InvalidInput):
        property_of(b"\x00\x00", "colour")


def test_random_mutations_raise_only_corrupt_properties() -> None:
    rng = random.Random(7)
    whole = encode_properties(ALL | {"headers": decode_table(table(*(field for field, _ in FIELDS)))})
    good = 0
    for _ in range(20_000):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at:]
                    data += b"\x00"
                case 2:
                    data[at:at] = rng.randbytes(3)
                case 3:
                    data[at : at + 4] = b"\xff\xff\xff\xff"
        try:
            found = decode_properties(data)
        except CorruptProperties:
            continue
        good += 1
        assert edit(data) == data
        again = encode_properties(found)
        assert repr(decode_properties(again)) == repr(found)
    assert good
