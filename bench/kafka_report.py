"""What bench/kafka.py says in the end: ours beside Kafka, row by row, and which bars were reached.

Like is compared with like: brokers that sync with each other, and brokers that use the page cache with each other; also
Headrace by default, with a sync, with Kafka by default, without.

"At most" is what a broker that costs nothing could reach with the same client on the same cores: the client's own CPU
time bounds every ratio in wall-clock time, and where that bound is below two no broker reaches twice.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from bench.cores import Cores
from bench.kafka_peers import KAFKA, KAFKA_FLUSH, OURS, OURS_CACHED

TWICE = 2.0
PAIRS = ((OURS, KAFKA_FLUSH), (OURS_CACHED, KAFKA), (OURS, KAFKA))
BARS = {("produce", 100): 0.25, ("produce", 1000): 1.2, ("fetch", 100): 0.12, ("fetch", 1000): 0.8}
SMALL_MESSAGES_PROMISED = 1_000_000


@dataclass(frozen=True, slots=True)
class Measured:
    work: str
    rate: float
    cpu_per_million: float  # of the broker
    client_cpu_per_million: float
    latency_ms: tuple[float, float] | None  # p50 and p99 of the acknowledgement; a fetch has none

    def line(self) -> str:
        latency = f"  p50 {self.latency_ms[0]:8.2f}  p99 {self.latency_ms[1]:8.2f} ms" if self.latency_ms else ""
        return (
            f"  {self.work:<42} {self.rate:>11,.0f}/s {self.cpu_per_million:8.3f} CPU-s/M "
            f"(client {self.client_cpu_per_million:7.3f}){latency}"
        )


Rows = Mapping[str, Measured]


def pairs(measured: Mapping[str, Rows]) -> dict[str, tuple[Rows, Rows]]:
    """Ours and theirs, of what was measured."""
    return {f"{a} beside {b}": (measured[a], measured[b]) for a, b in PAIRS if measured.get(a) and measured.get(b)}


def report(measured: Mapping[str, Rows], memory: Mapping[str, float], cores: Cores) -> Iterator[str]:
    ours = measured.get(OURS, {})
    beside = pairs(measured)
    if beside:
        yield from _ratios(ours, beside, cores)
    yield ""
    yield from _bars(ours, beside, memory)
    yield ""
    yield "scorecard (promised by the design documents, measured now, `make bench ONLY=kafka`)"
    for work in ("produce 100 B none, 1 producer", "produce 100 B none, 10 producers"):
        if work in ours:
            rate = ours[work].rate
            held = "reached" if rate >= SMALL_MESSAGES_PROMISED else "MISSED"
            yield f"  1,000,000 small messages/s        {rate:,.0f}/s, each on disk when acknowledged  ({work})  {held}"


def _ratios(works: Iterable[str], beside: Mapping[str, tuple[Rows, Rows]], cores: Cores) -> Iterator[str]:
    yield ""
    yield f"messages per second (wall clock, same cores: {cores}) and per CPU-second of the broker"
    for number, name in enumerate(beside, 1):
        yield f"  [{number}] {name}"
    heads = "".join(f"{f'[{n}] per s':>12}{'at most':>9}{'per CPU-s':>11}" for n in range(1, len(beside) + 1))
    yield f"  {'':<42}{heads}"
    for work in works:
        cells = ""
        for ours, theirs in beside.values():
            one, other = ours.get(work), theirs.get(work)
            if one is None or other is None:
                cells += f"{'-':>12}{'-':>9}{'-':>11}"
            else:
                cells += f"{one.rate / other.rate:>11.2f}x{_at_most(one, other, cores):>8.2f}x"
                cells += f"{other.cpu_per_million / one.cpu_per_million:>10.2f}x"
        yield f"  {work:<42}{cells}"


def _at_most(one: Measured, other: Measured, cores: Cores) -> float:
    client_s = min(one.client_cpu_per_million, other.client_cpu_per_million) / 1e6
    return len(cores.load) / client_s / other.rate


def _bars(ours: Rows, beside: Mapping[str, tuple[Rows, Rows]], memory: Mapping[str, float]) -> Iterator[str]:
    yield "bars"
    for work, one in ours.items():
        bar = _bar_of(work)
        if bar is not None:
            yield _bar(f"{work}, CPU-s/M", f"{one.cpu_per_million:.3f}", f"<= {bar}", one.cpu_per_million <= bar)
    for name, (mine, theirs) in beside.items():
        # A paced load has the rate it was given: only what ran as fast as it could has a throughput.
        both = [(one, theirs[work]) for work, one in mine.items() if work in theirs and not work.startswith("paced")]
        for load, is_raw in (("raw", True), ("clients", False)):
            yield from _twice(f"{name} ({load})", [pair for pair in both if (" raw " in pair[0].work) == is_raw])
    for one_name, other_name in PAIRS:
        if one_name in memory and other_name in memory:
            value = f"{memory[one_name]:.0f} of {memory[other_name]:.0f} MB"
            is_half = memory[one_name] <= memory[other_name] / 2
            yield _bar(f"memory of {one_name} beside {other_name}", value, "half", is_half)


def _twice(name: str, both: list[tuple[Measured, Measured]]) -> Iterator[str]:
    if not both:
        return
    wall = sorted(one.rate / other.rate for one, other in both)
    cpu = sorted(other.cpu_per_million / one.cpu_per_million for one, other in both)
    for what, ratios in (("messages/s", wall), ("messages per CPU-s", cpu)):
        twice = sum(ratio >= TWICE for ratio in ratios)
        value = f"{twice} of {len(ratios)} rows, median {ratios[len(ratios) // 2]:.2f}x, least {ratios[0]:.2f}x"
        yield _bar(f"twice the {what}: {name}", value, "all rows", twice == len(ratios))


def _bar(what: str, value: str, bar: str, held: bool) -> str:
    return f"  {what:<78} {value:<42} {bar:<9} {'reached' if held else 'MISSED'}"


def _bar_of(work: str) -> float | None:
    if "none, 1 producer" not in work or work.endswith("producers"):
        return None
    kind, size, *_ = work.split()
    return BARS.get((kind, int(size)))
