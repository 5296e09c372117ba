from collections.abc import Iterator
from typing import Any, Protocol

import httpx
import pytest

from headrace.config import Address
from tests.listeners.http.live import Live


class Api(Protocol):
    """A broker that responds to HTTP requests, in this process or in another."""

    def request(self, method: str, path: str, **options: Any) -> httpx.Response: ...

    def get(self, path: str) -> httpx.Response: ...


class Served(Live):
    """All listeners on free ports."""

    @property
    def amqp_port(self) -> int:
        return int(self.server.listeners["amqp"].addresses[0].rpartition(":")[2])

    @property
    def amqp_url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.amqp_port}/%2F"

    @property
    def kafka(self) -> str:
        return str(self.server.listeners["kafka"].addresses[0])


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One broker per module; each test uses its own names."""
    server = Served(tmp_path_factory.mktemp("data"), amqp=Address("localhost", 0), kafka=Address("localhost", 0))
    yield server
    server.stop()
