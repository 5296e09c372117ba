"""The record layer alone, one core: python -m bench.record

Best of several runs: the machine may be busy with something else, and the best is the run that was least disturbed.
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.kernels import load
from bench.result import Result
from headrace.record import codec, layout
from headrace.record.compression.codecs import compress, decompress

BUFFER_BYTES = 8 << 20
RUNS = 9
TIMESTAMP = 1_700_000_000_000
OFFSET_AND_KEY = layout.WANT_OFFSET | layout.WANT_KEY
# Size of a record's value, and how many of them make a batch.
SHAPES = ((100, 600), (1000, 60), (100, 1))


def best(work: Callable[[], Any], runs: int = RUNS) -> float:
    """Seconds of CPU of the fastest run."""
    times = []
    for _ in range(runs):
        began = time.process_time_ns()
        work()
        times.append(time.process_time_ns() - began)
    return min(times) / 1e9


def shape_name(size: int, per_batch: int) -> str:
    return f"{size} B, {per_batch} a batch"


def log_of(size: int, per_batch: int) -> tuple[bytes, int]:
    """Batches of incompressible records with offsets as in a log, and the number of records."""
    body = random.Random(size).randbytes(size)
    batch = codec.build([(b"key-%04d" % i, body, (), TIMESTAMP + i) for i in range(per_batch)])
    copies = BUFFER_BYTES // len(batch)
    data = bytearray(batch * copies)
    codec.patch_run(data, 0, len(data), 0, 0)
    return bytes(data), copies * per_batch


def building(size: int, per_batch: int) -> Iterator[Result]:
    kernel = load("append")
    writer = codec.BatchWriter(TIMESTAMP)
    value = random.Random(size).randbytes(size)
    rounds = BUFFER_BYTES // (size * per_batch)
    records, name = rounds * per_batch, shape_name(size, per_batch)

    def append() -> None:
        for _ in range(rounds):
            kernel.append_many(writer, b"key-0001", value, per_batch)
            writer.discard()

    def append_and_finish() -> None:
        for _ in range(rounds):
            kernel.append_many(writer, b"key-0001", value, per_batch)
            writer.finish()

    def from_python() -> None:
        for _ in range(per_batch):
            writer.append(b"key-0001", value)
        writer.finish()

    alone = best(append) / records * 1e9
    bar, held = ("<= 30", alone <= 30) if size == 100 else ("", None)
    yield Result(f"record append from C, {name}", alone, "ns/record", bar=bar, held=held)
    whole = best(append_and_finish) / records * 1e9
    yield Result(f"record append and finish (copy, CRC) from C, {name}", whole, "ns/record")
    slow = best(from_python, 50) / per_batch * 1e9
    yield Result(f"record append and finish from Python, {name}", slow, "ns/record")


def reading(size: int, per_batch: int) -> Iterator[Result]:
    data, count = log_of(size, per_batch)
    gigabytes, millions = (len(data) / 1e9, "GB/CPU-s"), (count / 1e6, "M rec/CPU-s")
    bulk = per_batch > 1
    crc_bar = 2 if bulk else None
    column_bar = 15 if bulk and size == 100 else None
    work: list[tuple[str, Callable[[], Any], tuple[float, str], int | None]] = [
        ("scan with CRC", lambda: codec.scan(data), gigabytes, crc_bar),
        ("recovery check (valid_until)", lambda: codec.valid_until(data), gigabytes, crc_bar),
        ("validate every record", lambda: codec.validate(data), gigabytes, None),
        ("columns, all", lambda: codec.columns(data), millions, column_bar),
        ("columns, offset and key", lambda: codec.columns(data, want=OFFSET_AND_KEY), millions, None),
        ("records as Python objects", lambda: codec.records(data), millions, None),
    ]
    for what, call, (amount, unit), bar in work:
        rate = amount / best(call)
        text, held = (f">= {bar}", rate >= bar) if bar else ("", None)
        yield Result(f"{what}, {shape_name(size, per_batch)}", rate, unit, bar=text, held=held)


def json_batch_payload(count: int = 1500) -> bytes:
    """The uncompressed records of a batch of events as web shops write them."""
    chance = random.Random(1)
    writer = codec.BatchWriter(TIMESTAMP)
    for i in range(count):
        event = {
            "id": i,
            "user": f"user-{chance.randrange(20_000):05}",
            "action": chance.choice(["click", "view", "buy"]),
            "price": round(chance.random() * 100, 2),
            "at": TIMESTAMP + i * 37,
            "tags": chance.sample(["red", "green", "blue", "sale", "new"], 2),
        }
        writer.append(b"user-%05d" % chance.randrange(20_000), json.dumps(event).encode(), timestamp_ms=TIMESTAMP + i)
    return bytes(writer.finish()[layout.HEADER_BYTES :])


def compressing(number: int, name: str, payload: bytes) -> Iterator[Result]:
    packed = compress(number, payload)
    ratio = len(payload) / len(packed)
    bar, held = (">= 3", ratio >= 3) if name == "zstd" else ("", None)
    yield Result(f"{name} ratio on JSON-like records", ratio, ": 1", bar=bar, held=held)
    megabytes = len(payload) / 1e6
    yield Result(f"{name} compress", megabytes / best(lambda: compress(number, payload)), "MB/CPU-s")
    seconds = best(lambda: decompress(number, packed, len(payload)))
    yield Result(f"{name} decompress", megabytes / seconds, "MB/CPU-s")


def results() -> list[Result]:
    found: list[Result] = []
    for shape in SHAPES[:2]:
        found += building(*shape)
    for shape in SHAPES:
        found += reading(*shape)
    payload = json_batch_payload()
    for number, name in layout.CODEC_NAMES.items():
        if number != layout.NONE:
            found += compressing(number, name, payload)
    return found


def run() -> list[tuple[str, float, str]]:
    return [(result.name, result.value, result.unit) for result in results()]


if __name__ == "__main__":
    for line in results():
        print(line.line())
