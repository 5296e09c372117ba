from collections.abc import Iterator

import pytest

from headrace.config import Address
from tests.listeners.amqp.running import Running
from tests.ports import free_port


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A broker on a port that stays reserved while it is stopped."""
    broker = Running(tmp_path_factory.mktemp("data"), amqp=Address("127.0.0.1", free_port()))
    yield broker
    broker.stop()
