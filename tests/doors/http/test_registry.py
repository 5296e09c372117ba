"""The schema registry over HTTP: Confluent's API, codes and words. Clients: tests/interop/kafka/test_schemas.py."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from crc32c import crc32c

from headrace.broker.partition import Partition
from headrace.broker.rights import Permission
from headrace.broker.schemas import TOPIC
from headrace.config import Address
from headrace.errors import CorruptLog, StorageError
from headrace.record import codec
from headrace.schemas import kinds
from headrace.schemas.kinds import LEVELS
from headrace.schemas.state import Content, State, Version, schema_entry
from tests.doors.http.live import Live

MEDIA = "application/vnd.schemaregistry.v1+json"
STRING, INT, LONG = '"string"', '"int"', '"long"'


def record(*fields: tuple[str, Any], **defaults: Any) -> str:
    listed = [{"name": name, "type": kind} for name, kind in fields]
    for one in listed:
        if one["name"] in defaults:
            one["default"] = defaults[one["name"]]
    return json.dumps({"type": "record", "name": "r", "fields": listed}, separators=(",", ":"))


ONE = record(("a", "int"))
TWO = record(("a", "int"), ("b", "string"), b="")
BROKEN = record(("a", "int"), ("b", "string"))


class Registry:
    def __init__(self, live: Live, auth: tuple[str, str] | None = None) -> None:
        self._live, self._auth = live, auth

    def ask(self, method: str, path: str, body: Any = None, **query: Any) -> httpx.Response:
        headers = {"content-type": MEDIA} if body is not None else {}
        content = None if body is None else json.dumps(body)
        return self._live.client.request(
            method, f"/registry{path}", content=content, headers=headers, params=query, auth=self._auth
        )

    def ok(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        answer = self.ask(method, path, body, **query)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == MEDIA
        return answer.json()

    def code(self, method: str, path: str, body: Any = None, **query: Any) -> int:
        answer = self.ask(method, path, body, **query)
        found = answer.json()
        assert found.keys() == {"error_code", "message"}
        code: int = found["error_code"]
        assert answer.status_code == (code if code < 1000 else code // 100)
        return code

    def register(self, subject: str, schema: str, **more: Any) -> int:
        made: int = self.ok("POST", f"/subjects/{subject}/versions", {"schema": schema, **more})["id"]
        return made

    def versions(self, subject: str, **query: Any) -> list[int]:
        found: list[int] = self.ok("GET", f"/subjects/{subject}/versions", **query)
        return found


@pytest.fixture
def registry(own: type[Live]) -> Registry:
    return Registry(own())


@pytest.fixture
def shared(live: Live) -> Iterator[Registry]:
    """For tests with subjects of their own."""
    yield Registry(live)


def test_an_empty_registry_answers_and_makes_no_topic(registry: Registry) -> None:
    assert registry.ok("GET", "/subjects") == []
    assert registry.ok("GET", "") == registry.ok("GET", "/") == {}
    assert registry.ok("GET", "/schemas/types") == ["AVRO", "JSON", "PROTOBUF"]
    assert registry.ok("GET", "/config") == {"compatibilityLevel": "BACKWARD"}
    assert registry.ok("GET", "/mode") == {"mode": "READWRITE"}
    assert registry.ok("GET", "/contexts") == ["."]
    assert registry.code("GET", "/schemas/ids/1") == 40403
    assert registry.code("GET", "/subjects/s/versions") == 40401
    assert registry.code("GET", "/nowhere") == 404
    assert registry._live.broker.streams.find(TOPIC) is None


def test_a_schema_has_an_id_and_its_subjects_have_versions(registry: Registry) -> None:
    assert registry.register("a", ONE) == registry.register("a", ONE) == registry.register("b%2Fc", ONE) == 1
    assert registry.register("a", TWO) == 2
    assert registry.ok("GET", "/subjects") == ["a", "b/c"]
    assert registry.versions("a") == [1, 2]
    assert registry.ok("GET", "/schemas/ids/1") == {"schema": ONE}
    assert registry.ok("GET", "/schemas/ids/2", fetchMaxId="true") == {"schema": TWO, "maxId": 2}
    assert registry.ok("GET", "/schemas/ids/1/schema") == json.loads(ONE)
    assert registry.ok("GET", "/schemas/ids/1/subjects") == ["a", "b/c"]
    places = [{"subject": name, "version": 1} for name in ("a", "b/c")]
    assert registry.ok("GET", "/schemas/ids/1/versions") == places
    latest = {"subject": "a", "version": 2, "id": 2, "schema": TWO}
    for version in ("2", "latest", "-1"):
        assert registry.ok("GET", f"/subjects/a/versions/{version}") == latest
    assert registry.ok("GET", "/subjects/a/versions/2/schema") == json.loads(TWO)
    assert registry.ok("POST", "/subjects/a", {"schema": json.dumps(json.loads(TWO), indent=2)}) == latest
    assert registry.code("POST", "/subjects/a", {"schema": STRING}) == 40403
    assert registry.code("POST", "/subjects/nobody", {"schema": STRING}) == 40401
    assert [one["version"] for one in registry.ok("GET", "/schemas", subjectPrefix="a")] == [1, 2]
    assert [one["version"] for one in registry.ok("GET", "/schemas", subjectPrefix="a", latestOnly="true")] == [2]
    assert registry.ok("GET", "/subjects", offset=1, limit=1) == ["b/c"]
    for limit in (0, -7):
        assert registry.ok("GET", "/subjects", limit=limit) == ["a", "b/c"]
    for prefix in (":*:", ":.:", ":*:a"):
        assert "a" in registry.ok("GET", "/subjects", subjectPrefix=prefix)
    assert registry.ok("GET", "/subjects/:.:a/versions") == [1, 2]


def test_schemas_are_listed_a_thousand_at_a_time(shared: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.doors.http.registry.LISTED_MAX", 2)
    for number in range(3):
        shared.register(f"listed-{number}", ONE)

    def listed(**query: Any) -> list[str]:
        return [one["subject"] for one in shared.ok("GET", "/schemas", subjectPrefix="listed-", **query)]

    assert listed() == listed(limit=-1) == listed(limit=3) == ["listed-0", "listed-1"]
    assert (listed(offset=2), listed(offset=1, limit=1)) == (["listed-2"], ["listed-1"])


def test_everything_outlives_a_restart(own: type[Live]) -> None:
    first = own()
    registry = Registry(first)
    registry.register("a", ONE)
    registry.register("a", TWO)
    registry.ok("PUT", "/config/a", {"compatibility": "full"})
    registry.ok("PUT", "/mode/b", {"mode": "READONLY"})
    registry.ok("DELETE", "/subjects/a/versions/1")
    first.stop()
    again = Registry(own())
    assert again.versions("a") == [2]
    assert again.versions("a", deleted="true") == [1, 2]
    assert again.ok("GET", "/config/a") == {"compatibilityLevel": "FULL"}
    assert again.ok("GET", "/mode/b") == {"mode": "READONLY"}
    assert again.register("c", STRING) == 3, "ids go on"


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_lets_follow_what_it_says(shared: Registry, level: str) -> None:
    subject = f"level-{level}"
    shared.register(subject, LONG)
    shared.ok("PUT", f"/config/{subject}", {"compatibility": level})
    # An int can be read as a long, and not the other way round.
    is_allowed = {"NONE": True, "FORWARD": True, "FORWARD_TRANSITIVE": True}.get(level, False)
    answer = shared.ok("POST", f"/compatibility/subjects/{subject}/versions/latest", {"schema": INT}, verbose="true")
    assert answer["is_compatible"] == is_allowed == (answer["messages"] == [])
    body = {"schema": INT}
    if is_allowed:
        assert shared.ok("POST", f"/subjects/{subject}/versions", body)["version"] == 2
    else:
        assert shared.code("POST", f"/subjects/{subject}/versions", body) == 409
        assert shared.versions(subject) == [1]


def test_a_transitive_level_looks_at_all_versions_and_others_at_the_last(shared: Registry) -> None:
    without = record(("a", "int"))
    optional = record(("a", "int"), ("b", "string"), b="")
    required = record(("a", "int"), ("b", "string"))
    for level, code in (("BACKWARD", 200), ("BACKWARD_TRANSITIVE", 409)):
        for schema in (without, optional):
            shared.register(f"chain-{level}", schema)
        shared.ok("PUT", f"/config/chain-{level}", {"compatibility": level})
        assert shared.ask("POST", f"/subjects/chain-{level}/versions", {"schema": required}).status_code == code
        assert shared.ok("POST", f"/compatibility/subjects/chain-{level}/versions", {"schema": required}) == {
            "is_compatible": code == 200
        }


def test_a_new_version_is_the_only_one_that_is_parsed_however_many_it_is_compared_with(
    shared: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.ok("PUT", "/config/long", {"compatibility": "FULL_TRANSITIVE"})
    parse, parsed = kinds.parse, []

    def counted(kind: str, text: str, *rest: Any) -> kinds.Schema:
        parsed.append(text)
        return parse(kind, text, *rest)

    monkeypatch.setattr(kinds, "parse", counted)
    zeros = {f"long{n}": 0 for n in range(9)}
    texts = [record(*((name, "int") for name in [*zeros][:count]), **zeros) for count in range(9)]
    for text in texts:
        shared.register("long", text)
    assert parsed == texts


def test_what_does_not_fit_is_refused_with_the_place(shared: Registry) -> None:
    shared.register("places", ONE)
    answer = shared.ask("POST", "/subjects/places/versions", {"schema": BROKEN})
    assert answer.status_code == 409
    assert "READER_FIELD_MISSING_DEFAULT_VALUE at /fields/1/: b" in answer.json()["message"]
    assert shared.code("POST", "/subjects/places/versions", {"schema": "{}", "schemaType": "JSON"}) == 409
    assert shared.code("POST", "/compatibility/subjects/places/versions/7", {"schema": ONE}) == 40402
    assert shared.code("POST", "/compatibility/subjects/nobody/versions/7", {"schema": ONE}) == 40402


def test_anything_fits_a_subject_that_is_not_there(shared: Registry) -> None:
    for path in ("versions", "versions/latest"):
        bad = shared.ok("POST", f"/compatibility/subjects/nobody/{path}", {"schema": "{"}, verbose="true")
        assert not bad["is_compatible"] and "Invalid schema" in bad["messages"][0]
        assert shared.code("POST", f"/compatibility/subjects/nobody/{path}", {"schema": "{"}) == 42201
        found = shared.ok("POST", f"/compatibility/subjects/nobody/{path}", {"schema": ONE}, verbose="true")
        assert found == {"is_compatible": True, "messages": []}


def test_levels_and_modes_of_subjects_fall_back_to_those_of_all(registry: Registry) -> None:
    assert registry.code("GET", "/config/a") == 40408
    assert registry.ok("GET", "/config/a", defaultToGlobal="true") == {"compatibilityLevel": "BACKWARD"}
    assert registry.ok("PUT", "/config", {"compatibility": "NONE"}) == {"compatibility": "NONE"}
    assert registry.ok("PUT", "/config/a", {"compatibility": "FORWARD"}) == {"compatibility": "FORWARD"}
    assert registry.ok("DELETE", "/config/a") == {"compatibilityLevel": "FORWARD"}
    assert registry.code("DELETE", "/config/a") == 40401
    assert registry.ok("GET", "/config/a", defaultToGlobal="true") == {"compatibilityLevel": "NONE"}
    assert registry.ok("DELETE", "/config") == {"compatibilityLevel": "NONE"}
    assert registry.ok("GET", "/config") == {"compatibilityLevel": "BACKWARD"}
    for wrong in ({"compatibility": "SIDEWAYS"}, {"compatibility": 7}, {}, {"compatability": "FULL"}):
        assert registry.code("PUT", "/config", wrong) == 42203
    assert registry.code("GET", "/mode/a") == 40409
    assert registry.ok("PUT", "/mode", {"mode": "readonly"}) == {"mode": "READONLY"}
    assert registry.code("POST", "/subjects/a/versions", {"schema": ONE}) == 42205
    assert registry.code("PUT", "/config", {"compatibility": "NONE"}) == 42205
    assert registry.ok("PUT", "/mode/a", {"mode": "READWRITE"}) == {"mode": "READWRITE"}
    assert registry.register("a", ONE) == 1
    assert registry.ok("DELETE", "/mode/a") == {"mode": "READWRITE"}
    assert registry.code("DELETE", "/mode/a") == 40401
    assert registry.ok("DELETE", "/mode") == {"mode": "READONLY"}
    assert registry.ok("DELETE", "/mode") == {"mode": "READWRITE"}
    assert registry.code("PUT", "/mode", {"mode": "OPEN"}) == 42204


def test_a_schema_that_is_there_is_answered_also_where_none_is_taken(registry: Registry) -> None:
    registry.register("a", ONE)
    for mode in ("READONLY", "READONLY_OVERRIDE", "IMPORT"):
        registry.ok("PUT", "/mode/a", {"mode": mode}, force="true")
        assert registry.register("a", ONE) == 1
        assert registry.code("POST", "/subjects/a/versions", {"schema": TWO}) == 42205


def test_to_import_what_was_deleted_makes_room(registry: Registry) -> None:
    registry.register("a", ONE)
    registry.ok("PUT", "/config/a", {"compatibility": "NONE"})
    assert registry.code("PUT", "/mode/a", {"mode": "IMPORT"}) == 42205
    registry.ok("DELETE", "/subjects/a")
    registry.ok("PUT", "/mode/a", {"mode": "IMPORT"})
    assert registry.ok("GET", "/subjects", deleted="true") == []
    assert registry.register("a", TWO, id=1, version=1) == 1
    assert registry.ok("GET", "/schemas/ids/1") == {"schema": TWO}


def test_one_schema_is_imported_as_several_versions(registry: Registry) -> None:
    registry.ok("PUT", "/mode/a", {"mode": "IMPORT"})
    for version in (1, 3, 1):
        body = {"schema": ONE, "id": 7, "version": version}
        assert registry.ok("POST", "/subjects/a/versions", body) == {"id": 7, "version": version}
    assert registry.versions("a") == [1, 3]
    for wrong in ({"id": 0, "version": 4}, {"id": 2**31, "version": 4}, {"id": 8, "version": 2**31}):
        assert registry.code("POST", "/subjects/a/versions", {"schema": TWO, **wrong}) == 42202
    made = registry.ok("POST", "/subjects/a/versions", {"schema": TWO, "id": 8, "version": -5})
    assert made == {"id": 8, "version": 4}


def test_a_config_keeps_what_is_not_said_and_forgets_what_is_taken_back(registry: Registry) -> None:
    assert registry.ok("PUT", "/config/a", {"normalize": True}) == {"normalize": True}
    assert registry.ok("GET", "/config/a") == {"normalize": True}
    both = {"compatibilityLevel": "NONE", "normalize": True}
    registry.ok("PUT", "/config", {"compatibility": "NONE"})
    assert registry.ok("GET", "/config/a", defaultToGlobal="true") == both
    assert registry.ok("PUT", "/config/a", {"compatibility": "FULL"}) == {"compatibility": "FULL", "normalize": True}
    assert registry.ok("PUT", "/config/a", {"compatibility": None}) == {"normalize": True}
    assert registry.ok("DELETE", "/config/a") == {"normalize": True}
    for wrong in ({"normalize": "yes"}, {"alias": "b"}, {"validateFields": True}):
        assert registry.code("PUT", "/config/a", wrong) == 422


TURNED = '{"zeta":1,"alpha":2,"fields":[],"name":"r","type":"record"}'
AS_JAVA = '{"type":"record","name":"r","fields":[],"zeta":1,"alpha":2}'
NORMALIZED = '{"type":"record","name":"r","fields":[],"alpha":2,"zeta":1}'


def test_a_schema_is_the_same_in_any_order_of_keys_that_avro_knows_and_normalized_of_all(registry: Registry) -> None:
    assert registry.register("a", TURNED) == registry.register("a", AS_JAVA) == 1
    assert registry.ok("GET", "/schemas/ids/1") == {"schema": AS_JAVA}
    assert registry.code("POST", "/subjects/a", {"schema": NORMALIZED}) == 40403
    assert registry.code("POST", "/subjects/a", {"schema": TURNED}, normalize="true") == 40403
    made = registry.ok("POST", "/subjects/a/versions", {"schema": TURNED}, normalize="true")
    assert made == {"id": 2, "version": 2}
    assert registry.ok("GET", "/schemas/ids/2") == {"schema": NORMALIZED}
    assert registry.ok("POST", "/subjects/a", {"schema": AS_JAVA}, normalize="True")["version"] == 2
    assert registry.register("b", NORMALIZED) == 2


def test_a_config_normalizes_all_that_is_registered_and_looked_up_but_nothing_imported(registry: Registry) -> None:
    for path in ("/config", "/config/a"):
        registry.ok("PUT", path, {"normalize": True})
        assert registry.register("a", TURNED) == 1
        assert registry.ok("POST", "/subjects/a", {"schema": TURNED})["schema"] == NORMALIZED
        registry.ok("DELETE", path)
    registry.ok("PUT", "/config/i", {"normalize": True})
    registry.ok("PUT", "/mode/i", {"mode": "IMPORT"})
    registry.ok("POST", "/subjects/i/versions", {"schema": TURNED, "id": 7, "version": 1}, normalize="true")
    assert registry.ok("GET", "/schemas/ids/7") == {"schema": AS_JAVA}


def test_normalized_references_are_sorted_and_each_is_there_once(registry: Registry) -> None:
    for name in "ab":
        registry.register(name, f'{{"type":"record","name":"{name}","fields":[]}}')
    needed = [{"name": name, "subject": name, "version": 1} for name in "ab"]
    body = {"schema": '["a","b"]', "references": [needed[1], needed[0], needed[1]]}
    registry.ok("POST", "/subjects/c/versions", body, normalize="true")
    found = registry.ok("POST", "/subjects/c", {"schema": '["a","b"]', "references": needed})
    assert found["references"] == needed


def test_a_schema_is_imported_under_its_id_and_version(registry: Registry) -> None:
    assert registry.code("POST", "/subjects/a/versions", {"schema": ONE, "id": 7, "version": 3}) == 42205
    registry.register("there", LONG)
    assert registry.code("PUT", "/mode", {"mode": "IMPORT"}) == 42205
    registry.ok("PUT", "/mode/a", {"mode": "IMPORT"})
    assert registry.register("a", ONE, id=7, version=3) == 7
    assert registry.code("POST", "/subjects/a/versions", {"schema": TWO}) == 42205, "it needs an id"
    assert registry.code("POST", "/subjects/a/versions", {"schema": TWO, "id": 7, "version": 4}) == 42205
    assert registry.versions("a") == [3]
    registry.ok("PUT", "/mode", {"mode": "IMPORT"}, force="true")
    registry.ok("DELETE", "/mode")
    registry.ok("DELETE", "/mode/a")
    assert registry.register("a", TWO) == 8


def test_when_the_last_id_is_in_use_only_schemas_that_have_one_are_taken(registry: Registry) -> None:
    registry.register("a", ONE)
    registry.ok("PUT", "/mode/b", {"mode": "IMPORT"})
    registry.ok("POST", "/subjects/b/versions", {"schema": TWO, "id": 2**31 - 1, "version": 1})
    assert [registry.register("c", schema) for schema in (ONE, TWO)] == [1, 2**31 - 1]
    answer = registry.ask("POST", "/subjects/d/versions", {"schema": STRING})
    assert not answer.is_success and "the last id" in answer.json()["message"]


def test_versions_go_softly_first_and_for_good_then(registry: Registry) -> None:
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
    assert registry.ok("GET", "/schemas/ids/1") == {"schema": ONE}, "whoever has data of it can read on"
    assert registry.ok("DELETE", "/subjects/a/versions/1", permanent="true") == 1
    assert registry.code("GET", "/schemas/ids/1") == 40403
    assert registry.code("DELETE", "/subjects/a/versions/9") == 40402
    for wrong in ("0", "x", "2147483648", "1.5"):
        assert registry.code("DELETE", f"/subjects/a/versions/{wrong}") == 42202
    assert registry.ok("DELETE", "/subjects/a/versions/latest") == 2


def after_compaction(live: Live) -> State:
    """What a broker would know that starts with the last record of each key."""
    records = {one["key"]: one for one in live.read(TOPIC, offset="earliest", limit=1_000)}
    state = State()
    for one in sorted(records.values(), key=lambda one: int(one["offset"])):
        state.apply(one["key"].encode(), None if one["value"] is None else one["value"].encode())
    return state


def answers(registry: Registry) -> list[Any]:
    shown = {"deleted": "true"}
    found = [registry.ok("GET", "/subjects"), registry.ok("GET", "/schemas", **shown), registry.ok("GET", "/config")]
    for subject in registry.ok("GET", "/subjects", **shown):
        found += [registry.ask("GET", f"/{what}/{subject}").json() for what in ("config", "mode")]
    return found + [registry.ask("GET", f"/schemas/ids/{number}").json() for number in range(1, 12)]


def test_compaction_of_the_topic_changes_no_answer(own: type[Live]) -> None:
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


def test_the_id_of_a_version_that_is_imported_anew_is_not_used_again(own: type[Live]) -> None:
    live = own()
    registry = Registry(live)
    registry.ok("PUT", "/mode/a", {"mode": "IMPORT"})
    for number, schema in ((9, ONE), (5, TWO)):
        registry.register("a", schema, id=number, version=1)
    assert registry.code("GET", "/schemas/ids/9") == 40403
    live.client.delete(f"/topics/{TOPIC}").raise_for_status()  # as compaction makes it
    assert registry.register("b", STRING) == 10


def test_a_subject_goes_softly_comes_back_with_its_ids_and_goes_for_good(registry: Registry) -> None:
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


def test_ids_are_not_used_again_when_the_topic_has_forgotten_them(own: type[Live]) -> None:
    """As compaction makes it."""
    live = own()
    registry = Registry(live)
    registry.register("a", ONE)
    registry.ok("DELETE", "/subjects/a")
    registry.ok("DELETE", "/subjects/a", permanent="true")
    live.client.delete(f"/topics/{TOPIC}").raise_for_status()
    live.stop()
    assert Registry(own()).register("b", TWO) == 2


def test_a_schema_that_others_need_stays(registry: Registry) -> None:
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


def test_a_subject_goes_whole_when_only_its_own_versions_need_each_other(registry: Registry) -> None:
    registry.ok("PUT", "/config/a", {"compatibility": "NONE"})
    registry.register("a", '{"type":"record","name":"p","fields":[]}')
    registry.register("a", '["null","p"]', references=[{"name": "p", "subject": "a", "version": 1}])
    for permanent in ("false", "true"):
        assert registry.ok("DELETE", "/subjects/a", permanent=permanent) == [1, 2]
    assert registry.ok("GET", "/subjects", deleted="true") == []


def test_what_is_set_for_a_subject_goes_with_its_last_version(registry: Registry) -> None:
    registry.register("a", ONE)
    registry.ok("DELETE", "/subjects/a/versions/1")
    registry.ok("PUT", "/config/a", {"compatibility": "FULL"})
    registry.ok("PUT", "/mode/a", {"mode": "READWRITE"})
    registry.ok("DELETE", "/subjects/a/versions/1", permanent="true")
    assert (registry.code("GET", "/config/a"), registry.code("GET", "/mode/a")) == (40408, 40409)


OWNED = {"properties": {"owner": "ann", "unit": "kg"}, "sensitive": ["owner"], "tags": {"r.a": ["PII", "A"]}}
RULE = {"name": "positive", "kind": "CONDITION", "mode": "WRITE", "type": "CEL", "expr": "message.a > 0"}
RULES = {"domainRules": [RULE]}
KEPT_OWNED = {**OWNED, "tags": {"r.a": ["A", "PII"]}}
KEPT_RULES = {"domainRules": [{**RULE, "disabled": False}]}


def test_metadata_and_rules_are_kept_and_handed_out_and_make_another_schema(own: type[Live]) -> None:
    live = own()
    registry = Registry(live)
    assert registry.register("plain", ONE) == 1
    assert registry.register("a", ONE, metadata=OWNED, ruleSet=RULES) == 2
    kept = {"metadata": KEPT_OWNED, "ruleSet": KEPT_RULES, "schema": ONE}
    live.stop()
    registry = Registry(own())
    assert registry.ok("GET", "/schemas/ids/2") == kept
    shape = {"subject": "a", "version": 1, "id": 2, **kept}
    for query in ({"subjectPrefix": "a"}, {"ruleType": "CEL"}):
        assert registry.ok("GET", "/schemas", **query) == [shape]
    assert registry.ok("GET", "/schemas", ruleType="JSONATA") == []
    assert registry.ok("GET", "/subjects/a/versions/1") == shape
    assert registry.ok("GET", "/schemas/ids/1") == {"schema": ONE}
    body = {"schema": ONE, "metadata": {**OWNED, "sensitive": ["owner", "owner"]}, "ruleSet": RULES}
    assert registry.ok("POST", "/subjects/a", body) == shape
    assert registry.code("POST", "/subjects/a", {"schema": ONE, "metadata": {"properties": {}}}) == 40403
    assert registry.register("b", ONE, metadata=KEPT_OWNED, ruleSet=KEPT_RULES) == 2


def test_a_new_version_has_the_metadata_and_rules_of_the_one_before_it_unless_it_brings_its_own(
    registry: Registry,
) -> None:
    registry.register("a", ONE, metadata=OWNED, ruleSet=RULES)
    assert registry.ok("POST", "/subjects/a", {"schema": ONE})["version"] == 1, "so it is looked up without them, too"
    assert registry.register("a", ONE) == 1
    registry.register("a", TWO)
    found = registry.ok("GET", "/subjects/a/versions/2")
    assert (found["metadata"], found["ruleSet"]) == (KEPT_OWNED, KEPT_RULES)
    registry.ok("POST", "/subjects/a/versions", {"schema": "", "metadata": {}, "ruleSet": {}})
    found = registry.ok("GET", "/subjects/a/versions/3")
    assert (found["schema"], found["metadata"], found["ruleSet"]) == (TWO, {}, {})


def test_the_newest_version_with_some_properties_is_found(registry: Registry) -> None:
    for number, schema in enumerate((ONE, TWO), 1):
        registry.register("a", schema, metadata={"properties": {"major": str(number), "x": "y"}})
    path = "/subjects/a/metadata"
    assert registry.ok("GET", path, key=["x", "major"], value=["y", "1"])["version"] == 1
    assert registry.ok("GET", path, key="x", value="y")["version"] == 2
    assert registry.code("GET", path, key="x", value="z") == 40403
    assert registry.code("GET", "/subjects/nobody/metadata", key="x", value="z") == 40401


def test_a_config_brings_metadata_and_rules_and_says_which_versions_are_compared(registry: Registry) -> None:
    default, override = ({"properties": {"a": name, name: "1"}} for name in ("default", "override"))
    config = {"compatibilityGroup": "major", "defaultMetadata": default, "overrideMetadata": override}
    asked = {**config, "defaultRuleSet": RULES}
    assert registry.ok("PUT", "/config/a", asked) == {**config, "defaultRuleSet": KEPT_RULES}
    first = {"schema": LONG, "metadata": {"properties": {"a": "own", "major": "1"}}}
    for _ in range(2):
        assert registry.ok("POST", "/subjects/a/versions", first) == {"id": 1, "version": 1}
    found = registry.ok("GET", "/subjects/a/versions/1")
    assert found["metadata"]["properties"] == {"a": "override", "default": "1", "major": "1", "override": "1"}
    assert found["ruleSet"] == KEPT_RULES
    other = {"schema": STRING, "metadata": {"properties": {"major": "2"}}}
    assert registry.ok("POST", "/compatibility/subjects/a/versions", other) == {"is_compatible": True}
    assert registry.ok("POST", "/subjects/a/versions", other)["version"] == 2
    assert registry.code("POST", "/subjects/a/versions", {**other, "metadata": first["metadata"]}) == 409
    assert registry.code("PUT", "/config/a", {"defaultRuleSet": {"domainRules": [{}]}}) == 42210


def test_a_version_that_is_asked_for_is_the_next_one_and_said_in_the_metadata(registry: Registry) -> None:
    assert registry.code("POST", "/subjects/a/versions", {"schema": ONE, "version": 2}) == 42201
    assert registry.ok("POST", "/subjects/a/versions", {"schema": ONE, "version": 1})["version"] == 1
    assert registry.ok("GET", "/subjects/a/versions/1")["metadata"] == {"properties": {"confluent:version": "1"}}
    for body in ({"schema": ONE}, {"schema": ONE, "metadata": {"properties": {"confluent:version": "1"}}}):
        assert registry.ok("POST", "/subjects/a/versions", body)["version"] == 1
        assert registry.ok("POST", "/subjects/a", body)["version"] == 1
    assert registry.code("POST", "/subjects/a/versions", {"schema": ONE, "version": 1}) == 42201


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"schema": "{"}, 42201),
        ({"schema": STRING, "schemaType": "XML"}, 42201),
        ({}, 42201),
        ({"schema": 7}, 422),
        ({"schema": STRING, "references": [{"name": "x"}]}, 422),
        ({"schema": STRING, "metadata": {"properties": {"a": []}}}, 422),
        ({"schema": STRING, "ruleSet": {"domainRules": [{"name": "r", "mode": "SIDEWAYS", "type": "CEL"}]}}, 422),
        ({"schema": STRING, "ruleSet": {"domainRules": [{"name": "r", "mode": "WRITE"}]}}, 42210),
        ({"schema": STRING, "ruleSet": {"domainRules": [{"name": "7", "type": "CEL"}]}}, 42210),
        ({"schema": STRING, "ruleSet": {"domainRules": [{"name": "r", "mode": "UPDOWN", "type": "CEL"}]}}, 42210),
        ({"schema": STRING, "ruleSet": {"migrationRules": [{"name": "r", "type": "JSONATA"}]}}, 42210),
        ({"schema": STRING, "ruleSet": {"domainRules": [{"name": "r", "type": "CEL"}] * 2}}, 42210),
        ({"schema": STRING, "metadata": {"properties": {"a": "x" * (2 << 20)}}}, 422),
        ([], 422),
        ({"schema": '"' + "x" * (2 << 20) + '"'}, 42201),
        ({"schema": STRING, "x": "y" * (5 << 20)}, 413),
    ],
)
def test_what_is_no_schema_is_refused_and_stored_nowhere(shared: Registry, body: Any, code: int) -> None:
    assert shared.code("POST", "/subjects/bad/versions", body) == code
    assert shared.code("GET", "/subjects/bad/versions") == 40401


@pytest.mark.parametrize("name", ["a/b", "100%", "%2F", "a/versions/1", "a b", "ü", "?#&+", "."])
def test_a_subject_may_have_any_name(shared: Registry, name: str) -> None:
    path = "/subjects/" + quote(name, safe="").replace(".", "%2E")
    assert shared.ok("POST", f"{path}/versions", {"schema": ONE})["version"] == 1
    assert name in shared.ok("GET", "/subjects")
    assert shared.ok("GET", f"{path}/versions/1")["subject"] == name
    assert shared.ok("GET", "/subjects", subjectPrefix=name)[0] == name
    shared.ok("PUT", "/config/" + path.removeprefix("/subjects/"), {"compatibility": "NONE"})
    assert shared.ok("DELETE", path) == [1]


def test_names_of_subjects_and_parameters_are_checked(shared: Registry) -> None:
    for wrong in ("%00", "%0A", "x" * 1001):
        assert shared.code("POST", f"/subjects/{wrong}/versions", {"schema": STRING}) == 42208
    assert shared.code("GET", "/subjects", limit="x") == 422
    assert shared.ok("GET", "/subjects", of_some_client="1", subjectPrefix="nobody") == []
    assert shared.code("GET", "/schemas/ids/x") == 404
    assert shared.code("PATCH", "/subjects") == 405


def test_what_another_registry_wrote_into_the_topic_is_known_and_anything_else_is_left_alone(own: type[Live]) -> None:
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
def test_a_schema_that_another_registry_has_stored_in_its_own_form_keeps_its_id(
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


def test_a_batch_that_nobody_can_decode_is_left_out(registry: Registry) -> None:
    registry.register("a", ONE)
    live = registry._live
    bad = codec.build([(None, b"x" * 100, (), -1)], codec=0, timestamp_ms=1)
    bad[21:23] = (4).to_bytes(2, "big")  # says zstd
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
        assert "no schemas are taken: the topic _schemas cannot be read whole: a file is" in answer.json()["message"]
    assert registry.code("GET", "/schemas/ids/2") == 503, "it may be behind the damage"


def test_damage_found_at_the_start_leaves_what_comes_before_it(own: type[Live]) -> None:
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


def test_damage_found_while_the_topic_is_read_leaves_what_comes_before_it_and_is_an_alarm(
    own: type[Live], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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


def test_a_disk_that_does_not_answer_is_asked_again(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register("a", ONE)
    message = {"key": "somebody", "value": "else's"}
    registry._live.client.post(f"/topics/{TOPIC}/messages", json=message).raise_for_status()

    def fails(*arguments: Any, **options: Any) -> Any:
        raise StorageError("a file is out of reach")

    with monkeypatch.context() as patched:
        patched.setattr(Partition, "read_now", fails)
        _serves_what_it_has_read_and_takes_nothing(registry)
    assert registry.register("a", TWO) == 2


def test_no_id_is_given_while_a_transaction_holds_back_the_ones_before_it(own: type[Live]) -> None:
    from confluent_kafka import Producer

    live = own(kafka=Address("localhost", 0))
    registry = Registry(live)
    registry.register("a", ONE)
    producer = Producer({"bootstrap.servers": live.server.doors["kafka"].addresses[0], "transactional.id": "x"})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(TOPIC, "none of the registry's", "x")
    producer.flush(60)
    for schema in (STRING, INT):
        assert registry.code("POST", "/subjects/b/versions", {"schema": schema}) == 429
    assert registry.ok("GET", "/schemas/ids/1") == {"schema": ONE}
    producer.commit_transaction(60)
    assert [registry.register(name, schema) for name, schema in (("b", STRING), ("c", INT))] == [2, 3]


def test_a_topic_that_would_lose_schemas_takes_none(registry: Registry) -> None:
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


def test_schemas_are_for_those_who_may_read_or_write_their_topic(own: type[Live], tmp_path: Path) -> None:
    live = own()
    for name, rights in (("reader", {"read": f"^{TOPIC}$"}), ("writer", {"write": f"^{TOPIC}$"}), ("other", {})):
        live.call(live.broker.users.put_user(name, password="x"))
        permission = Permission(**{"configure": "", "write": "", "read": "", **rights})
        live.call(live.broker.users.set_permission("/", name, permission))
    live.call(live.broker.users.remove_user("guest"))
    reader, writer, other = (Registry(live, (name, "x")) for name in ("reader", "writer", "other"))
    body = {"schema": ONE}
    assert Registry(live).code("GET", "/subjects") == 401
    for one in (reader, other):
        assert one.code("POST", "/subjects/a/versions", body) == 403
        assert one.code("PUT", "/config", {"compatibility": "NONE"}) == 403
        assert one.code("DELETE", "/subjects/a") == 403
    assert writer.register("a", ONE) == 1
    for one in (writer, other):
        assert one.code("GET", "/schemas/ids/1") == 403
    assert reader.ok("GET", "/schemas/ids/1") == {"schema": ONE}
    for name in ("reader", "other"):
        live.call(live.broker.users.put_user(name, password="x", tags=["management"]))
    assert live.get("/api/headrace/schemas/a", auth=("reader", "x")).json()["may_write"] is False
    for path in ("registry", "schemas", "schemas/a", "schemas/a/versions", "schemas/a/versions/1"):
        assert live.get(f"/api/headrace/{path}", auth=("other", "x")).status_code == 403


def test_the_management_api_lists_subjects_with_what_holds_for_them(registry: Registry) -> None:
    def see(path: str, **query: Any) -> Any:
        return registry._live.get(f"/api/headrace/{path}", params=query).json()

    assert see("schemas") == [] and see("schemas/nix")["error"] == "Object Not Found"
    assert see("registry") == {"compatibility": "BACKWARD", "mode": "READWRITE", "may_write": True}
    registry.register("person", '{"type":"record","name":"people.Person","fields":[]}')
    reference = {"name": "people.Person", "subject": "person", "version": 1}
    order = '{"type":"record","name":"Order","fields":[{"name":"who","type":"people.Person"}]}'
    registry.register("a%2Forder", ONE)
    registry.ok("PUT", "/config/a%2Forder", {"compatibility": "NONE"})
    registry.register("a%2Forder", order, references=[reference])
    registry.register("old", ONE)
    registry.ok("DELETE", "/subjects/old")
    row = {"type": "AVRO", "deleted": False, "compatibility": "BACKWARD", "own_compatibility": None}
    ours = {"subject": "a/order", "versions": 2, "version": 2, "id": 3, "compatibility": "NONE"}
    ours = {**row, **ours, "own_compatibility": "NONE"}
    person = {**row, "subject": "person", "versions": 1, "version": 1, "id": 1}
    assert see("schemas", sort="version") == [person, ours]
    assert [one["subject"] for one in see("schemas", deleted="true", name="O")] == ["a/order", "old", "person"]
    more = {"default_compatibility": "BACKWARD", "mode": "READWRITE", "may_write": True}
    assert see("schemas/a%2Forder") == {**ours, **more}
    assert see("schemas/old")["deleted"] is True
    listed = see("schemas/a%2Forder/versions", page=1, page_size=1)
    assert (listed["items"][0]["version"], listed["items"][0]["references"], listed["total_count"]) == (2, 1, 2)
    found = see("schemas/a%2Forder/versions/2")
    assert (found["schema"], found["references"], found["referred_by"]) == (order, [reference], [])
    assert see("schemas/person/versions/1")["referred_by"] == [{"subject": "a/order", "version": 2}]
    assert see("schemas/person/versions/2")["error"] == "Object Not Found"


def test_an_id_that_somebody_else_gives_meanwhile_is_not_given_again(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a copy of another registry's topic, or that registry itself, may do at any moment."""
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


def test_who_hangs_up_before_it_is_decided_registers_nothing(registry: Registry) -> None:
    schemas = registry._live.broker.schemas
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


def test_many_at_once_get_one_id_for_one_schema_and_versions_without_gaps(registry: Registry) -> None:
    import concurrent.futures

    schemas = [record(("a", "int"), (f"b{number}", "string"), **{f"b{number}": ""}) for number in range(8)]
    registry.ok("PUT", "/config", {"compatibility": "NONE"})
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda schema: registry.register("a", schema), schemas * 4))
    assert sorted(set(ids)) == list(range(1, 9))
    assert {ids[number] for number in range(0, 32, 8)} == {ids[0]}
    assert registry.versions("a") == list(range(1, 9))
