"""A fork copies sockets, locks and what waits to be sent, but no threads. What has such things is told in the child."""

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    def forked(self) -> None:
        """Called in the child: leave to the parent what is the parent's."""


_told: "weakref.WeakSet[Forked]" = weakref.WeakSet()


def tell(one: Forked) -> None:
    _told.add(one)


def _tell_all() -> None:
    for one in list(_told):
        one.forked()


os.register_at_fork(after_in_child=_tell_all)
