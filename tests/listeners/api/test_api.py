"""RabbitMQ's management API as scripts use it."""

import base64
import gc
import gzip
import json
import socket
import time
import weakref
from typing import Any

import pika
import pytest

from headrace.broker.queues.queue import Queue
from headrace.errors import CorruptLog
from tests.broker.queue_world import refuse, say
from tests.listeners.amqp.running import eventually
from tests.listeners.api.conftest import Api, Served

GUEST = ("guest", "guest")
MODES = ("ack_requeue_true", "reject_requeue_true", "ack_requeue_false", "reject_requeue_false")


def put_queue(live: Api, name: str, **arguments: object) -> None:
    answer = live.request("PUT", f"/api/queues/%2F/{name}", json={"durable": True, "arguments": arguments})
    assert answer.status_code in (201, 204), answer.text


def post(live: Served, key: str, payload: str, exchange: str = "amq.default", **properties: object) -> bool:
    body = {"routing_key": key, "payload": payload, "payload_encoding": "string", "properties": properties}
    answer = live.request("POST", f"/api/exchanges/%2F/{exchange}/publish", json=body)
    assert answer.status_code == 200, answer.text
    return bool(answer.json()["routed"])


def take(live: Api, name: str, mode: str = "ack_requeue_false", count: int = 100) -> list[dict[str, object]]:
    body = {"count": count, "ackmode": mode, "encoding": "auto"}
    answer = live.request("POST", f"/api/queues/%2F/{name}/get", json=body)
    assert answer.status_code == 200, answer.text
    return list(answer.json())


def depth(live: Api, name: str) -> int:
    return int(live.get(f"/api/queues/%2F/{name}").json()["messages"])


def test_taken_messages_are_returned_although_another_queue_fails(
    live: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message used to be settled although the response was an error, and was lost."""
    for name in ("refusal.good", "refusal.bad"):
        put_queue(live, name)
    post(live, "refusal.good", "only once")
    good, bad = (live.server.broker.vhosts.get("/").queues[name] for name in ("refusal.good", "refusal.bad"))
    get = good.get

    def get_while_others_publish() -> object:
        say(bad, b"x")
        return get()

    monkeypatch.setattr(bad.view.log, "append", refuse)
    monkeypatch.setattr(good, "get", get_while_others_publish)
    assert [message["payload"] for message in take(live, "refusal.good")] == ["only once"]


def test_passwords_are_checked_and_local_clients_need_none(live: Served) -> None:
    assert live.get("/api/whoami", auth=GUEST).json()["name"] == "guest"
    assert live.get("/api/whoami").json()["name"] == "guest"
    for wrong in (("guest", "no"), ("nobody", "guest")):
        refused = live.get("/api/whoami", auth=wrong)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic")
        assert refused.json()["error"] == "not_authorised"
    assert live.get("/api/whoami", headers={"authorization": "Basic ???"}).status_code == 401


def test_strings_are_accepted_for_booleans_and_numbers(live: Served) -> None:
    body = {"durable": "true", "auto_delete": "false", "arguments": {"x-max-length": 3}, "node": None}
    assert live.request("PUT", "/api/queues/%2F/strings", json=body).status_code == 201
    assert live.request("PUT", "/api/queues/%2F/strings", json=body).status_code == 204
    found = live.get("/api/queues/%2F/strings/").json()
    assert (found["durable"], found["auto_delete"]) == (True, False)
    assert live.request("POST", "/api/queues/%2F/strings/get", json={"count": "5", "requeue": "true"}).json() == []
    wrong = live.request("PUT", "/api/queues/%2F/strings2", json={"durable": "perhaps"})
    assert wrong.status_code == 400 and wrong.json()["error"] == "bad_request"


def test_declaring_a_queue_with_other_arguments_is_refused_as_in_rabbitmq(live: Served) -> None:
    put_queue(live, "fixed")
    answer = live.request("PUT", "/api/queues/%2F/fixed", json={"durable": False})
    assert answer.status_code == 400
    assert "inequivalent arg 'durable'" in answer.json()["reason"]


def test_names_with_slashes_and_any_script_work_in_paths(live: Served) -> None:
    assert live.request("PUT", "/api/queues/%2F/a%2Fb%20%C3%A9%3Cb%3E", json={}).status_code == 201
    assert live.get("/api/queues/%2F/a%2Fb%20%C3%A9%3Cb%3E").json()["name"] == "a/b é<b>"
    assert live.request("DELETE", "/api/queues/%2F/a%2Fb%20%C3%A9%3Cb%3E").status_code == 204
    assert live.get("/api/queues/%2F/a%2Fb%20%C3%A9%3Cb%3E").status_code == 404


def test_columns_select_nested_fields(live: Served) -> None:
    put_queue(live, "columns")
    found = live.get("/api/queues/%2F/columns?columns=name,messages_details.rate,nothing").json()
    assert found == {"name": "columns", "messages_details": {"rate": 0.0}}


def test_lists_are_paged_filtered_and_sorted_by_the_broker(live: Served) -> None:
    for number in range(25):
        put_queue(live, f"paged-{number:02d}")
    post(live, "paged-07", "x")
    page = live.get("/api/queues?page=2&page_size=10&name=PAGED&sort=name&sort_reverse=true").json()
    assert (page["filtered_count"], page["page_count"], page["item_count"]) == (25, 3, 10)
    assert page["items"][0]["name"] == "paged-14"
    deepest = live.get("/api/queues?page=1&page_size=1&name=paged&sort=messages&sort_reverse=true").json()
    assert deepest["items"][0]["name"] == "paged-07"
    odd = live.get("/api/queues?page=1&name=%5Epaged-.%5B13%5D%24&use_regex=true&columns=name").json()
    assert odd["items"] == [{"name": f"paged-{n}"} for n in ("01", "03", "11", "13", "21", "23")]
    assert live.get("/api/queues?page=99&name=paged").status_code == 400
    assert live.get("/api/queues?page=1&name=(a)%5C1&use_regex=true").status_code == 400


@pytest.mark.parametrize("mode", MODES)
def test_get_requeues_or_consumes_messages_according_to_ackmode(live: Served, mode: str) -> None:
    name = f"get-{mode}"
    put_queue(live, name)
    for text in ("one", "two"):
        assert post(live, name, text, delivery_mode=2, headers={"h": 1})
    first = take(live, name, mode)
    assert [m["payload"] for m in first] == ["one", "two"]
    assert first[0]["properties"] == {"delivery_mode": 2, "headers": {"h": 1}}
    assert depth(live, name) == (2 if "requeue_true" in mode else 0)


def test_get_returns_messages_before_an_unreadable_one(live: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    put_queue(live, "half-read")
    for text in ("one", "two", "three"):
        post(live, "half-read", text)
    get = Queue.get

    def damaged(queue: Queue) -> Any:
        if queue.view.next == 2:
            raise CorruptLog("segment", 2, "rotten")
        return get(queue)

    with monkeypatch.context() as patched:
        patched.setattr(Queue, "get", damaged)
        assert [m["payload"] for m in take(live, "half-read", "ack_requeue_true")] == ["one", "two"]
    assert [m["payload"] for m in take(live, "half-read")] == ["one", "two", "three"]


def test_a_published_message_goes_to_its_cc_and_bcc_as_over_amqp(live: Served) -> None:
    for name in ("to", "cc", "bcc"):
        put_queue(live, f"copies.{name}")
    headers = {"CC": ["copies.cc"], "BCC": ["copies.bcc"]}
    assert post(live, "copies.to", "x", headers=headers)
    for name in ("to", "cc", "bcc"):
        (found,) = take(live, f"copies.{name}")
        assert found["properties"] == {"headers": {"CC": ["copies.cc"]}}


@pytest.mark.parametrize("copies", [5, "key", {"key": 1}])
def test_cc_and_bcc_must_be_lists(live: Served, copies: object) -> None:
    delayed = {"type": "x-delayed-message", "arguments": {"x-delayed-type": "direct"}}
    assert live.request("PUT", "/api/exchanges/%2F/copied.later", json=delayed).status_code in (201, 204)
    for exchange in ("amq.default", "amq.topic", "copied.later"):
        body = {"routing_key": "k", "payload": "x", "properties": {"headers": {"x-delay": 1, "CC": copies}}}
        answer = live.request("POST", f"/api/exchanges/%2F/{exchange}/publish", json=body)
        assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/topics/{name}/compact", {}),
        ("PATCH", "/topics/{name}", {"config": {"cleanup_policy": "compact"}}),
        ("PATCH", "/topics/{name}", {"config": {"cleanup_policy": "compact,delete"}}),
    ],
)
def test_the_messages_of_a_queue_are_not_compacted(live: Served, method: str, path: str, body: dict[str, Any]) -> None:
    """All messages of a queue have the routing key as their key, so compaction would keep only one."""
    put_queue(live, "uncompacted")
    refused = live.request(method, path.format(name="uncompacted"), json=body)
    assert refused.status_code in (400, 409) and "is a queue" in refused.text
    live.create("compacted")
    assert live.request(method, path.format(name="compacted"), json=body).status_code == 200
    assert live.request("DELETE", "/topics/compacted").status_code == 204


def test_binary_payloads_are_returned_as_base64(live: Served) -> None:
    put_queue(live, "binary")
    data = bytes(range(256))
    body = {"routing_key": "binary", "payload": base64.b64encode(data).decode(), "payload_encoding": "base64"}
    live.request("POST", "/api/exchanges/%2F/amq.default/publish", json={**body, "properties": {}})
    (message,) = take(live, "binary")
    assert message["payload_encoding"] == "base64" and base64.b64decode(str(message["payload"])) == data


def test_bindings_are_created_listed_and_deleted(live: Served) -> None:
    put_queue(live, "bound")
    assert live.request("PUT", "/api/exchanges/%2F/binds", json={"type": "topic"}).status_code == 201
    made = live.request("POST", "/api/bindings/%2F/e/binds/q/bound", json={"routing_key": "a.#", "arguments": {}})
    assert made.status_code == 201 and made.headers["location"] == "bound/a.%2523"
    assert post(live, "a.b", "x", exchange="binds") and not post(live, "b", "x", exchange="binds")
    assert len(live.get("/api/queues/%2F/bound/bindings").json()) == 2
    (found,) = live.get("/api/bindings/%2F/e/binds/q/bound").json()
    assert found["properties_key"] == "a.%23"
    assert live.request("DELETE", "/api/bindings/%2F/e/binds/q/bound/a.%23").status_code == 204
    assert live.get("/api/bindings/%2F/e/binds/q/bound").json() == []
    assert live.request("DELETE", "/api/exchanges/%2F/binds").status_code == 204


def test_policies_limit_queues_until_they_are_deleted(live: Served) -> None:
    put_queue(live, "policed")
    for number in range(5):
        post(live, "policed", str(number))
    body = {"pattern": "^policed$", "definition": {"max-length": 2}, "priority": "1", "apply-to": "queues"}
    assert live.request("PUT", "/api/policies/%2F/short", json=body).status_code == 201
    # Applies from now on; surplus messages are dropped with the current round.
    eventually(lambda: [m["payload"] for m in take(live, "policed", "ack_requeue_true")] == ["3", "4"])
    found = live.get("/api/queues/%2F/policed").json()
    assert found["policy"] == "short" and found["effective_policy_definition"] == {"max-length": 2}
    post(live, "policed", "5")
    assert [m["payload"] for m in take(live, "policed", "ack_requeue_true")] == ["4", "5"]
    assert live.request("DELETE", "/api/policies/%2F/short").status_code == 204
    post(live, "policed", "6")
    assert depth(live, "policed") == 3


def test_a_policy_with_ttl_and_dead_letter_exchange_moves_expired_messages(live: Served) -> None:
    put_queue(live, "old")
    put_queue(live, "grave")
    post(live, "old", "bones")
    definition = {"message-ttl": 1, "dead-letter-exchange": "", "dead-letter-routing-key": "grave"}
    body = {"pattern": "^old$", "definition": definition, "apply-to": "classic_queues"}
    assert live.request("PUT", "/api/policies/%2F/mortal", json=body).status_code == 201
    eventually(lambda: depth(live, "grave"), "it moves")
    (dead,) = take(live, "grave")
    assert dead["payload"] == "bones"
    assert dead["properties"]["headers"]["x-death"][0]["reason"] == "expired"  # type: ignore[index]
    live.request("DELETE", "/api/policies/%2F/mortal")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("exchanges", {"type": "x-delayed-message", "arguments": {"x-delayed-type": ["direct"]}}),
        ("exchanges", {"type": "x-consistent-hash", "arguments": {"hash-header": {"a": 1}}}),
        ("queues", {"arguments": {"x-queue-type": "stream", "x-max-age": "9" * 5000 + "D"}}),
        ("policies", {"pattern": ".", "definition": {"max-age": "9" * 5000 + "D"}}),
    ],
    ids=["delayed", "hash", "queue", "policy"],
)
def test_impossible_arguments_are_a_bad_request(live: Served, path: str, body: dict[str, Any]) -> None:
    answer = live.request("PUT", f"/api/{path}/%2F/cannot-be", json=body)
    assert answer.status_code == 400, answer.text


def test_invalid_policies_are_refused(live: Served) -> None:
    for body in (
        {"pattern": "(", "definition": {"max-length": 1}},
        {"pattern": r"(a)\1", "definition": {"max-length": 1}},
        {"pattern": ".*", "definition": {"max-lenght": 1}},
        {"pattern": ".*", "definition": {"max-length": "many"}},
        {"pattern": ".*", "definition": {}},
        {"pattern": ".*", "definition": {"max-length": 1}, "apply-to": "people"},
        {"definition": {"max-length": 1}},
    ):
        answer = live.request("PUT", "/api/policies/%2F/nonsense", json=body)
        assert answer.status_code == 400, (body, answer.text)
    assert live.get("/api/policies/%2F/nonsense").status_code == 404


def test_exported_definitions_can_be_imported(live: Served) -> None:
    put_queue(live, "defined", **{"x-max-length": 7})
    live.request("PUT", "/api/exchanges/%2F/defined-ex", json={"type": "fanout"})
    live.request("POST", "/api/bindings/%2F/e/defined-ex/q/defined", json={"routing_key": ""})
    live.request("PUT", "/api/policies/%2F/defined", json={"pattern": "^none", "definition": {"expires": 1000}})
    bound = {"pattern": "^defined$", "definition": {"max-length": 5}, "priority": 2, "apply-to": "queues"}
    live.request("PUT", "/api/operator-policies/%2F/defined", json=bound)
    exported = live.get("/api/definitions").json()
    assert exported["parameters"] == [{"component": "operator_policy", "vhost": "/", "name": "defined", "value": bound}]
    of_vhost = live.get("/api/definitions/%2F").json()["parameters"]
    assert of_vhost == [{"component": "operator_policy", "name": "defined", "value": bound}]
    for kind, name in (
        ("queues", "defined"),
        ("exchanges", "defined-ex"),
        ("policies", "defined"),
        ("operator-policies", "defined"),
    ):
        path = f"{kind}/%2F/{name}"
        assert live.request("DELETE", f"/api/{path}").status_code == 204
    assert live.request("POST", "/api/definitions", json=exported).status_code == 204
    assert live.get("/api/queues/%2F/defined").json()["arguments"] == {"x-max-length": 7}
    assert len(live.get("/api/exchanges/%2F/defined-ex/bindings/source").json()) == 1
    assert live.get("/api/definitions").json() == exported
    assert live.get("/api/queues/%2F/defined").json()["operator_policy"] == "defined"
    broken = {**exported, "exchanges": [{"name": "new-one", "type": "direct"}, {"name": "odd", "type": "x-unknown"}]}
    assert live.request("POST", "/api/definitions", json=broken).status_code == 400
    assert live.get("/api/exchanges/%2F/new-one").status_code == 404, "nothing is done of a bad document"


def test_vhost_metadata_is_stored_shown_and_exported(live: Served) -> None:
    said = {"description": "of the team", "tags": "production,eu", "default_queue_type": "quorum"}
    metadata = {**said, "tags": ["production", "eu"]}
    assert live.request("PUT", "/api/vhosts/said", json=said).status_code == 201
    shape = live.get("/api/vhosts/said").json()
    assert shape["metadata"] == metadata == {name: shape[name] for name in metadata}
    exported = {vhost["name"]: vhost for vhost in live.get("/api/definitions").json()["vhosts"]}
    assert exported["said"] == {"name": "said", **metadata, "metadata": metadata}
    live.request("PUT", "/api/queues/said/untyped", json={"durable": True})
    assert live.get("/api/queues/said/untyped").json()["type"] == "quorum"

    assert live.request("PUT", "/api/vhosts/said", json={"tags": ["x"]}).status_code == 204, "as RabbitMQ: all anew"
    shape = live.get("/api/vhosts/said").json()
    assert (shape["description"], shape["tags"], shape["default_queue_type"]) == ("", ["x"], "classic")
    for wrong in ({"default_queue_type": "round"}, {"tags": [1]}, {"description": 1}):
        assert live.request("PUT", "/api/vhosts/said", json=wrong).status_code == 400
    imported = {"vhosts": [exported["said"], {"name": "bare"}]}
    assert live.request("POST", "/api/definitions", json=imported).status_code == 204
    assert live.get("/api/vhosts/said").json()["metadata"] == metadata
    assert live.request("POST", "/api/definitions", json={"vhosts": [{"name": "said"}]}).status_code == 204
    assert live.get("/api/vhosts/said").json()["metadata"] == metadata, "what says nothing changes nothing"


def test_vhosts_are_created_and_deleted_with_their_contents(live: Served) -> None:
    assert live.request("PUT", "/api/vhosts/team%2Fa").status_code == 201
    assert live.request("PUT", "/api/queues/team%2Fa/q", json={}).status_code == 201
    assert live.get("/api/queues/team%2Fa").json()[0]["vhost"] == "team/a"
    assert live.request("DELETE", "/api/vhosts/team%2Fa").status_code == 204
    assert live.get("/api/queues/team%2Fa").status_code == 404


def test_deleting_a_vhost_deletes_its_policies(live: Served) -> None:
    """They used to apply again to a new vhost of the same name."""
    for kind in ("policies", "operator-policies"):
        live.request("PUT", "/api/vhosts/short")
        body = {"pattern": ".*", "definition": {"max-length": 1}, "apply-to": "queues"}
        assert live.request("PUT", f"/api/{kind}/short/tight", json=body).status_code == 201
        assert live.request("DELETE", "/api/vhosts/short").status_code == 204
        assert live.request("PUT", "/api/vhosts/short").status_code == 201
        assert live.get(f"/api/{kind}/short").json() == []
        assert live.request("DELETE", "/api/vhosts/short").status_code == 204


def test_a_kafka_connection_without_login_has_no_user(live: Served) -> None:
    host, _, port = live.kafka.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port))):
        (seen,) = eventually(lambda: live.get("/api/connections").json(), "it is listed")
        assert (seen["protocol"], seen["user"]) == ("Kafka", "")
    eventually(lambda: not live.get("/api/connections").json(), "it is gone")


def test_connections_channels_and_consumers_are_listed_and_can_be_closed(live: Served) -> None:
    put_queue(live, "watched")
    connection = pika.BlockingConnection(pika.URLParameters(live.amqp_url + "?heartbeat=30"))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=7)
    channel.basic_consume("watched", lambda *_: None)
    (seen,) = only_one(live)
    assert (seen["user"], seen["channels"], seen["protocol"]) == ("guest", 1, "AMQP 0-9-1")
    (open_channel,) = live.get("/api/channels").json()
    assert (open_channel["consumer_count"], open_channel["prefetch_count"]) == (1, 7)
    (consumer,) = live.get("/api/consumers/%2F").json()
    assert consumer["queue"]["name"] == "watched"
    assert live.get("/api/queues/%2F/watched").json()["consumer_details"][0]["prefetch_count"] == 7
    name = seen["name"].replace(" ", "%20").replace(">", "%3E").replace("[", "%5B").replace("]", "%5D")
    assert live.request("DELETE", f"/api/connections/{name}", headers={"X-Reason": "upgrade"}).status_code == 204
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as closed:
        connection.process_data_events(time_limit=60)
    assert (closed.value.reply_code, closed.value.reply_text) == (320, "CONNECTION_FORCED - upgrade")
    # The client returns before the broker has seen the socket close.
    eventually(lambda: not live.get("/api/connections").json(), "a closed connection is not listed any more")


def only_one(live: Served) -> list[dict[str, Any]]:
    """The list, once the connections of other tests have ended."""
    eventually(lambda: len(live.get("/api/connections").json()) == 1, "one is left")
    return list(live.get("/api/connections").json())


def test_health_checks_reflect_the_state(live: Served) -> None:
    assert live.get("/api/aliveness-test/%2F").json() == {"status": "ok"}
    assert live.get("/api/health/checks/alarms").json() == {"status": "ok"}
    assert live.get(f"/api/health/checks/port-listener/{live.amqp_port}").status_code == 200
    assert live.get("/api/health/checks/port-listener/1").status_code == 503
    assert live.get("/api/health/checks/protocol-listener/amqp091").status_code == 200
    overview = live.get("/api/overview").json()
    assert overview["object_totals"]["queues"] > 0 and overview["node"] == live.get("/api/nodes").json()[0]["name"]


def test_health_checks_refuse_invalid_ports_and_unknown_nodes(live: Served) -> None:
    """A malformed check must not look like a failing broker, nor the reverse."""
    assert live.get("/api/health/checks/port-listener/amqp").status_code == 400
    node = live.get("/api/nodes").json()[0]["name"]
    assert [live.get(f"/api/nodes/{name}/memory").status_code for name in (node, "another")] == [200, 404]
    assert [live.get(f"/api/healthchecks/node/{name}").status_code for name in (node, "another")] == [200, 404]


def test_the_overview_lists_the_ports_of_the_management_api(live: Served) -> None:
    """AMQPStorm's tests read the node's name there; as in RabbitMQ the port is a string."""
    node = live.get("/api/nodes").json()[0]
    context = {"description": "Headrace", "path": "/", "port": str(live.port)}
    assert live.get("/api/overview").json()["contexts"] == [{"node": node["name"], **context}]
    assert node["contexts"] == [context]


def test_a_certificate_that_expires_soon_fails_its_check(live: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    check = "/api/health/checks/certificate-expiration"
    assert live.get(f"{check}/3/years").status_code == 200  # no TLS, nothing that expires
    monkeypatch.setattr(live.broker.stats, "certificate_expires_s", lambda: time.time() + 10 * 86_400)
    assert [live.get(f"{check}/{within}").status_code for within in ("9/days", "1/weeks")] == [200, 200]
    failed = live.get(f"{check}/2/weeks")
    assert failed.status_code == 503 and "expires in" in failed.json()["reason"]
    monkeypatch.setattr(live.broker.stats, "certificate_expires_s", lambda: time.time() - 1)
    assert live.get(f"{check}/0/days").status_code == 503
    assert [live.get(f"{check}/{wrong}").status_code for wrong in ("1/bananas", "x/days", "-1/days")] == [400] * 3


def test_counts_are_integers(live: Served) -> None:
    put_queue(live, "counted")
    post(live, "counted", "x")
    for path in ("/api/overview", "/api/queues/%2F/counted"):
        stats = live.get(path).json()["message_stats"]
        counts = {name: value for name, value in stats.items() if not name.endswith("_details")}
        assert "publish" in counts and all(type(value) is int for value in counts.values()), counts


def test_unknown_objects_are_404_and_malformed_json_is_400(live: Served) -> None:
    for path in ("/api/nothing", "/api/queues/nowhere", "/api/queues/%2F/none", "/api/exchanges/%2F/none", "/api"):
        answer = live.get(path)
        assert answer.status_code == 404 and answer.json()["error"] == "Object Not Found"
    assert live.request("PATCH", "/api/queues/%2F/x").status_code == 405
    bad = live.request("PUT", "/api/queues/%2F/x", content=b"{", headers={"content-type": "application/json"})
    assert bad.status_code == 400
    assert json.loads(bad.text)["error"] == "bad_request"


def test_requests_from_pages_of_other_sites_are_refused(live: Served) -> None:
    answer = live.request("DELETE", "/api/queues/%2F/defined", headers={"origin": "http://evil.example"})
    assert answer.status_code == 403


def compressed_zeros(size: int) -> dict[str, Any]:
    """A compressed request of a few kilobytes that contains many empty lists."""
    body = b'{"a":[' + b"[]," * (size // 3) + b"[]]}"
    return {"content": gzip.compress(body), "headers": {"content-encoding": "gzip"}}


def test_a_small_body_that_decompresses_to_millions_of_values_is_refused(live: Served) -> None:
    put_queue(live, "decompressed")
    refused = live.request("POST", "/api/queues/%2F/decompressed/get", **compressed_zeros(2 << 20))
    assert refused.status_code == 413 and "exceeds the limit" in refused.json()["reason"]
    for path in ("/api/definitions", "/api/exchanges/%2F/amq.default/publish"):
        refused = live.request("POST", path, **compressed_zeros(16 << 20))
        assert refused.status_code == 400 and "JSON values" in refused.json()["reason"], path


def test_uploaded_definitions_with_too_many_values_are_refused(live: Served) -> None:
    form = b'--edge\r\n\r\n{"a":[' + b"[]," * (5 << 20) + b"[]]}\r\n--edge--"
    kind = {"content-type": "multipart/form-data; boundary=edge"}
    refused = live.request("POST", "/api/definitions", content=form, headers=kind)
    assert refused.status_code == 400 and "JSON values" in refused.json()["reason"]


def test_a_large_message_is_published_over_the_api(live: Served) -> None:
    put_queue(live, "roomy")
    post(live, "roomy", "x" * (5 << 20))
    (message,) = take(live, "roomy")
    assert message["payload_bytes"] == 5 << 20


@pytest.mark.parametrize("durable", [True, False])
def test_a_deleted_queue_is_not_kept_alive_by_its_rates(live: Served, durable: bool) -> None:
    """Flower lists all queues repeatedly, and Celery creates and deletes them by the thousand."""
    live.request("PUT", "/api/queues/%2F/looked-at", json={"durable": durable})
    live.get("/api/queues")
    live.get("/api/headrace/streams/%2F/looked-at")
    kept = weakref.ref(live.broker.vhosts.get("/").queues["looked-at"])
    live.request("DELETE", "/api/queues/%2F/looked-at")
    eventually(lambda: gc.collect() is not None and kept() is None, "the object is released")


@pytest.mark.parametrize("mode", MODES)
def test_each_message_has_the_number_of_remaining_messages(live: Served, mode: str) -> None:
    put_queue(live, "behind")
    live.request("DELETE", "/api/queues/%2F/behind/contents")
    for number in range(3):
        post(live, "behind", str(number))
    assert [one["message_count"] for one in take(live, "behind", mode, 2)] == [2, 1]


@pytest.mark.parametrize("expiration", ["soon", "-1", "1.5", ""])
def test_an_invalid_expiration_is_refused_as_in_amqp(live: Served, expiration: str) -> None:
    put_queue(live, "expired-how")
    body = {"routing_key": "expired-how", "payload": "x", "properties": {"expiration": expiration}}
    answer = live.request("POST", "/api/exchanges/%2F/amq.default/publish", json=body)
    assert answer.status_code == 400 and "expiration" in answer.json()["reason"]
    assert depth(live, "expired-how") == 0


@pytest.mark.parametrize("durable", [True, False])
def test_names_and_keys_too_long_for_amqp_are_refused(live: Served, durable: bool) -> None:
    put_queue(live, "shortly")
    long = "ä" * 128  # 256 bytes
    for path, body in (
        (f"/api/queues/%2F/{long}", {"durable": durable}),
        (f"/api/exchanges/%2F/{long}", {"durable": durable, "type": "fanout"}),
    ):
        answer = live.request("PUT", path, json=body)
        assert answer.status_code == 400 and "255" in answer.json()["reason"], path
    answer = live.request("POST", "/api/bindings/%2F/e/amq.topic/q/shortly", json={"routing_key": long})
    assert answer.status_code == 400 and "255" in answer.json()["reason"]
