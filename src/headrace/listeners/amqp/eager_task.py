"""Runs a coroutine immediately, up to its first wait: most method handlers never wait, and need no asyncio task."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


def _ignore(_error: BaseException | None) -> None: ...


class EagerTask:
    """One running coroutine. `done` is called with its error or None, unless it already ended in `start`."""

    __slots__ = ("_coroutine", "_done")

    def __init__(self, coroutine: Coroutine[Any, Any, None], done: Callable[[BaseException | None], None]) -> None:
        self._coroutine = coroutine
        self._done = done

    def start(self) -> bool:
        """True if the coroutine ended without waiting. Raises the errors of that part."""
        try:
            self._wait_for(self._coroutine.send(None))
        except StopIteration:
            return True
        return False

    def _wait_for(self, future: Any) -> None:
        if future is None:  # asyncio.sleep(0): resume in the next event-loop iteration
            asyncio.get_running_loop().call_soon(self._resume, None)
            return
        future._asyncio_future_blocking = False
        future.add_done_callback(self._resume)

    def _resume(self, _future: object) -> None:
        try:
            self._wait_for(self._coroutine.send(None))
        except StopIteration:
            self._done(None)
        except BaseException as error:  # noqa: BLE001 - passed on to the creator of the task
            self._done(error)

    def detach(self) -> None:
        """The connection is closed. The coroutine still runs to its end: a half-declared queue, in the catalog but
        not in memory, would be worse than one that no client waits for."""
        self._done = _ignore
