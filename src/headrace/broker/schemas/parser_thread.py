"""Parses and compares schemas in a thread of its own, because one schema may take seconds."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from headrace.errors import LogClosed
from headrace.schemas import contract, kinds, refusals, state
from headrace.schemas.kinds import Schema
from headrace.schemas.parsed import Parsed
from headrace.schemas.state import IMPORT, Content, RegistryState, Version

COMPARED_AT_ONCE = 50  # schemas per job: bounds memory, and a job costs more than a small comparison
COMPARED_MAX = 1_000  # versions of a subject that are parsed to find an equivalent one
P = ParamSpec("P")
T = TypeVar("T")


class Parsing:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "schemas")
        self._is_closed = False
        self._lately = Parsed()
        self._digests: dict[int, tuple[Content, str]] = {}  # by schema id, of parsed versions

    async def close(self) -> None:
        """Waits, without blocking the event loop, for the schema that is being parsed."""
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    def forget(self) -> None:
        """Call it when ids may have a new meaning: the topic was recreated."""
        self._digests = {}

    async def serialized(self, known: RegistryState, content: Content) -> str:
        """A Protobuf schema as its descriptor, for clients without a compiler."""
        parsed: Any = (await self.parsed(known, content))[0]
        return str(await self._in_thread(parsed.serialized))

    async def equivalent(
        self, known: RegistryState, subject: str, contents: Sequence[Content], *, deleted: bool
    ) -> list[Version]:
        """Versions with an equivalent schema in another text form, as Confluent's registry stores Protobuf.

        They must be found, or the schema would get a second id."""
        wanted = [content._replace(text=_digest(content.text)) for content in contents]
        found = []
        for one in known.versions(subject, deleted=deleted)[: -COMPARED_MAX - 1 : -1]:
            if one.content.kind == contents[0].kind:
                said = one._replace(content=one.content._replace(text=await self._digest_of(known, one)))
                found += [one for content in wanted if state.is_same(said, content)]
        return found

    async def _digest_of(self, known: RegistryState, one: Version) -> str:
        """The digest of its canonical text; parsed once."""
        content, digest = self._digests.get(one.id, (None, ""))
        if content is not one.content:
            try:
                _, here = await self.parsed(known, one.content)
                digest = _digest(here.text)
            except refusals.RegistryError:  # it could not be registered here
                digest = ""
            self._digests[one.id] = one.content, digest
        return digest

    async def wanted(
        self, known: RegistryState, subject: str, content: Content, normalize: bool
    ) -> tuple[Schema, Content]:
        """The schema as it is stored or looked up: normalized if requested, except in import mode."""
        parsed, content = await self.parsed(known, content)
        if (normalize or known.normalizes(subject)) and known.mode(subject) != IMPORT:
            text = await self._in_thread(kinds.normalized, parsed)
            # In Confluent's order, which does not matter: each schema names its own references.
            references = dict.fromkeys(sorted(content.references, key=lambda one: (one.subject, one.version)))
            content = content._replace(text=text, references=tuple(references))
        return parsed, content

    async def parsed(self, known: RegistryState, content: Content) -> tuple[Schema, Content]:
        """The parsed schema, and the content with its canonical text."""
        texts = known.referred(content.references)
        key = Parsed.key(content.kind, content.text, texts)
        parsed = self._lately.get(key)
        if parsed is None:
            parsed = await self._in_thread(kinds.parse, content.kind, content.text, texts)
            self._lately.keep(key, parsed)
        return parsed, content._replace(text=parsed.text)

    async def compared(
        self, known: RegistryState, subject: str, content: Content, parsed: Schema, versions: Sequence[Version]
    ) -> list[str]:
        """The incompatibilities with the versions that the level compares, within the same compatibility group."""
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
            olds = [(await self.parsed(known, one.content))[0] for one in some]
            found += await self._in_thread(_all_differences, level, parsed, olds)
        return found

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        if self._is_closed:
            raise LogClosed("the broker is stopping")
        call = lambda: work(*args, **named)  # noqa: E731 - run_in_executor takes no names
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _all_differences(level: str, parsed: Schema, olds: Sequence[Schema]) -> list[str]:
    return [reason for old in olds for reason in kinds.differences(level, parsed, old)]
