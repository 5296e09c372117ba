"""The parts of a vhost that the components of its queues use; `queue.py QueueServices` adds what only queues use."""

import asyncio
from dataclasses import dataclass

from headrace.broker.queues.dead_lettering import DeadLettering
from headrace.broker.queues.flush import FlushCoordinator
from headrace.broker.queues.queue_counts import QueueCounts
from headrace.clock import Clock


@dataclass(frozen=True, slots=True, eq=False)
class VhostServices:
    """Shared by all queues of one vhost."""

    name: str
    loop: asyncio.AbstractEventLoop
    clock: Clock
    flushes: FlushCoordinator
    dead_letters: DeadLettering
    deleted_counts: QueueCounts  # of queues that were deleted
