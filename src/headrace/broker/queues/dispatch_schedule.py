"""When the consumers of a queue are served: once per event-loop iteration in which something changed."""

import asyncio
from collections.abc import Callable

from headrace.broker.queues.consumers import Consumers


class DispatchSchedule:
    """Owned by one Queue. `dispatch` must call `begin`."""

    __slots__ = ("_dispatch", "_is_closed", "_is_scheduled", "_loop", "consumers")

    def __init__(self, consumers: Consumers, loop: asyncio.AbstractEventLoop, dispatch: Callable[[], None]) -> None:
        self.consumers = consumers
        self._loop = loop
        self._dispatch = dispatch
        self._is_scheduled = False
        self._is_closed = False

    def wake(self) -> None:
        """Dispatch in the next iteration: there may be new messages, credit or consumers."""
        if not self._is_scheduled and not self._is_closed:
            self._is_scheduled = True
            self._loop.call_soon(self._dispatch)

    def begin(self) -> None:
        self._is_scheduled = False

    @property
    def is_serving(self) -> bool:
        """Whether consumers are served before anything else: messages that they take must not be dropped."""
        return self._is_scheduled and bool(self.consumers)

    def dispatch_now(self) -> None:
        """Dispatch now what is scheduled."""
        if self._is_scheduled:
            self._dispatch()

    def close(self) -> None:
        self._is_closed = True
