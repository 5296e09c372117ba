"""Fixtures of the Kafka listener's tests, and the event loops that they run on."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import pytest
import pytest_asyncio
import uvloop

from tests.listeners.kafka.world import Client, World, world_at


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Sending files bypasses the transport, so its tests run on both event loops: they differ in when a transport
    writes, and in which descriptors may be watched."""
    if item.path.name == "test_sending.py":
        return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """One broker for all tests of a module. The module may define SETTINGS for its configuration, and
    `async def prepare(world)` to create topics and users. A module that needs a broker per test overrides this fixture.
    """
    settings = getattr(request.module, "SETTINGS", {})
    async with world_at(tmp_path_factory.mktemp("broker"), **settings) as opened:
        prepare = getattr(request.module, "prepare", None)
        if prepare is not None:
            await prepare(opened)
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def client(world: World) -> Client:
    return await world.client()


@pytest.fixture
def no_bug(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A check must answer a client's mistake or close its connection: nothing may be logged as a bug."""
    caplog.set_level(logging.ERROR)
    yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []
