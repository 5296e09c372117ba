"""Truncated, bit-flipped and mutated batches: a documented error or a consistent result, never a crash or over-read."""

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import BatchTooLarge, CorruptBatch
from headrace.record.codec import build, columns, patch, records, scan, trim, valid_until, validate
from headrace.record.layout import CODEC_NAMES, HEADER_BYTES, INCOMPLETE, MAX_OFFSET, PREFIX_BYTES
from tests.record import oracle
from tests.record.exercise import exercise
from tests.record.guard import GuardedBytes

ROOT = Path(__file__).parent.parent.parent

SAMPLE: list[
    tuple[bytes | None, bytes | None, list[tuple[str | bytes, bytes | bytearray | memoryview | None]], int]
] = [
    (b"key", b"value " * 8, [("name", b"x"), ("", None)], 1000),
    (None, None, [], 999),
    (b"", b"", [("h" * 70, b"y" * 70)], 2000),
]


def sample(codec: int) -> bytes:
    batch = build(SAMPLE, codec=codec)
    assert scan(batch)[0].codec == codec
    return bytes(batch)


def two_batches(codec: int) -> bytes:
    """Two consecutive batches with the offsets that a log would assign."""
    second = bytearray(sample(codec))
    patch(second, 0, 3, -1)
    return sample(codec) + bytes(second)


@pytest.fixture
def guarded() -> Iterator[GuardedBytes]:
    with GuardedBytes(1 << 20) as room:
        yield room


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_every_truncation_is_reported_as_incomplete(codec: int, guarded: GuardedBytes) -> None:
    whole, first = two_batches(codec), len(sample(codec))
    for cut in range(len(whole)):
        data = guarded.hold(whole[:cut])
        complete = cut // first
        at_boundary = cut % first == 0
        assert len(scan(data)) == complete
        assert len(records(data)) == 3 * complete
        assert columns(data).count == 3 * complete
        position, next_offset, count, _, reason = valid_until(data)
        assert (position, count) == (first * complete, 3 * complete)
        assert next_offset == (3 * complete or -1)
        assert reason == (None if at_boundary else INCOMPLETE)
        if not at_boundary:
            with pytest.raises(CorruptBatch):
                validate(data)
        exercise(data)


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_trim_returns_the_number_of_bytes_that_a_short_read_needs(codec: int) -> None:
    whole, first = two_batches(codec), len(sample(codec))
    for cut in range(1, first):
        needed = -trim(whole[:cut], 0, None, 0, MAX_OFFSET)[2]
        assert needed == (first if cut >= HEADER_BYTES else HEADER_BYTES)
    for cut in range(first + 1, 2 * first):
        assert trim(whole[:cut], 0, None, 0, MAX_OFFSET) == (0, first, 3)
        position, end, third = trim(whole[:cut], 0, None, 3, MAX_OFFSET)
        assert (position, end) == (first, first)
        assert third < 0


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_every_flipped_bit_is_detected(codec: int, guarded: GuardedBytes) -> None:
    """Except in base offset and leader epoch, which the checksum does not cover because the broker writes them."""
    whole = sample(codec)
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << (bit % 8)
        data = guarded.hold(damaged)
        byte = bit // 8
        if byte < 8 or PREFIX_BYTES <= byte < PREFIX_BYTES + 4:
            negative = bit == 7
            assert exercise(data) == ("refused" if negative else "accepted")
            continue
        with pytest.raises((CorruptBatch, BatchTooLarge)):
            validate(data)
        position, *_, reason = valid_until(data)
        assert position == 0
        assert reason is not None
        assert exercise(data) == "refused"


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_flipped_bit_under_a_valid_checksum_never_crashes_a_reader(codec: int, guarded: GuardedBytes) -> None:
    """A client may send a valid checksum over nonsense. It is refused, or all readers agree on the batch."""
    whole = sample(codec)
    outcomes: Counter[str] = Counter()
    for bit in range(21 * 8, len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << (bit % 8)
        outcomes[exercise(guarded.hold(oracle.sign(damaged)))] += 1
    assert outcomes["accepted"], "a flip in a key or value cannot be detected"
    assert outcomes["refused"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("length", -1),
        ("length", 0),
        ("length", 48),
        ("length", -(2**31)),
        ("length", 2**31 - 1),
        ("magic", 0),
        ("magic", 1),
        ("magic", 3),
        ("magic", -1),
        ("attributes", 5),
        ("attributes", 7),
        ("last_offset_delta", -1),
        ("last_offset_delta", 1),
        ("last_offset_delta", 2**31 - 1),
        ("count", -1),
        ("count", 0),
        ("count", 2),
        ("count", 2**31 - 1),
        ("max_timestamp", 0),
        ("max_timestamp", 2**62),
        ("base_timestamp", 2**63 - 1),
        ("base_offset", -1),
        ("base_offset", 2**63 - 1),
        ("crc", 0),
    ],
)
def test_a_batch_header_that_contradicts_its_records_is_refused(field: str, value: int, guarded: GuardedBytes) -> None:
    messages = [
        oracle.Message(b"k", b"v", [], 5),
        oracle.Message(b"k", b"w", [], 9),
        oracle.Message(b"", b"", [], 7),
    ]
    changed: dict[str, Any] = {field: value}
    assert validate(oracle.batch(messages))
    with pytest.raises((CorruptBatch, BatchTooLarge)) as refusal:
        validate(guarded.hold(oracle.batch(messages, **changed)))
    if isinstance(refusal.value, CorruptBatch):
        assert refusal.value.position == 0
        assert refusal.value.reason


def record(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return oracle.varint(len(body)) + body


V = oracle.varint
GOOD = [b"\x00", V(0), V(0), V(1), b"k", V(1), b"v", V(1), V(1), b"h", V(1), b"x"]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("record longer than the batch", V(100) + b"".join(GOOD)),
        ("record of negative length", V(-5) + b"".join(GOOD)),
        ("record of length 0", V(0) + b"".join(GOOD)),
        ("record shorter than its fields", V(4) + b"".join(GOOD)),
        ("bytes after the last record", record(*GOOD) + b"\x00"),
        ("bytes after the last header", record(*GOOD, b"\x00")),
        ("key longer than the record", record(b"\x00", V(0), V(0), V(9), b"k", V(1), b"v", V(0))),
        ("key of length -2", record(b"\x00", V(0), V(0), V(-2), b"k", V(1), b"v", V(0))),
        ("key of length 2^62", record(b"\x00", V(0), V(0), V(2**62), b"k", V(1), b"v", V(0))),
        ("value longer than the record", record(b"\x00", V(0), V(0), V(1), b"k", V(9), b"v", V(0))),
        ("value of length -2^63", record(b"\x00", V(0), V(0), V(1), b"k", V(-(2**63)), b"v", V(0))),
        ("negative number of headers", record(b"\x00", V(0), V(0), V(1), b"k", V(1), b"v", V(-1))),
        ("more headers than fit", record(b"\x00", V(0), V(0), V(1), b"k", V(1), b"v", V(2**30), b"abcdef")),
        (
            "2^63 headers",
            record(b"\x00", V(0), V(0), V(1), b"k", V(1), b"v", V(2**63 - 1), b"abcdef"),
        ),
        ("header without a name", record(b"\x00", V(0), V(0), V(1), b"k", V(1), b"v", V(1), V(-1), V(0))),
        ("header cut short", record(b"\x00", V(0), V(0), V(1), b"k", V(1), b"v", V(1), V(3), b"abc")),
        (
            "header value too long",
            record(b"\x00", V(0), V(0), V(1), b"k", V(1), b"v", V(1), V(1), b"h", V(4), b"x"),
        ),
        (
            "varint of eleven bytes",
            record(b"\x00", b"\xff" * 10 + b"\x00", V(0), V(1), b"k", V(1), b"v", V(0)),
        ),
        ("varint over 64 bits", record(b"\x00", b"\xff" * 9 + b"\x02", V(0), V(1), b"k", V(1), b"v", V(0))),
        ("varint without an end", record(b"\x00", V(0), V(0), b"\x80\x80\x80\x80")),
        ("delta not zero", record(b"\x00", V(0), V(1), V(1), b"k", V(1), b"v", V(0))),
        ("delta negative", record(b"\x00", V(0), V(-1), V(1), b"k", V(1), b"v", V(0))),
        ("timestamp past 64 bits", record(b"\x00", V(2**63 - 1), V(0), V(1), b"k", V(1), b"v", V(0))),
        ("timestamp not the maximum", record(b"\x00", V(3), V(0), V(1), b"k", V(1), b"v", V(0))),
        ("no bytes", b""),
        ("one byte", b"\x00"),
    ],
)
def test_a_record_that_contradicts_its_batch_is_refused(name: str, body: bytes, guarded: GuardedBytes) -> None:
    message = oracle.Message(b"k", b"v", [], 5)
    assert validate(oracle.batch([message], body=record(*GOOD)))
    data = guarded.hold(oracle.batch([message], body=body))
    with pytest.raises(CorruptBatch):
        validate(data)
    assert exercise(data) == "refused", name


def mutate(rng: random.Random, data: bytearray) -> bytearray:
    """One to four small changes of the kinds that break parsers."""
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(8):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                data[at : at + rng.randrange(1, 9)] = b""
            case 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 3:
                width = rng.choice((1, 2, 4, 8))
                data[at : at + width] = rng.choice((b"\xff", b"\x00", b"\x7f", b"\x80")) * width
            case 4:
                data[at:at] = oracle.varint(rng.choice((-1, 0, 2**31, -(2**31), 2**62, -(2**63), 2**63 - 1)))
            case 5:
                data[at:] = b""
            case 6:
                source = rng.randrange(len(data) + 1)
                data[at : at + 16] = data[source : source + 16]
            case 7 if at < len(data):
                data[at] = (data[at] + rng.choice((-2, -1, 1, 2))) % 256
        if not data:
            data.append(0)
    return data


def test_random_mutations_never_crash_a_reader(guarded: GuardedBytes) -> None:
    """HEADRACE_FUZZ_SEED replays a run, HEADRACE_FUZZ_ROUNDS sets the number of inputs."""
    seed = int(os.environ.get("HEADRACE_FUZZ_SEED", random.SystemRandom().randrange(2**32)))
    rounds = int(os.environ.get("HEADRACE_FUZZ_ROUNDS", 60_000))
    print(f"HEADRACE_FUZZ_SEED={seed}")
    rng = random.Random(seed)
    seeds = [two_batches(codec) for codec in CODEC_NAMES] + [sample(codec) for codec in CODEC_NAMES]
    outcomes: Counter[str] = Counter()
    for _ in range(rounds):
        data = mutate(rng, bytearray(rng.choice(seeds)))
        if len(data) > HEADER_BYTES and rng.random() < 0.8:
            if rng.random() < 0.7:
                data[8:12] = (len(data) - PREFIX_BYTES).to_bytes(4, "big")
            data = bytearray(oracle.sign(data))
        outcomes[exercise(guarded.hold(data))] += 1
    assert outcomes["refused"] > rounds // 10
    assert outcomes["refused by deep validation"]
    assert outcomes["accepted"]


@pytest.mark.process
def test_the_guard_page_crashes_a_process_that_reads_past_the_end() -> None:
    """Otherwise the tests above could not detect an over-read."""
    program = (
        "import ctypes; from tests.record.guard import GuardedBytes\n"
        "view = GuardedBytes(100).hold(b'abc'); at = ctypes.addressof(ctypes.c_char.from_buffer(view))\n"
        "assert ctypes.string_at(at, 3) == b'abc'; print('inside', flush=True); ctypes.string_at(at, 4)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=ROOT, check=False)
    assert done.stdout == b"inside\n", done.stderr
    assert done.returncode == -signal.SIGSEGV
