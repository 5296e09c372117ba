"""The memory inside the broker that can be reclaimed; see pressure.Reclaimable."""

from collections.abc import Iterable
from typing import Protocol

from headrace.broker.queues.view import View
from headrace.broker.vhosts.vhost import VirtualHost


class Cached(Protocol):
    """A cache of file contents: everything in it can be read again."""

    @property
    def size_bytes(self) -> int: ...
    def clear(self) -> None: ...


class Cache:
    """Cached index files, decompressed row groups of the tier, recent reads: read again when they are needed."""

    patience_s = 0.0

    def __init__(self, name: str, cache: Cached) -> None:
        self.name = name
        self._cache = cache

    def held_bytes(self) -> int:
        return self._cache.size_bytes

    def shed(self, wanted_bytes: int) -> int:
        freed = self._cache.size_bytes
        self._cache.clear()
        return freed


class ReadAhead:
    """Chunks that queues have read for consumers without credit: they are still in the log."""

    name = "read_ahead"
    patience_s = 0.0

    def __init__(self, hosts: Iterable[VirtualHost]) -> None:
        self._hosts = hosts

    def _views(self) -> Iterable[View]:
        return (view for host in self._hosts for queue in host.queues.values() for view in queue.views)

    def held_bytes(self) -> int:
        held = 0
        for host in self._hosts:  # plain loops: a scrape may visit tens of thousands of views
            for queue in host.queues.values():
                for view in queue.views:
                    held += view.reader.chunk_bytes
        return held

    def shed(self, wanted_bytes: int) -> int:
        freed = 0
        for view in self._views():
            freed += view.reader.chunk_bytes
            view.reader.release_chunk()
        return freed
