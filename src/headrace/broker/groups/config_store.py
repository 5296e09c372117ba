"""The configurations of groups of any type, by group id. A group need not exist to be configured, as in Kafka."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from headrace.broker.groups.config import DEFAULTS, GroupConfig, decode, encode
from headrace.broker.groups.coordinator import check_group_id
from headrace.log.shard import Shard

CONFIGS = "group.configs"


class GroupConfigs:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._configs = {key.decode(): decode(value) for key, value in shard.state.items(CONFIGS)}
        self._changing = asyncio.Lock()
        self._callbacks: list[Callable[[str, GroupConfig], None]] = []

    def get(self, group_id: str) -> GroupConfig:
        return self._configs.get(group_id, DEFAULTS)

    def configured(self) -> list[str]:
        """Ids of groups with a configuration of their own."""
        return [group_id for group_id, config in self._configs.items() if config != DEFAULTS]

    def on_change(self, callback: Callable[[str, GroupConfig], None]) -> None:
        self._callbacks.append(callback)

    async def change(self, group_id: str, values: Mapping[str, Any]) -> None:
        """Change the given settings, see GroupConfig.changed. Durable on return."""
        check_group_id(group_id)
        async with self._changing:  # concurrent requests: the second one must see the first one's changes
            config = self.get(group_id).changed(values)
            entry = self._shard.group()
            entry.put(CONFIGS, group_id.encode(), encode(config))
            await entry.commit()
            self._configs[group_id] = config
        for callback in self._callbacks:
            callback(group_id, config)
