"""The Kafka door beside a plain C program: `make bench ONLY=kafka_plain`.

kafka_plain.c does the least that keeps the promise of an acknowledgement (receive, check, write, fdatasync, answer) and
nothing else that a broker is for. It tells what a language and all that a broker does besides cost, and, beside a Kafka
that acknowledges from the page cache, how much is to be had by whoever waits for the disk without any art.
"""

import argparse
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench import machine
from bench.kafka import WARM_UPS, Load, cheapest, raw_cases
from bench.kafka_peers import Broker, Headrace, build_load, kafkas
from bench.kafka_report import OURS, TWICE, Measured

PROGRAM = "kafka_plain"
PLAIN, KAFKA = "plain C", "kafka"


class Plain(Broker):
    name = PLAIN
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
        raise RuntimeError(f"kafka_plain.c takes the checksum instruction of x86-64, and this is {platform.machine()}")
    source = Path(__file__).parent / f"{PROGRAM}.c"
    command = ["cc", "-O2", "-msse4.2", "-o", str(folder / PROGRAM), str(source), "-lpthread"]
    subprocess.run(command, check=True)


def measure(programs: Path, broker: Broker) -> Iterator[Measured]:
    load = Load(programs, broker)
    for _ in range(0 if isinstance(broker, Plain) else WARM_UPS):
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
        brokers: list[Broker] = [Plain(programs), Headrace()]
        if peers:
            brokers += kafkas(flush=[False])
        for broker in brokers:
            with broker.running():
                rates[broker.name] = {}
                for one in measure(programs, broker):
                    rates[broker.name][one.work] = one.rate
                    print(one.line(), flush=True)
    for line in report(rates):
        print(line)


def report(rates: dict[str, dict[str, float]]) -> Iterator[str]:
    yield f"\n  {'messages per second':<42}{'ours of plain':>16}{'plain of Kafka':>16}{'ours of Kafka':>16}"
    twice = 0
    for work, plain in rates[PLAIN].items():
        ours, kafka = rates[OURS][work], rates.get(KAFKA, {}).get(work)
        beside = "" if kafka is None else f"{plain / kafka:>15.2f}x{ours / kafka:>15.2f}x"
        twice += kafka is not None and plain >= TWICE * kafka
        yield f"  {work:<42}{ours / plain:>16.0%}{beside}"
    if KAFKA in rates:
        yield f"  twice Kafka's rate is reached by the plain program in {twice} of {len(rates[PLAIN])} rows"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kafka_plain", description=__doc__)
    parser.add_argument("--alone", action="store_true", help="without Apache Kafka")
    run(peers=not parser.parse_args().alone)


if __name__ == "__main__":
    main()
