"""The machine and its limits, measured in the same run as everything they are compared with."""

import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from crc32c import crc32c

STEAL_FIELD = 8  # of the first line of /proc/stat, behind its name
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    page_cache_write_mb_per_cpu_s: float
    page_cache_read_mb_per_cpu_s: float
    fdatasync_4k_p50_ms: float
    fdatasync_4k_p99_ms: float
    memcpy_mb_per_s: float
    crc_mb_per_s: float


def describe() -> str:
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    load = os.getloadavg()[0]
    pacing = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return (
        f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, TCP {pacing}, load average {load:.1f} at the start"
    )


def warm_page_cache(folder: str, size_mb: int = 1024) -> None:
    """Touch memory once: pages that a guest uses for the first time cost five times as much. With a file, whose pages
    are those that the brokers will use. The disk has nothing left to do for it when this returns."""
    with tempfile.TemporaryFile(dir=folder) as file:
        block = b"\1" * MB
        for _ in range(size_mb):
            file.write(block)
    os.sync()


def stolen_s() -> float:
    """CPU that the host gave to others while this machine wanted it, since it started."""
    line = Path("/proc/stat").read_text().splitlines()[0]
    return int(line.split()[STEAL_FIELD]) / os.sysconf("SC_CLK_TCK")


def fdatasync_ms(folder: str, count: int = 300) -> list[float]:
    """How long a sync of 4 KB takes, again and again."""
    syncs = []
    block = os.urandom(4096)
    with tempfile.TemporaryFile(dir=folder) as file:
        fd = file.fileno()
        for at in range(0, count * len(block), len(block)):
            os.pwrite(fd, block, at)
            began = time.perf_counter()
            os.fdatasync(fd)
            syncs.append((time.perf_counter() - began) * 1000)
    return syncs


def measure(folder: str) -> Limits:
    with tempfile.TemporaryFile(dir=folder) as file:
        fd = file.fileno()
        block = os.urandom(64 * 1024)
        for at in range(0, 256 * MB, len(block)):
            os.pwrite(fd, block, at)
        started = time.process_time()
        for at in range(0, 256 * MB, len(block)):
            os.pwrite(fd, block, at)
        write = 256 / (time.process_time() - started)
        started = time.process_time()
        for at in range(0, 256 * MB, len(block)):
            os.pread(fd, len(block), at)
        read = 256 / (time.process_time() - started)
    syncs = fdatasync_ms(folder)
    big = bytearray(os.urandom(64 * MB))
    target = bytearray(len(big))
    began = time.perf_counter()
    for _ in range(8):
        target[:] = big
    memcpy = 8 * 64 / (time.perf_counter() - began)
    began = time.perf_counter()
    for at in range(0, len(big), 65536):
        crc32c(memoryview(big)[at : at + 65536])
    crc = 64 / (time.perf_counter() - began)
    return Limits(write, read, statistics.median(syncs), sorted(syncs)[int(len(syncs) * 0.99)], memcpy, crc)
