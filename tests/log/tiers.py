"""A log with segments to archive, and the steps of archiving one by one."""

from headrace.log.disk.paths import UNFINISHED
from headrace.log.log import Log
from headrace.log.segments.segment import Segment
from headrace.log.settings import StreamSettings
from headrace.log.shard import Shard
from headrace.log.tier import archive as tiering
from headrace.record import codec
from headrace.record.batch.recompress import recompress
from headrace.record.layout import GZIP, LOG_APPEND_TIME_BIT, ZSTD
from tests.log.helpers import Bench, batch

ROLLING = StreamSettings(segment_size=2000)


class Stop(Exception):
    """The process dies here."""


def fill(bench: Bench, count: int = 30) -> None:
    for i in range(count):
        bench.append(1, [b"%03d" % i * 50])


def mixed(shard: Shard) -> None:
    """Append records of every kind; restoring must return them unchanged."""
    log = shard.log(1)
    plain = [
        (None, b"no key", (), 5_000),
        (b"key", None, (("only", None), ("more", b"\x00\xff")), 4_000),  # earlier than the one before
        (b"", b"", (("", b""),), -1),
    ]
    stamped = batch([b"stamped"] * 3)
    stamped[22] |= LOG_APPEND_TIME_BIT
    reseal(stamped)
    bad_name = codec.build([(b"k", b"v", ((b"\xff\xfe", b"not text"),), 7)])
    batches = [
        codec.build(plain),
        codec.build([(b"z", b"zstd " * 40, (), 6_000 + i) for i in range(5)], codec=ZSTD),
        codec.build([(b"g", b"gzip " * 40, (), 6_000)] * 3, codec=GZIP),
        codec.build(
            [(b"t", b"in a transaction", (), 1)], producer_id=9, producer_epoch=2, base_sequence=4, transactional=True
        ),
        codec.build(
            [(b"\0\0\0\0", b"\0" * 6, (), 2)], producer_id=9, producer_epoch=2, transactional=True, control=True
        ),
        stamped,
        bad_name,
    ]
    for one in batches * 3:
        log.append(bytearray(one))
        shard.pump()
    log.append(batch([b"x" * 3000]))
    shard.pump()
    log.append(batch([b"active"]))
    shard.pump()


def reseal(data: bytearray) -> None:
    from crc32c import crc32c

    data[17:21] = crc32c(memoryview(data)[21:]).to_bytes(4, "big")


def sealed(log: Log) -> list[Segment]:
    return [segment for segment in log.segments if segment.is_sealed and segment.size and not segment.is_archived]


def write(shard: Shard, segment: Segment) -> str:
    target = tiering.parquet_path(shard.tier_root, segment) + UNFINISHED
    tiering.write_parquet(segment, target, shard.disk)
    return target


def take(shard: Shard, segment: Segment) -> BaseException | None:
    found: list[BaseException | None] = []
    shard.maintenance.archive(shard.log(1), segment, lambda _made, error: found.append(error))
    shard.pump()
    return found[0]


def archive(shard: Shard) -> int:
    segments = sealed(shard.log(1))
    for segment in segments:
        write(shard, segment)
        assert take(shard, segment) is None
    return len(segments)


def restore(shard: Shard) -> None:
    for segment in [s for s in shard.log(1).segments if s.is_archived]:
        bring_back(shard, segment, f"{shard.root}/back")


def bring_back(shard: Shard, segment: Segment, target: str) -> None:
    tiering.write_segment(segment, target, shard.disk)
    errors: list[BaseException | None] = []
    shard.maintenance.rewrite_segments(
        shard.log(1),
        [segment],
        lambda _data, _info: None,
        lambda _made, error: errors.append(error),
        make=lambda: tiering.adopt_restored(shard.files, segment, target, 4096),
    )
    shard.pump()
    assert errors == [None]


def every_batch(log: Log) -> list[bytes]:
    found, offset = [], log.start_offset
    while offset < log.visible_end:
        chunk = log.read(offset, 700)
        data = memoryview(chunk.data)
        found += [bytes(recompress(data, info, 0)) for info in codec.scan(data)]
        offset = chunk.next_offset
    return found
