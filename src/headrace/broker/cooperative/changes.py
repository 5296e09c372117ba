"""Changes that go to the end once begun.

A client can have its request cancelled, by hanging up or with bytes that are no request, while the disk is at work for
it. What is on disk would then not be in memory: a user that is removed would go on until the next start.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_under_way: set["asyncio.Task[Any]"] = set()  # the loop itself only remembers them weakly


def to_the_end(
    change: Callable[Parameters, Coroutine[Any, Any, Result]],
) -> Callable[Parameters, Coroutine[Any, Any, Result]]:
    @wraps(change)
    async def whole(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        task = asyncio.ensure_future(change(*arguments, **options))
        _under_way.add(task)
        task.add_done_callback(_under_way.discard)
        return await asyncio.shield(task)

    return whole
