"""The schema registry inside the broker. Over HTTP: tests/listeners/http/test_registry.py."""

import asyncio
import threading
from typing import Any, cast

import pytest

from headrace.broker.schemas.registry import Schemas
from headrace.errors import LogClosed

SECONDS = 30.0


async def test_the_event_loop_runs_while_a_stop_waits_for_a_schema_that_is_parsed() -> None:
    schemas = Schemas(*cast(Any, (None,) * 4))
    came, may_end = threading.Event(), threading.Event()

    def work() -> bool:
        came.set()
        return may_end.wait(SECONDS)

    task = asyncio.create_task(schemas._parsing._in_thread(work))
    await asyncio.to_thread(came.wait, SECONDS)
    closing = asyncio.ensure_future(schemas.close())
    asyncio.get_running_loop().call_soon(may_end.set)
    await closing
    assert await task, "the loop stood still until the schema gave up"
    with pytest.raises(LogClosed):
        await schemas._parsing._in_thread(work)
