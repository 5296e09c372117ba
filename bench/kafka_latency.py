"""How much each broker takes at the same latency: `make bench ONLY=kafka_latency`.

Messages are sent on a schedule, whether the broker keeps up or not, and the latency of each counts from the moment it
was due until it was acknowledged. For every workload, the highest rate whose 99th percentile stays within a limit is
searched: by doubling, then by halving the step. A trial is long enough that one hiccup of the machine (30 ms) is less
than one percent of it, and a failed rate is tried twice more: a hiccup of the disk at a low rate would else end the
search there, for any broker. A number of trials from which the host took CPU time away (steal) do not count. The rate
that is found is run twice more, and the run with the lowest CPU time of the broker counts. The load of the client is
shown for that rate and for the lowest failed one: a client at full load is the limit.
The brokers alternate, workload by workload, on the same cores and disk, because a machine is faster in one minute than
in another. The others are idle meanwhile, and their writes are on the disk before the next one starts. The CPU time of
each broker is shown next to its rate.

Two of the programs are not brokers. kafka_nothing.c replies without parsing, on the cores that a broker has. It reaches
what the client and the machine allow, so no broker can do more with this client on these cores, and where it is not
twice as fast as Kafka, no broker can be. That is shown next to each ratio ("at most"), and the verdict counts such rows
separately, not as reached. The search ends there as it does with a broker: a client at full load is late.
kafka_plain.c does the minimum that an acknowledgement promises (receive, check, write, fdatasync, reply) in the
simplest way. It shows what the disk and the memory cost, and how little a broker could cost that does nothing else. It
is a reference for brokers that sync, not a limit, and excuses no row.

The limit is four times what librdkafka waits for more to send: with twice that, p99 is at the limit for every broker at
any rate, and the machine's hiccups decide.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from bench import machine
from bench.cores import Cores, add_option, chosen
from bench.kafka import IN_FLIGHT, JAVA_BATCH_BYTES, LEADER_S, MILLION, WARM_UPS, Load
from bench.kafka_peers import (
    KAFKA_FLUSH,
    LOAD,
    NOTHING,
    PLAIN,
    RAW,
    Broker,
    Headrace,
    Program,
    build_load,
    kafkas,
    programs_that_are_none,
)
from bench.kafka_report import PAIRS, TWICE

LIMIT_MS = 20.0
TRIAL_S = 4.0
TRIALS = 3
TRIALS_MAX = 5  # with those that the host disturbed
STOLEN_S_MAX = 0.02
RUNS_MORE = 2
HALVINGS = 3  # of a step of 2: to 9 %
STEP_MIN = 2.0**0.5**HALVINGS
RATE_MIN, RATE_MAX = 100, 100_000_000
WIDTH = 10  # of a column


@dataclass(frozen=True, slots=True)
class Case:
    work: str
    program: str
    size: int
    batch_bytes: int  # of the raw load; librdkafka waits up to 5 ms for more
    codec: str
    clients: int
    first_rate: int

    def arguments(self, topic: str, rate: int) -> tuple[object, ...]:
        count = int(rate * TRIAL_S)
        if self.program == RAW:
            return topic, count, self.size, self.batch_bytes, self.clients, IN_FLIGHT, rate
        return topic, count, self.size, self.codec, self.clients, rate


def cases() -> list[Case]:
    return [
        *(
            Case(f"{size} B {codec}, {clients} with librdkafka", LOAD, size, 0, codec, clients, first)
            for size, first in ((100, 500_000), (1000, 100_000))
            for codec, clients in (("none", 1), ("none", 10), ("zstd", 1))
        ),
        *(
            Case(f"{size} B in {batch / 1000:.0f} KB requests, {clients} raw", RAW, size, batch, "none", clients, first)
            for size, batch, first, clients in (
                (100, JAVA_BATCH_BYTES, 400_000, 1),
                (100, JAVA_BATCH_BYTES, 800_000, 10),
                (1000, JAVA_BATCH_BYTES, 40_000, 1),
                (1000, JAVA_BATCH_BYTES, 80_000, 10),
                (1000, 1_100, 10_000, 10),
            )
        ),
    ]


@dataclass(frozen=True, slots=True)
class Trial:
    rate: int
    p99_ms: float
    cpu_s: float  # of the broker, for each second
    client_cpu_s: float
    stolen_s: float

    @property
    def per_cpu_s(self) -> float:
        return self.rate / self.cpu_s


class Search:
    """The trials of one work on one broker."""

    def __init__(self, load: Load, broker: Broker, case: Case, topic: str, limit_ms: float) -> None:
        self._load = load
        self._broker = broker
        self._case = case
        self._topic = topic
        self._limit_ms = limit_ms
        self.too_much: Trial | None = None  # the lowest rate that was not held, at its best

    def highest(self) -> Trial | None:
        """None when no rate is held."""
        best = self._search()
        if best is None:
            return None
        again = [self._run(best.rate).cpu_s for _ in range(RUNS_MORE)]
        return replace(best, cpu_s=min(best.cpu_s, *again))

    def _search(self) -> Trial | None:
        rate = self._case.first_rate
        best = self._held(rate)
        if best is None:
            while best is None and rate > RATE_MIN:
                rate //= 2
                best = self._held(rate)
        else:
            while best.rate * 2 <= RATE_MAX and (higher := self._held(best.rate * 2)) is not None:
                best = higher
        if best is None:
            return None
        step = 2.0
        for _ in range(HALVINGS):
            step **= 0.5
            best = self._held(int(best.rate * step)) or best
        return best

    def _held(self, rate: int) -> Trial | None:
        trials: list[Trial] = []
        while len(trials) < TRIALS_MAX and sum(one.stolen_s <= STOLEN_S_MAX for one in trials) < TRIALS:
            trials.append(self._run(rate))
            if trials[-1].p99_ms <= self._limit_ms:
                return trials[-1]
        if self.too_much is None or rate < self.too_much.rate:
            self.too_much = min(trials, key=lambda trial: trial.p99_ms)
        return None

    def _run(self, rate: int) -> Trial:
        case = self._case
        self._load.warm(int(rate * TRIAL_S), case.size)
        stolen_s, began = machine.stolen_s(), time.monotonic()
        done = self._load.run("", MILLION, "produce", *case.arguments(self._topic, rate), program=case.program)
        seconds = time.monotonic() - began
        assert done.latency_ms is not None
        return Trial(
            rate,
            done.latency_ms[1],
            done.cpu_per_million / seconds,
            done.client_cpu_per_million / seconds,
            machine.stolen_s() - stolen_s,
        )


Found = dict[str, Trial | None]


def measure(programs: Path, brokers: Sequence[Broker], limit_ms: float, only: str) -> dict[str, Found]:
    loads = [Load(programs, broker) for broker in brokers]
    for broker, load in zip(brokers, loads, strict=True):
        for _ in range(0 if isinstance(broker, Program) else WARM_UPS):
            load.warm_up()
    found: dict[str, Found] = {broker.name: {} for broker in brokers}
    for number, case in enumerate(case for case in cases() if only in case.work):
        print(f"\n{case.work}", flush=True)
        topic = f"paced-{number}"
        for broker, load in zip(brokers, loads, strict=True):
            broker.make_topic(topic)
            time.sleep(LEADER_S)
            os.sync()
            search = Search(load, broker, case, topic, limit_ms)
            trial = search.highest()
            broker.drop_topic(topic)
            found[broker.name][case.work] = trial
            print(f"  {broker.name:<24} {_said(trial)}{_beyond(search.too_much)}", flush=True)
    return found


def run(
    *,
    peers: bool = True,
    synced: bool = False,
    limit_ms: float = LIMIT_MS,
    only: str = "",
    ceiling: bool = True,
    cores: Cores | None = None,
) -> None:
    cores = cores or Cores()
    print(f"machine    {machine.describe()}\ncores      {cores}", flush=True)
    print(f"the highest rate with p99 <= {limit_ms:.0f} ms, to {STEP_MIN - 1:.0%}; acks=all, one partition")
    brokers: list[Broker] = [Headrace()] if synced else [Headrace(), Headrace(sync=False)]
    if peers:
        brokers += kafkas(flush=[True] if synced else [False, True])
    with ExitStack() as stack:
        programs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-kafka-load-")))
        build_load(programs)
        if ceiling:
            brokers += programs_that_are_none(programs)
        for broker in brokers:
            broker.cores = cores
            stack.enter_context(broker.running())
        found = measure(programs, brokers, limit_ms, only)
    for line in report(found):
        print(line)


def _said(trial: Trial | None) -> str:
    if trial is None:
        return "at no rate"
    cost = f"{trial.cpu_s * MILLION / trial.rate:7.3f} CPU-s/M"
    return f"{trial.rate:>10,}/s  p99 {trial.p99_ms:6.2f} ms  {cost}  client {trial.client_cpu_s:4.0%}"


def _beyond(trial: Trial | None) -> str:
    if trial is None:
        return ""
    stolen = f", {trial.stolen_s * 1000:.0f} ms stolen" if trial.stolen_s > STOLEN_S_MAX else ""
    return f"  (not {trial.rate:,}/s: p99 {trial.p99_ms:.0f} ms, client {trial.client_cpu_s:.0%}{stolen})"


@dataclass(frozen=True, slots=True)
class Times:
    """What one does, as so many times what another does."""

    rate: float
    per_cpu_s: float

    @classmethod
    def of(cls, one: Trial | None, other: Trial | None) -> "Times":
        if one is None:
            return cls(0.0, 0.0)
        if other is None:
            return cls(float("inf"), float("inf"))
        return cls(one.rate / other.rate, one.per_cpu_s / other.per_cpu_s)


@dataclass(frozen=True, slots=True)
class Bar:
    what: str
    better: str
    limit: str  # where even doing nothing is not enough


BY_CLOCK = Bar("the messages/s", "fast", "the client")
BY_CPU = Bar("per CPU-second", "cheap", "the system")


def report(found: dict[str, Found]) -> Iterator[str]:
    for ours, theirs in PAIRS:
        if ours in found and theirs in found:
            yield f"\n{ours} beside {theirs}: messages per second at the same latency, and per CPU-second of the broker"
            marks = (NOTHING, PLAIN) if theirs == KAFKA_FLUSH else (NOTHING,)  # the plain program syncs
            yield from _ratios(ours, theirs, [name for name in marks if name in found], found)


def _ratios(ours: str, theirs: str, marks: Sequence[str], found: dict[str, Found]) -> Iterator[str]:
    mine, others = found[ours], found[theirs]
    times = {name: {work: Times.of(found[name][work], others[work]) for work in mine} for name in (ours, *marks)}
    columns = [{ours: "ours", NOTHING: "at most"}.get(name, name) for name in times]
    if marks:
        yield f"  {'':<38}{'per s':>{WIDTH * len(columns)}}{'per CPU-s':>{WIDTH * len(columns)}}"
        yield f"  {'':<38}" + 2 * "".join(f"{column:>{WIDTH}}" for column in columns)
    for work in mine:
        if mine[work] is None or others[work] is None:
            yield f"  {work:<38} {ours if mine[work] is None else theirs} holds no rate"
            continue
        of_each = [one[work] for one in times.values()]
        ratios = [one.rate for one in of_each] + [one.per_cpu_s for one in of_each]
        yield f"  {work:<38}" + "".join(f"{ratio:>{WIDTH - 1}.2f}x" for ratio in ratios)
    most = times.get(NOTHING, {}).values()
    yield _verdict(BY_CLOCK, [one.rate for one in times[ours].values()], [one.rate for one in most])
    yield _verdict(BY_CPU, [one.per_cpu_s for one in times[ours].values()], [one.per_cpu_s for one in most])
    if PLAIN in marks:
        plain = times[PLAIN].values()
        by_clock, by_cpu = sum(one.rate >= TWICE for one in plain), sum(one.per_cpu_s >= TWICE for one in plain)
        yield f"  {PLAIN} is twice {theirs} in {by_clock} of {len(plain)} rows, per CPU-second in {by_cpu}"


def _verdict(bar: Bar, ratios: Sequence[float], most: Sequence[float]) -> str:
    """The verdict over all rows; `most` is empty if it was not measured."""
    twice = sum(ratio >= TWICE for ratio in ratios)
    held = "reached" if twice == len(ratios) else "MISSED"
    middle = sorted(ratios)[len(ratios) // 2]
    can_be = ""
    if most:
        beyond = sum(_is_beyond(*pair) for pair in zip(ratios, most, strict=True))
        can_be = " (within reach in all)"
        if beyond:
            can_be = f" (in {beyond} of the others not even a program that does nothing is twice as {bar.better})"
            if 0 < twice == len(ratios) - beyond:
                held = f"reached wherever {bar.limit} can"
    return f"  twice {bar.what}: {twice} of {len(ratios)} rows{can_be}, median {middle:.2f}x  {held}"


def _is_beyond(ratio: float, at_most: float) -> bool:
    """Whether no broker can be twice as good. A program slower than a broker by more than one step of the search
    was disturbed and proves nothing, so it excuses no row."""
    return max(ratio, at_most) < TWICE and at_most * STEP_MIN**1.5 >= max(ratio, 1.0)  # between one step and two


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kafka_latency", description=__doc__)
    parser.add_argument("--alone", action="store_true", help="without Apache Kafka")
    parser.add_argument("--synced", action="store_true", help="only those that sync before they answer")
    parser.add_argument("--limit", type=float, default=LIMIT_MS, metavar="MS", help="of p99 (default: %(default)s)")
    parser.add_argument("--no-ceiling", action="store_true", help="without the two programs that are no brokers")
    parser.add_argument("--only", default="", metavar="WORK", help="rows whose name has this in it")
    add_option(parser)
    arguments = parser.parse_args()
    if not any(arguments.only in case.work for case in cases()):
        parser.error(f"no row has {arguments.only!r} in its name: " + "; ".join(case.work for case in cases()))
    cores = chosen(parser, arguments)
    run(
        peers=not arguments.alone,
        synced=arguments.synced,
        limit_ms=arguments.limit,
        only=arguments.only,
        ceiling=not arguments.no_ceiling,
        cores=cores,
    )


if __name__ == "__main__":
    main()
