"""Group configs under Kafka's names. Changes apply at once, also to present members."""

from typing import Any, NamedTuple

from headrace.broker.groups.config import DEFAULTS
from headrace.errors import InvalidInput
from headrace.listeners.kafka.context import KafkaContext

SET, DELETE = 0, 1
Kind = type[int] | type[str] | type[bool]
BOOLEANS = {"true": True, "false": False}


class GroupSetting(NamedTuple):
    field: str  # of GroupConfig
    kind: Kind = int


SETTINGS: dict[str, GroupSetting] = {
    "consumer.assignment.interval.ms": GroupSetting("consumer_assignment_interval_ms"),
    "consumer.assignor.offload.enable": GroupSetting("consumer_assignor_offload", kind=bool),
    "consumer.heartbeat.interval.ms": GroupSetting("consumer_heartbeat_interval_ms"),
    "consumer.session.timeout.ms": GroupSetting("consumer_session_timeout_ms"),
    "share.assignment.interval.ms": GroupSetting("share_assignment_interval_ms"),
    "share.assignor.offload.enable": GroupSetting("share_assignor_offload", kind=bool),
    "share.auto.offset.reset": GroupSetting("start", kind=str),
    "share.delivery.count.limit": GroupSetting("attempts_max"),
    "share.heartbeat.interval.ms": GroupSetting("heartbeat_interval_ms"),
    "share.isolation.level": GroupSetting("isolation", kind=str),
    "share.partition.max.record.locks": GroupSetting("locks_max"),
    "share.record.lock.duration.ms": GroupSetting("lock_ms"),
    "share.renew.acknowledge.enable": GroupSetting("renews", kind=bool),
    "share.session.timeout.ms": GroupSetting("session_timeout_ms"),
}


class Found(NamedTuple):
    name: str
    value: str
    is_default: bool
    kind: Kind


def found(context: KafkaContext, group_id: str) -> list[Found]:
    settings = context.coordination.group_configs.get(group_id)
    values = [(name, one, getattr(settings, one.field)) for name, one in SETTINGS.items()]
    return sorted(
        Found(name, shown(value), value == getattr(DEFAULTS, one.field), one.kind) for name, one, value in values
    )


def shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse(name: str, kind: Kind, value: str) -> Any:
    if kind is str:
        return value
    if kind is bool:
        if value.lower() not in BOOLEANS:
            raise InvalidInput(f"Invalid value {value} for configuration {name}: must be true or false")
        return BOOLEANS[value.lower()]
    try:
        return int(value)
    except ValueError:
        raise InvalidInput(f"Invalid value {value} for configuration {name}: Not a number") from None


async def alter(context: KafkaContext, group_id: str, given: Any, *, replaces: bool, validate_only: bool) -> None:
    """Change all given configs, or none if one is invalid."""
    values: dict[str, Any] = dict.fromkeys(one.field for one in SETTINGS.values()) if replaces else {}
    for one in given:
        operation = getattr(one, "config_operation", SET)
        if operation not in (SET, DELETE):
            raise InvalidInput(f"{one.name} is not a list")
        value = None if operation == DELETE else one.value
        setting = SETTINGS.get(one.name)
        if setting is None:
            raise InvalidInput(f"Unknown group config name: {one.name}")
        values[setting.field] = None if value is None else parse(one.name, setting.kind, value)
    configs = context.coordination.group_configs
    if validate_only:
        configs.get(group_id).changed(values)
    else:
        await configs.change(group_id, values)
