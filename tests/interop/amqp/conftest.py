from collections.abc import Iterator

import pytest

from tests.doors.amqp.running import Running


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    broker = Running(tmp_path_factory.mktemp("data"))
    yield broker
    broker.stop()
