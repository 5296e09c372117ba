from collections.abc import Iterator

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.listeners.amqp.running import Running


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One broker for all tests of a module. Each test uses its own queue names."""
    broker = Running(tmp_path_factory.mktemp("data"))
    yield broker
    broker.stop()


@pytest.fixture
def channel(running: Running) -> Iterator[BlockingChannel]:
    connection = running.connect()
    yield connection.channel()
    if connection.is_open:
        connection.close()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A queue name that no other test uses."""
    return str(request.node.name)[:200]
