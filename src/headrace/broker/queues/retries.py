"""Retry policies of queues: rejected messages wait in a delay log and return to the end of their queue.

The settle of the original and the append to the delay log are one atomic group, and so are the return and the settle in
the delay log: after a crash the message is in one of the two, never in neither and never in both.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from headrace.broker.queues.delays import DelayLog, Delays, Publishable, QueueFull
from headrace.broker.queues.flush import FlushCoordinator
from headrace.broker.queues.queue_arguments import QueueArguments
from headrace.broker.queues.view import View
from headrace.broker.types.message import RETRIES_MAX, Message
from headrace.clock import Clock
from headrace.errors import InvalidInput, StorageError
from headrace.record.amqp.properties import Int64

COUNT_HEADER = "x-retry-count"
# Names of delay logs. Exchanges cannot have them: clients cannot declare names that begin with "amq.".
STORED, IN_MEMORY = "amq.retry", "amq.retry.memory"
OWNER = "the retries of queues"


class RetryingQueue(Publishable, Protocol):
    policy: QueueArguments
    views: list[View]


class Retries:
    """The retries of one vhost. The durable log is created before the first policy or queue that needs it is stored."""

    def __init__(
        self,
        queues: Mapping[str, RetryingQueue],
        delays: Delays[Any],
        flushes: FlushCoordinator,
        clock: Clock,
    ) -> None:
        self._queues = queues
        self._delays = delays
        self._flushes = flushes
        self._clock = clock
        self._creating = asyncio.Lock()

    async def prepare(self) -> None:
        """Create the durable log unless it exists."""
        async with self._creating:
            if self._delays.log(STORED) is None:
                await self._delays.create_log(STORED, OWNER, self._return)

    async def prepare_if_used(self) -> None:
        """For a data folder of a version that stored these arguments without knowing them."""
        if any(queue.policy.retry_limit and queue.durable for queue in self._queues.values()):
            await self.prepare()

    def load(self) -> None:
        """Open the durable log when the broker starts."""
        self._delays.load_log(STORED, OWNER, self._return)

    async def remove(self) -> None:
        """The vhost is being deleted."""
        for name in (STORED, IN_MEMORY):
            await self._delays.remove_log(name)

    def keep(self, queue: str, policy: QueueArguments, view: View, offset: int, message: Message) -> bool:
        """Settle a rejected message and return it to its queue later; False if it has been retried often enough."""
        if message.retries >= min(policy.retry_limit or 0, RETRIES_MAX):
            return False
        attempt = message.retries + 1
        now_ms = self._clock.now_ms()
        log = self._log(view)
        keys = (message.routing_key, queue, view.key.hex())
        self._flushes.begin_atomic()
        try:
            log.add(_counted(message, attempt), now_ms + policy.retry_delay(attempt), now_ms, keys)
            view.settle(offset, offset + 1)
        finally:
            self._flushes.end_atomic()
        return True

    def _log(self, view: View) -> DelayLog:
        found = self._delays.log(STORED if view.durable else IN_MEMORY)
        if found is None and not view.durable:
            found = self._delays.open_memory_log(IN_MEMORY, OWNER, self._return)
        if found is None:
            raise StorageError("the log of messages that wait for a retry could not be created")
        return found

    def _return(self, message: Message, headers: dict[str, Any], keys: Sequence[str], now_ms: int) -> None:
        """Publish a message that is due to its queue, unless that has been deleted. A later queue of the same name has
        another key."""
        _, name, key = keys
        queue = self._queues.get(name)
        if queue is None or all(view.key.hex() != key for view in queue.views):
            return
        if queue.refuses(len(message.body)):
            raise QueueFull
        queue.publish(message, now_ms)


def _counted(message: Message, attempt: int) -> Message:
    message = replace(message, retries=attempt)
    try:
        return message.with_headers(**{COUNT_HEADER: Int64(attempt)})
    except InvalidInput:  # its properties cannot be encoded again
        return message
