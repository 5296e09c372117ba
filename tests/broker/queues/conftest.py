from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.broker.broker import Broker
from headrace.broker.vhosts.vhost import VirtualHost
from tests.broker.queue_world import opened


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with opened(tmp_path) as made:
        yield made


@pytest.fixture
def host(broker: Broker) -> VirtualHost:
    return broker.vhosts.get("/")
