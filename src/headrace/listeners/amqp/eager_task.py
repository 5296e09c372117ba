"""Runs a coroutine at once, as far as it goes without waiting: most methods never wait, and need no task."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


def _nobody_cares(_error: BaseException | None) -> None: ...


class EagerTask:
    """One coroutine on its way. `done` is called with its error, or None, unless it ended in start."""

    __slots__ = ("_coroutine", "_done")

    def __init__(self, coroutine: Coroutine[Any, Any, None], done: Callable[[BaseException | None], None]) -> None:
        self._coroutine = coroutine
        self._done = done

    def start(self) -> bool:
        """True when it ended without waiting; errors of that part are raised here."""
        try:
            self._wait_for(self._coroutine.send(None))
        except StopIteration:
            return True
        return False

    def _wait_for(self, future: Any) -> None:
        if future is None:  # asyncio.sleep(0): a turn of the loop
            asyncio.get_running_loop().call_soon(self._step, None)
            return
        future._asyncio_future_blocking = False
        future.add_done_callback(self._step)

    def _step(self, _future: object) -> None:
        try:
            self._wait_for(self._coroutine.send(None))
        except StopIteration:
            self._done(None)
        except BaseException as error:  # noqa: BLE001 - whoever started it decides what it means
            self._done(error)

    def leave(self) -> None:
        """Its connection is gone. What was begun is finished all the same: a queue half declared, in the catalog and
        not in memory, would be worse than one that nobody waits for."""
        self._done = _nobody_cares
