"""The Kafka door beside a real Apache Kafka, in one run on one machine: `python -m bench.kafka`.

Throughput, broker CPU-seconds per million messages (all threads, schedstat), memory (PSS) and the time to
the acknowledgement, with librdkafka driven from C and with Kafka's own perf tools. Each broker runs alone,
one after the other, on the same folder, after the page cache has been warmed.
"""

import argparse
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import machine
from bench.kafka_peers import ApacheKafka, Broker, Headrace, build_load, kafka_classpath
from bench.result import Result

MILLION = 1_000_000
BARS = {("produce", 100): 0.25, ("produce", 1000): 1.2, ("fetch", 100): 0.12, ("fetch", 1000): 0.8}


@dataclass(frozen=True, slots=True)
class Measured:
    work: str
    rate: float
    cpu_per_million: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Case:
    size: int
    codec: str
    producers: int
    count: int

    @property
    def label(self) -> str:
        return f"{self.size} B {self.codec}, {self.producers} producer{'s' if self.producers > 1 else ''}"


def cases(scale: float) -> list[Case]:
    counts = {100: int(3 * MILLION * scale), 1000: int(MILLION * scale)}
    return [
        Case(size, codec, producers, counts[size])
        for size in (100, 1000)
        for codec, producers in (("none", 1), ("none", 10), ("zstd", 1))
    ]


def run_load(program: Path, broker: Broker, *arguments: object) -> tuple[float, float, float, float]:
    """(messages per second, p50 ms, p99 ms, broker CPU seconds). Raises if a message failed."""
    before = broker.cpu_s()
    done = subprocess.run(
        [str(program), *map(str, arguments)], capture_output=True, text=True, timeout=600, check=True
    )
    cpu = broker.cpu_s() - before
    _, rate, p50, p99, failed = done.stdout.split()
    assert int(failed) == 0, f"{broker.name}: {failed} messages failed: {done.stderr[:500]}"
    return float(rate), float(p50), float(p99), cpu


def measure(program: Path, broker: Broker, scale: float) -> Iterator[Measured]:
    run_load(program, broker, "produce", broker.address, "warm", int(500_000 * scale) + 1000, 100, "none", 1)
    for number, case in enumerate(cases(scale)):
        topic = f"bench-{number}"
        rate, p50, p99, cpu = run_load(
            program,
            broker,
            "produce",
            broker.address,
            topic,
            case.count,
            case.size,
            case.codec,
            case.producers,
        )
        count = case.count // case.producers * case.producers
        yield Measured(f"produce {case.label}", rate, cpu * MILLION / count, p50, p99)
        rate, _, _, cpu = run_load(program, broker, "consume", broker.address, topic, count)
        yield Measured(f"fetch {case.label}", rate, cpu * MILLION / count, 0, 0)
    count = int(200_000 * scale)
    for label, size, offered in (("100 B", 100, 50_000), ("1000 B", 1000, 20_000)):
        rate, p50, p99, cpu = run_load(
            program, broker, "produce", broker.address, f"paced-{size}", count, size, "none", 10, offered
        )
        yield Measured(f"paced {label}, 10 producers, {offered:,}/s", rate, cpu * MILLION / count, p50, p99)


def java_tools(classpath: str, broker: Broker, scale: float) -> Iterator[Measured]:
    """Kafka's own perf tools; their JVM's start is not in the figures they print."""
    count = int(MILLION * scale)
    base = ["java", "-Xmx512m", "-cp", classpath]
    tools = "org.apache.kafka.tools."
    for size in (100, 1000):
        topic = f"java-{size}"
        before = broker.cpu_s()
        arguments = [
            "--topic",
            topic,
            "--num-records",
            str(count),
            "--record-size",
            str(size),
            "--throughput",
            "-1",
        ]
        server = ["--bootstrap-server", broker.address]
        output = _run([*base, f"{tools}ProducerPerformance", *arguments, *server])
        last = [line for line in output.splitlines() if "records sent" in line][-1]
        rate = float(last.split("records/sec")[0].split(",")[-1])
        p99 = float(last.split("ms 99th")[0].split(",")[-1])
        p50 = float(last.split("ms 50th")[0].split(",")[-1])
        yield Measured(f"java produce {size} B", rate, (broker.cpu_s() - before) * MILLION / count, p50, p99)
        before = broker.cpu_s()
        output = _run(
            [*base, f"{tools}ConsumerPerformance", *server, "--topic", topic, "--num-records", str(count)]
        )
        fields = output.splitlines()[-1].split(",")
        yield Measured(
            f"java fetch {size} B", float(fields[-1]), (broker.cpu_s() - before) * MILLION / count, 0, 0
        )


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout


def run(*, scale: float = 1.0, peers: bool = True, java: bool = True) -> list[Result]:
    folder = Path(tempfile.mkdtemp(prefix="bench-kafka-load-"))
    program = build_load(folder)
    print(f"machine    {machine.describe()}", flush=True)
    machine.warm_page_cache(str(folder), 6000)
    brokers: list[Broker] = [Headrace()]
    classpath = ""
    if peers:
        try:
            classpath = kafka_classpath()
            brokers += [ApacheKafka(classpath, flush=False), ApacheKafka(classpath, flush=True)]
        except RuntimeError as error:
            print(f"NO APACHE KAFKA TO COMPARE WITH: {error}", flush=True)
    measured: dict[str, dict[str, Measured]] = {}
    memory: dict[str, float] = {}
    for broker in brokers:
        broker.start()
        try:
            mine = {one.work: one for one in measure(program, broker, scale)}
            if java and classpath:
                mine |= {one.work: one for one in java_tools(classpath, broker, scale)}
            measured[broker.name] = mine
            memory[broker.name] = broker.pss_mb()
        finally:
            broker.stop()
        print(f"{broker.name}: {broker.durability}; {memory[broker.name]:.0f} MB of memory (PSS)", flush=True)
        for one in mine.values():
            print(
                f"  {one.work:<44} {one.rate:>12,.0f}/s  {one.cpu_per_million:7.3f} CPU-s/M  "
                f"p50 {one.p50_ms:8.2f}  p99 {one.p99_ms:8.2f} ms",
                flush=True,
            )
    return list(results(measured, memory))


def results(measured: dict[str, dict[str, Measured]], memory: dict[str, float]) -> Iterator[Result]:
    ours = measured["headrace"]
    for work, one in ours.items():
        bar = bar_of(work)
        yield Result(
            f"kafka door, {work}: {one.rate:,.0f}/s, p99 {one.p99_ms:.1f} ms",
            one.cpu_per_million,
            "CPU-s/M",
            "; ".join(
                ratio(one, theirs[work], name) for name, theirs in measured.items() if name != "headrace"
            ),
            f"<= {bar}" if bar else "",
            one.cpu_per_million <= bar if bar else None,
        )
    for name, size in memory.items():
        if name != "headrace":
            yield Result(
                f"memory beside {name} under the same load",
                memory["headrace"],
                "MB",
                f"{size / memory['headrace']:.1f}x less than {size:.0f} MB",
                "half of Kafka's",
                memory["headrace"] <= size / 2,
            )


def ratio(one: Measured, other: Measured, name: str) -> str:
    return f"{one.rate / other.rate:.1f}x/s, {other.cpu_per_million / one.cpu_per_million:.1f}x per CPU-s of {name}"


def bar_of(work: str) -> float | None:
    if "none, 1 producer" not in work:
        return None
    return BARS.get((work.split()[0], int(work.split()[1])))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kafka")
    parser.add_argument("--quick", action="store_true", help="a tenth of the messages")
    parser.add_argument("--alone", action="store_true", help="without Apache Kafka")
    parser.add_argument("--no-java", action="store_true", help="without Kafka's perf tools")
    options = parser.parse_args()
    scale = 0.1 if options.quick else 1.0
    results = run(scale=scale, peers=not options.alone, java=not options.no_java)
    for result in results:
        print(result.line())
    for line in scorecard(results):
        print(line)


def scorecard(results: list[Result]) -> Iterator[str]:
    """The figure of the design documents that this door is asked for."""
    yield "scorecard (promised by the design documents, measured now, `python -m bench.kafka`)"
    for work in ("produce 100 B none, 1 producer", "produce 100 B none, 10 producers"):
        for result in results:
            if result.name.startswith(f"kafka door, {work}: "):
                rate = result.name.partition(": ")[2]
                yield f"  1,000,000 small messages/s{'':<8} {rate}, each on disk when acknowledged  ({work})"


if __name__ == "__main__":
    main()
