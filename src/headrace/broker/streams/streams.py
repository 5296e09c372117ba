"""Streams: named sets of partitions, with their settings, kept in the catalog.

What a client sees of a stream is in memory; each change is on disk before it is seen. Changes wait for their
turn and for the disk in a thread of their own, so that the event loop never does.
"""

import asyncio
import errno
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Literal, TypeVar

import msgspec

from headrace.broker.catalog.catalog import Catalog, shaped
from headrace.broker.streams.partition import Partition
from headrace.clock import Clock
from headrace.config import Config, stream_settings
from headrace.config import find as find_setting
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
ORIGIN = "from the request"
TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")

Kind = Literal["topic", "queue"]
T = TypeVar("T")
Ids = list[int]
Specs = list[LogSpec]  # Streams has a method called list, which hides the type


@lru_cache(maxsize=4096)  # asked for every request of a Kafka client
def is_topic_name(name: str) -> bool:
    """Whether Kafka clients can use the name."""
    return TOPIC_NAME.fullmatch(name) is not None and name not in {".", ".."}


def check_topic_name(name: str) -> None:
    if not is_topic_name(name):
        raise InvalidInput(
            f"{name[:80]!r} is not a topic name: 1 to 249 letters, digits, dots, dashes and underscores, "
            "and neither . nor .."
        )


class StreamDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A stream as the catalog keeps it. Settings are as people write them, only those that were set."""

    vhost: str
    name: str
    kind: Kind
    logs: list[int]  # one per partition
    config: dict[str, str]
    created_ms: int

    @property
    def identity(self) -> tuple[str, str]:
        return self.vhost, self.name


class AppendRules:
    """What appends must know of a stream, computed when its settings change: the compiled path asks for every batch."""

    __slots__ = ("batch_bytes_max", "codec", "is_plain", "needs_key", "stamps_time")

    def __init__(self, settings: StreamSettings, overrides: Mapping[str, str]) -> None:
        self.batch_bytes_max = settings.batch_bytes_max
        self.needs_key = settings.is_compacted
        # The broker's own default is only for batches that the broker builds; clients' batches keep their codec.
        self.codec: int | None = CODECS[settings.compression] if "compression" in overrides else None
        self.stamps_time = settings.timestamp_type == "append"
        self.is_plain = self.codec is None and not self.stamps_time

    def must_recompress(self, infos: Iterable[BatchInfo]) -> bool:
        return self.codec is not None and any(info.codec != self.codec for info in infos)


class Stream:
    """A stream that exists. Readers may keep it: `is_deleted` says when it no longer exists."""

    def __init__(self, document: StreamDocument, settings: StreamSettings, partitions: list[Partition]) -> None:
        self.document = document
        self.settings = settings
        self.rules = AppendRules(settings, document.config)
        self.is_topic = is_topic_name(document.name)  # for Kafka clients; asked for every batch
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
        """What policies allow at most, whatever the stream's own settings are, now and later."""
        self._age_ms_max, self._bytes_max = age_ms_max, bytes_max
        self.settle_retention()

    def settle_retention(self) -> None:
        """Puts the settings into force, each bound the tighter of the stream's own and the policies'."""
        settings = self.settings
        for field, most in (("retention_ms", self._age_ms_max), ("retention_bytes", self._bytes_max)):
            own = getattr(settings, field)
            if most is not None and (own < 0 or most < own):
                settings = msgspec.structs.replace(settings, **{field: most})
        for partition in self.partitions:
            partition.configure(settings)

    def partition(self, number: int | None) -> Partition:
        """The one asked for; the only one if nobody asked."""
        if number is None:
            if len(self.partitions) > 1:
                raise PartitionNeeded(self.name, [p.number for p in self.partitions])
            number = 0
        if not 0 <= number < len(self.partitions):
            raise PartitionNotFound(self.name, number, len(self.partitions))
        return self.partitions[number]

    def next_turn(self) -> int:
        """The partition for what comes without a key: one per request, so that a request is one batch."""
        self._turn = (self._turn + 1) % len(self.partitions)
        return self._turn


StreamList = list[Stream]


class Streams:
    """The registry of streams. `load` before the shard is opened, `attach` after."""

    def __init__(self, catalog: Catalog, config: Config, clock: Clock) -> None:
        self._catalog = catalog
        self._config = config
        self._clock = clock
        self._streams: dict[tuple[str, str], Stream] = {}
        self._by_log: dict[int, tuple[Stream, Partition]] = {}
        self._documents: list[StreamDocument] = []
        self._changing = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "catalog")
        self.version = 0  # another one after each change of the streams there are, or of their partitions
        self._on_create: list[Callable[[Stream], object]] = []
        self._before_delete: list[Callable[[Stream], object]] = []
        self._before_growth: list[Callable[[Stream], object]] = []
        self._on_delete: list[Callable[[Stream], Awaitable[None]]] = []

    # Opening and closing.

    def load(self) -> Specs:
        """Reads the catalog; blocking."""
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
        """It raises when the stream is to stay."""
        self._before_delete.append(check)

    def before_growth(self, check: Callable[[Stream], object]) -> None:
        """It raises when the stream is to have no more partitions."""
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
        """In the order of their names; None is every vhost."""
        chosen = (key for key in self._streams if vhost is None or key[0] == vhost)
        return [self._streams[key] for key in sorted(chosen)]

    def names(self, vhost: str) -> Iterator[str]:
        """In no order, and for one turn of the loop."""
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
        config: Mapping[str, object] | None = None,
        kind: Kind = "topic",
        vhost: str = DEFAULT_VHOST,
    ) -> Stream:
        """On return it is in the catalog, durably. StreamExists if it was there before."""
        overrides = self.check(name, partitions, config, kind, vhost)
        async with self._changing:
            if (vhost, name) in self._streams:
                raise StreamExists(name, vhost)
            document = StreamDocument(
                vhost=vhost,
                name=name,
                kind=kind,
                logs=[self._shard.next_log_id() for _ in range(partitions)],
                config=overrides,
                created_ms=self._clock.now_ms(),
            )
            self._refuse_compaction(document)
            await self._put(document)
            return self._add(document)

    def check(
        self,
        name: str,
        partitions: int = 1,
        config: Mapping[str, object] | None = None,
        kind: Kind = "topic",
        vhost: str = DEFAULT_VHOST,
    ) -> dict[str, str]:
        """InvalidInput for what `create` refuses, whatever else there is; the settings, as they are kept."""
        self._check(name, vhost, partitions, kind)
        return _overrides(config or {}, {}, self.base(kind))

    async def get_or_create(self, name: str, vhost: str = DEFAULT_VHOST) -> Stream:
        """For publishing: makes a topic that is not there, unless that is switched off."""
        stream = self._streams.get((vhost, name))
        if stream is not None:
            return stream
        if not self._config.auto_create_topics:
            raise StreamNotFound(name, vhost)
        try:
            return await self.create(name, self._config.auto_create_partitions, vhost=vhost)
        except StreamExists:  # somebody else's message was faster
            return self.get(name, vhost)

    async def configure(
        self,
        name: str,
        config: Mapping[str, object] | Callable[[Stream], Mapping[str, object]],
        *,
        partitions: int | None = None,
        vhost: str = DEFAULT_VHOST,
    ) -> Stream:
        """Changes the settings named (None takes one back to the broker's) and may add partitions.

        A change that depends on what is set now is a function of the stream: it is called when nobody else changes it.
        """
        async with self._changing:
            stream = self.get(name, vhost)
            old = stream.document
            if callable(config):
                config = config(stream)
            overrides = _overrides(config, old.config, self.base(old.kind))
            added = self._added_logs(old, partitions)
            for check in self._before_growth if added else ():
                check(stream)
            document = msgspec.structs.replace(old, config=overrides, logs=[*old.logs, *added])
            self._refuse_compaction(document)
            await self._put(document)
            stream.configure(document, self._settings(document))
            for spec in self._specs(document)[len(old.logs) :]:
                stream.partitions.append(Partition(len(stream.partitions), self._shard.create_log(spec)))
            stream.settle_retention()
            self._register(stream)
            return stream

    def _refuse_compaction(self, document: StreamDocument) -> None:
        """A message's key is its routing key: of all that wait in a queue, compaction would leave one."""
        if document.kind == "queue" and self._settings(document).is_compacted:
            raise InvalidInput(f"{document.name!r} is a queue: its messages stay until they are settled, not by key")

    def _added_logs(self, document: StreamDocument, partitions: int | None) -> Ids:
        have = len(document.logs)
        if partitions is None or partitions == have:
            return []
        if partitions < have:
            raise Conflict(f"topic {document.name!r} has {have} partitions; partitions can only be added")
        self._check(document.name, document.vhost, partitions, document.kind)
        return [self._shard.next_log_id() for _ in range(partitions - have)]

    async def delete(self, name: str, vhost: str = DEFAULT_VHOST, *, only: Stream | None = None) -> None:
        """The catalog first, then the logs: a crash in between leaves logs that nobody names, never a stream
        without its logs. `only`: spares another one that was made under the name since."""
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
                    except HeadraceError as error:  # the others are to know, too
                        failed = failed or error
            finally:  # nobody names these logs any more, whatever else went wrong
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

    def _check(self, name: str, vhost: str, partitions: int, kind: Kind) -> None:
        if kind == "topic" and vhost == DEFAULT_VHOST:
            check_topic_name(name)
        try:
            size = len(name.encode())
        except UnicodeEncodeError:
            raise InvalidInput("a name is text without half characters") from None
        if not 0 < size <= NAME_BYTES_MAX:
            raise InvalidInput(f"a name has 1 to {NAME_BYTES_MAX} bytes, not {size}")
        if not 1 <= partitions <= self._config.partitions_max:
            raise InvalidInput(f"a topic has 1 to {self._config.partitions_max:,} partitions, not {partitions}")

    def _specs(self, document: StreamDocument) -> Specs:
        settings = self._settings(document)
        name = slug(document.name)
        if len(document.logs) == 1:
            return [LogSpec(document.logs[0], name, settings)]
        return [LogSpec(log_id, f"{name}-{n}", settings) for n, log_id in enumerate(document.logs)]

    def base(self, kind: Kind) -> StreamSettings:
        """What holds for a stream that has no settings of its own.

        A queue keeps a message until somebody has settled it, however old it gets, however many there are, and
        whatever its key: what the broker is told to do with topics takes nothing from it."""
        if kind == "queue":
            return msgspec.structs.replace(
                self._config.stream, retention_ms=-1, retention_bytes=-1, cleanup_policy="delete"
            )
        return self._config.stream

    def _settings(self, document: StreamDocument) -> StreamSettings:
        return stream_settings(document.config, self.base(document.kind), origin=f"of {document.name!r}")

    async def _put(self, document: StreamDocument) -> None:
        content = msgspec.to_builtins(document)
        await self._in_thread(lambda: self._catalog.put(CATALOG_KIND, document.identity, content))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise DiskFull("no room for the catalog") from error
            raise StorageError(f"the catalog cannot be written: {error.strerror}") from error


def _overrides(given: Mapping[str, object], old: Mapping[str, str], base: StreamSettings) -> dict[str, str]:
    """The settings of a stream after a change, each under its own name and as people write it."""
    stream_settings(given, base, origin=ORIGIN)  # refuses what is unknown, wrong, or not for streams
    changed = dict(old)
    for name, value in given.items():
        setting = find_setting(name, ORIGIN)
        if value is None:
            changed.pop(setting.name, None)
        else:
            changed[setting.name] = setting.render(setting.parse(value, ORIGIN))
    return changed
