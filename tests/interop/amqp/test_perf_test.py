"""RabbitMQ's own load generator, PerfTest, unchanged, from Maven Central."""

import subprocess
from collections.abc import Iterator

import pytest

from tests.interop.kafka.jars import JAVA, classpath
from tests.listeners.amqp.running import Running, eventually

VERSION = "2.22.1"
SECONDS_MAX = 240
pytestmark = [pytest.mark.peer, pytest.mark.slow]


@pytest.fixture(scope="module")
def jars() -> str:
    return classpath(f"perf-test-{VERSION}", f"com.rabbitmq:perf-test:{VERSION}")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("data"))
    yield running
    running.stop()


def perf_test(broker: Running, jars: str, messages: int, *arguments: str) -> str:
    """Runs until every publisher has sent and every consumer has got its messages; what it printed."""
    stats = broker.server.broker.stats.listener("amqp")
    came, went = stats.messages_in, stats.messages_out
    command = [*JAVA, "-cp", jars, "com.rabbitmq.perf.PerfTest"]
    command += ["--uri", f"amqp://guest:guest@127.0.0.1:{broker.port}", "--id", "perf", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Producer reached message limit" in done.stdout, done.stdout
    assert "Consumer reached message limit" in done.stdout, done.stdout
    assert "Exception" not in done.stdout + done.stderr, done.stdout + done.stderr
    eventually(lambda: stats.messages_in - came >= messages, "all are counted that were published")
    eventually(lambda: stats.messages_out - went >= messages, "all are counted that were received")
    assert (stats.messages_in - came, stats.messages_out - went) == (messages, messages), "each once"
    return done.stdout


def test_publishers_and_consumers_with_confirms_and_acks_on_several_queues(broker: Running, jars: str) -> None:
    said = perf_test(
        broker,
        jars,
        2_000,
        *("-x", "2", "-y", "2", "-c", "50", "-q", "100", "-C", "1000", "-D", "1000", "--multi-ack-every", "10"),
        *("--queue-pattern", "perf-%d", "--queue-pattern-from", "1", "--queue-pattern-to", "2"),
        *("--queue-args", "x-max-length=100000,x-message-ttl=60000", "-f", "persistent", "-f", "mandatory"),
    )
    assert "confirm latency" in said
    queues = broker.server.broker.vhosts.get("/").queues
    eventually(lambda: not {"perf-1", "perf-2"} & queues.keys(), "auto-delete queues go with their consumers")


def test_a_quorum_queue_at_a_fixed_rate_with_json_bodies(broker: Running, jars: str) -> None:
    perf_test(
        broker,
        jars,
        500,
        *("--quorum-queue", "-u", "perf-quorum", "-c", "50", "-q", "50", "-C", "500", "-D", "500"),
        *("--rate", "1000", "--json-body", "--size", "400"),
    )
    queue = broker.queue("perf-quorum")
    assert queue.policy.kind == "quorum"
    eventually(lambda: (queue.ready, queue.unacked) == (0, 0), "the last acks come in with the end of the connection")


def test_a_queue_that_was_there_before(broker: Running, jars: str) -> None:
    with broker.channel() as channel:
        channel.queue_declare("perf-before", durable=True)
    perf_test(
        broker,
        jars,
        500,
        *("--predeclared", "-u", "perf-before", "-e", "amq.default", "-k", "perf-before"),
        *("-c", "10", "-C", "500", "-D", "500"),
    )
    queue = broker.queue("perf-before")
    eventually(lambda: (queue.ready, queue.unacked) == (0, 0), "nothing is left")


def test_a_stream(broker: Running, jars: str) -> None:
    arguments = ("--stream-queue", "-u", "perf-stream", "-c", "10", "-q", "100", "-C", "500", "-D", "500")
    perf_test(broker, jars, 500, *arguments)
