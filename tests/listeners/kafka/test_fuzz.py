"""Well-formed nonsense requests of every API and version, and random bytes: a response or a closed connection, never a
bug."""

import asyncio
import dataclasses
import logging
import random
import struct
import typing
from pathlib import Path
from typing import Any

import pytest

from headrace.wire.kafka.apis import VERSIONS, Api
from headrace.wire.kafka.schema import request_entity, shape_of
from tests.listeners.kafka.world import World, batch, make, world_at
from tests.wire.kafka.test_schema_codec import written

ROUNDS = 6
INTS = {
    "int8": (-128, -2, -1, 0, 1, 2, 3, 32, 127),
    "int16": (-32768, -1, 0, 1, 7, 32767),
    "uint16": (0, 1, 65535),
    "int32": (-(2**31), -2, -1, 0, 1, 2, 100, 6000, 2**31 - 1),
    "int64": (-(2**63), -5, -3, -2, -1, 0, 1, 2, 10**12, 2**63 - 1),
    "error_code": (0,),
    "timedelta_i32": (-1, 0, 1, 10, 6000),
    "timedelta_i64": (0, 1),
    "datetime_i64": (0,),
}
TEXTS = ("", "t", "g", "x", "é", "a/b", "..", "x" * 300, "1", "retention.ms", "consumer", "range", "(a+)+$")


def nonsense(schema: Any, rng: random.Random, topic_id: bytes) -> dict[str, Any]:
    hints = typing.get_type_hints(schema)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(schema):
        shape = shape_of(field, hints[field.name])
        if "tag" in field.metadata:
            continue
        if shape.nullable and rng.random() < 0.3:
            values[field.name] = None
            continue

        def one(shape: Any = shape) -> Any:
            if shape.nested is not None:
                return nonsense(shape.nested, rng, topic_id)
            if shape.kafka_type in INTS:
                return rng.choice(INTS[shape.kafka_type])
            if shape.kafka_type == "string":
                return rng.choice(TEXTS)
            if shape.kafka_type == "bool":
                return rng.random() < 0.5
            if shape.kafka_type == "uuid":
                return rng.choice((topic_id, bytes(16), rng.randbytes(16)))
            if shape.kafka_type == "float64":
                return rng.choice((0.0, -1.0, float("nan")))
            return rng.choice((b"", b"x", rng.randbytes(70), bytes(batch(b"x"))))

        values[field.name] = [one() for _ in range(rng.randrange(4))] if shape.array else one()
    return values


async def test_well_formed_nonsense_requests_find_no_bug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    rng = random.Random(5)
    async with world_at(tmp_path) as world:
        await world.topic("t", 2)
        topic_id = world.context.topics.id_of(world.broker.streams.get("t"))
        for api, versions in VERSIONS.items():
            for version in range(3 if api is Api.PRODUCE else versions.lowest, versions.highest + 1):
                schema = request_entity(api, version)
                client = await world.client()
                for _ in range(ROUNDS):
                    client.send(api, version, written(make(schema, nonsense(schema, rng, topic_id))))
                await asyncio.sleep(0)
                client.close()
        await settle(world)
    bugs = [f"{record.getMessage()} {record.exc_info}" for record in caplog.records]
    assert bugs == []


async def test_random_bytes_find_no_bug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    rng = random.Random(6)
    async with world_at(tmp_path) as world:
        await world.topic("t")
        for api, versions in VERSIONS.items():
            for version in {versions.lowest, versions.highest}:
                for _ in range(5):
                    client = await world.client()
                    client.send(api, version, rng.randbytes(rng.randrange(120)))
                    await asyncio.sleep(0)
                    client.close()
        for _ in range(100):
            client = await world.client()
            data = rng.randbytes(rng.randrange(1, 60))
            client.send_bytes(struct.pack(">i", len(data)) + data)
            client.close()
        await settle(world)
    assert [record.getMessage() for record in caplog.records] == []


async def settle(world: World) -> None:
    """All bytes were processed, and another client is served."""
    for _ in range(3):
        other = await world.client()
        assert (await other.call(Api.API_VERSIONS, 3)).error_code == 0
        other.close()
        await asyncio.sleep(0.05)
