"""The schema registry: a view of the topic `_schemas`, like everything else here a view of a log.

What is known is what the topic says, read up to its end before every answer, so it does not matter who wrote it: this
registry, a copy of another one's topic, or Confluent's own registry that uses this broker as its Kafka. A change is
written, synced and then read back like any other record.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.broker.cooperative import to_the_end
from headrace.broker.schemas.parser_thread import Parsing
from headrace.broker.streams import publish
from headrace.broker.streams.partition import Partition
from headrace.broker.streams.streams import Stream
from headrace.errors import (
    Conflict,
    CorruptLog,
    LogClosed,
    Overloaded,
    StorageError,
    StreamExists,
    UnreadableBatch,
)
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
from headrace.schemas.state import IMPORT, Config, Content, Entry, Reference, State, Version

if TYPE_CHECKING:
    from headrace.broker.broker import Broker

logger = logging.getLogger("headrace.schemas")

TOPIC = "_schemas"
TABLE, LAST_ID = "schemas", b"last_id"
COMPACT = "compact"  # alone: with ",delete" the oldest would go
PAGE_MESSAGES, PAGE_BYTES = 1_000, 1 << 20
DECISIONS_MAX = 10


class Schemas:
    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self._state = State()  # until it is asked for
        self._stream: Stream | None = None  # that the state is of
        self._next_offset = 0
        self._has_begun = False
        self._unread: StorageError | None = None  # why what lies behind is not known
        self._reading = asyncio.Lock()
        self._changing = asyncio.Lock()
        self._parsing = Parsing()

    async def close(self) -> None:
        await self._parsing.close()

    async def current(self) -> State:
        """What the topic says by now."""
        stream = self._broker.streams.find(TOPIC)
        if self._is_of(stream) and (stream is None or self._has_read(stream)):
            return self._state
        async with self._reading:
            stream = self._broker.streams.find(TOPIC)  # it may have been made anew meanwhile
            if not self._is_of(stream):  # the first time, or the topic was deleted
                self._state, self._stream, self._next_offset = State(self._last_forgotten_id()), stream, 0
                self._has_begun, self._unread = True, None
                self._parsing.forget()
            if stream is not None and not self._has_read(stream):
                await self._read_on(stream)
        return self._state

    @property
    def damage(self) -> StorageError | None:
        """Why answers may lack what was written last: what the topic says up to there holds."""
        return self._unread or (self._stream.partitions[0].log.damage if self._stream is not None else None)

    def _has_read(self, stream: Stream) -> bool:
        """All there is, or all that can be read before somebody restores the topic."""
        return self._next_offset >= stream.partitions[0].stable_end or isinstance(self._unread, CorruptLog)

    def _is_of(self, stream: Stream | None) -> bool:
        return self._has_begun and stream is self._stream

    async def _read_on(self, stream: Stream) -> None:
        partition = stream.partitions[0]
        while (offset := max(self._next_offset, partition.start_offset)) < partition.stable_end:
            try:
                page = await self._broker.read(stream, partition, offset, limit=PAGE_MESSAGES, bytes_max=PAGE_BYTES)
            except UnreadableBatch as error:  # of some producer, no registry's
                logger.warning("a batch of the schemas' topic is left out: %s", error)
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
            await asyncio.sleep(0)  # what is in memory is read without a pause, and may be a hundred thousand schemas
        self._unread = None

    def _stop_reading(self, partition: Partition, offset: int, error: StorageError) -> None:
        """Answers go on with what was read. A disk that did not answer is asked again; damage stays, and is then the
        log's: it takes no records and is among those that are called damaged."""
        if self._unread is None:
            logger.error("schemas are served up to offset %d of their topic, and none is taken: %s", offset, error)
        self._unread = error
        if isinstance(error, CorruptLog) and partition.log.damage is None:
            partition.log.damage = error

    # Changes. Each decides on what the topic says by then, and nobody else decides meanwhile.

    async def register(
        self,
        subject: str,
        content: Content,
        *,
        schema_id: int | None = None,
        version: int | None = None,
        normalize: bool = False,
    ) -> Version:
        """The version with this content, made if there is none. RegistryError if it may not follow the others.

        Who hangs up before it is decided registers nothing: parsing and comparing may take long, and nobody waits.
        """
        wanted = Wanted(subject, content, schema_id, version, normalize)
        # Also where nothing may be written: whoever has a serializer that registers only wants to know the id.
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
        """The version to be, and whether it is new. Others may write to the topic, too, as another registry that has it
        for its own: what is decided holds only if nothing came while it was."""
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
        raise Overloaded(f"others write to the topic {TOPIC} faster than a schema can be compared")

    @to_the_end
    async def _put(self, made: Version, *, is_new: bool) -> Version:
        """For who has the right to change, which ends with it."""
        try:
            if is_new:
                if self._state.is_there(made.subject, made.version):  # compaction will forget the id that it had
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

    async def _existing(self, known: State, wanted: Wanted, *, deleted: bool = False) -> Version | None:
        """The version that is meant: with what is given, or with that and what a new version would have besides."""
        subject, content, schema_id, version, normalize = wanted
        if not content.text.strip() or (version is not None and schema_id is None):
            return None
        _, content = await self._parsing.wanted(known, subject, content, normalize)
        whole = known.completed(subject, content)
        is_complete = known.has_contract(subject) and schema_id is None
        contents = [whole] if is_complete else [content, whole]
        found = [one for content in contents for one in known.same(subject, content, deleted=deleted)]
        if not found:
            found = await self._parsing.in_other_words(known, subject, contents, deleted=deleted)
        fitting = (one for one in found if schema_id in (None, one.id) and version in (None, one.version))
        return next(fitting, None)

    async def serialized(self, content: Content) -> str:
        """A Protobuf schema as its descriptor, which clients ask for that have no compiler."""
        return await self._parsing.serialized(await self.current(), content)

    async def differences(
        self, subject: str, content: Content, number: int | str | None = None, *, normalize: bool = False
    ) -> list[str]:
        """Why the subject's level does not allow this content after a version, or after those that it asks for."""
        known = await self.current()
        parsed, content = await self._parsing.wanted(known, subject, content, normalize)
        if number is None:
            return await self._parsing.compared(known, subject, content, parsed, known.versions(subject))
        if not known.versions(subject):
            if number == state.LATEST:
                return []
            raise refusals.version_not_found(number)
        return await self._parsing.compared(known, subject, content, parsed, [known.version(subject, number)])

    @to_the_end
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
            # Those that were deleted before, too: compaction keeps only the last of these records.
            await self._write(state.deleted_entry(subject, everything[-1].version))
            return [one.version for one in live]

    @to_the_end
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

    @to_the_end
    async def set_config(self, subject: str | None, changes: Config) -> Config:
        """What it is then. None as a value: back to what holds for all."""
        async with self._changing:
            known = await self._settled()
            check_writable(known, subject)
            both = {**(known.own_config(subject) or {}), **changes}
            made = {name: value for name, value in both.items() if value is not None}
            await self._write(state.config_entry(subject, made))
            return made

    @to_the_end
    async def delete_config(self, subject: str | None) -> Config:
        """What it was."""
        async with self._changing:
            known = await self._settled()
            check_writable(known, subject)
            config = known.config() if subject is None else known.own_config(subject)
            if config is None:
                assert subject is not None
                raise refusals.subject_not_found(subject)
            await self._write(state.config_entry(subject, None))
            return config

    @to_the_end
    async def set_mode(self, subject: str | None, mode: str, *, force: bool = False) -> None:
        async with self._changing:
            known = await self._settled()
            gone: list[Version] = []
            if mode == IMPORT and known.mode(subject) != IMPORT and not force:
                subjects = known.subjects(deleted=True) if subject is None else [subject]
                if any(known.versions(name) for name in subjects):
                    raise refusals.not_permitted("Cannot import since found existing subjects")
                # What was deleted makes room, as in Confluent's registry: its ids may come again with what is imported.
                gone = [one for name in subjects for one in known.versions(name, deleted=True)]
                check_unreferred(known, gone, permanent=True)
            await self._forget(known, gone, state.mode_entry(subject, mode))

    @to_the_end
    async def delete_mode(self, subject: str | None) -> str:
        """What it was."""
        async with self._changing:
            known = await self._settled()
            mode = known.mode() if subject is None else known.own_mode(subject)
            if mode is None:
                assert subject is not None
                raise refusals.subject_not_found(subject)
            await self._write(state.mode_entry(subject, None))
            return mode

    # Small parts.

    def _last_forgotten_id(self) -> int:
        return int(self._broker.shard.state.get(TABLE, LAST_ID) or b"0")

    async def _forget(self, known: State, gone: Sequence[Version], *more: Entry) -> None:
        """For good, and what is set for a subject that goes with its last version."""
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

    async def _keep_last_id(self, known: State) -> None:
        """Before schemas go for good: messages may be about that still have their ids, which mean nothing else then."""
        group = self._broker.shard.group()
        group.put(TABLE, LAST_ID, str(known.last_id).encode())
        await group.commit()

    async def _check_level(self, known: State, subject: str, content: Content, parsed: Schema) -> None:
        found = await self._parsing.compared(known, subject, content, parsed, known.versions(subject))
        if found:
            raise refusals.incompatible(subject, found)

    async def _settled(self) -> State:
        """What a change is decided on. Overloaded as long as a transaction in the topic holds back what is behind its
        beginning: an id that is there already would be given again."""
        known = await self.current()
        if self.damage is not None:
            raise StorageError(f"no schemas are taken: the topic {TOPIC} cannot be read whole: {self.damage}")
        if self._stream is not None and self._stream.partitions[0].stable_end < self._stream.partitions[0].end_offset:
            raise Overloaded(f"a transaction is open in the topic {TOPIC}, and holds back what is written to it")
        return known

    async def _write(self, *entries: Entry) -> None:
        """Durable, and known, on return."""
        stream = await self._writable()
        messages: list[publish.Outgoing] = [(key, value, (), None, -1) for key, value in entries]
        await self._broker.publish(stream, messages)
        await self._settled()

    async def _writable(self) -> Stream:
        streams = self._broker.streams
        try:
            stream = streams.find(TOPIC) or await streams.create(TOPIC, 1, {"cleanup_policy": COMPACT})
        except StreamExists:  # somebody else was faster
            stream = streams.get(TOPIC)
        if len(stream.partitions) != 1 or stream.settings.cleanup_policy != COMPACT:
            raise Conflict(f"the topic {TOPIC} has one partition and cleanup_policy compact, or schemas would be lost")
        return stream


__all__ = ["TOPIC", "Content", "Reference", "Schemas", "Version", "check_subject"]
