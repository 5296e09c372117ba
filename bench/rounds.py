"""What a round costs when it waits for nothing: `make bench ONLY=rounds`.

One append at a time, each a round of its own, on a disk in memory: what is left is the broker's thread, the one that
writes, and the calls that both make. With the caches warm: a broker that does something else meanwhile pays up to three
times as much; and so does one on two cores, whose threads wake each other (`taskset -c 0` for one). Beside it the same
calls from a loop that does nothing else. The cheapest of a few runs counts.
"""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

from bench import machine
from bench.log import batch, opened
from headrace.log.disk.io_chain import IoThread, Step, SyncFailure

IN_MEMORY = "/dev/shm"
RUNS = 6
ROUNDS = 2000
RECORD_BYTES = 100
RECORDS = (1, 160)
SECTOR = 512
SLOT_BYTES = 64


async def cheapest_us(begin: Callable[[Callable[[], None]], object]) -> float:
    """Of begin(ended), again and again."""
    loop = asyncio.get_running_loop()
    costs = []
    for _ in range(RUNS):
        done = loop.create_future()
        left = ROUNDS

        def ended(done: "asyncio.Future[None]" = done) -> None:
            nonlocal left
            left -= 1
            if left:
                loop.call_soon(begin, ended)
            else:
                done.set_result(None)

        before = time.process_time()
        begin(ended)
        await done
        costs.append((time.process_time() - before) / ROUNDS * 1e6)
    return min(costs)


async def rounds_us(folder: str, records: int) -> float:
    async with opened(folder, 1) as shard:
        log, data = shard.log(1), batch(records, RECORD_BYTES)

        def begin(ended: Callable[[], None]) -> None:
            log.append(data).add_callback(lambda _: ended())

        return await cheapest_us(begin)


async def floor_us(folder: str, records: int) -> float:
    """As a round of one log does it: the journal and its sync, its slot, the segment, the log's slot."""
    loop = asyncio.get_running_loop()
    data = bytes(batch(records, RECORD_BYTES))
    padding, slot = bytes(-len(data) % SECTOR), bytes(SLOT_BYTES)
    files = [os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT) for name in ("journal", "slots", "segment")]
    journal, slots, segment = files
    steps = [
        Step(journal, [data, padding]),
        Step(journal, None),
        Step(slots, [slot]),
        Step(segment, [data]),
        Step(slots, [slot], SLOT_BYTES),
    ]
    engine = IoThread(SyncFailure())
    waiting: list[Callable[[], None]] = []

    def begin(ended: Callable[[], None]) -> None:
        waiting.append(ended)
        engine.start(steps)

    def collect() -> None:
        if engine.collect() is not None:
            waiting.pop()()

    loop.add_reader(engine.fileno(), collect)
    try:
        return await cheapest_us(begin)
    finally:
        loop.remove_reader(engine.fileno())
        engine.close()
        for file in files:
            os.close(file)


def run() -> None:
    print(f"machine    {machine.describe()}")
    if not Path(IN_MEMORY).is_dir():
        print(f"NOTHING MEASURED: there is no disk in memory at {IN_MEMORY}")
        return
    for records in RECORDS:
        for name, measure in (("a round", rounds_us), ("its calls alone", floor_us)):
            folder = tempfile.mkdtemp(prefix="headrace-bench-", dir=IN_MEMORY)
            try:
                cost = uvloop.run(measure(folder, records))
            finally:
                shutil.rmtree(folder)
            print(f"{records:>4} x {RECORD_BYTES} B  {name:<16} {cost:6.1f} us of CPU", flush=True)


if __name__ == "__main__":
    run()
