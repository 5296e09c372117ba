"""Topic configs of Kafka 4.3: those that are settings of the broker, and those that it stores without using them.

A config is described with the value that a client set, in the client's spelling: tools compare the two, and would
otherwise set it again and again.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.broker.streams.defaults import Change, Level, Overrides
from headrace.broker.streams.streams import Stream
from headrace.config import StreamSettings, stream_settings
from headrace.config.declared import BY_NAME
from headrace.listeners.kafka.admin.config_types import (
    APPEND,
    BOOLEAN,
    DELETE,
    DOUBLE,
    INT,
    LIST,
    LONG,
    SET,
    SOURCE_CLUSTER,
    SOURCE_DEFAULT,
    SOURCE_NODE,
    SOURCE_STATIC,
    SOURCE_TOPIC,
    STRING,
    SUBTRACT,
    Config,
    InvalidConfig,
    NotAList,
    Value,
    merged_list,
)
from headrace.listeners.kafka.context import KafkaContext

COMPRESSION = "compression.type"
PRODUCER = "producer"  # compression.type: keep the producer's compression
POLICY = "cleanup.policy"
LAG_MAX = "max.compaction.lag.ms"
DIRTY_RATIO = "min.cleanable.dirty.ratio"  # 0 to 1; the broker's setting is in percent
REMOTE = "remote.storage.enable"
BEFORE_MAX = "message.timestamp.before.max.ms"
AFTER_MAX = "message.timestamp.after.max.ms"
NEVER = 9223372036854775807
UNBOUNDED = (LAG_MAX, BEFORE_MAX, AFTER_MAX)  # Kafka's NEVER is our -1
LEVELS: tuple[tuple[Level, int], ...] = (("node", SOURCE_NODE), ("cluster", SOURCE_CLUSTER))
PRECISE_MAX = 1 << 53  # the largest value of the broker's settings


POLICIES = ("compact", "delete")
# Kafka's value: ours.
CHOICES: dict[str, dict[str, str | None]] = {
    COMPRESSION: {
        "uncompressed": "none", "zstd": "zstd", "lz4": "lz4", "snappy": "snappy", "gzip": "gzip", PRODUCER: None,
    },
    "message.timestamp.type": {"CreateTime": "create", "LogAppendTime": "append"},
}  # fmt: skip
TO_KAFKA = {name: {ours: kafka for kafka, ours in values.items()} for name, values in CHOICES.items()}


class Setting(NamedTuple):
    ours: str  # the name of the broker's setting
    field: str  # its field in StreamSettings
    kind: int
    of_broker: str  # Kafka's name of the broker config that it inherits


SETTINGS: dict[str, Setting] = {
    POLICY: Setting("cleanup_policy", "cleanup_policy", LIST, "log.cleanup.policy"),
    COMPRESSION: Setting("compression", "compression", STRING, "compression.type"),
    "delete.retention.ms": Setting(
        "tombstone_retention", "tombstone_retention_ms", LONG, "log.cleaner.delete.retention.ms"
    ),
    "index.interval.bytes": Setting("index_interval", "index_interval", INT, "log.index.interval.bytes"),
    LAG_MAX: Setting("compaction_lag_max", "compaction_lag_max_ms", LONG, "log.cleaner.max.compaction.lag.ms"),
    "max.message.bytes": Setting("batch_bytes_max", "batch_bytes_max", INT, "message.max.bytes"),
    AFTER_MAX: Setting("timestamp_after_max", "timestamp_after_max_ms", LONG, "log.message.timestamp.after.max.ms"),
    BEFORE_MAX: Setting("timestamp_before_max", "timestamp_before_max_ms", LONG, "log.message.timestamp.before.max.ms"),
    "message.timestamp.type": Setting("timestamp_type", "timestamp_type", STRING, "log.message.timestamp.type"),
    DIRTY_RATIO: Setting(
        "compaction_dirty_percent", "compaction_dirty_percent", DOUBLE, "log.cleaner.min.cleanable.ratio"
    ),
    "min.compaction.lag.ms": Setting("compaction_lag", "compaction_lag_ms", LONG, "log.cleaner.min.compaction.lag.ms"),
    "retention.bytes": Setting("retention_bytes", "retention_bytes", LONG, "log.retention.bytes"),
    "retention.ms": Setting("retention_ms", "retention_ms", LONG, "log.retention.ms"),
    "segment.bytes": Setting("segment_size", "segment_size", INT, "log.segment.bytes"),
    "segment.ms": Setting("segment_age", "segment_age_ms", LONG, "log.roll.ms"),
}

# Configs that have no effect on a single broker that syncs before it confirms and keeps everything in its data folder,
# with their effective values. They are stored and returned as set: MirrorMaker copies them, and a topic whose configs
# are refused is created with the defaults, which delete records that the configs would keep.
STORED: dict[str, tuple[str, int]] = {
    "compression.gzip.level": ("-1", INT),
    "compression.lz4.level": ("1", INT),
    "compression.zstd.level": ("3", INT),
    "file.delete.delay.ms": ("0", LONG),
    "flush.messages": ("1", LONG),
    "flush.ms": ("0", LONG),
    "follower.replication.throttled.replicas": ("", LIST),
    "leader.replication.throttled.replicas": ("", LIST),
    "local.retention.bytes": ("-2", LONG),
    "local.retention.ms": ("-2", LONG),
    "message.downconversion.enable": ("false", BOOLEAN),  # up to Kafka 3
    "message.timestamp.difference.max.ms": (str(NEVER), LONG),  # up to Kafka 3
    "min.insync.replicas": ("1", INT),
    "preallocate": ("false", BOOLEAN),
    "remote.log.copy.disable": ("false", BOOLEAN),
    "remote.log.delete.on.disable": ("false", BOOLEAN),
    REMOTE: ("false", BOOLEAN),
    "segment.index.bytes": ("10485760", INT),
    "segment.jitter.ms": ("0", LONG),
    "unclean.leader.election.enable": ("false", BOOLEAN),
}

KINDS = {name: setting.kind for name, setting in SETTINGS.items()} | {name: kind for name, (_, kind) in STORED.items()}
RANGES: dict[int, tuple[int, int]] = {INT: (-(1 << 31), (1 << 31) - 1), LONG: (-NEVER - 1, NEVER)}
MINIMUM = {
    "compression.gzip.level": -1,
    "compression.lz4.level": 1,
    "compression.zstd.level": -131072,
    "flush.messages": 1,
    "local.retention.bytes": -2,
    "local.retention.ms": -2,
    "min.insync.replicas": 1,
    "retention.bytes": RANGES[LONG][0],  # every negative number means unlimited
    "retention.ms": -1,
    "segment.bytes": BY_NAME["segment_size"].least,
    "segment.index.bytes": 4,
    "segment.ms": 1,
    LAG_MAX: 1,
}  # of other configs: 0
MAXIMUM = {"compression.lz4.level": 17, "compression.zstd.level": 22}
GZIP_LEVELS = (-1, *range(1, 10))
INTEGER = re.compile(r"[+-]?[0-9]+")
THROTTLED = re.compile(r"\s*(\*|(\d+:\d+\s*(,\s*\d+:\d+\s*)*)?)\s*")  # `*`, or partition:broker pairs


def refused(name: str, value: str, reason: str) -> InvalidConfig:
    return InvalidConfig(f"Invalid value {value} for configuration {name}: {reason}")


def change_of(given: Mapping[str, str | None]) -> Change:
    """The change that the configs of a request mean; None resets a config to the broker's default."""
    settings: dict[str, object] = {}
    kafka: dict[str, str | None] = {}
    for name, text in given.items():
        if name in STORED:
            if text is not None:
                check_value(name, STORED[name][1], text)
            kafka[name] = text
        elif name in SETTINGS:
            setting = SETTINGS[name]
            value = None if text is None else parse(name, setting, text)
            settings[setting.ours] = value
            is_plain = text is None or (value is not None and kafka_value(name, value) == text)
            kafka[name] = None if is_plain else text
        else:
            raise InvalidConfig(f"Unknown topic config name: {name}")
    return Change(settings, kafka)


def parse(name: str, setting: Setting, text: str) -> object:
    """The value of the broker's setting; None is the broker's default. Values that it cannot have become the nearest
    ones that it can."""
    if name in CHOICES:
        if text not in CHOICES[name]:
            raise refused(name, text, f"String must be one of: {', '.join(CHOICES[name])}")
        return CHOICES[name][text]
    if name == POLICY:
        return policy_of(text)
    if name == DIRTY_RATIO:
        return percent_of(text)
    number = check_number(name, setting.kind, text)
    if name == "retention.bytes" and number < 0:
        return -1
    # Kafka's tools write Long.MAX_VALUE for unlimited.
    if number > PRECISE_MAX and (name in UNBOUNDED or name.startswith("retention.")):
        return -1
    if number < 0:
        return number
    declared = BY_NAME[setting.ours]
    return max(declared.least, min(number, PRECISE_MAX if declared.most is None else declared.most))


def check_value(name: str, kind: int, text: str) -> None:
    """Raise InvalidConfig for values that Kafka refuses, although the config has no effect."""
    if kind in RANGES:
        check_number(name, kind, text)
    elif kind == BOOLEAN and text.strip().lower() not in ("true", "false"):
        raise refused(name, text, "Expected value to be either true or false")
    elif kind == LIST and not THROTTLED.fullmatch(text):
        raise refused(name, text, f"{name} must be the literal '*' or a list of [partitionId]:[brokerId]")


def check_number(name: str, kind: int, text: str) -> int:
    least, most = RANGES[kind]
    digits = text.strip()
    # The length first: Python takes seconds for a number of a million digits.
    if len(digits) > 30 or not INTEGER.fullmatch(digits) or not least <= int(digits) <= most:
        raise refused(name, text, f"Not a number of type {'INT' if kind == INT else 'LONG'}")
    number = int(digits)
    if name == "compression.gzip.level" and number not in GZIP_LEVELS:
        raise refused(name, text, "Value must be between 1 and 9 or equal to -1")
    if number < MINIMUM.get(name, 0):
        raise refused(name, text, f"Value must be at least {MINIMUM.get(name, 0)}")
    if number > MAXIMUM.get(name, most):
        raise refused(name, text, f"Value must be no more than {MAXIMUM.get(name, most)}")
    return number


def policy_of(text: str) -> str:
    words = [word.strip() for word in text.split(",")]
    if not all(word in POLICIES for word in words):
        raise refused(POLICY, text, f"String must be one of: {', '.join(POLICIES)}")
    return ",".join(dict.fromkeys(words))


def percent_of(ratio: str) -> int:
    try:
        share = float(ratio)
    except ValueError:
        raise refused(DIRTY_RATIO, ratio, "Not a number of type DOUBLE") from None
    if not 0 <= share <= 1:
        raise refused(DIRTY_RATIO, ratio, "Value must be between 0 and 1")
    return round(share * 100)


def kafka_value(name: str, value: Any) -> str:
    """A value of the broker's setting in Kafka's spelling."""
    if name in TO_KAFKA:
        return TO_KAFKA[name][value]
    if name == DIRTY_RATIO:
        return str(value / 100)
    if name in UNBOUNDED and value < 0:
        return str(NEVER)
    return str(value)


# Changes of a topic.


def checked(context: KafkaContext, stream: Stream | None, change: Change) -> tuple[StreamSettings, Overrides]:
    """The settings that a topic would have with a change; None is a new topic. Raises InvalidInput."""
    base = context.broker.streams.defaults.base("topic" if stream is None else stream.kind)
    before = Overrides() if stream is None else stream.document.overrides
    after = before.changed(change, base)
    settings = stream_settings(after.config, base)
    check_remote(settings, after.kafka)
    return settings, after


def check_remote(settings: StreamSettings, kafka: Mapping[str, str]) -> None:
    """As in a Kafka with tiered storage. Here such a topic keeps all its records in the data folder."""
    if kafka.get(REMOTE, "").strip().lower() != "true":
        return
    if settings.is_compacted:
        raise InvalidConfig("Remote log storage is unsupported for the compacted topics")
    for name, most in (("ms", settings.retention_ms), ("bytes", settings.retention_bytes)):
        local = int(kafka.get(f"local.retention.{name}", "-2"))
        if local == -1 and most != -1:
            raise refused(
                f"local.retention.{name}", "-1", f"Value must not be -1 as retention.{name} value is set as {most}."
            )
        if 0 <= most < local:
            raise refused(
                f"local.retention.{name}", str(local), f"Value must not be more than property retention.{name}: {most}."
            )


def replacing(context: KafkaContext, given: Any, stream: Stream) -> Change:
    """AlterConfigs: configs that are not named are reset to the broker's values."""
    change = change_of({one.name: one.value for one in given})
    whole = Change(
        {**dict.fromkeys(stream.document.config), **change.settings},
        {**dict.fromkeys(stream.document.kafka), **change.kafka},
    )
    checked(context, stream, whole)
    return whole


def incremental(context: KafkaContext, given: Any, stream: Stream) -> Change:
    values: dict[str, str | None] = {}
    for one in given:
        if one.config_operation == SET:
            values[one.name] = one.value
        elif one.config_operation == DELETE:
            if one.name in KINDS:  # as in Kafka: deleting an unknown config changes nothing
                values[one.name] = None
        elif one.config_operation in (APPEND, SUBTRACT) and KINDS.get(one.name) == LIST:
            present = stream.settings.cleanup_policy if one.name == POLICY else stream.document.kafka.get(one.name, "")
            values[one.name] = merged_list(present, one.value or "", one.config_operation)
        else:
            raise NotAList(one.name, one.config_operation)
    change = change_of(values)
    checked(context, stream, change)
    return change


# Descriptions.


def described(context: KafkaContext, stream: Stream) -> list[Config]:
    return shown(context, stream.kind, stream.settings, stream.document.overrides)


def shown(context: KafkaContext, kind: Any, settings: StreamSettings, overrides: Overrides) -> list[Config]:
    found = []
    for name, setting in SETTINGS.items():
        inherited = inherited_values(context, name, setting, context.broker.streams.defaults.base(kind))
        own = own_value(name, setting, settings, overrides)
        if own is None:
            first = inherited[0]
            found.append(Config(name, first.value, first.source, setting.kind, inherited))
        else:
            found.append(Config(name, own, SOURCE_TOPIC, setting.kind, inherited))
    for name, (value, value_kind) in STORED.items():
        fallback = (Value(name, value, SOURCE_DEFAULT),)
        text = overrides.kafka.get(name)
        if text is None:
            found.append(Config(name, value, SOURCE_DEFAULT, value_kind, fallback))
        else:
            found.append(Config(name, text, SOURCE_TOPIC, value_kind, fallback))
    return sorted(found)


def own_value(name: str, setting: Setting, settings: StreamSettings, overrides: Overrides) -> str | None:
    """What was set at this level, None if nothing was. A value in the client's spelling is outdated if the setting was
    changed since over another protocol."""
    text = overrides.kafka.get(name)
    value = None if text is None else parse(name, setting, text)
    if setting.ours not in overrides.config:
        return text if value is None else None
    present = getattr(settings, setting.field)
    return text if text is not None and value == present else kafka_value(name, present)


def inherited_values(context: KafkaContext, name: str, setting: Setting, base: StreamSettings) -> tuple[Value, ...]:
    """The values of the broker, those that apply first: changes at run time for this node and for the cluster, then
    the configuration."""
    defaults = context.broker.streams.defaults
    if name == COMPRESSION:  # the broker's own setting is for batches that the broker builds
        return (Value(setting.of_broker, PRODUCER, SOURCE_DEFAULT),)
    if getattr(base, setting.field) != getattr(defaults.config.stream, setting.field):  # of queues
        return (Value(setting.of_broker, kafka_value(name, getattr(base, setting.field)), SOURCE_DEFAULT),)
    found = []
    for level, source in LEVELS:
        overrides = defaults.levels[level]
        if setting.ours in overrides.config:
            settings = stream_settings(overrides.config, defaults.configured.stream)
            own = own_value(name, setting, settings, overrides)
            assert own is not None
            found.append(Value(setting.of_broker, own, source))
    source = SOURCE_STATIC if setting.ours in defaults.configured.origins else SOURCE_DEFAULT
    configured = kafka_value(name, getattr(defaults.configured.stream, setting.field))
    return (*found, Value(setting.of_broker, configured, source))
