"""Malformed, endless and slow requests are refused by the connection, and only that connection ends."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.listeners.common.backpressure import GREEDY_BYTES
from headrace.listeners.http import listener as http_listener
from headrace.listeners.http.server.bounded_protocol import WRITE_BYTES_MIN, BoundedHttp
from tests.listeners.amqp.running import eventually
from tests.listeners.http.live import Live, StartLive, patient, read_all, status_of

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /topics/t/messages HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 18446744073709551616\r\n\r\n",
        POST + b"Content-Length: 1_0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked, identity\r\n\r\n",
        POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nFolded: a\r\n b\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: x\n\n",
        b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nNo colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA\0B: c\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\0c\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /hea lth HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"AMQP\x00\x00\x09\x01",
    ],
)
def test_malformed_requests_are_refused_and_the_connection_ends(live: Live, request_bytes: bytes) -> None:
    assert status_of(live.raw(request_bytes)) == 400
    assert live.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("PUT", "/sinks/writer/batches/{}", 400),
        ("GET", "/api/health/checks/port-listener/{}", 400),
        ("GET", "/topics/t/messages?offset={}", 400),
    ],
)
def test_a_content_length_of_thousands_of_digits_is_refused(live: Live, method: str, path: str, status: int) -> None:
    """int() refuses such numbers, and the response used to be 500 with a traceback in the log."""
    live.request("POST", "/topics", json={"name": "t"})
    for digits in (20, 5000):
        answer = live.request(method, path.format("9" * digits), json={"parts": []})
        assert answer.status_code == status, answer.text


def test_an_impossible_chunk_size_is_refused(live: Live) -> None:
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    answer = live.raw(head + b"fffffffffffffffff\r\n")
    assert (
        answer == b"" or status_of(answer) == 400
    )  # if the application was already running, the connection is just closed


def test_malformed_requests_are_not_logged(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    for data in (
        b"nonsense\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nnonsense\r\n",
        POST + b"Content-Length: 10\r\n\r\nhel",
        b"GET /topics/%ff HTTP/1.1\r\nHost: x\r\n\r\n",
    ):
        with live.connect() as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            read_all(sock)
    assert live.get("/health").status_code == 200
    assert [record for record in caplog.records if not record.name.startswith("httpx")] == []


def test_a_request_smuggled_behind_a_refused_one_is_not_served(live: Live) -> None:
    smuggled = b"POST /topics/smuggled/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx"
    bad = b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n"
    live.raw(bad + smuggled)
    assert live.get("/topics/smuggled").status_code == 404


def test_endless_heads_are_refused(live: Live) -> None:
    assert status_of(live.raw(b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")) == 414
    assert status_of(live.raw(GET + b"A: " + b"b" * 33_000 + b"\r\n\r\n")) == 431
    assert status_of(live.raw(GET + b"".join(b"A%d: b\r\n" % i for i in range(101)) + b"\r\n")) == 431
    assert status_of(live.raw(GET + b"A: " + b"b" * 500_000)) == 431  # without an end
    assert status_of(live.raw(b"GET /" + b"a" * 500_000)) == 414


def test_requests_at_the_limits_are_served(live: Live) -> None:
    close = b"Connection: close\r\n"
    headers = b"".join(b"A%d: %b\r\n" % (i, b"b" * 300) for i in range(95))
    assert status_of(live.raw(GET + close + headers + b"\r\n")) == 200
    long = b"GET /topics/" + b"a" * 8000 + b" HTTP/1.1\r\nHost: x\r\n" + close + b"\r\n"
    assert status_of(live.raw(long)) == 404


def test_pipelined_requests_are_answered_in_order(live: Live, topic: str) -> None:
    live.publish(topic, {"value": "a"}, {"value": "b"})
    path = f"GET /topics/{topic}/messages?offset=%d&limit=1&format=raw HTTP/1.1\r\nHost: x\r\n".encode()
    answer = live.raw(path % 1 + b"\r\n" + path % 0 + b"Connection: close\r\n\r\n")
    assert [part[-1:] for part in answer.split(b"HTTP/1.1 200 OK")[1:]] == [b"b", b"a"]


def test_http_1_0_is_served(live: Live) -> None:
    assert status_of(live.raw(b"GET /health HTTP/1.0\r\n\r\n")) == 200


def test_an_upgrade_is_ignored(live: Live) -> None:
    upgrade = b"Upgrade: websocket\r\nConnection: upgrade, close\r\nSec-WebSocket-Key: x\r\n\r\n"
    assert status_of(live.raw(GET + upgrade)) == 200


@pytest.mark.parametrize("cut", [0, 3, 5])
@pytest.mark.parametrize(
    ("framing", "body"),
    [("Content-Length: 5", b"hello"), ("Transfer-Encoding: chunked", b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n")],
    ids=["length", "chunked"],
)
def test_the_body_after_an_ignored_upgrade_is_read(live: Live, topic: str, framing: str, body: bytes, cut: int) -> None:
    """Java's HttpClient offers an upgrade to HTTP/2 with its first request; an empty message used to be stored."""
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    head = f"POST /topics/{topic}/messages HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n{offer}{framing}\r\n\r\n"
    last = GET + b"Connection: close\r\n\r\n"
    with live.connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(head.encode() + body[:cut])
        sock.sendall(body[cut:] + last)
        answers = read_all(sock).split(b"HTTP/1.1 ")
    assert [answer[:3] for answer in answers[1:]] == [b"200", b"200"]
    assert live.values(topic) == ["hello"]


def test_a_request_after_an_ignored_upgrade_is_served(live: Live) -> None:
    upgrade = b"Upgrade: h2c\r\nConnection: upgrade\r\n\r\n"
    answers = live.raw(GET + upgrade + GET + upgrade + GET + b"Connection: close\r\n\r\n").split(b"HTTP/1.1 ")
    assert [answer[:3] for answer in answers[1:]] == [b"200", b"200", b"200"]


def test_a_client_that_is_still_sending_sees_the_refusal(own: StartLive) -> None:
    """The client keeps sending and must still be able to read the error response."""
    server = own(request_bytes_max=1000)
    with server.connect() as sock:
        sock.sendall(POST + b"Content-Length: 50000000\r\n\r\n")
        for _ in range(100):
            try:
                sock.sendall(b"x" * 10_000)
            except OSError:
                break
        assert status_of(read_all(sock)) == 413


def all_said(live: Live, request: bytes) -> bytes:
    """The response to a client that closes its writing side after the request."""
    with live.connect() as sock:
        sock.sendall(request)
        sock.shutdown(socket.SHUT_WR)
        return read_all(sock)


def test_a_half_closed_connection_gets_its_responses(live: Live, topic: str) -> None:
    """As nc -N does; the message used to be neither stored nor answered."""
    post = f"POST /topics/{topic}/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello".encode()
    assert status_of(all_said(live, post)) == 200
    assert live.values(topic) == ["hello"]
    answers = all_said(live, post + GET + b"\r\n").split(b"HTTP/1.1 ")
    assert [answer[:3] for answer in answers[1:]] == [b"200", b"200"]
    assert live.values(topic) == ["hello", "hello"]


def test_a_half_closed_connection_in_a_long_poll_counts_as_disconnected(live: Live, topic: str) -> None:
    live.create(topic)
    for path in ("messages?wait=60", "stream"):
        all_said(live, f"GET /topics/{topic}/{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


def test_half_a_request_is_not_answered(live: Live, topic: str) -> None:
    post = f"POST /topics/{topic}/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\nhello".encode()
    assert all_said(live, post) == b""
    assert live.get(f"/topics/{topic}").status_code == 404


EXPECTS = b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\n"


def test_a_refusal_before_the_body_was_sent_closes_the_connection(live: Live) -> None:
    """A refused client does not send the body; its next request used to be parsed as the body."""
    answer = live.raw(b"POST /topics/no%20name/messages HTTP/1.1\r\nHost: x\r\n" + EXPECTS)
    assert status_of(answer) == 400 and b"connection: close" in answer


def test_a_body_after_100_continue_keeps_the_connection_open(live: Live, topic: str) -> None:
    with live.connect() as sock:
        sock.sendall(f"POST /topics/{topic}/messages HTTP/1.1\r\nHost: x\r\n".encode() + EXPECTS)
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"hello" + GET + b"Connection: close\r\n\r\n")
        answers = read_all(sock).split(b"HTTP/1.1 ")
    assert [answer[:3] for answer in answers[1:]] == [b"200", b"200"]


class Patient:
    """A second listener of the same broker, with its own timeouts."""

    def __init__(self, live: Live, seconds: float) -> None:
        address = live.config.http
        assert address is not None

        async def start() -> http_listener.HttpListener:
            return await http_listener.start(live.broker, address, live.config, timeouts=patient(seconds))

        self._live = live
        self._listener = live.call(start())

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._listener.port), timeout=60)

    def link(
        self,
        sock: socket.socket,
        so_far: Callable[[BoundedHttp], bool],
        then: Callable[[BoundedHttp], None] = lambda _: None,
    ) -> BoundedHttp:
        """The server's end of the socket, once it has reached a state."""
        found: list[BoundedHttp] = []

        async def look() -> bool:
            for link in self._listener._state.connections:
                if isinstance(link, BoundedHttp) and link.client == sock.getsockname() and so_far(link):
                    found.append(link)
                    then(link)
                    return True
            return False

        eventually(lambda: self._live.call(look()), "the connection comes so far")
        return found[0]

    def at_the_end(self, sock: socket.socket, so_far: Callable[[BoundedHttp], bool]) -> None:
        """Once the connection has reached a state, all its timeouts expire, as by the clock of the
        listener."""
        self.link(sock, so_far, lambda link: link.check(link.loop.time() + 1e6))

    def stand_still(self, sock: socket.socket, so_far: Callable[[BoundedHttp], bool], *, looks: int = 1) -> None:
        """Once the connection has reached a state, the broker is suspended beyond its timeouts."""

        async def go_on() -> bool:
            for link in self._listener._state.connections:
                if isinstance(link, BoundedHttp) and link.client == sock.getsockname() and so_far(link):
                    now = link.loop.time()
                    self._listener._last_sweep, self._listener._was_delayed = now, False
                    for look in range(looks):
                        self._listener._check_timeouts(now + 1e6 + look)
                    self._listener._last_sweep = now
                    return True
            return False

        eventually(lambda: self._live.call(go_on()), "the connection comes so far")

    def close(self) -> None:
        self._live.call(self._listener.close())


@pytest.fixture(scope="module")
def hasty(live: Live) -> Iterator[Patient]:
    listener = Patient(live, 0.2)
    yield listener
    listener.close()


@pytest.fixture(scope="module")
def patient_one(live: Live) -> Iterator[Patient]:
    """A listener with long timeouts, for tests that expire them explicitly."""
    listener = Patient(live, 1e5)
    yield listener
    listener.close()


def test_a_silent_connection_is_closed(hasty: Patient) -> None:
    with hasty.connect() as sock:
        assert read_all(sock) == b""


def test_a_head_that_does_not_end_in_time_is_refused(patient_one: Patient) -> None:
    with patient_one.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: ")
        patient_one.at_the_end(sock, lambda link: link.is_reading_head)
        answer = read_all(sock)
    assert status_of(answer) == 408 and b"slow_request" in answer


def test_a_client_does_not_time_out_because_the_broker_was_suspended(patient_one: Patient) -> None:
    """After a suspension timers are due before unread data is read: skipped once, then the client is to blame."""
    with patient_one.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: ")
        patient_one.stand_still(sock, lambda link: link.is_reading_head)
        sock.sendall(b"x\r\nConnection: close\r\n\r\n")
        assert status_of(read_all(sock)) == 200
    with patient_one.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: ")
        patient_one.stand_still(sock, lambda link: link.is_reading_head, looks=2)
        assert status_of(read_all(sock)) == 408


def test_a_second_head_that_does_not_end_in_time_is_refused(patient_one: Patient) -> None:
    with patient_one.connect() as sock:
        sock.sendall(GET + b"\r\nGET /health HTTP/1.1\r\nHost")
        patient_one.at_the_end(
            sock, lambda link: link.is_reading_head and bool(link.cycle and link.cycle.response_complete)
        )
        answers = read_all(sock).split(b"HTTP/1.1 ")
    assert [answer[:3] for answer in answers[1:]] == [b"200", b"408"]


def test_a_body_that_arrives_too_slowly_is_refused(patient_one: Patient, live: Live) -> None:
    with patient_one.connect() as sock:
        sock.sendall(b"POST /topics/slow/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
        patient_one.at_the_end(sock, lambda link: link._body_bytes == 3)
        assert status_of(read_all(sock)) == 408
    assert live.get("/topics/slow").status_code == 404


def test_a_large_body_must_keep_arriving_fast_enough(patient_one: Patient) -> None:
    """With a fixed minimum of bytes, a slow client could hold the memory of a large body for hours."""
    head, part = b"POST /topics/slow/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n", 31 * 1024
    with patient_one.connect() as sock:
        sock.sendall(head + b"x" * 1_000_000)
        patient_one.link(sock, lambda link: link._body_bytes == 1_000_000, lambda link: link.check(1e9))
        sock.sendall(b"x" * part)
        patient_one.link(sock, lambda link: link._body_bytes == 1_000_000 + part, lambda link: link.check(2e9))
        assert status_of(read_all(sock)) == 408


def test_a_client_that_does_not_read_its_response_is_disconnected(hasty: Patient, live: Live) -> None:
    live.publish("large", *({"value": "x" * 100_000} for _ in range(150)))
    with hasty.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b"GET /topics/large/messages?max_bytes=16000000 HTTP/1.1\r\nHost: x\r\n\r\n")
        while live.call(connections(hasty)) != 0:
            pass


def test_a_client_that_reads_slowly_is_not_disconnected(patient_one: Patient, live: Live) -> None:
    """The kernel accepts no more bytes before a good part of its large buffer is sent."""
    live.publish("large-and-slow", *({"value": "x" * 100_000} for _ in range(150)))

    async def is_judged(link: BoundedHttp) -> bool:
        mark = link._unread
        if mark is None or mark.bytes - link._unread_bytes() < WRITE_BYTES_MIN:
            return False
        link.check(link.loop.time() + 1e6)
        return True

    with patient_one.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
        path = b"/topics/large-and-slow/messages?max_bytes=16000000"
        sock.sendall(b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path)
        link = patient_one.link(sock, lambda link: link._unread is not None)
        taken = 0
        while not live.call(is_judged(link)):
            taken += len(sock.recv(65536))
        answer = read_all(sock)
    assert taken + len(answer) > 15_000_000 and answer.endswith(b"}")


def test_clients_that_do_not_read_are_closed_when_memory_stays_short(live: Live) -> None:
    """As at the other listeners: thousands of followers that read nothing could use all of the memory."""
    live.publish("unread", *({"value": "x" * 100_000} for _ in range(150)))
    holder = next(one for one in live.broker.pressure.holders if one.name == "http_connections")

    async def held() -> int:
        return holder.held_bytes()

    async def shed() -> int:
        return holder.shed(1)

    with live.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b"GET /topics/unread/stream HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n")
        eventually(lambda: live.call(held()) >= GREEDY_BYTES, "it does not read")
        assert live.call(shed()) >= GREEDY_BYTES
        eventually(lambda: live.call(held()) == 0, "it is closed")
    assert live.listener.context.stats.events["shed"] == 1


async def connections(listener: Patient) -> int:
    return len(listener._listener._state.connections)


def test_a_client_in_a_long_poll_does_not_time_out(patient_one: Patient, live: Live) -> None:
    """Long polls and event streams are silent by design."""
    live.publish("quiet", {"value": "a"})
    log = live.broker.streams.get("quiet").partitions[0].log
    with patient_one.connect() as sock:
        sock.sendall(b"GET /topics/quiet/messages?offset=1&wait=60 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        patient_one.at_the_end(sock, lambda _: any(waiter.callback is not None for waiter in log._waiters))
        live.publish("quiet", {"value": "what it waited for"})
        answer = read_all(sock)
    assert status_of(answer) == 200 and b"what it waited for" in answer


def test_an_empty_line_after_a_request_starts_no_head_timeout(patient_one: Patient, live: Live) -> None:
    """Small devices send a surplus empty line, which used to count as an endless head and ended the long poll."""
    live.publish("empty-line", {"value": "a"})
    log = live.broker.streams.get("empty-line").partitions[0].log

    def gets_it_while_it_waits(link: BoundedHttp) -> bool:
        if not any(waiter.callback is not None for waiter in log._waiters):
            return False
        link.data_received(b"\r\n")
        return True

    with patient_one.connect() as sock:
        sock.sendall(
            b"GET /topics/empty-line/messages?offset=1&wait=60 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        patient_one.at_the_end(sock, gets_it_while_it_waits)
        live.publish("empty-line", {"value": "what it waited for"})
        answer = read_all(sock)
    assert status_of(answer) == 200 and b"what it waited for" in answer


def test_a_connection_that_is_silent_after_a_refused_body_is_closed_in_time(own: StartLive) -> None:
    """The body arrived after the response and cancelled the keep-alive timer, so the connection stayed forever."""
    live = own()

    async def is_waited_for() -> bool:
        (link,) = live.listener._state.connections
        return isinstance(link, BoundedHttp) and link._body_bytes == 5 and link.timeout_keep_alive_task is not None

    with live.connect() as sock:
        sock.sendall(b"POST /topics/no%20name/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += sock.recv(1000)
        assert status_of(answer) == 400
        sock.sendall(b"hello")
        eventually(lambda: live.call(is_waited_for()), "it is closed some day")
        sock.sendall(GET + b"Connection: close\r\n\r\n")
        assert status_of(read_all(sock)) == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://[", "https://127.0.0.1:1"])
def test_requests_from_pages_of_other_sites_are_refused(live: Live, topic: str, origin: str) -> None:
    live.publish(topic, {"value": "mine"})
    headers = {"origin": origin}
    for method, path in (("POST", "messages"), ("GET", "stream")):
        answer = live.request(method, f"/topics/{topic}/{path}", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "cross_origin")
    assert live.request("DELETE", f"/topics/{topic}", headers=headers).status_code == 403
    assert "access-control-allow-origin" not in live.get("/topics", headers=headers).headers


def test_image_requests_from_other_sites_are_refused(live: Live) -> None:
    """Image requests have no Origin, and some GET requests have effects: this one declares a queue."""
    for site in ("cross-site", "same-site"):
        headers = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}
        assert live.get("/api/aliveness-test/%2F", headers=headers).status_code == 403
    assert live.get("/api/queues/%2F/aliveness-test").status_code == 404
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert live.get("/", headers=followed).status_code == 200, "a link is followed"


@pytest.mark.parametrize("proxy", ["", "https://broker.example.com"], ids=["none", "one that changes the host"])
def test_requests_from_the_dashboard_are_allowed(live: Live, topic: str, proxy: str) -> None:
    headers = {"origin": proxy or live.base, "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}
    answer = live.client.post(f"/topics/{topic}/messages", content=b"x", headers=headers)
    assert answer.status_code == 200
    answer = live.client.post(f"/topics/{topic}/messages", content=b"x", headers={"origin": live.base})
    assert answer.status_code == 200, "an older browser, or one without TLS"


def test_a_forged_host_header_has_no_effect(live: Live, topic: str) -> None:
    answer = live.client.post("/topics", json={"name": topic}, headers={"host": "evil"})
    assert answer.status_code == 201
    assert "evil" not in str(answer.headers) + answer.text


def test_responses_forbid_content_sniffing(live: Live) -> None:
    for path in ("/health", "/topics/<script>", "/metrics"):
        assert live.get(path).headers["x-content-type-options"] == "nosniff"


def test_a_thousand_malformed_connections_leak_nothing(live: Live) -> None:
    async def state() -> tuple[int, int, int]:
        return len(live.listener._state.connections), len(live.listener._state.tasks), live.listener.context.budget.used

    rude = [
        b"", b"G", b"\x00" * 100, GET, GET + b"\r\n", POST + b"",
        POST + b"Content-Length: 1000\r\n\r\nabc",
        b"GET /topics/rude/stream HTTP/1.1\r\nHost: x\r\n\r\n",
    ]  # fmt: skip
    live.publish("rude", {"value": 1})
    before = open_files()
    for number in range(1000):
        with live.connect() as sock:
            sock.sendall(rude[number % len(rude)])
    live.client.get("/health")
    while live.call(state()) > (1, 0, 0):  # httpx keeps one connection
        pass
    eventually(lambda: open_files() - before < 5, "the files are closed")


def open_files() -> int:
    """Open sockets, and files that are open more than once; files of the log that a checkpoint opens do not count."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(entry))
    return len(found) - len({target for target in found if target.startswith("/")})
