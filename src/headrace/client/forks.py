"""Fork safety: a fork copies sockets, locks and waiting messages, but no threads.

Objects that hold such things register here; their `forked` method runs in every child process.
"""

import os
import weakref
from typing import Protocol


class ForkAware(Protocol):
    def forked(self) -> None:
        """Runs in the child process: give up whatever belongs to the parent."""


_registered: "weakref.WeakSet[ForkAware]" = weakref.WeakSet()


def register(one: ForkAware) -> None:
    _registered.add(one)


def _after_fork_in_child() -> None:
    for one in list(_registered):
        one.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
