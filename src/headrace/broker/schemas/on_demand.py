"""The schema registry as the broker has it: loaded when it is first used, so that it costs nothing before."""

from typing import TYPE_CHECKING

from headrace.broker.streams.append import Appender
from headrace.broker.streams.read import PageReader
from headrace.broker.streams.streams import Streams
from headrace.log.shard import Shard

if TYPE_CHECKING:  # importing it is what `registry` postpones
    from headrace.broker.schemas.registry import Schemas


class SchemaRegistry:
    """Owned by the broker; used on the event-loop thread."""

    def __init__(self, streams: Streams, pages: PageReader, appender: Appender, shard: Shard) -> None:
        self._streams = streams
        self._pages = pages
        self._appender = appender
        self._shard = shard
        self._registry: Schemas | None = None

    @property
    def registry(self) -> "Schemas":
        """The registry. Its module takes some ten milliseconds to import: listeners import it in a thread first."""
        if self._registry is None:
            from headrace.broker.schemas.registry import Schemas

            self._registry = Schemas(self._streams, self._pages, self._appender, self._shard)
        return self._registry

    async def close(self) -> None:
        if self._registry is not None:
            await self._registry.close()
