"""`headrace doctor`: checks of the environment, with advice for each problem."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import click

from headrace.cli.options import config_option, json_option, settings_file

GOOD, WARN, BAD = "ok", "warning", "missing"
SYNCS = 50
SYNC_MS_SLOW = 20.0
FILES_MIN = 4096
FREE_BYTES_MIN = 1 << 30
COLUMNS = ("check", "state", "found", "what_to_do")


class Finding(NamedTuple):
    check: str
    state: str
    found: str
    what_to_do: str = ""


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, readable=False),
    metavar="FOLDER",
    help="Data folder to check.  [default: the setting `data_dir`]",
)
@json_option
@config_option
def doctor(data_dir: Path | None, as_json: bool, config_file: Path | None) -> int:
    """Check the environment, and print what to do about each problem.

    Checks Python, the C compiler, Java, PySpark, limits, ports, and the disk of the data folder. Exits with 1 if a
    requirement is missing. Columns: check, state, found, what_to_do.
    """
    from headrace.cli.output import show_json, show_rows
    from headrace.config import load

    config = load(env=os.environ, file=settings_file(config_file))
    folder = data_dir or Path(config.data_dir)
    findings = [finding for check in CHECKS for finding in check()]
    findings += [*_ports(config), *_disk(folder)]
    rows = [finding._asdict() for finding in findings]
    if as_json:
        show_json({"checks": rows})
    else:
        show_rows(rows, COLUMNS)
    return 1 if any(finding.state == BAD for finding in findings) else 0


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = sys.version_info >= (3, 11)
    yield Finding("Python", GOOD if fits else BAD, version, "" if fits else "install Python 3.11 or newer")
    import headrace.record.batch.build as kernel

    compiled = not str(kernel.__file__).endswith(".py")
    yield Finding(
        "compiled kernels", GOOD if compiled else BAD, "yes" if compiled else "no", "" if compiled else "run make build"
    )
    try:
        yield Finding("uvloop", GOOD, metadata.version("uvloop"))
    except metadata.PackageNotFoundError:
        yield Finding(
            "uvloop", WARN, "not installed", "pip install uvloop: saves about a third of the CPU for small messages"
        )
    from headrace.record.compression import libzstd

    if libzstd.FOUND:
        yield Finding("libzstd", GOOD, "system library")
    else:
        advice = "install it to decompress zstd batches a third faster (Debian: apt install libzstd1)"
        yield Finding("libzstd", WARN, "not found", advice)


def _tools() -> Iterator[Finding]:
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    advice = "needed only to build from source (Debian: apt install build-essential python3-dev)"
    yield Finding("C compiler", GOOD if compiler else WARN, compiler or "none", "" if compiler else advice)
    npm = shutil.which("npm")
    advice = "needed only for the dashboard: install Node.js, then run make ui"
    yield Finding("npm", GOOD if npm else WARN, npm or "none", "" if npm else advice)
    import headrace

    modules = Path(headrace.__file__).parent / "listeners/http/ui/static/vendor/preact.js"
    there = modules.exists()
    yield Finding(
        "dashboard", GOOD if there else WARN, "complete" if there else "modules missing", "" if there else "run make ui"
    )


def _spark() -> Iterator[Finding]:
    from importlib.util import find_spec

    from headrace.errors import HeadraceError
    from headrace.pipelines.java import check_java

    try:
        yield Finding("Java", GOOD, str(check_java()))
    except HeadraceError as error:
        yield Finding("Java", WARN, "no suitable version", f"needed only for pipelines: {error}")
    spark = find_spec("pyspark") is not None
    advice = "" if spark else "pip install 'headrace[spark]'"
    yield Finding("PySpark", GOOD if spark else WARN, "installed" if spark else "none", advice)


def _limits() -> Iterator[Finding]:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fits = hard == resource.RLIM_INFINITY or hard >= FILES_MIN
    advice = "raise the limit with ulimit -Hn or LimitNOFILE=: each connection and segment is an open file"
    yield Finding("open files", GOOD if fits else WARN, f"{hard:,}", "" if fits else advice)


def _ports(config: object) -> Iterator[Finding]:
    import socket

    for listener in ("amqp", "kafka", "http"):
        address = getattr(config, listener)
        if address is None:
            yield Finding(f"port of {listener}", GOOD, "off")
            continue
        host = "127.0.0.1" if address.host == "localhost" else address.host
        try:
            with socket.create_server((host, address.port)):
                yield Finding(f"port of {listener}", GOOD, f"{address.port} is free")
        except OSError as error:
            # Not error.strerror, to which create_server adds the Python tuple of the address.
            reason = f"{address.port}: {os.strerror(error.errno).lower() if error.errno else error}"
            advice = f"a broker may be running; otherwise choose another address with --{listener} HOST:PORT"
            yield Finding(f"port of {listener}", WARN, reason, advice)


def _disk(folder: Path) -> Iterator[Finding]:
    advice = "choose another --data-dir, or run as its owner"
    place = folder
    try:
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        median = _sync_ms(place)
    except OSError as error:
        yield Finding("data folder", BAD, f"{place}: {(error.strerror or str(error)).lower()}", advice)
        return
    yield Finding("data folder", GOOD, str(folder))
    fits = free >= FREE_BYTES_MIN
    advice = "" if fits else "free some space, or choose another --data-dir"
    yield Finding("disk space", GOOD if fits else WARN, f"{free >> 20:,} MB free", advice)
    slow = median > SYNC_MS_SLOW
    advice = "every confirm waits for a sync: a disk with power-loss protection needs well under 1 ms"
    yield Finding("fdatasync, median", WARN if slow else GOOD, f"{median:.2f} ms", advice if slow else "")


def _sync_ms(place: Path) -> float:
    """Median time to sync a small write in the folder."""
    import tempfile

    times = []
    with tempfile.TemporaryFile(dir=place) as file:
        for _ in range(SYNCS):
            file.write(b"\0" * 4096)
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return sorted(times)[SYNCS // 2] * 1000


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_python, _tools, _spark, _limits)
