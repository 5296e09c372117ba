"""The registry of share groups (KIP-932): members acquire single records of shared partitions.

Every member reads all partitions of its topics; the broker locks each record for the member that acquires it. The start
offset of a group is durable before its first member gets a response; settled records are durable before their
acknowledgement is confirmed.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from headrace.broker.groups.config import EARLIEST, GroupConfig
from headrace.broker.groups.config_store import GroupConfigs
from headrace.broker.groups.coordinator import check_group_id
from headrace.broker.groups.member_budget import MemberBudget
from headrace.broker.groups.share.group import ShareGroup
from headrace.broker.groups.share.membership import ShareMembership
from headrace.broker.groups.share.partition import SharePartition
from headrace.broker.groups.share.store import ShareStore
from headrace.broker.groups.timers import Timer, Timers
from headrace.broker.streams.partition import Partition, when_loaded
from headrace.clock import Clock
from headrace.errors import GroupNotEmpty, GroupNotFound, HeadraceError, InvalidRecordState, UnknownMember
from headrace.log.log import Log
from headrace.log.shard import Shard


class ShareGroups:
    """Owned by the broker; every method runs on the event loop's thread."""

    def __init__(
        self,
        shard: Shard,
        clock: Clock,
        timers: Timers,
        topics: Callable[[], Mapping[str, int]],
        budget: MemberBudget,
        configs: GroupConfigs,
    ) -> None:
        self._store = ShareStore(shard)
        self._clock = clock
        self._timers = timers
        self._configs = configs
        self._groups: dict[str, ShareGroup] = {}
        self.members = ShareMembership(
            self._groups, self._store, configs, clock, timers, topics, budget, self.release_member
        )
        self._lock_timer: Timer | None = None
        self._lock_look = 0.0  # when the timer fires
        self._beginning = asyncio.Lock()
        configs.on_change(self._configured)

    def load(self) -> None:
        for group_id, log_id, saved in self._store.partitions():
            self.group(group_id).partitions[log_id] = SharePartition(0, saved, self._configs.get(group_id))
        for group_id, member in self._store.members():
            self.members.restore(self.group(group_id), member)

    def close(self) -> None:
        self.members.close()
        if self._lock_timer is not None:
            self._lock_timer.cancel()

    def _configured(self, group_id: str, config: GroupConfig) -> None:
        group = self._groups.get(group_id)
        for share in group.partitions.values() if group is not None else ():
            share.settings = config

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

    def check_member(self, group_id: str, member_id: str) -> ShareGroup:
        group = self._groups.get(group_id)
        if group is None:
            raise UnknownMember(f"no share group {group_id!r}")
        return group

    # Records.

    async def begin(self, group: ShareGroup, partitions: Iterable[Partition]) -> None:
        """Set the group's start offset on partitions that are new to it, durably."""
        logs = [partition.log for partition in partitions if partition.log_id not in group.partitions]
        if not logs:
            return
        async with self._beginning:  # concurrent members: the first one sets the start
            config, now_ms = self._configs.get(group.group_id), self._clock.now_ms()
            starts = {log: await _first_offset(log, config, now_ms) for log in logs if log.id not in group.partitions}
            await self._set(group, {log: SharePartition(offset) for log, offset in starts.items()})

    async def _set(self, group: ShareGroup, started: Mapping[Log, SharePartition]) -> None:
        await self._store.put(group, {log.id: share for log, share in started.items()})
        kept = self._groups.setdefault(group.group_id, group)  # the group's last member may have left meanwhile
        for share in started.values():
            share.settings = self._configs.get(group.group_id)
        kept.partitions.update({log.id: share for log, share in started.items() if not log.is_deleted})

    def partition(self, group: ShareGroup, log_id: int) -> SharePartition:
        known = group.partitions.get(log_id)
        if known is None:
            raise InvalidRecordState(f"group {group.group_id!r} does not read log {log_id}")
        return known

    def lock_deadline(self, group: ShareGroup) -> float:
        """The deadline of a lock that is taken now. Starts the timer that ends it."""
        lock_s = self._configs.get(group.group_id).lock_ms / 1000
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
            self._store.put_later(group, {log_id: group.partitions[log_id] for log_id in log_ids})
            group.notify()

    async def save(self, group: ShareGroup, log_ids: list[int], *, is_news: bool) -> None:
        """Save the group; durable on return. Notifies waiting members if records were released or locks became free."""
        await self._store.put(group, {log_id: group.partitions[log_id] for log_id in log_ids})
        if is_news:
            group.notify()

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
        with self._hidden(group, log_ids) as gone:
            await self._store.delete(group, gone)

    @contextmanager
    def _hidden(self, group: ShareGroup, log_ids: Iterable[int]) -> Iterator[Iterable[int]]:
        """Hide partitions while a change is written. A member that joins meanwhile waits in begin() for the result
        instead of reading state that is about to be removed."""
        held = {log_id: group.partitions.pop(log_id) for log_id in log_ids if log_id in group.partitions}
        try:
            yield held
        except HeadraceError:
            kept = self._groups.setdefault(group.group_id, group)
            kept.partitions.update({log_id: one for log_id, one in held.items() if self._store.has_log(log_id)})
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
                self._store.put_member(group, member)
            gone = [log_id for log_id in log_ids if group.partitions.pop(log_id, None) is not None]
            if gone:
                self._store.delete_later(group, gone)


async def _first_offset(log: Log, config: GroupConfig, now_ms: int) -> int:
    """Where a group begins on a log that it has not read yet."""
    if config.start == EARLIEST:
        return log.start_offset
    if config.start_age_ms is None:
        return log.visible_end
    since_ms = max(0, now_ms - config.start_age_ms)
    found = await when_loaded(lambda: log.offset_for_timestamp_now(since_ms))
    return log.visible_end if found is None else found[0]
