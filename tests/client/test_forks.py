"""Programs fork with a client at hand (Celery, gunicorn, multiprocessing): parent and child both go on with it."""

import subprocess
import sys

from headrace import Consumer
from tests.cli.running import Broker

# A process that hangs is killed, so its exit code is not 0.
CHILD = """
import os, signal, socket, sys
import headrace

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(50)
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def run(script: str, *args: str) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD + script, *args], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_producer_works_in_parent_and_child_after_a_fork(broker: Broker) -> None:
    """The thread that sends was the parent's alone: the child waited for ever."""
    run(
        """
with headrace.Producer("forked", sys.argv[1]) as producer:
    producer.publish("parent")
    in_child(lambda: producer.publish("child"))
    in_child(producer.close)
    producer.publish("parent again")
""",
        broker.url,
    )
    with Consumer("forked", broker.url) as consumer:
        assert [m.value for m in consumer.until_end()] == [b"parent", b"child", b"parent again"]


def test_messages_pending_at_a_fork_are_sent_by_the_parent() -> None:
    run(
        """
with socket.create_server(("127.0.0.1", 0)) as silent:
    producer = headrace.Producer("t", f"http://127.0.0.1:{silent.getsockname()[1]}", buffer_bytes=1)
    producer.send("under way")
    producer.send("waits")
    in_child(producer.flush)
    in_child(producer.close)
    os._exit(0)
"""
    )


def test_parent_and_child_do_not_share_a_connection(broker: Broker) -> None:
    """Each would read what was answered to the other."""
    run(
        """
with headrace.Client(sys.argv[1]) as client:
    def names():
        client.get("/health")
        return client._connection._socket.getsockname()

    before = names()
    def child():
        assert names() != before
    in_child(child)
""",
        broker.url,
    )
