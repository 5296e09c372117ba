"""The group coordinator: all consumer groups of the broker, the protocol of each, and their committed offsets."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from headrace.broker.groups.classic.consumer_protocol import CONSUMER
from headrace.broker.groups.classic.group import ClassicGroup
from headrace.broker.groups.classic.members import GroupState, Join, JoinAnswer, Member
from headrace.broker.groups.config import DEFAULTS, GroupConfig
from headrace.broker.groups.consumer import classic_members
from headrace.broker.groups.consumer import group as consumer
from headrace.broker.groups.consumer.classic_members import ClassicMembers
from headrace.broker.groups.consumer.group import JOIN_EPOCH, ConsumerGroup, Heartbeat
from headrace.broker.groups.consumer.store import ConsumerStore
from headrace.broker.groups.member_budget import MemberBudget
from headrace.broker.groups.offsets import OFFSETS, Answer, CommittedOffset, OffsetStore, StagedEntry
from headrace.broker.groups.settings import GroupSettings
from headrace.broker.groups.timers import Timer, Timers
from headrace.clock import Clock, ExpiryClock
from headrace.errors import (
    GroupNotEmpty,
    GroupNotFound,
    HeadraceError,
    IllegalGeneration,
    InvalidGroupId,
    OffsetMetadataTooLarge,
    RebalanceInProgress,
    UnknownMember,
)

GROUPS = "groups"
SWEEP_S = 600.0
EMPTY_MS_MAX = 60_000
GROUP_ID_BYTES_MAX = 10_000

Group = ClassicGroup | ConsumerGroup


class SavedMember(msgspec.Struct, frozen=True, array_like=True):
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: list[tuple[str, bytes]]
    assignment: bytes


class SavedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A classic group after a rebalance, saved so that its members do not notice a restart."""

    generation: int
    protocol_type: str
    protocol: str
    leader: str
    members: list[SavedMember]


class Listed(NamedTuple):
    group_id: str
    protocol_type: str
    state: str
    kind: str  # classic, consumer or share, as Kafka's tools print it


class Groups:
    """The registry of groups. Owned by the broker; every method runs on the event loop's thread."""

    def __init__(
        self,
        settings: GroupSettings,
        clock: Clock,
        timers: Timers,
        begin: Callable[[], StagedEntry],
        topics: Callable[[], Mapping[str, int]],
        config_of: Callable[[str], GroupConfig] = lambda group_id: DEFAULTS,
        budget: MemberBudget | None = None,
    ) -> None:
        self.settings = settings
        self.config_of = config_of  # the configuration of a group, by id
        self.member_budget = budget or MemberBudget(settings.members_bytes_max)
        self.offsets = OffsetStore(begin)
        self._consumers = ConsumerStore(begin)
        self._ages = ExpiryClock(clock)
        self._timers = timers
        self._begin = begin
        self._topics = topics
        self._groups: dict[str, Group] = {}
        self._sweep: Timer | None = None

    # Opening and closing.

    def load(self, items: Callable[[str], Iterable[tuple[bytes, bytes]]]) -> None:
        self.offsets.load(items(OFFSETS))
        for key, value in items(GROUPS):
            self._restore(key.decode(), msgspec.msgpack.decode(value, type=SavedGroup))
        self._consumers.load(items, self._restored_consumer)
        self._sweep = self._timers.call_later(SWEEP_S, self._sweep_now)

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for group in self._groups.values():
            group.close()

    def _restore(self, group_id: str, saved: SavedGroup) -> None:
        group = self._new_classic(group_id)
        group.generation, group.protocol_type = saved.generation, saved.protocol_type
        group.protocol, group.leader = saved.protocol, saved.leader
        for one in saved.members:
            group.restore(
                Member(
                    member_id=one.member_id,
                    instance_id=one.instance_id,
                    client_id=one.client_id,
                    client_host=one.client_host,
                    session_timeout_ms=one.session_timeout_ms,
                    rebalance_timeout_ms=one.rebalance_timeout_ms,
                    protocols=tuple(one.protocols),
                    assignment=one.assignment,
                )
            )

    def _restored_consumer(self, group_id: str) -> ConsumerGroup:
        """A crash may have happened before the classic group that it replaced was deleted."""
        before = self._groups.get(group_id)
        if before is not None:
            before.close()
            self._forget_classic(group_id)
        return self._new_consumer(group_id)

    def _save(self, group: ClassicGroup) -> None:
        """Not awaited: after a crash that loses it, the members simply join again."""
        saved = SavedGroup(
            group.generation,
            group.protocol_type,
            group.protocol,
            group.leader,
            [
                SavedMember(
                    member.member_id,
                    member.instance_id,
                    member.client_id,
                    member.client_host,
                    member.session_timeout_ms,
                    member.rebalance_timeout_ms,
                    list(member.protocols),
                    member.assignment,
                )
                for member in group.members.values()
            ]
            if group.state is GroupState.STABLE  # otherwise there is no assignment yet, and all members join again
            else [],
        )
        self._stage(lambda entry: entry.put(GROUPS, group.group_id.encode(), msgspec.msgpack.encode(saved)))

    def _stage(self, change: Callable[[StagedEntry], Any]) -> None:
        entry = self._begin()
        change(entry)
        try:
            entry.commit()
        except HeadraceError:
            pass  # callers that wait for durability get the disk's error

    # Finding.

    def join(self, group_id: str, join: Join, answer: JoinAnswer) -> None:
        """Join a classic member. Creates the group if it is new, or replaces an empty group of the other protocol. A
        refused join creates no group."""
        check_group_id(group_id)
        group = self._groups.get(group_id)
        if isinstance(group, ClassicGroup) or (group is not None and group.members):
            self.known_classic(group_id).join(join, answer)
            return
        made = self._make_classic(group_id)
        made.join(join, answer)
        if made.is_in_use:
            self._consumers.forget(group_id)
            self._groups[group_id] = made

    def _hosted(self, group: ConsumerGroup) -> ClassicMembers:
        def successor() -> ClassicGroup | None:
            now = self._groups.get(group.group_id)
            return now if isinstance(now, ClassicGroup) else None

        return ClassicMembers(group, self.settings, lambda answer: self.when_kept(group.group_id, answer), successor)

    def _new_classic(self, group_id: str) -> ClassicGroup:
        group = self._make_classic(group_id)
        self._groups[group_id] = group
        return group

    def _make_classic(self, group_id: str) -> ClassicGroup:
        return ClassicGroup(group_id, self.settings, self._ages.clock, self._timers, self.member_budget, self._save)

    def heartbeat(self, group_id: str, beat: Heartbeat) -> consumer.Answer:
        """Process a heartbeat of the consumer protocol (KIP-848). The first such member of a classic group converts the
        group. A refused heartbeat creates no group."""
        check_group_id(group_id)
        before = self._groups.get(group_id)
        if isinstance(before, ConsumerGroup):
            return before.heartbeat(beat)
        if beat.epoch != JOIN_EPOCH:
            # Kafka answers GROUP_ID_NOT_FOUND, which stops a Java consumer that was merely late; this error lets it
            # rejoin.
            raise UnknownMember(f"group {group_id!r} does not use the consumer protocol")
        group = self._make_consumer(group_id)
        try:
            if before is not None and before.members:
                before.release_memory()
                classic_members.host(before, group, self.settings)
            answer = group.heartbeat(beat)
        except HeadraceError:
            group.close()
            if before is not None:
                before.reclaim_memory()
            raise
        self._groups[group_id] = group
        if before is not None:
            before.close(RebalanceInProgress(group_id))
            self._forget_classic(group_id)
        return answer

    def consumer(self, group_id: str) -> ConsumerGroup:
        check_group_id(group_id)
        group = self._groups.get(group_id)
        if isinstance(group, ConsumerGroup):
            return group
        if group is not None and group.members:
            raise GroupNotFound(group_id)
        if group is not None:
            group.close()
            self._forget_classic(group_id)
        return self._new_consumer(group_id)

    def _forget_classic(self, group_id: str) -> None:
        self._stage(lambda entry: entry.delete(GROUPS, group_id.encode()))

    def _new_consumer(self, group_id: str) -> ConsumerGroup:
        group = self._make_consumer(group_id)
        self._groups[group_id] = group
        return group

    def _make_consumer(self, group_id: str) -> ConsumerGroup:
        return ConsumerGroup(
            group_id,
            self.settings,
            self._ages.clock,
            self._timers,
            self._topics,
            self.member_budget,
            self._consumer_changed,
            self.config_of,
        )

    def _consumer_changed(self, group: ConsumerGroup) -> None:
        if not group.becomes_classic:
            self._consumers.save(group)
            return
        group.close()
        self._consumers.forget(group.group_id)
        classic = self._new_classic(group.group_id)
        classic.adopt(CONSUMER, group.epoch, classic_members.left_behind(group))
        self._save(classic)

    def when_kept(self, group_id: str, answer: Answer) -> None:
        """Call `answer` once the group's state is durable: members must not learn of a change before that."""
        self._consumers.when_kept(group_id, answer)

    def known_classic(self, group_id: str) -> ClassicGroup | ClassicMembers:
        check_group_id(group_id)
        group = self._groups.get(group_id)
        if group is None:
            raise UnknownMember(f"no group {group_id!r}")
        return group if isinstance(group, ClassicGroup) else self._hosted(group)

    def find(self, group_id: str) -> Group | None:
        return self._groups.get(group_id)

    def listing(self) -> list[Listed]:
        listed = []
        for group_id, group in self._groups.items():
            if isinstance(group, ConsumerGroup):
                listed.append(Listed(group_id, "consumer", group.state, "consumer"))
            else:
                listed.append(Listed(group_id, group.protocol_type, group.state.value, "classic"))
        for group_id in self.offsets.groups():
            if group_id not in self._groups:
                listed.append(Listed(group_id, "", GroupState.EMPTY.value, "classic"))
        return listed

    def exists(self, group_id: str) -> bool:
        return group_id in self._groups or bool(self.offsets.of(group_id))

    # Offsets.

    def check_commit(
        self,
        group_id: str,
        member_id: str,
        instance_id: str | None,
        generation: int,
        *,
        transactional: bool = False,
    ) -> None:
        """Raise unless the member may commit now. Members of an unknown group may not."""
        group = self._groups.get(group_id)
        if isinstance(group, ClassicGroup):
            group.check_commit(member_id, instance_id, generation, transactional=transactional)
        elif isinstance(group, ConsumerGroup):
            group.check_commit(member_id, generation)
        elif generation >= 0 and self.offsets.of(group_id):
            raise UnknownMember(f"group {group_id!r} has no members")
        elif generation >= 0:
            raise IllegalGeneration(f"group {group_id!r} has no members")

    def commit(self, entries: list[CommittedOffset], answer: Answer) -> None:
        """Commit offsets of one group; check_commit() comes first."""
        for entry in entries:
            if len(entry.metadata) > self.settings.offset_metadata_bytes_max:
                raise OffsetMetadataTooLarge(f"offset metadata of {len(entry.metadata)} characters")
        self.offsets.commit(entries, answer)

    # Deleting.

    def delete(self, group_id: str, answer: Answer) -> None:
        if not self.exists(group_id):  # a group with an empty name may have offsets
            raise GroupNotFound(group_id)
        group = self._groups.get(group_id)
        if group is not None and group.members:
            raise GroupNotEmpty(f"group {group_id!r} has {len(group.members)} members")
        if group is not None:
            group.close()
            del self._groups[group_id]
            self._forget_classic(group_id)
            self._consumers.forget(group_id)
        self.offsets.delete(group_id, list(self.offsets.of(group_id)), answer)

    def topic_deleted(self, topic: str) -> None:
        """Delete the topic's committed offsets: they mean nothing for a later topic of the same name."""
        for group_id in list(self.offsets.groups()):
            gone = [which for which in self.offsets.of(group_id) if which[0] == topic]
            if gone:
                self.offsets.delete(group_id, gone, lambda error: None)
        for group in self._groups.values():
            if isinstance(group, ConsumerGroup):
                group.topic_deleted(topic)

    def _sweep_now(self) -> None:
        self._sweep = self._timers.call_later(SWEEP_S, self._sweep_now)
        kept_ms = self.settings.offsets_retention_ms
        for group_id in [*self._groups, *self.offsets.groups()]:
            group = self._groups.get(group_id)
            offsets = self.offsets.of(group_id)
            # A group without offsets has nothing to keep, and its name blocks groups of other types.
            empty_ms_max = kept_ms if offsets else EMPTY_MS_MAX
            if group is not None and (group.members or not self._ages.is_past(group.empty_since_ms, empty_ms_max)):
                continue
            old = [which for which, one in offsets.items() if self._ages.is_past(one.commit_ms, kept_ms)]
            if len(old) == len(offsets) and self.exists(group_id):
                self.delete(group_id, lambda error: None)
            elif old:
                self.offsets.delete(group_id, old, lambda error: None)


def check_group_id(group_id: str) -> None:
    if not group_id or len(group_id) > GROUP_ID_BYTES_MAX or "\0" in group_id:
        raise InvalidGroupId("the group id is empty, too long or contains NUL")
