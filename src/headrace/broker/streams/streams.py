"""Streams: named sets of partitions, with their settings, kept in the catalog.

Look-ups use memory only; a change is on disk before it becomes visible. Changes run one after another in a thread of
their own, so that the event loop never waits for the disk.
"""

import asyncio
import errno
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from headrace.broker.catalog.catalog import Catalog, Identity, shaped
from headrace.broker.cooperative import YieldEvery
from headrace.broker.streams.defaults import Change, Kind, Level, Overrides, StreamDefaults
from headrace.broker.streams.partition import Partition
from headrace.clock import Clock
from headrace.config import Config
from headrace.errors import (
    Conflict,
    DiskFull,
    HeadraceError,
    InvalidInput,
    PartitionNeeded,
    PartitionNotFound,
    StorageError,
    StreamExists,
    StreamNotFound,
)
from headrace.log.disk.paths import slug
from headrace.log.log import LogSpec
from headrace.log.settings import StreamSettings
from headrace.log.shard import Shard
from headrace.record.layout import CODECS
from headrace.record.types import BatchInfo

CATALOG_KIND = "streams"
DEFAULT_VHOST = "/"
NAME_BYTES_MAX = 255
TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")

T = TypeVar("T")
Ids = list[int]
Specs = list[LogSpec]  # aliases, because the method Streams.list hides the type


@lru_cache(maxsize=4096)  # called for every request of a Kafka client
def is_topic_name(name: str) -> bool:
    """Whether the name is valid in Kafka."""
    return TOPIC_NAME.fullmatch(name) is not None and name not in {".", ".."}


def check_topic_name(name: str) -> None:
    if not is_topic_name(name):
        raise InvalidInput(
            f"{name[:80]!r} is not a topic name: use 1 to 249 letters, digits, dots, dashes and underscores, "
            "but not . or .."
        )


class StreamDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A stream as the catalog stores it. `config` has only the settings that were set, in their text form."""

    vhost: str
    name: str
    kind: Kind
    logs: list[int]  # one per partition
    config: dict[str, str]
    created_ms: int
    kafka: dict[str, str] = {}  # as Kafka clients set them, see Overrides

    @property
    def identity(self) -> tuple[str, str]:
        return self.vhost, self.name

    @property
    def overrides(self) -> Overrides:
        return Overrides(config=self.config, kafka=self.kafka)


class AppendRules:
    """What appends must know of a stream, computed when its settings change: the compiled path asks for every batch."""

    __slots__ = (
        "batch_bytes_max",
        "codec",
        "is_plain",
        "needs_key",
        "stamps_time",
        "timestamp_after_ms",
        "timestamp_before_ms",
    )

    def __init__(self, settings: StreamSettings, overrides: Mapping[str, str]) -> None:
        self.batch_bytes_max = settings.batch_bytes_max
        self.needs_key = settings.is_compacted
        # The broker's own default is only for batches that the broker builds; clients' batches keep their codec.
        self.codec: int | None = CODECS[settings.compression] if "compression" in overrides else None
        self.stamps_time = settings.timestamp_type == "append"
        self.timestamp_before_ms = settings.timestamp_before_max_ms
        self.timestamp_after_ms = settings.timestamp_after_max_ms
        self.is_plain = self.codec is None and not self.stamps_time

    def must_recompress(self, infos: Iterable[BatchInfo]) -> bool:
        return self.codec is not None and any(info.codec != self.codec for info in infos)


class Stream:
    """A stream that exists. Readers may keep it: `is_deleted` says when it no longer exists."""

    def __init__(self, document: StreamDocument, settings: StreamSettings, partitions: list[Partition]) -> None:
        self.document = document
        self.settings = settings
        self.rules = AppendRules(settings, document.config)
        self.is_topic = is_topic_name(document.name)  # cached: Kafka asks for every batch
        self.partitions = partitions
        self.is_deleted = False
        self._turn = 0
        self._age_ms_max: int | None = None
        self._bytes_max: int | None = None

    @property
    def name(self) -> str:
        return self.document.name

    @property
    def vhost(self) -> str:
        return self.document.vhost

    @property
    def kind(self) -> Kind:
        return self.document.kind

    def configure(self, document: StreamDocument, settings: StreamSettings) -> None:
        self.document = document
        self.settings = settings
        self.rules = AppendRules(settings, document.config)

    def bound(self, age_ms_max: int | None, bytes_max: int | None) -> None:
        """Set the retention limits of policies; the stricter of these and the stream's own settings applies."""
        self._age_ms_max, self._bytes_max = age_ms_max, bytes_max
        self.apply_retention()

    def apply_retention(self) -> None:
        """Give the partitions the settings, with the stricter of own and policies' retention."""
        settings = self.settings
        for field, most in (("retention_ms", self._age_ms_max), ("retention_bytes", self._bytes_max)):
            own = getattr(settings, field)
            if most is not None and (own < 0 or most < own):
                settings = msgspec.structs.replace(settings, **{field: most})
        for partition in self.partitions:
            partition.configure(settings)

    def partition(self, number: int | None) -> Partition:
        """The partition with that number; without a number, the only one."""
        if number is None:
            if len(self.partitions) > 1:
                raise PartitionNeeded(self.name, [p.number for p in self.partitions])
            number = 0
        if not 0 <= number < len(self.partitions):
            raise PartitionNotFound(self.name, number, len(self.partitions))
        return self.partitions[number]

    def next_turn(self) -> int:
        """The partition for messages without a key, round-robin per request, so that a request becomes one batch."""
        self._turn = (self._turn + 1) % len(self.partitions)
        return self._turn


StreamList = list[Stream]


class Streams:
    """The registry of streams. `load` before the shard is opened, `attach` after."""

    def __init__(self, catalog: Catalog, config: Config, clock: Clock) -> None:
        self._catalog = catalog
        self.defaults = StreamDefaults(catalog, config)
        self._clock = clock
        self._streams: dict[tuple[str, str], Stream] = {}
        self._by_log: dict[int, tuple[Stream, Partition]] = {}
        self._documents: list[StreamDocument] = []
        self._changing = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "catalog")
        self.version = 0  # increases with each change of the set of streams or of their partitions
        self._on_create: list[Callable[[Stream], object]] = []
        self._before_delete: list[Callable[[Stream], object]] = []
        self._before_growth: list[Callable[[Stream], object]] = []
        self._on_delete: list[Callable[[Stream], Awaitable[None]]] = []

    # Opening and closing.

    def load(self) -> Specs:
        """Reads the catalog; blocking."""
        self.defaults.load()
        self._documents = [
            shaped(CATALOG_KIND, document, StreamDocument) for document in self._catalog.load(CATALOG_KIND)
        ]
        return [spec for document in self._documents for spec in self._specs(document)]

    def attach(self, shard: Shard) -> None:
        self._shard = shard
        for document in self._documents:
            partitions = [Partition(n, shard.log(log_id)) for n, log_id in enumerate(document.logs)]
            self._register(Stream(document, self._settings(document), partitions))
        self._documents = []

    def close(self) -> None:
        self._thread.shutdown()

    def on_create(self, callback: Callable[[Stream], object]) -> None:
        self._on_create.append(callback)

    def before_delete(self, check: Callable[[Stream], object]) -> None:
        """`check` raises to veto the deletion."""
        self._before_delete.append(check)

    def before_growth(self, check: Callable[[Stream], object]) -> None:
        """`check` raises to veto more partitions."""
        self._before_growth.append(check)

    def on_delete(self, callback: Callable[[Stream], Awaitable[None]]) -> None:
        """Called after a stream is gone from the catalog and before its logs are removed."""
        self._on_delete.append(callback)

    # Looking up.

    def get(self, name: str, vhost: str = DEFAULT_VHOST) -> Stream:
        stream = self._streams.get((vhost, name))
        if stream is None:
            raise StreamNotFound(name, vhost)
        return stream

    def find(self, name: str, vhost: str = DEFAULT_VHOST) -> Stream | None:
        return self._streams.get((vhost, name))

    def of_log(self, log_id: int) -> tuple[Stream, Partition] | None:
        return self._by_log.get(log_id)

    def list(self, vhost: str | None = DEFAULT_VHOST) -> StreamList:
        """Ordered by name; None is every vhost."""
        chosen = (key for key in self._streams if vhost is None or key[0] == vhost)
        return [self._streams[key] for key in sorted(chosen)]

    def names(self, vhost: str) -> Iterator[str]:
        """In no order. Use the iterator up before the next await."""
        return (name for place, name in self._streams if place == vhost)

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._streams.values()))

    # Changing.

    async def create(
        self,
        name: str,
        partitions: int = 1,
        config: Mapping[str, object] | Change | None = None,
        kind: Kind = "topic",
        vhost: str = DEFAULT_VHOST,
    ) -> Stream:
        """Durably in the catalog on return. StreamExists if there is one of that name."""
        overrides = self.check(name, partitions, config, kind, vhost)
        async with self._changing:
            if (vhost, name) in self._streams:
                raise StreamExists(name, vhost)
            document = self._new_document(name, partitions, overrides, kind, vhost)
            await self._put(document)
            return self._add(document)

    async def create_for_queues(
        self, wanted: Mapping[str, tuple[int, Mapping[str, object]]], vhost: str
    ) -> dict[str, Stream]:
        """Streams of queues, with few syncs: `wanted` has their partitions and settings. Durably in the catalog on
        return. A stream that exists already is left out."""
        checked = {
            name: (partitions, self.check(name, partitions, config, "queue", vhost))
            for name, (partitions, config) in wanted.items()
        }
        async with self._changing:
            documents = [
                self._new_document(name, partitions, overrides, "queue", vhost)
                for name, (partitions, overrides) in checked.items()
                if (vhost, name) not in self._streams
            ]
            await self._put(*documents)
            return {document.name: self._add(document) async for document in YieldEvery().each(documents)}

    def _new_document(self, name: str, partitions: int, overrides: Overrides, kind: Kind, vhost: str) -> StreamDocument:
        document = StreamDocument(
            vhost=vhost,
            name=name,
            kind=kind,
            logs=[self._shard.next_log_id() for _ in range(partitions)],
            config=overrides.config,
            created_ms=self._clock.now_ms(),
            kafka=overrides.kafka,
        )
        _check_settings(document, self._settings(document))
        return document

    def check(
        self,
        name: str,
        partitions: int = 1,
        config: Mapping[str, object] | Change | None = None,
        kind: Kind = "topic",
        vhost: str = DEFAULT_VHOST,
    ) -> Overrides:
        """Raise InvalidInput as `create` would; returns the settings as the catalog stores them."""
        _check(name, vhost, partitions, kind, self.defaults.config.partitions_max)
        return Overrides().changed(_change(config or {}), self.defaults.base(kind))

    async def get_or_create(self, name: str, vhost: str = DEFAULT_VHOST) -> Stream:
        """For publishers: creates a missing topic, unless auto_create_topics is off."""
        stream = self._streams.get((vhost, name))
        if stream is not None:
            return stream
        if not self.defaults.config.auto_create_topics:
            raise StreamNotFound(name, vhost)
        try:
            return await self.create(name, self.defaults.config.auto_create_partitions, vhost=vhost)
        except StreamExists:  # another publisher was faster
            return self.get(name, vhost)

    async def configure(
        self,
        name: str,
        config: Mapping[str, object] | Callable[[Stream], Change],
        *,
        partitions: int | None = None,
        vhost: str = DEFAULT_VHOST,
    ) -> Stream:
        """Change the named settings (None resets one to the broker's default) and perhaps add partitions.

        `config` may be a function of the stream for changes that depend on its present settings: it is called while
        no other change runs.
        """
        async with self._changing:
            stream = self.get(name, vhost)
            old = stream.document
            change = config(stream) if callable(config) else _change(config)
            overrides = old.overrides.changed(change, self.defaults.base(old.kind))
            added = self._added_logs(old, partitions)
            for check in self._before_growth if added else ():
                check(stream)
            document = msgspec.structs.replace(
                old, config=overrides.config, kafka=overrides.kafka, logs=[*old.logs, *added]
            )
            settings = self._settings(document)
            _check_settings(document, settings)  # before the catalog has the change
            await self._put(document)
            stream.configure(document, settings)
            for spec in self._specs(document)[len(old.logs) :]:
                stream.partitions.append(Partition(len(stream.partitions), self._shard.create_log(spec)))
            stream.apply_retention()
            self._register(stream)
            return stream

    async def configure_defaults(self, level: Level, change: Callable[[Overrides], Overrides]) -> None:
        """Change the defaults of all streams. Durable on return. `change` is called while no other change runs."""
        async with self._changing:
            changed = self.defaults.changed(level, change(self.defaults.levels[level]))
            settings = {}
            async for stream in YieldEvery().each(list(self._streams.values())):
                document = stream.document
                settings[stream] = changed.settings(document.name, document.kind, document.config)
            await self._in_thread(lambda: changed.store(level))
            self.defaults.use(changed)
            async for stream in YieldEvery().each(settings):
                stream.configure(stream.document, settings[stream])
                stream.apply_retention()

    def _added_logs(self, document: StreamDocument, partitions: int | None) -> Ids:
        have = len(document.logs)
        if partitions is None or partitions == have:
            return []
        if partitions < have:
            raise Conflict(f"topic {document.name!r} has {have} partitions; partitions can only be added")
        _check(document.name, document.vhost, partitions, document.kind, self.defaults.config.partitions_max)
        return [self._shard.next_log_id() for _ in range(partitions - have)]

    async def delete(self, name: str, vhost: str = DEFAULT_VHOST, *, only: Stream | None = None) -> None:
        """Delete the catalog entry, then the logs: a crash in between leaves orphaned logs, never a bare stream.

        With `only`, another stream that was created under the name meanwhile is not deleted."""
        async with self._changing:
            stream = self.get(name, vhost)
            if only is not None and stream is not only:
                raise StreamNotFound(name, vhost)
            for check in self._before_delete:
                check(stream)
            await self._in_thread(lambda: self._catalog.remove(CATALOG_KIND, stream.document.identity))
            del self._streams[vhost, name]
            self.version += 1
            stream.is_deleted = True
            failed: HeadraceError | None = None
            try:
                for callback in self._on_delete:
                    try:
                        await callback(stream)
                    except HeadraceError as error:  # the other callbacks must run, too
                        failed = failed or error
            finally:  # the catalog no longer has these logs, whatever else went wrong
                for log_id in stream.document.logs:
                    del self._by_log[log_id]
                    self._shard.delete_log(log_id)
            if failed is not None:
                raise failed

    def _add(self, document: StreamDocument) -> Stream:
        partitions = [Partition(n, self._shard.create_log(spec)) for n, spec in enumerate(self._specs(document))]
        stream = Stream(document, self._settings(document), partitions)
        self._register(stream)
        for callback in self._on_create:
            callback(stream)
        return stream

    def _register(self, stream: Stream) -> None:
        self._streams[stream.document.identity] = stream
        self.version += 1
        self._by_log.update((partition.log.id, (stream, partition)) for partition in stream.partitions)

    def _specs(self, document: StreamDocument) -> Specs:
        settings = self._settings(document)
        name = slug(document.name)
        if len(document.logs) == 1:
            return [LogSpec(document.logs[0], name, settings)]
        return [LogSpec(log_id, f"{name}-{n}", settings) for n, log_id in enumerate(document.logs)]

    def _settings(self, document: StreamDocument) -> StreamSettings:
        return self.defaults.settings(document.name, document.kind, document.config)

    async def _put(self, *documents: StreamDocument) -> None:
        contents: dict[Identity, dict[str, Any]] = {
            document.identity: msgspec.to_builtins(document) for document in documents
        }
        await self._in_thread(lambda: self._catalog.put_all(CATALOG_KIND, contents))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise DiskFull("the disk is full: the catalog cannot be changed") from error
            raise StorageError(f"the catalog cannot be written: {error.strerror}") from error


def _change(config: Mapping[str, object] | Change) -> Change:
    return config if isinstance(config, Change) else Change(settings=config)


def _check_settings(document: StreamDocument, settings: StreamSettings) -> None:
    """A queue cannot be compacted: its keys are routing keys, and compaction would keep one message of each."""
    if document.kind == "queue" and settings.is_compacted:
        raise InvalidInput(f"{document.name!r} is a queue, which cannot be compacted: messages stay until settled")


def _check(name: str, vhost: str, partitions: int, kind: Kind, partitions_max: int) -> None:
    if kind == "topic" and vhost == DEFAULT_VHOST:
        check_topic_name(name)
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidInput("a name must not contain unpaired surrogates") from None
    if not 0 < size <= NAME_BYTES_MAX:
        raise InvalidInput(f"a name must have 1 to {NAME_BYTES_MAX} bytes, not {size}")
    if not 1 <= partitions <= partitions_max:
        raise InvalidInput(f"a topic must have 1 to {partitions_max:,} partitions, not {partitions}")
