"""Share groups (KIP-932): members that take records from the same partitions, one record at a time each.

Every member reads all partitions of its topics; the broker hands out records under a lock. What a group has
settled is durable before an acknowledgement is answered.
"""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from headrace.broker.groups.coordinator import check_group_id
from headrace.broker.groups.timers import Timer, Timers
from headrace.broker.share import SavedShare, SharePartition
from headrace.clock import Clock
from headrace.errors import FencedMemberEpoch, HeadraceError, InvalidInput, UnknownMember
from headrace.log.log import Log
from headrace.log.shard import Shard

SHARES = "shares"
CONFIGS = "group.configs"
LEAVE_EPOCH = -1
TopicPartition = tuple[str, int]


class ShareSettings(msgspec.Struct, frozen=True, kw_only=True):
    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    lock_ms: int = 30_000


@dataclass(slots=True)
class ShareMember:
    member_id: str
    client_id: str = ""
    client_host: str = ""
    rack_id: str | None = None
    topics: frozenset[str] = frozenset()
    epoch: int = 0
    assigned: frozenset[TopicPartition] = frozenset()
    timer: Timer | None = None
    deadline: float = 0.0


@dataclass(slots=True)
class ShareGroup:
    group_id: str
    epoch: int = 0
    members: dict[str, ShareMember] = field(default_factory=dict)
    partitions: dict[int, SharePartition] = field(default_factory=dict)  # by log id
    from_start: bool = False  # share.auto.offset.reset=earliest
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # something came back

    @property
    def state(self) -> str:
        return "Stable" if self.members else "Empty"


class ShareGroups:
    """Owned by the broker; every method runs on the loop's thread."""

    def __init__(
        self, shard: Shard, clock: Clock, timers: Timers, topics: Callable[[], Mapping[str, int]]
    ) -> None:
        self.settings = ShareSettings()
        self._shard = shard
        self._clock = clock
        self._timers = timers
        self._topics = topics
        self._groups: dict[str, ShareGroup] = {}
        self._lock_timer: Timer | None = None

    def load(self) -> None:
        for key, value in self._shard.state.items(CONFIGS):
            self.group(key.decode()).from_start = value == b"earliest"
        for key, value in self._shard.state.items(SHARES):
            group_id, _, log_id = key.rpartition(b"\0")
            saved = msgspec.msgpack.decode(value, type=SavedShare)
            self.group(group_id.decode()).partitions[int(log_id)] = SharePartition(0, saved)

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

    async def configure(self, group_id: str, from_start: bool) -> None:
        """Where the group begins on partitions it has not read yet."""
        self.group(group_id).from_start = from_start
        entry = self._shard.group()
        entry.put(CONFIGS, group_id.encode(), b"earliest" if from_start else b"latest")
        await entry.commit()

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
        """(the member, whether its assignment is news to it)."""
        group = self.group(group_id)
        member = group.members.get(member_id)
        if epoch == LEAVE_EPOCH:
            if member is None:
                raise UnknownMember(f"no member {member_id!r} in group {group_id!r}")
            self._drop(group, member)
            member.epoch = LEAVE_EPOCH
            return member, False
        if epoch == 0:
            if topics is None:
                raise InvalidInput("a member that joins says what it subscribes to")
            member = member or ShareMember(member_id or str(uuid.uuid4()))
            group.members[member.member_id] = member
        elif member is None:
            raise UnknownMember(f"no member {member_id!r} in group {group_id!r}")
        elif epoch > member.epoch or epoch < member.epoch - 1:
            raise FencedMemberEpoch(f"epoch {epoch}, the member is at {member.epoch}")
        member.client_id, member.client_host, member.rack_id = client_id, client_host, rack_id
        if topics is not None:
            member.topics = topics
        self._keep_alive(group, member)
        counts = self._topics()
        wanted = frozenset(
            (topic, number) for topic in member.topics if topic in counts for number in range(counts[topic])
        )
        is_news = wanted != member.assigned or epoch == 0
        if is_news:
            group.epoch += 1
            member.assigned, member.epoch = wanted, group.epoch
        return member, is_news or epoch != member.epoch

    def check_member(self, group_id: str, member_id: str) -> ShareGroup:
        group = self._groups.get(group_id)
        if group is None:
            raise UnknownMember(f"no share group {group_id!r}")
        return group

    def _keep_alive(self, group: ShareGroup, member: ShareMember) -> None:
        session_s = self.settings.session_timeout_ms / 1000
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

    def _drop(self, group: ShareGroup, member: ShareMember) -> None:
        if member.timer is not None:
            member.timer.cancel()
            member.timer = None
        group.members.pop(member.member_id, None)
        group.epoch += 1
        self.release_member(group, member.member_id)

    # Records.

    def partition(self, group: ShareGroup, log: Log) -> SharePartition:
        known = group.partitions.get(log.id)
        if known is None:
            start = log.start_offset if group.from_start else log.visible_end
            known = group.partitions[log.id] = SharePartition(start)
        return known

    def lock_deadline(self) -> float:
        """When a lock taken now ends. Starts the clock that ends it."""
        lock_s = self.settings.lock_ms / 1000
        if self._lock_timer is None:
            self._lock_timer = self._timers.call_later(lock_s, self._locks_over)
        return self._clock.monotonic() + lock_s

    def _locks_over(self) -> None:
        self._lock_timer = None
        now = self._clock.monotonic()
        deadlines = []
        for group in self._groups.values():
            came_back = [one.release_expired(now) for one in group.partitions.values()]
            if any(came_back):
                self._wake(group)
            deadlines += [
                left for one in group.partitions.values() if (left := one.next_deadline()) is not None
            ]
        if deadlines:
            self._lock_timer = self._timers.call_later(max(0.01, min(deadlines) - now), self._locks_over)

    def release_member(self, group: ShareGroup, member_id: str) -> None:
        came_back = [one.release_member(member_id) for one in group.partitions.values()]
        if any(came_back):
            self._wake(group)

    def _wake(self, group: ShareGroup) -> None:
        group.changed.set()
        group.changed = asyncio.Event()

    async def save(self, group: ShareGroup, log_ids: list[int]) -> None:
        """Durable on return. Also wakes those who wait for what was released."""
        entry = self._shard.group()
        for log_id in log_ids:
            key = group.group_id.encode() + b"\0" + str(log_id).encode()
            entry.put(SHARES, key, group.partitions[log_id].save())
        await entry.commit()
        self._wake(group)

    def topic_deleted(self, log_ids: list[int]) -> None:
        for group in self._groups.values():
            gone = [log_id for log_id in log_ids if group.partitions.pop(log_id, None) is not None]
            if gone:
                entry = self._shard.group()
                for log_id in gone:
                    entry.delete(SHARES, group.group_id.encode() + b"\0" + str(log_id).encode())
                try:
                    entry.commit(lazy=True)
                except HeadraceError:
                    return
