"""The parts of a vhost that its queues use."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.broker.queues.dead_lettering import DeadLettering
from headrace.broker.queues.flush import FlushCoordinator
from headrace.broker.queues.queue_counts import QueueCounts
from headrace.clock import Clock

if TYPE_CHECKING:
    from headrace.broker.queues.queue import Queue


@dataclass(frozen=True, slots=True, eq=False)
class VhostServices:
    """Shared by all queues of one vhost."""

    name: str
    loop: asyncio.AbstractEventLoop
    clock: Clock
    flushes: FlushCoordinator
    dead_letters: DeadLettering
    deleted_counts: QueueCounts  # of queues that were deleted
    delete_unused: "Callable[[Queue], asyncio.Task[None] | None]"  # of auto-delete and x-expires
