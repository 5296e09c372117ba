"""The AMQP door beside RabbitMQ: `python -m bench.amqp`. CPU-seconds of the broker per million messages, and rates.

The load generator is compiled (bench/amqp_load.c). RabbitMQ is the machine's own package, started here on a
free port with a data folder of its own, with classic and with quorum queues; without it only our rows are
printed. All messages are persistent and confirmed: on disk, with ours. Windows are in the names of the rows.
"""

import argparse
import contextlib
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pika

from bench.machine import describe, measure, warm_page_cache
from bench.result import Result

HERE = Path(__file__).parent
RABBITMQ = "/usr/lib/rabbitmq/bin/rabbitmq-server"
START_S_MAX = 90.0
RUN_S_MAX = 180.0
MB = 1 << 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def compile_load(folder: str) -> str:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        sys.exit("bench.amqp needs a C compiler for its load generator")
    target = f"{folder}/amqp_load"
    subprocess.run([compiler, "-O2", "-o", target, str(HERE / "amqp_load.c")], check=True)
    return target


class Peer:
    """A broker under test: a process, a port, and the arguments its queues are declared with."""

    def __init__(self, name: str, port: int, pid: int, arguments: dict[str, str]) -> None:
        self.name, self.port, self.pid, self.arguments = name, port, pid, arguments

    def cpu_s(self) -> float:
        """Of all threads, from the scheduler: ticks of 10 ms are too coarse."""
        total = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def rss_mb(self) -> float:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        return 0.0

    @contextlib.contextmanager
    def channel(self) -> Iterator[pika.adapters.blocking_connection.BlockingChannel]:
        connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", self.port))
        yield connection.channel()
        connection.close()

    def declare(self, queue: str, count: int = 1) -> None:
        with self.channel() as channel:
            for name in [queue] if count == 1 else [f"{queue}-{n}" for n in range(count)]:
                channel.queue_declare(name, durable=True, arguments=self.arguments)

    def delete(self, queue: str, count: int = 1) -> None:
        with self.channel() as channel:
            for name in [queue] if count == 1 else [f"{queue}-{n}" for n in range(count)]:
                channel.queue_delete(name)


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S_MAX
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"a broker did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.02)


@contextlib.contextmanager
def headrace(folder: str) -> Iterator[Peer]:
    port, log = free_port(), Path(folder) / "headrace.txt"
    command = [
        sys.executable, "-m", "headrace", "serve", "--data-dir", f"{folder}/headrace", "--http", "off", "--kafka",
        "off", "--amqp", f"127.0.0.1:{port}",
    ]  # fmt: skip
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_for_port(port, process, log)
        yield Peer("headrace", port, process.pid, {})
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def rabbitmq(folder: str) -> Iterator[tuple[Peer, Peer]]:
    """(classic, quorum): one node, two kinds of queues."""
    port, log = free_port(), Path(folder) / "rabbitmq.txt"
    home = Path(folder) / "rabbitmq"
    home.mkdir(exist_ok=True)
    (home / "enabled_plugins").write_text("[].")
    environment = {
        **os.environ,
        "HOME": str(home),
        "RABBITMQ_NODENAME": f"headrace-bench-{port}@localhost",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "ERL_EPMD_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": f"{home}/data",
        "RABBITMQ_LOG_BASE": f"{home}/log",
        "RABBITMQ_PID_FILE": f"{home}/pid",
        "RABBITMQ_ENABLED_PLUGINS_FILE": f"{home}/enabled_plugins",
        "RABBITMQ_CONFIG_FILE": f"{home}/rabbitmq",
        "RABBITMQ_ADVANCED_CONFIG_FILE": f"{home}/advanced.config",
    }
    with log.open("ab") as output:
        process = subprocess.Popen([RABBITMQ], env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_for_port(port, process, log)
        pid = int((home / "pid").read_text())
        yield (
            Peer("rabbitmq classic", port, pid, {"x-queue-type": "classic"}),
            Peer("rabbitmq quorum", port, pid, {"x-queue-type": "quorum"}),
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


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


ROWS = [
    Row("publish 100 B, bulk (1 connection, window 5000)", "publish", 100, 1_000_000, bar=1.0),
    Row("consume 100 B with an ack each, bulk (prefetch 1000)", "consume", 100, 1_000_000, bar=0.3),
    Row("both at once 100 B, bulk", "both", 100, 1_000_000, bar=1.5),
    Row("publish 1 KB, bulk", "publish", 1024, 300_000, bar=3.5),
    Row("consume 1 KB with an ack each, bulk", "consume", 1024, 300_000, bar=1.2),
    Row("both at once 1 KB, bulk", "both", 1024, 300_000, bar=5.0),
    Row("10 publishers window 100 + 10 consumers, 100 B", "both", 100, 500_000, 10, 100, 10, 100, bar=4.0),
    Row("50 connections, window 10, 100 B", "publish", 100, 200_000, 50, 10, bar=4.5),
    Row("50 connections, window 1, 100 B", "publish", 100, 40_000, 50, 1, bar=35.0),
    Row("100 queues round robin, 100 B", "publish", 100, 400_000, queues=100, bar=3.0),
]
PEER_SHARE = 20  # a peer gets this part of the messages: its rate does not depend on the count


class Bench:
    def __init__(self, load: str) -> None:
        self._load = load

    def _start(self, peer: Peer, kind: str, row: Row, count: int) -> subprocess.Popen[str]:
        many, window = (row.publishers, row.window) if kind == "publish" else (row.consumers, row.prefetch)
        command = [self._load, kind, "127.0.0.1", str(peer.port), "bench", str(count), str(row.size), str(many)]
        return subprocess.Popen([*command, str(window), str(row.queues)], stdout=subprocess.PIPE, text=True)

    @staticmethod
    def _rate(process: subprocess.Popen[str]) -> float:
        try:
            out, _ = process.communicate(timeout=RUN_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        if process.returncode:
            raise RuntimeError("the load generator failed")
        return float(out.split()[1])

    def run(self, peer: Peer, row: Row, count: int) -> tuple[float, float]:
        """(CPU-s per million, messages per second)."""
        peer.declare("bench", row.queues)
        if row.kind == "consume":
            self._rate(self._start(peer, "publish", Row("", "publish", row.size, count), count))
        before = peer.cpu_s()
        if row.kind == "both":
            consumer = self._start(peer, "consume", row, count)
            self._rate(self._start(peer, "publish", row, count))
            rate = self._rate(consumer)
        else:
            rate = self._rate(self._start(peer, row.kind, row, count))
        cpu = peer.cpu_s() - before
        peer.delete("bench", row.queues)
        return cpu * 1e6 / count, rate

    def latency(self, peer: Peer, rate: int, seconds: float) -> tuple[float, float]:
        """(p50, p99) in ms of a confirm, from when the message was due; 10 connections, 1 KB."""
        peer.declare("bench")
        command = [self._load, "publish", "127.0.0.1", str(peer.port), "bench", str(int(rate * seconds)), "1024", "10"]
        command += ["5000", "1", str(rate)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        peer.delete("bench")
        p50, p99 = done.stdout.split()[2:4]
        return float(p50), float(p99)


def rows(load: str, folder: str, *, quick: bool, peers: bool) -> list[Result]:
    results: list[Result] = []
    bench = Bench(load)
    chosen = [(row, row.count // (4 if quick else 1)) for row in ROWS]
    ours: dict[str, tuple[float, float]] = {}
    with headrace(folder) as peer:
        bench.run(peer, ROWS[0], 200_000)  # buffers and page cache are warm before the first figure
        for row, count in chosen:
            runs = sorted(bench.run(peer, row, count) for _ in range(1 if quick else 3))
            ours[row.name] = runs[len(runs) // 2]
    theirs: dict[str, list[tuple[str, float, float]]] = {row.name: [] for row in ROWS}
    if peers:
        with rabbitmq(folder) as both:
            for row, count in chosen:
                for peer in both:
                    cpu, rate = bench.run(peer, row, max(2000, count // PEER_SHARE))
                    theirs[row.name].append((peer.name, cpu, rate))
    for row, _ in chosen:
        cpu, rate = ours[row.name]
        beside = "; ".join(
            f"{name.removeprefix('rabbitmq ')} {their_cpu / cpu:.0f}x CPU, {rate / their_rate:.0f}x rate"
            for name, their_cpu, their_rate in theirs[row.name]
        )
        results.append(Result(f"AMQP {row.name}", cpu, "CPU-s/M", beside, f"<= {row.bar}", cpu <= row.bar))
        results.append(Result(f"  rate of {row.name}", rate, "msg/s"))
    return results


def backlog(load: str, folder: str, *, quick: bool) -> list[Result]:
    """Memory with a million queued messages, and how long a start with them takes."""
    count = 250_000 if quick else 1_000_000
    bench = Bench(load)
    shutil.rmtree(f"{folder}/headrace", ignore_errors=True)
    with headrace(folder) as peer:
        peer.declare("bench")
        empty = peer.rss_mb()
        bench._rate(bench._start(peer, "publish", Row("", "publish", 1024, count), count))
        full = peer.rss_mb()
    began = time.perf_counter()
    with headrace(folder) as peer:
        opened = time.perf_counter() - began
    shutil.rmtree(f"{folder}/headrace", ignore_errors=True)
    return [
        Result(f"AMQP memory with {count:,} queued 1 KB messages", full, "MB", f"{empty:.0f} MB when empty", "<= 100",
               full <= 100),
        Result(f"AMQP start with {count:,} queued messages", opened, "s", "process start included"),
    ]  # fmt: skip


def latencies(load: str, folder: str, *, quick: bool, peers: bool) -> list[Result]:
    seconds = 2.0 if quick else 5.0
    bench = Bench(load)
    sync_p50 = measure(folder).fdatasync_4k_p50_ms
    results = []
    with headrace(folder) as peer:
        for rate in (5_000, 50_000):
            runs = [bench.latency(peer, rate, seconds) for _ in range(3)]
            p50, p99 = (statistics.median(run[at] for run in runs) for at in (0, 1))
            bar = 2.5 * sync_p50
            results.append(
                Result(f"AMQP confirm p50 at {rate:,} msg/s", p50, "ms", f"p99 {p99:.1f} ms; fdatasync p50 "
                       f"{sync_p50:.2f} ms", f"<= {bar:.2f}", p50 <= bar)
            )  # fmt: skip
    if peers:
        with rabbitmq(folder) as both:
            for peer in both:
                p50, p99 = bench.latency(peer, 5_000, seconds)
                results.append(Result(f"  {peer.name} confirm p50 at 5,000 msg/s", p50, "ms", f"p99 {p99:.1f} ms"))
    return results


def sustained(load: str, folder: str, *, quick: bool) -> list[Result]:
    """20 publishers and 20 consumers at once, as long as the seeds' figures ask."""
    row = Row("", "both", 100, 2_000_000 if quick else 10_000_000, 20, 1000, 20, 1000)
    bench = Bench(load)
    with headrace(folder) as peer:
        peer.declare("bench")
        consumer = bench._start(peer, "consume", row, row.count)
        published = bench._rate(bench._start(peer, "publish", row, row.count))
        consumed = bench._rate(consumer)
        peak = peer.rss_mb()
    return [
        Result("AMQP 20 publishers + 20 consumers, published", published, "msg/s", "sync, 100 B"),
        Result("AMQP 20 publishers + 20 consumers, consumed", consumed, "msg/s", f"{peak:.0f} MB at the end"),
    ]


def run(*, quick: bool, peers: bool = True) -> list[Result]:
    peers = peers and os.path.exists(RABBITMQ)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        load = compile_load(folder)
        results = rows(load, folder, quick=quick, peers=peers)
        results += latencies(load, folder, quick=quick, peers=peers)
        results += backlog(load, folder, quick=quick)
        return results + sustained(load, folder, quick=quick)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.amqp", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the messages, one run of each row")
    parser.add_argument("--alone", action="store_true", help="without RabbitMQ")
    options = parser.parse_args()
    print(f"machine    {describe()}", flush=True)
    warm_page_cache(tempfile.gettempdir())
    for result in run(quick=options.quick, peers=not options.alone):
        print(result.line())


if __name__ == "__main__":
    main()
