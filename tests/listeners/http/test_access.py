"""Authentication and authorization at the HTTP listener (reliability.md §7.2: 30, 31, 33, 36)."""

import base64
import hashlib
import logging
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.broker.access.permissions import EVERYTHING, Permission
from headrace.listeners.http.server.app import ROUTES
from headrace.listeners.http.server.authentication import FAILURES_FREE, Forbidden
from headrace.listeners.http.server.authorization import public
from headrace.record import codec
from tests.listeners.amqp.running import eventually
from tests.listeners.http.live import Live, code_of, parse_events
from tests.listeners.http.test_gate import PASSWORD, scope_of

OPEN_ROUTES = {"/health", "/health/live", "/health/ready", "/metrics"}
NAMES = {
    "{topic}": "orders",
    "{queue}": "orders",
    "{partition}": "0",
    "{segment}": "0",
    "{cursor}": "c",
    "{staged}": "s",
    "{writer}": "w",
    "{batch}": "0",
    "{pipeline}": "p",
    "{standby}": "x",
}


def address(path: str) -> str:
    for name, value in NAMES.items():
        path = path.replace(name, value)
    return path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with users and without guest: every request needs credentials."""
    live = Live(tmp_path_factory.mktemp("data"))
    users = live.broker.users

    async def make() -> None:
        await users.put_user("root", password=PASSWORD, tags=["administrator"])
        await users.set_permission("/", "root", EVERYTHING)
        for name, configure, write, read in (
            ("maker", ".*", "", ""),
            ("writer", "", "^orders$", ""),
            ("reader", "", "", "^orders$"),
            ("guest-of-none", "", "", ""),
        ):
            await users.put_user(name, password=PASSWORD)
            if name != "guest-of-none":
                await users.set_permission("/", name, Permission(configure=configure, write=write, read=read))
        await users.put_user("watcher", password=PASSWORD, tags=["monitoring"])
        await users.remove_user("guest")

    live.call(make())
    live.client.auth = ("root", PASSWORD)
    live.create("orders")
    live.client.auth = httpx.Auth()  # none
    yield live
    live.stop()


def ask(live: Live, method: str, path: str, user: str | None = None, **options: Any) -> httpx.Response:
    return live.request(method, path, auth=(user, PASSWORD) if user else None, **options)


def test_authentication_is_off_while_guest_is_the_only_user(tmp_path: Path) -> None:
    live = Live(tmp_path)
    try:
        passed_on = {"x-forwarded-for": "203.0.113.7"}
        assert live.get("/topics").status_code == 200
        assert live.get("/topics", headers=passed_on).status_code == 403, "protected mode"
        assert live.get("/topics", auth=("nobody", "x")).status_code == 200, (
            "without authentication, credentials are not checked"
        )
        rebound = {"host": "rebound.example.com"}
        assert live.get("/topics", headers=rebound).status_code == 403, "a page of another site, perhaps"
        assert live.get("/api/overview", headers=rebound, auth=("guest", "guest")).status_code == 401
        assert live.get("/health", headers=rebound).status_code == 200
        assert live.get("/api/overview").json()["product_name"] == "Headrace", "from this machine"
        assert live.get("/api/overview", headers=passed_on).status_code == 401
        assert live.get("/api/overview", headers=passed_on, auth=("guest", "guest")).status_code == 401
        assert live.get("/api/overview", auth=("guest", "wrong")).status_code == 401

        live.call(live.broker.users.put_user("bill", password=PASSWORD))
        assert live.get("/topics").status_code == 200, "guest, from this machine"
        assert live.get("/topics", headers=passed_on).status_code == 401
        assert live.get("/topics", auth=("nobody", "x")).status_code == 401
        live.call(live.broker.users.put_user("guest", password=PASSWORD))
        assert live.get("/topics").status_code == 401, "guest has a password of its own now"
        assert live.get("/topics", auth=("guest", PASSWORD)).status_code == 200
        assert live.get("/topics", auth=("guest", PASSWORD), headers=passed_on).status_code == 401
    finally:
        live.stop()


@pytest.mark.parametrize(("method", "path"), [(method, path) for method, path, *_ in ROUTES])
def test_every_route_requires_authentication(guarded: Live, method: str, path: str) -> None:
    for credentials in (None, ("root", "wrong"), ("nobody", PASSWORD), ("root", "")):
        forget_failures(guarded)
        answer = guarded.request(method, address(path), auth=credentials)
        if path in OPEN_ROUTES:
            assert answer.status_code == 200, answer.text
        else:
            assert (answer.status_code, code_of(answer)) == (401, "not_authorised"), credentials
            assert answer.headers["www-authenticate"].startswith("Basic ")


def test_only_these_routes_are_public(guarded: Live) -> None:
    assert {path for _, path, _, need in ROUTES if need is public} == OPEN_ROUTES
    for path in ("/", "/ui/app.js", "/ui/style.css"):
        assert guarded.get(path).status_code == 200, path
    for path in ("/metrics", "/health"):
        assert PASSWORD not in guarded.get(path).text


def forget_failures(live: Live) -> None:
    live.listener.context.gate._failures._sources.clear()


# The permission each route needs; None: any permission in the vhost. The body makes the request valid.
PARTS = {"parts": [{"staged": "s", "topic": "orders", "partition": 0, "position": 0, "length": 1}]}
POSITION = {"topic": "orders", "partitions": [{"partition": 0, "offset": 0}]}
RANGES = {"ranges": [{"topic": "orders", "partition": 0, "start": 0, "end": 9}], "for_ms": 1000}
NEEDED: dict[tuple[str, str], tuple[str, Any]] = {
    ("POST", "/topics"): ("maker", {"name": "made"}),
    ("PATCH", "/topics/{topic}"): ("maker", {}),
    ("DELETE", "/topics/{topic}"): ("maker", None),
    ("POST", "/topics/{topic}/messages"): ("writer", {"value": "x"}),
    ("GET", "/topics/{topic}/messages"): ("reader", None),
    ("GET", "/topics/{topic}/keys"): ("reader", None),
    ("GET", "/topics/{topic}/keys/{key}"): ("reader", None),
    ("POST", "/queues/{queue}/receive"): ("reader", {}),
    ("POST", "/queues/{queue}/ack"): ("reader", {"receipts": ["x"]}),
    ("POST", "/queues/{queue}/nack"): ("reader", {"receipts": ["x"]}),
    ("POST", "/queues/{queue}/extend"): ("reader", {"receipts": ["x"], "visibility_timeout_ms": 1}),
    ("GET", "/topics/{topic}/stream"): ("reader", None),
    ("GET", "/topics/{topic}/log"): ("reader", None),
    ("GET", "/topics/{topic}/partitions/{partition}/batches"): ("reader", None),
    ("PUT", "/cursors/{cursor}"): ("reader", POSITION),
    ("DELETE", "/cursors/{cursor}"): ("reader", None),
    ("POST", "/leases"): ("reader", RANGES),
    ("POST", "/topics/{topic}/compact"): ("maker", None),
    ("DELETE", "/topics/{topic}/partitions/{partition}/records"): ("maker", None),
    ("POST", "/topics/{topic}/partitions/{partition}/segments/{segment}"): ("root", {}),  # needs configure and write
    ("POST", "/topics/{topic}/partitions/{partition}/segments/{segment}/archive"): ("maker", {}),
    ("PUT", "/staging/{staged}"): ("writer", None),
    ("DELETE", "/staging/{staged}"): ("writer", None),
    ("PUT", "/sinks/{writer}/batches/{batch}"): ("writer", PARTS),
    ("PUT", "/pipelines/{pipeline}"): ("maker", {"state": "running", "details": {}}),
    ("DELETE", "/pipelines/{pipeline}"): ("maker", None),
    ("POST", "/pipelines/{pipeline}/stop"): ("maker", None),
    ("GET", "/metrics/detailed"): ("watcher", None),
    ("GET", "/standby"): ("watcher", None),
    ("POST", "/standby/stream"): ("root", {}),
    ("PUT", "/standby/{standby}"): ("root", {}),
}
FOR_ALL_USERS = {"/status", "/openapi.json"}
RIGHTS = ("maker", "writer", "reader")


@pytest.mark.parametrize(("method", "path"), [(m, p) for m, p, *_ in ROUTES if p not in OPEN_ROUTES])
def test_every_route_checks_its_permission_and_no_other(guarded: Live, method: str, path: str) -> None:
    needed, body = NEEDED.get((method, path), (None, None))
    # A stream does not end; HEAD has the same status.
    verb = "HEAD" if path.endswith("/stream") and method == "GET" else method
    options = {} if body is None else {"json": body}
    if (method, path) == ("DELETE", "/cursors/{cursor}"):
        assert ask(guarded, "PUT", "/cursors/c", "reader", json=POSITION).status_code == 200
    refused = {
        user
        for user in (*RIGHTS, "guest-of-none", "watcher")
        if user != needed and ask(guarded, verb, address(path), user, **options).status_code == 403
    }
    if needed == "watcher":
        assert refused == {*RIGHTS, "guest-of-none"}
    elif needed is not None:
        assert refused == {*RIGHTS, "guest-of-none", "watcher"} - {needed}
    elif path in FOR_ALL_USERS:
        assert refused == set()
    else:
        assert refused == {"guest-of-none"} | ({"watcher"} if method != "GET" else set())
    if needed is not None:
        # Last, since the requests before need the deleted objects.
        answer = ask(guarded, verb, address(path), needed, **options)
        assert answer.status_code not in (401, 403, 500), answer.text
    ask(guarded, "POST", "/topics", "root", json={"name": "orders"})


def test_a_refusal_names_the_user_and_the_missing_permission(guarded: Live) -> None:
    answer = ask(guarded, "POST", "/topics/orders/messages", "reader", json={"value": "x"})
    assert (answer.status_code, code_of(answer)) == (403, "forbidden")
    assert answer.json()["detail"] == "user 'reader' has no write permission for 'orders' in virtual host '/'"


def test_only_users_who_may_read_a_topic_may_lease_its_segments(guarded: Live) -> None:
    log = guarded.broker.streams.get("orders").partitions[0].log.id
    for slices, allowed in (([log], {"reader", "root"}), ([1 << 40], {*RIGHTS, "root"}), ([], {*RIGHTS, "root"})):
        named = [{"log": number, "segment": 0, "generation": 0} for number in slices]
        body = {"slices": named, "for_ms": 1000}
        for user in (*RIGHTS, "root", "watcher"):
            expected = 200 if user in allowed else 403
            assert ask(guarded, "POST", "/leases", user, json=body).status_code == expected, (user, slices)


def test_publishing_to_a_new_topic_needs_configure_permission(guarded: Live) -> None:
    live, users = guarded, guarded.broker.users
    live.call(users.put_user("eager", password=PASSWORD))
    live.call(users.set_permission("/", "eager", Permission(configure="^mine", write=".*", read="")))
    assert ask(live, "POST", "/topics/other/messages", "eager", json={"value": "x"}).status_code == 403
    assert "other" not in {topic["name"] for topic in ask(live, "GET", "/topics", "root").json()["topics"]}
    assert ask(live, "POST", "/topics/mine/messages", "eager", json={"value": "x"}).status_code == 200


def commit(live: Live, user: str, writer: str, number: int, *topics: str) -> httpx.Response:
    """One record per topic; without topics the batch is empty."""
    data = bytes(codec.build([(None, b"x", (), 1)]))
    parts = []
    for topic in topics:
        name = uuid.uuid4().hex
        assert ask(live, "PUT", f"/staging/{name}", user, content=data).status_code == 201
        parts.append({"staged": name, "topic": topic, "partition": 0, "position": 0, "length": len(data)})
    return ask(live, "PUT", f"/sinks/{writer}/batches/{number}", user, json={"parts": parts})


def test_only_its_owner_and_administrators_commit_for_a_writer(guarded: Live) -> None:
    """A batch number far ahead would make all later batches of the real writer duplicates, which are not stored."""
    live, users = guarded, guarded.broker.users
    live.call(users.put_user("feeder", password=PASSWORD))
    live.call(users.set_permission("/", "feeder", Permission(configure="", write="^orders$", read="")))
    assert commit(live, "feeder", "job", 0, "orders").status_code == 200
    for user, topics in (("reader", []), ("maker", []), ("writer", []), ("writer", ["orders"])):
        answer = commit(live, user, "job", 1_000_000, *topics)
        assert (answer.status_code, code_of(answer)) == (403, "forbidden"), user
    assert commit(live, "feeder", "job", 1, "orders").json()["duplicate"] is False
    assert commit(live, "feeder", "job", 2).status_code == 200, "its own, and nothing to store"
    assert commit(live, "root", "job", 3, "orders").json()["duplicate"] is False
    assert commit(live, "feeder", "job", 4, "orders").json()["duplicate"] is False, "it is still feeder's"
    live.call(users.remove_user("feeder"))
    assert commit(live, "writer", "job", 5, "orders").json()["duplicate"] is False, "it has no owner any more"
    live.call(users.put_user("feeder", password=PASSWORD))
    live.call(users.set_permission("/", "feeder", EVERYTHING))
    assert commit(live, "feeder", "job", 6, "orders").status_code == 403, "the writer of another user"


def test_a_user_without_write_permission_cannot_create_a_writer(guarded: Live) -> None:
    live, users = guarded, guarded.broker.users
    live.call(users.put_user("nothing", password=PASSWORD))
    live.call(users.set_permission("/", "nothing", Permission(configure=".*", write="^$", read=".*")))
    for user in ("reader", "maker", "nothing"):
        assert commit(live, user, "made-by-readers", 0).status_code == 403
    assert ask(live, "GET", "/sinks/made-by-readers", "root").status_code == 404
    assert commit(live, "writer", "made-by-writers", 0).status_code == 200


def test_a_writer_without_an_owner_gets_its_next_user_as_owner(tmp_path: Path) -> None:
    live = Live(tmp_path)
    try:
        users = live.broker.users
        live.create("orders")
        assert commit(live, "", "job", 0, "orders").status_code == 200
        for name in ("first", "second"):
            live.call(users.put_user(name, password=PASSWORD))
            live.call(users.set_permission("/", name, EVERYTHING))
        assert commit(live, "first", "job", 1, "orders").status_code == 200
        assert commit(live, "second", "job", 2, "orders").status_code == 403
    finally:
        live.stop()


def test_moving_a_cursor_needs_read_permission_for_all_its_topics(guarded: Live) -> None:
    """Pin and age apply to all topics of a cursor: a reader of one could expose the others to retention."""
    live, users = guarded, guarded.broker.users
    live.call(users.put_user("manager", password=PASSWORD, tags=["management"]))
    live.call(users.set_permission("/", "manager", Permission(configure="", write="", read="^orders$")))
    ask(live, "POST", "/topics", "root", json={"name": "secret"})
    pinned = {**POSITION, "topic": "secret", "pin": True, "max_age_ms": -1}
    assert ask(live, "PUT", "/cursors/pinned", "root", json=pinned).status_code == 200
    before = ask(live, "GET", "/cursors/pinned", "root").json()
    reset = {"topic": "orders", "dry_run": False}
    for method, path, user, body in (
        ("PUT", "/cursors/pinned", "reader", {**POSITION, "pin": False, "max_age_ms": 1}),
        ("PUT", "/cursors/pinned", "reader", POSITION),
        ("POST", "/api/headrace/readers/cursor/pinned/reset", "manager", reset),
    ):
        answer = ask(live, method, path, user, json=body)
        assert answer.status_code == 403, answer.text
        assert ask(live, "GET", "/cursors/pinned", "root").json() == before
    assert ask(live, "PUT", "/cursors/orders-only", "reader", json={**POSITION, "pin": True}).status_code == 200
    assert ask(live, "PUT", "/cursors/orders-only", "reader", json={**POSITION, "pin": False}).status_code == 200
    done = ask(live, "POST", "/api/headrace/readers/cursor/orders-only/reset", "manager", json=reset)
    assert done.status_code == 200, done.text


def test_changed_passwords_and_revoked_permissions_apply_at_once(guarded: Live) -> None:
    live, users = guarded, guarded.broker.users
    live.call(users.put_user("brief", password=PASSWORD))
    live.call(users.set_permission("/", "brief", EVERYTHING))
    assert ask(live, "GET", "/topics/orders/messages", "brief").status_code == 200
    live.call(users.set_permission("/", "brief", Permission(configure=".*", write=".*", read="")))
    assert ask(live, "GET", "/topics/orders/messages", "brief").status_code == 403
    live.call(users.put_user("brief", password="another"))
    assert ask(live, "GET", "/topics", "brief").status_code == 401
    live.call(users.remove_user("brief"))
    assert live.get("/topics", auth=("brief", "another")).status_code == 401


def test_an_event_stream_ends_when_its_permission_is_revoked(guarded: Live) -> None:
    live, users = guarded, guarded.broker.users
    live.call(users.put_user("follower", password=PASSWORD))
    live.call(users.set_permission("/", "follower", EVERYTHING))
    ask(live, "POST", "/topics", "root", json={"name": "followed"})
    with live.client.stream("GET", "/topics/followed/stream", auth=("follower", PASSWORD)) as answer:
        assert answer.status_code == 200
        events = parse_events(answer.iter_lines())
        ask(live, "POST", "/topics/followed/messages", "root", json={"value": "for you"})
        assert next(events)[2]["value"] == "for you"
        live.call(users.set_permission("/", "follower", Permission(configure="", write="", read="^orders$")))
        ask(live, "POST", "/topics/followed/messages", "root", json={"value": "not for you"})
        [(name, _, data)] = list(events)
        assert name == "error" and "no read permission for 'followed'" in data["detail"]


def test_a_long_poll_fails_when_its_permission_is_revoked_meanwhile(guarded: Live) -> None:
    live, users = guarded, guarded.broker.users
    live.call(users.put_user("waiter", password=PASSWORD))
    live.call(users.set_permission("/", "waiter", EVERYTHING))
    ask(live, "POST", "/topics", "root", json={"name": "awaited"})
    log = live.broker.streams.get("awaited").partitions[0].log
    for path in ("messages", "partitions/0/batches"):
        live.call(users.set_permission("/", "waiter", EVERYTHING))
        with ThreadPoolExecutor(1) as pool:
            address_ = f"{live.base}/topics/awaited/{path}?wait=20&offset=latest"
            answer = pool.submit(httpx.get, address_, auth=("waiter", PASSWORD), timeout=60)
            eventually(lambda: any(one.callback is not None for one in log._waiters), "the request waits")
            live.call(users.clear_permission("/", "waiter"))
            ask(live, "POST", "/topics/awaited/messages", "root", json={"value": "not for you"})
            assert answer.result().status_code == 403


def test_passwords_are_never_logged(guarded: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for user in ("root", "no\r\nbody"):
            assert guarded.get("/topics", auth=(user, "s3cret-of-mine")).status_code == 401
        ask(guarded, "POST", "/topics/orders/messages", "reader", json={"value": "x"})
    assert "HTTP login failed for user 'root' from 127.0.0.1" in caplog.text
    for secret in ("s3cret-of-mine", PASSWORD, base64.b64encode(b"root:s3cret-of-mine").decode()):
        assert secret not in caplog.text
    assert "body' from" in caplog.text and "no\r\nbody" not in caplog.text, "one line for one event"
    forget_failures(guarded)


def test_failed_logins_delay_the_attacker_but_not_known_credentials(
    guarded: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_failures(guarded)
    # The first delay is one second; a slow test would be admitted again.
    monkeypatch.setattr(guarded.listener.context.gate._failures, "_monotonic", lambda: 0.0)
    assert ask(guarded, "GET", "/topics", "root").status_code == 200
    for guess in range(FAILURES_FREE):
        assert guarded.get("/topics", auth=("root", f"guess {guess}")).status_code == 401
    answer = guarded.get("/topics", auth=("root", "one more"))
    assert (answer.status_code, code_of(answer)) == (429, "too_many_failures")
    assert int(answer.headers["retry-after"]) >= 1
    assert ask(guarded, "GET", "/topics", "root").status_code == 200, "known before, from the same address"
    assert guarded.get("/topics").status_code == 401, "a request without credentials is not a guess"
    forget_failures(guarded)


def test_a_password_need_not_be_utf8(guarded: Live) -> None:
    secret = "pässwörd".encode("latin-1")
    salted = b"salt" + hashlib.sha256(b"salt" + secret).digest()
    users = guarded.broker.users
    guarded.call(users.put_user("old", password_hash=base64.b64encode(salted).decode()))
    header = b"Basic " + base64.b64encode(b"old:" + secret)
    assert guarded.get("/status", headers={"authorization": header}).status_code == 200
    header = b"Basic " + base64.b64encode(b"old:" + secret[:-1])
    assert guarded.get("/status", headers={"authorization": header}).status_code == 401
    forget_failures(guarded)


def test_a_user_without_permissions_may_do_nothing(guarded: Live) -> None:
    gate = guarded.listener.context.gate
    caller = gate.caller(scope_of("203.0.113.7", f"guest-of-none:{PASSWORD}"))
    checks: tuple[Callable[..., None], ...] = (caller.configure, caller.write, caller.read)
    for check in checks:
        with pytest.raises(Forbidden, match="no access"):
            check("anything")
    assert not caller.sees("/")
