"""Definitions survive the way from a real RabbitMQ to Headrace and back."""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pika
import pytest
from bench.amqp_peers import RABBITMQ, rabbitmq

from tests.listeners.amqp.running import eventually, patient_connection
from tests.listeners.api.conftest import Served
from tests.ports import free_port

pytestmark = [
    pytest.mark.peer,
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.path.exists(RABBITMQ), reason="SKIPPED FOR WANT OF RabbitMQ (Debian: rabbitmq-server): definitions"
    ),
]
TEAM = "/api/{}/team/{}"
PASSWORD = "a secret of the bill writer"


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, int]]:
    """RabbitMQ's management API, and its AMQP port."""
    port = free_port()
    with rabbitmq(str(tmp_path_factory.mktemp("rabbitmq")), management_port=port) as (classic, _):
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, auth=("guest", "guest"), timeout=30) as client:
            yield client, classic.port


def declare(client: httpx.Client) -> None:
    """Users, permissions, policies, exchanges, queues and bindings of a small company."""

    def put(path: str, body: dict[str, Any], method: str = "PUT") -> None:
        answer = client.request(method, path, json=body)
        assert answer.status_code in (201, 204), f"{path}: {answer.status_code} {answer.text}"

    put("/api/vhosts/team", {})
    put("/api/users/bill", {"password": PASSWORD, "tags": "management"})
    put("/api/users/watch", {"password_hash": "", "tags": "monitoring,policymaker"})
    put("/api/permissions/team/bill", {"configure": "^bill-", "write": "^(bill-|orders$)", "read": ".*"})
    put("/api/permissions/team/guest", {"configure": ".*", "write": ".*", "read": ".*"})
    put("/api/topic-permissions/team/bill", {"exchange": "orders", "write": r"^eu\.", "read": ""})
    put(TEAM.format("exchanges", "orders"), {"type": "topic", "durable": True})
    put(TEAM.format("exchanges", "inner"), {"type": "fanout", "durable": True, "internal": True})
    put(TEAM.format("queues", "bill-in"), {"durable": True, "arguments": {"x-message-ttl": 60000}})
    put(TEAM.format("queues", "audit"), {"durable": True, "arguments": {"x-queue-type": "quorum"}})
    put("/api/bindings/team/e/orders/q/bill-in", {"routing_key": "eu.#", "arguments": {}}, "POST")
    put("/api/bindings/team/e/orders/e/inner", {"routing_key": "#", "arguments": {}}, "POST")
    put("/api/bindings/team/e/inner/q/audit", {"routing_key": "", "arguments": {}}, "POST")
    policy = {"pattern": "^bill-", "apply-to": "queues", "priority": 3, "definition": {"max-length": 1000}}
    put(TEAM.format("policies", "short"), policy)
    put(TEAM.format("operator-policies", "shorter"), policy | {"definition": {"max-length": 500}})
    put(TEAM.format("vhost-limits", "max-queues"), {"value": 2})
    put(TEAM.format("vhost-limits", "max-connections"), {"value": 1})


def forget(client: httpx.Client) -> None:
    for path in ("/api/vhosts/team", "/api/users/bill", "/api/users/watch"):
        assert client.delete(path).status_code == 204


def told(document: dict[str, Any]) -> dict[str, list[Any]]:
    """What both sides must agree on: contents of the vhost and users, in any order."""
    found: dict[str, list[Any]] = {}
    for kind in ("permissions", "topic_permissions", "parameters", "policies", "queues", "exchanges", "bindings"):
        found[kind] = [one for one in document[kind] if one["vhost"] == "team"]
    found["users"] = [
        {key: one[key] for key in ("name", "password_hash", "hashing_algorithm", "tags")}
        for one in document["users"]
        if one["name"] != "guest"
    ]
    return {kind: sorted(items, key=lambda one: json.dumps(one, sort_keys=True)) for kind, items in found.items()}


def log_in(port: int, password: str) -> None:
    credentials = pika.PlainCredentials("bill", password)
    patient_connection(port, virtual_host="team", credentials=credentials).close()


def told_at_the_limits(port: int) -> list[str]:
    """Checks limits of 1 connection and 2 queues."""
    credentials = pika.PlainCredentials("bill", PASSWORD)
    team = {"virtual_host": "team", "credentials": credentials}

    def enter() -> pika.BlockingConnection | None:
        """RabbitMQ needs a moment to notice closed connections."""
        with contextlib.suppress(pika.exceptions.ProbableAccessDeniedError):
            return patient_connection(port, **team)
        return None

    first = eventually(enter)
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError) as outside:
        patient_connection(port, **team)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as inside:
        first.channel().queue_declare("bill-more")
    first.close()
    return [str(outside.value), str(inside.value)]


def test_definitions_can_be_exchanged_with_rabbitmq(peer: tuple[httpx.Client, int], live: Served) -> None:
    theirs, their_port = peer
    declare(theirs)
    exported = theirs.get("/api/definitions").json()
    answer = live.request("POST", "/api/definitions", json=exported, auth=("guest", "guest"))
    assert answer.status_code == 204, answer.text
    ours = live.get("/api/definitions", auth=("guest", "guest")).json()
    assert told(ours) == told(exported)
    log_in(live.amqp_port, PASSWORD)
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        log_in(live.amqp_port, "not it")

    forget(theirs)
    answer = theirs.post("/api/definitions", json=ours)
    assert answer.status_code in (201, 204), answer.text
    assert told(theirs.get("/api/definitions").json()) == told(exported)
    log_in(their_port, PASSWORD)
    assert told_at_the_limits(live.amqp_port) == told_at_the_limits(their_port)
    for path in ("/api/vhost-limits", "/api/vhost-limits/team"):
        assert live.get(path, auth=("guest", "guest")).json() == theirs.get(path).json()


@pytest.mark.parametrize("key", ["a.#", "*", "a b", "a+b", "50%", "~", "a/b", "ключ", "", "x:y&z=1?"])
def test_bindings_have_the_names_and_locations_of_rabbitmq(
    live: Served, peer: tuple[httpx.Client, int], key: str
) -> None:
    theirs, _ = peer
    live.client.auth = httpx.BasicAuth("guest", "guest")
    path = "/api/bindings/%2F/e/amq.topic/q/named%20queue"
    found = []
    for client in (theirs, live.client):
        assert client.put("/api/queues/%2F/named%20queue", json={}).status_code in (201, 204)
        made = client.post(path, json={"routing_key": key})
        names = [one["properties_key"] for one in client.get(path).json() if one["routing_key"] == key]
        # RabbitMQ writes a space as "+", which servers take literally in a path.
        found.append((made.headers["location"].replace("+", "%20"), names))
        assert client.delete(f"{path}/{quote(names[0], safe='')}").status_code == 204
    assert found[0] == found[1]
