"""The AMQP listener beside RabbitMQ: `make bench ONLY=amqp`, or `python -m bench.amqp` with its options.

CPU-seconds of the broker per million messages, rates, latencies, memory and restarts. The load generator is
compiled (bench/amqp_load.c). RabbitMQ is the machine's own package, started here on a free port with a data folder of
its own, with classic and with quorum queues; without it only our rows are printed. All messages are persistent and
confirmed: on disk, with ours. Windows are in the names of the rows.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.amqp_peers import RABBITMQ, Load, Peer, headrace, rabbitmq
from bench.machine import describe, fdatasync_ms, warm_page_cache
from bench.result import Result, number

PEER_SHARE = 20  # a peer gets this part of the messages: its rate does not depend on the count
LATENCY_RATES = (5_000, 50_000)
PEER_RATE_MAX = 5_000  # beyond it RabbitMQ does not keep up on two cores, and the figure is its backlog
SYNC_BAR = 2.5  # confirm p50, as a multiple of the median fdatasync of the same run
MEMORY_BAR_MB = 100
FURTHER_BAR_BYTES = 1.0
CROWD = 20
PACED_RATE = 50_000


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    kind: str  # publish, consume, both
    size: int
    count: int  # ours; peers get a part of it, they are slower
    publishers: int = 1
    window: int = 5000
    consumers: int = 1
    prefetch: int = 1000
    queues: int = 1
    bar: float = 0.0
    times: tuple[int, int] = (1, 1)  # less CPU than a classic and than a quorum queue, at least


ROWS = [
    Row("publish 100 B, bulk (1 connection, window 5000)", "publish", 100, 1_000_000, bar=1.0, times=(40, 20)),
    Row("consume 100 B with an ack each, bulk (prefetch 1000)", "consume", 100, 1_000_000, bar=0.3, times=(80, 30)),
    Row("both at once 100 B, bulk", "both", 100, 1_000_000, bar=1.5, times=(30, 20)),
    Row("publish 1 KB, bulk", "publish", 1024, 300_000, bar=3.5, times=(15, 8)),
    Row("consume 1 KB with an ack each, bulk", "consume", 1024, 300_000, bar=1.2, times=(25, 10)),
    Row("both at once 1 KB, bulk", "both", 1024, 300_000, bar=5.0, times=(12, 8)),
    Row("10 publishers + 10 consumers, window 100", "both", 100, 500_000, 10, 100, 10, 100, bar=4.0, times=(12, 10)),
    Row("50 connections, window 10, 100 B", "publish", 100, 200_000, 50, 10, bar=4.5, times=(12, 7)),
    Row("50 connections, window 1, 100 B", "publish", 100, 40_000, 50, 1, bar=35.0, times=(3, 2)),
    Row("100 queues round robin, 100 B", "publish", 100, 400_000, queues=100, bar=3.0, times=(15, 15)),
]


@dataclass(frozen=True, slots=True)
class Run:
    """What every part of the benchmark needs."""

    load: Load
    folder: str
    quick: bool
    peers: bool


def run_row(load: Load, peer: Peer, row: Row, count: int) -> tuple[float, float]:
    """(CPU-s per million, messages per second)."""

    def publish() -> float:
        return load.wait(
            load.start(peer, "publish", count=count, size=row.size, connections=row.publishers, window=row.window,
                       queues=row.queues)
        ).rate  # fmt: skip

    peer.declare("bench", row.queues)
    if row.kind == "consume":
        load.publish(peer, count, row.size)
    before = peer.cpu_s()
    if row.kind == "publish":
        rate = publish()
    else:
        consumer = load.start(
            peer, "consume", count=count, size=row.size, connections=row.consumers, window=row.prefetch
        )
        if row.kind == "both":
            publish()
        rate = load.wait(consumer).rate
    cpu = peer.cpu_s() - before
    peer.delete("bench", row.queues)
    return cpu * 1e6 / count, rate


def work(run: Run) -> Iterator[Result]:
    """The rows of the design: CPU per million messages, and the rate."""
    chosen = [(row, row.count // (4 if run.quick else 1)) for row in ROWS]
    ours: dict[str, tuple[float, float]] = {}
    with headrace(run.folder) as peer:
        run_row(run.load, peer, ROWS[0], 200_000)  # buffers and page cache are warm before the first figure
        for row, count in chosen:
            runs = sorted(run_row(run.load, peer, row, count) for _ in range(1 if run.quick else 3))
            ours[row.name] = runs[len(runs) // 2]
    theirs: dict[str, list[tuple[str, float, float]]] = {row.name: [] for row in ROWS}
    if run.peers:
        with rabbitmq(run.folder) as both:
            for row, count in chosen:
                for peer in both:
                    cpu, rate = run_row(run.load, peer, row, max(2000, count // PEER_SHARE))
                    theirs[row.name].append((peer.name, cpu, rate))
    for row, _ in chosen:
        cpu, rate = ours[row.name]
        yield Result(f"AMQP {row.name}", cpu, "CPU-s/M", f"{rate:,.0f} msg/s", f"<= {row.bar}", cpu <= row.bar)
        for (name, their_cpu, their_rate), times in zip(theirs[row.name], row.times, strict=False):
            yield Result(f"  {name}: {their_cpu:.1f} CPU-s/M, {their_rate:,.0f} msg/s", their_cpu / cpu, "times ours",
                         f"we are {rate / their_rate:.0f} times as fast", f">= {times}",
                         their_cpu / cpu >= times)  # fmt: skip


def latency(run: Run) -> Iterator[Result]:
    """Confirm latency at a fixed rate, 10 connections, 1 KB, from when a message was due. Ours, the machine's
    fdatasync and RabbitMQ's take turns, so that what disturbs one disturbs them all."""
    seconds, turns = (2.0, 2) if run.quick else (5.0, 3)
    syncs: list[float] = []
    seen: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with contextlib.ExitStack() as stack:
        brokers = [stack.enter_context(headrace(run.folder))]
        if run.peers:
            brokers += stack.enter_context(rabbitmq(run.folder))
        for _ in range(turns):
            for peer in brokers:
                for rate in LATENCY_RATES:
                    if peer is not brokers[0] and rate > PEER_RATE_MAX:
                        continue
                    syncs += fdatasync_ms(run.folder)
                    peer.declare("bench")
                    got = run.load.publish(peer, int(rate * seconds), 1024, 10, rate=rate)
                    peer.delete("bench")
                    seen.setdefault((peer.name, rate), []).append((got.p50_ms, got.p99_ms))
    sync_ms = statistics.median(syncs)
    yield Result("fdatasync of 4 KB, p50 of the same run", sync_ms, "ms", f"p99 {quantile(syncs, 0.99):.2f} ms")
    medians = {key: tuple(statistics.median(one[at] for one in runs) for at in (0, 1)) for key, runs in seen.items()}
    quorum = medians.get(("rabbitmq quorum", PEER_RATE_MAX))
    for (name, rate), (p50, p99) in medians.items():
        if name != "headrace":
            yield Result(f"  {name} confirm p50 at {rate:,} msg/s", p50, "ms", f"p99 {p99:.2f} ms")
            continue
        bar = SYNC_BAR * sync_ms
        yield Result(f"AMQP confirm p50 at {rate:,} msg/s", p50, "ms", f"{p50 / sync_ms:.1f} x fdatasync",
                     f"<= {bar:.2f}", p50 <= bar)  # fmt: skip
        if rate <= PEER_RATE_MAX and quorum is not None:
            yield Result(f"AMQP confirm p99 at {rate:,} msg/s", p99, "ms", "the bar is a quorum queue's",
                         f"<= {quorum[1]:.2f}", p99 <= quorum[1])  # fmt: skip
        else:
            yield Result(f"AMQP confirm p99 at {rate:,} msg/s", p99, "ms")


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[int(len(values) * part)]


def backlog(run: Run) -> Iterator[Result]:
    """Memory with a million queued messages, what a further one costs, and how long a start with them takes."""
    count, step, steps = (250_000, 125_000, 4) if run.quick else (1_000_000, 500_000, 6)
    shutil.rmtree(f"{run.folder}/headrace", ignore_errors=True)
    with headrace(run.folder) as peer:
        peer.declare("bench")
        empty = peer.rss_mb()
        run.load.publish(peer, count, 1024)
        full = peer.rss_mb()
        seen = [full]
        for _ in range(steps):
            run.load.publish(peer, step, 1024)
            seen.append(peer.rss_mb())
        # The allocator's ups and downs are several megabytes: a line through many looks, not the difference of two.
        each = statistics.linear_regression(range(len(seen)), seen).slope * (1 << 20) / step
    opened = _start_s(run.folder)
    killed = _start_s(run.folder, after_kill=True)
    queued = f"{count + step * steps:,} queued 1 KB messages"
    yield Result(f"AMQP memory with {count:,} queued 1 KB messages", full, "MB", f"{empty:.0f} MB when empty",
                 f"<= {MEMORY_BAR_MB}", full <= MEMORY_BAR_MB)  # fmt: skip
    yield Result("AMQP memory for each further message", each, "bytes", f"of {step * steps:,}",
                 f"<= {FURTHER_BAR_BYTES}", each <= FURTHER_BAR_BYTES)  # fmt: skip
    yield Result(f"AMQP start with {queued}, clean stop", opened, "s", "process start included")
    yield Result(f"AMQP start with {queued}, killed", killed, "s", "process start included")
    shutil.rmtree(f"{run.folder}/headrace", ignore_errors=True)
    if run.peers:
        yield from _peer_backlog(run)


def _start_s(folder: str, *, after_kill: bool = False) -> float:
    """Until the port answers. For the start after a kill another one is killed first, with the queue in use."""
    if after_kill:
        with headrace(folder, kill=True) as peer, peer.channel() as channel:
            channel.basic_publish("", "bench", b"x" * 1024)
    began = time.perf_counter()
    with headrace(folder):
        return time.perf_counter() - began


def _peer_backlog(run: Run) -> Iterator[Result]:
    count = 20_000 if run.quick else 100_000
    with rabbitmq(run.folder) as both:
        for peer in both:
            peer.declare("bench")
            before = peer.rss_mb()
            run.load.publish(peer, count, 1024)
            grown = peer.rss_mb() - before
            yield Result(f"  {peer.name} memory, {count:,} queued 1 KB messages", grown, "MB more",
                         f"{grown * (1 << 20) / count:,.0f} bytes a message")  # fmt: skip
            peer.delete("bench")


def sustained(run: Run) -> Iterator[Result]:
    """20 publishers and 20 consumers for 30 s: as fast as it goes, then at a fixed rate in sync and in async."""
    seconds = 5.0 if run.quick else 30.0
    with headrace(run.folder) as peer:
        published, consumed, delivery, peak = _both(run, peer, 0, seconds)
    yield Result("AMQP 20 publishers + 20 consumers, published", published, "msg/s", f"{seconds:.0f} s, sync, 100 B")
    yield Result("AMQP 20 publishers + 20 consumers, consumed", consumed, "msg/s",
                 f"window 1000 each: delivered after {delivery[1]:.1f} ms (p99)")  # fmt: skip
    yield Result("AMQP 20 publishers + 20 consumers, peak memory", peak, "MB")
    for mode in ("sync", "async"):
        with headrace(run.folder, "--write-mode", mode) as peer:
            _, _, delivery, _ = _both(run, peer, PACED_RATE, seconds / 3)
        yield Result(f"AMQP delivery p99 in {mode}, 20 + 20 at {PACED_RATE:,} msg/s", delivery[1], "ms",
                     f"p50 {delivery[0]:.2f} ms")  # fmt: skip


def _both(run: Run, peer: Peer, rate: int, seconds: float) -> tuple[float, float, tuple[float, float], float]:
    """(published/s, consumed/s, delivery p50 and p99 in ms, peak MB)."""
    shared = {"size": 100, "connections": CROWD, "window": 1000}
    peer.declare("bench")
    consumer = run.load.start(peer, "consume", **shared)
    published = run.load.wait(run.load.start(peer, "publish", rate=rate, seconds=seconds, **shared))
    consumed = run.load.wait(consumer)
    if consumed.count != published.count:
        raise RuntimeError(f"{published.count:,} were published and {consumed.count:,} consumed")
    peak = peer.rss_mb(peak=True)
    peer.delete("bench")
    return published.rate, consumed.rate, (consumed.p50_ms, consumed.p99_ms), peak


PARTS: dict[str, Callable[[Run], Iterator[Result]]] = {
    "work": work,
    "latency": latency,
    "backlog": backlog,
    "sustained": sustained,
}


def scorecard(results: list[Result]) -> Iterator[str]:
    yield "scorecard (promised by the design documents, measured now, `make bench ONLY=amqp`)"
    for promise, name in (
        ("750,000 published/s (20 publishers + 20 consumers)", "AMQP 20 publishers + 20 consumers, published"),
        ("1,000,000 consumed/s", "AMQP 20 publishers + 20 consumers, consumed"),
        ("p99 < 1 ms (each message on disk before it is delivered)", "AMQP delivery p99 in sync"),
        ("p99 < 1 ms (delivered at once, synced later)", "AMQP delivery p99 in async"),
        ("< 1 GB of memory", "AMQP 20 publishers + 20 consumers, peak memory"),
    ):
        for result in results:
            if result.name.startswith(name):
                yield f"  {promise:<64} {number(result.value)} {result.unit}  ({result.name})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.amqp", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the messages, one run of each row")
    parser.add_argument("--alone", action="store_true", help="without RabbitMQ")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part, and no other; may be repeated")
    options = parser.parse_args()
    print(f"machine    {describe()}", flush=True)
    warm_page_cache(tempfile.gettempdir())
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        run = Run(Load(folder), folder, options.quick, not options.alone and os.path.exists(RABBITMQ))
        for name in options.only or PARTS:
            for result in PARTS[name](run):
                results.append(result)
                print(result.line(), flush=True)
            shutil.rmtree(f"{folder}/headrace", ignore_errors=True)
    lines = list(scorecard(results))
    if len(lines) > 1:
        print("", *lines, sep="\n")


if __name__ == "__main__":
    main()
