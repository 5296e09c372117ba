"""The certificate of the listeners, and the acceptor where handshakes wait: what is refused, and what it costs
others."""

import asyncio
import contextlib
import inspect
import itertools
import logging
import os
import re
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headrace.broker.metrics.counters import ListenerStats
from headrace.config import Address, Config, InvalidSetting, load
from headrace.listeners.common.sockets import ListeningSockets, listen
from headrace.listeners.common.tls import accept as accept_module
from headrace.listeners.common.tls import certificate as tls_module
from headrace.listeners.common.tls.accept import TlsAcceptor
from headrace.listeners.common.tls.certificate import Tls, server_context, tls_of
from tests.certificates import Authority, Pair, openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.issue("broker")


def config_of(pair: Pair, **more: object) -> Config:
    return load({"tls_cert": pair.cert, "tls_key": pair.key, **more})


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Each loop has TLS of its own, and a broker without uvloop is a broker, too."""

    def running(new_loop: Callable[[], asyncio.AbstractEventLoop], **fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(test(**fixtures))

    given = inspect.signature(test)
    loop = inspect.Parameter("new_loop", inspect.Parameter.KEYWORD_ONLY)
    running.__signature__ = given.replace(parameters=[*given.parameters.values(), loop])  # type: ignore[attr-defined]
    running.__doc__ = test.__doc__
    marked: Callable[..., None] = pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])(
        running
    )
    return marked


# Settings.


def test_without_a_certificate_no_listener_speaks_tls() -> None:
    assert tls_of(Config()) is None
    assert not any(Config().has_tls(listener) for listener in ("amqp", "kafka", "http"))


def test_listeners_can_be_chosen(pair: Pair) -> None:
    config = config_of(pair, tls_listeners=" http,Kafka")
    assert [listener for listener in ("amqp", "kafka", "http") if config.has_tls(listener)] == ["kafka", "http"]
    with pytest.raises(InvalidSetting, match="'smtp' is not one of amqp, kafka, http"):
        config_of(pair, tls_listeners="http,smtp")


def test_tls_settings_without_a_certificate_are_refused(authority: Authority) -> None:
    for name, value in (("tls_key", "x.key"), ("tls_client_ca", authority.cert), ("tls_listeners", "http")):
        with pytest.raises(InvalidSetting, match=rf"{name} \(from the flag .*without tls_cert"):
            tls_of(load({name: value}))


def test_a_path_in_the_settings_file_is_relative_to_it_and_off_disables_the_setting(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('tls_cert = "own/broker.pem"\ntls_client_ca = "off"\ntls_listeners = ["http"]\n')
    config = load(file=file)
    assert config.tls_cert == str(tmp_path / "own/broker.pem")
    assert (config.tls_key, config.tls_client_ca, config.tls_listeners) == (None, None, ("http",))


# Files.


def test_renegotiation_is_off_and_old_versions_are_out(pair: Pair) -> None:
    context, _ = server_context(config_of(pair))
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_a_key_in_the_same_file_is_found(pair: Pair, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(Path(pair.cert).read_text() + Path(pair.key).read_text())
    server_context(load({"tls_cert": str(both)}))


def missing(authority: Authority, pair: Pair, folder: Path) -> Pair:
    return Pair(pair.cert, str(folder / "nowhere.key"))


def not_pem(authority: Authority, pair: Pair, folder: Path) -> Pair:
    (folder / "words.pem").write_text("no certificate")
    return Pair(str(folder / "words.pem"), pair.key)


def a_folder(authority: Authority, pair: Pair, folder: Path) -> Pair:
    return Pair(str(folder), pair.key)


def not_matching(authority: Authority, pair: Pair, folder: Path) -> Pair:
    return Pair(pair.cert, authority.issue("another").key)


def expired(authority: Authority, pair: Pair, folder: Path) -> Pair:
    return authority.issue("expired", is_expired=True)


def for_clients_only(authority: Authority, pair: Pair, folder: Path) -> Pair:
    return authority.issue("for-clients", extension="extendedKeyUsage=clientAuth")


def with_a_password(authority: Authority, pair: Pair, folder: Path) -> Pair:
    locked = str(folder / "locked.key")
    openssl("pkey", "-in", pair.key, "-aes256", "-passout", "pass:secret", "-out", locked)
    return Pair(pair.cert, locked)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (missing, r"tls_key .*nowhere\.key does not exist"),
        (not_pem, r"tls_cert .*words\.pem .*is not a PEM file"),
        (a_folder, r"tls_cert .*is a directory"),
        (not_matching, r"the key does not belong to the certificate"),
        (expired, r"tls_cert .*expired\.pem: certificate has expired"),
        (for_clients_only, r"tls_cert .*unsuitable certificate purpose|unsupported certificate purpose"),
        (with_a_password, r"tls_key .*encrypted with a password"),
    ],
)
def test_files_that_cannot_be_used_are_one_sentence(
    authority: Authority, pair: Pair, tmp_path: Path, make: Callable[[Authority, Pair, Path], Pair], sentence: str
) -> None:
    with pytest.raises(InvalidSetting, match=sentence):
        server_context(config_of(make(authority, pair, tmp_path)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_key_that_may_not_be_read_is_one_sentence(pair: Pair, tmp_path: Path) -> None:
    key = Path(shutil.copy(pair.key, tmp_path / "own.key"))
    key.chmod(0)
    with pytest.raises(InvalidSetting, match="is not readable by this user"):
        server_context(config_of(Pair(pair.cert, str(key))))


def test_a_ca_for_clients_that_is_none_is_one_sentence(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("words")
    for file in (tmp_path / "ca.pem", tmp_path / "nowhere.pem"):
        with pytest.raises(InvalidSetting, match=f"tls_client_ca .*{file.name}"):
            server_context(config_of(pair, tls_client_ca=str(file)))


# The acceptor.


class Echo(asyncio.Protocol):
    """Says what it hears. `made` are those a listener would count."""

    def __init__(self, made: "list[Echo]") -> None:
        self._made = made
        self.is_lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.append(self)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert isinstance(self._transport, asyncio.Transport) or hasattr(self._transport, "write")
        self._transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._made.remove(self)
        self.is_lost.set()


class House:
    """One listener with TLS, and what it counts."""

    def __init__(self, tls: Tls, room: int) -> None:
        self.stats = ListenerStats()
        self.inside: list[Echo] = []
        self.acceptor = TlsAcceptor("HTTP", tls, self.stats, lambda: room - len(self.inside), b"speak TLS")
        self.listener: ListeningSockets

    @property
    def port(self) -> int:
        return self.listener.port


Open = Callable[..., contextlib.AbstractAsyncContextManager[House]]


@pytest.fixture
def opened(pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Open:
    """With patience: on a busy machine a handshake that is meant to wait must not end by itself."""
    monkeypatch.setattr(accept_module, "HANDSHAKE_TIMEOUT_S", 300.0)

    @contextlib.asynccontextmanager
    async def open_house(config: Config | None = None, room: int = 100) -> AsyncIterator[House]:
        house = House(Tls(config or config_of(pair)), room)
        caplog.clear()  # it has said until when the certificate is good
        address = Address("127.0.0.1", 0)
        house.listener = await listen(address, lambda: Echo(house.inside), flag="--http", acceptor=house.acceptor)
        try:
            yield house
        finally:
            house.listener.close()
            for echo in list(house.inside):
                echo._transport.abort()  # type: ignore[attr-defined]
                await echo.is_lost.wait()

    return open_house


async def plain(house: House) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", house.port)


async def speak(house: House, context: ssl.SSLContext, words: bytes = b"hello") -> ssl.SSLObject:
    """One whole connection with TLS; the server's certificate is in what it returns."""
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port, ssl=context)
    try:
        writer.write(words)
        assert await reader.readexactly(len(words)) == words
        found: ssl.SSLObject = writer.get_extra_info("ssl_object")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return found


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.cert)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@on_both_loops
async def test_words_go_both_ways(opened: Open, authority: Authority) -> None:
    async with opened() as house:
        await speak(house, trusting(authority), b"x" * 3_000_000)
        assert house.stats.events == {}


@on_both_loops
async def test_a_tls_handshake_that_times_out_never_reaches_the_listener(
    opened: Open, authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing at all, half a first message, and a whole one without what must follow."""
    monkeypatch.setattr(accept_module, "HANDSHAKE_TIMEOUT_S", 0.5)
    caplog.set_level(logging.INFO, "headrace.tls")
    outgoing = ssl.MemoryBIO()
    asking = trusting(authority).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        asking.do_handshake()
    hello = outgoing.read()
    async with opened() as house:
        for said in (b"", hello[:20], hello):
            reader, writer = await plain(house)
            writer.write(said)
            with contextlib.suppress(ConnectionError):
                while await reader.read(65536):
                    pass  # up to the end, which comes from the other side
            writer.close()
        await until(lambda: house.stats.events.get("tls_failures") == 3)
        assert house.inside == []
    assert len(caplog.records) == 3 and not any(record.exc_info for record in caplog.records)
    assert all("took more than 0.5 seconds" in record.getMessage() for record in caplog.records)


@on_both_loops
async def test_a_pause_of_the_broker_does_not_time_out_a_handshake(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has sent meanwhile lies in its socket: one look at the clock proves nothing."""
    monkeypatch.setattr(accept_module, "HANDSHAKE_TIMEOUT_S", 1.0)
    async with opened() as house:
        _, writer = await plain(house)
        await until(lambda: len(house.acceptor._handshakes) == 1)
        time.sleep(1.5)
        for _ in range(20):  # enough to end it, were it to end; too few for four more looks
            await asyncio.sleep(0)
        assert len(house.acceptor._handshakes) == 1
        writer.close()


@on_both_loops
async def test_a_client_without_tls_gets_an_explanation_and_is_closed(
    opened: Open, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace.tls")
    async with opened() as house:
        reader, writer = await plain(house)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.read() == b"speak TLS"
        writer.close()
        await speak(house, trusting(authority))
        assert house.stats.events == {"tls_failures": 1}
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "TLS handshake with the HTTP listener failed: the client does not use TLS"
    ]


@on_both_loops
async def test_repeated_failed_handshakes_do_not_flood_the_log(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accept_module, "LINES_MAX", 2)
    monkeypatch.setattr(accept_module, "LINES_INTERVAL_S", 300.0)
    caplog.set_level(logging.INFO, "headrace.tls")

    async def knock() -> None:
        reader, writer = await plain(house)
        writer.write(b"no TLS")
        assert await reader.read() == b"speak TLS"
        writer.close()

    async with opened() as house:
        house.acceptor._lines_since = asyncio.get_running_loop().time()
        for _ in range(5):
            await knock()
        assert house.stats.events == {"tls_failures": 5} and len(caplog.records) == 2
        monkeypatch.setattr(accept_module, "LINES_INTERVAL_S", 0.0)
        await knock()
    assert caplog.records[2].getMessage() == "3 more failed TLS handshakes at the HTTP listener before that"
    assert len(caplog.records) == 4


@on_both_loops
async def test_noise_after_the_first_byte_of_tls_is_a_line_and_no_traceback(
    opened: Open, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with opened() as house:
        for noise in (b"\x16" + b"\xff" * 500, b"\x16\x03\x01\x40\x00" + os.urandom(500), b"\x16\x03\x01\x00\x00" * 40):
            reader, writer = await plain(house)
            writer.write(noise)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
        await until(lambda: house.stats.events.get("tls_failures") == 3)
        await speak(house, trusting(authority))
    assert len(caplog.records) == 3 and not any(record.exc_info for record in caplog.records), caplog.text


@on_both_loops
async def test_a_port_probe_is_not_logged_as_a_failure(
    opened: Open, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace.tls")
    async with opened() as house:
        _, writer = await plain(house)
        writer.close()
        await until(lambda: not house.acceptor._handshakes)
        await speak(house, trusting(authority))
        assert house.stats.events == {} and caplog.records == []


@on_both_loops
async def test_old_versions_of_tls_are_refused(opened: Open, authority: Authority) -> None:
    context = trusting(authority)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    async with opened() as house:
        with pytest.raises(OSError):
            await speak(house, context)
        await until(lambda: house.stats.events == {"tls_failures": 1})


def from_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection from an address of its own."""
    numbers = itertools.count()
    monkeypatch.setattr(accept_module, "source_of", lambda host: str(next(numbers)))


@on_both_loops
async def test_handshakes_count_against_the_limit_of_connections(
    opened: Open, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_everywhere(monkeypatch)
    async with opened(room=3) as house:
        waiting = [await plain(house) for _ in range(2)]
        await until(lambda: len(house.acceptor._handshakes) == 2)
        inside = await asyncio.open_connection("127.0.0.1", house.port, ssl=trusting(authority))
        await until(lambda: len(house.inside) == 1)
        reader, writer = await plain(house)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""  # at once, without waiting for a handshake
        writer.close()
        assert house.stats.events == {"connections_refused": 1}
        waiting.pop()[1].close()
        await until(lambda: len(house.acceptor._handshakes) == 1)
        await speak(house, trusting(authority))
        for _, writer in (*waiting, inside):
            writer.close()


@on_both_loops
async def test_handshakes_beyond_the_limit_wait(
    opened: Open, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept_module, "HANDSHAKES_MAX", 2)
    from_everywhere(monkeypatch)
    async with opened() as house:
        waiting = [await plain(house) for _ in range(2)]
        await until(lambda: len(house.acceptor._handshakes) == 2)
        third = asyncio.ensure_future(speak(house, trusting(authority)))
        await asyncio.sleep(0.05)
        assert len(house.acceptor._handshakes) == 2 and not third.done()
        waiting.pop()[1].close()
        await third
        assert house.stats.events == {}
        waiting.pop()[1].close()


@on_both_loops
async def test_silent_connections_from_one_address_do_not_lock_out_others(
    opened: Open, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients from other addresses and active ones from the same address connect; the oldest silent one is evicted."""
    source = ["203.0.113.7"]
    monkeypatch.setattr(accept_module, "HANDSHAKES_MAX", 4)
    monkeypatch.setattr(accept_module, "source_of", lambda host: source[0], raising=False)
    async with opened() as house:
        silent = [await plain(house) for _ in range(10)]
        async with asyncio.timeout(60):
            await speak(house, trusting(authority))
            source[0] = "198.51.100.1"
            await speak(house, trusting(authority))
            assert await silent[0][0].read() == b""
        await until(lambda: len(house.acceptor._handshakes) == 2)  # one of the three was evicted for the active client
        assert house.stats.events == {"connections_refused": 8}
        for _, writer in silent:
            writer.close()


@on_both_loops
async def test_no_files_left_is_a_rest_and_no_end(
    opened: Open, authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accept_module, "ACCEPT_REST_S", 0.05)
    failures = iter([OSError(24, "Too many open files")])
    really = socket.socket.accept

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        for failure in failures:
            raise failure
        return really(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    async with opened() as house:
        await speak(house, trusting(authority))
    assert "cannot accept: Too many open files" in caplog.text


@on_both_loops
async def test_closing_ends_pending_handshakes(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as house:
        reader, writer = await plain(house)
        await until(lambda: len(house.acceptor._handshakes) == 1)
        house.listener.close()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        with pytest.raises(OSError):
            await plain(house)
    assert caplog.records == []


@on_both_loops
async def test_clients_need_a_certificate_of_the_ca_that_is_named(
    opened: Open, authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    config = config_of(pair, tls_client_ca=authority.cert)
    own, strange = authority.issue("client"), Authority(tmp_path).issue("stranger")
    async with opened(config) as house:
        for shown, alert in ((None, "CERTIFICATE_REQUIRED"), (strange, "UNKNOWN_CA")):
            context = trusting(authority)
            if shown is not None:
                context.load_cert_chain(*shown)
            with pytest.raises(ssl.SSLError, match=alert):  # with a reason, not only a closed connection
                await speak(house, context)
        await until(lambda: house.stats.events == {"tls_failures": 2})
        context = trusting(authority)
        context.load_cert_chain(*own)
        await speak(house, context)
        assert house.stats.events == {"tls_failures": 2}


# Renewal.


@on_both_loops
async def test_a_renewed_certificate_is_used_for_new_connections(
    opened: Open,
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tls_module, "CHECK_INTERVAL_S", 0.0)
    first, second = authority.issue("first"), authority.issue("second")
    here = Pair(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))

    def put(file: str, there: str) -> None:
        shutil.copy(file, there + ".new")
        Path(there + ".new").replace(there)

    async def seen(house: House) -> str:
        certificate = (await speak(house, trusting(authority))).getpeercert()
        assert certificate is not None
        return str(certificate["subject"])

    put(first.cert, here.cert)
    put(first.key, here.key)
    caplog.set_level(logging.INFO, "headrace.tls")
    async with opened(config_of(here)) as house:
        assert "first" in await seen(house) and caplog.records == []
        put(second.cert, here.cert)  # and the key comes later
        assert "first" in await seen(house) and "first" in await seen(house)
        assert [record.levelname for record in caplog.records] == ["ERROR"], "one line for one change"
        assert "the key does not belong to the certificate" in caplog.text
        put(second.key, here.key)
        assert "second" in await seen(house)
        assert re.fullmatch(r"the certificate in .*cert\.pem is valid until .* GMT", caplog.records[-1].getMessage())
        Path(here.cert).unlink()
        assert "second" in await seen(house)
