"""Clients of 2017 to 2021, with the versions of the protocol that they ask for."""

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop.kafka.broker import KafkaBroker
from tests.interop.kafka.jars import KAFKA_VERSION_OLD, classpath, kafka_tools, pip_gives, run_java
from tests.listing import listed

pytestmark = [pytest.mark.peer, pytest.mark.slow]
Name = Callable[[str], str]
HERE = Path(__file__).parent


@pytest.mark.parametrize("version", ["2.6.3", "1.1.1", "0.11.0.3"])
def test_the_java_client_of_its_time_writes_transacts_reads_in_a_group_and_administers(
    broker: KafkaBroker, name: Name, version: str
) -> None:
    """0.11 asks for a version of DescribeConfigs that Kafka 4 and we no longer have; all else is the same."""
    jars = classpath(f"kafka-clients-{version}", f"org.apache.kafka:kafka-clients:{version}")
    topic, group = name("t"), name("g")
    said = run_java(jars, str(HERE / "OldClient.java"), broker.address, topic, group, version).splitlines()
    read = [line.removeprefix("read ") for line in said if line.startswith("read ")]
    in_order = [f"plain {number}" for number in range(10)] + [f"sure {number}" for number in range(10)]
    assert [value for value in read if not value.startswith("kept")] == in_order
    assert [value for value in read if value not in in_order] == ["kept", "kept too"], "and not what was aborted"
    facts = dict(line.split() for line in said if not line.startswith("read "))
    expected = {"partitions": "2", "nodes": "1", "listed": "true", "begins": "0", "at": "0", "left": "false"}
    if version != "0.11.0.3":
        expected["retention"] = "200000"
    assert facts == {**expected, "committed": "26", "bound": "7"}, "20 + 3 and their three markers"


def test_the_command_line_tools_of_2021(broker: KafkaBroker, name: Name) -> None:
    jars, topic, group = kafka_tools(KAFKA_VERSION_OLD), name("t"), name("g")

    def tool(command: str, *arguments: str, stdin: str = "") -> str:
        return run_java(jars, f"kafka.{command}", "--bootstrap-server", broker.address, *arguments, stdin=stdin)

    settings = ("--partitions", "1", "--replication-factor", "1", "--config", "retention.ms=100000")
    tool("admin.TopicCommand", "--create", "--topic", topic, *settings)
    assert "retention.ms=100000" in tool("admin.TopicCommand", "--describe", "--topic", topic)
    tool("tools.ConsoleProducer", "--topic", topic, stdin="a\nb\nc\n")
    read = ("--topic", topic, "--group", group, "--from-beginning", "--max-messages", "3", "--timeout-ms", "90000")
    assert tool("tools.ConsoleConsumer", *read).splitlines()[:3] == ["a", "b", "c"]
    shown = tool("admin.ConsumerGroupCommand", "--describe", "--group", group)
    [line] = [line for line in shown.splitlines() if line.startswith(group)]
    assert line.split()[1:6] == [topic, "0", "3", "3", "0"], "offset, end and lag"
    which = ("--entity-type", "topics", "--entity-name", topic)
    tool("admin.ConfigCommand", "--alter", *which, "--add-config", "cleanup.policy=compact")
    assert "cleanup.policy=compact" in tool("admin.ConfigCommand", "--describe", *which)
    tool("admin.TopicCommand", "--delete", "--topic", topic)
    assert topic not in tool("admin.TopicCommand", "--list").splitlines()


def run_python(script: str, *arguments: str, path: Path | None = None) -> str:
    command = [sys.executable, "-W", "ignore", str(HERE / script), *arguments]
    env = {} if path is None else {"PYTHONPATH": str(path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_librdkafka_of_2021(broker: KafkaBroker, name: Name) -> None:
    """It finds the beginning and the end of a log with ListOffsets 0: without, it reads nothing."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("SKIPPED FOR WANT OF a librdkafka 1.7 for this machine")
    wheel = ("--only-binary=:all:", "--python-version", "3.8", "--implementation", "cp", "--abi", "cp38")
    library = pip_gives("confluent-kafka==1.7.0", *wheel, "--platform", "manylinux2010_x86_64")
    [file] = listed(library / "confluent_kafka.libs", "librdkafka*")
    said = run_python("librdkafka_of_2021.py", str(file), broker.address, name("t"), name("g"))
    assert said.split() == ["1.7.0", ",".join(map(str, range(10))), "10", "0", "10"]


def test_kafka_python_of_2020(broker: KafkaBroker, name: Name) -> None:
    if sys.version_info >= (3, 12):
        pytest.skip("SKIPPED FOR WANT OF Python 3.11: kafka-python 2.0.2 cannot be imported by a later one")
    library = pip_gives("kafka-python==2.0.2")
    said = run_python("kafka_python_of_2020.py", broker.address, name("t"), name("g"), path=library)
    assert json.loads(said) == {
        "partitions": 3,
        "retention": "200000",
        "offsets": [number // 3 for number in range(30)],
        "values": list(range(30)),
        "headers": [["h", "v"]],
        "committed": [10, 10, 10],
        "ends": [10, 10, 10],
        "by_time": [0, 0, 0],
        "state": "Stable",
        "stored": 30,
        "left": False,
    }
