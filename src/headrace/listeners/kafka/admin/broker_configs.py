"""Broker configs: the defaults of topics can be changed at run time, all others are read-only."""

from collections.abc import Callable
from typing import Any

from headrace.broker.streams.defaults import Change, Level, Overrides
from headrace.broker.transactions.coordinator import ID_EXPIRATION_MS
from headrace.errors import InvalidInput
from headrace.listeners.kafka.admin.config_types import (
    APPEND,
    BOOLEAN,
    DELETE,
    INT,
    LIST,
    SET,
    SOURCE_CLUSTER,
    SOURCE_STATIC,
    STRING,
    SUBTRACT,
    Config,
    InvalidConfig,
    NotAList,
    Value,
    merged_list,
)
from headrace.listeners.kafka.admin.topic_configs import (
    COMPRESSION,
    POLICY,
    PRODUCER,
    SETTINGS,
    change_of,
    inherited_values,
)
from headrace.listeners.kafka.context import KafkaContext

# Kafka's names of the defaults of topics: the config of topics that inherits each. compression.type stays `producer`.
CHANGEABLE = {setting.of_broker: name for name, setting in SETTINGS.items() if name != COMPRESSION}


def level_of(context: KafkaContext, name: str, *, describes: bool) -> Level:
    """The level that a resource name stands for: this node, or the whole cluster if it is empty."""
    if not name:
        return "cluster"
    if not name.removeprefix("-").isdecimal():
        raise InvalidInput(f"{'Broker' if describes else 'Node'} id must be an integer, but it is: {name}")
    if name != str(context.node_id):
        or_empty = " or empty string" if describes else ""
        raise InvalidInput(f"Unexpected broker id, expected {context.node_id}{or_empty}, but received {name}")
    return "node"


def described(context: KafkaContext, name: str, bound: tuple[str, int]) -> list[Config]:
    """All configs of this node, or, as in Kafka, the changes at run time for the cluster."""
    level = level_of(context, name, describes=True)
    base = context.broker.config.stream
    found = []
    for config, topic_config in CHANGEABLE.items():
        setting = SETTINGS[topic_config]
        values = inherited_values(context, topic_config, setting, base)
        if level == "cluster":
            values = tuple(value for value in values if value.source == SOURCE_CLUSTER)
        if values:
            found.append(Config(config, values[0].value, values[0].source, setting.kind, values))
    return sorted(found if level == "cluster" else found + fixed(context, bound))


def fixed(context: KafkaContext, bound: tuple[str, int]) -> list[Config]:
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
        ("log.dirs", config.data_dir, STRING),
        ("min.insync.replicas", 1, INT),
        ("node.id", context.node_id, INT),
        ("num.partitions", config.auto_create_partitions, INT),
        ("offsets.retention.minutes", context.coordination.groups.settings.offsets_retention_ms // 60_000, INT),
        ("transactional.id.expiration.ms", ID_EXPIRATION_MS, INT),
    ]
    return [
        Config(name, str(value), SOURCE_STATIC, kind, (Value(name, str(value), SOURCE_STATIC),), read_only=True)
        for name, value, kind in values
    ]


async def alter(context: KafkaContext, name: str, given: Any, *, replaces: bool, validate_only: bool) -> None:
    """Change all given configs, or none if one is invalid. Durable on return."""
    level = level_of(context, name, describes=False)
    check_changeable(given)
    streams = context.broker.streams
    change = changed(context, given, replaces=replaces)
    if validate_only:
        streams.defaults.changed(level, change(streams.defaults.levels[level]))
    else:
        await streams.configure_defaults(level, change)


def check_changeable(given: Any) -> None:
    wrong = [
        one.name
        for one in given
        if one.name not in CHANGEABLE and getattr(one, "config_operation", SET) != DELETE  # deleting it changes nothing
    ]
    if wrong:
        raise InvalidInput(f"Cannot update these configs dynamically: [{', '.join(wrong)}]")


def changed(context: KafkaContext, given: Any, *, replaces: bool) -> Callable[[Overrides], Overrides]:
    """The change that a request means, as a function of the overrides that there are."""

    def change(present: Overrides) -> Overrides:
        after = Overrides() if replaces else present
        for one in given:
            if one.name in CHANGEABLE:
                after = after.changed(change_of_one(context, one), context.broker.streams.defaults.configured.stream)
        return after

    return change


def change_of_one(context: KafkaContext, one: Any) -> Change:
    topic_config = CHANGEABLE[one.name]
    operation = getattr(one, "config_operation", SET)
    text: str | None = one.value
    if operation == DELETE:
        text = None
    elif operation in (APPEND, SUBTRACT) and topic_config == POLICY:
        text = merged_list(context.broker.config.stream.cleanup_policy, text or "", operation)
    elif operation != SET:
        raise NotAList(one.name, operation)
    try:
        return change_of({topic_config: text})
    except InvalidConfig as error:  # names the config of topics
        raise InvalidConfig(str(error).replace(topic_config, one.name)) from None
