"""DescribeConfigs and AlterConfigs: topic settings under Kafka's names, and the broker settings that tools read."""

import re
from collections import Counter
from collections.abc import Callable, Container, Mapping
from functools import partial
from math import nan
from typing import Any, NamedTuple

from headrace.broker.cooperative import YieldEvery
from headrace.broker.streams.streams import Stream
from headrace.broker.transactions.coordinator import ID_EXPIRATION_MS
from headrace.config import stream_settings
from headrace.errors import HeadraceError, InvalidInput
from headrace.listeners.kafka.admin import config_docs
from headrace.listeners.kafka.auth.access import AnyUser
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.errors import Code, code_of
from headrace.listeners.kafka.groups import configs
from headrace.listeners.kafka.request_pipeline import Request

TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32
SOURCE_TOPIC, SOURCE_STATIC, SOURCE_DEFAULT, SOURCE_GROUP = 1, 4, 5, 8
SET, DELETE, APPEND, SUBTRACT = 0, 1, 2, 3
BOOLEAN, STRING, INT, SHORT, LONG, DOUBLE, LIST = 1, 2, 3, 4, 5, 6, 7
GROUP_KINDS = {int: INT, str: STRING, bool: BOOLEAN}
FROM_KAFKA = {"uncompressed": "none", "CreateTime": "create", "LogAppendTime": "append"}  # Kafka's value: ours
TO_KAFKA = {"create": "CreateTime", "append": "LogAppendTime"}
PRODUCER = "producer"  # compression.type: keep the producer's compression
LAG_MAX = "max.compaction.lag.ms"
NEVER = 9223372036854775807
NO_DEFAULT_GROUP = "Default group resources are not allowed."
DIRTY_RATIO = "min.cleanable.dirty.ratio"  # 0 to 1; the broker's setting is in percent
Changes = Callable[[Stream, Any], dict[str, object]]  # (topic, configs in a request) -> changed settings


class InvalidConfig(InvalidInput):
    """A config that topics do not have, or an invalid value."""


class UnclearChange(InvalidInput):
    """The request is ambiguous or incomplete."""


class Value(NamedTuple):
    name: str
    value: str
    source: int


class ConfigValue(NamedTuple):
    name: str
    value: str
    source: int
    kind: int
    inherited: Value | None = None  # the broker's value, which applies without this one


class TopicSetting(NamedTuple):
    ours: str  # the name of the broker's setting
    field: str  # its field in StreamSettings
    kind: int
    of_broker: str  # Kafka's name of the broker config that it inherits


SETTINGS: dict[str, TopicSetting] = {
    "cleanup.policy": TopicSetting("cleanup_policy", "cleanup_policy", LIST, "log.cleanup.policy"),
    "compression.type": TopicSetting("compression", "compression", STRING, "compression.type"),
    "delete.retention.ms": TopicSetting(
        "tombstone_retention", "tombstone_retention_ms", LONG, "log.cleaner.delete.retention.ms"
    ),
    "index.interval.bytes": TopicSetting("index_interval", "index_interval", INT, "log.index.interval.bytes"),
    LAG_MAX: TopicSetting("compaction_lag_max", "compaction_lag_max_ms", LONG, "log.cleaner.max.compaction.lag.ms"),
    "max.message.bytes": TopicSetting("batch_bytes_max", "batch_bytes_max", INT, "message.max.bytes"),
    "message.timestamp.type": TopicSetting("timestamp_type", "timestamp_type", STRING, "log.message.timestamp.type"),
    DIRTY_RATIO: TopicSetting(
        "compaction_dirty_percent", "compaction_dirty_percent", DOUBLE, "log.cleaner.min.cleanable.ratio"
    ),
    "min.compaction.lag.ms": TopicSetting(
        "compaction_lag", "compaction_lag_ms", LONG, "log.cleaner.min.compaction.lag.ms"
    ),
    "retention.bytes": TopicSetting("retention_bytes", "retention_bytes", LONG, "log.retention.bytes"),
    "retention.ms": TopicSetting("retention_ms", "retention_ms", LONG, "log.retention.ms"),
    "segment.bytes": TopicSetting("segment_size", "segment_size", INT, "log.segment.bytes"),
    "segment.ms": TopicSetting("segment_age", "segment_age_ms", LONG, "log.roll.ms"),
}

# Configs that have no effect on a single broker that syncs before it confirms, with their effective values. Setting
# them is accepted, so that tools that set them on every topic work, and changes nothing.
FIXED: dict[str, tuple[str, int]] = {
    "file.delete.delay.ms": ("0", LONG),
    "flush.messages": ("1", LONG),
    "flush.ms": ("0", LONG),
    "follower.replication.throttled.replicas": ("", LIST),
    "leader.replication.throttled.replicas": ("", LIST),
    "message.downconversion.enable": ("false", BOOLEAN),
    "message.timestamp.after.max.ms": (str(NEVER), LONG),
    "message.timestamp.before.max.ms": (str(NEVER), LONG),
    "message.timestamp.difference.max.ms": (str(NEVER), LONG),
    "min.insync.replicas": ("1", INT),
    "preallocate": ("false", BOOLEAN),
    "segment.index.bytes": ("10485760", INT),
    "segment.jitter.ms": ("0", LONG),
    "unclean.leader.election.enable": ("false", BOOLEAN),
}
# Fixed, and other values are refused, because they would promise something that the broker does not do.
ONLY: dict[str, tuple[str, int]] = {
    "remote.storage.enable": ("false", BOOLEAN),
}


KNOWN = {*SETTINGS, *FIXED, *ONLY}
MINIMUM = {"flush.messages": 1, "min.insync.replicas": 1, "segment.index.bytes": 4, LAG_MAX: 1}  # of other configs: 0
UNLIMITED = {"retention.bytes", "retention.ms"}  # -1 means unlimited
MAXIMUM = {INT: (1 << 31) - 1, LONG: NEVER}
THROTTLED = re.compile(r"\s*(\*|\d+:\d+)?\s*")  # a throttled replica: partition:broker


def overrides(given: Mapping[str, str | None]) -> dict[str, object]:
    """The broker's settings and values for Kafka's. None resets a setting to the broker's default."""
    changed: dict[str, object] = {}
    for name, value in given.items():
        if name in ONLY:
            if value is not None and value.lower() != ONLY[name][0].lower():
                raise InvalidConfig(f"{name} must be {ONLY[name][0]}, not {value!r}")
        elif name in FIXED:
            check_fixed(name, FIXED[name][1], value)
        else:
            setting = SETTINGS.get(name)
            if setting is None:
                raise InvalidConfig(f"Unknown topic config name: {name}")
            changed[setting.ours] = parse(name, setting, value)
    return changed


def parse(name: str, setting: TopicSetting, value: str | None) -> object:
    if value is None or (name == "compression.type" and value == PRODUCER):
        return None
    if name == DIRTY_RATIO:
        return percent_of(value)
    if setting.kind not in (INT, LONG):
        return FROM_KAFKA.get(value, value)
    number = parse_number(name, setting.kind, value)
    # Kafka's tools write Long.MAX_VALUE for unlimited; the broker's settings hold at most 2**53.
    is_unlimited = number > 1 << 53 and (name == LAG_MAX or name.startswith("retention."))
    return -1 if is_unlimited else min(number, 1 << 53)


def parse_number(name: str, kind: int, value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        raise InvalidConfig(f"Invalid value {value} for configuration {name}: Not a number") from None
    least = -1 if name in UNLIMITED else MINIMUM.get(name, 0)
    if number < least:
        raise InvalidConfig(f"Invalid value {value} for configuration {name}: Value must be at least {least}")
    if number > MAXIMUM[kind]:
        raise InvalidConfig(f"Invalid value {value} for configuration {name}: Value must be at most {MAXIMUM[kind]}")
    return number


def check_fixed(name: str, kind: int, value: str | None) -> None:
    """The config has no effect, but an invalid value is refused, as in Kafka."""
    if value is None:
        return
    if kind in MAXIMUM:
        parse_number(name, kind, value)
    elif kind == BOOLEAN and value.strip().lower() not in ("true", "false"):
        raise InvalidConfig(f"Invalid value {value} for configuration {name}: Expected true or false")
    elif kind == LIST and not all(THROTTLED.fullmatch(one) for one in value.split(",")):
        raise InvalidConfig(f"Invalid value {value} for configuration {name}: [partitionId]:[brokerId], or *")


def percent_of(ratio: str) -> int:
    try:
        share = float(ratio)
    except ValueError:
        share = nan
    if not 0 <= share <= 1:
        raise InvalidConfig(f"Invalid value {ratio} for configuration {DIRTY_RATIO}")
    return round(share * 100)


def checked(context: KafkaContext, changes: Changes, given: Any, stream: Stream) -> dict[str, object]:
    changed = changes(stream, given)
    check(context, changed)
    return changed


def check(context: KafkaContext, changed: Mapping[str, object]) -> object:
    """The resulting settings; raises InvalidSetting."""
    given = {name: value for name, value in changed.items() if value is not None}
    return stream_settings(given, context.config.stream, origin="from the request")


def topic_configs(context: KafkaContext, stream: Stream) -> list[ConfigValue]:
    return shown(context.broker.streams.base(stream.kind), stream.settings, stream.document.config)


def shown(base: object, settings: object, set_here: Container[str]) -> list[ConfigValue]:
    found = []
    for name, setting in SETTINGS.items():
        inherited = PRODUCER if name == "compression.type" else kafka_value(name, getattr(base, setting.field))
        fallback = Value(setting.of_broker, inherited, SOURCE_DEFAULT)
        if setting.ours in set_here:
            own = kafka_value(name, getattr(settings, setting.field))
            found.append(ConfigValue(name, own, SOURCE_TOPIC, setting.kind, fallback))
        else:
            found.append(ConfigValue(name, inherited, SOURCE_DEFAULT, setting.kind, fallback))
    fixed = [ConfigValue(name, value, SOURCE_DEFAULT, kind) for name, (value, kind) in (FIXED | ONLY).items()]
    return sorted(found + fixed)


def kafka_value(name: str, value: Any) -> str:
    """A value of the broker's setting in Kafka's spelling."""
    if name == "compression.type" and value == "none":
        return "uncompressed"
    if name == DIRTY_RATIO:
        return str(value / 100)
    if name == LAG_MAX and value < 0:
        return str(NEVER)
    return TO_KAFKA.get(value, str(value))


def broker_configs(context: KafkaContext, bound: tuple[str, int]) -> list[ConfigValue]:
    config = context.config
    address = f"PLAINTEXT://{bound[0]}:{bound[1]}"
    values: list[tuple[str, object, int]] = [
        ("advertised.listeners", address, LIST),
        ("auto.create.topics.enable", str(config.auto_create_topics).lower(), BOOLEAN),
        ("broker.id", context.node_id, INT),
        ("compression.type", PRODUCER, STRING),
        ("default.replication.factor", 1, INT),
        ("group.consumer.migration.policy", config.kafka_migration_policy, STRING),
        ("listeners", address, LIST),
        ("log.cleanup.policy", config.stream.cleanup_policy, LIST),
        ("log.dirs", config.data_dir, STRING),
        ("log.retention.bytes", config.stream.retention_bytes, LONG),
        ("log.retention.ms", config.stream.retention_ms, LONG),
        ("log.segment.bytes", config.stream.segment_size, INT),
        ("message.max.bytes", config.stream.batch_bytes_max, INT),
        ("min.insync.replicas", 1, INT),
        ("node.id", context.node_id, INT),
        ("num.partitions", config.auto_create_partitions, INT),
        ("offsets.retention.minutes", context.coordination.groups.settings.offsets_retention_ms // 60_000, INT),
        ("transactional.id.expiration.ms", ID_EXPIRATION_MS, INT),
    ]
    return [ConfigValue(name, str(value), SOURCE_STATIC, kind) for name, value, kind in values]


async def describe_configs(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    results = []
    # Each resource once: a request could name one thousands of times, for a response thousands of times as large.
    asked: dict[Any, Any] = {}
    for one in fields.resources:
        keys = one.configuration_keys
        asked[one.resource_type, one.resource_name, None if keys is None else tuple(keys)] = one
    async for resource in YieldEvery().each(asked.values()):
        answer: dict[str, Any] = {
            "resource_type": resource.resource_type,
            "resource_name": resource.resource_name,
        }
        try:
            found = resource_configs(context, request, resource)
            keys = resource.configuration_keys
            answer["configs"] = [
                describe(one, resource.resource_type, fields) for one in found if not keys or one.name in keys
            ]
        except HeadraceError as error:
            answer.update(error_code=code_of(error), error_message=str(error))
        results.append(answer)
    return {"results": results}


def resource_configs(context: KafkaContext, request: Request, resource: Any) -> list[ConfigValue]:
    allowed = context.access_of(request)
    if resource.resource_type == TOPIC:
        return topic_configs(context, allowed.sees.find(resource.resource_name))
    if resource.resource_type == BROKER:
        allowed.administer()
        if resource.resource_name not in ("", str(context.node_id)):
            raise InvalidInput(f"the only broker is {context.node_id}, not {resource.resource_name}")
        return broker_configs(context, context.address_of(request))
    if resource.resource_type == GROUP:
        allowed.group(resource.resource_name)
        if not resource.resource_name:
            raise InvalidInput(NO_DEFAULT_GROUP)
        return [
            ConfigValue(
                one.name,
                one.value,
                SOURCE_DEFAULT if one.is_default else SOURCE_GROUP,
                GROUP_KINDS[one.kind],
            )
            for one in configs.found(context, resource.resource_name)
        ]
    if resource.resource_type in (BROKER_LOGGER, CLIENT_METRICS):
        return []
    raise InvalidInput(f"unknown resource type {resource.resource_type}")


def describe(one: ConfigValue, resource_type: int, fields: Any) -> dict[str, Any]:
    return {
        "name": one.name,
        "value": one.value,
        "read_only": resource_type not in (TOPIC, GROUP),
        "is_default": one.source == SOURCE_DEFAULT,  # version 0 has no config_source
        "config_source": one.source,
        "config_type": one.kind,
        "synonyms": [value._asdict() for value in synonyms(one)] if fields.include_synonyms else [],
        "documentation": documentation(one.name, resource_type) if fields.include_documentation else None,
    }


def synonyms(one: ConfigValue) -> list[Value]:
    """The value and the one that it overrides. The broker's config has a different name."""
    own = Value(one.name, one.value, one.source)
    if one.inherited is None:
        return [own]
    return [one.inherited] if one.source == SOURCE_DEFAULT else [own, one.inherited]


def documentation(name: str, resource_type: int) -> str:
    if resource_type == BROKER:
        return config_docs.BROKER[name]
    if resource_type == GROUP:
        return config_docs.GROUP[name]
    if name in SETTINGS:
        return config_docs.TOPIC.get(name) or config_docs.HELP[SETTINGS[name].ours]
    return config_docs.NO_EFFECT if name in FIXED else config_docs.NO_TIERS


async def alter_configs(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    """Replaces all configs: those that are not named are reset to the broker's values."""
    return await alter(context, context.access_of(request), fields, replace_changes)


async def incremental_alter_configs(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    return await alter(context, context.access_of(request), fields, incremental_changes)


async def alter(context: KafkaContext, allowed: AnyUser, fields: Any, changes: Changes) -> dict[str, Any]:
    responses = []
    named = Counter((resource.resource_type, resource.resource_name) for resource in fields.resources)
    async for resource in YieldEvery().each(fields.resources):
        answer: dict[str, Any] = {
            "resource_type": resource.resource_type,
            "resource_name": resource.resource_name,
        }
        try:
            if named[resource.resource_type, resource.resource_name] > 1:
                raise UnclearChange("Each resource must appear at most once.")
            check_given(resource.configs)
            if resource.resource_type == TOPIC:
                stream = allowed.configures.find(resource.resource_name)
                change = partial(checked, context, changes, resource.configs)
                if fields.validate_only:
                    change(stream)
                else:
                    await context.broker.streams.configure(stream.name, change)
            elif resource.resource_type == GROUP:
                allowed.configure_group(resource.resource_name)
                if not resource.resource_name:
                    raise UnclearChange(NO_DEFAULT_GROUP)
                await configs.alter(
                    context, resource.resource_name, resource.configs,
                    replaces=changes is replace_changes, validate_only=fields.validate_only,
                )  # fmt: skip
            else:
                allowed.administer()
                if resource.resource_type in (BROKER, BROKER_LOGGER):
                    raise InvalidInput("broker settings can only be changed in the broker's configuration file")
                if resource.resource_type == CLIENT_METRICS:
                    raise InvalidInput("client metrics are not supported")
                raise InvalidInput(f"unknown resource type {resource.resource_type}")
        except HeadraceError as error:
            code = code_of(error)
            is_config_error = resource.resource_type in (TOPIC, GROUP) and not isinstance(error, UnclearChange)
            wrong = code == Code.INVALID_REQUEST and is_config_error
            answer.update(error_code=Code.INVALID_CONFIG if wrong else code, error_message=str(error))
        responses.append(answer)
    return {"responses": responses}


def check_given(given: Any) -> None:
    """Raise if a config is named twice, or has no value though it is not deleted."""
    if len({one.name for one in given}) < len(given):
        raise UnclearChange("Error due to duplicate config keys")
    nulls = [one.name for one in given if one.value is None and getattr(one, "config_operation", SET) != DELETE]
    if nulls:
        raise UnclearChange(f"Null value not supported for : {', '.join(nulls)}")


def replace_changes(stream: Stream, given: Any) -> dict[str, object]:
    changed: dict[str, object] = dict.fromkeys(stream.document.config)
    changed.update(overrides({one.name: one.value for one in given}))
    return changed


def incremental_changes(stream: Stream, given: Any) -> dict[str, object]:
    values: dict[str, str | None] = {}
    for one in given:
        if one.config_operation == SET:
            values[one.name] = one.value
        elif one.config_operation == DELETE:
            if one.name in KNOWN:  # as in Kafka: deleting an unknown config changes nothing
                values[one.name] = None
        elif one.config_operation in (APPEND, SUBTRACT) and one.name == "cleanup.policy":
            values[one.name] = merged_policy(stream, one)
        elif one.config_operation in (APPEND, SUBTRACT) and FIXED.get(one.name, ("", STRING))[1] == LIST:
            values[one.name] = one.value
        else:
            raise InvalidConfig(f"{one.name} is not a list")
    return overrides(values)


def merged_policy(stream: Stream, one: Any) -> str:
    have = stream.settings.cleanup_policy.split(",")
    named = [word.strip() for word in (one.value or "").split(",") if word.strip()]
    kept = [*have, *named] if one.config_operation == APPEND else [word for word in have if word not in named]
    return ",".join(dict.fromkeys(kept))  # unknown words are kept, to be refused later
