"""Global parameters of RabbitMQ's API: named JSON values of the whole broker, such as the name of the cluster.

They have no effect on the broker, except `cluster_name`, which listeners announce.
"""

import asyncio
import platform
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.broker.catalog.catalog import Catalog, shaped
from headrace.broker.cooperative import uncancellable
from headrace.errors import InvalidInput, NotFound, StorageError

CATALOG_KIND = "global-parameters"
CLUSTER_NAME, CLUSTER_ID = "cluster_name", "internal_cluster_id"
NODE = f"headrace@{platform.node() or 'localhost'}"
NAME_BYTES_MAX = 255


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    identity: tuple[str]
    value: Any


def check_parameter(name: Any, value: Any) -> None:
    """Raises InvalidInput unless there can be a parameter with this name and value."""
    if not isinstance(name, str) or not 0 < len(name.encode("utf-8", "surrogateescape")) <= NAME_BYTES_MAX:
        raise InvalidInput(f"the name of a global parameter must have 1 to {NAME_BYTES_MAX} bytes")
    if name == CLUSTER_NAME and (not isinstance(value, str) or not 0 < len(value.encode()) <= NAME_BYTES_MAX):
        raise InvalidInput(f"the name of the cluster must be a string of 1 to {NAME_BYTES_MAX} bytes")


class GlobalParameters:
    """Stored in the catalog. A change is durable when it returns."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._values: dict[str, Any] = {}
        self._changing = asyncio.Lock()
        for document in catalog.load(CATALOG_KIND):
            stored = shaped(CATALOG_KIND, document, _Stored)
            self._values[stored.identity[0]] = stored.value

    @property
    def cluster_name(self) -> str:
        name = self._values.get(CLUSTER_NAME)
        return name if isinstance(name, str) else NODE

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> Any:
        if name not in self._values:
            raise NotFound(f"no global parameter {name[:80]!r}")
        return self._values[name]

    async def list(self) -> dict[str, Any]:
        """All of them by name. The cluster gets its id when they are first listed."""
        if CLUSTER_ID not in self._values:
            await self.put(CLUSTER_ID, f"rabbitmq-cluster-id-{secrets.token_urlsafe(16)}")
        return dict(sorted(self._values.items()))

    @uncancellable
    async def put(self, name: str, value: Any) -> None:
        check_parameter(name, value)
        async with self._changing:
            await self._in_thread(lambda: self._catalog.put(CATALOG_KIND, (name,), {"value": value}))
            self._values[name] = value

    @uncancellable
    async def delete(self, name: str) -> None:
        async with self._changing:
            self.get(name)
            await self._in_thread(lambda: self._catalog.remove(CATALOG_KIND, (name,)))
            del self._values[name]

    @staticmethod
    async def _in_thread(work: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, work)
        except OSError as error:
            raise StorageError(f"the catalog cannot be written: {error.strerror}") from error
