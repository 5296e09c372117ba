"""The schema registry: its state is a view of the topic `_schemas`.

The topic is read up to its end before every answer, so it does not matter what wrote it: this registry, a copy of
another registry's topic, or Confluent's registry with this broker as its Kafka. A change is written, synced and then
read back like any other record.
"""

import asyncio
import logging
from collections.abc import Sequence

from headrace.broker.cooperative import uncancellable
from headrace.broker.schemas.parser_thread import Parsing
from headrace.broker.schemas.topic import TOPIC
from headrace.broker.streams import publish
from headrace.broker.streams.append import Appender
from headrace.broker.streams.partition import Partition
from headrace.broker.streams.read import PageReader
from headrace.broker.streams.streams import Stream, Streams
from headrace.errors import (
    Conflict,
    CorruptLog,
    LogClosed,
    Overloaded,
    StorageError,
    StreamExists,
    UnreadableBatch,
)
from headrace.log.shard import Shard
from headrace.schemas import refusals, state
from headrace.schemas.kinds import Schema
from headrace.schemas.rules import (
    Wanted,
    check_mode,
    check_subject,
    check_unreferred,
    check_writable,
    completed,
    next_version,
)
from headrace.schemas.state import IMPORT, Config, Content, Entry, Reference, RegistryState, Version

logger = logging.getLogger("headrace.schemas")

TABLE, LAST_ID = "schemas", b"last_id"
COMPACT = "compact"  # not "compact,delete", which would delete the oldest schemas
PAGE_MESSAGES, PAGE_BYTES = 1_000, 1 << 20
DECISIONS_MAX = 10


class Schemas:
    def __init__(self, streams: Streams, pages: PageReader, appender: Appender, shard: Shard) -> None:
        self._streams = streams
        self._pages = pages
        self._appender = appender
        self._shard = shard
        self._state = RegistryState()  # loaded on first use
        self._stream: Stream | None = None  # the stream that the state was read from
        self._next_offset = 0
        self._has_begun = False
        self._unread: StorageError | None = None  # why the rest of the topic could not be read
        self._reading = asyncio.Lock()
        self._changing = asyncio.Lock()
        self._parsing = Parsing()

    async def close(self) -> None:
        await self._parsing.close()

    async def current(self) -> RegistryState:
        """The state, after reading the topic to its end."""
        stream = self._streams.find(TOPIC)
        if self._is_of(stream) and (stream is None or self._has_read(stream)):
            return self._state
        async with self._reading:
            stream = self._streams.find(TOPIC)  # it may have been recreated meanwhile
            if not self._is_of(stream):  # the first time, or the topic was deleted
                self._state, self._stream, self._next_offset = RegistryState(self._last_forgotten_id()), stream, 0
                self._has_begun, self._unread = True, None
                self._parsing.forget()
            if stream is not None and not self._has_read(stream):
                await self._read_on(stream)
        return self._state

    @property
    def damage(self) -> StorageError | None:
        """Why answers may lack the latest changes; the state up to there is valid."""
        return self._unread or (self._stream.partitions[0].damage if self._stream is not None else None)

    def _has_read(self, stream: Stream) -> bool:
        """Whether everything is read, or everything before damage that must be restored first."""
        return self._next_offset >= stream.partitions[0].stable_end or isinstance(self._unread, CorruptLog)

    def _is_of(self, stream: Stream | None) -> bool:
        return self._has_begun and stream is self._stream

    async def _read_on(self, stream: Stream) -> None:
        partition = stream.partitions[0]
        while (offset := max(self._next_offset, partition.start_offset)) < partition.stable_end:
            try:
                page = await self._pages.read(TOPIC, partition, offset, limit=PAGE_MESSAGES, bytes_max=PAGE_BYTES)
            except UnreadableBatch as error:  # written by some producer that is no registry
                logger.warning("a batch of the topic _schemas is skipped: %s", error)
                self._next_offset = error.next_offset
                continue
            except LogClosed:  # the topic was deleted meanwhile
                raise
            except StorageError as error:
                self._stop_reading(partition, offset, error)
                return
            for record in page.records:
                self._state.apply(record.key, record.value)
            if page.next_offset <= offset:
                break
            self._next_offset = page.next_offset
            await asyncio.sleep(0)  # cached reads never wait, and there may be a hundred thousand schemas
        self._unread = None

    def _stop_reading(self, partition: Partition, offset: int, error: StorageError) -> None:
        """Serve what was read so far. A failed read is retried; damage is remembered in the log, which then accepts no
        records and is reported as damaged."""
        if self._unread is None:
            logger.error(
                "schemas are served up to offset %d of their topic, and none can be registered: %s", offset, error
            )
        self._unread = error
        if isinstance(error, CorruptLog) and partition.log.damage is None:
            partition.log.damage = error

    # Changes. Each is decided on the state at that time, under the lock `_changing`.

    async def register(
        self,
        subject: str,
        content: Content,
        *,
        schema_id: int | None = None,
        version: int | None = None,
        normalize: bool = False,
    ) -> Version:
        """The version with this content, created if there is none. RegistryError if it is incompatible.

        A client that disconnects before the decision registers nothing: parsing and comparing may take long.
        """
        wanted = Wanted(subject, content, schema_id, version, normalize)
        # Even in read-only mode: a serializer that registers automatically only needs the id.
        found = await self._existing(await self.current(), wanted)
        if found is not None:
            return found
        await self._changing.acquire()
        try:
            made, is_new = await self._decided(wanted)
        except BaseException:
            self._changing.release()
            raise
        return await self._put(made, is_new=is_new)

    async def _decided(self, wanted: Wanted) -> tuple[Version, bool]:
        """The version to register, and whether it is new.

        Other registries may write to the topic, too: the decision is valid only if nothing was written meanwhile."""
        subject, content, schema_id, version, normalize = wanted
        for _ in range(DECISIONS_MAX):
            known, read = await self._settled(), self._next_offset
            check_mode(known, subject, is_import=schema_id is not None)
            found = await self._existing(known, wanted)
            if found is not None:
                return found, False
            made = content if schema_id is not None else completed(known, wanted)
            parsed, made = await self._parsing.wanted(known, subject, made, normalize)
            if schema_id is None:
                await self._check_level(known, subject, made, parsed)
            if await self._settled() is known and self._next_offset == read:
                return next_version(known, subject, made, schema_id, version), True
        raise Overloaded(f"the topic {TOPIC} changes faster than a schema can be compared: try again")

    @uncancellable
    async def _put(self, made: Version, *, is_new: bool) -> Version:
        """The caller holds the lock `_changing`, which is released here."""
        try:
            if is_new:
                if self._state.is_there(made.subject, made.version):  # compaction will drop the id that it had
                    await self._keep_last_id(self._state)
                await self._write(state.schema_entry(made))
            return made
        finally:
            self._changing.release()

    async def look_up(
        self, subject: str, content: Content, *, deleted: bool = False, normalize: bool = False
    ) -> Version:
        known = await self.current()
        if not known.versions(subject, deleted=deleted):
            raise refusals.subject_not_found(subject)
        found = await self._existing(known, Wanted(subject, content, None, None, normalize), deleted=deleted)
        if found is None:
            raise refusals.schema_not_found()
        return found

    async def _existing(self, known: RegistryState, wanted: Wanted, *, deleted: bool = False) -> Version | None:
        """The existing version with this content, as given or completed with the subject's defaults."""
        subject, content, schema_id, version, normalize = wanted
        if not content.text.strip() or (version is not None and schema_id is None):
            return None
        _, content = await self._parsing.wanted(known, subject, content, normalize)
        whole = known.completed(subject, content)
        is_complete = known.has_contract(subject) and schema_id is None
        contents = [whole] if is_complete else [content, whole]
        found = [one for content in contents for one in known.same(subject, content, deleted=deleted)]
        if not found:
            found = await self._parsing.equivalent(known, subject, contents, deleted=deleted)
        fitting = (one for one in found if schema_id in (None, one.id) and version in (None, one.version))
        return next(fitting, None)

    async def serialized(self, content: Content) -> str:
        """A Protobuf schema as its descriptor, for clients without a compiler."""
        return await self._parsing.serialized(await self.current(), content)

    async def differences(
        self, subject: str, content: Content, number: int | str | None = None, *, normalize: bool = False
    ) -> list[str]:
        """The incompatibilities with one version, or with those that the subject's level compares."""
        known = await self.current()
        parsed, content = await self._parsing.wanted(known, subject, content, normalize)
        if number is None:
            return await self._parsing.compared(known, subject, content, parsed, known.versions(subject))
        if not known.versions(subject):
            if number == state.LATEST:
                return []
            raise refusals.version_not_found(number)
        return await self._parsing.compared(known, subject, content, parsed, [known.version(subject, number)])

    @uncancellable
    async def delete_subject(self, subject: str, *, permanent: bool) -> list[int]:
        async with self._changing:
            known = await self._settled()
            check_writable(known, subject)
            everything, live = known.versions(subject, deleted=True), known.versions(subject)
            if not everything:
                raise refusals.subject_not_found(subject)
            check_unreferred(known, everything if permanent else live, permanent=permanent)
            if permanent and live:
                raise refusals.subject_is_not_deleted(subject)
            if not permanent and not live:
                raise refusals.subject_is_deleted(subject)
            if permanent:
                await self._forget(known, everything)
                return [one.version for one in everything]
            # Includes versions that were deleted before: compaction keeps only the last of these records.
            await self._write(state.deleted_entry(subject, everything[-1].version))
            return [one.version for one in live]

    @uncancellable
    async def delete_version(self, subject: str, number: int | str, *, permanent: bool) -> int:
        async with self._changing:
            known = await self._settled()
            check_writable(known, subject)
            one = known.version(subject, number, deleted=True if number != state.LATEST else permanent)
            check_unreferred(known, [one], permanent=permanent)
            if permanent and not one.deleted:
                raise refusals.version_is_not_deleted(subject, one.version)
            if not permanent and one.deleted:
                raise refusals.version_is_deleted(subject, one.version)
            if permanent:
                await self._forget(known, [one])
            else:
                await self._write(state.schema_entry(one._replace(deleted=True)))
            return one.version

    @uncancellable
    async def set_config(self, subject: str | None, changes: Config) -> Config:
        """Returns the new config. A value of None resets to the global one."""
        async with self._changing:
            known = await self._settled()
            check_writable(known, subject)
            both = {**(known.own_config(subject) or {}), **changes}
            made = {name: value for name, value in both.items() if value is not None}
            await self._write(state.config_entry(subject, made))
            return made

    @uncancellable
    async def delete_config(self, subject: str | None) -> Config:
        """Returns the previous value."""
        async with self._changing:
            known = await self._settled()
            check_writable(known, subject)
            config = known.config() if subject is None else known.own_config(subject)
            if config is None:
                assert subject is not None
                raise refusals.subject_not_found(subject)
            await self._write(state.config_entry(subject, None))
            return config

    @uncancellable
    async def set_mode(self, subject: str | None, mode: str, *, force: bool = False) -> None:
        async with self._changing:
            known = await self._settled()
            gone: list[Version] = []
            if mode == IMPORT and known.mode(subject) != IMPORT and not force:
                subjects = known.subjects(deleted=True) if subject is None else [subject]
                if any(known.versions(name) for name in subjects):
                    raise refusals.not_permitted("Cannot import since found existing subjects")
                # Deleted versions are removed for good, as in Confluent's registry: an import may reuse their ids.
                gone = [one for name in subjects for one in known.versions(name, deleted=True)]
                check_unreferred(known, gone, permanent=True)
            await self._forget(known, gone, state.mode_entry(subject, mode))

    @uncancellable
    async def delete_mode(self, subject: str | None) -> str:
        """Returns the previous value."""
        async with self._changing:
            known = await self._settled()
            mode = known.mode() if subject is None else known.own_mode(subject)
            if mode is None:
                assert subject is not None
                raise refusals.subject_not_found(subject)
            await self._write(state.mode_entry(subject, None))
            return mode

    # Helpers.

    def _last_forgotten_id(self) -> int:
        return int(self._shard.state.get(TABLE, LAST_ID) or b"0")

    async def _forget(self, known: RegistryState, gone: Sequence[Version], *more: Entry) -> None:
        """Remove versions for good, and the settings of subjects that lose their last version."""
        left = {one.subject: len(known.versions(one.subject, deleted=True)) for one in gone}
        for one in gone:
            left[one.subject] -= 1
        if gone:
            await self._keep_last_id(known)
        entries = [state.forgotten_entry(one) for one in gone]
        for subject in (subject for subject, count in left.items() if not count):
            if known.own_config(subject) is not None:
                entries.append(state.config_entry(subject, None))
            if known.own_mode(subject) is not None:
                entries.append(state.mode_entry(subject, None))
        await self._write(*entries, *more)

    async def _keep_last_id(self, known: RegistryState) -> None:
        """Before schemas are removed for good: messages may still carry their ids, which must not be reused."""
        group = self._shard.group()
        group.put(TABLE, LAST_ID, str(known.last_id).encode())
        await group.commit()

    async def _check_level(self, known: RegistryState, subject: str, content: Content, parsed: Schema) -> None:
        found = await self._parsing.compared(known, subject, content, parsed, known.versions(subject))
        if found:
            raise refusals.incompatible(subject, found)

    async def _settled(self) -> RegistryState:
        """The state for deciding on a change. Overloaded while an open transaction hides the end of the topic: an id
        that is used there would be assigned twice."""
        known = await self.current()
        if self.damage is not None:
            raise StorageError(
                f"schemas cannot be changed, because the topic {TOPIC} cannot be read to its end: {self.damage}"
            )
        if self._stream is not None and self._stream.partitions[0].stable_end < self._stream.partitions[0].end_offset:
            raise Overloaded(
                f"an open transaction in the topic {TOPIC} hides its latest records: try again when it has ended"
            )
        return known

    async def _write(self, *entries: Entry) -> None:
        """Durable and applied to the state on return."""
        stream = await self._writable()
        messages: list[publish.Outgoing] = [(key, value, (), None, -1) for key, value in entries]
        await self._appender.publish_messages(stream, messages)
        await self._settled()

    async def _writable(self) -> Stream:
        streams = self._streams
        try:
            stream = streams.find(TOPIC) or await streams.create(TOPIC, 1, {"cleanup_policy": COMPACT})
        except StreamExists:  # another request was faster
            stream = streams.get(TOPIC)
        if len(stream.partitions) != 1 or stream.settings.cleanup_policy != COMPACT:
            raise Conflict(
                f"the topic {TOPIC} must have one partition and cleanup_policy compact, or schemas would be lost"
            )
        return stream


__all__ = ["Content", "Reference", "Schemas", "Version", "check_subject"]
