"""Metadata and rule sets of schemas: stored unchanged, inherited, and searched."""

from tests.listeners.http.live import StartLive
from tests.listeners.http.registries import LONG, ONE, STRING, TWO, Registry

OWNED = {"properties": {"owner": "ann", "unit": "kg"}, "sensitive": ["owner"], "tags": {"r.a": ["PII", "A"]}}
RULE = {"name": "positive", "kind": "CONDITION", "mode": "WRITE", "type": "CEL", "expr": "message.a > 0"}
RULES = {"domainRules": [RULE]}
KEPT_OWNED = {**OWNED, "tags": {"r.a": ["A", "PII"]}}
KEPT_RULES = {"domainRules": [{**RULE, "disabled": False}]}


def test_metadata_and_rules_are_stored_and_distinguish_schemas(own: StartLive) -> None:
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


def test_a_new_version_inherits_metadata_and_rules(
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


def test_the_latest_version_with_given_properties_is_found(registry: Registry) -> None:
    for number, schema in enumerate((ONE, TWO), 1):
        registry.register("a", schema, metadata={"properties": {"major": str(number), "x": "y"}})
    path = "/subjects/a/metadata"
    assert registry.ok("GET", path, key=["x", "major"], value=["y", "1"])["version"] == 1
    assert registry.ok("GET", path, key="x", value="y")["version"] == 2
    assert registry.code("GET", path, key="x", value="z") == 40403
    assert registry.code("GET", "/subjects/nobody/metadata", key="x", value="z") == 40401


def test_a_config_sets_metadata_rules_and_the_compatibility_group(registry: Registry) -> None:
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


def test_a_requested_version_must_be_the_next_one(registry: Registry) -> None:
    assert registry.code("POST", "/subjects/a/versions", {"schema": ONE, "version": 2}) == 42201
    assert registry.ok("POST", "/subjects/a/versions", {"schema": ONE, "version": 1})["version"] == 1
    assert registry.ok("GET", "/subjects/a/versions/1")["metadata"] == {"properties": {"confluent:version": "1"}}
    for body in ({"schema": ONE}, {"schema": ONE, "metadata": {"properties": {"confluent:version": "1"}}}):
        assert registry.ok("POST", "/subjects/a/versions", body)["version"] == 1
        assert registry.ok("POST", "/subjects/a", body)["version"] == 1
    assert registry.code("POST", "/subjects/a/versions", {"schema": ONE, "version": 1}) == 42201
