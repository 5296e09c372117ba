"""What no broker can be faster than on this machine: `make bench ONLY=kafka_floor`.

kafka_floor.c does the least that keeps the promise of an acknowledgement (receive, check, write, fdatasync, answer) and
nothing else that a broker is for. Beside it ours, and Kafka, which acknowledges from the page cache: where the floor
itself is not twice as fast as Kafka, nobody is who waits for the disk.
"""

import argparse
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench import machine
from bench.kafka import WARM_UPS, Load, cheapest, raw_cases
from bench.kafka_peers import ApacheKafka, Broker, Headrace, build_load, kafka_classpath
from bench.kafka_report import OURS, TWICE, Measured

PROGRAM = "kafka_floor"
FLOOR, KAFKA = "floor", "kafka"


class Floor(Broker):
    name = FLOOR
    durability = "fdatasync before every acknowledgement, and nothing else"

    def __init__(self, programs: Path) -> None:
        super().__init__()
        self._programs = programs

    def command(self) -> list[str]:
        return [str(self._programs / PROGRAM), str(self.port), str(self.folder / "data")]

    def make_topic(self, name: str) -> None:
        """There are none."""


def build(folder: Path) -> None:
    """Raises with the reason if it can not be had."""
    if platform.machine() != "x86_64":
        raise RuntimeError(f"kafka_floor.c takes the checksum instruction of x86-64, and this is {platform.machine()}")
    source = Path(__file__).parent / f"{PROGRAM}.c"
    command = ["cc", "-O2", "-msse4.2", "-o", str(folder / PROGRAM), str(source), "-lpthread"]
    subprocess.run(command, check=True)


def measure(programs: Path, broker: Broker) -> Iterator[Measured]:
    load = Load(programs, broker)
    for _ in range(0 if isinstance(broker, Floor) else WARM_UPS):
        load.warm_up()
    for number, case in enumerate(raw_cases(1.0, 1.0)):
        yield cheapest(load.raw_produce(case, f"raw-{number}"))


def run(*, peers: bool = True) -> None:
    print(f"machine    {machine.describe()}", flush=True)
    rates: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-kafka-load-") as folder:
        programs = Path(folder)
        build_load(programs)
        build(programs)
        brokers: list[Broker] = [Floor(programs), Headrace()]
        if peers:
            brokers.append(ApacheKafka(kafka_classpath(), flush=False))
        for broker in brokers:
            print(f"\n{broker.name}: {broker.durability}", flush=True)
            broker.start()
            try:
                rates[broker.name] = {}
                for one in measure(programs, broker):
                    rates[broker.name][one.work] = one.rate
                    print(one.line(), flush=True)
            finally:
                broker.stop()
    for line in report(rates):
        print(line)


def report(rates: dict[str, dict[str, float]]) -> Iterator[str]:
    yield f"\n  {'messages per second':<42}{'ours of floor':>16}{'floor of Kafka':>16}{'ours of Kafka':>16}"
    possible = 0
    for work, floor in rates[FLOOR].items():
        ours, kafka = rates[OURS][work], rates.get(KAFKA, {}).get(work)
        beside = "" if kafka is None else f"{floor / kafka:>15.2f}x{ours / kafka:>15.2f}x"
        possible += kafka is not None and floor >= TWICE * kafka
        yield f"  {work:<42}{ours / floor:>16.0%}{beside}"
    if KAFKA in rates:
        yield f"  twice Kafka's rate is within reach of the floor in {possible} of {len(rates[FLOOR])} rows"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kafka_floor", description=__doc__)
    parser.add_argument("--alone", action="store_true", help="without Apache Kafka")
    run(peers=not parser.parse_args().alone)


if __name__ == "__main__":
    main()
