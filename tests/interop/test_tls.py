"""Every listener over TLS, with the clients people have: with and without certificates of their own."""

import asyncio
import json
import pickle
import re
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aio_pika
import confluent_kafka
import httpx
import pika
import pika.exceptions
import pytest
import requests
from confluent_kafka.admin import AdminClient

from headrace import AsyncConsumer, AsyncProducer, Client, Consumer, Producer
from headrace.errors import BrokerUnreachable
from headrace.spark.broker import BrokerLink
from tests.broker_process import BrokerProcess
from tests.certificates import Authority, Pair
from tests.cli.running import SMALL, headrace
from tests.interop.kafka.jars import kafka_tools, run_java
from tests.listeners.amqp.running import patient_connection

MB = 1 << 20
LARGE = bytes(range(256)) * (10 * MB // 256)
PATIENCE_S = 60.0
LISTENERS = ("http", "amqp", "kafka")


class TlsBroker(BrokerProcess):
    """`own` is what its clients show."""

    def __init__(self, folder: Path, authority: Authority, own: Pair | None, *options: str) -> None:
        pair = authority.issue(f"broker-of-{folder.name}")
        super().__init__(folder, *SMALL, "--tls-cert", pair.cert, "--tls-key", pair.key, *options, listeners=LISTENERS)
        self.ca, self.own, self.pair = authority.cert, own, pair

    @property
    def home(self) -> str:
        return f"https://localhost:{self.ports['http']}"

    @property
    def url(self) -> str:
        """For our own client."""
        shown = f"&certfile={self.own.cert}&keyfile={self.own.key}" if self.own else ""
        return f"{self.home}?cacertfile={self.ca}{shown}"

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        if self.own is not None:
            context.load_cert_chain(*self.own)
        return context

    def pika(self, context: ssl.SSLContext | None = None) -> pika.BlockingConnection:
        options = pika.SSLOptions(context or self.context(), "localhost")
        return pika.BlockingConnection(
            pika.ConnectionParameters(
                "localhost",
                self.ports["amqp"],
                ssl_options=options,
                socket_timeout=PATIENCE_S,
                stack_timeout=PATIENCE_S,
            )
        )

    def librdkafka(self, **more: object) -> dict[str, Any]:
        shown = {"ssl.certificate.location": self.own.cert, "ssl.key.location": self.own.key} if self.own else {}
        settings = {"bootstrap.servers": f"localhost:{self.ports['kafka']}", "security.protocol": "SSL"}
        return {**settings, "ssl.ca.location": self.ca, "log_level": 0, **shown, **more}

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(f"{self.home}{path}", verify=self.context(), timeout=PATIENCE_S, **more)

    def failures(self, listener: str) -> int:
        """Handshakes that came to nothing, as /metrics counts them."""
        text = self.get("/metrics").text
        found = re.search(rf'headrace_listener_events_total{{event="tls_failures",listener="{listener}"}} (\d+)', text)
        return int(found[1]) if found else 0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module", params=["of the broker only", "of both"])
def broker(
    request: pytest.FixtureRequest, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TlsBroker]:
    folder = tmp_path_factory.mktemp("tls")
    if request.param == "of both":
        own = authority.issue("client", extension="extendedKeyUsage=clientAuth")
        made = TlsBroker(folder, authority, own, "--tls-client-ca", authority.cert)
    else:
        made = TlsBroker(folder, authority, None)
    made.start()
    yield made
    assert made.stop() == 0
    assert "Traceback" not in made.said() and " error " not in made.said(), made.said()


def test_the_broker_reports_its_tls_listeners(broker: TlsBroker) -> None:
    said = broker.said()
    assert f"amqps://127.0.0.1:{broker.ports['amqp']}" in said
    assert f"SSL://127.0.0.1:{broker.ports['kafka']}" in said
    assert f"dashboard  https://127.0.0.1:{broker.ports['http']}/" in said
    assert broker.get("/status").json()["tls"] == ["amqp", "kafka", "http"]
    metrics = broker.get("/metrics").text
    expiry = re.search(r"^headrace_tls_certificate_expiry_timestamp_seconds (\S+)", metrics, re.M)
    assert expiry is not None and 29 < (float(expiry[1]) - time.time()) / 86_400 < 31
    assert re.search(r"broker-of-\S+\.pem is valid until .* GMT\n", said)


def test_pika_with_large_messages(broker: TlsBroker) -> None:
    with broker.pika() as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("large", durable=True)
        for _ in range(3):
            channel.basic_publish("", "large", LARGE, pika.BasicProperties(delivery_mode=2))
        seen = broker.get("/api/connections", auth=("guest", "guest")).json()
        assert [one["ssl"] for one in seen] == [True]
        for method, _, body in channel.consume("large", inactivity_timeout=PATIENCE_S):
            assert body == LARGE
            channel.basic_ack(method.delivery_tag)
            if method.delivery_tag == 3:
                break
        channel.cancel()
        channel.queue_delete("large")


async def test_aio_pika(broker: TlsBroker) -> None:
    url = f"amqps://guest:guest@localhost:{broker.ports['amqp']}/"
    async with await aio_pika.connect(url, ssl_context=broker.context()) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("async", auto_delete=True)
        await channel.default_exchange.publish(aio_pika.Message(b"hello"), "async")
        message = await queue.get(timeout=PATIENCE_S)
        await message.ack()
        assert message.body == b"hello"


@pytest.mark.parametrize("protocol", ["SSL", "SASL_SSL"])
def test_confluent_kafka(broker: TlsBroker, protocol: str) -> None:
    login = {"sasl.mechanism": "PLAIN", "sasl.username": "guest", "sasl.password": "guest"}
    settings = broker.librdkafka(**{"security.protocol": protocol}, **(login if protocol == "SASL_SSL" else {}))
    topic = f"confluent-{protocol}"
    producer = confluent_kafka.Producer({**settings, "message.max.bytes": 12 * MB})
    for _ in range(3):
        producer.produce(topic, LARGE)
    assert producer.flush(PATIENCE_S) == 0
    consumer = confluent_kafka.Consumer({**settings, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    try:
        for _ in range(3):
            message = consumer.poll(PATIENCE_S)
            assert message is not None and message.error() is None and message.value() == LARGE
    finally:
        consumer.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kafka_python(broker: TlsBroker) -> None:
    import kafka

    settings = {
        "bootstrap_servers": f"localhost:{broker.ports['kafka']}",
        "security_protocol": "SSL",
        "ssl_context": broker.context(),
    }
    producer = kafka.KafkaProducer(**settings)
    for number in range(100):
        producer.send("kafka-python", b"%d" % number)
    producer.flush(PATIENCE_S)
    producer.close()
    consumer = kafka.KafkaConsumer("kafka-python", auto_offset_reset="earliest", **settings)
    assert [int(next(consumer).value) for _ in range(100)] == list(range(100))
    consumer.close()


@pytest.mark.peer
def test_kafkas_own_producer(broker: TlsBroker, tmp_path: Path) -> None:
    lines = ["security.protocol=SSL", "ssl.truststore.type=PEM", f"ssl.truststore.location={broker.ca}"]
    if broker.own is not None:
        both = tmp_path / "both.pem"
        both.write_text(Path(broker.own.key).read_text() + Path(broker.own.cert).read_text())
        lines += ["ssl.keystore.type=PEM", f"ssl.keystore.location={both}"]
    (tmp_path / "client.properties").write_text("\n".join(lines))
    where = ("--bootstrap-server", f"localhost:{broker.ports['kafka']}", "--topic", "java")
    more = ("--command-config", str(tmp_path / "client.properties"))
    run_java(kafka_tools(), "org.apache.kafka.tools.ConsoleProducer", *where, *more, stdin="a\nb\n")
    assert headrace("sub", "java", "-e", "--url", broker.url).stdout == b"a\nb\n"


def test_clients_of_http(broker: TlsBroker) -> None:
    where = f"{broker.home}/topics/http/messages"
    sent = httpx.post(
        where, content=b"by httpx", headers={"content-type": "text/plain"}, verify=broker.context(), timeout=PATIENCE_S
    )
    assert sent.status_code == 200, sent.text
    shown = (broker.own.cert, broker.own.key) if broker.own else None
    assert "by httpx" in requests.get(where, verify=broker.ca, timeout=PATIENCE_S, cert=shown).text
    flags = ["--cert", broker.own.cert, "--key", broker.own.key] if broker.own else []
    curl = ["curl", "-sS", "--cacert", broker.ca, *flags, "--data-binary", "by curl", "-H", "content-type: text/plain"]
    done = subprocess.run([*curl, where], capture_output=True, text=True, check=False)
    assert json.loads(done.stdout), done.stderr
    assert "by curl" in broker.get("/topics/http/messages").text


def test_our_own_client_and_command_line(broker: TlsBroker, tmp_path: Path) -> None:
    with Producer("own", url=broker.url) as producer:
        producer.send(b"hello")
    with Consumer("own", url=broker.url, start="earliest") as consumer:
        assert next(iter(consumer)).value == b"hello"
    assert headrace("sub", "own", "-e", "--url", broker.url).stdout == b"hello\n"
    assert headrace("bench", "-n", "50", "--url", broker.url).returncode == 0, "AMQP, with the same trust"
    if broker.own is None:
        # On the broker's machine the broker's own settings are enough.
        file = tmp_path / "headrace.toml"
        port = broker.ports["http"]
        file.write_text(f'http = "127.0.0.1:{port}"\ntls_cert = "{broker.pair.cert}"\ntls_key = "{broker.pair.key}"\n')
        done = headrace("sub", "own", "-e", "--config", str(file))
        assert done.stdout == b"hello\n", done.stderr


def test_sparks_way_to_a_broker(broker: TlsBroker) -> None:
    """What `bootstrap` is made of, without a JVM."""
    with Producer("spark", url=broker.url) as producer:
        producer.send(b"hello")
    link = pickle.loads(pickle.dumps(BrokerLink(broker.url)))  # as it goes to the executors
    assert "spark" in link.topics()
    link.close()


async def test_our_own_asyncio_client(broker: TlsBroker) -> None:
    async with AsyncProducer("own-async", url=broker.url) as producer:
        await producer.send(b"hello")
    async with AsyncConsumer("own-async", url=broker.url, start="earliest") as consumer:
        async for message in consumer:
            assert message.value == b"hello"
            break


def test_a_slow_reader_over_tls_gets_everything_and_delays_no_other_client(broker: TlsBroker) -> None:
    """A client requests ten responses of 10 MB at once and does not read them; other clients are served meanwhile."""
    with Client(broker.url) as client, Producer("slow", url=broker.url) as producer:
        producer.send(LARGE).result(PATIENCE_S)
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        raw.connect(("127.0.0.1", broker.ports["http"]))
        with broker.context().wrap_socket(raw, server_hostname="localhost") as slow:
            slow.settimeout(PATIENCE_S)
            ask = f"GET /topics/slow/messages HTTP/1.1\r\nHost: localhost:{broker.ports['http']}\r\n\r\n".encode()
            slow.sendall(ask * 10)
            for _ in range(20):
                assert client.get("/health")["ready"]
            whole = len(broker.get("/topics/slow/messages").content)
            assert whole > len(LARGE)
            for _ in range(10):
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += slow.recv(1)
                size = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
                assert size == whole
                while size:
                    size -= len(slow.recv(min(size, 20_000)))


def test_a_consumer_that_does_not_read_for_a_while_gets_all_of_it(broker: TlsBroker) -> None:
    """Far more than the kernel keeps for it, so that the broker has to wait for it; and others do not."""
    with broker.pika() as connection, Client(broker.url) as client:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("deaf", durable=True)
        for _ in range(6):
            channel.basic_publish("", "deaf", LARGE, pika.BasicProperties(delivery_mode=2))
        bodies: list[bytes] = []
        channel.basic_consume("deaf", lambda _channel, _method, _properties, body: bodies.append(body), auto_ack=True)
        for _ in range(20):
            assert client.get("/health")["ready"]
        while len(bodies) < 6:
            connection.process_data_events(PATIENCE_S)
        assert bodies == [LARGE] * 6
        channel.queue_delete("deaf")


def test_a_client_without_tls_is_refused_by_every_listener(broker: TlsBroker) -> None:
    before = {listener: broker.failures(listener) for listener in LISTENERS}
    answer = httpx.get(broker.home.replace("https", "http"), timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["code"]) == (400, "not_tls")
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        patient_connection(broker.ports["amqp"])
    admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{broker.ports['kafka']}", "log_level": 0})
    with pytest.raises(confluent_kafka.KafkaException):
        admin.list_topics(timeout=2)
    while not all(broker.failures(listener) > before[listener] for listener in LISTENERS):
        admin.poll(0.1)  # librdkafka goes on trying


def test_a_client_that_does_not_trust_the_broker_disconnects(broker: TlsBroker, tmp_path: Path) -> None:
    other = Authority(tmp_path).cert
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(broker.home, verify=ssl.create_default_context(cafile=other), timeout=PATIENCE_S)
    with pytest.raises(ssl.SSLCertVerificationError):
        broker.pika(ssl.create_default_context(cafile=other))
    errors: list[confluent_kafka.KafkaError] = []
    admin = AdminClient(broker.librdkafka(**{"ssl.ca.location": other, "error_cb": errors.append}))
    with pytest.raises(confluent_kafka.KafkaException):
        admin.list_topics(timeout=2)
    done = headrace("status", "--url", f"{broker.home}?cacertfile={other}")
    assert done.returncode == 3 and b"presents an untrusted certificate" in done.stderr
    done = headrace("status", "--url", broker.home)
    assert done.returncode == 3 and b"?cacertfile=FILE" in done.stderr
    with pytest.raises(BrokerUnreachable, match="untrusted"):
        asyncio.run(_send(f"{broker.home}?cacertfile={other}"))


async def _send(url: str) -> None:
    async with AsyncProducer("never", url=url) as producer:
        await producer.send(b"x")


@pytest.mark.parametrize("broker", ["of both"], indirect=True)
def test_a_client_without_a_certificate_is_refused(broker: TlsBroker) -> None:
    bare = ssl.create_default_context(cafile=broker.ca)
    with pytest.raises(OSError, match="ALERT_CERTIFICATE_REQUIRED"):
        urllib.request.urlopen(f"{broker.home}/health", context=bare, timeout=PATIENCE_S)
    with pytest.raises(pika.exceptions.AMQPConnectionError, match="ALERT_CERTIFICATE_REQUIRED"):
        broker.pika(bare)
    settings = broker.librdkafka()
    admin = AdminClient({name: value for name, value in settings.items() if not re.match(r"ssl\.(cert|key)", name)})
    with pytest.raises(confluent_kafka.KafkaException):
        admin.list_topics(timeout=2)
    url = f"{broker.home}?cacertfile={broker.ca}"
    for arguments in (("status",), ("pub", "refused", "x")):
        done = headrace(*arguments, "--url", url)
        assert done.returncode == 3 and b"requires a client certificate" in done.stderr, done.stderr
    assert headrace("topic", "show", "refused", "--url", broker.url).returncode == 4, "nothing was stored"


def test_a_listener_can_stay_plain(authority: Authority, tmp_path: Path) -> None:
    broker = TlsBroker(tmp_path, authority, None, "--tls-listeners", "http,kafka").start()
    try:
        with patient_connection(broker.ports["amqp"]) as connection:
            connection.channel()
        assert f"amqp://127.0.0.1:{broker.ports['amqp']}" in broker.said()
        assert broker.get("/health").status_code == 200
    finally:
        assert broker.stop() == 0


def test_a_stop_closes_tls_connections_cleanly(authority: Authority, tmp_path: Path) -> None:
    """With a client at every listener, one of them in the middle of its handshake and one that does not read."""
    broker = TlsBroker(tmp_path, authority, None).start()
    connection = broker.pika()
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("kept", durable=True)
    channel.basic_publish("", "kept", LARGE, pika.BasicProperties(delivery_mode=2))
    producer = confluent_kafka.Producer(broker.librdkafka())
    producer.produce("kept-too", b"x")
    assert producer.flush(PATIENCE_S) == 0
    half = socket.create_connection(("127.0.0.1", broker.ports["http"]))
    half.sendall(b"\x16\x03\x01")
    deaf = broker.context().wrap_socket(
        socket.create_connection(("127.0.0.1", broker.ports["http"])), server_hostname="localhost"
    )
    deaf.sendall(b"GET /streams/kept HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert broker.stop() == 0
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as closed:
        connection.process_data_events(PATIENCE_S)
    assert closed.value.reply_code == 320
    for left in (half, deaf):
        left.close()
    said = broker.said()
    assert "stopped; everything is on disk" in said
    assert "Traceback" not in said and " error " not in said, said
    broker.start()
    try:
        with broker.pika() as again:
            assert again.channel().basic_get("kept")[2] == LARGE
    finally:
        assert broker.stop() == 0


def test_a_start_with_files_that_do_not_do_is_one_sentence(authority: Authority, tmp_path: Path) -> None:
    flags = ("--data-dir", str(tmp_path / "data"), "--http", "localhost:0", "--amqp", "off", "--kafka", "off")
    expired = authority.issue("expired", is_expired=True)
    for given, sentence in (
        (("--tls-cert", str(tmp_path / "none.pem")), "does not exist"),
        (("--tls-cert", expired.cert, "--tls-key", expired.key), "certificate has expired"),
        (("--tls-key", expired.key), "without tls_cert no listener uses TLS"),
    ):
        done = headrace("serve", *flags, *given)
        assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and sentence in done.stderr.decode(), done.stderr
    assert not (tmp_path / "data").exists(), "found before anything is made"


def test_clients_reconnect_over_tls_after_a_kill(authority: Authority, tmp_path: Path) -> None:
    broker = TlsBroker(tmp_path, authority, None).start()
    with Producer("again", url=broker.url) as producer:
        producer.send(b"one").result(PATIENCE_S)
        broker.kill()
        broker.start()
        producer.send(b"two").result(PATIENCE_S)
    assert headrace("sub", "again", "-e", "--url", broker.url).stdout == b"one\ntwo\n"
    assert broker.stop() == 0
