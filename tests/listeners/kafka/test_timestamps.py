"""Timestamps of produced records: those out of range are refused with Kafka's code, as Kafka 4.3 does."""

import struct
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.listeners.kafka.admin.config_types import BROKER, DELETE, SET, TOPIC
from headrace.listeners.kafka.errors import Code
from headrace.record import codec
from headrace.record.batch.crc32c import crc32c
from headrace.record.layout import (
    BASE_TIMESTAMP_AT,
    CRC_AT,
    MAX_TIMESTAMP_AT,
    TIMESTAMP_MAX,
    TIMESTAMP_MIN,
    ZSTD,
)
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.world import Client, World, topic_at

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
LONG_MAX, LONG_MIN = 2**63 - 1, -(2**63)
AFTER, BEFORE = "message.timestamp.after.max.ms", "message.timestamp.before.max.ms"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def stamped(*timestamps: int, value: bytes = b"v", **options: Any) -> bytearray:
    return codec.build([(b"k", value, (), timestamp) for timestamp in timestamps], **options)


def with_header(data: bytearray, at: int, timestamp: int) -> bytearray:
    """The batch with another timestamp in its header, and a checksum that matches."""
    struct.pack_into(">q", data, at, timestamp)
    struct.pack_into(">I", data, CRC_AT, crc32c(data[CRC_AT + 4 :]))
    return data


async def configure(client: Client, config: str, value: str | None, *, kind: int = TOPIC, of: str = "t") -> None:
    one = {"name": config, "config_operation": DELETE if value is None else SET, "value": value}
    resource = {"resource_type": kind, "resource_name": of, "configs": [one]}
    [answer] = (await client.call(Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=[resource])).responses
    assert answer.error_code == Code.NONE, answer.error_message


async def codes(client: Client, *batches: bytearray) -> list[int]:
    return [(await client.produce("t", data)).error_code for data in batches]


def stored(world: World) -> int:
    end: int = world.broker.streams.get("t").partitions[0].end_offset
    return end


async def test_a_timestamp_more_than_an_hour_ahead_is_refused_with_its_record(tmp_path: Path) -> None:
    """Was stored: retention by age then kept the whole segment until that time."""
    async with topic_at(tmp_path) as (world, client):
        now = now_ms()
        answer = await client.produce("t", stamped(now, now + DAY, now, now + 2 * HOUR))
        assert answer.error_code == Code.INVALID_TIMESTAMP
        assert [error.batch_index for error in answer.record_errors] == [1, 3]
        assert "out of range" in answer.error_message
        assert stored(world) == 0, "nothing of the batch was stored"
        assert await codes(client, stamped(now + 50 * MINUTE, now)) == [Code.NONE]


@pytest.mark.parametrize("options", [{"codec": ZSTD}, {"codec": ZSTD, "value": bytes(2 << 20)}], ids=["loop", "thread"])
async def test_timestamps_inside_compressed_batches_are_checked(tmp_path: Path, options: dict[str, Any]) -> None:
    async with topic_at(tmp_path) as (world, client):
        now = now_ms()
        answer = await client.produce("t", stamped(now, now + DAY, **options))
        assert answer.error_code == Code.INVALID_TIMESTAMP
        assert [error.batch_index for error in answer.record_errors] == [1]
        assert stored(world) == 0
        assert await codes(client, stamped(now, now, **options)) == [Code.NONE]


async def test_old_negative_and_missing_timestamps_are_accepted_unless_the_topic_limits_their_age(
    tmp_path: Path,
) -> None:
    """As in Kafka, whose broker accepts times before 1970; -1 stands for no timestamp."""
    async with topic_at(tmp_path) as (_, client):
        old = [stamped(1), stamped(0, -1), stamped(-DAY), stamped(now_ms() - DAY)]
        assert await codes(client, *old) == [Code.NONE] * 4
        await configure(client, BEFORE, str(HOUR))
        assert await codes(client, *old) == [Code.INVALID_TIMESTAMP] * 4
        assert await codes(client, stamped(-1), stamped(-1, now_ms()), stamped(now_ms() - MINUTE)) == [Code.NONE] * 3
        await configure(client, BEFORE, None)
        assert await codes(client, *old) == [Code.NONE] * 4


async def test_the_limits_can_be_changed_for_a_topic_and_for_the_broker(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (_, client):
        soon, tomorrow, later = (stamped(now_ms() + ahead) for ahead in (10 * MINUTE, DAY, 400 * DAY))
        await configure(client, AFTER, str(MINUTE))
        assert await codes(client, soon, tomorrow, later) == [Code.INVALID_TIMESTAMP] * 3
        await configure(client, AFTER, str(LONG_MAX))
        assert await codes(client, soon, tomorrow, later) == [Code.NONE] * 3
        await configure(client, AFTER, None)
        assert await codes(client, soon, tomorrow) == [Code.NONE, Code.INVALID_TIMESTAMP]
        await configure(client, f"log.{AFTER}", str(2 * DAY), kind=BROKER, of="")
        assert await codes(client, soon, tomorrow, later) == [Code.NONE, Code.NONE, Code.INVALID_TIMESTAMP]


@pytest.mark.parametrize("timestamp", [TIMESTAMP_MAX + 1, TIMESTAMP_MIN - 1, LONG_MAX, LONG_MIN])
async def test_timestamps_that_are_no_date_are_refused_whatever_the_limits(tmp_path: Path, timestamp: int) -> None:
    async with topic_at(tmp_path) as (world, client):
        for config in (AFTER, BEFORE):
            await configure(client, config, str(LONG_MAX))
        assert await codes(client, stamped(timestamp)) == [Code.INVALID_TIMESTAMP]
        assert stored(world) == 0
        assert await codes(client, stamped(TIMESTAMP_MAX), stamped(TIMESTAMP_MIN)) == [Code.NONE] * 2


async def test_a_delta_that_overflows_the_timestamp_is_refused(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (world, client):
        overflowing = with_header(stamped(0, 5), BASE_TIMESTAMP_AT, LONG_MAX)
        assert await codes(client, overflowing) == [Code.INVALID_TIMESTAMP]
        assert stored(world) == 0


async def test_the_timestamps_of_the_records_count_and_not_that_of_the_header(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (world, client):
        now = now_ms()
        hidden = with_header(stamped(now, now + DAY), MAX_TIMESTAMP_AT, now)
        wrong = with_header(stamped(now, now), MAX_TIMESTAMP_AT, LONG_MAX)
        assert await codes(client, hidden, wrong) == [Code.INVALID_TIMESTAMP, Code.NONE]
        [info] = codec.scan(world.broker.streams.get("t").partitions[0].read(0).data)
        assert info.max_timestamp == now


async def test_timestamps_that_the_append_time_replaces_are_not_checked(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (_, client):
        await configure(client, "message.timestamp.type", "LogAppendTime")
        await configure(client, BEFORE, "0")
        assert await codes(client, stamped(LONG_MAX), stamped(1), stamped(now_ms() + DAY)) == [Code.NONE] * 3
