"""Apache Kafka's own Java client and command-line tools, from Maven Central."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop.kafka.broker import KafkaBroker
from tests.interop.kafka.jars import kafka_tools, run_java

pytestmark = [pytest.mark.peer, pytest.mark.slow]
Name = Callable[[str], str]
Tool = Callable[..., str]
TOOLS = "org.apache.kafka.tools"
TOPICS = f"{TOOLS}.TopicCommand"
PRODUCE = f"{TOOLS}.ConsoleProducer"
CONSUME = f"{TOOLS}.consumer.ConsoleConsumer"
GROUPS = f"{TOOLS}.consumer.group.ConsumerGroupCommand"
CONFIGS = "kafka.admin.ConfigCommand"


@pytest.fixture(scope="module")
def tool(broker: KafkaBroker) -> Tool:
    """Runs one of the tools against the broker; what it printed."""
    jars = kafka_tools()

    def run(name: str, *arguments: str, stdin: str = "") -> str:
        return run_java(jars, name, "--bootstrap-server", broker.address, *arguments, stdin=stdin)

    return run


def test_the_topic_tool_makes_describes_alters_and_deletes(tool: Tool, name: Name) -> None:
    topic = name("t")
    assert f"Created topic {topic}" in tool(
        TOPICS, "--create", "--topic", topic, "--partitions", "3", "--config", "retention.ms=100000"
    )
    tool(TOPICS, "--alter", "--topic", topic, "--partitions", "5")
    described = tool(TOPICS, "--describe", "--topic", topic)
    assert "PartitionCount: 5" in described
    assert "retention.ms=100000" in described
    assert topic in tool(TOPICS, "--list").splitlines()
    tool(TOPICS, "--delete", "--topic", topic)
    assert topic not in tool(TOPICS, "--list").splitlines()


def test_console_producer_and_consumer_and_the_group_tool(tool: Tool, name: Name) -> None:
    topic, group = name("t"), name("g")
    tool(PRODUCE, "--topic", topic, stdin="".join(f"line {number}\n" for number in range(100)))
    arguments = ("--topic", topic, "--group", group, "--max-messages", "100", "--timeout-ms", "90000")
    read = tool(CONSUME, *arguments, "--from-beginning")
    assert read.splitlines()[:100] == [f"line {number}" for number in range(100)]
    [line] = [one for one in tool(GROUPS, "--describe", "--group", group).splitlines() if one.startswith(group)]
    assert line.split()[1:6] == [topic, "0", "100", "100", "0"], "offset, end and lag"
    tool(GROUPS, "--group", group, "--reset-offsets", "--to-offset", "40", "--topic", topic, "--execute")
    [line] = [one for one in tool(GROUPS, "--describe", "--group", group).splitlines() if one.startswith(group)]
    assert line.split()[3:6] == ["40", "100", "60"]


def test_the_new_group_protocol_of_the_java_client(tool: Tool, name: Name) -> None:
    topic = name("t")
    tool(PRODUCE, "--topic", topic, stdin="a\nb\nc\n")
    arguments = ("--topic", topic, "--group", name("g"), "--max-messages", "3", "--timeout-ms", "90000")
    read = tool(CONSUME, *arguments, "--from-beginning", "--command-property", "group.protocol=consumer")
    assert read.splitlines()[:3] == ["a", "b", "c"]


def test_the_config_tool_sets_and_shows(tool: Tool, name: Name) -> None:
    topic = name("t")
    tool(TOPICS, "--create", "--topic", topic)
    which = ("--entity-type", "topics", "--entity-name", topic)
    tool(CONFIGS, "--alter", *which, "--add-config", "max.message.bytes=200000,cleanup.policy=compact")
    shown = tool(CONFIGS, "--describe", *which)
    assert "max.message.bytes=200000" in shown
    assert "cleanup.policy=compact" in shown


def test_the_performance_tools_run(tool: Tool, name: Name) -> None:
    topic = name("t")
    sent = tool(
        f"{TOOLS}.ProducerPerformance",
        *("--topic", topic, "--num-records", "50000", "--record-size", "100", "--throughput", "-1"),
    )
    assert "50000 records sent" in sent
    read = tool(f"{TOOLS}.ConsumerPerformance", "--topic", topic, "--num-records", "50000", "--timeout", "90000")
    assert float(read.splitlines()[-1].split(",")[4]) >= 50_000


def test_transactions_of_the_java_client_with_the_versions_we_offer(tool: Tool, name: Name) -> None:
    """Version 2 (KIP-890): each of them has an epoch of its own."""
    topic, transactional_id = name("t"), name("x")
    sent = tool(
        f"{TOOLS}.ProducerPerformance",
        *("--topic", topic, "--num-records", "2000", "--record-size", "100", "--throughput", "-1"),
        *("--transactional-id", transactional_id, "--transaction-duration-ms", "100"),
    )
    assert "2000 records sent" in sent
    described = tool(f"{TOOLS}.TransactionsCommand", "describe", "--transactional-id", transactional_id).splitlines()
    shown = dict(zip(described[0].split(), described[1].split(), strict=False))
    assert int(shown["ProducerEpoch"]) > 0 and shown["TransactionState"] == "CompleteCommit"
    committed = ("--command-property", "isolation.level=read_committed")
    read = tool(
        CONSUME, "--topic", topic, "--from-beginning", "--max-messages", "2000", "--timeout-ms", "90000", *committed
    )
    assert len(read.splitlines()) >= 2000


def test_a_java_producer_whose_transaction_timed_out_aborts_and_continues(
    broker: KafkaBroker, tool: Tool, name: Name
) -> None:
    topic = name("t")
    program = str(Path(__file__).parent / "LateProducer.java")
    assert run_java(kafka_tools(), program, broker.address, topic, name("x")) == "committed\n"
    committed = ("--command-property", "isolation.level=read_committed", "--max-messages", "1")
    read = tool(CONSUME, "--topic", topic, "--from-beginning", "--timeout-ms", "90000", *committed)
    assert read.splitlines()[0] == "in time"


def test_the_small_tools_run(tool: Tool, name: Name, tmp_path: Path) -> None:
    topic = name("t")
    tool(PRODUCE, "--topic", topic, stdin="a\nb\nc\n")
    assert f"{topic}:0:3" in tool(f"{TOOLS}.GetOffsetShell", "--topic", topic)
    assert topic in tool(f"{TOOLS}.LogDirsCommand", "--describe", "--topic-list", topic)
    offsets = tmp_path / "offsets.json"
    offsets.write_text(f'{{"version":1,"partitions":[{{"topic":"{topic}","partition":0,"offset":2}}]}}')
    assert "low_watermark: 2" in tool(f"{TOOLS}.DeleteRecordsCommand", "--offset-json-file", str(offsets))


def test_a_java_admin_can_read_the_documentation_of_settings(broker: KafkaBroker, tool: Tool, name: Name) -> None:
    """None had a text. Consoles show it beside the setting."""
    topic = name("t")
    tool(TOPICS, "--create", "--topic", topic)
    program = str(Path(__file__).parent / "SettingsExplained.java")
    for kind, resource in (("TOPIC", topic), ("BROKER", "1"), ("GROUP", name("g"))):
        said = [line.split() for line in run_java(kafka_tools(), program, broker.address, kind, resource).splitlines()]
        assert {explained for wanted, _, explained in said if wanted == "false"} == {"false"}, kind
        assert [setting for wanted, setting, explained in said if (wanted, explained) == ("true", "false")] == [], kind
        assert len(said) > 20, kind


def test_the_topic_tool_describes_a_topic_by_its_id(tool: Tool, name: Name) -> None:
    """The client sends the id with an empty name, which was answered with INVALID_TOPIC_EXCEPTION."""
    topic = name("t")
    tool(TOPICS, "--create", "--topic", topic, "--partitions", "2")
    described = tool(TOPICS, "--describe", "--topic", topic)
    topic_id = described.split("TopicId: ")[1].split()[0]
    by_id = tool(TOPICS, "--describe", "--topic-id", topic_id)
    assert by_id.splitlines()[0] == described.splitlines()[0]
    assert len(by_id.splitlines()) == 3, "the topic and its partitions"


def test_a_java_consumer_that_subscribes_by_pattern_reads_all_matching_topics(
    broker: KafkaBroker, tool: Tool, name: Name
) -> None:
    """It looks up the names of its topics by id. It never had an assignment and sent thousands of requests a second."""
    prefix = name("t")
    for number in range(2):
        tool(PRODUCE, "--topic", f"{prefix}-{number}", stdin=f"value {number}\n")
    program = str(Path(__file__).parent / "PatternConsumer.java")
    read = run_java(kafka_tools(), program, broker.address, name("g"), f"{prefix}-.*", "2")
    assert sorted(read.splitlines()) == ["value 0", "value 1"]


def test_the_feature_tool_shows_the_features_of_kafka(tool: Tool) -> None:
    lines = tool(f"{TOOLS}.FeatureCommand", "describe").splitlines()
    found = {
        line.split()[1]: line.split("FinalizedVersionLevel: ")[1].split()[0] for line in lines if "Feature:" in line
    }
    assert found == {
        "group.version": "1",
        "metadata.version": "4.3-IV0",
        "share.version": "1",
        "transaction.version": "2",
    }


def test_the_config_tool_changes_the_defaults_of_topics(own_broker: KafkaBroker, name: Name) -> None:
    """Every change was refused. A change is kept before it is answered, so that a kill does not undo it."""
    topic = name("t")

    def tool(command: str, *arguments: str) -> str:
        return run_java(kafka_tools(), command, "--bootstrap-server", own_broker.address, *arguments)

    tool(TOPICS, "--create", "--topic", topic)
    of_cluster, of_node = (
        ("--entity-type", "brokers", "--entity-default"),
        ("--entity-type", "brokers", "--entity-name", "1"),
    )
    tool(CONFIGS, "--alter", *of_cluster, "--add-config", "log.retention.ms=123456")
    tool(CONFIGS, "--alter", *of_node, "--add-config", "message.max.bytes=200000")
    own_broker.kill()
    own_broker.start()
    assert "log.retention.ms=123456" in tool(CONFIGS, "--describe", *of_cluster)
    assert "message.max.bytes=200000" in tool(CONFIGS, "--describe", *of_node)
    shown = tool(CONFIGS, "--describe", "--entity-type", "topics", "--entity-name", topic, "--all")
    assert "retention.ms=123456" in shown and "max.message.bytes=200000" in shown
