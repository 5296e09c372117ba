"""The tool that the broker serves as /cli/rabbitmqadmin: downloaded and run as a script, against the same broker."""

import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pika
import pytest

from tests.listeners.amqp.running import eventually, patient_connection
from tests.listeners.api.conftest import Served


@pytest.fixture(scope="module")
def script(live: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    answer = live.client.get("/cli/rabbitmqadmin")
    assert answer.status_code == 200 and answer.text.startswith("#!/usr/bin/env python3")
    path = tmp_path_factory.mktemp("tool") / "rabbitmqadmin"
    path.write_bytes(answer.content)
    return path


def run(live: Served, script: Path, *words: str, code: int = 0) -> str:
    command = [sys.executable, "-I", str(script), "-H", "127.0.0.1", "-P", str(urlsplit(live.base).port), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, input="from stdin")
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_tool_declares_publishes_gets_and_deletes(live: Served, script: Path) -> None:
    run(live, script, "declare", "exchange", "name=tool-ex", "type=topic")
    run(live, script, "declare", "queue", "name=tool/q", 'arguments={"x-message-ttl": 60000}', "queue_type=classic")
    run(live, script, "declare", "binding", "source=tool-ex", "destination=tool/q", "routing_key=a.#")
    assert live.get("/api/queues/%2F/tool%2Fq").json()["arguments"]["x-message-ttl"] == 60000
    sent = run(live, script, "publish", "exchange=tool-ex", "routing_key=a.b", "payload=hello")
    assert sent == "Message published\n"
    assert "NOT routed" in run(live, script, "publish", "routing_key=nowhere")
    assert "hello" in run(live, script, "get", "queue=tool/q", "ackmode=ack_requeue_true")
    listed = json.loads(run(live, script, "-f", "raw_json", "list", "bindings"))
    (key,) = (one["properties_key"] for one in listed if one["source"] == "tool-ex")
    assert key == "a.%23"
    deleted = ("binding", "source=tool-ex", "destination=tool/q", f"properties_key={key}")
    assert run(live, script, "delete", *deleted) == "binding deleted\n"
    assert run(live, script, "purge", "queue", "name=tool/q") == "queue purged\n"
    assert run(live, script, "-q", "delete", "queue", "name=tool/q") == ""
    assert run(live, script, "delete", "exchange", "name=tool-ex") == "exchange deleted\n"


def test_the_tool_lists_everything_in_every_format(live: Served, script: Path) -> None:
    for noun in ("bindings", "channels", "connections", "consumers", "exchanges", "nodes", "operator_policies"):
        run(live, script, "list", noun)
    for noun in ("parameters", "permissions", "policies", "queues", "users", "vhost_limits", "vhosts"):
        run(live, script, "list", noun)
    assert "| guest | " in run(live, script, "list", "users")
    for form in ("tsv", "long", "kvp", "bash", "pretty_json"):
        assert "amq.topic" in run(live, script, "-f", form, "-V", "/", "-S", "name", "list", "exchanges", "name")
    assert "rabbitmq_version" in run(live, script, "show", "overview")
    assert "declare queue name=..." in run(live, script, "help")


def test_the_tool_manages_users_policies_limits_and_definitions(live: Served, script: Path, tmp_path: Path) -> None:
    run(live, script, "declare", "vhost", "name=tool-v")
    run(live, script, "declare", "user", "name=tooler", "password=p", "tags=management")
    run(live, script, "-V", "tool-v", "declare", "permission", "user=tooler", "configure=.*", "write=.*", "read=.*")
    run(live, script, "declare", "policy", "name=tool-p", "pattern=^x$", 'definition={"max-length": 5}')
    run(live, script, "-V", "tool-v", "declare", "vhost_limit", "name=max-queues", "value=5")
    exported = tmp_path / "definitions.json"
    run(live, script, "export", str(exported))
    document = json.loads(exported.read_text())
    assert document["policies"][0]["definition"] == {"max-length": 5}
    assert document["parameters"][0]["value"] == {"max-queues": 5}
    assert "Uploaded" in run(live, script, "import", str(exported))
    run(live, script, "delete", "policy", "name=tool-p")
    run(live, script, "delete", "user", "name=tooler")
    run(live, script, "delete", "vhost", "name=tool-v")


def test_the_tool_closes_a_connection(live: Served, script: Path) -> None:
    connection = patient_connection(live.amqp_port)
    eventually(lambda: live.get("/api/connections").json(), "it is listed")
    name = live.get("/api/connections").json()[0]["name"]
    assert run(live, script, "close", "connection", f"name={name}") == "connection closed\n"
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker):
        connection.process_data_events(60)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("declare", "queue"), "*** missing: name"),
        (("declare", "dog"), "*** declare what?"),
        (("declare", "queue", "name=q", "colour=red"), "*** unknown argument colour"),
        (("declare", "queue", "name=q", "arguments={"), "*** arguments must be JSON"),
        (("purge", "queue", "name=none"), "*** 404"),
        (("import", "/nonexistent"), "*** cannot read"),
    ],
)
def test_mistakes_get_a_sentence(live: Served, script: Path, words: tuple[str, ...], text: str) -> None:
    assert run(live, script, *words, code=1).startswith(text)


def test_the_page_of_the_tool_says_how_to_get_it(live: Served) -> None:
    for path in ("/cli", "/cli/"):
        assert f"{live.base}/cli/rabbitmqadmin" in live.client.get(path).text
