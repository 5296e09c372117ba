"""On which event loops the tests run, and what holds for whatever a client sends."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What goes past the transport goes past two of them: they differ in when they write, and in what they let others
    wait for."""
    if item.path.name == "test_sending.py":
        return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture
def no_bug(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A client's mistake is answered or ends its connection by a check, not because something broke on the way."""
    caplog.set_level(logging.ERROR)
    yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []
