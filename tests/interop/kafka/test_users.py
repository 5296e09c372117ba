"""Users with passwords and rights, seen by the clients that people have."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiokafka
import aiokafka.errors
import httpx
import kafka
import kafka.errors
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    NewTopic,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)

from tests.interop.kafka.broker import KafkaBroker
from tests.interop.kafka.jars import kafka_tools, kafkajs, pip_gives, run_java

Name = Callable[[str], str]
SECONDS = 60  # a busy machine is slow, not wrong
PASSWORD = "correct horse"
MECHANISMS = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]


class Guarded:
    """A broker with users: root may do everything, guest is gone."""

    def __init__(self, broker: KafkaBroker) -> None:
        self.broker = broker
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{broker.http_port}", timeout=SECONDS)
        self.user("root", tags="administrator", configure=".*", write=".*", read=".*")
        self._http.delete("/api/users/guest").raise_for_status()
        self._http.auth = ("root", PASSWORD)

    def close(self) -> None:
        self._http.close()

    def user(self, name: str, *, tags: str = "", **patterns: str) -> None:
        self._http.put(f"/api/users/{name}", json={"password": PASSWORD, "tags": tags}).raise_for_status()
        rights = {"configure": "", "write": "", "read": "", **patterns}
        self._http.put(f"/api/permissions/%2F/{name}", json=rights).raise_for_status()

    def remove(self, name: str) -> None:
        self._http.delete(f"/api/users/{name}").raise_for_status()

    def connections(self) -> list[dict[str, Any]]:
        return [one for one in self._http.get("/api/connections").json() if one["protocol"] == "Kafka"]

    def login(self, user: str, password: str = PASSWORD, mechanism: str = "PLAIN") -> dict[str, Any]:
        """The settings for librdkafka."""
        return {
            "bootstrap.servers": self.broker.address,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": mechanism,
            "sasl.username": user,
            "sasl.password": password,
            "log_level": 0,
        }

    def topic(self, name: str) -> str:
        admin = AdminClient(self.login("root"))
        [made] = admin.create_topics([NewTopic(name, 1, 1)]).values()
        made.result(SECONDS)
        return name

    def stored(self, topic: str) -> int:
        reader = Consumer({**self.login("root"), "group.id": "root"})
        try:
            return int(reader.get_watermark_offsets(TopicPartition(topic, 0), SECONDS)[1])
        finally:
            reader.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    broker = KafkaBroker(tmp_path_factory.mktemp("broker"), http=True).start()
    guarded = Guarded(broker)
    yield guarded
    guarded.close()
    broker.stop()
    assert broker.errors() == [], broker.said()


def first_error(client: Any, errors: list[KafkaError]) -> KafkaError:
    deadline = time.monotonic() + SECONDS
    while not errors and time.monotonic() < deadline:
        client.poll(0.1)
    return errors[0]


def produced(producer: Producer, topic: str, value: bytes = b"v") -> KafkaError | None:
    """What the delivery report says."""
    reports: list[KafkaError | None] = []
    producer.produce(topic, value, on_delivery=lambda error, _: reports.append(error))
    assert producer.flush(SECONDS) == 0
    return reports[0]


def read_one(reader: Consumer) -> Any:
    """A message, or the error that comes in its place."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        message = reader.poll(0.2)
        if message is not None:
            return message.error() or message
    raise AssertionError("nothing came")


def consumer(guarded: Guarded, user: str, group: str, **settings: Any) -> Consumer:
    return Consumer({**guarded.login(user), "group.id": group, "auto.offset.reset": "earliest", **settings})


def test_confluent_writes_and_reads_with_rights_and_the_connections_show_whose_they_are(
    guarded: Guarded, name: Name
) -> None:
    topic, user = guarded.topic(name("t")), name("u")
    guarded.user(user, write=f"^{topic}$", read=f"^({topic}|{topic}-group)$")
    producer = Producer(guarded.login(user))
    assert produced(producer, topic) is None
    assert user in [one["user"] for one in guarded.connections()]
    for protocol in ("classic", "consumer"):
        reader = consumer(guarded, user, f"{topic}-group", **{"group.protocol": protocol, "enable.auto.commit": False})
        reader.subscribe([topic])
        assert read_one(reader).value() == b"v"
        reader.close()


@pytest.mark.parametrize(("user", "password"), [("root", "wrong"), ("nobody", PASSWORD), ("guest", "guest")])
def test_confluent_gets_an_authentication_error_for_wrong_credentials(
    guarded: Guarded, user: str, password: str
) -> None:
    errors: list[KafkaError] = []
    producer = Producer({**guarded.login(user, password), "error_cb": errors.append})
    error = first_error(producer, errors)
    assert error.code() == KafkaError._AUTHENTICATION
    assert "Invalid username or password" in error.str()


def test_confluent_with_an_unknown_mechanism_gets_the_supported_ones(guarded: Guarded) -> None:
    errors: list[KafkaError] = []
    settings = {**guarded.login("root", mechanism="OAUTHBEARER"), "error_cb": errors.append}
    settings["oauth_cb"] = lambda _: ("token", time.time() + 3600)
    error = first_error(Producer(settings), errors)
    assert "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512" in error.str(), error.str()


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_confluent_logs_in_without_sending_the_password(guarded: Guarded, name: Name, mechanism: str) -> None:
    topic, user = guarded.topic(name("t")), name("u,=")
    guarded.user(user, write=f"^{topic}$")
    known = Producer(guarded.login(user, mechanism=mechanism))  # as long as it is referred to, it is connected
    assert produced(known, topic) is None
    assert (user, mechanism) in [(one["user"], one["auth_mechanism"]) for one in guarded.connections()]
    errors: list[KafkaError] = []
    producer = Producer({**guarded.login(user, "wrong", mechanism), "error_cb": errors.append})
    error = first_error(producer, errors)
    assert error.code() == KafkaError._AUTHENTICATION and "invalid credentials" in error.str()


def described(admin: AdminClient, user: str) -> Any:
    by_user = admin.describe_user_scram_credentials([user])
    assert isinstance(by_user, dict)
    return by_user[user].result(SECONDS)


def test_confluent_sets_passwords_for_scram(guarded: Guarded, name: Name) -> None:
    user, kind = name("u"), ScramMechanism.SCRAM_SHA_512
    admin = AdminClient(guarded.login("root"))
    wanted = UserScramCredentialUpsertion(user, ScramCredentialInfo(kind, 8192), b"set by a client")
    for done in admin.alter_user_scram_credentials([wanted]).values():
        done.result(SECONDS)
    found = described(admin, user)
    assert [(one.mechanism, one.iterations) for one in found.scram_credential_infos] == [(kind, 8192)]
    known = AdminClient(guarded.login(user, "set by a client", "SCRAM-SHA-512"))
    assert known.list_topics(timeout=SECONDS).topics == {}, "it has no rights yet"
    for done in admin.alter_user_scram_credentials([UserScramCredentialDeletion(user, kind)]).values():
        done.result(SECONDS)
    with pytest.raises(KafkaException) as gone:
        described(admin, user)
    assert gone.value.args[0].code() == KafkaError.RESOURCE_NOT_FOUND


def test_confluent_without_a_login_is_not_served(guarded: Guarded) -> None:
    admin = AdminClient({"bootstrap.servers": guarded.broker.address, "log_level": 0})
    with pytest.raises(KafkaException):
        admin.list_topics(timeout=2)


def test_confluent_gets_authorization_errors(guarded: Guarded, name: Name) -> None:
    topic, hidden, user = guarded.topic(name("t")), guarded.topic(name("hidden")), name("u")
    guarded.user(user, read=f"^({topic}|mine)", write="^mine")
    producer = Producer(guarded.login(user))
    error = produced(producer, topic)
    assert error is not None and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert guarded.stored(topic) == 0, "and nothing is stored"

    admin = AdminClient(guarded.login(user))
    [made] = admin.create_topics([NewTopic(name("mine"), 1, 1)]).values()
    with pytest.raises(KafkaException) as refused:
        made.result(SECONDS)
    assert refused.value.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert topic in admin.list_topics(timeout=SECONDS).topics
    assert hidden not in admin.list_topics(timeout=SECONDS).topics

    reader = consumer(guarded, user, "not-mine")
    reader.subscribe([topic])
    assert read_one(reader).code() == KafkaError.GROUP_AUTHORIZATION_FAILED
    reader.close()
    reader = consumer(guarded, user, "mine")
    reader.subscribe([hidden])
    assert read_one(reader).code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    reader.close()

    for transactional_id, code in (("theirs", KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED), ("mine", None)):
        transacts = Producer({**guarded.login(user), "transactional.id": transactional_id})
        if code is None:
            transacts.init_transactions(SECONDS)
        else:
            with pytest.raises(KafkaException) as refused:
                transacts.init_transactions(SECONDS)
            assert refused.value.args[0].code() == code


def test_a_producer_whose_user_is_deleted_is_disconnected(guarded: Guarded, name: Name) -> None:
    topic, user = guarded.topic(name("t")), name("u")
    guarded.user(user, write=".*")
    errors: list[KafkaError] = []
    producer = Producer({**guarded.login(user), "error_cb": errors.append})
    assert produced(producer, topic) is None
    guarded.remove(user)
    reports: list[KafkaError | None] = []
    producer.produce(topic, b"v", on_delivery=lambda error, _: reports.append(error))
    deadline = time.monotonic() + SECONDS
    while not any(one.code() == KafkaError._AUTHENTICATION for one in errors):
        assert time.monotonic() < deadline, errors
        producer.poll(0.1)
    producer.purge()
    assert producer.flush(SECONDS) == 0
    assert len(reports) == 1 and reports[0] is not None, "it was never delivered"
    assert guarded.stored(topic) == 1


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_kafka_python_logs_in(guarded: Guarded, name: Name, mechanism: str) -> None:
    topic = guarded.topic(name("t"))
    settings = {
        "bootstrap_servers": guarded.broker.address,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": mechanism,
        "sasl_plain_username": "root",
        "sasl_plain_password": PASSWORD,
    }
    producer = kafka.KafkaProducer(**settings)
    assert producer.send(topic, b"v").get(SECONDS).offset == 0
    producer.close()
    reader = kafka.KafkaConsumer(
        topic, group_id=name("g"), auto_offset_reset="earliest", consumer_timeout_ms=SECONDS * 1000, **settings
    )
    assert next(reader).value == b"v"
    reader.close()


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_aiokafka_logs_in_and_gets_authorization_errors(guarded: Guarded, name: Name, mechanism: str) -> None:
    topic, user = guarded.topic(name("t")), name("u")
    guarded.user(user, write=f"^{topic}$")
    settings = {
        "bootstrap_servers": guarded.broker.address,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": mechanism,
        "sasl_plain_username": user,
    }
    async with aiokafka.AIOKafkaProducer(sasl_plain_password=PASSWORD, **settings) as producer:
        assert (await producer.send_and_wait(topic, b"v")).offset == 0
    wrong = aiokafka.AIOKafkaProducer(sasl_plain_password="wrong", **settings)
    try:
        with pytest.raises(aiokafka.errors.KafkaError):
            await wrong.start()
    finally:
        await wrong.stop()


KAFKAJS = """
const { Kafka, logLevel } = require('kafkajs');
const [address, topic, username, password, mechanism] = process.argv.slice(2);
(async () => {
  const kafka = new Kafka({ brokers: [address], logLevel: logLevel.NOTHING, retry: { retries: 1 },
    connectionTimeout: 60000, authenticationTimeout: 60000, requestTimeout: 60000,
    sasl: { mechanism, username, password } });
  const producer = kafka.producer();
  await producer.connect();
  const [sent] = await producer.send({ topic, messages: [{ value: 'v' }] });
  await producer.disconnect();
  console.log(JSON.stringify({ offset: sent.baseOffset }));
})().catch((error) => { console.log(JSON.stringify({ error: error.message })); });
"""


@pytest.mark.peer
@pytest.mark.slow
def test_kafkajs_logs_in(guarded: Guarded, name: Name, tmp_path: Path) -> None:
    modules = kafkajs("2.2.4")
    topic = guarded.topic(name("t"))
    (tmp_path / "client.js").write_text(KAFKAJS)
    said = []
    for password, mechanism in ((PASSWORD, "plain"), (PASSWORD, "scram-sha-256"), ("wrong", "plain")):
        done = subprocess.run(
            ["node", str(tmp_path / "client.js"), guarded.broker.address, topic, "root", password, mechanism],
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
            env={**os.environ, "NODE_PATH": str(modules), "KAFKAJS_NO_PARTITIONER_WARNING": "1"},
        )
        said.append(json.loads(done.stdout.splitlines()[-1]))
    assert said[:2] == [{"offset": "0"}, {"offset": "1"}]
    assert "Invalid username or password" in said[2]["error"]


@pytest.mark.peer
@pytest.mark.slow
def test_the_tools_of_kafka_log_in_and_show_authorization_errors(guarded: Guarded, name: Name, tmp_path: Path) -> None:
    jars, topic, user = kafka_tools(), guarded.topic(name("t")), name("u")
    guarded.user(user, read=f"^({topic}|{topic}-group)$", write=f"^{topic}$")
    login = tmp_path / "client.properties"
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    login.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\n"
        f'sasl.jaas.config={module} required username="{user}" password="{PASSWORD}";\n'
    )

    def tool(command: str, *arguments: str, stdin: str = "") -> str:
        where = ("--bootstrap-server", guarded.broker.address, "--command-config", str(login))
        return run_java(jars, f"org.apache.kafka.tools.{command}", *where, *arguments, stdin=stdin)

    assert tool("TopicCommand", "--list").split() == [topic]
    tool("ConsoleProducer", "--topic", topic, stdin="a\nb\n")
    arguments = ("--topic", topic, "--group", f"{topic}-group", "--max-messages", "2", "--timeout-ms", "90000")
    assert tool("consumer.ConsoleConsumer", *arguments, "--from-beginning").splitlines()[:2] == ["a", "b"]
    with pytest.raises(AssertionError, match="has no permission to configure topic"):
        tool("TopicCommand", "--create", "--topic", name("not-mine"))


@pytest.mark.peer
@pytest.mark.slow
def test_kafka_configs_makes_a_user_that_logs_in_with_scram(guarded: Guarded, name: Name, tmp_path: Path) -> None:
    jars, user = kafka_tools(), name("u")

    def tool(command: str, *arguments: str, scram: str = "", login: str = "root", password: str = PASSWORD) -> str:
        module = "scram.ScramLoginModule" if scram else "plain.PlainLoginModule"
        properties = tmp_path / f"{login}.properties"
        properties.write_text(
            f"security.protocol=SASL_PLAINTEXT\nsasl.mechanism={scram or 'PLAIN'}\n"
            f"sasl.jaas.config=org.apache.kafka.common.security.{module} required "
            f'username="{login}" password="{password}";\n'
        )
        where = ("--bootstrap-server", guarded.broker.address, "--command-config", str(properties))
        return run_java(jars, command, *where, *arguments)

    entity = ("--entity-type", "users", "--entity-name", user)
    configs = "kafka.admin.ConfigCommand"
    tool(configs, "--alter", *entity, "--add-config", "SCRAM-SHA-256=[password=from-a-tool]")
    assert "SCRAM-SHA-256=iterations=4096" in tool(configs, "--describe", *entity)
    known = {"scram": "SCRAM-SHA-256", "login": user, "password": "from-a-tool"}
    listed = tool("org.apache.kafka.tools.TopicCommand", "--list", **known)
    assert listed.split() == [], "it has no rights yet"


OLD_PYTHON = """
import sys
from kafka import KafkaProducer
address, topic, user, password = sys.argv[1:]
login = {"sasl_mechanism": "PLAIN", "sasl_plain_username": user, "sasl_plain_password": password}
patience_ms = 60_000 if password == "correct horse" else 2_000  # with a wrong one it tries as long as it may
login |= {"api_version_auto_timeout_ms": patience_ms}
producer = KafkaProducer(bootstrap_servers=address, security_protocol="SASL_PLAINTEXT", **login)
print(producer.send(topic, b"v").get(60).offset)
"""


@pytest.mark.peer
@pytest.mark.slow
def test_kafka_python_of_2020_logs_in_with_a_bare_token(guarded: Guarded, name: Name) -> None:
    """Version 0 of the handshake, and then the token itself, as it was before Kafka 1.0."""
    if sys.version_info >= (3, 12):
        pytest.skip("SKIPPED FOR WANT OF Python 3.11: kafka-python 2.0.2 cannot be imported by a later one")
    library = pip_gives("kafka-python==2.0.2")
    command = [sys.executable, "-W", "ignore", "-c", OLD_PYTHON, guarded.broker.address, guarded.topic(name("t"))]
    env = {"PYTHONPATH": str(library)}
    said = []
    for password in (PASSWORD, "wrong"):
        done = subprocess.run(
            [*command, "root", password], env=env, capture_output=True, text=True, timeout=240, check=False
        )
        said.append((done.returncode, done.stdout))
    assert said == [(0, "0\n"), (1, "")]
