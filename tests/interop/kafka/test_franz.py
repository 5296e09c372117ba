"""franz-go, the Go client with the newest parts of the protocol: transactions in both kinds of groups, share groups."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.interop.kafka.broker import KafkaBroker
from tests.interop.kafka.jars import go_program

SECONDS_MAX = 240  # a busy machine is slow, not wrong


def test_franz_go_transforms_exactly_once_shares_and_administers(
    broker: KafkaBroker, name: Callable[[str], str]
) -> None:
    program = go_program(Path(__file__).parent / "franz")
    command = [str(program), broker.address, name("franz")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "transformed -classic true lag 0",
        "transformed -new true lag 0",
        "groups classic true false",
        "groups consumer false true",
        "transactions 2",
        "shared 200 released 10 lag 0",
    ]
