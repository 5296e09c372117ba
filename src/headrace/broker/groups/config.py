"""Configuration of single groups (share groups and consumer groups). Defaults and bounds are Kafka's."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.errors import InvalidInput

LATEST, EARLIEST, BY_DURATION = "latest", "earliest", "by_duration:"
DURATION = re.compile(
    r"P(?=.)(?:(\d{1,6})D)?(?:T(?=.)(?:(\d{1,9})H)?(?:(\d{1,9})M)?(?:(\d{1,9}(?:\.\d{0,9})?)S)?)?", re.IGNORECASE
)
DURATION_S = (86400, 3600, 60, 1)
READ_UNCOMMITTED, READ_COMMITTED = "read_uncommitted", "read_committed"
WORDS = {"start": (LATEST, EARLIEST), "isolation": (READ_UNCOMMITTED, READ_COMMITTED)}
SESSION_MS, HEARTBEAT_MS = (45_000, 60_000), (5_000, 15_000)
ASSIGNMENT_MS = (0, 15_000)
BOUNDS = {
    "lock_ms": (15_000, 60_000),
    "session_timeout_ms": SESSION_MS,
    "heartbeat_interval_ms": HEARTBEAT_MS,
    "attempts_max": (2, 10),
    "locks_max": (100, 10_000),
    "consumer_session_timeout_ms": SESSION_MS,
    "consumer_heartbeat_interval_ms": HEARTBEAT_MS,
    "consumer_assignment_interval_ms": ASSIGNMENT_MS,
    "share_assignment_interval_ms": ASSIGNMENT_MS,
}


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of a share group; the `consumer_*` settings are for consumer groups."""

    start: str = (
        LATEST  # on partitions that the group has not read yet: latest, earliest, or by_duration:PT1H (an hour ago)
    )
    isolation: str = READ_UNCOMMITTED
    lock_ms: int = 30_000
    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    attempts_max: int = 5
    locks_max: int = 2_000  # acquired records per partition
    renews: bool = True  # members may renew their locks
    consumer_session_timeout_ms: int = 45_000
    consumer_heartbeat_interval_ms: int = 5_000
    # Without effect: they limit how often Kafka computes the assignments of large groups, and where. Here assignments
    # are computed whenever something changes.
    consumer_assignment_interval_ms: int = 0
    consumer_assignor_offload: bool = False
    share_assignment_interval_ms: int = 0
    share_assignor_offload: bool = False

    @property
    def start_age_ms(self) -> int | None:
        """The age of `by_duration:`, or None."""
        return _age_ms(self.start) if self.start.startswith(BY_DURATION) else None

    @property
    def reads_committed(self) -> bool:
        return self.isolation == READ_COMMITTED

    def changed(self, values: Mapping[str, Any]) -> "GroupConfig":
        """A copy with other values; None resets a setting to its default."""
        given = {name: getattr(DEFAULTS, name) if value is None else value for name, value in values.items()}
        for name, value in given.items():
            least, most = BOUNDS.get(name, (None, None))
            if least is not None and most is not None and not least <= value <= most:
                raise InvalidInput(f"{value} is not between {least} and {most}")
            words = WORDS.get(name)
            if words is not None and value not in words and (name != "start" or _age_ms(value) is None):
                raise InvalidInput(f"{value!r} is neither {' nor '.join(words)}")
        return msgspec.structs.replace(self, **given)


def _age_ms(start: str) -> int | None:
    found = DURATION.fullmatch(start.removeprefix(BY_DURATION)) if start.startswith(BY_DURATION) else None
    if found is None:
        return None
    return round(1000 * sum(float(one) * unit for one, unit in zip(found.groups("0"), DURATION_S, strict=True)))


DEFAULTS = GroupConfig()


def encode(settings: GroupConfig) -> bytes:
    return msgspec.msgpack.encode(settings)


def decode(saved: bytes) -> GroupConfig:
    if saved in (b"earliest", b"latest"):  # the format of the first versions
        return GroupConfig(start=saved.decode())
    return msgspec.msgpack.decode(saved, type=GroupConfig)
