"""What a group needs of an event loop, so that tests can hold time still."""

from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> object: ...


class Timers(Protocol):
    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        """As asyncio's loop does it: callback on the owner thread after delay seconds."""
