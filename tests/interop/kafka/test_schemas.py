"""The schema registry with the clients and serializers that people have: Confluent's for Python, and one for Node."""

import itertools
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.schema_registry import (
    Metadata,
    MetadataProperties,
    Rule,
    RuleKind,
    RuleMode,
    RuleSet,
    Schema,
    SchemaReference,
    SchemaRegistryClient,
    ServerConfig,
)
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from tests.interop.kafka.broker import KafkaBroker
from tests.interop.kafka.jars import npm_gives

Name = Callable[[str], str]
SECONDS = 60
ORDER = '{"type":"record","name":"Order","fields":[{"name":"id","type":"int"}]}'
PRICED = (
    '{"type":"record","name":"Order","fields":'
    '[{"name":"id","type":"int"},{"name":"price","type":["null","double"],"default":null}]}'
)
LISTENERS = {"http": True}


def url(broker: KafkaBroker) -> str:
    return f"http://127.0.0.1:{broker.http_port}/registry"


@pytest.fixture
def registry(broker: KafkaBroker) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": url(broker)}) as client:
        yield client


def there_and_back(broker: KafkaBroker, topic: str, value: bytes) -> bytes:
    producer = Producer({"bootstrap.servers": broker.address})
    producer.produce(topic, value)
    assert producer.flush(SECONDS) == 0
    reader = Consumer({"bootstrap.servers": broker.address, "group.id": topic, "auto.offset.reset": "earliest"})
    reader.subscribe([topic])
    try:
        message = reader.poll(SECONDS)
        assert message is not None and message.error() is None
        found = message.value()
        assert found is not None
        return found
    finally:
        reader.close()


def context(topic: str) -> SerializationContext:
    return SerializationContext(topic, MessageField.VALUE)


def test_avro_is_written_with_one_schema_and_read_with_a_newer_one(
    broker: KafkaBroker, registry: SchemaRegistryClient, name: Name
) -> None:
    topic = name("orders")
    written = AvroSerializer(registry, ORDER)({"id": 7}, context(topic))
    stored = there_and_back(broker, topic, written)
    assert registry.get_subjects() and registry.get_versions(f"{topic}-value") == [1]
    AvroSerializer(registry, PRICED)({"id": 8, "price": 1.5}, context(topic))
    assert registry.get_versions(f"{topic}-value") == [1, 2]
    assert AvroDeserializer(registry, PRICED)(stored, context(topic)) == {"id": 7, "price": None}


def test_a_schema_that_would_break_readers_is_refused_before_anything_is_produced(
    registry: SchemaRegistryClient, name: Name
) -> None:
    topic = name("orders")
    AvroSerializer(registry, ORDER)({"id": 7}, context(topic))
    breaking = ORDER.replace('"int"', '"string"')
    with pytest.raises(SchemaRegistryError) as refused:
        AvroSerializer(registry, breaking)({"id": "7"}, context(topic))
    assert (refused.value.http_status_code, refused.value.error_code) == (409, 409)
    assert "TYPE_MISMATCH at /fields/0/type/" in refused.value.error_message
    assert not registry.test_compatibility(f"{topic}-value", Schema(breaking, "AVRO"))
    assert registry.test_compatibility(f"{topic}-value", Schema(PRICED, "AVRO"))


def test_json_is_written_and_read(broker: KafkaBroker, registry: SchemaRegistryClient, name: Name) -> None:
    topic = name("events")
    schema = json.dumps(
        {"type": "object", "title": "Event", "properties": {"kind": {"type": "string"}}, "required": ["kind"]}
    )
    written = JSONSerializer(schema, registry)({"kind": "click"}, context(topic))
    stored = there_and_back(broker, topic, written)
    assert JSONDeserializer(schema, schema_registry_client=registry)(stored, context(topic)) == {"kind": "click"}
    assert registry.get_latest_version(f"{topic}-value").schema.schema_type == "JSON"
    narrower = schema.replace('"string"', '"integer"')
    assert not registry.test_compatibility(f"{topic}-value", Schema(narrower, "JSON"))


def message_class(name: str, **fields: int) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package="shop", syntax="proto3")
    message = file.message_type.add(name=name)
    for number, (field, kind) in enumerate(fields.items(), 1):
        message.field.add(name=field, number=number, type=kind, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"shop.{name}"))


def test_protobuf_is_written_and_read(broker: KafkaBroker, registry: SchemaRegistryClient, name: Name) -> None:
    topic = name("payments")
    string, int32 = 9, 5
    payment = message_class("Payment", id=int32, who=string)
    written = ProtobufSerializer(payment, registry)(payment(id=7, who="ann"), context(topic))
    stored = there_and_back(broker, topic, written)
    reader = ProtobufDeserializer(payment, schema_registry_client=registry)
    assert reader(stored, context(topic)) == payment(id=7, who="ann")
    found = registry.get_latest_version(f"{topic}-value")
    assert found.schema.schema_type == "PROTOBUF"
    shown = httpx.get(f"{url(broker)}/subjects/{topic}-value/versions/1/schema", timeout=SECONDS).text
    assert "message Payment {" in shown and "string who = 2;" in shown, shown
    narrower = 'syntax = "proto3"; package shop; message Payment { string id = 1; string who = 2; }'
    assert not registry.test_compatibility(f"{topic}-value", Schema(narrower, "PROTOBUF"))
    wider = 'syntax = "proto3"; package shop; message Payment { int32 id = 1; string who = 2; int64 at = 3; }'
    assert registry.test_compatibility(f"{topic}-value", Schema(wider, "PROTOBUF"))


def test_the_client_manages_subjects_compatibility_levels_and_references(
    registry: SchemaRegistryClient, name: Name
) -> None:
    person, order = name("person"), name("order")
    registry.register_schema(person, Schema('{"type":"record","name":"people.Person","fields":[]}', "AVRO"))
    text = '{"type":"record","name":"Order","fields":[{"name":"who","type":"people.Person"}]}'
    needs = [SchemaReference("people.Person", person, 1)]
    number = registry.register_schema(order, Schema(text, "AVRO", needs))
    registry.clear_latest_caches()
    assert registry.get_schema(number).references == needs
    assert registry.lookup_schema(order, Schema(text, "AVRO", needs)).version == 1
    registry.set_compatibility(order, "NONE")
    assert registry.get_compatibility(order) == "NONE"
    with pytest.raises(SchemaRegistryError) as refused:
        registry.delete_subject(person)
    assert refused.value.error_code == 42206
    assert registry.delete_version(order, 1) == 1
    assert registry.delete_subject(order, permanent=True) == [1]
    assert registry.delete_subject(person) == [1]
    with pytest.raises(SchemaRegistryError) as gone:
        registry.get_version(order, 1)
    assert gone.value.error_code in (40401, 40402)


def test_a_normalizing_serializer_finds_an_equivalent_schema(registry: SchemaRegistryClient, name: Name) -> None:
    topic = name("orders")
    subject = f"{topic}-value"
    turned = '{"fields":[{"type":"int","name":"id","unit":"x","label":"y"}],"name":"Order","type":"record"}'
    config: dict[str, Any] = {"normalize.schemas": True}
    AvroSerializer(registry, turned, conf=config)({"id": 7}, context(topic))
    stored = turned.replace('"unit":"x","label":"y"', '"label":"y","unit":"x"')
    assert registry.lookup_schema(subject, Schema(turned, "AVRO"), normalize_schemas=True).version == 1
    assert registry.lookup_schema(subject, Schema(stored, "AVRO")).version == 1


def test_metadata_and_rules_survive_a_round_trip(registry: SchemaRegistryClient, name: Name) -> None:
    topic = name("orders")
    subject = f"{topic}-value"
    metadata = Metadata(None, MetadataProperties({"major": "1"}), [])
    kind, mode, expr = RuleKind.CONDITION, RuleMode.WRITE, "message.id > 0"
    rule = Rule("positive", None, kind, mode, "CEL", None, None, expr, None, None, False)
    number = registry.register_schema(subject, Schema(ORDER, "AVRO", [], metadata, RuleSet(None, [rule])))
    registry.clear_caches()
    found = registry.get_schema(number)
    assert found.metadata == metadata and found.rule_set is not None and found.rule_set.domain_rules is not None
    (kept,) = found.rule_set.domain_rules
    assert (kept.name, kept.kind, kept.mode, kept.type, kept.expr) == ("positive", kind, mode, "CEL", expr)
    assert registry.get_latest_with_metadata(subject, {"major": "1"}).version == 1
    registry.set_config(subject, ServerConfig(compatibility_group="major"))
    assert registry.get_config(subject).compatibility_group == "major"
    assert registry.test_compatibility_all_versions(subject, Schema('"string"', "AVRO")), "it is of another group"
    assert registry.delete_config(subject).compatibility_group == "major"


def test_the_client_asks_for_ids_versions_and_modes(registry: SchemaRegistryClient, name: Name) -> None:
    one, two = name("one"), name("two")
    text = ORDER.replace("Order", "Asked")
    number = registry.register_schema(one, Schema(text, "AVRO"))
    assert registry.register_schema(two, Schema(text, "AVRO")) == number
    assert registry.get_subjects_by_schema_id(number) == sorted([one, two])
    places = [(at.subject, at.version) for at in registry.get_schema_versions(number)]
    assert places == [(subject, 1) for subject in sorted([one, two])]
    assert set(registry.get_schema_types()) == {"AVRO", "JSON", "PROTOBUF"}
    assert registry.get_subjects(subject_prefix=one) == [one]
    assert registry.test_compatibility(name("nobody"), Schema(text, "AVRO"))
    assert registry.update_mode(one, "READONLY") == registry.get_mode(one) == "READONLY"
    registry.clear_caches()
    assert registry.register_schema(one, Schema(text, "AVRO")) == number, "it is there, so nothing is written"
    assert registry.delete_mode(one) == "READONLY"
    assert registry.delete_version(one, 1) == 1
    assert registry.get_versions(one, deleted=True) == [1]
    assert registry.get_subjects_by_schema_id(number) == [two]
    assert registry.get_subjects(subject_prefix=one, deleted=True) == [one]
    assert registry.get_global_mode() == "READWRITE"
    assert registry.get_contexts() == ["."]


NODE = """
const { SchemaRegistry, SchemaType } = require('@kafkajs/confluent-schema-registry');
const [host, subject] = process.argv.slice(2);
(async () => {
  const registry = new SchemaRegistry({ host });
  const schema = '{"type":"record","name":"Order","namespace":"shop","fields":[{"name":"id","type":"int"}]}';
  const { id } = await registry.register({ type: SchemaType.AVRO, schema }, { subject });
  const encoded = await registry.encode(id, { id: 7 });
  console.log(JSON.stringify(await new SchemaRegistry({ host }).decode(encoded)));
})().catch((error) => { console.log(JSON.stringify({ error: error.message })); });
"""


@pytest.mark.peer
@pytest.mark.slow
def test_the_client_for_node_writes_and_reads(broker: KafkaBroker, name: Name, tmp_path: Path) -> None:
    modules = npm_gives("@kafkajs/confluent-schema-registry", "4.1.0")
    (tmp_path / "client.js").write_text(NODE)
    done = subprocess.run(
        ["node", str(tmp_path / "client.js"), url(broker), name("orders")],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        env={**os.environ, "NODE_PATH": str(modules)},
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {"id": 7}


def test_every_schema_that_was_answered_has_its_id_after_kills(tmp_path: Path) -> None:
    """Four clients register as fast as they can while the broker is killed twice."""
    broker = KafkaBroker(tmp_path, http=True).start()
    told: dict[int, str] = {}
    for life in range(2):
        killed = threading.Event()
        with ThreadPoolExecutor(4) as clients:
            work = [clients.submit(register_until, url(broker), f"{life}-{client}", killed) for client in range(4)]
            while sum(map(len, list(RUNNING.values()))) < 40:  # a list: clients still come to it
                time.sleep(0.01)  # some have to be there first
            broker.kill()
            killed.set()
            for one in work:
                found = one.result(SECONDS)
                assert not told.keys() & found.keys(), "an id was given twice"
                told |= found
        RUNNING.clear()
        broker.start()
        with httpx.Client(timeout=SECONDS) as client:
            for number, text in told.items():
                assert client.get(f"{url(broker)}/schemas/ids/{number}").json() == {"schema": text}
    assert broker.stop() == 0
    assert len(told) >= 80


RUNNING: dict[str, dict[int, str]] = {}


def register_until(base: str, who: str, killed: threading.Event) -> dict[int, str]:
    found = RUNNING.setdefault(who, {})
    with httpx.Client(timeout=SECONDS) as client:
        for number in itertools.count():
            name = f"f{who}_{number}".replace("-", "_")
            text = f'{{"type":"fixed","name":"{name}","size":{number}}}'
            try:
                answer = client.post(f"{base}/subjects/{who}-{number}/versions", json={"schema": text})
            except httpx.HTTPError:
                killed.wait(SECONDS)
                return found
            found[answer.json()["id"]] = text
    raise AssertionError
