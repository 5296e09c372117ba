"""The schema registry over HTTP: Confluent's API, codes and words. Clients: tests/interop/kafka/test_schemas.py."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from headrace.broker.access.permissions import Permission
from headrace.broker.schemas.topic import TOPIC
from headrace.schemas import kinds
from headrace.schemas.kinds import LEVELS
from tests.listeners.http.live import StartLive
from tests.listeners.http.registries import BROKEN, INT, LONG, ONE, STRING, TWO, Registry, record


def test_an_empty_registry_responds_without_creating_its_topic(registry: Registry) -> None:
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


def test_a_response_lists_at_most_a_thousand_schemas(shared: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.listeners.http.registry.routes.LISTED_MAX", 2)
    for number in range(3):
        shared.register(f"listed-{number}", ONE)

    def listed(**query: Any) -> list[str]:
        return [one["subject"] for one in shared.ok("GET", "/schemas", subjectPrefix="listed-", **query)]

    assert listed() == listed(limit=-1) == listed(limit=3) == ["listed-0", "listed-1"]
    assert (listed(offset=2), listed(offset=1, limit=1)) == (["listed-2"], ["listed-1"])


def test_schemas_and_settings_survive_a_restart(own: StartLive) -> None:
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
def test_each_compatibility_level_accepts_compatible_schemas_only(shared: Registry, level: str) -> None:
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


def test_transitive_levels_compare_all_versions_and_others_the_latest(shared: Registry) -> None:
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


def test_only_the_new_schema_is_parsed_when_it_is_compared(shared: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_incompatible_schema_is_refused_with_the_location(shared: Registry) -> None:
    shared.register("places", ONE)
    answer = shared.ask("POST", "/subjects/places/versions", {"schema": BROKEN})
    assert answer.status_code == 409
    assert "READER_FIELD_MISSING_DEFAULT_VALUE at /fields/1/: b" in answer.json()["message"]
    assert shared.code("POST", "/subjects/places/versions", {"schema": "{}", "schemaType": "JSON"}) == 409
    assert shared.code("POST", "/compatibility/subjects/places/versions/7", {"schema": ONE}) == 40402
    assert shared.code("POST", "/compatibility/subjects/nobody/versions/7", {"schema": ONE}) == 40402


def test_any_schema_is_compatible_with_an_unknown_subject(shared: Registry) -> None:
    for path in ("versions", "versions/latest"):
        bad = shared.ok("POST", f"/compatibility/subjects/nobody/{path}", {"schema": "{"}, verbose="true")
        assert not bad["is_compatible"] and "Invalid schema" in bad["messages"][0]
        assert shared.code("POST", f"/compatibility/subjects/nobody/{path}", {"schema": "{"}) == 42201
        found = shared.ok("POST", f"/compatibility/subjects/nobody/{path}", {"schema": ONE}, verbose="true")
        assert found == {"is_compatible": True, "messages": []}


def test_levels_and_modes_of_subjects_default_to_the_global_ones(registry: Registry) -> None:
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


def test_a_registered_schema_is_returned_even_in_read_only_mode(registry: Registry) -> None:
    registry.register("a", ONE)
    for mode in ("READONLY", "READONLY_OVERRIDE", "IMPORT"):
        registry.ok("PUT", "/mode/a", {"mode": mode}, force="true")
        assert registry.register("a", ONE) == 1
        assert registry.code("POST", "/subjects/a/versions", {"schema": TWO}) == 42205


def test_importing_over_a_deleted_version_replaces_it(registry: Registry) -> None:
    registry.register("a", ONE)
    registry.ok("PUT", "/config/a", {"compatibility": "NONE"})
    assert registry.code("PUT", "/mode/a", {"mode": "IMPORT"}) == 42205
    registry.ok("DELETE", "/subjects/a")
    registry.ok("PUT", "/mode/a", {"mode": "IMPORT"})
    assert registry.ok("GET", "/subjects", deleted="true") == []
    assert registry.register("a", TWO, id=1, version=1) == 1
    assert registry.ok("GET", "/schemas/ids/1") == {"schema": TWO}


def test_a_schema_may_be_imported_as_several_versions(registry: Registry) -> None:
    registry.ok("PUT", "/mode/a", {"mode": "IMPORT"})
    for version in (1, 3, 1):
        body = {"schema": ONE, "id": 7, "version": version}
        assert registry.ok("POST", "/subjects/a/versions", body) == {"id": 7, "version": version}
    assert registry.versions("a") == [1, 3]
    for wrong in ({"id": 0, "version": 4}, {"id": 2**31, "version": 4}, {"id": 8, "version": 2**31}):
        assert registry.code("POST", "/subjects/a/versions", {"schema": TWO, **wrong}) == 42202
    made = registry.ok("POST", "/subjects/a/versions", {"schema": TWO, "id": 8, "version": -5})
    assert made == {"id": 8, "version": 4}


def test_a_config_change_keeps_other_fields_and_null_resets_one(registry: Registry) -> None:
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


def test_equal_schemas_are_recognized_independent_of_key_order(registry: Registry) -> None:
    assert registry.register("a", TURNED) == registry.register("a", AS_JAVA) == 1
    assert registry.ok("GET", "/schemas/ids/1") == {"schema": AS_JAVA}
    assert registry.code("POST", "/subjects/a", {"schema": NORMALIZED}) == 40403
    assert registry.code("POST", "/subjects/a", {"schema": TURNED}, normalize="true") == 40403
    made = registry.ok("POST", "/subjects/a/versions", {"schema": TURNED}, normalize="true")
    assert made == {"id": 2, "version": 2}
    assert registry.ok("GET", "/schemas/ids/2") == {"schema": NORMALIZED}
    assert registry.ok("POST", "/subjects/a", {"schema": AS_JAVA}, normalize="True")["version"] == 2
    assert registry.register("b", NORMALIZED) == 2


def test_normalize_in_the_config_applies_to_all_but_imports(registry: Registry) -> None:
    for path in ("/config", "/config/a"):
        registry.ok("PUT", path, {"normalize": True})
        assert registry.register("a", TURNED) == 1
        assert registry.ok("POST", "/subjects/a", {"schema": TURNED})["schema"] == NORMALIZED
        registry.ok("DELETE", path)
    registry.ok("PUT", "/config/i", {"normalize": True})
    registry.ok("PUT", "/mode/i", {"mode": "IMPORT"})
    registry.ok("POST", "/subjects/i/versions", {"schema": TURNED, "id": 7, "version": 1}, normalize="true")
    assert registry.ok("GET", "/schemas/ids/7") == {"schema": AS_JAVA}


def test_normalized_references_are_sorted_and_unique(registry: Registry) -> None:
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


def test_without_free_ids_only_known_schemas_are_accepted(registry: Registry) -> None:
    registry.register("a", ONE)
    registry.ok("PUT", "/mode/b", {"mode": "IMPORT"})
    registry.ok("POST", "/subjects/b/versions", {"schema": TWO, "id": 2**31 - 1, "version": 1})
    assert [registry.register("c", schema) for schema in (ONE, TWO)] == [1, 2**31 - 1]
    answer = registry.ask("POST", "/subjects/d/versions", {"schema": STRING})
    assert not answer.is_success and "the last schema id" in answer.json()["message"]


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
def test_an_invalid_schema_is_refused_and_not_stored(shared: Registry, body: Any, code: int) -> None:
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


def test_schemas_need_the_permissions_of_their_topic(own: StartLive, tmp_path: Path) -> None:
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


def test_the_management_api_lists_subjects_with_their_levels(registry: Registry) -> None:
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
