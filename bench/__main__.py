"""`make bench`: every figure of the log beside the limits of this machine, and the scorecard."""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import log, machine
from bench.result import Result
from bench.scorecard import scorecard
from headrace.allocator import keep_freed_memory

HERE = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("--quick", action="store_true", help="a quarter of the work, without the 10 M recovery")
    parser.add_argument("--json", action="store_true", help="one JSON line per figure instead of tables")
    parser.add_argument("--base", metavar="REV", help="run the same at REV, too, and print before and after")
    options = parser.parse_args()
    if options.base:
        compare(options.base, quick=options.quick)
        return
    results = measure(quick=options.quick, quiet=options.json)
    if options.json:
        for result in results:
            print(json.dumps(result.json()))


def measure(*, quick: bool, quiet: bool) -> list[Result]:
    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    folder = tempfile.gettempdir()
    keep_freed_memory()  # as the broker does
    say(f"machine    {machine.describe()}")
    machine.warm_page_cache(folder)
    limits = machine.measure(folder)
    say(
        f"limits     page cache {limits.page_cache_write_mb_per_cpu_s:,.0f} MB written and "
        f"{limits.page_cache_read_mb_per_cpu_s:,.0f} MB read per CPU-s; fdatasync of 4 KB p50 "
        f"{limits.fdatasync_4k_p50_ms:.2f} ms, p99 {limits.fdatasync_4k_p99_ms:.2f} ms; memcpy "
        f"{limits.memcpy_mb_per_s:,.0f} MB/s; CRC32C {limits.crc_mb_per_s:,.0f} MB/s"
    )
    say("settings   defaults: every append is on stable storage before it is confirmed (fdatasync)\n")
    results: list[Result] = []

    def take(more: list[Result]) -> None:
        results.extend(more)
        for result in more:
            say(result.line())

    take(asyncio.run(log.run(limits, quick=quick)))
    from bench import record

    take(record.results())
    take(log.recovery(1_000_000))
    if not quick:
        take(log.recovery(10_000_000))
    say("")
    for line in scorecard(results):
        say(line)
    return results


def compare(revision: str, *, quick: bool) -> None:
    """Check the revision out beside this one, build it, and run both, base first."""
    folder = tempfile.mkdtemp(prefix="headrace-base-")
    flags = ["--json"] + (["--quick"] if quick else [])
    try:
        subprocess.run(["git", "worktree", "add", "--detach", folder, revision], cwd=HERE, check=True)
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=folder, check=True)
        before, after = (_run_in(where, flags) for where in (folder, str(HERE)))
        print(f"{'figure':<70} {'before':>12} {'after':>12}  change")
        for name, value in after.items():
            old = before.get(name)
            change = f"{value / old:.2f}x" if old else "new"
            print(f"{name:<70} {old if old is not None else '-':>12} {value:>12}  {change}")
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=HERE, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _run_in(folder: str, flags: list[str]) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": f"{folder}/src:{folder}"}
    done = subprocess.run(
        [sys.executable, "-m", "bench", *flags], cwd=folder, env=environment, check=True, capture_output=True, text=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"].partition(":")[0]: round(line["value"], 3) for line in lines}


if __name__ == "__main__":
    main()
