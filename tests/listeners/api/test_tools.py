"""RabbitMQ's own tools, and Flower, unchanged, against a running broker."""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.listeners.amqp.running import eventually, patient_connection
from tests.listeners.api.conftest import Served

OLD = shutil.which("rabbitmqadmin")
NEW = os.environ.get("RABBITMQADMIN_NG") or shutil.which("rabbitmqadmin-ng")
RABBITMQ = "/usr/lib/rabbitmq/bin/rabbitmq-server"


def port_of(live: Served) -> str:
    return str(urlsplit(live.base).port)


def old(live: Served, *arguments: str) -> str:
    assert OLD is not None
    command = [OLD, "-H", "127.0.0.1", "-P", port_of(live), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def new(live: Served, *arguments: str) -> str:
    assert NEW is not None
    command = [NEW, "--host", "127.0.0.1", "--port", port_of(live), "--non-interactive", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.peer
@pytest.mark.skipif(OLD is None, reason="rabbitmqadmin (Debian: rabbitmq-server) is not installed")
def test_the_old_rabbitmqadmin_works_unchanged(live: Served, tmp_path: Path) -> None:
    old(live, "declare", "exchange", "name=old-ex", "type=topic")
    old(live, "declare", "queue", "name=old-q", "durable=true", 'arguments={"x-message-ttl": 60000}')
    old(live, "declare", "queue", "name=old-quorum", "queue_type=quorum")
    old(live, "declare", "binding", "source=old-ex", "destination=old-q", "routing_key=a.#")
    assert "Message published\n" in old(live, "publish", "exchange=old-ex", "routing_key=a.b", "payload=hello")
    assert "NOT routed" in old(live, "publish", "routing_key=nowhere", "payload=x")
    assert "hello" in old(live, "get", "queue=old-q", "ackmode=ack_requeue_true")
    for noun in ("queues", "exchanges", "bindings", "nodes", "vhosts", "users", "permissions", "connections"):
        old(live, "list", noun)
    for noun in ("channels", "consumers", "policies", "operator_policies", "parameters", "vhost_limits"):
        old(live, "list", noun)
    assert "old-q" in old(live, "-f", "tsv", "list", "queues", "name", "messages_details.rate")
    assert "cluster_name" in old(live, "show", "overview")
    old(live, "declare", "policy", "name=old-p", "pattern=^old-q$", 'definition={"max-length": 5}', "apply-to=queues")
    exported = tmp_path / "definitions.json"
    old(live, "export", str(exported))
    assert json.loads(exported.read_text())["policies"][0]["name"] == "old-p"
    old(live, "purge", "queue", "name=old-q")
    old(live, "delete", "binding", "source=old-ex", "destination_type=queue", "destination=old-q", "properties_key=a.#")
    for kind, name in (("queue", "old-q"), ("queue", "old-quorum"), ("exchange", "old-ex"), ("policy", "old-p")):
        old(live, "delete", kind, f"name={name}")
    old(live, "import", str(exported))
    assert "old-q" in old(live, "list", "queues")


@pytest.mark.peer
@pytest.mark.skipif(OLD is None, reason="rabbitmqadmin (Debian: rabbitmq-server) is not installed")
def test_the_old_rabbitmqadmin_creates_and_deletes_users(live: Served) -> None:
    old(live, "declare", "user", "name=old-user", "password=secret", "tags=administrator,monitoring")
    old(live, "declare", "permission", "vhost=/", "user=old-user", "configure=.*", "write=^a", "read=")
    assert old(live, "-f", "tsv", "list", "users", "name", "tags").count("old-user\tadministrator monitoring") == 1
    assert "old-user\t^a" in old(live, "-f", "tsv", "list", "permissions", "user", "write")
    assert "old-user" in old(live, "-u", "old-user", "-p", "secret", "list", "users")
    old(live, "delete", "permission", "vhost=/", "user=old-user")
    old(live, "delete", "user", "name=old-user")
    assert "old-user" not in old(live, "list", "users") + old(live, "list", "permissions")


@pytest.mark.peer
@pytest.mark.skipif(NEW is None, reason="rabbitmqadmin v2 is not installed; RABBITMQADMIN_NG names its path")
def test_the_new_rabbitmqadmin_creates_and_deletes_users(live: Served) -> None:
    new(live, "declare", "user", "--name", "new-user", "--password", "secret", "--tags", "administrator")
    hashed = live.get("/api/auth/hash_password/another").json()["ok"]
    new(live, "declare", "user", "--name", "new-hashed", "--password-hash", hashed, "--tags", "management")
    rights = ("--configure", ".*", "--write", "^a", "--read", "^b")
    new(live, "declare", "permissions", "--username", "new-user", *rights)
    assert "new-user" in new(live, "list", "users") and "new-user" in new(live, "list", "permissions")
    assert "new-hashed" in new(live, "--username", "new-user", "--password", "secret", "list", "users")
    new(live, "--username", "new-hashed", "--password", "another", "list", "vhosts")
    new(live, "list", "user_connections", "--username", "new-user")
    new(live, "declare", "user_limit", "--username", "new-user", "--name", "max-channels", "--value", "9")
    assert "max-channels" in new(live, "list", "user_limits", "--user", "new-user")
    new(live, "delete", "user_limit", "--username", "new-user", "--name", "max-channels")
    new(live, "declare", "vhost_limit", "--name", "max-queues", "--value", "900")
    assert "max-queues" in new(live, "list", "vhost_limits")
    new(live, "delete", "vhost_limit", "--name", "max-queues")
    new(live, "delete", "permissions", "--username", "new-user")
    for name in ("new-user", "new-hashed"):
        new(live, "delete", "user", "--name", name)
    assert "new-user" not in new(live, "list", "users") + new(live, "list", "permissions")


@pytest.mark.peer
@pytest.mark.skipif(NEW is None, reason="rabbitmqadmin v2 is not installed; RABBITMQADMIN_NG names its path")
def test_the_new_rabbitmqadmin_works_unchanged(live: Served, tmp_path: Path) -> None:
    new(live, "show", "overview")
    new(live, "declare", "queue", "--name", "new-q", "--type", "classic", "--durable", "true")
    new(live, "declare", "exchange", "--name", "new-ex", "--type", "topic")
    binding = ("--source", "new-ex", "--destination-type", "queue", "--destination", "new-q", "--routing-key", "a")
    new(live, "declare", "binding", *binding)
    new(live, "publish", "message", "--exchange", "new-ex", "--routing-key", "a", "--payload", "hello")
    assert "hello" in new(live, "get", "messages", "--queue", "new-q", "--count", "1")
    connection = patient_connection(live.amqp_port)
    try:
        connection.channel().basic_consume("new-q", lambda *_: None, consumer_tag="seen")
        for noun in ("queues", "exchanges", "bindings", "nodes", "vhosts", "users", "permissions"):
            new(live, "list", noun)
        for noun in ("channels", "policies", "operator_policies"):
            new(live, "list", noun)
        assert "127.0.0.1" in new(live, "list", "connections") and "seen" in new(live, "list", "consumers")
    finally:
        connection.close()
    policy = ("--name", "new-p", "--pattern", "^new-q$", "--apply-to", "queues", "--priority", "1")
    new(live, "declare", "policy", *policy, "--definition", '{"max-length": 5}')
    exported = tmp_path / "definitions.json"
    new(live, "definitions", "export", "--file", str(exported))
    new(live, "purge", "queue", "--name", "new-q")
    new(live, "definitions", "import", "--file", str(exported))
    new(live, "delete", "policy", "--name", "new-p")
    new(live, "delete", "queue", "--name", "new-q")
    new(live, "delete", "exchange", "--name", "new-ex")
    new(live, "health_check", "local_alarms")


def test_flower_finds_its_queues(live: Served) -> None:
    from flower.utils.broker import Broker

    live.request("PUT", "/api/queues/%2F/celery", json={"durable": True})
    api = f"http://guest:guest@127.0.0.1:{port_of(live)}/api/"

    async def ask() -> Any:
        return await Broker(live.amqp_url.replace("%2F", "/"), http_api=api).queues(["celery"])

    # Flower waits a second for the connection and two for the response, and otherwise reports no queues.
    (found,) = eventually(lambda: asyncio.run(ask()))
    assert found["name"] == "celery" and found["messages"] == 0 and "consumers" in found


def test_definitions_exported_by_rabbitmq_are_imported(live: Served) -> None:
    """The file is the response of RabbitMQ 3.10.8 (Debian 12) to GET /api/definitions; passwords are the user names."""
    document = json.loads((Path(__file__).parent / "rabbitmq-3.10.8-definitions.json").read_text())
    for name in document["queues"]:
        live.request("DELETE", f"/api/queues/%2F/{name['name']}")
    answer = live.request("POST", "/api/definitions", json=document)
    assert answer.status_code == 204, answer.text
    queues = {queue["name"]: queue for queue in live.get("/api/queues").json()}
    assert {"orders", "orders.dead", "bills", "events", "lazy", "private"} <= queues.keys()
    assert (queues["bills"]["type"], queues["events"]["type"]) == ("quorum", "stream")
    assert queues["private"]["vhost"] == "team" and queues["lazy"]["policy"] == "ttl"
    assert queues["orders"]["arguments"]["x-max-priority"] == 5
    body = {"routing_key": "order.eu", "payload": "x", "payload_encoding": "string", "properties": {}}
    assert live.request("POST", "/api/exchanges/%2F/orders/publish", json=body).json() == {"routed": True}
    for name in ("orders", "bills"):  # the second through an exchange bound to an exchange
        assert live.get(f"/api/queues/%2F/{name}").json()["messages"] == 1
