"""Time-index entries are used only if they match their checksum: the data would not show that too much was skipped."""

from pathlib import Path

import pytest

from headrace.log.log import Log
from headrace.log.recovery.inspect import Inspector
from headrace.log.settings import StreamSettings
from headrace.record import codec
from tests.log.helpers import Bench

TIMES = [100, 90, 300, 200, 400, 350, 500, 120, 600, 700, 650, 710, 20, 720, 730]


@pytest.fixture
def sealed(bench: Bench) -> tuple[Log, Path]:
    """A log whose first segment is sealed, with an index entry for each batch, and its time index."""
    shard = bench.open(stream=StreamSettings(segment_size=700, index_interval=1))
    for at in TIMES:
        shard.log(1).append(codec.build([(None, b"v" * 40, (), at)]))
        shard.pump()
    index = sorted(Path(bench.root).glob("logs/*/*.timeindex"))[0]
    assert shard.log(1).segments[0].is_sealed
    return shard.log(1), index


def answers(log: Log) -> list[object]:
    return [log.offset_for_timestamp(at) for at in range(50, 750, 10)]


def test_a_flipped_bit_in_a_time_index_changes_no_result(sealed: tuple[Log, Path]) -> None:
    log, index = sealed
    whole, expected = index.read_bytes(), answers(log)
    assert len(whole) >= 5 * 16
    for bit in range(len(whole) * 8):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        index.write_bytes(changed)
        assert answers(log) == expected, f"bit {bit}"


def test_the_time_index_of_another_segment_changes_no_result(sealed: tuple[Log, Path]) -> None:
    log, index = sealed
    expected = answers(log)
    other = sorted(index.parent.glob("*.timeindex"))[1]
    other.write_bytes(index.read_bytes())
    assert answers(log) == expected
    index.unlink()
    assert answers(log) == expected


def test_verify_names_a_damaged_time_entry(bench: Bench, sealed: tuple[Log, Path]) -> None:
    _, index = sealed
    changed = bytearray(index.read_bytes())
    changed[16] ^= 1
    index.write_bytes(changed)
    problems = Inspector(str(bench.root)).verify().problems
    assert len(problems) == 1 and f"{index.name}: entry 1 is wrong" in problems[0]
