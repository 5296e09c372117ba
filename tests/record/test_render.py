"""Restoring batches from rows: the bytes are identical, and malformed columns are never read out of bounds."""

from array import array
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidInput
from headrace.record.arrow.restore import Cells, Numbers, Rows
from headrace.record.codec import columns, scan
from headrace.record.types import BinaryColumn
from tests.record import oracle, strategies
from tests.record.oracle import Fields, Message

NAMES = (
    "batch_offset", "batch_last_offset", "batch_timestamp", "batch_max_timestamp", "attributes", "leader_epoch",
    "producer_id", "producer_epoch", "sequence",
)  # fmt: skip


def parts(data: bytes) -> dict[str, Any]:
    """The arguments of Rows, from encoded batches."""
    found = columns(data, control=True)
    infos = scan(data)
    numbers: dict[str, Any] = {"offset": found.offsets, "timestamp": found.timestamps}
    for name, field in zip(
        NAMES,
        ("base_offset", "last_offset", "base_timestamp", "max_timestamp", "attributes", "leader_epoch", "producer_id",
         "producer_epoch", "base_sequence"),
        strict=True,
    ):  # fmt: skip
        numbers[name] = array("q", [getattr(info, field) for info in infos for _ in range(info.count)])
    assert found.headers is not None
    total = len(found.headers.names.offsets) // 4 - 1
    return {"count": found.count, "numbers": numbers, "columns": found, "headers": total}


def cells(column: BinaryColumn | None, count: int) -> Cells:
    assert column is not None
    return Cells(column.offsets, column.data, column.validity, 0, count)


def rows(made: dict[str, Any]) -> Rows:
    found, count = made["columns"], made["count"]
    return Rows(
        count,
        {name: Numbers(buffer, 0, count) for name, buffer in made["numbers"].items()},
        cells(found.keys, count),
        cells(found.values, count),
        found.headers.offsets,
        0,
        cells(found.headers.names, made["headers"]),
        cells(found.headers.values, made["headers"]),
    )


@given(
    st.lists(
        st.tuples(strategies.batches, st.sampled_from([0, 0x10, 0x30, 0x40]), st.integers(0, 5), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**40),
)
def test_restored_batches_are_byte_identical(runs: list[tuple[list[Message], int, int, bool]], first: int) -> None:
    data, offset = b"", first
    for messages, attributes, gap, compacted in runs:
        deltas = [2 * i + gap for i in range(len(messages))] if compacted else []
        fields = Fields(offset, gap, attributes, gap - 1, gap, gap * 7, deltas)
        data += oracle.batch(messages, fields)
        offset += 2 * len(messages) + 10
    assert rows(parts(data)).render(len(data)) == data
    with pytest.raises(InvalidInput, match="are allowed"):
        rows(parts(data)).render(len(data) - 1)


MESSAGES = [Message(b"k%d" % n, b"v" * n, [("h", b"x")] * (n % 3), 1000 + n) for n in range(9)]


@pytest.mark.parametrize("column", ["offset", "timestamp", *NAMES])
@pytest.mark.parametrize("value", [-(2**63), -1, 2**31, 2**62, 2**63 - 1])
def test_an_impossible_number_is_refused_or_gives_valid_batches(column: str, value: int) -> None:
    """Rendering either raises InvalidInput or returns valid batches with all records."""
    made = parts(oracle.batch(MESSAGES, Fields(5)))
    made["numbers"][column] = array("q", [*memoryview(made["numbers"][column]).cast("B").cast("q")[:-1], value])
    try:
        rendered = rows(made).render(1 << 20)
    except InvalidInput:
        return
    assert sum(info.count for info in scan(rendered)) == len(MESSAGES)


def test_malformed_columns_are_refused_or_give_valid_batches() -> None:
    rng = Random(7)
    good = columns(oracle.batch(MESSAGES, Fields(5)))
    assert good.keys is not None and good.headers is not None and good.offsets is not None
    for _ in range(300):
        offsets = bytearray(good.keys.offsets)
        offsets[rng.randrange(len(offsets))] ^= 1 << rng.randrange(8)
        made = parts(oracle.batch(MESSAGES, Fields(5)))
        try:
            keys = Cells(offsets, good.keys.data, None, 0, good.count)
        except InvalidInput:
            continue
        found = made["columns"]
        numbers = {name: Numbers(buffer, 0, good.count) for name, buffer in made["numbers"].items()}
        whole = Rows(
            good.count, numbers, keys, cells(found.values, good.count), found.headers.offsets, 0,
            cells(found.headers.names, made["headers"]), cells(found.headers.values, made["headers"]),
        )  # fmt: skip
        assert sum(info.count for info in scan(whole.render(1 << 20))) == good.count
    for first, count in ((-1, 3), (0, 100), (5, 9), (0, -1)):
        with pytest.raises(InvalidInput):
            Cells(good.keys.offsets, good.keys.data, None, first, count)
    with pytest.raises(InvalidInput):
        Cells(good.keys.offsets, good.keys.data, b"\xff", 0, good.count)
    for first, count in ((-1, 3), (0, 100), (0, 0), (9, 1)):
        with pytest.raises(InvalidInput):
            Numbers(good.offsets, first, count)
    made = parts(oracle.batch(MESSAGES, Fields(5)))
    for starts in ([0] * 9, [-1] * 10, list(range(9, -1, -1)), [10**6] * 10):
        found = made["columns"]
        with pytest.raises(InvalidInput):
            Rows(
                good.count, {n: Numbers(b, 0, good.count) for n, b in made["numbers"].items()},
                cells(found.keys, good.count), cells(found.values, good.count), array("i", starts), 0,
                cells(found.headers.names, made["headers"]), cells(found.headers.values, made["headers"]),
            )  # fmt: skip
