"""Parses and formats sizes, durations and addresses.

Parsers raise ValueError with a message that follows the name of a setting, such as "'5x' is not a size; write ...".
"""

import re
from collections.abc import Mapping

import msgspec

from headrace.log.settings import GB, KB, MB

_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)\s*([a-z]*)", re.I)
_SIZES = {
    "": 1,
    "b": 1,
    "k": KB,
    "kb": KB,
    "kib": KB,
    "m": MB,
    "mb": MB,
    "mib": MB,
    "g": GB,
    "gb": GB,
    "gib": GB,
}
_SIZES |= {"t": 1024 * GB, "tb": 1024 * GB, "tib": 1024 * GB}
_DURATIONS = {"": 1, "ms": 1, "s": 1000, "sec": 1000, "m": 60_000, "min": 60_000}
_DURATIONS |= {"h": 3_600_000, "d": 86_400_000, "w": 604_800_000}


class Address(msgspec.Struct, frozen=True):
    host: str
    port: int  # 0 = any free port

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_size(text: str) -> int:
    """Bytes in "256MB", "4 KB", "1.5g" or "1024"; units are powers of 1,024."""
    return quantity(text, _SIZES, "a size", "256MB, 4 KB or a number of bytes")


def parse_duration(text: str) -> int:
    """Milliseconds in "5s", "100ms", "1.5h", "7d" or "250" (milliseconds)."""
    return quantity(text, _DURATIONS, "a duration", "5s, 100ms, 7d or a number of milliseconds")


def format_size(size_bytes: int) -> str:
    for unit, scale in (("TB", 1024 * GB), ("GB", GB), ("MB", MB), ("KB", KB)):
        if size_bytes and size_bytes % scale == 0:
            return f"{size_bytes // scale}{unit}"
    return str(size_bytes)


def format_duration(duration_ms: int) -> str:
    for unit, scale in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if duration_ms and duration_ms % scale == 0:
            return f"{duration_ms // scale}{unit}"
    return f"{duration_ms}ms" if duration_ms else "0"


def parse_address(text: str, default_port: int) -> Address:
    """Address in "HOST:PORT", "HOST", ":PORT" or "PORT"; IPv6 hosts need brackets, `*` means all interfaces."""
    text = text.strip()
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]*))(?::(\d+))?", text)
    if match is None or not text:
        raise ValueError(f"{text!r} is not an address; write HOST:PORT, such as localhost:{default_port}, or off")
    host = match[1] or match[2] or ""
    port = int(match[3]) if match[3] else default_port
    if host.isdecimal() and not match[3]:
        host, port = "", int(host)
    if port > 65_535:
        raise ValueError(f"{port} is not a port; the highest port is 65535")
    return Address("0.0.0.0" if host == "*" else host or "localhost", port)


def quantity(text: str, units: Mapping[str, int], what: str, like: str) -> int:
    match = _NUMBER.fullmatch(text.strip().replace("_", "").replace(",", ""))
    scale = units.get(match[2].lower()) if match else None
    if match is None or scale is None:
        raise ValueError(f"{text!r} is not {what}; write {like}")
    # Whole numbers are computed as int: a float would round those above 2**53.
    number = float(match[1]) * scale if "." in match[1] else int(match[1]) * scale
    return int(number) if abs(number) < 2**63 else 2**63
