"""Renders messages as JSON in small steps: large ones in a thread, the others with pauses for the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec

from headrace.broker.cooperative import YieldEvery
from headrace.errors import RecordTooLarge
from headrace.listeners.http.server.memory_budget import BudgetShare
from headrace.record.types import Record
from headrace.wire.http import messages

T = TypeVar("T")
Pieces = list[bytes]  # of one message
# One thread, so that the memory of one message at a time is taken beside what the budget has admitted.
READ_EXECUTOR = ThreadPoolExecutor(1, "http-read")
STEP_MESSAGES, STEP_BYTES = 32, 32 * 1024  # rendered between two looks at the clock
# A page of binary messages, or of short ones, takes up to twice its bytes. Only control characters take more: the page
# then ends earlier.
JSON_RATIO = 2


async def in_read_thread(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(READ_EXECUTOR, work)


async def render_messages(
    partition: int, records: Sequence[Record], *, binary: bool, bytes_max: int, json_bytes_max: int, share: BudgetShare
) -> list[Pieces]:
    """The JSON of the messages, each in pieces. Fewer than the records if they would take much more than bytes_max,
    for which the share has been taken.

    A message that takes more than json_bytes_max raises RecordTooLarge if it is the first. The memory is admitted
    before a large message is rendered."""
    rendered: list[Pieces] = []
    total = step = 0
    turns, held = YieldEvery(), bytes_max
    for number, record in enumerate(records):
        size = messages.record_bytes(record)
        if size <= messages.LARGE_BYTES:
            pieces = [msgspec.json.encode(messages.render(partition, record, binary=binary))]
            size = len(pieces[0])
        else:
            size = await in_read_thread(partial(messages.large_size, record, binary=binary))
            if size > json_bytes_max:
                if rendered:
                    break
                raise RecordTooLarge(record.offset, size, json_bytes_max, partition=partition, form="as JSON")
            pieces = []
        total += size
        if rendered and total > max(JSON_RATIO * bytes_max, messages.LARGE_BYTES):
            break
        if total > held:
            share.take_chunk(total - held)
            held = total
        rendered.append(
            pieces or await in_read_thread(partial(messages.render_large, partition, record, binary=binary))
        )
        step += size
        if step >= STEP_BYTES or number % STEP_MESSAGES == STEP_MESSAGES - 1:
            step = 0
            await turns.maybe_yield()
    return rendered
