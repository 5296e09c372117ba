"""One line per figure of the design documents: what they promise, what we measured, and the command."""

import re
from collections.abc import Iterator

from bench.result import Result, number

COMMAND = "make bench"


def scorecard(results: list[Result]) -> Iterator[str]:
    yield f"scorecard (promised by the design documents, measured now, `{COMMAND}`)"
    for promise, ours in _lines(results):
        yield f"  {promise:<64} {ours}"


def _lines(results: list[Result]) -> Iterator[tuple[str, str]]:
    rate = _confirmed_rate(results, "append 1000 B in batches of 60")
    yield "601,000 appends/s of 1 KB (theirs: flushed once a second)", f"{rate:,.0f}/s, each on disk when confirmed"
    yield "write 1 GB/s", f"{rate * 1000 / 1e9:.2f} GB/s confirmed"
    sequential = _find(results, "sequential read")
    if sequential:
        found = re.search(r"([\d,]+)/s, ([\d.]+) GB/s", sequential.name)
        yield "500,000 reads/s of 1 KB", f"{found[1] if found else '?'}/s"
        yield "read 2 GB/s", f"{found[2] if found else '?'} GB/s, checksums verified"
    for promise, name in (
        ("100,000 random reads/s", "random read of one record, 1 KB in batches of 1"),
        ("1,000,000 index lookups/s", "index lookup"),
        ("compression 3:1", "zstd"),
        ("recovery under 10 s per million", "open 1 M records of 1 KB after a clean stop"),
        ("", "open 1 M + 1 M records after a kill"),
        ("", "open 10 M records of 1 KB after a clean stop"),
        ("", "open 10 M + 1 M records after a kill"),
    ):
        result = _find(results, name)
        if result:
            yield promise, f"{number(result.value)} {result.unit}  ({result.name})"


def _find(results: list[Result], prefix: str) -> Result | None:
    return next((result for result in results if result.name.startswith(prefix)), None)


def _confirmed_rate(results: list[Result], prefix: str) -> float:
    result = _find(results, prefix)
    found = re.search(r"([\d,]+)/s confirmed", result.name) if result else None
    return float(found[1].replace(",", "")) if found else 0.0
