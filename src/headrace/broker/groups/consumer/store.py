"""Durable state of consumer groups: their members, and each member's progress towards its target.

It is written when it changes, not with every heartbeat, and it is durable before the member gets the response.
Otherwise a crash could return partitions to their former owner while the new owner already reads them.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from headrace.broker.groups.assign import ASSIGNORS, TopicPartition
from headrace.broker.groups.consumer.group import ConsumerGroup
from headrace.broker.groups.consumer.members import ClassicSide, ConsumerMember, MemberState
from headrace.broker.groups.offsets import Answer, CommitTicket, StagedEntry, as_error
from headrace.broker.groups.subscription_patterns import compile_pattern
from headrace.errors import HeadraceError, InvalidPattern

logger = logging.getLogger("headrace.broker")

CONSUMER_GROUPS = "consumer.groups"
MEMBERS = "consumer.members"
POSITIONS = "consumer.positions"  # separate from MEMBERS: a new target changes many positions

Items = Callable[[str], Iterable[tuple[bytes, bytes]]]
ByTopic = dict[str, set[int]]
Change = tuple[str, bytes, bytes | None]  # table, key, value; None deletes


class SavedConsumerGroup(msgspec.Struct, frozen=True, array_like=True):
    epoch: int
    target_epoch: int
    seen: dict[str, int] | None


class SavedClassic(msgspec.Struct, frozen=True, array_like=True):
    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]


class SavedConsumer(msgspec.Struct, frozen=True, array_like=True):
    instance_id: str | None
    client_id: str
    client_host: str
    rack_id: str | None
    rebalance_timeout_ms: int
    topics: frozenset[str]
    pattern: str
    assignor: str | None
    classic: SavedClassic | None = None  # for a member that speaks the classic protocol


class SavedPosition(msgspec.Struct, frozen=True, array_like=True):
    epoch: int
    previous_epoch: int
    state: MemberState
    is_away: bool
    is_outdated: bool
    assigned: ByTopic
    revoking: ByTopic
    target: ByTopic
    hidden: frozenset[str]


Saved = tuple[SavedConsumer, SavedPosition]


@dataclass(slots=True)
class _Kept:
    """A group as the journal has it, or will have it once the pending change is durable."""

    group: SavedConsumerGroup | None = None
    members: dict[str, Saved | None] = field(default_factory=dict)  # None: the stored value is unknown
    again: set[str] = field(default_factory=set)  # members to write again
    under_way: CommitTicket | None = None  # the last change, while it is not durable
    error: HeadraceError | None = None  # why the last change failed


class ConsumerStore:
    """Owned by Groups; every method runs on the event loop's thread."""

    def __init__(self, begin: Callable[[], StagedEntry]) -> None:
        self._begin = begin
        self._kept: dict[str, _Kept] = {}

    def load(self, items: Items, make: Callable[[str], ConsumerGroup]) -> None:
        """Load all groups. A group with unreadable state is restored without members, and they all rejoin."""
        groups = {key.decode(): value for key, value in items(CONSUMER_GROUPS)}
        members, positions = _by_group(items(MEMBERS)), _by_group(items(POSITIONS))
        for group_id in groups.keys() | members.keys() | positions.keys():
            of, at = members.get(group_id, {}), positions.get(group_id, {})
            group, kept = make(group_id), _Kept()
            self._kept[group_id] = kept
            try:
                kept.group = msgspec.msgpack.decode(groups.get(group_id, b""), type=SavedConsumerGroup)
                if of.keys() != at.keys():
                    raise msgspec.ValidationError("members and their positions do not match")
                kept.members.update({one: _decode(of[one], at[one]) for one in of})
            except (msgspec.MsgspecError, InvalidPattern) as error:
                logger.warning("group %r: the saved members are unreadable and have to rejoin: %s", group_id, error)
                kept.members = dict.fromkeys(of.keys() | at.keys())
                kept.again = set(kept.members)
            if kept.group is not None:
                group.restore(kept.group.epoch, kept.group.target_epoch, kept.group.seen, _restored(kept))

    def save(self, group: ConsumerGroup) -> None:
        kept = self._kept.setdefault(group.group_id, _Kept())
        looked_at = group.touched | kept.again
        group.touched = set()
        changes = [change for member_id in looked_at for change in _member_changes(kept, group, member_id)]
        saved = SavedConsumerGroup(group.epoch, group.target_epoch, group.seen)
        if saved != kept.group:
            kept.group = saved
            changes.append((CONSUMER_GROUPS, group.group_id.encode(), msgspec.msgpack.encode(saved)))
        if changes:
            kept.again, kept.error = set(), None
            self._stage(kept, changes, looked_at)

    def _stage(self, kept: _Kept, changes: list[Change], member_ids: set[str]) -> None:
        def failed(error: HeadraceError) -> None:
            """The next heartbeat of any member retries."""
            kept.group = None
            kept.members.update(dict.fromkeys(member_ids))
            kept.again |= member_ids
            kept.error = error

        def ended(ticket: CommitTicket) -> None:
            if kept.under_way is ticket:
                kept.under_way = None
            if ticket.error is not None:
                failed(as_error(ticket.error))

        entry = self._begin()
        for table, key, value in changes:
            entry.delete(table, key) if value is None else entry.put(table, key, value)
        try:
            kept.under_way = ticket = entry.commit()
        except HeadraceError as error:
            failed(error)
        else:
            ticket.add_callback(ended)

    def when_kept(self, group_id: str, answer: Answer) -> None:
        """Call answer(None) once the group's present state is durable, or answer(error)."""
        kept = self._kept.get(group_id)
        if kept is None or kept.under_way is None:
            answer(None if kept is None else kept.error)
        else:
            kept.under_way.add_callback(lambda _: answer(kept.error))

    def forget(self, group_id: str) -> None:
        """Not awaited: a group that a crash restores loses its members when their sessions expire."""
        kept = self._kept.pop(group_id, None)
        if kept is None:
            return
        changes: list[Change] = [(CONSUMER_GROUPS, group_id.encode(), None)]
        for member_id in kept.members:
            changes += _gone(group_id, member_id)
        self._stage(_Kept(), changes, set())


def _member_changes(kept: _Kept, group: ConsumerGroup, member_id: str) -> Iterator[Change]:
    member = group.members.get(member_id)
    if member is None:
        if member_id in kept.members:
            del kept.members[member_id]
            yield from _gone(group.group_id, member_id)
        return
    who, where = kept.members.get(member_id) or (None, None)
    is_who, is_where = _saved(group, member)
    kept.members[member_id] = is_who, is_where
    key = _key(group.group_id, member_id)
    if is_who != who:
        yield MEMBERS, key, msgspec.msgpack.encode(is_who)
    if is_where != where:
        yield POSITIONS, key, msgspec.msgpack.encode(is_where)


def _gone(group_id: str, member_id: str) -> list[Change]:
    key = _key(group_id, member_id)
    return [(MEMBERS, key, None), (POSITIONS, key, None)]


def _key(group_id: str, member_id: str) -> bytes:
    return f"{group_id}\0{member_id}".encode()


def _by_group(items: Iterable[tuple[bytes, bytes]]) -> dict[str, dict[str, bytes]]:
    found: dict[str, dict[str, bytes]] = {}
    for key, value in items:
        group_id, _, member_id = key.decode().partition("\0")
        found.setdefault(group_id, {})[member_id] = value
    return found


def _decode(who: bytes, where: bytes) -> Saved:
    member = msgspec.msgpack.decode(who, type=SavedConsumer)
    if member.assignor is not None and member.assignor not in ASSIGNORS:
        raise msgspec.ValidationError(f"unknown assignor {member.assignor!r}")
    if member.pattern:
        compile_pattern(member.pattern)
    return member, msgspec.msgpack.decode(where, type=SavedPosition)


def _saved(group: ConsumerGroup, member: ConsumerMember) -> Saved:
    classic = member.classic
    who = SavedConsumer(
        member.instance_id,
        member.client_id,
        member.client_host,
        member.rack_id,
        member.rebalance_timeout_ms,
        member.topics,
        member.pattern,
        member.assignor,
        None if classic is None else SavedClassic(classic.session_timeout_ms, classic.protocols),
    )
    where = SavedPosition(
        member.epoch,
        member.previous_epoch,
        member.state,
        member.away,
        member.is_outdated,
        _by_topic(member.assigned),
        _by_topic(member.revoking),
        _by_topic(group.target.get(member.member_id, ())),
        group.hidden_from(member),
    )
    return who, where


def _restored(kept: _Kept) -> Iterator[tuple[ConsumerMember, set[TopicPartition], frozenset[str]]]:
    """(member, its target, its hidden topics) for each member."""
    for member_id, saved in kept.members.items():
        if saved is None:
            continue
        who, where = saved
        member = ConsumerMember(
            member_id,
            who.instance_id,
            client_id=who.client_id,
            client_host=who.client_host,
            rack_id=who.rack_id,
            rebalance_timeout_ms=who.rebalance_timeout_ms,
            topics=who.topics,
            pattern=who.pattern,
            assignor=who.assignor,
            epoch=where.epoch,
            previous_epoch=where.previous_epoch,
            state=where.state,
            assigned=_flat(where.assigned),
            revoking=_flat(where.revoking),
            away=where.is_away,
            is_outdated=where.is_outdated,
            classic=None if who.classic is None else ClassicSide(who.classic.session_timeout_ms, who.classic.protocols),
        )
        yield member, _flat(where.target), where.hidden


def _by_topic(partitions: Iterable[TopicPartition]) -> ByTopic:
    grouped: ByTopic = {}
    for topic, number in partitions:
        grouped.setdefault(topic, set()).add(number)
    return grouped


def _flat(grouped: ByTopic) -> set[TopicPartition]:
    return {(topic, number) for topic, numbers in grouped.items() for number in numbers}
