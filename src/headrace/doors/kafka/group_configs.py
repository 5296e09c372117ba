"""Settings of groups under Kafka's names. They come into effect at once, for members that are there, too."""

from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.broker.group_config import DEFAULTS
from headrace.errors import InvalidInput

if TYPE_CHECKING:
    from headrace.doors.kafka.door import KafkaDoor

SET, DELETE = 0, 1


class GroupSetting(NamedTuple):
    field: str  # of GroupConfig
    is_number: bool = True


SETTINGS: dict[str, GroupSetting] = {
    "consumer.heartbeat.interval.ms": GroupSetting("consumer_heartbeat_interval_ms"),
    "consumer.session.timeout.ms": GroupSetting("consumer_session_timeout_ms"),
    "share.auto.offset.reset": GroupSetting("start", is_number=False),
    "share.delivery.count.limit": GroupSetting("attempts_max"),
    "share.heartbeat.interval.ms": GroupSetting("heartbeat_interval_ms"),
    "share.isolation.level": GroupSetting("isolation", is_number=False),
    "share.partition.max.record.locks": GroupSetting("locks_max"),
    "share.record.lock.duration.ms": GroupSetting("lock_ms"),
    "share.session.timeout.ms": GroupSetting("session_timeout_ms"),
}


class Found(NamedTuple):
    name: str
    value: str
    is_default: bool
    is_number: bool


def found(door: "KafkaDoor", group_id: str) -> list[Found]:
    settings = door.coordination.shares.settings_of(group_id)
    values = [(name, one, getattr(settings, one.field)) for name, one in SETTINGS.items()]
    return [
        Found(name, str(value), value == getattr(DEFAULTS, one.field), one.is_number) for name, one, value in values
    ]


def parse(name: str, value: str | None) -> tuple[str, Any]:
    setting = SETTINGS.get(name)
    if setting is None:
        raise InvalidInput(f"Unknown group config name: {name}")
    if value is None or not setting.is_number:
        return setting.field, value
    try:
        return setting.field, int(value)
    except ValueError:
        raise InvalidInput(f"Invalid value {value} for configuration {name}: Not a number") from None


async def alter(door: "KafkaDoor", group_id: str, given: Any, *, replaces: bool, validate_only: bool) -> None:
    """All of it or, where something is wrong, nothing."""
    values: dict[str, Any] = dict.fromkeys(one.field for one in SETTINGS.values()) if replaces else {}
    for one in given:
        operation = getattr(one, "config_operation", SET)
        if operation not in (SET, DELETE):
            raise InvalidInput(f"{one.name} is not a list")
        taken_back = operation == DELETE
        field, value = parse(one.name, None if taken_back else one.value)
        values[field] = value
    shares = door.coordination.shares
    if validate_only:
        shares.settings_of(group_id).changed(values)
    else:
        await shares.configure(group_id, values)
