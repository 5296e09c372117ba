"""The Kafka listener beside a real Apache Kafka, in one run on one machine: `make bench ONLY=kafka`.

Throughput, CPU-seconds of the broker (all threads, schedstat) and of the client per million messages, memory
(PSS) and the time to the acknowledgement, with librdkafka driven from C, with Kafka's own perf tools, and with
kafka_raw, which sends prepared batches and hardly parses what it fetches: with the other clients, the broker only gets
the cores that the client leaves, and the comparison is largely one of the client with itself. Each
broker runs alone, one after the other, on the same disk. Memory is warmed up before every row: in a virtual machine,
pages that were returned to the host cost five times as much, and the first broker would pay for all. They are returned
within seconds, so runs at full speed are repeated and the cheaper one counts.
"""

import argparse
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import machine
from bench.cores import Cores, add_option, chosen
from bench.kafka_peers import LOAD, RAW, ApacheKafka, Broker, Headrace, build_load, kafka_classpath
from bench.kafka_report import Measured, report

MILLION = 1_000_000
WARM_SPARE_MB = 500  # buffers of the broker and of the client
RUNS = 2  # of what goes as fast as it can; the one that cost the broker less counts, for every broker
FETCH_RUNS = 4  # they take a second each, and now and then one costs twice what the others do, with every broker
LEADER_S = 1.0  # until a new topic can be produced to; Kafka answers earlier that it is there
WARM_UPS = 5  # where a benchmark has no rows before those that count
TOOLS = "org.apache.kafka.tools."
JAVA_BATCH_BYTES, LIBRDKAFKA_BATCH_BYTES = 16_384, 1_000_000
IN_FLIGHT = 5  # requests of one connection, as both clients have it


@dataclass(frozen=True, slots=True)
class Case:
    size: int
    codec: str
    producers: int
    count: int

    @property
    def label(self) -> str:
        return f"{self.size} B {self.codec}, {self.producers} producer{'s' if self.producers > 1 else ''}"

    @property
    def sent(self) -> int:
        return self.count // self.producers * self.producers


def cases(scale: float) -> list[Case]:
    counts = {100: int(3 * MILLION * scale), 1000: int(MILLION * scale)}
    return [
        Case(size, codec, producers, counts[size])
        for size in (100, 1000)
        for codec, producers in (("none", 1), ("none", 10), ("zstd", 1))
    ]


@dataclass(frozen=True, slots=True)
class RawCase:
    """What a client sends, without the client."""

    size: int
    batch_bytes: int
    clients: int
    count: int

    @property
    def label(self) -> str:
        clients = f"{self.clients} client{'s' if self.clients > 1 else ''}"
        return f"raw {self.size} B in {self.batch_bytes // 1000} KB, {clients}"


def raw_cases(scale: float, small_share: float) -> list[RawCase]:
    """Batches as large as Java's client makes them by default, and as librdkafka does."""
    counts = {100: int(3 * MILLION * scale), 1000: int(MILLION * scale)}
    return [
        RawCase(size, batch_bytes, clients, int(counts[size] * share))
        for size in (100, 1000)
        for batch_bytes, share in ((JAVA_BATCH_BYTES, small_share / 4), (LIBRDKAFKA_BATCH_BYTES, 1.0))
        for clients in (1, 10)
    ]


class Load:
    """Runs clients against one broker, and counts what both spend."""

    def __init__(self, programs: Path, broker: Broker) -> None:
        self._programs = programs
        self._broker = broker

    def warm(self, count: int, size: int) -> None:
        kept_mb = count * size * 2 // MILLION if self._broker.keeps_messages else 0
        machine.warm_page_cache(str(self._broker.folder), kept_mb + WARM_SPARE_MB)

    def run(self, work: str, count: int, kind: str, *arguments: object, program: str = LOAD) -> Measured:
        """Raises if a message failed."""
        broker_s, client_s = self._broker.cpu_s(), children_cpu_s()
        whole = [str(self._programs / program), kind, self._broker.address, *map(str, arguments)]
        command = self._broker.cores.for_load(whole)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        broker_s, client_s = self._broker.cpu_s() - broker_s, children_cpu_s() - client_s
        _, rate, p50, p99, failed = done.stdout.split()
        assert int(failed) == 0, f"{self._broker.name}: {failed} messages failed: {done.stderr[:500]}"
        latency = (float(p50), float(p99)) if kind == "produce" else None
        return Measured(work, float(rate), broker_s * MILLION / count, client_s * MILLION / count, latency)

    def produce(self, work: str, topic: str, case: Case, *rate: int) -> Measured:
        self.warm(case.sent, case.size)
        shape = (topic, case.count, case.size, case.codec, case.producers)
        return self.run(work, case.sent, "produce", *shape, *rate)

    def warm_up(self, scale: float = 1.0) -> None:
        """Also for brokers that compile themselves as they run."""
        self.produce("", "warm", Case(100, "none", 1, int(500_000 * scale) + 1000))

    def raw_produce(self, case: RawCase, topic: str) -> list[Measured]:
        self._broker.make_topic(topic)
        time.sleep(LEADER_S)
        produced = []
        for _ in range(RUNS):
            self.warm(case.count, case.size)
            shape = (topic, case.count, case.size, case.batch_bytes, case.clients, IN_FLIGHT)
            produced.append(self.run(f"produce {case.label}", case.count, "produce", *shape, program=RAW))
        return produced

    def raw(self, case: RawCase, topic: str) -> Iterator[Measured]:
        yield cheapest(self.raw_produce(case, topic))
        each = case.count // case.clients
        shape = (topic, each, case.clients)
        fetch = partial(self.run, f"fetch {case.label}", each * case.clients, "fetch", *shape, program=RAW)
        yield cheapest([fetch() for _ in range(FETCH_RUNS)])


def cheapest(runs: Sequence[Measured]) -> Measured:
    return min(runs, key=lambda run: run.cpu_per_million)


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(programs: Path, broker: Broker, scale: float) -> Iterator[Measured]:
    load = Load(programs, broker)
    load.warm_up(scale)
    for number, case in enumerate(cases(scale)):
        topic = f"bench-{number}"
        runs = [load.produce(f"produce {case.label}", f"{topic}-{run}", case) for run in range(RUNS)]
        yield cheapest(runs)
        fetch = partial(load.run, f"fetch {case.label}", case.sent, "consume", f"{topic}-0", case.sent)
        yield cheapest([fetch() for _ in range(FETCH_RUNS)])
    for number, raw in enumerate(raw_cases(scale, broker.small_share)):
        yield from load.raw(raw, f"raw-{number}")
    for size, offered in ((100, 50_000), (1000, 20_000)):
        case = Case(size, "none", 10, int(4 * offered * scale * broker.small_share))
        broker.make_topic(f"paced-{size}")
        time.sleep(LEADER_S)
        yield load.produce(f"paced {size} B, 10 producers, {offered:,}/s", f"paced-{size}", case, offered)


def java_tools(classpath: str, broker: Broker, scale: float) -> Iterator[Measured]:
    """Kafka's own perf tools, with their defaults. Their JVM's start is in the client's CPU, not in the rate."""
    load = Load(Path(), broker)
    java = ["java", "-Xmx512m", "-cp", classpath]
    server = ["--bootstrap-server", broker.address]
    for size, most in ((100, MILLION), (1000, 300_000)):
        count = int(most * scale * broker.small_share)
        topic = ["--topic", f"java-{size}", "--num-records", str(count)]
        load.warm(count, size)
        produce = [f"{TOOLS}ProducerPerformance", *topic, "--record-size", str(size), "--throughput", "-1"]
        output, broker_s, client_s = _run_java([*java, *produce, *server], broker)
        last = [line for line in output.splitlines() if "records sent" in line][-1]
        latency = (float(_before(last, "ms 50th")), float(_before(last, "ms 99th")))
        rate = float(_before(last, "records/sec"))
        millions = count / MILLION
        yield Measured(f"java produce {size} B", rate, broker_s / millions, client_s / millions, latency)
        fetch = [f"{TOOLS}ConsumerPerformance", *topic]
        output, broker_s, client_s = _run_java([*java, *fetch, *server], broker)
        rate = float(output.splitlines()[-1].split(",")[-1])
        yield Measured(f"java fetch {size} B", rate, broker_s / millions, client_s / millions, None)


def _before(line: str, word: str) -> str:
    return line.split(word)[0].split(",")[-1]


def _run_java(command: list[str], broker: Broker) -> tuple[str, float, float]:
    broker_s, client_s = broker.cpu_s(), children_cpu_s()
    command = broker.cores.for_load(command)
    output = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    return output, broker.cpu_s() - broker_s, children_cpu_s() - client_s


def run(*, scale: float = 1.0, peers: bool = True, java: bool = True, cores: Cores | None = None) -> None:
    """Print every broker's rows as they are measured, then ours beside theirs."""
    with tempfile.TemporaryDirectory(prefix="bench-kafka-load-") as folder:
        build_load(Path(folder))
        _run(Path(folder), scale, cores or Cores(), peers=peers, java=java)


def _run(programs: Path, scale: float, cores: Cores, *, peers: bool, java: bool) -> None:
    print(f"machine    {machine.describe()}\ncores      {cores}", flush=True)
    brokers: list[Broker] = [Headrace(), Headrace(sync=False)]
    classpath = ""
    try:
        classpath = kafka_classpath()
    except RuntimeError as error:
        print(f"NO APACHE KAFKA TO COMPARE WITH: {error}", flush=True)
    if peers and classpath:
        brokers += [ApacheKafka(classpath, flush=False), ApacheKafka(classpath, flush=True)]
    for broker in brokers:
        broker.cores = cores
    measured: dict[str, dict[str, Measured]] = {}
    memory: dict[str, float] = {}
    try:
        for broker in brokers:
            measured[broker.name] = {}
            with broker.running():
                for one in measure(programs, broker, scale):
                    measured[broker.name][one.work] = one
                    print(one.line(), flush=True)
                if java and classpath:
                    for one in java_tools(classpath, broker, scale):
                        measured[broker.name][one.work] = one
                        print(one.line(), flush=True)
                memory[broker.name] = broker.pss_mb()
                print(f"  memory (PSS) {memory[broker.name]:.0f} MB", flush=True)
    finally:  # what was measured is printed, whatever broke off the rest
        for line in report(measured, memory, cores):
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kafka")
    parser.add_argument("--quick", action="store_true", help="a tenth of the messages")
    parser.add_argument("--alone", action="store_true", help="without Apache Kafka")
    parser.add_argument("--no-java", action="store_true", help="without Kafka's perf tools")
    add_option(parser)
    options = parser.parse_args()
    scale = 0.1 if options.quick else 1.0
    run(scale=scale, peers=not options.alone, java=not options.no_java, cores=chosen(parser, options))


if __name__ == "__main__":
    main()
