"""What a share group can be told about itself; what it was not told is as in Kafka, and so are the bounds."""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.errors import InvalidInput

LATEST, EARLIEST = "latest", "earliest"
BOUNDS = {
    "lock_ms": (15_000, 60_000),
    "session_timeout_ms": (45_000, 60_000),
    "heartbeat_interval_ms": (5_000, 15_000),
    "attempts_max": (2, 10),
    "locks_max": (100, 10_000),
}


class ShareSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    start: str = LATEST  # on partitions that the group has not read yet
    lock_ms: int = 30_000
    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    attempts_max: int = 5
    locks_max: int = 2_000  # records out at once, per partition

    def changed(self, values: Mapping[str, Any]) -> "ShareSettings":
        """None is what holds by itself."""
        given = {name: getattr(DEFAULTS, name) if value is None else value for name, value in values.items()}
        for name, value in given.items():
            least, most = BOUNDS.get(name, (None, None))
            if least is not None and most is not None and not least <= value <= most:
                raise InvalidInput(f"{value} is not between {least} and {most}")
        if given.get("start", LATEST) not in (LATEST, EARLIEST):
            raise InvalidInput(f"{given['start']!r} is neither {LATEST} nor {EARLIEST}")
        return msgspec.structs.replace(self, **given)


DEFAULTS = ShareSettings()


def encode(settings: ShareSettings) -> bytes:
    return msgspec.msgpack.encode(settings)


def decode(saved: bytes) -> ShareSettings:
    if saved in (b"earliest", b"latest"):  # all that there was to be told, once
        return ShareSettings(start=saved.decode())
    return msgspec.msgpack.decode(saved, type=ShareSettings)
