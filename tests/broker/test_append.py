"""The entry point for appends: its rules, its typed rejections, and where it stages batches."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.broker import Broker
from headrace.broker.streams.append import Sender
from headrace.broker.streams.streams import AppendRules
from headrace.config import Config
from headrace.errors import (
    AppendTimeReserved,
    ChecksumMismatch,
    ControlBatchRefused,
    CorruptBatch,
    InvalidProducerBatch,
    KeyRequired,
    TransactionalIdRequired,
)
from headrace.log.settings import StreamSettings
from headrace.record import codec
from headrace.record.batch.append_time import stamp_append_time
from headrace.record.layout import CODECS, CRC_AT


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Broker]:
    broker = await Broker.open(Config(data_dir=str(path)))
    try:
        yield broker
    finally:
        await broker.close()


def batch(**fields: Any) -> bytearray:
    return codec.build([(b"k", b"v" * 100, (), 5)], **fields)


def test_rules_are_plain_unless_the_stream_itself_sets_a_codec_or_append_time() -> None:
    settings = StreamSettings(compression="zstd")
    assert AppendRules(settings, {}).is_plain, "the broker's default is for batches that the broker builds"
    rules = AppendRules(settings, {"compression": "zstd"})
    assert (rules.is_plain, rules.codec) == (False, CODECS["zstd"])
    assert not AppendRules(StreamSettings(timestamp_type="append"), {}).is_plain
    assert AppendRules(StreamSettings(cleanup_policy="compact"), {}).needs_key


async def test_batches_are_rewritten_as_the_settings_demand(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        stream = await broker.streams.create("t", config={"compression": "gzip", "timestamp_type": "append"})
        data = batch()
        appended = broker.appender.append(stream, stream.partitions[0], data, codec.validate(data))
        await appended.ticket
        assert (appended.messages, appended.append_time_ms > 5) == (1, True)
        stored = stream.partitions[0].read(0).data
        assert codec.scan(stored)[0].codec == CODECS["gzip"]
        assert codec.records(stored)[0].timestamp == appended.append_time_ms


def stamped() -> bytearray:
    data = batch()
    stamp_append_time(data, 7)
    return data


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (bytearray(), CorruptBatch),
        (stamped(), AppendTimeReserved),
        (batch(control=True, transactional=True, producer_id=1, base_sequence=0), ControlBatchRefused),
        (batch(producer_id=1, base_sequence=0) + batch(), InvalidProducerBatch),
        (batch(transactional=True), InvalidProducerBatch),
        (batch(producer_id=1), InvalidProducerBatch),
        (batch(producer_id=1, base_sequence=0, transactional=True), TransactionalIdRequired),
    ],
)
async def test_each_rejection_has_its_own_type(tmp_path: Path, data: bytearray, kind: type[Exception]) -> None:
    async with opened(tmp_path) as broker:
        stream = await broker.streams.create("t")
        with pytest.raises(kind) as caught:
            broker.appender.append(stream, stream.partitions[0], data, codec.scan(data), Sender())
        assert type(caught.value) is kind
        assert stream.partitions[0].end_offset == 0


def test_a_wrong_checksum_and_a_missing_key_are_different_error_types() -> None:
    data = batch()
    data[CRC_AT] ^= 1
    with pytest.raises(ChecksumMismatch):
        codec.validate(data)
    with pytest.raises(KeyRequired):
        codec.validate(codec.build([(None, b"v", (), 5)]), keyed=True)
