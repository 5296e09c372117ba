from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.listeners.http import listener as http_listener
from headrace.listeners.http.server.bounded_protocol import Timeouts
from tests.listeners.http.live import Live, StartLive
from tests.listeners.http.registries import Registry


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One server for the tests of a module; each test uses its own topics."""
    server = Live(tmp_path_factory.mktemp("data"))
    yield server
    server.stop()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[StartLive]:
    """Starts servers for one test; all are stopped at its end."""
    started: list[Live] = []

    class Own(Live):
        def __init__(self, folder: Path = tmp_path / "data", **settings: object) -> None:
            super().__init__(folder, **settings)
            started.append(self)

    yield Own
    for server in started:
        server.stop()


@pytest.fixture
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No head timeout, so that silent connections survive a test that is delayed."""
    monkeypatch.setattr(http_listener, "Timeouts", lambda: Timeouts(head=1e5))


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    import re

    return re.sub(r"[^a-zA-Z0-9._-]", "-", request.node.name)[:200]


@pytest.fixture
def registry(own: StartLive) -> Registry:
    return Registry(own())


@pytest.fixture
def shared(live: Live) -> Iterator[Registry]:
    """For tests that use their own subjects."""
    yield Registry(live)
