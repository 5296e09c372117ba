"""Runtime parameters, global parameters, the name of the cluster, and other parts of RabbitMQ's API that tools read."""

from pathlib import Path
from typing import Any

import pika
import pytest

from headrace.config import Address
from headrace.version import __version__
from tests.listeners.amqp.running import eventually, patient_connection
from tests.listeners.api.conftest import Served
from tests.listeners.api.test_api import put_queue


def put(live: Served, path: str, body: Any) -> int:
    return live.request("PUT", f"/api/{path}", json=body).status_code


def delete(live: Served, path: str) -> int:
    return live.request("DELETE", f"/api/{path}").status_code


# Runtime parameters


def test_operator_policies_and_vhost_limits_are_runtime_parameters(live: Served) -> None:
    policy = {"pattern": "^limited$", "definition": {"max-length": 5}, "priority": 2, "apply-to": "queues"}
    put_queue(live, "limited")
    assert put(live, "parameters/operator_policy/%2F/bound", {"value": policy}) == 201
    assert put(live, "parameters/operator_policy/%2F/bound", {"value": policy}) == 204
    assert live.get("/api/queues/%2F/limited").json()["operator_policy"] == "bound"
    assert put(live, "parameters/vhost-limits/%2F/limits", {"value": {"max-queues": 1000}}) == 201
    assert live.get("/api/vhost-limits/%2F").json() == [{"vhost": "/", "value": {"max-queues": 1000}}]

    shown = {"component": "operator_policy", "vhost": "/", "name": "bound", "value": policy}
    limits = {"component": "vhost-limits", "vhost": "/", "name": "limits", "value": {"max-queues": 1000}}
    assert live.get("/api/parameters").json() == [shown, limits]
    assert live.get("/api/parameters/vhost-limits").json() == [limits]
    assert live.get("/api/parameters/operator_policy/%2F").json() == [shown]
    assert live.get("/api/parameters/operator_policy/%2F/bound").json() == shown
    assert live.get("/api/parameters/shovel").json() == []

    assert delete(live, "parameters/operator_policy/%2F/bound") == 204
    assert delete(live, "parameters/vhost-limits/%2F/limits") == 204
    assert delete(live, "parameters/vhost-limits/%2F/limits") == 404
    assert live.get("/api/queues/%2F/limited").json()["operator_policy"] is None
    assert live.get("/api/parameters").json() == [] == live.get("/api/vhost-limits").json()


@pytest.mark.parametrize(
    ("component", "name", "value", "reason"),
    [
        ("shovel", "s", {"src-uri": "amqp://"}, "Validation failed\n\ncomponent shovel not found\n"),
        (
            "federation-upstream",
            "u",
            {"uri": "amqp://"},
            "Validation failed\n\ncomponent federation-upstream not found\n",
        ),
        ("policy", "p", {"pattern": ".*"}, "policies may not be set using this method"),
        ("vhost-limits", "other", {"max-queues": 1}, "Validation failed\n\nthe name of the parameter must be limits\n"),
    ],
)
def test_parameters_of_missing_components_are_refused(
    live: Served, component: str, name: str, value: dict[str, Any], reason: str
) -> None:
    """As by a RabbitMQ without the plugin: a shovel that was accepted would be taken for one that works."""
    answer = live.request("PUT", f"/api/parameters/{component}/%2F/{name}", json={"value": value})
    assert answer.status_code == 400
    assert (answer.json()["error"], answer.json()["reason"]) == ("bad_request", reason)
    assert live.get("/api/parameters").json() == []


def test_limits_and_policies_are_checked_when_set_as_parameters(live: Served) -> None:
    assert put(live, "parameters/vhost-limits/%2F/limits", {"value": {"max-dogs": 1}}) == 400
    assert put(live, "parameters/operator_policy/%2F/p", {"value": {"pattern": "("}}) == 400
    assert put(live, "parameters/operator_policy/%2F/p", {}) == 400
    assert put(live, "parameters/operator_policy/nowhere/p", {"value": {}}) == 404


# Global parameters


def global_names(live: Served) -> set[str]:
    return {one["name"] for one in live.get("/api/global-parameters").json()}


def test_global_parameters_are_set_listed_and_deleted(live: Served) -> None:
    value = {"endpoints": ["amqp://server-name"], "none": None}
    assert put(live, "global-parameters/a%2Fname", {"name": "a/name", "value": value}) == 201
    assert put(live, "global-parameters/a%2Fname", {"value": [1, "two"]}) == 204
    assert live.get("/api/global-parameters/a%2Fname").json() == {"name": "a/name", "value": [1, "two"]}
    assert {"a/name", "internal_cluster_id"} <= global_names(live)
    assert delete(live, "global-parameters/a%2Fname") == 204
    assert delete(live, "global-parameters/a%2Fname") == 404
    assert live.get("/api/global-parameters/a%2Fname").status_code == 404
    assert "a/name" not in global_names(live)
    assert put(live, "global-parameters/no-value", {}) == 400
    assert put(live, f"global-parameters/{'n' * 256}", {"value": 1}) == 400


def test_the_cluster_name_is_what_was_set_everywhere_and_after_a_restart(tmp_path: Path) -> None:
    def serve() -> Served:
        return Served(tmp_path, amqp=Address("localhost", 0))

    live = serve()
    default = live.get("/api/cluster-name").json()["name"]
    assert default == live.get("/api/overview").json()["cluster_name"]
    assert put(live, "cluster-name", {"name": "prod-eu"}) == 204
    assert [put(live, "cluster-name", body) for body in ({}, {"name": ""}, {"name": 1})] == [400] * 3
    identity = live.get("/api/global-parameters/internal_cluster_id")
    exported = live.get("/api/definitions").json()
    live.stop()

    live = serve()
    assert live.get("/api/cluster-name").json() == {"name": "prod-eu"}
    assert live.get("/api/overview").json()["cluster_name"] == "prod-eu"
    assert 'rabbitmq_cluster="prod-eu"' in live.get("/metrics").text
    connection = patient_connection(live.amqp_port)
    announced: Any = connection._impl.server_properties
    assert announced["cluster_name"] == "prod-eu"
    connection.close()
    assert live.get("/api/definitions").json() == exported
    assert exported["original_cluster_name"] == "prod-eu"
    assert {"name": "cluster_name", "value": "prod-eu"} in exported["global_parameters"]
    assert identity.status_code == 404, "made when the parameters are first listed"
    live.stop()


def test_global_parameters_are_imported_except_the_identity_of_the_cluster(live: Served) -> None:
    exported = live.get("/api/definitions").json()
    given = [{"name": "team", "value": {"a": 1}}, {"name": "internal_cluster_id", "value": "of another"}]
    before = live.get("/api/global-parameters/internal_cluster_id").json()
    body = {**exported, "global_parameters": given}
    assert live.request("POST", "/api/definitions", json=body).status_code == 204
    assert live.get("/api/global-parameters/team").json()["value"] == {"a": 1}
    assert live.get("/api/global-parameters/internal_cluster_id").json() == before
    wrong = {"global_parameters": [{"name": "ok", "value": 1}, {"value": 2}]}
    assert live.request("POST", "/api/definitions", json=wrong).status_code == 400
    assert "ok" not in global_names(live), "nothing is done of a bad document"
    assert delete(live, "global-parameters/team") == 204


# Definitions


def test_definitions_have_all_metadata_of_every_vhost(live: Served) -> None:
    assert put(live, "vhosts/plain", {}) == 201
    exported = {vhost["name"]: vhost for vhost in live.get("/api/definitions").json()["vhosts"]}
    for name, description in (("plain", ""), ("/", "Default virtual host")):
        metadata = {"description": description, "tags": [], "default_queue_type": "classic"}
        assert exported[name] == {"name": name, **metadata, "metadata": metadata}


def test_the_definitions_of_a_vhost_say_what_they_are(live: Served) -> None:
    about = {"description": "of the team", "tags": ["eu"], "default_queue_type": "quorum"}
    assert put(live, "vhosts/described", about) == 201
    assert put(live, "vhost-limits/described/max-queues", {"value": 7}) == 204
    found = live.get("/api/definitions/described").json()
    assert found["metadata"] == about == {name: found[name] for name in about}
    assert found["original_vhost_name"] == "described"
    assert found["rabbitmq_definition_format"] == "single_virtual_host"
    assert (found["product_version"], found["limits"]) == (__version__, {"max-queues": 7})
    assert live.request("POST", "/api/definitions/plain", json=found).status_code == 204


# Smaller ones


def test_the_version_needs_no_login(live: Served) -> None:
    answer = live.client.get("/api/version")
    assert answer.status_code == 200
    assert answer.json() == live.get("/api/overview").json()["rabbitmq_version"]


def test_deprecated_features_say_whether_they_are_here(live: Served) -> None:
    found = {one["name"]: one["deprecation_phase"] for one in live.get("/api/deprecated-features").json()}
    assert found["transient_nonexcl_queues"] == "permitted_by_default"
    assert found["classic_queue_mirroring"] == "removed"


def test_links_and_shovels_of_a_vhost_are_none(live: Served) -> None:
    for path in ("federation-links", "federation-links/%2F", "shovels", "shovels/%2F"):
        assert live.get(f"/api/{path}").json() == []


def test_topic_permissions_of_one_exchange_are_deleted(live: Served) -> None:
    put(live, "users/keyed", {"password": "p", "tags": ""})
    for exchange in ("amq.topic", "amq.rabbitmq.trace", "amq.default"):
        body = {"exchange": exchange, "write": "log.*", "read": "log.*"}
        assert put(live, "topic-permissions/%2F/keyed", body) == 201
    path = "topic-permissions/%2F/keyed"
    assert [one["exchange"] for one in live.get(f"/api/{path}/amq.topic").json()] == ["amq.topic"]
    assert delete(live, f"{path}/amq.rabbitmq.trace") == 204
    assert delete(live, f"{path}/amq.default") == 204
    assert delete(live, f"{path}/amq.rabbitmq.trace") == 404
    assert [one["exchange"] for one in live.get("/api/users/keyed/topic-permissions").json()] == ["amq.topic"]
    assert delete(live, "users/keyed") == 204


def test_all_connections_of_a_user_are_closed(live: Served) -> None:
    put(live, "users/many", {"password": "p", "tags": "management"})
    put(live, "permissions/%2F/many", {"configure": ".*", "write": ".*", "read": ".*"})
    credentials = pika.PlainCredentials("many", "p")
    connections = [patient_connection(live.amqp_port, credentials=credentials) for _ in range(2)]
    other = patient_connection(live.amqp_port)
    own = {"auth": ("many", "p")}
    refused = live.request("DELETE", "/api/connections/username/guest", **own)
    assert refused.status_code == 403, "those of another user need the tag administrator"
    assert live.request("DELETE", "/api/connections/username/many", **own).status_code == 204
    for connection in connections:
        with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as closed:
            connection.process_data_events(60)
        assert (closed.value.reply_code, closed.value.reply_text) == (
            320,
            "CONNECTION_FORCED - Closed via management plugin",
        )
    eventually(lambda: not live.get("/api/connections/username/many").json(), "they are gone")
    assert delete(live, "connections/username/nobody") == 204
    other.process_data_events(0)
    assert other.is_open
    other.close()
