"""DescribeConfigs and AlterConfigs: configs of topics, groups and the broker under Kafka's names."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.broker.cooperative import YieldEvery
from headrace.broker.streams.defaults import Change
from headrace.broker.streams.streams import Stream
from headrace.errors import HeadraceError, InvalidInput
from headrace.listeners.kafka.admin import broker_configs, config_docs, topic_configs
from headrace.listeners.kafka.admin.config_types import (
    BOOLEAN,
    BROKER,
    BROKER_LOGGER,
    CLIENT_METRICS,
    DELETE,
    GROUP,
    INT,
    SET,
    SOURCE_DEFAULT,
    SOURCE_GROUP,
    STRING,
    TOPIC,
    Config,
    NotAList,
    UnclearChange,
    Value,
)
from headrace.listeners.kafka.auth.access import AnyUser
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.errors import Code, code_of
from headrace.listeners.kafka.groups import configs as group_configs
from headrace.listeners.kafka.request_pipeline import Request

GROUP_KINDS = {int: INT, str: STRING, bool: BOOLEAN}
NO_DEFAULT_GROUP = "Default group resources are not allowed."
Changes = Callable[[KafkaContext, Any, Stream], Change]  # (context, configs in a request, topic) -> change


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


def resource_configs(context: KafkaContext, request: Request, resource: Any) -> list[Config]:
    allowed = context.access_of(request)
    if resource.resource_type == TOPIC:
        return topic_configs.described(context, allowed.sees.find(resource.resource_name))
    if resource.resource_type == BROKER:
        allowed.administer()
        return broker_configs.described(context, resource.resource_name, context.address_of(request))
    if resource.resource_type == GROUP:
        allowed.group(resource.resource_name)
        if not resource.resource_name:
            raise InvalidInput(NO_DEFAULT_GROUP)
        return [
            Config(
                one.name,
                one.value,
                SOURCE_DEFAULT if one.is_default else SOURCE_GROUP,
                GROUP_KINDS[one.kind],
            )
            for one in group_configs.found(context, resource.resource_name)
        ]
    if resource.resource_type in (BROKER_LOGGER, CLIENT_METRICS):
        return []
    raise InvalidInput(f"unknown resource type {resource.resource_type}")


def describe(one: Config, resource_type: int, fields: Any) -> dict[str, Any]:
    return {
        "name": one.name,
        "value": one.value,
        "read_only": one.read_only,
        "is_default": one.source == SOURCE_DEFAULT,  # version 0 has no config_source
        "config_source": one.source,
        "config_type": one.kind,
        "synonyms": [value._asdict() for value in synonyms(one)] if fields.include_synonyms else [],
        "documentation": documentation(one.name, resource_type) if fields.include_documentation else None,
    }


def synonyms(one: Config) -> list[Value]:
    """The value and those that it overrides. The broker's configs have other names than those of topics."""
    if one.inherited and (one.value, one.source) == one.inherited[0][1:]:
        return list(one.inherited)
    return [Value(one.name, one.value, one.source), *one.inherited]


def documentation(name: str, resource_type: int) -> str:
    if resource_type == BROKER:
        of_topic = broker_configs.CHANGEABLE.get(name)
        return config_docs.BROKER[name] if of_topic is None else documentation(of_topic, TOPIC)
    if resource_type == GROUP:
        return config_docs.GROUP[name]
    if name in topic_configs.SETTINGS:
        return config_docs.TOPIC.get(name) or config_docs.HELP[topic_configs.SETTINGS[name].ours]
    return config_docs.NO_EFFECT


async def alter_configs(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    """Replaces all configs: those that are not named are reset to the broker's values."""
    return await alter(context, context.access_of(request), fields, topic_configs.replacing)


async def incremental_alter_configs(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    return await alter(context, context.access_of(request), fields, topic_configs.incremental)


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
                change = partial(changes, context, resource.configs)
                if fields.validate_only:
                    change(stream)
                else:
                    await context.broker.streams.configure(stream.name, change)
            elif resource.resource_type == GROUP:
                allowed.configure_group(resource.resource_name)
                if not resource.resource_name:
                    raise UnclearChange(NO_DEFAULT_GROUP)
                await group_configs.alter(
                    context, resource.resource_name, resource.configs,
                    replaces=changes is topic_configs.replacing, validate_only=fields.validate_only,
                )  # fmt: skip
            elif resource.resource_type == BROKER:
                allowed.administer()
                await broker_configs.alter(
                    context, resource.resource_name, resource.configs,
                    replaces=changes is topic_configs.replacing, validate_only=fields.validate_only,
                )  # fmt: skip
            else:
                allowed.administer()
                if resource.resource_type == BROKER_LOGGER:
                    raise InvalidInput("log levels can only be changed in the broker's configuration")
                if resource.resource_type == CLIENT_METRICS:
                    raise InvalidInput("client metrics are not supported")
                raise InvalidInput(f"unknown resource type {resource.resource_type}")
        except HeadraceError as error:
            code = code_of(error)
            is_config_error = resource.resource_type in (TOPIC, GROUP) and not isinstance(error, UnclearChange)
            wrong = code == Code.INVALID_REQUEST and (is_config_error or isinstance(error, NotAList))
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
