"""Assigns cores to brokers and load generators. By default all of them share all cores, so a broker gets what the load
leaves, and one that needs two cores is as fast as one that needs one, as long as there are two.

With `--broker-cores N` every broker in turn has the same N cores for itself, and the load has the others, so that
messages per second show what a broker does with a given number of cores.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Cores:
    broker: Sequence[int] = field(default_factory=lambda: sorted(os.sched_getaffinity(0)))
    load: Sequence[int] = field(default_factory=lambda: sorted(os.sched_getaffinity(0)))

    @property
    def are_shared(self) -> bool:
        return self.broker == self.load

    def for_broker(self, command: Sequence[str]) -> list[str]:
        return self._on(self.broker, command)

    def for_load(self, command: Sequence[str]) -> list[str]:
        return self._on(self.load, command)

    def _on(self, cores: Sequence[int], command: Sequence[str]) -> list[str]:
        return list(command) if self.are_shared else ["taskset", "-c", ",".join(map(str, cores)), *command]

    def __str__(self) -> str:
        if self.are_shared:
            return f"broker and load share {len(self.load)}"
        return f"{len(self.broker)} for the broker, {len(self.load)} for the load"


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--broker-cores",
        type=int,
        metavar="N",
        help="give the broker N cores of its own and the load the others (default: both have all)",
    )


def chosen(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Cores:
    count, there = options.broker_cores, sorted(os.sched_getaffinity(0))
    if count is None:
        return Cores()
    if not 0 < count < len(there):
        parser.error(f"--broker-cores: of {len(there)} cores at least one is for each")
    return Cores(there[:count], there[count:])
