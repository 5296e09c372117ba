"""Invalid definitions are refused as a whole and do not prevent the next start."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.listeners.api.conftest import Served

POLICY: dict[str, Any] = {"name": "p", "pattern": "x", "definition": {"max-length": 1}}
BINDING = {"source": "amq.direct", "destination": "q"}
ODD_POLICIES: list[dict[str, Any]] = [{"name": 5}, {"pattern": 5}, {"vhost": 5}, {"priority": "high"}]
ODD_QUEUES: list[dict[str, Any]] = [{"vhost": 5}, {"vhost": ["/"]}, {"durable": "yes"}]
ODD_PARTITIONS: list[object] = ["2", 1.5, []]
BAD: list[tuple[str, dict[str, Any]]] = [
    *(("policies", POLICY | wrong) for wrong in ODD_POLICIES),
    *(("policies", POLICY | {"definition": wrong}) for wrong in (["max-length"], "max-length", None)),
    ("policies", POLICY | {"apply-to": ["queues"]}),
    *(
        ("parameters", {"component": "operator_policy", "name": "p", "value": wrong})
        for wrong in (None, "x", {"pattern": "x"}, {"pattern": "x", "definition": {"alternate-exchange": "x"}})
    ),
    *(("queues", {"name": "q", **wrong}) for wrong in ODD_QUEUES),
    *(("queues", {"name": "q", "auto_delete": wrong}) for wrong in ("no", 1, None)),
    *(("exchanges", {"name": key, "type": "direct", key: "no"}) for key in ("durable", "auto_delete", "internal")),
    *(("bindings", BINDING | {"routing_key": wrong}) for wrong in (5, ["a"], None)),
    ("bindings", BINDING | {"destination_type": 5}),
    *(("topics", {"name": "t", "partitions": wrong}) for wrong in ODD_PARTITIONS),
    ("topics", {"name": "t", "config": ["retention_ms"]}),
]


@pytest.mark.parametrize(("kind", "item"), BAD, ids=lambda part: json.dumps(part))
def test_invalid_definitions_are_refused_before_any_change(live: Served, kind: str, item: dict[str, Any]) -> None:
    document = {"queues": [{"name": "before"}], kind: [item], "vhosts": [{"name": "made"}]}
    answer = live.request("POST", "/api/definitions", json=document)
    assert answer.status_code == 400, answer.text
    assert live.get("/api/queues/%2F/before").status_code == live.get("/api/vhosts/made").status_code == 404


def test_an_import_into_one_vhost_changes_no_other(live: Served) -> None:
    assert live.request("PUT", "/api/vhosts/one").status_code == 201
    document = {
        "vhosts": [{"name": "two"}],
        "topics": [{"name": "elsewhere"}],
        "queues": [{"name": "q", "vhost": "two"}],
        "policies": [POLICY | {"vhost": "two"}],
    }
    assert live.request("POST", "/api/definitions/one", json=document).status_code == 204
    assert live.get("/api/queues/one/q").status_code == live.get("/api/policies/one/p").status_code == 200
    assert live.get("/api/vhosts/two").status_code == live.get("/topics/elsewhere").status_code == 404


def test_a_broker_restarts_after_any_attempted_import(tmp_path: Path) -> None:
    first = Served(tmp_path)
    for kind, item in BAD:
        first.request("POST", "/api/definitions", json={kind: [item]})
    first.stop()
    again = Served(tmp_path)
    try:
        assert again.get("/api/overview").status_code == 200
    finally:
        again.stop()
