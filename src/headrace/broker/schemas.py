"""The schema registry: a view of the topic `_schemas`, like everything else here a view of a log.

What is known is what the topic says, read up to its end before every answer, so it does not matter who wrote it: this
registry, a copy of another one's topic, or Confluent's own registry that uses this broker as its Kafka. A change is
written, synced and then read back like any other record.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from headrace.broker import publishing
from headrace.broker.changes import to_the_end
from headrace.broker.partition import Partition
from headrace.broker.streams import Stream
from headrace.errors import (
    Conflict,
    CorruptLog,
    LimitReached,
    LogClosed,
    Overloaded,
    StorageError,
    StreamExists,
    UnreadableBatch,
)
from headrace.schemas import contract, kinds, refusals, state
from headrace.schemas.kinds import Schema
from headrace.schemas.parsed import Parsed
from headrace.schemas.state import IMPORT, READONLY, READONLY_TOO, Config, Content, Entry, Reference, State, Version

if TYPE_CHECKING:
    from headrace.broker.broker import Broker

logger = logging.getLogger("headrace.schemas")

TOPIC = "_schemas"
TABLE, LAST_ID = "schemas", b"last_id"
COMPACT = "compact"  # alone: with ",delete" the oldest would go
PAGE_MESSAGES, PAGE_BYTES = 1_000, 1 << 20
VERSIONS_MAX = 100_000
COMPARED_AT_ONCE = 50  # schemas in memory, and errands for the thread: each takes longer than a small comparison
COMPARED_MAX = 1_000  # versions of a subject that are parsed to see whether they are the same in other words
DECISIONS_MAX = 10
SUBJECT_BYTES_MAX = 1_000
P = ParamSpec("P")
T = TypeVar("T")


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
        # A schema may take long to parse, and to compare with the ones before it.
        self._thread = ThreadPoolExecutor(1, "schemas")
        self._is_closed = False
        self._parsed_lately = Parsed()
        self._digests: dict[int, tuple[Content, str]] = {}  # by id, of those that were looked at

    async def close(self) -> None:
        """A schema that is being parsed ends first, beside the loop: it may take seconds."""
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    async def current(self) -> State:
        """What the topic says by now."""
        stream = self._broker.streams.find(TOPIC)
        if self._is_of(stream) and (stream is None or self._has_read(stream)):
            return self._state
        async with self._reading:
            stream = self._broker.streams.find(TOPIC)  # it may have been made anew meanwhile
            if not self._is_of(stream):  # the first time, or the topic was deleted
                self._state, self._stream, self._next_offset = State(self._last_forgotten_id()), stream, 0
                self._has_begun, self._unread, self._digests = True, None, {}
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
        wanted = _Wanted(subject, content, schema_id, version, normalize)
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

    async def _decided(self, wanted: "_Wanted") -> tuple[Version, bool]:
        """The version to be, and whether it is new. Others may write to the topic, too, as another registry that has it
        for its own: what is decided holds only if nothing came while it was."""
        subject, content, schema_id, version, normalize = wanted
        for _ in range(DECISIONS_MAX):
            known, read = await self._settled(), self._next_offset
            _check_mode(known, subject, is_import=schema_id is not None)
            found = await self._existing(known, wanted)
            if found is not None:
                return found, False
            made = content if schema_id is not None else _completed(known, wanted)
            parsed, made = await self._wanted(known, subject, made, normalize)
            if schema_id is None:
                await self._check_level(known, subject, made, parsed)
            if await self._settled() is known and self._next_offset == read:
                return _next(known, subject, made, schema_id, version), True
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
        found = await self._existing(known, _Wanted(subject, content, None, None, normalize), deleted=deleted)
        if found is None:
            raise refusals.schema_not_found()
        return found

    async def _existing(self, known: State, wanted: "_Wanted", *, deleted: bool = False) -> Version | None:
        """The version that is meant: with what is given, or with that and what a new version would have besides."""
        subject, content, schema_id, version, normalize = wanted
        if not content.text.strip() or (version is not None and schema_id is None):
            return None
        _, content = await self._wanted(known, subject, content, normalize)
        completed = known.completed(subject, content)
        is_complete = known.has_contract(subject) and schema_id is None
        contents = [completed] if is_complete else [content, completed]
        found = [one for content in contents for one in known.same(subject, content, deleted=deleted)]
        if not found:
            found = await self._in_other_words(known, subject, contents, deleted=deleted)
        fitting = (one for one in found if schema_id in (None, one.id) and version in (None, one.version))
        return next(fitting, None)

    async def _in_other_words(
        self, known: State, subject: str, contents: Sequence[Content], *, deleted: bool
    ) -> list[Version]:
        """What another registry has stored in its own form, as Confluent's does with Protobuf: ids are to stay."""
        wanted = [content._replace(text=_digest(content.text)) for content in contents]
        found = []
        for one in known.versions(subject, deleted=deleted)[: -COMPARED_MAX - 1 : -1]:
            if one.content.kind == contents[0].kind:
                said = one._replace(content=one.content._replace(text=await self._digest_of(known, one)))
                found += [one for content in wanted if state.is_same(said, content)]
        return found

    async def _digest_of(self, known: State, one: Version) -> str:
        """Of the text that it would have here; parsed once."""
        content, digest = self._digests.get(one.id, (None, ""))
        if content is not one.content:
            try:
                _, here = await self._parsed(known, one.content)
                digest = _digest(here.text)
            except refusals.RegistryError:  # then it is nothing that anybody could register here
                digest = ""
            self._digests[one.id] = one.content, digest
        return digest

    async def serialized(self, content: Content) -> str:
        """A Protobuf schema as its descriptor, which clients ask for that have no compiler."""
        parsed: Any = (await self._parsed(await self.current(), content))[0]
        return str(await self._in_thread(parsed.serialized))

    async def differences(
        self, subject: str, content: Content, number: int | str | None = None, *, normalize: bool = False
    ) -> list[str]:
        """Why the subject's level does not allow this content after a version, or after those that it asks for."""
        known = await self.current()
        parsed, content = await self._wanted(known, subject, content, normalize)
        if number is None:
            return await self._compared(known, subject, content, parsed, known.versions(subject))
        if not known.versions(subject):
            if number == state.LATEST:
                return []
            raise refusals.version_not_found(number)
        return await self._compared(known, subject, content, parsed, [known.version(subject, number)])

    @to_the_end
    async def delete_subject(self, subject: str, *, permanent: bool) -> list[int]:
        async with self._changing:
            known = await self._settled()
            _check_writable(known, subject)
            everything, live = known.versions(subject, deleted=True), known.versions(subject)
            if not everything:
                raise refusals.subject_not_found(subject)
            _check_unreferred(known, everything if permanent else live, permanent=permanent)
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
            _check_writable(known, subject)
            one = known.version(subject, number, deleted=True if number != state.LATEST else permanent)
            _check_unreferred(known, [one], permanent=permanent)
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
            _check_writable(known, subject)
            both = {**(known.own_config(subject) or {}), **changes}
            made = {name: value for name, value in both.items() if value is not None}
            await self._write(state.config_entry(subject, made))
            return made

    @to_the_end
    async def delete_config(self, subject: str | None) -> Config:
        """What it was."""
        async with self._changing:
            known = await self._settled()
            _check_writable(known, subject)
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
                _check_unreferred(known, gone, permanent=True)
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

    async def _wanted(
        self, known: State, subject: str, content: Content, normalize: bool
    ) -> tuple[Schema, Content]:
        """As it is stored, or looked for. What is imported stays as it is."""
        parsed, content = await self._parsed(known, content)
        if (normalize or known.normalizes(subject)) and known.mode(subject) != IMPORT:
            text = await self._in_thread(kinds.normalized, parsed)
            # In Confluent's order; each schema says itself what it needs, so none has to be before another.
            references = dict.fromkeys(sorted(content.references, key=lambda one: (one.subject, one.version)))
            content = content._replace(text=text, references=tuple(references))
        return parsed, content

    async def _parsed(self, known: State, content: Content) -> tuple[Schema, Content]:
        """With the text that the same schema always has."""
        texts = known.referred(content.references)
        key = Parsed.key(content.kind, content.text, texts)
        parsed = self._parsed_lately.get(key)
        if parsed is None:
            parsed = await self._in_thread(kinds.parse, content.kind, content.text, texts)
            self._parsed_lately.keep(key, parsed)
        return parsed, content._replace(text=parsed.text)

    async def _check_level(self, known: State, subject: str, content: Content, parsed: Schema) -> None:
        found = await self._compared(known, subject, content, parsed, known.versions(subject))
        if found:
            raise refusals.incompatible(subject, found)

    async def _compared(
        self, known: State, subject: str, content: Content, parsed: Schema, versions: Sequence[Version]
    ) -> list[str]:
        """With those of the versions that the level asks for, and that are of the same group."""
        level, group = known.level(subject), known.config(subject).get(state.GROUP)
        if group:
            own = contract.properties(content.metadata).get(group)
            versions = [one for one in versions if contract.properties(one.content.metadata).get(group) == own]
        by_number = {one.version: one for one in versions}
        others = [by_number[number] for number in kinds.earlier_ones(level, list(by_number))]
        found: list[str] = []
        newest_first = others[::-1]
        for start in range(0, len(others), COMPARED_AT_ONCE):
            some = newest_first[start : start + COMPARED_AT_ONCE]
            olds = [(await self._parsed(known, one.content))[0] for one in some]
            found += await self._in_thread(_all_differences, level, parsed, olds)
        return found

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
        messages: list[publishing.Outgoing] = [(key, value, (), None, -1) for key, value in entries]
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

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        if self._is_closed:
            raise LogClosed("the broker is stopping")
        call = lambda: work(*args, **named)  # noqa: E731 - run_in_executor takes no names
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class _Wanted(NamedTuple):
    """A schema as somebody sends it."""

    subject: str
    content: Content
    schema_id: int | None
    version: int | None
    normalize: bool


def _completed(known: State, wanted: _Wanted) -> Content:
    """What a new version is made of: what is not said of it is as in the version before it."""
    subject, content = wanted.subject, wanted.content
    if not content.text.strip():
        before = known.versions(subject)
        if not before:
            raise refusals.invalid_schema("Empty schema")
        last = before[-1].content
        content = content._replace(kind=last.kind, text=last.text, references=last.references)
    content = known.completed(subject, content)
    if wanted.version is not None or contract.VERSION in contract.properties(content.metadata):
        content = content._replace(metadata=contract.with_version(content.metadata, _next_number(known, subject)))
    return content


def _next_number(known: State, subject: str) -> int:
    everything = known.versions(subject, deleted=True)
    return everything[-1].version + 1 if everything else 1


def _all_differences(level: str, parsed: Schema, olds: Sequence[Schema]) -> list[str]:
    return [reason for old in olds for reason in kinds.differences(level, parsed, old)]


def _next(known: State, subject: str, content: Content, schema_id: int | None, version: int | None) -> Version:
    count = len(known.versions(subject, deleted=True))
    if count >= VERSIONS_MAX:
        raise LimitReached(f"subject {subject!r} has {count:,} versions, which is the most")
    number = _next_number(known, subject)
    if schema_id is None:
        if version is not None and version != number:
            raise refusals.invalid_schema("Version is not one more than previous version")
        same = known.id_of(content)
        if same is None and known.last_id >= state.VERSION_MAX:
            raise LimitReached(f"the last id, {known.last_id}, is in use: there is none for another schema")
        return Version(subject, number, known.last_id + 1 if same is None else same, content)
    try:
        taken = known.content(schema_id)
    except refusals.RegistryError:
        taken = content
    if taken != content:
        raise refusals.not_permitted(f"Overwrite new schema with id {schema_id} is not permitted.")
    return Version(subject, number if version is None else version, schema_id, content)


def _check_mode(known: State, subject: str, *, is_import: bool) -> None:
    _check_writable(known, subject)
    is_importing = known.mode(subject) == IMPORT
    if is_import and not is_importing:
        raise refusals.not_permitted(f"Subject {subject} is not in import mode")
    if is_importing and not is_import:
        raise refusals.not_permitted(f"Subject {subject} is in import mode: a schema comes with its id and version")


def _check_writable(known: State, subject: str | None) -> None:
    if known.mode(subject) in (READONLY, READONLY_TOO):
        raise refusals.not_permitted(f"Subject {subject} is in read-only mode")


def _check_unreferred(known: State, gone: Sequence[Version], *, permanent: bool) -> None:
    """Those that go with it need it no longer. For good nothing goes that one needs which is only marked as deleted: it
    is still handed out by its id."""
    places = {(one.subject, one.version) for one in gone}
    for one in gone:
        needing = known.referred_by(one.subject, one.version, deleted=permanent)
        if any((user.subject, user.version) not in places for user in needing):
            raise refusals.is_referred_to(one.subject, one.version)


def check_subject(name: str) -> None:
    if not name or len(name.encode()) > SUBJECT_BYTES_MAX or not name.isprintable():
        raise refusals.RegistryError(42208, f"The specified subject '{name[:80]!r}' is not a valid.")


__all__ = ["TOPIC", "Content", "Reference", "Schemas", "Version", "check_subject"]
