"""A broker with its Kafka listener in this process, and a client that sends and receives raw requests."""

import asyncio
import contextlib
import dataclasses
import datetime
import struct
import typing
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headrace.broker.broker import Broker
from headrace.config import Address, Config
from headrace.listeners.kafka import listener as kafka_listener
from headrace.log.settings import LogSettings
from headrace.record import codec as records
from headrace.record.types import Buffer
from headrace.wire.kafka.apis import Api, has_header_tags, is_flexible
from headrace.wire.kafka.codec import decode
from headrace.wire.kafka.schema import default_of, request_entity, response_struct, shape_of
from tests.wire.kafka.test_schema_codec import written

SECONDS = 60  # generous, for busy machines


class Closed(Exception):
    """The broker closed the connection."""


class World:
    def __init__(self, broker: Broker, listener: kafka_listener.KafkaListener) -> None:
        self.broker = broker
        self.listener = listener
        self.context = listener.context
        self.clients: list[Client] = []

    async def client(self) -> "Client":
        reader, writer = await asyncio.open_connection("127.0.0.1", self.listener.port)
        client = Client(reader, writer)
        self.clients.append(client)
        return client

    async def topic(self, name: str, partitions: int = 1, **config: Any) -> str:
        await self.broker.streams.create(name, partitions, config)
        return name


@contextlib.asynccontextmanager
async def world_at(folder: Path, **settings: Any) -> AsyncIterator[World]:
    usual = {"http": None, "amqp": None, "log": LogSettings(journal_file_bytes=8 << 20)}  # quick to create
    # Test records have old timestamps: retention would delete them during a test.
    options = {**usual, "retention_interval_ms": 3_600_000, **settings}
    config = Config(data_dir=str(folder), kafka=Address("127.0.0.1", 0), **options)
    broker = await Broker.open(config)
    listener = await kafka_listener.start(broker, Address("127.0.0.1", 0), broker.config)
    world = World(broker, listener)
    try:
        yield world
    finally:
        for client in world.clients:
            client.close()
        await listener.close()
        await broker.close()


@contextlib.asynccontextmanager
async def topic_at(folder: Path, *, partitions: int = 1, **settings: Any) -> AsyncIterator[tuple[World, "Client"]]:
    """A new broker with topic "t", and a client of it. `world_at` opens the same folder again."""
    async with world_at(folder, **settings) as world:
        await world.topic("t", partitions)
        yield world, await world.client()


class Client:
    """Responses are decoded by headrace's own schemas; tests/wire compares those with kio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._correlation_id = 0

    @property
    def address(self) -> tuple[str, int]:
        """The client's address as the broker sees it."""
        host, port = self._writer.get_extra_info("sockname")
        return host, port

    def close(self) -> None:
        self._writer.close()

    def send_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    def send(self, api: int, version: int, body: bytes, *, flexible: bool | None = None) -> int:
        self._correlation_id += 1
        header = struct.pack(">hhih", api, version, self._correlation_id, 4) + b"test"
        if flexible if flexible is not None else is_flexible(Api(api), version):
            header += b"\0"
        self.send_bytes(struct.pack(">i", len(header) + len(body)) + header + body)
        return self._correlation_id

    async def receive(self) -> bytes:
        """One response, without its size."""
        try:
            async with asyncio.timeout(SECONDS):
                [size] = struct.unpack(">i", await self._reader.readexactly(4))
                return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Closed from error

    async def is_closed(self) -> bool:
        try:
            await self.receive()
        except Closed:
            return True
        return False

    async def call(self, api: Api, version: int, **fields: Any) -> SimpleNamespace:
        """Send a request with fields as kio names them, and decode the response."""
        schema = request_entity(api, version)
        correlation_id = self.send(api, version, written(make(schema, fields)))
        data = await self.receive()
        assert struct.unpack_from(">i", data)[0] == correlation_id
        return decode(response_struct(api, version), data, 4 + has_header_tags(api, version))

    async def produce(
        self, topic: str, data: Buffer, *, acks: int = -1, partition: int = 0, of: str | None = None
    ) -> SimpleNamespace:
        """`of` is the transactional id, which transactional batches need."""
        answer = await self.call(
            Api.PRODUCE,
            9,
            transactional_id=of,
            acks=acks,
            timeout=1000,
            topic_data=[{"name": topic, "partition_data": [{"index": partition, "records": bytes(data)}]}],
        )
        result: SimpleNamespace = answer.responses[0].partition_responses[0]
        return result

    async def fetch(self, topic: str, offset: int = 0, **fields: Any) -> SimpleNamespace:
        wanted = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
        asked = {"max_wait": 0, "min_bytes": 1, "max_bytes": 1 << 24, "session_epoch": -1, **fields}
        topics = [{"topic": topic, "partitions": [wanted]}]
        answer = await self.call(Api.FETCH, 12, topics=topics, **asked)
        result: SimpleNamespace = answer.responses[0].partitions[0]
        return result


def make(schema: Any, fields: dict[str, Any]) -> Any:
    """A kio entity from plain values; other fields have their default, or are empty."""
    hints = typing.get_type_hints(schema)
    values: dict[str, Any] = {}
    known = {field.name for field in dataclasses.fields(schema)}
    assert set(fields) <= known, set(fields) - known
    for field in dataclasses.fields(schema):
        shape = shape_of(field, hints[field.name])
        if field.name not in fields and field.default is not dataclasses.MISSING:
            continue
        value = fields.get(field.name, default_of(field, shape))
        if shape.nested is not None and value is not None:
            value = [make(shape.nested, one) for one in value] if shape.array else make(shape.nested, value)
        elif shape.kafka_type.startswith("timedelta"):
            value = datetime.timedelta(milliseconds=value)
        elif shape.kafka_type == "uuid":
            value = uuid.UUID(bytes=value) if not shape.array else [uuid.UUID(bytes=one) for one in value]
        values[field.name] = tuple(value) if shape.array and value is not None else value
    return schema(**values)


def batch(*values: bytes, **options: Any) -> bytearray:
    return records.build([(None, value, (), 1_700_000_000_000) for value in values], **options)


async def alive(world: World) -> None:
    """Assert that another client is served."""
    other = await world.client()
    assert (await other.call(Api.API_VERSIONS, 3)).error_code == 0
    other.close()
