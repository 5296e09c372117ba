"""The Kafka listener beside two C programs that are no brokers: `make bench ONLY=kafka_plain`.

kafka_plain.c does the least that keeps the promise of an acknowledgement (receive, check, write, fdatasync, answer) and
nothing else that a broker does. It shows the cost of the language and of all other work of a broker, and, compared with
a Kafka that acknowledges from the page cache, what a simple program that waits for the disk can reach.

kafka_nothing.c answers without a look at what came, and sends the same records over and over: what the system takes to
bring the bytes there and back, with this load on this machine.

Each is beside both Kafkas, by the clock and per CPU-second: where kafka_plain is not twice as cheap as a Kafka that
flushes, what both have the system do for them is more than half of what Kafka costs.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench import machine
from bench.cores import Cores, add_option, chosen
from bench.kafka import WARM_UPS, Load, cheapest, raw_cases
from bench.kafka_peers import (
    KAFKA,
    KAFKA_FLUSH,
    NOTHING,
    OURS,
    PLAIN,
    Broker,
    Headrace,
    Plain,
    Program,
    build_load,
    kafkas,
    programs_that_are_none,
)
from bench.kafka_report import TWICE, Measured, Rows


def measure(programs: Path, broker: Broker) -> Iterator[Measured]:
    load = Load(programs, broker)
    for _ in range(0 if isinstance(broker, Program) else WARM_UPS):
        load.warm_up()
    for number, case in enumerate(raw_cases(1.0, 1.0)):
        if isinstance(broker, Plain):  # it keeps nothing that could be asked for
            yield cheapest(load.raw_produce(case, f"raw-{number}"))
        else:
            yield from load.raw(case, f"raw-{number}")


def run(*, peers: bool = True, cores: Cores | None = None) -> None:
    cores = cores or Cores()
    print(f"machine    {machine.describe()}\ncores      {cores}", flush=True)
    measured: dict[str, dict[str, Measured]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-kafka-load-") as folder:
        programs = Path(folder)
        build_load(programs)
        brokers: list[Broker] = [*programs_that_are_none(programs), Headrace()]
        if peers:
            brokers += kafkas(flush=[False, True])
        for broker in brokers:
            broker.cores = cores
            with broker.running():
                measured[broker.name] = {}
                for one in measure(programs, broker):
                    measured[broker.name][one.work] = one
                    print(one.line(), flush=True)
    for beside in [name for name in (KAFKA, KAFKA_FLUSH) if name in measured] or [OURS]:
        for line in report(measured, beside):
            print(line)


def report(measured: Mapping[str, Rows], beside: str) -> Iterator[str]:
    """Each as so many times what another one does by the clock, and for a second of its CPU time."""
    others = [name for name in (NOTHING, PLAIN, OURS) if name in measured and name != beside]
    yield f"\n  {f'beside {beside}: per s, per CPU-s':<42}" + "".join(f"{name:>18}" for name in others)
    by_clock: dict[str, list[float]] = {name: [] for name in others}
    by_cpu: dict[str, list[float]] = {name: [] for name in others}
    for work, theirs in measured[beside].items():
        cells = ""
        for name in others:
            one = measured[name].get(work)
            if one is None:
                cells += f"{'-':>18}"
                continue
            by_clock[name].append(one.rate / theirs.rate)
            by_cpu[name].append(theirs.cpu_per_million / one.cpu_per_million)
            cells += f"{by_clock[name][-1]:>9.2f}x{by_cpu[name][-1]:>7.2f}x"
        yield f"  {work:<42}{cells}"
    if beside is not OURS:
        for name in others:
            clock, cpu = (sum(ratio >= TWICE for ratio in ratios[name]) for ratios in (by_clock, by_cpu))
            yield f"  {name} is twice {beside} in {clock} of {len(by_clock[name])} rows, per CPU-second in {cpu}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kafka_plain", description=__doc__)
    parser.add_argument("--alone", action="store_true", help="without Apache Kafka")
    add_option(parser)
    options = parser.parse_args()
    run(peers=not options.alone, cores=chosen(parser, options))


if __name__ == "__main__":
    main()
