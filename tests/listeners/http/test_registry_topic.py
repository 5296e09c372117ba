"""The schema registry and its topic: records of other registries, damage, races, unsafe topic settings."""

import asyncio
import contextlib
import json
from typing import Any

import pytest
from crc32c import crc32c

from headrace.broker.schemas.topic import TOPIC
from headrace.broker.streams.partition import Partition
from headrace.config import Address
from headrace.errors import CorruptLog, StorageError
from headrace.record import codec
from headrace.schemas import kinds
from headrace.schemas.state import Content, Version, schema_entry
from tests.listeners.http.live import StartLive
from tests.listeners.http.registries import INT, ONE, STRING, TWO, Registry, record


def test_records_of_other_registries_are_read_and_unknown_ones_ignored(own: StartLive) -> None:
    live = own()
    registry = Registry(live)
    live.client.post("/topics", json={"name": TOPIC, "partitions": 1, "config": {"cleanup_policy": "compact"}})

    def write(key: str, value: str | None) -> None:
        live.client.post(f"/topics/{TOPIC}/messages", json={"key": key, "value": value}).raise_for_status()

    write('{"keytype":"NOOP","magic":0}', None)
    write(
        '{"keytype":"SCHEMA","subject":"a","version":1,"magic":1}',
        '{"subject":"a","version":1,"id":100004,"md5":"x","schema":"\\"string\\"","deleted":false,"ts":1}',
    )
    assert registry.ok("GET", "/schemas/ids/100004") == {"schema": STRING}
    for key, value in (
        ("not json", "x"),
        ('{"keytype":"SCHEMA","subject":"a","version":2,"magic":1}', "{}"),
        ('{"keytype":"SCHEMA","subject":"a","version":2,"magic":1}', '{"subject":"a","version":0,"id":-1,"schema":""}'),
        ('{"keytype":"CONFIG","subject":null,"magic":0}', '{"compatibilityLevel":"SIDEWAYS"}'),
    ):
        write(key, value)
    write('{"keytype":"CONFIG","subject":"a","magic":0}', '{"compatibilityLevel":"NONE"}')
    assert registry.versions("a") == [1]
    assert registry.ok("GET", "/config/a") == {"compatibilityLevel": "NONE"}
    assert registry.register("a", INT) == 100005
    read = live.client.get(f"/topics/{TOPIC}/messages", params={"offset": "earliest"}).json()["messages"][-1]
    assert read["key"] == '{"keytype":"SCHEMA","subject":"a","version":2,"magic":1}'
    assert json.loads(read["value"]) == {"subject": "a", "version": 2, "id": 100005, "schema": INT, "deleted": False}


@pytest.mark.parametrize(
    ("kind", "theirs", "typed"),
    [
        (
            "PROTOBUF",
            'syntax = "proto3";\npackage shop;\n\nmessage M {\n  string s = 1;\n}\n',
            'syntax="proto3"; package shop; message M { string s = 1; }',
        ),
        ("JSON", '{"type":"number","maximum":1.0}', '{"type": "number", "maximum": 1}'),
        ("AVRO", '{"type":"record","name":"r","fields":[]}', '{"name": "r", "type": "record", "fields": []}'),
    ],
    ids=["PROTOBUF", "JSON", "AVRO"],
)
def test_a_schema_stored_by_another_registry_keeps_its_id(
    registry: Registry, kind: str, theirs: str, typed: str
) -> None:
    registry.register("other", STRING)  # so that there is a topic
    key, value = schema_entry(Version("a", 1, 100, Content(kind, theirs, ())))
    assert value is not None
    record = {"key": key.decode(), "value": value.decode()}
    registry._live.client.post(f"/topics/{TOPIC}/messages", json=record).raise_for_status()
    body = {"schema": typed, "schemaType": kind}
    for _ in range(2):
        assert registry.ok("POST", "/subjects/a/versions", body) == {"id": 100, "version": 1}
    assert registry.ok("POST", "/subjects/a", body)["schema"] == theirs


def test_an_undecodable_batch_is_skipped(registry: Registry) -> None:
    registry.register("a", ONE)
    live = registry._live
    bad = codec.build([(None, b"x" * 100, (), -1)], codec=0, timestamp_ms=1)
    bad[21:23] = (4).to_bytes(2, "big")  # claims zstd
    bad[17:21] = crc32c(bytes(bad[21:])).to_bytes(4, "big")

    async def store() -> None:
        await live.broker.streams.get(TOPIC).partitions[0].append(bad, None)

    live.call(store())
    assert registry.register("a", TWO) == 2
    assert registry.versions("a") == [1, 2]


def _serves_what_it_has_read_and_takes_nothing(registry: Registry) -> None:
    assert registry.ok("GET", "/schemas/ids/1") == {"schema": ONE}
    assert registry.versions("a") == [1]
    assert registry.register("a", ONE) == 1, "nothing is to be written for that"
    for method, path, body in (
        ("POST", "/subjects/b/versions", {"schema": STRING}),
        ("DELETE", "/subjects/a", None),
        ("PUT", "/config", {"compatibility": "NONE"}),
    ):
        answer = registry.ask(method, path, body)
        assert answer.status_code == 503
        assert (
            "schemas cannot be changed, because the topic _schemas cannot be read to its end: a file is"
            in answer.json()["message"]
        )
    assert registry.code("GET", "/schemas/ids/2") == 503, "it may be behind the damage"


def test_damage_found_at_the_start_keeps_earlier_schemas(own: StartLive) -> None:
    first = own()
    for schema in (ONE, TWO):
        Registry(first).register("a", schema)
    first.stop()
    live = own()

    async def damage() -> None:
        live.broker.streams.get(TOPIC).partitions[0].log.damaged_from(1, CorruptLog("a file", 7, "a test"))

    live.call(damage())
    _serves_what_it_has_read_and_takes_nothing(Registry(live))
    assert len(live.read(TOPIC, offset="earliest")) == 1


def test_damage_found_while_reading_keeps_earlier_schemas_and_raises_an_alarm(
    own: StartLive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry(own())
    registry.register("a", ONE)
    read_now, reads = Partition.read_now, []

    def read(partition: Partition, offset: int, *arguments: Any, **options: Any) -> Any:
        if offset > 0:
            reads.append(offset)
            raise CorruptLog("a file", 7, "a test")
        return read_now(partition, offset, *arguments, **options)

    monkeypatch.setattr(Partition, "read_now", read)
    message = {"key": "somebody", "value": "else's"}
    registry._live.client.post(f"/topics/{TOPIC}/messages", json=message).raise_for_status()
    for _ in range(2):
        _serves_what_it_has_read_and_takes_nothing(registry)
    assert reads == [1], "it is not read again for every answer"
    assert "schemas are served up to offset 1" in caplog.text
    assert "1 log is damaged" in registry._live.client.get("/api/headrace/overview").text


def test_a_failed_read_is_retried(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register("a", ONE)
    message = {"key": "somebody", "value": "else's"}
    registry._live.client.post(f"/topics/{TOPIC}/messages", json=message).raise_for_status()

    def fails(*arguments: Any, **options: Any) -> Any:
        raise StorageError("a file is out of reach")

    with monkeypatch.context() as patched:
        patched.setattr(Partition, "read_now", fails)
        _serves_what_it_has_read_and_takes_nothing(registry)
    assert registry.register("a", TWO) == 2


def test_no_id_is_assigned_while_an_open_transaction_hides_earlier_ones(own: StartLive) -> None:
    from confluent_kafka import Producer

    live = own(kafka=Address("localhost", 0))
    registry = Registry(live)
    registry.register("a", ONE)
    producer = Producer({"bootstrap.servers": live.server.listeners["kafka"].addresses[0], "transactional.id": "x"})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(TOPIC, "none of the registry's", "x")
    producer.flush(60)
    for schema in (STRING, INT):
        assert registry.code("POST", "/subjects/b/versions", {"schema": schema}) == 429
    assert registry.ok("GET", "/schemas/ids/1") == {"schema": ONE}
    producer.commit_transaction(60)
    assert [registry.register(name, schema) for name, schema in (("b", STRING), ("c", INT))] == [2, 3]


def test_no_schema_is_stored_in_a_topic_that_could_lose_it(registry: Registry) -> None:
    for policy in ("delete", "compact,delete"):
        body = {"name": TOPIC, "config": {"cleanup_policy": policy}}
        registry._live.client.post("/topics", json=body).raise_for_status()
        assert registry.code("POST", "/subjects/a/versions", {"schema": ONE}) == 409
        registry._live.client.delete(f"/topics/{TOPIC}").raise_for_status()
    assert registry.register("a", ONE) == 1


def test_a_registry_whose_topic_is_deleted_is_empty(registry: Registry) -> None:
    registry.register("a", ONE)
    registry._live.client.delete(f"/topics/{TOPIC}").raise_for_status()
    assert registry.ok("GET", "/subjects") == []
    assert registry.register("b", TWO) == 1


def test_an_id_assigned_by_another_writer_is_not_reused(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes as another registry, or a copy of its topic, may do at any time."""
    live = registry._live
    registry.register("a", ONE)
    differences = kinds.differences
    key, value = schema_entry(Version("b", 1, 2, Content("AVRO", STRING, ())))
    assert value is not None
    others = [{"key": key.decode(), "value": value.decode()}]

    def slowly(*arguments: Any) -> list[str]:
        if others:
            live.client.post(f"/topics/{TOPIC}/messages", json=others.pop()).raise_for_status()
        return differences(*arguments)

    monkeypatch.setattr(kinds, "differences", slowly)
    assert registry.register("a", TWO) == 3
    assert registry.ok("GET", "/schemas/ids/2") == {"schema": STRING}


def test_a_disconnect_before_the_decision_registers_nothing(registry: Registry) -> None:
    schemas = registry._live.broker.schemas.registry
    content = Content("AVRO", ONE, ())

    async def hang_up() -> list[str]:
        async with schemas._changing:
            waiting = asyncio.ensure_future(schemas.register("gone", content))
            while not schemas._changing._waiters:
                await asyncio.sleep(0.001)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
        await schemas.register("a", content)
        return (await schemas.current()).subjects()

    assert registry._live.call(hang_up()) == ["a"]


def test_concurrent_registrations_share_an_id_and_leave_no_gaps(registry: Registry) -> None:
    import concurrent.futures

    schemas = [record(("a", "int"), (f"b{number}", "string"), **{f"b{number}": ""}) for number in range(8)]
    registry.ok("PUT", "/config", {"compatibility": "NONE"})
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda schema: registry.register("a", schema), schemas * 4))
    assert sorted(set(ids)) == list(range(1, 9))
    assert {ids[number] for number in range(0, 32, 8)} == {ids[0]}
    assert registry.versions("a") == list(range(1, 9))
