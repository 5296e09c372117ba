"""The log alone: appends, reads, lookups, compaction, many logs under rounds, recovery."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator

from bench.machine import Limits, warm_page_cache
from bench.result import Result
from headrace.clock import SystemClock
from headrace.log.log import Log
from headrace.log.settings import LogSettings, StreamSettings
from headrace.log.shard import LogSpec, Shard
from headrace.record import codec

MB = 1 << 20
WARM_SPARE_MB = 200
OUTSTANDING_BYTES = 8 * MB  # staged and not yet durable: enough to keep the disk busy, little enough to stay in caches


def batch(count: int, size: int) -> bytearray:
    body = os.urandom(size)
    return codec.build([(b"key%05d" % i, body, (), 1_700_000_000_000 + i) for i in range(count)])


@contextlib.asynccontextmanager
async def opened(folder: str, logs: int, **stream: object) -> AsyncIterator[Shard]:
    loop = asyncio.get_running_loop()
    specs = [LogSpec(i + 1, "bench", StreamSettings(**stream)) for i in range(logs)]  # type: ignore[arg-type]
    shard, _ = Shard.open(
        folder,
        LogSettings(),
        logs=specs,
        clock=SystemClock(),
        post=loop.call_soon_threadsafe,
        defer=loop.call_soon,
        watch=lambda file, call: loop.add_reader(file, call) if call else loop.remove_reader(file),
        make_future=loop.create_future,
    )
    try:
        yield shard
    finally:
        closed = loop.create_future()
        shard.close(closed.set_result)
        await closed
        shard.join()


async def fill(shard: Shard, logs: list[Log], pattern: bytearray, count: int, total: int) -> None:
    """Append total records without waiting for each, never more than OUTSTANDING_BYTES ahead of the disk."""
    window = asyncio.Semaphore(max(1, OUTSTANDING_BYTES // len(pattern)))
    ahead = max(1, OUTSTANDING_BYTES // len(pattern))
    for number in range(total // count):
        await window.acquire()
        logs[number % len(logs)].append(bytearray(pattern)).add_callback(lambda _: window.release())
    for _ in range(ahead):
        await window.acquire()


async def append(limits: Limits, size: int, count: int, total: int) -> Result:
    folder = tempfile.mkdtemp(prefix="headrace-bench-")
    # For each row: a virtual machine returns free pages within seconds, and the next row would pay for them.
    warm_page_cache(folder, 2 * total * size // MB + WARM_SPARE_MB)
    try:
        async with opened(folder, 1) as shard:
            pattern = batch(count, size)
            await fill(shard, [shard.log(1)], pattern, count, min(total, 20 * count))
            cpu, began = time.process_time(), time.perf_counter()
            await fill(shard, [shard.log(1)], pattern, count, total)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - began
        per_million = cpu / total * 1e6
        floor = total * len(pattern) / count / MB / limits.page_cache_write_mb_per_cpu_s / total * 1e6
        bar = "<= 1.5" if (size, count) == (1000, 60) else ""
        return Result(
            f"append {size} B in batches of {count}: {total / wall:,.0f}/s confirmed",
            per_million,
            "CPU-s/M",
            f"{per_million / floor:.1f} x page-cache write",
            bar,
            per_million <= 1.5 if bar else None,
        )
    finally:
        shutil.rmtree(folder)


async def reads(limits: Limits, total: int = 400_000) -> list[Result]:
    results = []
    for count in (60, 1):
        folder = tempfile.mkdtemp(prefix="headrace-bench-")
        try:
            async with opened(folder, 1) as shard:
                log = shard.log(1)
                amount = total if count > 1 else total // 4
                pattern = batch(count, 1000)
                await fill(shard, [log], pattern, count, amount)
                results += _sequential(log, limits) if count > 1 else []
                results += _random(log, count)
                results += _lookups(log) if count == 1 else []
        finally:
            shutil.rmtree(folder)
    return results


def _sequential(log: Log, limits: Limits) -> list[Result]:
    for _ in range(2):  # the first pass warms the page cache
        cpu, began = time.process_time(), time.perf_counter()
        offset = size = 0
        while offset < log.visible_end:
            chunk = log.read(offset, MB)
            size += len(chunk.data)
            offset = chunk.next_offset
        cpu, wall = time.process_time() - cpu, time.perf_counter() - began
    rate = size / 1e9 / cpu
    text = f"sequential read with CRC, 1 KB: {offset / wall:,.0f}/s, {size / 1e9 / wall:.2f} GB/s"
    ratio = f"{size / MB / cpu / limits.page_cache_read_mb_per_cpu_s:.2f} of page-cache read"
    return [Result(text, rate, "GB/CPU-s", ratio, ">= 1", rate >= 1)]


def _random(log: Log, count: int) -> list[Result]:
    rng = random.Random(7)
    offsets = [rng.randrange(log.visible_end) for _ in range(50_000)]
    began = time.perf_counter()
    for offset in offsets:
        log.read(offset, 1)
    rate = len(offsets) / (time.perf_counter() - began)
    bar = ">= 100,000" if count == 1 else ""
    name = f"random read of one record, 1 KB in batches of {count}"
    return [Result(name, rate, "reads/s", "", bar, rate >= 100_000 if bar else None)]


def _lookups(log: Log) -> list[Result]:
    reader, segment = log._reader, log.segments[0]
    rng = random.Random(7)
    offsets = [rng.randrange(segment.base, segment.next_offset) for _ in range(200_000)]
    find = reader.find_position
    began = time.perf_counter()
    for offset in offsets:
        find(segment, offset)
    rate = len(offsets) / (time.perf_counter() - began)
    return [Result("index lookup (offset to file position)", rate, "lookups/s", "", ">= 1,000,000", rate >= 1e6)]


async def compaction(total: int) -> list[Result]:
    """A fifth as many keys as records, at random, and a loop that wants to go on meanwhile."""
    folder = tempfile.mkdtemp(prefix="headrace-bench-")
    rng, body, count = random.Random(7), os.urandom(100), 100
    try:
        async with opened(folder, 1, segment_size=16 * MB, cleanup_policy="compact") as shard:
            log = shard.log(1)
            for _ in range(total // count):
                rows = [(b"key%07d" % rng.randrange(total // 5), body, (), 1_700_000_000_000) for _ in range(count)]
                await log.append(codec.build(rows))
            ended = asyncio.get_running_loop().create_future()
            cpu, late, looked = time.process_time(), 0.0, time.perf_counter()
            shard.maintenance.compact(log, lambda gained, error: ended.set_result((gained, error)))
            while not ended.done():
                await asyncio.sleep(0.001)
                now = time.perf_counter()
                late, looked = max(late, now - looked - 0.001), now
            cpu = time.process_time() - cpu
            gained, error = ended.result()
            assert error is None, error
    finally:
        shutil.rmtree(folder)
    share = gained.records_after / gained.records_before
    name = f"compaction of {total:,} records of 100 B in batches of {count}, {share:.0%} stay"
    return [Result(name, cpu / total * 1e6, "CPU-s/M", f"the loop at most {late * 1000:.1f} ms late", "", None)]


async def rounds(seconds: float = 3.0) -> list[Result]:
    """Confirmed rate with 1 to 1,000 logs written in turn, 100 B in batches of 10, 2,000 batches outstanding."""
    results: list[Result] = []
    one = 0.0
    for logs in (1, 10, 100, 1000):
        folder = tempfile.mkdtemp(prefix="headrace-bench-")
        try:
            async with opened(folder, logs) as shard:
                rate, cpu_per_million = await _in_turn(shard, logs, seconds)
                one = one or rate
                bar = ">= 0.5 x one" if logs == 100 else ""
                counters = shard.counters
                name = f"{logs} logs in turn ({counters.records_written / counters.rounds:,.0f} records per round)"
                ratio = f"{rate / one:.2f} x one log; {cpu_per_million:.2f} CPU-s/M"
                results.append(Result(name, rate, "confirmed/s", ratio, bar, rate >= one / 2 if bar else None))
        finally:
            shutil.rmtree(folder)
    return results


async def _in_turn(shard: Shard, logs: int, seconds: float) -> tuple[float, float]:
    pattern, window = batch(10, 100), 2000
    targets = [shard.log(i + 1) for i in range(logs)]
    for log in targets:
        log.append(bytearray(pattern))  # makes the folder and the first file
    await targets[-1].append(bytearray(pattern))
    gate = asyncio.Semaphore(window)
    sent = 0
    cpu, began = time.process_time(), time.perf_counter()
    while time.perf_counter() - began < seconds:
        await gate.acquire()
        targets[sent % logs].append(bytearray(pattern)).add_callback(lambda _: gate.release())
        sent += 1
    for _ in range(window):
        await gate.acquire()
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    return sent * 10 / wall, cpu / (sent * 10) * 1e6


def recovery(records: int) -> list[Result]:
    """Opening a log of 1 KB records after a clean stop, and after a kill with writes since the checkpoint."""
    folder = tempfile.mkdtemp(prefix="headrace-bench-")
    try:
        _write_in_child(folder, records, kill=False)
        report = _open_in_child(folder)
        millions = records // 1_000_000
        clean = f"open {millions} M records of 1 KB after a clean stop"
        results = [Result(clean, report, "s", "", "<= 1 s", report <= 1)]
        written_gb = _write_in_child(folder, 1_000_000, kill=True)
        seconds = _open_in_child(folder)
        allowed = 1 + 1.5 * written_gb
        name = f"open {millions} M + 1 M records after a kill, {written_gb:.2f} GB since the checkpoint"
        results.append(Result(name, seconds, "s", "", f"<= {allowed:.1f} s", seconds <= allowed))
        return results
    finally:
        shutil.rmtree(folder)


def _write_in_child(folder: str, records: int, *, kill: bool) -> float:
    """Returns how many GB were written since the last checkpoint when the child died."""
    command = [sys.executable, "-m", "bench.log", "write", folder, str(records), "kill" if kill else "stop"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError(done.stderr)
    return float(done.stdout.split()[-1])


def _open_in_child(folder: str) -> float:
    done = subprocess.run(
        [sys.executable, "-m", "bench.log", "open", folder], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


async def _child_write(folder: str, records: int, kill: bool) -> None:
    async with opened(folder, 1) as shard:
        await fill(shard, [shard.log(1)], batch(60, 1000), 60, records)
        since = shard.checkpoint_bytes_since / 1e9
        print(since, flush=True)
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)


async def _child_open(folder: str) -> None:
    began = time.perf_counter()
    async with opened(folder, 1) as shard:
        seconds = time.perf_counter() - began
        assert shard.log(1).visible_end > 0
        print(seconds, flush=True)


async def run(limits: Limits, *, quick: bool) -> list[Result]:
    scale = 4 if quick else 1
    results = []
    for size in (100, 1000):
        for count, total in ((1, 100_000), (60, 600_000), (1000, 2_000_000 if size == 100 else 600_000)):
            results.append(await append(limits, size, count, total // scale // count * count))
    results += await reads(limits, 400_000 // scale)
    results += await compaction(1_000_000 // scale)
    results += await rounds(1.0 if quick else 3.0)
    return results


if __name__ == "__main__":
    if sys.argv[1] == "write":
        asyncio.run(_child_write(sys.argv[2], int(sys.argv[3]), sys.argv[4] == "kill"))
    else:
        asyncio.run(_child_open(sys.argv[2]))
