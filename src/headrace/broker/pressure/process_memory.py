"""The memory limit of the machine or container, and the resident memory of this process."""

import os
import resource

from headrace.log.disk.disk import Disk, RealDisk

KB, GB = 1 << 10, 1 << 30
AUTO_LIMIT_MAX = 2 * GB
AUTO_LIMIT_SHARE = 0.4
SELF_STATM = "/proc/self/statm"
SELF_CGROUP = "/proc/self/cgroup"
CGROUPS = "/sys/fs/cgroup"
# Kernel files report no size; all files read here are shorter than this.
KERNEL_FILE_BYTES_MAX = 4096


class ProcessMemory:
    """The resident memory of this process, cheap enough to read many times a second."""

    def __init__(self, disk: Disk | None = None) -> None:
        self._disk = disk or RealDisk()
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        try:
            self._file: int | None = self._disk.open(SELF_STATM, readonly=True)
        except OSError:
            self._file = None  # not Linux

    def rss_bytes(self) -> int:
        if self._file is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KB  # the peak: the only value there is
        return int(self._disk.pread(self._file, 128, 0).split()[1]) * self._page_bytes

    def close(self) -> None:
        if self._file is not None:
            self._disk.close(self._file)
            self._file = None


def memory_limit(configured: int) -> int:
    """The configured limit; for 0, 2 GB or 40 % of the available memory, whichever is less."""
    return configured or min(AUTO_LIMIT_MAX, int(memory_bytes() * AUTO_LIMIT_SHARE))


def memory_bytes(disk: Disk | None = None) -> int:
    """The memory of the machine, or of the container if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    disk = disk or RealDisk()
    return min([total, *(limit for path in _limit_files(disk) if (limit := _number(disk, path)) is not None)])


def _limit_files(disk: Disk) -> list[str]:
    """The cgroup limits of this process: of its group and of all groups above, in cgroup v1 and v2."""
    found: list[str] = []
    for line in (_read(disk, SELF_CGROUP) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if "memory" in controllers.split(","):
            root, name = f"{CGROUPS}/memory", "memory.limit_in_bytes"
        elif not controllers:
            root, name = CGROUPS, "memory.max"
        else:
            continue
        parts = [part for part in group.split("/") if part]
        # In a container the path may be the host's, while the mount begins at the group itself: try every prefix.
        found += ["/".join([root, *parts[:depth], name]) for depth in range(len(parts), -1, -1)]
    return found


def _number(disk: Disk, path: str) -> int | None:
    text = (_read(disk, path) or "").strip()
    return int(text) if text.isdecimal() else None  # "max" is no limit


def _read(disk: Disk, path: str) -> str | None:
    try:
        file = disk.open(path, readonly=True)
    except OSError:
        return None
    try:
        return disk.pread(file, KERNEL_FILE_BYTES_MAX, 0).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        disk.close(file)
