"""Deletion of schemas: soft, then permanent, and never of referenced ones."""

from typing import Any

from headrace.broker.schemas.topic import TOPIC
from headrace.schemas.state import RegistryState
from tests.listeners.http.live import Live, StartLive
from tests.listeners.http.registries import INT, LONG, ONE, STRING, TWO, Registry


def test_versions_are_deleted_softly_then_permanently(registry: Registry) -> None:
    registry.register("a", ONE)
    registry.register("a", TWO)
    assert registry.code("DELETE", "/subjects/a/versions/1", permanent="true") == 40407
    assert registry.ok("DELETE", "/subjects/a/versions/1") == 1
    assert registry.code("DELETE", "/subjects/a/versions/1") == 40406
    assert registry.code("GET", "/subjects/a/versions/1") == 40402
    assert registry.ok("GET", "/subjects/a/versions/1", deleted="true")["deleted"] is True
    assert registry.versions("a", deletedOnly="true") == [1]
    assert registry.versions("a", deletedAsNegative="true") == [-1, 2]
    assert [one["version"] for one in registry.ok("GET", "/schemas", deleted="true")] == [1, 2]
    assert registry.ok("GET", "/schemas/ids/1") == {"schema": ONE}, "existing data stays readable"
    assert registry.ok("DELETE", "/subjects/a/versions/1", permanent="true") == 1
    assert registry.code("GET", "/schemas/ids/1") == 40403
    assert registry.code("DELETE", "/subjects/a/versions/9") == 40402
    for wrong in ("0", "x", "2147483648", "1.5"):
        assert registry.code("DELETE", f"/subjects/a/versions/{wrong}") == 42202
    assert registry.ok("DELETE", "/subjects/a/versions/latest") == 2


def after_compaction(live: Live) -> RegistryState:
    """The state of a broker that starts with a compacted topic."""
    records = {one["key"]: one for one in live.read(TOPIC, offset="earliest", limit=1_000)}
    state = RegistryState()
    for one in sorted(records.values(), key=lambda one: int(one["offset"])):
        state.apply(one["key"].encode(), None if one["value"] is None else one["value"].encode())
    return state


def answers(registry: Registry) -> list[Any]:
    shown = {"deleted": "true"}
    found = [registry.ok("GET", "/subjects"), registry.ok("GET", "/schemas", **shown), registry.ok("GET", "/config")]
    for subject in registry.ok("GET", "/subjects", **shown):
        found += [registry.ask("GET", f"/{what}/{subject}").json() for what in ("config", "mode")]
    return found + [registry.ask("GET", f"/schemas/ids/{number}").json() for number in range(1, 12)]


def test_compaction_of_the_topic_changes_no_response(own: StartLive) -> None:
    live = own()
    registry = Registry(live)
    live.create(TOPIC, cleanup_policy="compact", segment_bytes="1KB")
    registry.ok("PUT", "/config", {"compatibility": "NONE"})
    for schema in (ONE, TWO, STRING, LONG, ONE):
        for subject in ("a", "b", "c", "d"):
            registry.register(subject, schema, metadata={"properties": {"of": subject}})
    registry.ok("DELETE", "/subjects/a")
    registry.ok("DELETE", "/subjects/a", permanent="true")
    registry.register("a", INT)
    registry.ok("PUT", "/config/b", {"compatibility": "FULL"})
    registry.ok("DELETE", "/subjects/b/versions/2")
    registry.ok("DELETE", "/subjects/b/versions/2", permanent="true")
    registry.ok("DELETE", "/subjects/c")
    registry.register("c", TWO)
    registry.ok("PUT", "/mode/d", {"mode": "READONLY"})
    before = answers(registry)
    count = len(live.read(TOPIC, offset="earliest", limit=1_000))
    live.client.post(f"/topics/{TOPIC}/compact").raise_for_status()
    assert len(live.read(TOPIC, offset="earliest", limit=1_000)) < count
    live.stop()
    assert answers(Registry(own())) == before


def test_deleted_versions_stay_deleted_when_the_topic_is_compacted(registry: Registry) -> None:
    for schema in (ONE, TWO):
        registry.register("a", schema)
    registry.ok("DELETE", "/subjects/a")
    registry.ok("PUT", "/mode/a", {"mode": "IMPORT"}, force="true")
    registry.register("a", ONE, id=1, version=1)
    assert registry.ok("DELETE", "/subjects/a") == [1]
    assert after_compaction(registry._live).subjects() == registry.ok("GET", "/subjects") == []


def test_the_id_of_a_reimported_version_is_not_reused(own: StartLive) -> None:
    live = own()
    registry = Registry(live)
    registry.ok("PUT", "/mode/a", {"mode": "IMPORT"})
    for number, schema in ((9, ONE), (5, TWO)):
        registry.register("a", schema, id=number, version=1)
    assert registry.code("GET", "/schemas/ids/9") == 40403
    live.client.delete(f"/topics/{TOPIC}").raise_for_status()  # as compaction makes it
    assert registry.register("b", STRING) == 10


def test_a_subject_is_soft_deleted_restored_and_deleted_permanently(registry: Registry) -> None:
    registry.register("a", ONE)
    registry.register("a", TWO)
    registry.ok("PUT", "/config/a", {"compatibility": "NONE"})
    assert registry.code("DELETE", "/subjects/a", permanent="true") == 40405
    assert registry.ok("DELETE", "/subjects/a") == [1, 2]
    assert registry.code("DELETE", "/subjects/a") == 40404
    assert registry.ok("GET", "/subjects") == []
    for which in ("deleted", "deletedOnly"):
        assert registry.ok("GET", "/subjects", **{which: "true"}) == ["a"]
    assert registry.code("GET", "/config/a") == 40408
    assert registry.register("a", ONE) == 1
    assert registry.versions("a") == [3]
    registry.ok("DELETE", "/subjects/a")
    assert registry.ok("DELETE", "/subjects/a", permanent="true") == [1, 2, 3]
    assert registry.code("DELETE", "/subjects/a") == 40401
    assert registry.code("GET", "/schemas/ids/1") == 40403
    assert registry.register("a", LONG) == 3, "an id is never used for another schema"
    assert registry.versions("a") == [1]


def test_ids_are_not_reused_after_compaction(own: StartLive) -> None:
    """As after compaction."""
    live = own()
    registry = Registry(live)
    registry.register("a", ONE)
    registry.ok("DELETE", "/subjects/a")
    registry.ok("DELETE", "/subjects/a", permanent="true")
    live.client.delete(f"/topics/{TOPIC}").raise_for_status()
    live.stop()
    assert Registry(own()).register("b", TWO) == 2


def test_a_referenced_schema_cannot_be_deleted(registry: Registry) -> None:
    person = '{"type":"record","name":"people.Person","fields":[]}'
    order = '{"type":"record","name":"Order","fields":[{"name":"who","type":"people.Person"}]}'
    registry.register("person", person)
    reference = {"name": "people.Person", "subject": "person", "version": 1}
    assert registry.register("order", order, references=[reference]) == 2
    assert registry.ok("GET", "/schemas/ids/2") == {"schema": order, "references": [reference]}
    assert registry.ok("GET", "/subjects/person/versions/1/referencedby") == [2]
    assert registry.code("DELETE", "/subjects/person/versions/1") == 42206
    assert registry.code("DELETE", "/subjects/person") == 42206
    assert registry.code("POST", "/subjects/o/versions", {"schema": order}) == 42201
    missing = {**reference, "version": 2}
    assert registry.code("POST", "/subjects/o/versions", {"schema": order, "references": [missing]}) == 42201
    registry.ok("DELETE", "/subjects/order")
    assert registry.ok("GET", "/subjects/person/versions/1/referencedby") == []
    assert registry.ok("GET", "/subjects/person/versions/1/referencedby", deleted="true") == [2]
    assert registry.ok("DELETE", "/subjects/person") == [1]
    for path in ("/subjects/person", "/subjects/person/versions/1"):
        assert registry.code("DELETE", path, permanent="true") == 42206, "the id of the order still needs it"
    registry.ok("DELETE", "/subjects/order", permanent="true")
    assert registry.ok("DELETE", "/subjects/person", permanent="true") == [1]


def test_a_subject_with_only_internal_references_can_be_deleted(registry: Registry) -> None:
    registry.ok("PUT", "/config/a", {"compatibility": "NONE"})
    registry.register("a", '{"type":"record","name":"p","fields":[]}')
    registry.register("a", '["null","p"]', references=[{"name": "p", "subject": "a", "version": 1}])
    for permanent in ("false", "true"):
        assert registry.ok("DELETE", "/subjects/a", permanent=permanent) == [1, 2]
    assert registry.ok("GET", "/subjects", deleted="true") == []


def test_the_settings_of_a_subject_are_deleted_with_its_last_version(registry: Registry) -> None:
    registry.register("a", ONE)
    registry.ok("DELETE", "/subjects/a/versions/1")
    registry.ok("PUT", "/config/a", {"compatibility": "FULL"})
    registry.ok("PUT", "/mode/a", {"mode": "READWRITE"})
    registry.ok("DELETE", "/subjects/a/versions/1", permanent="true")
    assert (registry.code("GET", "/config/a"), registry.code("GET", "/mode/a")) == (40408, 40409)
