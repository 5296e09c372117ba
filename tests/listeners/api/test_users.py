"""Users and permissions over the management API, and the effect of each tag and permission."""

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

import httpx
import pika
import pytest

from headrace.config import Address
from headrace.listeners.http.management import groups
from headrace.listeners.http.management.routes import ROUTES
from headrace.listeners.http.server.authorization import public
from tests.listeners.amqp.running import eventually, patient_connection
from tests.listeners.api.conftest import Served

PASSWORD = "no-password-of-anybody-else"
ALL = {"configure": ".*", "write": ".*", "read": ".*"}
NONE = {"configure": "", "write": "", "read": ""}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One user per tag with permissions in the vhost `/`, and another vhost without permissions."""
    server = Served(tmp_path_factory.mktemp("data"), amqp=Address("localhost", 0))
    for tag in ("management", "monitoring", "policymaker", "administrator", "other"):
        assert put(server, f"users/{tag}", {"password": PASSWORD, "tags": tag}).status_code == 201
        assert put(server, f"permissions/%2F/{tag}", ALL).status_code == 201
    assert put(server, "vhosts/elsewhere", {}).status_code == 201
    assert put(server, "queues/elsewhere/hidden", {}).status_code == 201
    assert put(server, "queues/%2F/seen", {}).status_code == 201
    yield server
    server.stop()


def put(live: Served, path: str, body: dict[str, Any], user: str | None = None) -> httpx.Response:
    return ask(live, user, "PUT", path, json=body)


def ask(live: Served, user: str | None, method: str, path: str, **options: Any) -> httpx.Response:
    """Requests as that user, or as guest."""
    return live.request(method, f"/api/{path}", auth=(user, PASSWORD) if user else ("guest", "guest"), **options)


def names(answer: httpx.Response) -> set[str]:
    assert answer.status_code == 200, answer.text
    return {one["name"] for one in answer.json()}


# Representations and status codes


def test_a_user_is_created_changed_described_and_deleted(live: Served) -> None:
    assert put(live, "users/bill", {"password": "first", "tags": "management, policymaker"}).status_code == 201
    shape = ask(live, None, "GET", "users/bill").json()
    assert shape.keys() == {"name", "password_hash", "hashing_algorithm", "tags", "limits"}
    assert (shape["name"], shape["tags"]) == ("bill", ["management", "policymaker"])
    salted = base64.b64decode(shape["password_hash"])
    assert salted[4:] == hashlib.sha256(salted[:4] + b"first").digest(), "RabbitMQ's own form"
    assert live.get("/api/whoami", auth=("bill", "first")).json() == {
        "name": "bill",
        "tags": ["management", "policymaker"],
        "is_internal_user": True,
        "is_logged_in": True,
    }
    assert put(live, "users/bill", {"tags": ["management"]}).status_code == 204, "the password stays"
    assert live.get("/api/whoami", auth=("bill", "first")).json()["tags"] == ["management"]
    hashed = ask(live, None, "GET", "auth/hash_password/sec%2Fond").json()["ok"]
    assert put(live, "users/bill", {"password_hash": hashed, "tags": ["management"]}).status_code == 204
    assert live.get("/api/whoami", auth=("bill", "first")).status_code == 401
    assert live.get("/api/whoami", auth=("bill", "sec/ond")).status_code == 200
    assert put(live, "users/bill", {"password_hash": "", "tags": ""}).status_code == 204
    assert live.get("/api/whoami", auth=("bill", "")).status_code == 401, "an empty hash disables the login"
    assert ask(live, None, "DELETE", "users/bill").status_code == 204
    assert ask(live, None, "DELETE", "users/bill").status_code == 404
    assert ask(live, None, "GET", "users/bill").json()["error"] == "Object Not Found"


@pytest.mark.parametrize(
    "body",
    [
        {"password": "x"},
        {"password": "", "tags": ""},
        {"password": 5, "tags": ""},
        {"password": "x", "password_hash": "", "tags": ""},
        {"password_hash": "not base64!", "tags": ""},
        {"password_hash": "AAAA", "tags": ""},
        {"password_hash": "", "hashing_algorithm": "md5", "tags": ""},
        {"password": "x", "tags": [1]},
        {"password": "x", "tags": {"a": 1}},
    ],
)
def test_an_invalid_user_is_refused(live: Served, body: dict[str, Any]) -> None:
    answer = put(live, "users/nonsense", body)
    assert answer.status_code == 400 and answer.json()["error"] == "bad_request", answer.text
    assert "nonsense" not in names(ask(live, None, "GET", "users"))


def test_users_without_permissions_are_listed_and_deleted_in_bulk(live: Served) -> None:
    for name in ("idle-1", "idle-2"):
        put(live, f"users/{name}", {"password": "x", "tags": ""})
    assert {"idle-1", "idle-2"} <= names(ask(live, None, "GET", "users/without-permissions"))
    body = {"users": ["idle-1", "idle-2", "never-was"]}
    assert ask(live, None, "POST", "users/bulk-delete", json=body).status_code == 204
    assert not {"idle-1", "idle-2"} & names(ask(live, None, "GET", "users"))
    assert ask(live, None, "POST", "users/bulk-delete", json={"users": "idle-1"}).status_code == 400


def test_permissions_are_set_changed_listed_and_cleared(live: Served) -> None:
    put(live, "users/perm", {"password": "x", "tags": ""})
    rule = {"configure": "^a", "write": "", "read": ".*"}
    assert put(live, "permissions/%2F/perm", rule).status_code == 201
    assert put(live, "permissions/%2F/perm", {**rule, "write": "^b"}).status_code == 204
    wanted = {"user": "perm", "vhost": "/", "configure": "^a", "write": "^b", "read": ".*"}
    assert ask(live, None, "GET", "permissions/%2F/perm").json() == wanted
    for path in ("permissions", "users/perm/permissions", "vhosts/%2F/permissions"):
        assert wanted in ask(live, None, "GET", path).json(), path
    assert put(live, "permissions/%2F/perm", {"configure": "", "write": ""}).status_code == 400, "one is missing"
    refused = put(live, "permissions/%2F/perm", {**rule, "read": "(a"})
    assert refused.status_code == 400 and "(a" in refused.json()["reason"]
    assert put(live, "permissions/%2F/nobody", rule).status_code == 400
    assert put(live, "permissions/nowhere/perm", rule).status_code == 404
    assert ask(live, None, "DELETE", "permissions/%2F/perm").status_code == 204
    assert ask(live, None, "DELETE", "permissions/%2F/perm").status_code == 404
    assert ask(live, None, "GET", "permissions/%2F/perm").status_code == 404


def test_topic_permissions_are_set_changed_listed_and_cleared(live: Served) -> None:
    put(live, "users/topical", {"password": "x", "tags": ""})
    where = "topic-permissions/%2F/topical"
    assert put(live, where, {"exchange": "amq.topic", "write": "^a", "read": "^b"}).status_code == 201
    assert put(live, where, {"exchange": "amq.topic", "write": "^a", "read": "^c"}).status_code == 204
    assert put(live, where, {"exchange": "second", "write": "", "read": ""}).status_code == 201
    wanted = {"user": "topical", "vhost": "/", "exchange": "amq.topic", "write": "^a", "read": "^c"}
    for path in (where, "topic-permissions", "users/topical/topic-permissions", "vhosts/%2F/topic-permissions"):
        assert wanted in ask(live, None, "GET", path).json(), path
    assert ask(live, None, "DELETE", f"{where}?exchange=second").status_code == 204
    assert ask(live, None, "GET", where).json() == [wanted]
    assert ask(live, None, "DELETE", where).status_code == 204
    assert ask(live, None, "GET", where).status_code == 404
    assert put(live, where, {"write": "", "read": ""}).status_code == 400


def test_user_limits_are_set_listed_cleared_and_enforced(live: Served) -> None:
    put(live, "users/bounded", {"password": PASSWORD, "tags": ""})
    put(live, "permissions/%2F/bounded", ALL)
    assert put(live, "user-limits/bounded/max-connections", {"value": 0}).status_code == 204
    assert put(live, "user-limits/bounded/max-channels", {"value": "5"}).status_code == 204
    wanted = {"user": "bounded", "value": {"max-connections": 0, "max-channels": 5}}
    assert wanted in ask(live, None, "GET", "user-limits").json()
    assert ask(live, None, "GET", "user-limits/bounded").json() == [wanted]
    credentials = pika.PlainCredentials("bounded", PASSWORD)
    with pytest.raises(pika.exceptions.AMQPError):
        patient_connection(live.amqp_port, credentials=credentials)
    assert ask(live, None, "DELETE", "user-limits/bounded/max-connections").status_code == 204
    patient_connection(live.amqp_port, credentials=credentials).close()
    assert ask(live, None, "DELETE", "user-limits/bounded/max-connections").status_code == 404
    assert put(live, "user-limits/bounded/max-fun", {"value": 1}).status_code == 400
    assert put(live, "user-limits/bounded/max-channels", {"value": "many"}).status_code == 400


def test_vhost_limits_are_set_listed_cleared_and_enforced(live: Served) -> None:
    put(live, "vhosts/bounded", {})
    assert put(live, "vhost-limits/bounded/max-connections", {"value": 0}).status_code == 204
    assert put(live, "vhost-limits/bounded/max-queues", {"value": "1"}).status_code == 204
    wanted = {"vhost": "bounded", "value": {"max-connections": 0, "max-queues": 1}}
    assert wanted in ask(live, None, "GET", "vhost-limits").json()
    assert ask(live, None, "GET", "vhost-limits/bounded").json() == [wanted]
    assert ask(live, "management", "GET", "vhost-limits").json() == []
    assert ask(live, "management", "GET", "vhost-limits/bounded").status_code == 403
    with pytest.raises(pika.exceptions.AMQPError):
        patient_connection(live.amqp_port, virtual_host="bounded")
    assert put(live, "queues/bounded/one", {}).status_code == 201
    refused = put(live, "queues/bounded/two", {})
    assert (refused.status_code, refused.json()["error"]) == (400, "bad_request")
    assert refused.json()["reason"] == "cannot declare queue 'two': queue limit in vhost 'bounded' (1) is reached"
    for _ in range(2):
        assert ask(live, None, "DELETE", "vhost-limits/bounded/max-queues").status_code == 204
    assert put(live, "queues/bounded/two", {}).status_code == 201
    for path, body in (("max-fun", {"value": 1}), ("max-queues", {"value": "many"}), ("max-queues", {})):
        assert put(live, f"vhost-limits/bounded/{path}", body).status_code == 400
    assert put(live, "vhost-limits/never-was/max-queues", {"value": 1}).status_code == 404
    assert ask(live, None, "DELETE", "vhosts/bounded").status_code == 204


def test_a_deleted_user_loses_its_connections(live: Served) -> None:
    put(live, "users/leaver", {"password": PASSWORD, "tags": ""})
    put(live, "permissions/%2F/leaver", ALL)
    credentials = pika.PlainCredentials("leaver", PASSWORD)
    connection = patient_connection(live.amqp_port, credentials=credentials)
    shown = ask(live, None, "GET", "connections").json()
    assert "leaver" in {one["user"] for one in shown}, "the list of connections shows the user"
    assert ask(live, None, "DELETE", "users/leaver").status_code == 204
    with pytest.raises(pika.exceptions.AMQPError):
        connection.process_data_events(60)


# Tags

# The lowest tag for paths with this prefix; the first match counts. None: no authentication.
LEAST: tuple[tuple[str, str, str | None], ...] = (
    ("*", "/auth", None),
    ("*", "/version", None),
    ("PUT", "/cluster-name", "administrator"),
    ("PUT", "/parameters", "administrator"),
    ("DELETE", "/parameters", "administrator"),
    ("DELETE", "/connections/username", "administrator"),  # of another user
    ("*", "/users", "administrator"),
    ("*", "/permissions", "administrator"),
    ("*", "/topic-permissions", "administrator"),
    ("GET", "/vhosts/{vhost}/permissions", "administrator"),
    ("GET", "/vhosts/{vhost}/topic-permissions", "administrator"),
    ("GET", "/vhosts", "management"),
    ("*", "/vhosts", "administrator"),
    ("*", "/definitions", "administrator"),
    ("*", "/all-configuration", "administrator"),
    ("*", "/global-parameters", "administrator"),
    ("*", "/user-limits", "administrator"),
    ("PUT", "/vhost-limits", "administrator"),
    ("DELETE", "/vhost-limits", "administrator"),
    ("*", "/feature-flags", "administrator"),
    ("*", "/deprecated-features", "administrator"),
    ("*", "/rebalance", "administrator"),
    ("*", "/reset", "administrator"),
    ("POST", "/queues/{vhost}/{name}/actions", "administrator"),
    ("*", "/nodes", "monitoring"),
    ("*", "/federation-links", "monitoring"),
    ("*", "/shovels", "monitoring"),
    ("*", "/headrace/settings", "monitoring"),
    ("*", "/parameters", "policymaker"),
    ("GET", "/policies", "policymaker"),
    ("*", "/policies", "policymaker"),
    ("GET", "/operator-policies", "policymaker"),
    ("*", "/operator-policies", "administrator"),
    ("*", "/", "management"),
)
HAVE = {
    "management": {"management", "policymaker", "monitoring", "administrator"},
    "policymaker": {"policymaker", "administrator"},
    "monitoring": {"monitoring", "administrator"},
    "administrator": {"administrator"},
}
NAMES = {"{vhost}": "%2F", "{kind}": "q", "{properties_key}": "k"}


def least_tag(method: str, path: str) -> str | None:
    if path.startswith("/auth/"):
        return "management"
    return next(tag for verb, start, tag in LEAST if verb in ("*", method) and path.startswith(start))


def address(path: str) -> str:
    parts = [NAMES.get(part, "never-was" if part.startswith("{") else part) for part in path.split("/")]
    return "/".join(parts).lstrip("/")


@pytest.mark.parametrize(("method", "path"), [(method, path) for method, path, *_ in ROUTES])
def test_every_route_requires_its_tag(live: Served, method: str, path: str) -> None:
    least = least_tag(method, path)
    assert (least is None) == (next(r[3] for r in ROUTES if r[:2] == (method, path)) is public)
    allowed = HAVE[least] if least else {*HAVE["management"], "other"}
    verb = "HEAD" if path.endswith("/stream") else method
    for user in ("other", "management", "policymaker", "monitoring", "administrator"):
        answer = ask(live, user, verb, address(path), json={} if verb in ("PUT", "POST") else None)
        assert (answer.status_code == 403) == (user not in allowed), (user, answer.status_code, answer.text)
        assert answer.status_code not in (401, 500), (user, answer.text)
    stranger = live.request(verb, f"/api/{address(path)}", headers={"x-forwarded-for": "203.0.113.7"})
    assert stranger.status_code == (401 if least else 200)
    if least:
        assert stranger.headers["www-authenticate"].startswith("Basic ")


def test_lists_show_only_the_virtual_hosts_of_the_user(live: Served) -> None:
    for user, sees_all in (("management", False), ("policymaker", False), ("monitoring", True)):
        assert ("elsewhere" in names(ask(live, user, "GET", "vhosts"))) is sees_all
        for path in ("queues", "headrace/streams"):
            found = names(ask(live, user, "GET", path))
            assert "seen" in found and ("hidden" in found) is sees_all, (user, path)
        for path in ("exchanges", "bindings"):
            vhosts = {one["vhost"] for one in ask(live, user, "GET", path).json()}
            assert ("elsewhere" in vhosts) is sees_all, (user, path)
        for path in ("queues/elsewhere", "queues/elsewhere/hidden", "headrace/streams/elsewhere/hidden"):
            assert ask(live, user, "GET", path).status_code == (200 if sees_all else 403), (user, path)
    assert put(live, "queues/elsewhere/made", {}, "administrator").status_code == 403, "seeing is not doing"
    assert ask(live, "monitoring", "GET", "headrace/streams/elsewhere/hidden/messages").status_code == 403
    policy = {"pattern": "^hidden$", "definition": {"max-length": 5}}
    assert put(live, "policies/elsewhere/p", policy).status_code == 201
    assert ask(live, "policymaker", "GET", "policies").json() == []
    assert names(ask(live, "administrator", "GET", "policies")) == {"p"}
    assert put(live, "policies/elsewhere/q", policy, "policymaker").status_code == 403


def test_the_creator_of_a_virtual_host_gets_permissions(live: Served) -> None:
    assert put(live, "vhosts/new-home", {}, "administrator").status_code == 201
    assert put(live, "queues/new-home/q", {}, "administrator").status_code == 201
    assert ask(live, "administrator", "DELETE", "vhosts/new-home").status_code == 204
    assert "new-home" not in {one["vhost"] for one in ask(live, None, "GET", "permissions").json()}


def test_users_see_their_own_connections_and_monitors_see_all(live: Served) -> None:
    connection = patient_connection(live.amqp_port, credentials=pika.PlainCredentials("other", PASSWORD))
    channel = connection.channel()
    channel.basic_consume("seen", lambda *_: None, consumer_tag="others")
    try:
        # Connections of other tests may still be ending.
        eventually(lambda: len(ask(live, "monitoring", "GET", "connections").json()) == 1)
        for path in ("connections", "channels", "consumers"):
            assert ask(live, "management", "GET", path).json() == [], path
            assert len(ask(live, "monitoring", "GET", path).json()) == 1, path
        (name,) = names(ask(live, "monitoring", "GET", "connections"))
        where = f"connections/{name.replace(' ', '%20').replace('>', '%3E')}"
        assert ask(live, "management", "GET", where).status_code == 404
        assert ask(live, "management", "DELETE", where).status_code == 404
        assert ask(live, "monitoring", "GET", where).json()["user"] == "other"
        assert ask(live, "monitoring", "DELETE", where).status_code == 403
        assert ask(live, "administrator", "DELETE", where).status_code == 204
    finally:
        if connection.is_open:
            try:
                connection.process_data_events(60)
            except pika.exceptions.AMQPError:
                pass


# Permissions: each request needs exactly these.

BODY = {"routing_key": "a.b", "payload": "x", "payload_encoding": "string", "properties": {}}
BIND = "bindings/%2F/e/acting-ex/q/acting-q"
ACTS: tuple[tuple[str, str, dict[str, Any] | None, dict[str, str]], ...] = (
    ("PUT", "queues/%2F/acting-new", {}, {"configure": "^acting-new$"}),
    (
        "PUT",
        "queues/%2F/acting-dead",
        {"arguments": {"x-dead-letter-exchange": "acting-ex"}},
        {"configure": "^acting-dead$", "read": "^acting-dead$", "write": "^acting-ex$"},
    ),
    ("DELETE", "queues/%2F/acting-old", None, {"configure": "^acting-old$"}),
    ("PUT", "exchanges/%2F/acting-made", {"type": "fanout"}, {"configure": "^acting-made$"}),
    (
        "PUT",
        "exchanges/%2F/acting-alt",
        {"type": "fanout", "arguments": {"alternate-exchange": "acting-ex"}},
        {"configure": "^acting-alt$", "read": "^acting-alt$", "write": "^acting-ex$"},
    ),
    ("DELETE", "exchanges/%2F/acting-past", None, {"configure": "^acting-past$"}),
    ("POST", "exchanges/%2F/acting-ex/publish", BODY, {"write": "^acting-ex$"}),
    ("POST", "exchanges/%2F/amq.default/publish", BODY, {"write": "^amq\\.default$"}),
    ("POST", "queues/%2F/acting-q/get", {"count": 1}, {"read": "^acting-q$"}),
    ("DELETE", "queues/%2F/acting-q/contents", None, {"read": "^acting-q$"}),
    ("GET", "headrace/streams/%2F/acting-q/messages", None, {"read": "^acting-q$"}),
    ("GET", "headrace/dead-letters/%2F/acting-q/messages", None, {"read": "^acting-q$"}),
    (
        "POST",
        "headrace/dead-letters/%2F/acting-q/replay",
        {},
        {"read": "^acting-q$", "write": "^amq\\.default$"},
    ),
    ("POST", BIND, {"routing_key": "a.#"}, {"read": "^acting-ex$", "write": "^acting-q$"}),
    ("DELETE", f"{BIND}/b.%23", None, {"read": "^acting-ex$", "write": "^acting-q$"}),
    (
        "GET",
        "aliveness-test/%2F",
        None,
        {"configure": "^aliveness-test$", "read": "^aliveness-test$", "write": "^amq\\.default$"},
    ),
    (
        "POST",
        "headrace/readers/cursor/acting-c/reset",
        {"topic": "acting-t", "to": "latest"},
        {"read": "^acting-t$"},
    ),
    ("DELETE", "headrace/readers/cursor/acting-d", None, {"read": "^acting-t$"}),
    (
        "POST",
        "headrace/readers/group/acting-g/reset",
        {"topic": "acting-t", "to": "latest"},
        {"read": "^acting-[gt]$"},
    ),
    ("DELETE", "headrace/readers/group/acting-h", None, {"read": "^acting-[ht]$"}),
)


@pytest.fixture(scope="module")
def acting(live: Served) -> Served:
    put(live, "users/actor", {"password": PASSWORD, "tags": "management"})
    put(live, "queues/%2F/acting-q", {})
    put(live, "exchanges/%2F/acting-ex", {"type": "topic"})
    # Objects that tests below delete, so that tests are independent.
    put(live, "queues/%2F/acting-old", {})
    put(live, "exchanges/%2F/acting-past", {"type": "fanout"})
    ask(live, None, "POST", BIND, json={"routing_key": "b.#"})
    live.client.auth = ("guest", "guest")
    live.create("acting-t")
    body = {"topic": "acting-t", "partitions": [{"partition": 0, "offset": 0}]}
    for cursor in ("acting-c", "acting-d"):
        assert live.request("PUT", f"/cursors/{cursor}", json=body).status_code == 200
    for group in ("acting-g", "acting-h"):
        live.call(groups._commit(live.listener.context, group, live.broker.streams.get("acting-t"), {0: 0}))
    live.client.auth = httpx.Auth()  # none
    return live


@pytest.mark.parametrize(("method", "path", "body", "needs"), ACTS, ids=[f"{a[0]} {a[1]}" for a in ACTS])
def test_operations_in_a_virtual_host_need_the_same_permissions_as_in_amqp(
    acting: Served, method: str, path: str, body: dict[str, Any] | None, needs: dict[str, str]
) -> None:
    for missing in needs:
        put(acting, "permissions/%2F/actor", {**ALL, missing: "^something-else$"})
        answer = ask(acting, "actor", method, path, json=body)
        assert answer.status_code == 403, (missing, answer.text)
        assert f"no {missing} permission" in answer.json()["reason"]
    put(acting, "permissions/%2F/actor", {**NONE, **needs})
    answer = ask(acting, "actor", method, path, json=body)
    assert answer.status_code < 300, answer.text


@pytest.mark.parametrize(("method", "address"), [("POST", "acting-g/reset"), ("DELETE", "acting-h")])
def test_resetting_a_group_needs_permission_for_its_name(acting: Served, method: str, address: str) -> None:
    """As at the Kafka listener, the offsets of a group need read permission for the group."""
    put(acting, "permissions/%2F/actor", {**ALL, "read": "^acting-t$"})
    body = {"topic": "acting-t", "to": "latest", "dry_run": False}
    answer = ask(acting, "actor", method, f"headrace/readers/group/{address}", json=body)
    assert answer.status_code == 403 and "no read permission for 'acting-" in answer.json()["reason"]


def test_dead_letters_and_replays_are_visible_per_virtual_host(acting: Served) -> None:
    letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    put(acting, "queues/elsewhere/dead", {})
    put(acting, "queues/elsewhere/mortal", {"arguments": letters})
    for number in range(30):  # one per second, so that the replay is seen running
        body = {**BODY, "routing_key": "mortal", "payload": str(number)}
        ask(acting, None, "POST", "exchanges/elsewhere/amq.default/publish", json=body)
    reject = {"count": 30, "ackmode": "reject_requeue_false"}
    ask(acting, None, "POST", "queues/elsewhere/mortal/get", json=reject)
    eventually(lambda: ask(acting, None, "GET", "queues/elsewhere/dead").json()["messages"] == 30)
    begun = {"dry_run": False, "rate": 1}
    replay = ask(acting, None, "POST", "headrace/dead-letters/elsewhere/dead/replay", json=begun).json()["id"]
    for path in ("headrace/dead-letters", "headrace/replays"):
        vhosts = {one["vhost"] for one in ask(acting, "actor", "GET", path).json()}
        assert "elsewhere" not in vhosts, path
        assert "elsewhere" in {one["vhost"] for one in ask(acting, "monitoring", "GET", path).json()}, path
    assert ask(acting, "actor", "GET", f"headrace/replays/{replay}").status_code == 403
    assert ask(acting, "monitoring", "GET", f"headrace/replays/{replay}").status_code == 200
    assert ask(acting, "monitoring", "DELETE", f"headrace/replays/{replay}").status_code == 403
    assert ask(acting, None, "DELETE", f"headrace/replays/{replay}").status_code == 200


def test_topic_permissions_apply_to_routing_keys(acting: Served) -> None:
    put(acting, "permissions/%2F/actor", ALL)
    put(acting, "topic-permissions/%2F/actor", {"exchange": "acting-ex", "write": "^eu\\.", "read": "^eu\\."})
    for key, status in (("eu.a", 200), ("us.a", 403)):
        body = {**BODY, "routing_key": key}
        assert ask(acting, "actor", "POST", "exchanges/%2F/acting-ex/publish", json=body).status_code == status
    for key, status in (("eu.#", 201), ("#", 403)):
        assert ask(acting, "actor", "POST", BIND, json={"routing_key": key}).status_code == status
    ask(acting, None, "POST", BIND, json={"routing_key": "us.#"})
    assert ask(acting, "actor", "DELETE", f"{BIND}/us.%23").status_code == 403
    assert ask(acting, None, "DELETE", "topic-permissions/%2F/actor").status_code == 204


def test_the_user_id_of_a_message_must_be_the_sender(acting: Served) -> None:
    put(acting, "permissions/%2F/actor", ALL)
    for name, status in (("actor", 200), ("guest", 400)):
        body = {**BODY, "properties": {"user_id": name}}
        answer = ask(acting, "actor", "POST", "exchanges/%2F/acting-ex/publish", json=body)
        assert answer.status_code == status, answer.text


def test_following_a_queue_ends_when_read_permission_is_revoked(acting: Served) -> None:
    put(acting, "permissions/%2F/actor", ALL)
    path = "/api/headrace/streams/%2F/acting-q/stream"
    with acting.client.stream("GET", path, auth=("actor", PASSWORD)) as answer:
        lines = answer.iter_lines()
        assert next(lines), "it has begun"
        put(acting, "permissions/%2F/actor", {**ALL, "read": ""})
        ask(acting, None, "POST", "exchanges/%2F/amq.default/publish", json={**BODY, "routing_key": "acting-q"})
        rest = "\n".join(lines)
        assert "no read permission" in rest and "payload" not in rest and '"offset"' not in rest


def test_the_live_numbers_end_when_the_user_is_deleted(live: Served) -> None:
    put(live, "users/looker", {"password": PASSWORD, "tags": "management"})
    path = "/api/headrace/overview/stream"
    with live.client.stream("GET", path, auth=("looker", PASSWORD)) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        assert ask(live, None, "DELETE", "users/looker").status_code == 204
        assert any("Login failed" in line for line in lines), "and then it ends"


def test_the_overview_counts_only_the_virtual_hosts_of_its_user(live: Served) -> None:
    put(live, "vhosts/counted-home", {})
    put(live, "users/counter", {"password": PASSWORD, "tags": "management"})
    put(live, "permissions/counted-home/counter", ALL)
    for vhost, messages in (("%2F", 5), ("counted-home", 2)):
        put(live, f"queues/{vhost}/counted", {})
        for _ in range(messages):
            body = {**BODY, "routing_key": "counted"}
            ask(live, None, "POST", f"exchanges/{vhost}/amq.default/publish", json=body)
    seen = ask(live, "counter", "GET", "overview").json()
    assert seen["queue_totals"]["messages_ready"] == 2 and seen["message_stats"]["publish"] == 2
    everybodys = live.get("/api/headrace/overview").json()
    ours = ask(live, "counter", "GET", "headrace/overview").json()
    assert (ours["ready"], ours["counts"]["queues"], ours["counts"]["streams"], ours["connections"]) == (2, 1, 1, 0)
    assert everybodys["memory_bytes"] and everybodys["data_dir"]
    assert ours["memory_bytes"] is None and "data_dir" not in ours and ours["history"]["ready"] == []
    with live.events("/api/headrace/overview/stream", auth=("counter", PASSWORD)) as events:
        _, _, first = next(events)
        assert first["ready"] == 2 and first["last"]["ready"] == [2] and first["listeners"] == {}
        put(live, "users/counter", {"tags": "monitoring"})
        assert any(later["ready"] >= 7 for _, _, later in events), "as its tags are now"
    assert seen["object_totals"]["queues"] == 1
