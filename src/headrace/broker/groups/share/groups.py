"""The registry of share groups (KIP-932): members acquire single records of shared partitions.

Every member reads all partitions of its topics; the broker locks each record for the member that acquires it. The start
offset of a group is durable before its first member gets a response; settled records are durable before their
acknowledgement is confirmed.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from headrace.broker.groups.config import DEFAULTS, EARLIEST, GroupConfig, decode, encode
from headrace.broker.groups.coordinator import check_group_id
from headrace.broker.groups.member_budget import MEMBER_BYTES, NAME_BYTES, MemberBudget, topics_bytes
from headrace.broker.groups.share.members import SHARE_MEMBERS, ShareMember, check_sizes, restored
from headrace.broker.groups.share.partition import SavedShare, SharePartition
from headrace.broker.groups.timers import Timer, Timers
from headrace.broker.streams.partition import Partition, when_loaded
from headrace.clock import Clock
from headrace.errors import (
    FencedMemberEpoch,
    GroupFull,
    GroupNotEmpty,
    GroupNotFound,
    HeadraceError,
    InvalidInput,
    InvalidRecordState,
    UnknownMember,
)
from headrace.log.commit.atomic_group import AtomicGroup as Entry
from headrace.log.log import Log
from headrace.log.shard import Shard

SHARES = "shares"
CONFIGS = "group.configs"
JOIN_EPOCH, LEAVE_EPOCH = 0, -1
MEMBERS_MAX = 10_000


@dataclass(slots=True)
class ShareGroup:
    group_id: str
    epoch: int = 0
    members: dict[str, ShareMember] = field(default_factory=dict)
    partitions: dict[int, SharePartition] = field(default_factory=dict)  # by log id
    waiting: set[Callable[[], object]] = field(default_factory=set)  # called when records were returned

    @property
    def state(self) -> str:
        return "Stable" if self.members else "Empty"


class ShareGroups:
    """Owned by the broker; every method runs on the event loop's thread."""

    def __init__(
        self, shard: Shard, clock: Clock, timers: Timers, topics: Callable[[], Mapping[str, int]], budget: MemberBudget
    ) -> None:
        self._shard = shard
        self._budget = budget
        self._clock = clock
        self._timers = timers
        self._topics = topics
        self._groups: dict[str, ShareGroup] = {}
        self._settings: dict[str, GroupConfig] = {}  # by group, only for configured groups
        self._lock_timer: Timer | None = None
        self._lock_look = 0.0  # when the timer fires
        self._beginning = asyncio.Lock()
        self._configuring = asyncio.Lock()

    def load(self) -> None:
        for key, value in self._shard.state.items(CONFIGS):
            self._settings[key.decode()] = decode(value)
        for key, value in self._shard.state.items(SHARES):
            group_id, _, log_id = key.rpartition(b"\0")
            saved = msgspec.msgpack.decode(value, type=SavedShare)
            if int(log_id) in self._shard.logs:
                group = self.group(group_id.decode())
                group.partitions[int(log_id)] = SharePartition(0, saved, self.settings_of(group.group_id))
        for key, value in self._shard.state.items(SHARE_MEMBERS):
            named, _, member_id = key.partition(b"\0")
            group, member = self.group(named.decode()), restored(member_id.decode(), value)
            group.members[member.member_id] = member
            self._budget.keep(member, _member_bytes(member.topics, len(member.assigned)))
            group.epoch = max(group.epoch, member.epoch)
            self._keep_alive(group, member)  # it has one session timeout to send a heartbeat

    def close(self) -> None:
        for group in self._groups.values():
            for member in group.members.values():
                if member.timer is not None:
                    member.timer.cancel()
        if self._lock_timer is not None:
            self._lock_timer.cancel()

    def group(self, group_id: str) -> ShareGroup:
        check_group_id(group_id)
        return self._groups.setdefault(group_id, ShareGroup(group_id))

    def find(self, group_id: str) -> ShareGroup | None:
        return self._groups.get(group_id)

    def all(self) -> list[ShareGroup]:
        return list(self._groups.values())

    def known(self, group_id: str) -> ShareGroup:
        group = self._groups.get(group_id)
        if group is None:
            raise GroupNotFound(group_id)
        return group

    def settings_of(self, group_id: str) -> GroupConfig:
        return self._settings.get(group_id, DEFAULTS)

    def configured(self) -> list[str]:
        """Ids of groups of any type with a configuration of their own; the groups need not exist yet."""
        return [group_id for group_id, config in self._settings.items() if config != DEFAULTS]

    async def configure(self, group_id: str, values: Mapping[str, Any]) -> None:
        """Change the given settings, see GroupConfig.changed."""
        check_group_id(group_id)
        async with self._configuring:  # concurrent requests: the second one must see the first one's changes
            settings = self.settings_of(group_id).changed(values)
            entry = self._shard.group()
            entry.put(CONFIGS, group_id.encode(), encode(settings))
            await entry.commit()
            self._settings[group_id] = settings
        group = self._groups.get(group_id)
        for share in group.partitions.values() if group is not None else ():
            share.settings = settings

    # Members.

    def heartbeat(
        self,
        group_id: str,
        member_id: str,
        epoch: int,
        *,
        client_id: str,
        client_host: str,
        rack_id: str | None,
        topics: frozenset[str] | None,
    ) -> tuple[ShareMember, bool]:
        """Return the member, and whether its assignment must be sent."""
        check_sizes(member_id, client_id, rack_id, topics)
        if topics is not None:
            self._check_room(group_id, member_id, topics)
        if epoch == JOIN_EPOCH:
            group, member = self._join(group_id, member_id, topics)
        else:
            group, member = self._known_member(group_id, member_id)
        if epoch == LEAVE_EPOCH:
            self._drop(group, member)
            member.epoch = LEAVE_EPOCH
            return member, False
        if epoch not in (JOIN_EPOCH, member.epoch, member.previous_epoch):
            raise FencedMemberEpoch(f"epoch {epoch}, but the member is at {member.epoch}")
        member.client_id, member.client_host, member.rack_id = client_id, client_host, rack_id
        if topics is not None:
            member.topics = topics
        self._keep_alive(group, member)
        counts = self._topics()
        wanted = frozenset(
            (topic, number) for topic in member.topics if topic in counts for number in range(counts[topic])
        )
        is_news = wanted != member.assigned or epoch == JOIN_EPOCH or member.is_outdated
        if is_news:
            member.is_outdated = False
            group.epoch += 1
            member.previous_epoch, member.epoch = epoch, group.epoch
            member.assigned = wanted
        if is_news or topics is not None:  # names of topics that do not exist count too
            self._budget.keep(member, _member_bytes(member.topics, len(wanted)))
        self._save_member(group, member)
        return member, is_news or epoch != member.epoch

    def _check_room(self, group_id: str, member_id: str, topics: frozenset[str]) -> None:
        group, counts = self._groups.get(group_id), self._topics()
        before = None if group is None else group.members.get(member_id)
        partitions = sum(counts.get(topic, 0) for topic in topics)
        self._budget.check(_member_bytes(topics, partitions) - (0 if before is None else before.kept_bytes))

    def _join(self, group_id: str, member_id: str, topics: frozenset[str] | None) -> tuple[ShareGroup, ShareMember]:
        check_group_id(group_id)
        if topics is None:
            raise InvalidInput("a joining member must send its subscription")
        group = self._groups.get(group_id) or ShareGroup(group_id)
        member = group.members.get(member_id)
        if member is None:
            if len(group.members) >= MEMBERS_MAX:
                raise GroupFull(f"group {group_id!r} has {MEMBERS_MAX} members")
            member = ShareMember(member_id or str(uuid.uuid4()))
            group.members[member.member_id] = member
        self._groups[group_id] = group
        return group, member

    def _known_member(self, group_id: str, member_id: str) -> tuple[ShareGroup, ShareMember]:
        group = self._groups.get(group_id)
        member = group.members.get(member_id) if group is not None else None
        if group is None or member is None:
            raise UnknownMember(f"no member {member_id!r} in group {group_id!r}")
        return group, member

    def _save_member(self, group: ShareGroup, member: ShareMember) -> None:
        now = member.save()
        if now != member.saved:
            member.saved = now
            self._stage(lambda entry: entry.put(SHARE_MEMBERS, member_key(group, member), now))

    def _stage(self, change: Callable[[Entry], None]) -> None:
        """Not awaited: what a crash loses is done again."""
        entry = self._shard.group()
        change(entry)
        try:
            entry.commit(lazy=True)
        except HeadraceError:
            pass  # callers that wait for durability get the disk's error

    def check_member(self, group_id: str, member_id: str) -> ShareGroup:
        group = self._groups.get(group_id)
        if group is None:
            raise UnknownMember(f"no share group {group_id!r}")
        return group

    def _keep_alive(self, group: ShareGroup, member: ShareMember) -> None:
        session_s = self.settings_of(group.group_id).session_timeout_ms / 1000
        member.deadline = self._clock.monotonic() + session_s
        if member.timer is None:
            member.timer = self._timers.call_later(session_s, lambda: self._session_over(group, member))

    def _session_over(self, group: ShareGroup, member: ShareMember) -> None:
        member.timer = None
        if group.members.get(member.member_id) is not member:
            return
        left_s = member.deadline - self._clock.monotonic()
        if left_s > 0:
            member.timer = self._timers.call_later(left_s, lambda: self._session_over(group, member))
        else:
            self._drop(group, member)
            self.release_member(group, member.member_id)

    def _drop(self, group: ShareGroup, member: ShareMember) -> None:
        """Remove a member. Its acquired records stay locked until its share session or the locks end: a member may
        leave first and acknowledge afterwards."""
        if member.timer is not None:
            member.timer.cancel()
            member.timer = None
        group.members.pop(member.member_id, None)
        self._budget.keep(member, 0)
        self._stage(lambda entry: entry.delete(SHARE_MEMBERS, member_key(group, member)))
        group.epoch += 1
        if not group.members and not group.partitions:
            self._groups.pop(group.group_id, None)

    # Records.

    async def begin(self, group: ShareGroup, partitions: Iterable[Partition]) -> None:
        """Set the group's start offset on partitions that are new to it, durably."""
        logs = [partition.log for partition in partitions if partition.log_id not in group.partitions]
        if not logs:
            return
        async with self._beginning:  # concurrent members: the first one sets the start
            config = self.settings_of(group.group_id)
            starts = {log: await self._beginning_of(log, config) for log in logs if log.id not in group.partitions}
            await self._set(group, {log: SharePartition(offset) for log, offset in starts.items()})

    async def _beginning_of(self, log: Log, config: GroupConfig) -> int:
        if config.start == EARLIEST:
            return log.start_offset
        if config.start_age_ms is None:
            return log.visible_end
        since_ms = max(0, self._clock.now_ms() - config.start_age_ms)
        found = await when_loaded(lambda: log.offset_for_timestamp_now(since_ms))
        return log.visible_end if found is None else found[0]

    async def _set(self, group: ShareGroup, started: Mapping[Log, SharePartition]) -> None:
        entry = self._shard.group()
        for log, share in started.items():
            entry.put(SHARES, share_key(group, log.id), share.save())
        await entry.commit()
        kept = self._groups.setdefault(group.group_id, group)  # the group's last member may have left meanwhile
        for share in started.values():
            share.settings = self.settings_of(group.group_id)
        kept.partitions.update({log.id: share for log, share in started.items() if not log.is_deleted})

    def partition(self, group: ShareGroup, log_id: int) -> SharePartition:
        known = group.partitions.get(log_id)
        if known is None:
            raise InvalidRecordState(f"group {group.group_id!r} does not read log {log_id}")
        return known

    def lock_deadline(self, group: ShareGroup) -> float:
        """The deadline of a lock that is taken now. Starts the timer that ends it."""
        lock_s = self.settings_of(group.group_id).lock_ms / 1000
        deadline = self._clock.monotonic() + lock_s
        if (
            self._lock_timer is not None and deadline < self._lock_look
        ):  # the timer was set for another group's longer locks
            self._lock_timer.cancel()
            self._lock_timer = None
        if self._lock_timer is None:
            self._lock_timer = self._timers.call_later(lock_s, self._locks_over)
            self._lock_look = deadline
        return deadline

    def _locks_over(self) -> None:
        self._lock_timer = None
        now = self._clock.monotonic()
        deadlines = []
        for group in self._groups.values():
            self._save_returned(group, [one for one, share in group.partitions.items() if share.release_expired(now)])
            deadlines += [left for one in group.partitions.values() if (left := one.next_deadline()) is not None]
        if deadlines:
            left_s = max(0.01, min(deadlines) - now)
            self._lock_timer = self._timers.call_later(left_s, self._locks_over)
            self._lock_look = now + left_s

    def release(self, group_id: str, member_id: str) -> None:
        """Return the records of a member whose connection ended; it may reconnect."""
        group = self._groups.get(group_id)
        if group is not None:
            self.release_member(group, member_id)

    def release_member(self, group: ShareGroup, member_id: str) -> None:
        held = [one for one, share in group.partitions.items() if share.release_member(member_id)]
        self._save_returned(group, held)

    def _save_returned(self, group: ShareGroup, log_ids: list[int]) -> None:
        """Save the delivery counts of returned records, and notify waiting members."""
        if log_ids:
            self._stage(lambda entry: self._put(entry, group, log_ids))
            self._notify(group)

    def _notify(self, group: ShareGroup) -> None:
        for callback in list(group.waiting):
            callback()

    async def save(self, group: ShareGroup, log_ids: list[int], *, is_news: bool) -> None:
        """Save the group; durable on return. Notifies waiting members if records were released or locks became free."""
        entry = self._shard.group()
        self._put(entry, group, log_ids)
        await entry.commit()
        if is_news:
            self._notify(group)

    def _put(self, entry: Entry, group: ShareGroup, log_ids: list[int]) -> None:
        for log_id in log_ids:
            entry.put(SHARES, share_key(group, log_id), group.partitions[log_id].save())

    # Administration. What a member holds or waits for may not be pulled away from under it.

    def _idle(self, group_id: str) -> ShareGroup:
        group = self.known(group_id)
        if group.members:
            raise GroupNotEmpty(f"share group {group_id!r} has members")
        return group

    async def move(self, group_id: str, starts: Mapping[Partition, int]) -> None:
        """Reset the group: offsets below the given ones count as settled, all others do not. Creates the group if it
        does not exist; its first member then starts at these offsets."""
        check_group_id(group_id)
        if not starts:
            return
        async with self._beginning:
            started = {partition.log: SharePartition(offset) for partition, offset in starts.items()}
            if group_id not in self._groups:
                await self._set(ShareGroup(group_id), started)
                return
            group = self._idle(group_id)
            with self._hidden(group, [log.id for log in started]):
                await self._set(group, started)

    async def forget(self, group_id: str, log_ids: Iterable[int]) -> None:
        """Forget the group's progress on these logs."""
        async with self._beginning:
            await self._forget(self._idle(group_id), log_ids)

    async def _forget(self, group: ShareGroup, log_ids: Iterable[int]) -> None:
        entry = self._shard.group()
        with self._hidden(group, log_ids) as gone:
            for log_id in gone:
                entry.delete(SHARES, share_key(group, log_id))
            await entry.commit()

    @contextmanager
    def _hidden(self, group: ShareGroup, log_ids: Iterable[int]) -> Iterator[Iterable[int]]:
        """Hide partitions while a change is written. A member that joins meanwhile waits in begin() for the result
        instead of reading state that is about to be removed."""
        held = {log_id: group.partitions.pop(log_id) for log_id in log_ids if log_id in group.partitions}
        try:
            yield held
        except HeadraceError:
            kept = self._groups.setdefault(group.group_id, group)
            kept.partitions.update({log_id: one for log_id, one in held.items() if log_id in self._shard.logs})
            raise

    async def delete(self, group_id: str) -> None:
        """Delete the group. Its configuration stays, as in Kafka."""
        async with self._beginning:
            group = self._idle(group_id)
            await self._forget(group, list(group.partitions))
            if self._groups.get(group_id) is group and not group.members:
                del self._groups[group_id]

    def topic_deleted(self, topic: str, log_ids: list[int]) -> None:
        for group in self._groups.values():
            for member in group.members.values():  # a new topic of the same name has another id
                member.is_outdated = member.is_outdated or any(name == topic for name, _ in member.assigned)
                self._save_member(group, member)
            gone = [log_id for log_id in log_ids if group.partitions.pop(log_id, None) is not None]
            if gone:
                self._stage(partial(self._remove, group, gone))

    def _remove(self, group: ShareGroup, log_ids: list[int], entry: Entry) -> None:
        for log_id in log_ids:
            entry.delete(SHARES, share_key(group, log_id))


def _member_bytes(topics: frozenset[str], partitions: int) -> int:
    return MEMBER_BYTES + topics_bytes(topics) + NAME_BYTES * partitions


def share_key(group: ShareGroup, log_id: int) -> bytes:
    return group.group_id.encode() + b"\0" + str(log_id).encode()


def member_key(group: ShareGroup, member: ShareMember) -> bytes:
    return group.group_id.encode() + b"\0" + member.member_id.encode()
